"""C30, C32, C33: one span for each call however it ends, three first times that mean what they say, clean attributes."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

import spanwire
from spanwire import errors
from spanwire.hookspecs import hookimpl
from spanwire.testing import LoopbackServer, Script
from tests.cases.play import AB, DONE, END, ROLE, STOP, WAYS, ask, choice, data, delta, nothing_left, tool, whole
from tests.cases.spans import Spans, attributes
from tests.support import NEVER, assert_adds_up, chat, run, serving, wait_for

way_of = pytest.mark.parametrize("way", WAYS)

# --- C30 --------------------------------------------------------------------------------------------------------------

TEN = [delta(content=f"{n} ") for n in range(10)]
ENDS = {
    "(a) break": "closed_by_caller",
    "(b) close": "closed_by_caller",
    "(b) close, twice and then drop": "closed_by_caller",
    "(c) drop": "abandoned",
    "(d) never iterate": "abandoned",
    "(e) raise": "closed_by_caller",
    "(f) to the end": "completed",
    "(f) to the end, then close": "completed",
    "(g) cancel": "cancelled",
    "(g) cancel a read": "cancelled",
}


async def _leave(end: str, manager: spanwire.ConnectionManager, endpoint: spanwire.Endpoint) -> None:
    stream = manager.stream(endpoint, chat())
    if "drop" in end or "never" in end:
        await stream.__aenter__()
        if "never" not in end:
            await anext(stream)
            await anext(stream)
        if "close" in end:
            await stream.aclose()
            await stream.aclose()
        await asyncio.sleep(0.1)
        return
    async with stream:
        if end == "(g) cancel a read":
            await anext(stream)
            await asyncio.sleep(0)
            asyncio.current_task().cancel()  # type: ignore[union-attr]
        read = 0
        async for _ in stream:
            read += 1
            if "end" in end or read < 3:
                continue
            if "break" in end:
                break
            if "close" in end:
                await stream.aclose()
            if "raise" in end:
                raise ZeroDivisionError
            if "cancel" in end:
                raise asyncio.CancelledError
    if "then close" in end:
        await stream.aclose()


def _leave_sync(end: str, manager: spanwire.SyncConnectionManager, endpoint: spanwire.Endpoint) -> None:
    stream = manager.stream(endpoint, chat())
    if "drop" in end or "never" in end:
        stream.__enter__()
        if "never" not in end:
            next(stream)
            next(stream)
        if "close" in end:
            stream.close()
            stream.close()
        time.sleep(0.1)
        return
    with stream:
        for read, _ in enumerate(stream, 1):
            if "end" in end or read < 3:
                continue
            if "break" in end:
                break
            if "close" in end:
                stream.close()
            if "raise" in end:
                raise ZeroDivisionError
    if "then close" in end:
        stream.close()


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("end", ENDS)
def test_every_way_out_is_one_span(end: str, kind: str) -> None:
    if kind == "sync" and "cancel" in end:
        pytest.skip("synchronous code is not cancelled; test_sync.py has Ctrl-C")
    spans = Spans()
    complete = "end" in end
    script = Script(writes=[ROLE, *TEN, *([END] if complete else [])], hang_after=None if complete else 11)
    with serving(script) as server, nothing_left(server):
        endpoint = server.endpoint(retries=NEVER)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=spans.telemetry()) as manager:
                with contextlib.suppress(ZeroDivisionError, asyncio.CancelledError):
                    await asyncio.create_task(_leave(end, manager, endpoint))
                gc.collect()
                await wait_for(server, lambda s: s.requests[0].ended or s.requests[0].left)

        if kind == "async":
            run(body)
        else:
            with spanwire.SyncConnectionManager(telemetry=spans.telemetry()) as manager:
                with contextlib.suppress(ZeroDivisionError):
                    _leave_sync(end, manager, endpoint)
                gc.collect()
                server.wait_for(lambda s: s.requests[0].ended or s.requests[0].left)
    span = spans.one()
    found = attributes(span)
    assert found["spanwire.outcome"] == ENDS[end]
    assert span.status.status_code is StatusCode.UNSET
    assert "error.type" not in found
    assert found["http.response.status_code"] == 200
    assert "spanwire.time_to_first_byte" in found
    assert span.start_time is not None
    assert span.end_time is not None
    if "drop" in end or "never" in end:  # at the time of the last activity, not of the collector
        assert span.end_time - span.start_time < 0.09e9


def test_what_was_seen_by_then_is_on_the_span() -> None:
    """Usage, id and model came with the second event; the third one is never waited for."""
    spans = Spans()
    count = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    seen = data({"id": "c1", "model": "served", **choice(content="a"), "usage": count})
    with serving(Script(writes=[ROLE, seen], hang_after=2)) as server, nothing_left(server):

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=spans.telemetry()) as manager:
                async with manager.stream(server.endpoint(), chat()) as stream:
                    async for chunk in stream:
                        if chunk.text:
                            break

        run(body)
    found = attributes(spans.one())
    assert found["gen_ai.response.id"] == "c1"
    assert found["gen_ai.response.model"] == "served"
    assert "spanwire.time_to_first_content" in found
    assert found.get("gen_ai.usage.input_tokens") == 3


@pytest.mark.parametrize("kind", ["manager closed", "loop closed"])
def test_a_stream_that_outlives_its_manager_is_one_span(kind: str) -> None:
    spans = Spans()
    with serving(Script(writes=[ROLE, *TEN], hang_after=11)) as server, nothing_left(server):

        async def body() -> None:
            manager = spanwire.ConnectionManager(telemetry=spans.telemetry())
            stream = manager.stream(server.endpoint(), chat())
            await anext(stream)
            if kind == "manager closed":
                await manager.aclose()
            kept.append(stream)

        kept: list[Any] = []
        asyncio.run(body())
        kept.clear()
        gc.collect()
    span = spans.one()
    assert attributes(span)["spanwire.outcome"] in ("error", "abandoned", "closed_by_caller")


@way_of
def test_an_error_is_one_span_with_its_type(way: str) -> None:
    failed = data({"error": {"message": "secret words", "code": 429}})
    for script, kind in (
        (Script(writes=[AB]), "Truncated"),
        (Script(writes=[AB], drop_after=1), "ConnectionFailed"),
        (Script(writes=[AB, failed, DONE]), "RateLimited"),
        (Script(writes=[AB, b"error: {}\n\n", data(b"oh no")]), "ProtocolError"),
        (Script(status=503), "Overloaded"),
    ):
        spans = Spans()
        with serving(script) as server, nothing_left(server):
            ask(way, server.endpoint(retries=NEVER), telemetry=spans.telemetry())
        span = spans.one()
        assert span.status.status_code is StatusCode.ERROR
        assert (attributes(span)["error.type"], attributes(span)["spanwire.outcome"]) == (kind, "error")
        assert "secret" not in span.to_json()


@way_of
def test_unknown_usage_is_left_out_of_the_span(way: str) -> None:
    """C13 (d)."""
    spans = Spans()
    with serving(Script(writes=[AB, END])) as server, nothing_left(server):
        ask(way, server.endpoint(), telemetry=spans.telemetry())
    assert not [name for name in attributes(spans.one()) if "usage" in name]


# --- C32 --------------------------------------------------------------------------------------------------------------

PING = b": ping\n\n"
STEP = 0.025
#: One event for each step, the first one a step after the head; then in which step the first chunk and content came.
FIRSTS: dict[str, tuple[list[bytes], int | None, int | None]] = {
    "the sample": ([PING, ROLE, PING, PING, delta(reasoning_content="think"), PING, AB, STOP + DONE], 1, 4),
    "reasoning by its other name": ([ROLE, PING, delta(reasoning="think"), AB, END], 0, 2),
    "a tool call": ([PING, ROLE, PING, tool({"index": 0, "id": "t1", "function": {"name": "f"}}), AB, END], 1, 3),
    "a function call": ([ROLE, PING, delta(function_call={"name": "f", "arguments": ""}), AB, END], 0, 2),
    "content null": ([ROLE, delta(content=None), PING, AB, END], 0, 3),
    "empty pieces": ([delta(content=""), delta(content="", reasoning_content=""), delta(tool_calls=[]), AB, END], 0, 3),
    "usage first": ([data({"choices": [], "usage": {"prompt_tokens": 3}}), ROLE, AB, END], None, 2),
    "events without choices": ([data({"choices": []}), data(b""), PING, ROLE, AB, END], 3, 4),
    "at once": ([AB, PING, END], 0, 0),
    "several in one read": ([PING, PING + ROLE + AB, END], 1, 1),
    "no content": ([PING, ROLE, PING, delta(content=""), END], 1, None),
    "an id and a space": ([b"id: 1\n\n", b"\n", delta(content=" "), END], 2, 2),
}


@pytest.mark.parametrize("way", ["async stream", "sync complete"])
@pytest.mark.parametrize("name", FIRSTS)
def test_first_times_mean_what_they_say(name: str, way: str) -> None:
    """Never too early; and, unless the machine was busy three times in turn, not as late as the next event."""
    events, *firsts = FIRSTS[name]
    late: dict[str, float] = {}
    for _ in range(3):
        spans = Spans()
        script = Script(writes=events, write_gap_s=STEP, queue_s=STEP, headers_s=STEP)
        with serving(script) as server, nothing_left(server):
            seen = ask(way, server.endpoint(retries=NEVER), telemetry=spans.telemetry())
        timeline = seen.known
        assert_adds_up(timeline)
        assert timeline.first_byte_s is not None
        assert timeline.first_byte_s >= STEP * 0.95
        late = {} if timeline.first_byte_s < 2 * STEP else {"byte": timeline.first_byte_s}
        found = [timeline.first_chunk_s, timeline.first_content_s]
        for kind, step, first_s in zip(("chunk", "content"), firsts, found, strict=True):
            if step is None and kind == "chunk":  # usage alone may count, or may not
                continue
            assert (first_s is None) is (step is None)
            if first_s is not None and step is not None:
                assert first_s >= (2 + step) * STEP * 0.95
                if first_s >= (2 + step + 0.9) * STEP:
                    late[kind] = first_s
        attributed = attributes(spans.one())
        assert attributed["spanwire.time_to_first_byte"] == timeline.first_byte_s
        assert attributed.get("spanwire.time_to_first_content") == timeline.first_content_s
        assert ("first_content_s" in timeline.to_dict()) is (firsts[1] is not None)
        if way.endswith("stream"):
            assert attributed.get("gen_ai.response.time_to_first_chunk") == timeline.first_chunk_s
        if not late:
            return
    assert not late


@way_of
def test_only_comments_and_then_the_end_have_no_first_chunk(way: str) -> None:
    spans = Spans()
    with serving(Script(writes=[PING, PING])) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=NEVER), telemetry=spans.telemetry())
    assert isinstance(seen.error, errors.Truncated)
    assert seen.known.first_byte_s is not None
    assert (seen.known.first_chunk_s, seen.known.first_content_s) == (None, None)
    assert not {"spanwire.time_to_first_content", "gen_ai.response.time_to_first_chunk"} & set(attributes(spans.one()))


@pytest.mark.parametrize("kind", ["async stream", "sync stream"])
def test_a_whole_answer_without_content_has_no_first_content(kind: str) -> None:
    for body, has in ((whole(content=""), False), (whole(content=None), False), (whole(content="a"), True)):
        with serving(Script(body=body)) as server, nothing_left(server):
            seen = ask(kind, server.endpoint(retries=NEVER))
        assert (seen.known.first_content_s is not None) is has


@way_of
def test_the_wait_for_a_slot_is_no_part_of_the_model(way: str) -> None:
    with LoopbackServer(default=Script.say("a", prefill_s=0.05)) as server, nothing_left(server):
        endpoint = server.endpoint(retries=NEVER, limits=spanwire.Limits(max_concurrent=1))
        with spanwire.SyncConnectionManager() as other, other.stream(endpoint, chat("holder")) as stream:
            holder = iter(stream)
            next(holder)

            def give_back() -> None:
                time.sleep(0.3)
                stream.close()

            thread = threading.Thread(target=give_back)
            thread.start()
            seen = ask(way, endpoint)
            thread.join()
    timeline = seen.known
    assert timeline.segments["queue"].parts["local"].duration_s >= 0.2
    assert timeline.segments["model"].duration_s < 0.25
    if way.endswith("stream"):
        assert timeline.first_content_s is not None
        assert timeline.first_content_s >= 0.3
    assert_adds_up(timeline)


# --- C33 --------------------------------------------------------------------------------------------------------------


class NotGiven:
    """As openai's sentinel."""

    def __bool__(self) -> bool:
        return False


class Model(str, enum.Enum):  # noqa: UP042 - what is older than StrEnum, and formats in another way
    M = "m"


class Number(float, enum.Enum):
    HALF = 0.5


PARAMETERS: dict[str, dict[str, Any]] = {
    "None": {"temperature": None, "top_p": None, "stop": None},
    "None in a list": {"stop": ["a", None]},
    "NaN": {"temperature": float("nan"), "top_p": float("inf")},
    "a mapping": {"temperature": {"value": 1}, "usage": {"x": 1}},
    "a list": {"temperature": [0.5], "seed": [1, "2"]},
    "text": {"temperature": "0.5", "max_tokens": "12"},
    "a bool": {"temperature": True, "seed": False},
    "an enum": {"temperature": Number.HALF},
    "a large number": {"seed": 2**63, "max_tokens": -(2**70)},
    "bytes": {"seed": b"1"},
}
MESSAGES: dict[str, Any] = {
    "parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
        }
    ],
    "None": [{"role": "assistant", "content": None}, {"role": "user", "content": "q"}],
    "1 MB": [{"role": "user", "content": "é" * 2**19}],
    "tools": [{"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": ""}]}],
}


def clean(span: Any) -> None:
    """Every value is of a type that the protocol knows, and none is NaN, huge, or not to be encoded."""
    for name, value in attributes(span).items():
        items = value if isinstance(value, tuple) else (value,)
        assert items, name
        assert len({type(item) for item in items}) == 1, name
        for item in items:
            assert isinstance(item, (str, bool, int, float)), name
            assert item == item, f"{name} is NaN"  # noqa: PLR0124
            if isinstance(item, str):
                item.encode()
                assert len(item) < 10_000, name
    span.name.encode()


@way_of
@pytest.mark.parametrize("name", [*PARAMETERS, *MESSAGES])
def test_odd_values_leave_no_attribute_and_raise_nothing(name: str, way: str) -> None:
    spans = Spans()
    call = spanwire.Call.chat("m", MESSAGES.get(name, [{"role": "user", "content": "q"}]), **PARAMETERS.get(name, {}))
    with serving(Script(writes=[AB, END])) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=NEVER), call, telemetry=spans.telemetry())
        assert server.requests[0].body["model"] == "m"
    assert seen.got.text == "ab"
    span = spans.one()
    clean(span)
    assert not {"temperature", "top_p", "seed", "max_tokens"} & {n.rpartition(".")[2] for n in attributes(span)}
    assert "q" not in attributes(span).values()


@way_of
def test_a_model_that_is_an_enum_is_its_value(way: str) -> None:
    """Its text and its format differ between Python 3.11 and 3.12; the span's name and the wire have the value."""
    spans = Spans()
    call = spanwire.Call.chat(Model.M, [{"role": "user", "content": "q"}])
    with serving(Script(writes=[AB, END])) as server, nothing_left(server):
        ask(way, server.endpoint(retries=NEVER), call, telemetry=spans.telemetry())
        assert server.requests[0].body["model"] == "m"
    assert "chat m" in spans.names()
    span = spans.one()
    clean(span)
    assert type(attributes(span)["gen_ai.request.model"]) is str


@way_of
@pytest.mark.parametrize(
    "call",
    [
        lambda: chat(top_p=NotGiven()),
        lambda: chat(temperature=object()),
        lambda: chat(stop=["a", NotGiven()]),
        lambda: spanwire.Call.chat("m", [{"role": "user", "content": "a\ud83d"}]),
        lambda: spanwire.Call.chat("m", [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]),
        lambda: spanwire.Call.chat("m\ud83d", [{"role": "user", "content": "q"}]),
    ],
    ids=[
        "NOT_GIVEN",
        "an object",
        "NOT_GIVEN in a list",
        "half a pair",
        "half a pair in a part",
        "half a pair in the model",
    ],
)
def test_what_cannot_be_sent_is_refused_and_its_span_is_clean(call: Any, way: str) -> None:
    spans = Spans()
    with LoopbackServer() as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=NEVER), call(), telemetry=spans.telemetry())
        assert not server.requests
    assert isinstance(seen.error, errors.ConfigurationError)
    (name,) = [name for name in spans.names() if name.startswith("chat")]
    span = spans.one(name)
    clean(span)
    assert attributes(span)["error.type"] == "ConfigurationError"


ANSWERS: dict[str, Mapping[str, Any]] = {
    "null": {"id": None, "model": None, "usage": None},
    "numbers": {"id": 5, "model": 1.5},
    "mappings": {"id": {"a": 1}, "model": ["m"], "usage": {"prompt_tokens": {"a": 1}, "completion_tokens": None}},
    "huge numbers": {"usage": {"prompt_tokens": 10**30, "completion_tokens": 2**63, "total_tokens": 2**64}},
    "fractions": {"usage": {"prompt_tokens": 0.5, "completion_tokens": -1, "total_tokens": 1e300}},
    "long texts": {"id": "c" * 100_000, "model": "m" * 100_000},
    "odd characters": {"id": "c\u0000\u2028", "model": "café 🙂"},
}


@way_of
@pytest.mark.parametrize("name", ANSWERS)
def test_odd_values_of_an_answer_are_clean_on_the_span(name: str, way: str) -> None:
    spans = Spans()
    finish = "x" * 100_000 if name == "long texts" else "stop"
    with serving(Script(writes=[data({**choice(finish, content="ab"), **ANSWERS[name]}), DONE])) as server:
        with nothing_left(server):
            seen = ask(way, server.endpoint(retries=NEVER), telemetry=spans.telemetry())
    assert seen.got.text == "ab"
    clean(spans.one())


@way_of
@pytest.mark.parametrize("finish", ["null", '"\\ud83d"', "5", '["stop"]', '{"a":1}', '""'])
def test_an_odd_finish_reason_is_clean_on_the_span(finish: str, way: str) -> None:
    spans = Spans()
    event = b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"content":"ab"},"finish_reason":%b}]}\n\n'
    with serving(Script(writes=[event % finish.encode(), DONE])) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=NEVER), telemetry=spans.telemetry())
    assert seen.error is None
    assert seen.got.text == "ab"
    clean(spans.one())


class Odd:
    """A plugin whose attributes are of every wrong kind."""

    @hookimpl
    def span_attributes(self, timeline: spanwire.Timeline) -> Mapping[str, Any]:
        return {
            "x.none": None,
            "x.object": object(),
            "x.mapping": {"a": 1},
            "x.mixed": ["a", None, 1],
            "x.empty": [],
            "x.nan": float("nan"),
            "x.surrogate": "a\ud83d",
            "x.huge": 2**80,
            "x.long": "x" * 2**20,
            "x.fine": "yes",
        }


@way_of
def test_odd_attributes_of_a_plugin_are_clean_on_the_span(way: str) -> None:
    spans = Spans()
    with serving(Script(writes=[AB, END])) as server, nothing_left(server):
        seen = ask(way, server.endpoint(retries=NEVER), telemetry=spans.telemetry(), plugins=[Odd()])
    assert seen.got.text == "ab"
    span = spans.one()
    clean(span)
    assert attributes(span)["x.fine"] == "yes"
