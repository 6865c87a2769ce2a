"""C14 to C16: an error in any spelling at any place is an error, with the server's words; and when the call is sent again."""

from __future__ import annotations

import email.utils
import time
from typing import Any

import pytest

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.cases.play import (
    AB,
    BOM,
    DONE,
    END,
    ROLE,
    STOP,
    WAYS,
    Want,
    ask,
    choice,
    data,
    delta,
    nothing_left,
    play,
    tool,
)
from tests.support import NEVER, assert_adds_up, hello, serving

way_of = pytest.mark.parametrize("way", WAYS)
Rate, Server, Bad, Over = errors.RateLimited, errors.ServerError, errors.BadRequest, errors.Overloaded

# --- C14: an event says so -----------------------------------------------------------------------------------------------

QUOTA = {"message": "quota", "type": "rate_limit", "code": 429}
#: The event, and the error: class, words, code. Sent again by the class of the code alone.
SPELLINGS: dict[str, tuple[bytes, type[errors.ServerError], str, Any]] = {
    "an object": (data({"error": QUOTA}), Rate, "quota", 429),
    "code as text": (data({"error": {"message": "quota", "code": "429"}}), Rate, "quota", "429"),
    "code as a word": (
        data({"error": {"message": "quota", "code": "rate_limit_exceeded"}}),
        Server,
        "quota",
        "rate_limit_exceeded",
    ),
    "code null": (
        data({"error": {"message": "quota", "code": None, "param": None, "type": "busy"}}),
        Server,
        "quota",
        "busy",
    ),
    "code 504": (data({"error": {"message": "late", "code": 504}}), Server, "late", 504),
    "code 503": (data({"error": {"message": "busy", "code": 503}}), Over, "busy", 503),
    "code 400": (data({"error": {"message": "too long", "code": 400}}), Bad, "too long", 400),
    "code 401": (data({"error": {"message": "no", "code": 401}}), errors.AuthenticationFailed, "no", 401),
    "status for code": (data({"error": {"message": "busy", "status": 503}}), Over, "busy", 503),
    "status as a word": (
        data({"error": {"message": "q", "code": 429, "status": "RESOURCE_EXHAUSTED"}}),
        Rate,
        "q",
        429,
    ),
    "plain words": (data({"error": "plain words"}), Server, "plain words", None),
    "words and a code": (data({"error": "plain words", "code": 503}), Over, "plain words", 503),
    "a list": (data({"error": ["a", "b"]}), Server, "b", None),
    "a number": (data({"error": 7}), Server, "7", None),
    "true": (data({"error": True}), Server, "", None),
    "no message": (data({"error": {"code": 500}}), Server, "", 500),
    "message null": (data({"error": {"message": None, "code": 500}}), Server, "", 500),
    "message is an object": (data({"error": {"message": {"reason": "deep"}, "code": 500}}), Server, "deep", 500),
    "detail": (data({"error": {"detail": "out of memory"}}), Server, "out of memory", None),
    "object error": (data({"object": "error", "message": "too long", "code": 400}), Bad, "too long", 400),
    "type error": (
        data({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}),
        Server,
        "busy",
        "overloaded_error",
    ),
    "with choices": (data({"error": QUOTA, **choice("error", content="")}), Rate, "quota", 429),
    "with choices null": (data({"error": QUOTA, "choices": None, "usage": None}), Rate, "quota", 429),
    "with other characters": (data({"error": {"message": "café 🙂\u2028", "code": 400}}), Bad, "café 🙂", 400),
    "with half a character": (data(b'{"error":{"message":"q\xff","code":429}}'), Rate, "q\ufffd", 429),
    "with half a pair": (data(rb'{"error":{"message":"quota \ud83d","code":429}}'), Rate, "quota", 429),
    "on several lines": (b'data: {"error":\ndata: {"message":"quota",\ndata: "code":429}}\n\n', Rate, "quota", 429),
    "an error event": (b"event: error\n" + data(QUOTA), Rate, "quota", 429),
    "an error event around an error": (b"event: error\n" + data({"error": QUOTA}), Rate, "quota", 429),
    "an error event of words": (b"event: error\ndata: plain words\n\n", Server, "plain words", None),
    "an error event of text": (b'event: error\ndata: "plain words"\n\n', Server, "plain words", None),
    "an error event without space": (b"event:error\ndata:" + data(QUOTA)[6:], Rate, "quota", 429),
    "the event's name last": (data(QUOTA, b"\n") + b"event: error\n\n", Rate, "quota", 429),
}
TOOL = tool({"index": 0, "id": "t1", "function": {"name": "f", "arguments": '{"a":1}'}})
#: What comes before it, and what has been delivered by then.
PLACES: dict[str, tuple[list[bytes], Want]] = {
    "first": ([], Want(finish=None)),
    "after a comment": ([b": OPENROUTER PROCESSING\n\n"], Want(finish=None)),
    "after the role": ([ROLE], Want(finish=None)),
    "after content": ([ROLE, AB], Want("ab", finish=None)),
    "after reasoning": ([delta(reasoning_content="hm")], Want(reasoning="hm", finish=None)),
    "after a tool delta": ([TOOL], Want(tools=[("t1", "f", '{"a":1}')], finish=None)),
    "after the finish": ([AB, STOP], Want("ab")),
}


def wanted(place: Want, kind: type[errors.ServerError], says: str, code: Any) -> Want:
    content = place.text or place.reasoning or place.tools
    retried = not content and errors.server_error("", code=code).retryable
    return place._replace(error=kind, says=says, code=code, status=200, requests=3 if retried else 1)


@way_of
@pytest.mark.parametrize("name", SPELLINGS)
def test_an_error_in_any_spelling(name: str, way: str) -> None:
    event, *kind = SPELLINGS[name]
    for place in ("first", "after content"):
        before, want = PLACES[place]
        play(way, Script(writes=[*before, event, DONE]), wanted(want, *kind))


@way_of
@pytest.mark.parametrize("after", [[DONE], [], [AB, END]], ids=["done", "end", "content"])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_at_any_place(place: str, after: list[bytes], way: str) -> None:
    before, want = PLACES[place]
    for name in ("an object", "plain words", "an error event"):
        event, *kind = SPELLINGS[name]
        play(way, Script(writes=[*before, event, *after]), wanted(want, *kind), then=False)


@way_of
@pytest.mark.parametrize("empty", [None, False, "", {}, [], 0], ids=repr)
def test_an_error_that_is_empty_is_none(empty: Any, way: str) -> None:
    events = [data({"error": empty, **choice(content="a")}), data({**choice(content="b"), "error": empty})]
    play(way, Script(writes=[*events, data({**choice("stop"), "error": empty}), DONE]), Want("ab"))


@way_of
def test_an_error_that_is_over_is_sent_again(way: str) -> None:
    """Before content, by the class of the code: the caller sees nothing of it."""
    for event in (SPELLINGS["an object"][0], SPELLINGS["an error event"][0], SPELLINGS["code 504"][0]):
        with LoopbackServer() as server, nothing_left(server):
            server.script(Script(writes=[ROLE, event, DONE]), times=1)
            seen = ask(way, server.endpoint(retries=spanwire.Retries(base_s=0)))
            assert len(server.requests) == 2
        assert (seen.error, seen.got.text, seen.known.outcome) == (None, "You said: Say hello", "completed")
        assert len(seen.known.to_dict()["attempts"]) == 2


# --- C15: it is in no event --------------------------------------------------------------------------------------------

CONTEXT = b'{"error":{"message":"context size exceeded","code":400}}'
PRETTY = b'{\n  "error": {\n    "message": "context size exceeded",\n    "code": 400\n  }\n}\n'
REFUSED = Want(finish=None, error=Bad, says="context size exceeded", code=400)
PAGE = b"<!DOCTYPE html>\n<html><title>Maintenance</title></html>\n"

NO_EVENT: dict[str, tuple[list[bytes], Want]] = {
    "(a) an error field": ([b"error: " + CONTEXT[9:-1] + b"\n\n", DONE], REFUSED),
    "(a) without [DONE]": ([b"error: " + CONTEXT[9:-1] + b"\n\n"], REFUSED),
    "(a) without a line end": ([b"error: " + CONTEXT[9:-1]], REFUSED),
    "(a) without a space": ([b"error:" + CONTEXT[9:-1] + b"\n\n", DONE], REFUSED),
    "(a) around an error": ([b"error: " + CONTEXT + b"\n\n", DONE], REFUSED),
    "(a) of words": ([b"error: context size exceeded\n\n", DONE], REFUSED._replace(error=Server, code=None)),
    "(a) after a comment": ([b": ping\n\n", b"error: " + CONTEXT[9:-1] + b"\n\n", DONE], REFUSED),
    "(a) after a role": ([ROLE, b"error: " + CONTEXT[9:-1] + b"\n\n", DONE], REFUSED),
    "(a) after content": ([AB, b"error: " + CONTEXT[9:-1] + b"\n\n", DONE], REFUSED._replace(text="ab")),
    "(a) after content, without [DONE]": ([AB, b"error: " + CONTEXT[9:-1] + b"\n\n"], REFUSED._replace(text="ab")),
    "(b) JSON": ([CONTEXT], REFUSED),
    "(b) JSON, pretty": ([PRETTY], REFUSED),
    "(b) JSON after a BOM": ([BOM + CONTEXT], REFUSED),
    "(b) JSON after blank lines": ([b"\n\n", CONTEXT], REFUSED),
    "(b) JSON, then [DONE]": ([CONTEXT + b"\n\n", DONE], REFUSED),
    "(b) JSON after a comment": ([b": OPENROUTER PROCESSING\n\n", CONTEXT], REFUSED),
    "(b) JSON after a comment, pretty": ([b": ping\n\n", PRETTY], REFUSED),
    "(b) JSON after a role": ([ROLE, CONTEXT], REFUSED),
    "(b) JSON after content": ([AB, CONTEXT], REFUSED._replace(text="ab")),
    "(b) JSON after content, pretty": ([AB, PRETTY], REFUSED._replace(text="ab")),
    "(b) words for an error": ([b'{"error":"context size exceeded"}'], REFUSED._replace(error=Server, code=None)),
    "(b) in a list": ([b"[" + CONTEXT + b"]"], REFUSED),
    "(c) a page": ([PAGE], Want(finish=None, error=errors.ProtocolError, says="Maintenance")),
    "(c) a page after a BOM": ([BOM + PAGE], Want(finish=None, error=errors.ProtocolError, says="Maintenance")),
    "(c) a page after a comment": ([b": ping\n\n", PAGE], Want(finish=None, error=errors.ProtocolError, says="html")),
    "(c) plain text": (
        [b"upstream not ready"],
        Want(finish=None, error=errors.ProtocolError, says="upstream not ready"),
    ),
    "(c) bytes": ([b"\x00\x01\x02\xff" * 300], Want(finish=None, error=errors.ProtocolError)),
    "(d) [DONE] alone": ([DONE], Want(finish=None, error=(errors.Truncated, errors.ProtocolError), requests=3)),
    "(d) [DONE] after comments": (
        [b": a\n\n", DONE],
        Want(finish=None, error=(errors.Truncated, errors.ProtocolError), requests=3),
    ),
    "(d) [DONE] without data": ([b"[DONE]\n\n"], Want(finish=None, error=(errors.Truncated, errors.ProtocolError))),
    "an event that is no JSON": ([data(b"oh no")], Want(finish=None, error=errors.ProtocolError, says="oh no")),
    "an event that is no object": ([data(b"5"), DONE], Want(finish=None, error=errors.ProtocolError, says="5")),
    "an event that is no JSON, after content": (
        [AB, data(b"oh no"), END],
        Want("ab", finish=None, error=errors.ProtocolError),
    ),
}


@way_of
@pytest.mark.parametrize("name", NO_EVENT)
def test_a_body_that_holds_no_answer(name: str, way: str) -> None:
    writes, want = NO_EVENT[name]
    for seen in play(way, Script(writes=writes), want):
        assert seen.error is not None
        assert seen.error.reply is not None
        if isinstance(seen.error, errors.ProtocolError):
            assert len(seen.error.message) < 100 + 4 * 200  # at most 200 characters of the body, some as \\xff
        if not want.text:
            assert not any(chunk.has_content for chunk in seen.chunks)


@way_of
@pytest.mark.parametrize(
    "content_type", ["text/event-stream", "application/json", "text/html", "application/octet-stream"]
)
def test_the_content_type_does_not_change_what_it_is(content_type: str, way: str) -> None:
    play(way, Script(body=CONTEXT, content_type=content_type), REFUSED)
    play(
        way,
        Script(body=PAGE, content_type=content_type),
        Want(finish=None, error=errors.ProtocolError, says="Maintenance"),
    )


# --- C16: statuses, and when to come back ----------------------------------------------------------------------------------

BODIES: dict[str, tuple[bytes, str, Any]] = {
    "plain text": (b"slow down", "slow down", None),
    "words": (b'{"error":"rate limited"}', "rate limited", None),
    "an object": (b'{"error":{"message":"rate limited","code":"x"}}', "rate limited", "x"),
    "no error in it": (b'{"message":"rate limited"}', "rate limited", None),
    "detail": (b'{"detail":"rate limited"}', "rate limited", None),
    "a list": (b'[{"error":{"message":"rate limited","code":7}}]', "rate limited", 7),
    "a text": (b'"rate limited"', "rate limited", None),
    "an event": (data({"error": {"message": "rate limited"}}), "rate limited", None),
    "empty": (b"", "{status}", None),
    "blank": (b" \r\n", "{status}", None),
    "an empty object": (b"{}", "{status}", None),
    "an empty list": (b"[]", "{status}", None),
    "null": (b"null", "{status}", None),
    "an empty error": (b'{"error":{}}', "{status}", None),
    "a page": (b"<html><h1>Bad Gateway</h1>" + b"x" * 5000, "{status}", None),
    "broken JSON": (b'{"error":{"mess', "", None),
    "broken characters": (b"slow\xff down", "slow\ufffd down", None),
    "large": (b"slow down " * 20_000, "slow down", None),
}


@way_of
@pytest.mark.parametrize("status", [429, 503, 502, 418])
def test_a_status_with_any_body(status: int, way: str) -> None:
    """One manager's calls, one body after the other."""
    kind = {429: Rate, 503: Over, 400: Bad, 418: Bad}.get(status, Server)
    with LoopbackServer() as server, nothing_left(server):
        for body, says, code in BODIES.values():
            server.script(Script(status=status, body=body, content_type="text/html"), model="m", times=1)
            error = ask(way, server.endpoint(retries=NEVER)).error
            assert type(error) is kind
            assert (error.status, error.code) == (status, code)
            assert says.format(status=status) in error.message
            assert len(error.message) <= 1000


LATER = 30


def http_date(ahead_s: float, form: str = "") -> str:
    moment = time.gmtime(time.time() + ahead_s)
    return time.strftime(form, moment) if form else email.utils.formatdate(time.time() + ahead_s, usegmt=True)


#: Headers, and the least and the most seconds that the error says; None: it says nothing.
RETRY_AFTER: dict[str, tuple[dict[str, str], tuple[float, float] | None]] = {
    "(a) seconds": ({"Retry-After": "3"}, (3, 3)),
    "(a) none": ({"Retry-After": "0"}, (0, 0)),
    "(a) with a fraction": ({"retry-after": "1.5"}, (1.5, 1.5)),
    "(a) with spaces": ({"RETRY-AFTER": "  3  "}, (3, 3)),
    "(b) a date": ({"Retry-After": "IMF"}, (LATER - 2, LATER + 1)),
    "(b) a date of RFC 850": ({"Retry-After": "%A, %d-%b-%y %H:%M:%S GMT"}, (LATER - 2, LATER + 1)),
    "(b) a date of asctime": ({"Retry-After": "%a %b %d %H:%M:%S %Y"}, (LATER - 2, LATER + 1)),
    "(c) a date in the past": ({"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"}, (0, 0)),
    "(d) negative": ({"Retry-After": "-5"}, None),
    "(d) a negative fraction": ({"Retry-After": "-0.5"}, None),
    "(e) an hour": ({"Retry-After": "3600"}, (3600, 3600)),
    "(e) for ever": ({"Retry-After": "9" * 400}, (1e9, float("inf"))),
    "(f) a superscript": ({"Retry-After": "\u00b2"}, None),
    "(f) words": ({"Retry-After": "soon"}, None),
    "(f) empty": ({"Retry-After": ""}, None),
    "(f) a number that is none": ({"Retry-After": "nan"}, None),
    "(f) infinity": ({"Retry-After": "inf"}, None),
    "(f) an exponent": ({"Retry-After": "1e3"}, None),
    "(f) two of them": ({"Retry-After": "3, 5"}, None),
    "(f) a date that is none": ({"Retry-After": "Sun, 99 Nov 1994 99:49:37 GMT"}, None),
    "(g) milliseconds": ({"retry-after-ms": "250"}, (0.25, 0.25)),
    "(g) both": ({"retry-after-ms": "250", "Retry-After": "9"}, (0.25, 0.25)),
    "(g) milliseconds that are none": ({"retry-after-ms": "x", "Retry-After": "9"}, (9, 9)),
    "(g) negative milliseconds": ({"retry-after-ms": "-250"}, None),
}


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_retry_after_in_any_form(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A date is in GMT whatever its form (RFC 9110 section 5.6.7), and wherever the client is."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        with LoopbackServer() as server, nothing_left(server):
            wrong = {}
            for name, (headers, said) in RETRY_AFTER.items():
                dated = {
                    k: http_date(LATER, "" if v == "IMF" else v) if "IMF" in v or "%" in v else v
                    for k, v in headers.items()
                }
                server.script(Script(status=429, headers=dated), model="m", times=1)
                error = ask("async complete", server.endpoint(retries=NEVER)).error
                assert isinstance(error, Rate)
                found = error.retry_after_s
                if (found is None) is not (said is None) or (
                    said and found is not None and not said[0] <= found <= said[1]
                ):
                    wrong[name] = found
        assert wrong == {}
    finally:
        monkeypatch.undo()
        time.tzset()


@way_of
@pytest.mark.parametrize("status", [429, 503])
def test_the_wait_is_kept_and_belongs_to_no_attempt(status: int, way: str) -> None:
    with serving(Script(status=status, headers={"retry-after-ms": "150"}), hello()) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=spanwire.Retries(base_s=0)))
        first, second = server.requests
        assert first.ended_ns is not None
        assert (second.arrived_ns - first.ended_ns) / 1e9 >= 0.15
    assert seen.known.outcome == "completed"
    assert seen.known.segments["queue"].parts["backoff"].duration_s >= 0.15
    assert sum(attempt["total_s"] for attempt in seen.known.to_dict()["attempts"]) < seen.known.total_s - 0.15
    assert_adds_up(seen.known)


def test_a_date_is_waited_for_to_its_end() -> None:
    due = int(time.time()) + 2
    header = {"Retry-After": email.utils.formatdate(due, usegmt=True)}
    with serving(Script(status=503, headers=header), hello()) as server, nothing_left(server):
        seen = ask("async stream", server.endpoint(retries=spanwire.Retries(base_s=0)))
        assert time.time() >= due
    assert seen.known.outcome == "completed"


@way_of
@pytest.mark.parametrize("ask_for", ["20", "date"])
def test_a_long_wait_is_begun_if_it_is_allowed(ask_for: str, way: str) -> None:
    """Not waited for here: the total limit ends it, in phase queue, and the time is back-off."""
    header = {"Retry-After": http_date(20) if ask_for == "date" else ask_for}
    with serving(Script(status=429, headers=header)) as server, nothing_left(server):
        retries, timeouts = spanwire.Retries(max_wait_s=60), spanwire.Timeouts(total_s=0.15)
        seen = ask(way, server.endpoint(retries=retries, timeouts=timeouts))
        assert len(server.requests) == 1
    assert isinstance(seen.error, errors.CallTimeout)
    assert (seen.error.limit, seen.error.phase) == ("total_s", "queue")
    assert seen.known.segments["queue"].parts["backoff"].duration_s >= 0.1
    assert_adds_up(seen.known)


@way_of
@pytest.mark.parametrize("header", ["3600", "9" * 400, "date"])
def test_an_absurd_wait_is_an_error_at_once(header: str, way: str) -> None:
    """Above the cap of Retries: the error carries what was asked for."""
    value = http_date(3600) if header == "date" else header
    with serving(Script(status=429, body=b"slow down", headers={"Retry-After": value})) as server, nothing_left(server):
        seen = ask(way, server.endpoint())
        assert len(server.requests) == 1
    assert isinstance(seen.error, Rate)
    assert seen.error.retry_after_s is not None
    assert seen.error.retry_after_s >= 3590
    assert "slow down" in str(seen.error)
    assert seen.known.total_s < 1


@way_of
@pytest.mark.parametrize(
    "name", ["(c) a date in the past", "(d) negative", "(f) a superscript", "(f) words", "(f) two of them"]
)
def test_what_says_nothing_leaves_the_normal_back_off(name: str, way: str) -> None:
    with serving(Script(status=429, headers=RETRY_AFTER[name][0]), hello()) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=spanwire.Retries(base_s=0.001)))
        assert len(server.requests) == 2
    assert seen.known.outcome == "completed"
    assert seen.known.total_s < 1


@way_of
def test_an_error_inside_a_stream_heeds_the_heads_retry_after(way: str) -> None:
    script = Script(writes=[SPELLINGS["code 503"][0]], headers={"retry-after-ms": "100"})
    with serving(script, hello()) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=spanwire.Retries(base_s=0)))
    assert seen.known.segments["queue"].parts["backoff"].duration_s >= 0.1
