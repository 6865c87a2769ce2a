"""Facts to findings, without a program."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_instrument.doctor.facts import Call, Client, Context, Lookup, Roots, Run, Site
from spanwire_instrument.doctor.findings import ENOUGH, Finding, enough, findings, split
from spanwire_instrument.doctor.reuse import avoidable

TOP = Site("agent.py", 3, "<module>", "openai", "openai.OpenAI")
INSIDE = Site("agent.py", 7, "answer", "openai", "openai.OpenAI")
ASK = Site("agent.py", 9, "answer", "openai")


def call(
    begin_s: float,
    total_s: float = 1.0,
    *,
    reused: bool | None = True,
    streamed: bool = True,
    outcome: str = "completed",
    segments: dict[str, Any] | None = None,
    client: int = 1,
    inside: int = 0,
    process: int = 1,
    endpoint: str = "model.example:443",
    transport: str = "httpx2",
    cpu_s: float | None = None,
    tokens: int | None = None,
    error: str | None = None,
    first_s: float | None = None,
) -> Call:
    timeline: dict[str, Any] = {
        "schema": 1,
        "outcome": outcome,
        "started_unix_s": begin_s,
        "total_s": total_s,
        "segments": segments or {"model": {"duration_s": total_s, "source": "estimated"}},
        "attempts": [{"outcome": outcome} | ({"error_type": error} if error else {})],
        "endpoint": endpoint,
        "transport": transport,
        "streamed": streamed,
        "model": "m",
    }
    if reused is not None:
        timeline["connection"] = {"id": "c1", "reused": reused, "protocol": "http/1.1"}
    if tokens is not None:
        timeline["usage"] = {"output_tokens": tokens}
    if first_s is not None:
        timeline["first_content_s"] = first_s
    return Call(timeline=timeline, process=process, site=ASK, client=client, inside=inside, cpu_s=cpu_s)


def in_a_row(number: int = 6, **fields: Any) -> list[Call]:
    return [call(2.0 * at, **fields) for at in range(number)]


def kinds(run: Run) -> list[str]:
    return [finding.kind for finding in findings(run)]


def the(run: Run, kind: str) -> Finding:
    (found,) = [finding for finding in findings(run) if finding.kind == kind]
    return found


def part(segment: str, name: str, duration_s: float, rest_s: float) -> dict[str, Any]:
    return {
        segment: {"duration_s": duration_s, "parts": {name: {"duration_s": duration_s, "source": "measured"}}},
        "model": {"duration_s": rest_s, "source": "estimated"},
    }


# --- connections --------------------------------------------------------------------------------------------------------


def test_calls_at_once_need_a_connection_each() -> None:
    at_once = [call(0.1 * at, 5.0, reused=False) for at in range(6)]
    assert avoidable(at_once) == []
    after = call(10.0, reused=False)
    assert [cold.call for cold in avoidable([*at_once, after])] == [after]


def test_one_that_was_lost_is_needed_only_once_more() -> None:
    calls = [call(0.0, reused=False), call(2.0, 5.0, reused=False), call(3.0, 5.0, reused=False)]
    assert [cold.call for cold in avoidable(calls)] == [calls[1]]


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ({}, {}, "stream"),
        ({"streamed": False}, {}, "closed"),
        ({"outcome": "closed_by_caller"}, {}, "left"),
        ({}, {"begin_s": 7.0}, "idle"),
        ({"transport": "aiohttp"}, {"begin_s": 7.0, "transport": "aiohttp"}, "stream"),
        ({"transport": "aiohttp"}, {"begin_s": 17.0, "transport": "aiohttp"}, "idle"),
        ({}, {"client": 2}, "client"),
    ],
)
def test_why_a_connection_was_opened(before: dict[str, Any], after: dict[str, Any], why: str) -> None:
    calls = [call(**({"begin_s": 0.0, "reused": False} | before)), call(**({"begin_s": 1.5, "reused": False} | after))]
    assert [cold.why for cold in avoidable(calls)] == [why]


def test_what_is_not_known_of_a_connection_is_not_guessed() -> None:
    assert avoidable(in_a_row(reused=None)) == []
    assert kinds(Run(calls=tuple(in_a_row(reused=None)))) == ["server_time"]


def test_other_processes_have_other_connections() -> None:
    assert avoidable([call(2.0 * at, reused=False, process=at + 1) for at in range(6)]) == []


def test_a_client_for_each_call() -> None:
    calls = tuple(call(2.0 * at, reused=False, client=at + 1) for at in range(6))
    clients = tuple(
        Client(number=at + 1, cls="httpx2.Client", process=1, site=INSIDE, inside=at + 1) for at in range(6)
    )
    contexts = tuple(Context(at_s=2.0 * at, process=1, site=INSIDE) for at in range(6))
    roots = tuple(Roots(seconds=0.02, site=INSIDE) for _ in range(6))
    run = Run(calls=calls, clients=clients, contexts=contexts, roots=roots)
    found = the(run, "client_per_call")
    assert found.severity == "high"
    assert (found.where[0].line, found.where[0].function) == (7, "answer")
    assert "6 SSLContexts with them, which took 120 ms for reading certificates alone." in found.evidence
    assert kinds(run) == ["client_per_call"]


def test_clients_of_which_two_are_made_are_no_habit() -> None:
    calls = (call(0.0, reused=False, client=1), call(2.0, reused=False, client=2), *in_a_row(6)[2:])
    clients = tuple(Client(number=at, cls="httpx2.Client", process=1, site=INSIDE) for at in (1, 2))
    assert "client_per_call" not in kinds(Run(calls=calls, clients=clients))


def test_clients_that_are_made_beside_calls_and_not_for_them() -> None:
    clients = tuple(Client(number=at, cls="httpx2.Client", process=1, site=INSIDE) for at in range(10, 20))
    assert kinds(Run(calls=tuple(in_a_row()), clients=clients)) == ["server_time"]


@pytest.mark.parametrize(
    ("made", "cls", "line", "instead"),
    [
        ("openai.OpenAI", "httpx2.Client", "c = openai.OpenAI()", "c = openai.OpenAI(http_client=spanwire_instrument.httpx2_client())"),
        ("openai.AsyncOpenAI", "httpx.AsyncClient", "c = AsyncOpenAI()", "c = AsyncOpenAI(http_client=spanwire_instrument.httpx_async_client())"),
        ("langchain_openai.ChatOpenAI", "httpx2.Client", "m = ChatOpenAI(model='x')", 'm = ChatOpenAI(model="...", **spanwire_instrument.chat_openai())'),
        ("", "httpx2.Client", "c = httpx2.Client(timeout=3)", "c = spanwire_instrument.httpx2_client(timeout=3)"),
        ("acme.Agent", "httpx2.Client", "a = acme.Agent()", "spanwire_instrument.instrument()"),
        ("", "aiohttp.ClientSession", "s = aiohttp.ClientSession()", "spanwire_instrument.instrument()"),
    ],
)  # fmt: skip
def test_the_line_for_streams_that_lose_their_connection(made: str, cls: str, line: str, instead: str) -> None:
    site = Site("agent.py", 1, "<module>", made.partition(".")[0], made)
    run = Run(calls=tuple(in_a_row(reused=False)), clients=(Client(number=1, cls=cls, process=1, site=site),))
    (found,) = [finding for finding in findings(run, {"agent.py": line}) if finding.kind == "stream_drops_connection"]
    assert found.instead == instead


def test_idle_connections_that_expire() -> None:
    found = the(Run(calls=tuple(call(20.0 * at, reused=False) for at in range(6))), "idle_connections_expire")
    assert "19 s lay between two calls at the median; httpx2 keeps idle connections for 5 s." in found.evidence
    assert found.instead == "httpx2.Limits(keepalive_expiry=30)"


def test_the_other_side_closes() -> None:
    assert the(Run(calls=tuple(in_a_row(reused=False, streamed=False))), "closed_by_server").where == ()


def test_handshakes_that_make_the_p95() -> None:
    slow = [call(at, reused=False, segments=part("handshake", "tls", 0.4, 0.6), first_s=0.9) for at in (0.0, 0.1)]
    warm = [call(2.0 + at, 0.5, first_s=0.1) for at in range(18)]
    found = the(Run(calls=(*slow, *warm)), "handshake_share")
    assert found.title == "Handshakes are 44 % of the p95 time to the first content"
    assert found.evidence == ("It is 900 ms, and would be 500 ms without them. 2 of 20 calls opened a connection.",)
    assert "handshake_share" not in kinds(Run(calls=(slow[0], *warm, *warm)))  # one in 37 is below the p95
    assert "handshake_share" not in kinds(Run(calls=(slow[0], *warm[:9])))  # the first one of a few says nothing


# --- the other findings -------------------------------------------------------------------------------------------------


def test_waits_for_a_connection() -> None:
    waits = [call(0.3 * at, 0.6, segments=part("queue", "local", 0.3, 0.3)) for at in range(6)]
    found = the(Run(calls=tuple(waits)), "pool_wait")
    assert found.evidence == (
        "42 % of the time: 5 calls waited, the longest 300 ms.",
        "Up to 2 calls ran at once.",
    )
    short = [call(0.003 * at, 0.006, segments=part("queue", "local", 0.003, 0.003)) for at in range(6)]
    assert "pool_wait" not in kinds(Run(calls=tuple(short)))  # nobody notices
    loading = [call(0.0, segments=part("queue", "local", 0.3, 0.7)) for _ in range(6)]
    assert "pool_wait" not in kinds(Run(calls=tuple(loading)))  # nobody had a connection that others waited for


def test_retries_are_those_inside_of_one_call_into_a_library() -> None:
    failed, good = {"outcome": "error", "error": "RateLimited"}, dict[str, Any]()
    some = [call(2.0 * at, inside=1, **(failed if at < 2 else good)) for at in range(3)]
    found = the(Run(calls=tuple(some)), "hidden_retries")
    assert found.evidence == (
        "2 requests more than the program asked for, in 1 call: after 2 RateLimited.",
        "4 s went into attempts that failed, and into the pauses after them.",
    )
    assert found.where[0].line == 9
    own = [call(2.0 * at, inside=at + 1, **(failed if at < 2 else good)) for at in range(3)]
    assert "hidden_retries" not in kinds(Run(calls=tuple(own)))
    steps = [call(2.0 * at, inside=1) for at in range(6)]  # an agent's turns: nothing failed
    assert "hidden_retries" not in kinds(Run(calls=tuple(steps)))
    unknown = [call(2.0 * at, inside=0, **(failed if at < 2 else good)) for at in range(3)]
    assert "hidden_retries" not in kinds(Run(calls=tuple(unknown)))


def test_look_ups() -> None:
    lookups = tuple(Lookup(host="model.example", seconds=0.02) for _ in range(6))
    assert the(Run(calls=tuple(in_a_row()), lookups=lookups), "dns_per_call").evidence == (
        "6 times for 6 calls, for 0 new connections; 20 ms at the median.",
    )
    assert "dns_per_call" not in kinds(Run(calls=tuple(in_a_row()), lookups=lookups[:1]))
    other = tuple(Lookup(host="tools.example", seconds=0.02) for _ in range(6))
    assert "dns_per_call" not in kinds(Run(calls=tuple(in_a_row()), lookups=other))


def test_cpu_for_each_token_is_only_said_of_streams_that_ran_alone() -> None:
    assert (
        the(Run(calls=tuple(in_a_row(cpu_s=0.3, tokens=100))), "client_cpu").title == "3 ms of CPU time for each token"
    )
    assert "client_cpu" not in kinds(Run(calls=tuple(in_a_row(cpu_s=0.03, tokens=100))))
    assert "client_cpu" not in kinds(Run(calls=tuple(in_a_row(cpu_s=None, tokens=100))))
    assert "client_cpu" not in kinds(Run(calls=tuple(in_a_row(cpu_s=0.3))))
    assert "client_cpu" not in kinds(Run(calls=tuple(in_a_row(cpu_s=0.3, tokens=5))))


def test_a_consumer_that_is_slow() -> None:
    assert "slow_consumer" in kinds(Run(calls=tuple(in_a_row(segments=part("client", "waiting", 0.2, 0.8)))))


def test_contexts() -> None:
    contexts = tuple(Context(at_s=2.0 * at, process=1, site=Site("agent.py", 5, "answer")) for at in range(6))
    found = the(Run(calls=tuple(in_a_row()), contexts=contexts), "ssl_context_per_call")
    assert (found.title, found.where[0].line) == ("An SSLContext is made again and again in answer()", 5)
    assert "ssl_context_per_call" not in kinds(Run(calls=tuple(in_a_row()), contexts=contexts[:2]))
    at_once = tuple(Context(at_s=-1.0, process=1, site=one.site) for one in contexts)  # by an import
    assert "ssl_context_per_call" not in kinds(Run(calls=tuple(in_a_row()), contexts=at_once))


def test_streams_that_nobody_closes() -> None:
    run = Run(calls=(*in_a_row(5), call(20.0, outcome="abandoned")))
    assert the(run, "abandoned_streams").evidence[0].startswith("1 of 6 calls: ")
    source = "async def f():\n    stream = await client.create(model='m')\n"
    late = call(0.0, outcome="abandoned")
    late = Call(timeline=late.timeline, site=Site("a.py", 2, "f"))
    (found, *_) = findings(Run(calls=(late,)), {"a.py": source})
    assert (found.now, found.instead) == (
        'stream = await client.create(model="...")',
        'async with await client.create(model="...") as stream:',
    )


def test_the_server_s_queue_is_the_server_s_business() -> None:
    run = Run(calls=tuple(in_a_row(segments=part("queue", "server", 0.6, 0.4))))
    found = the(run, "server_queue")
    assert (found.severity, found.title) == ("note", "60 % of the time is spent in the server's queue")
    assert kinds(run) == ["server_queue"]


def test_an_empty_first_chunk_is_no_finding() -> None:
    calls = tuple(in_a_row(first_s=0.9))
    calls = tuple(Call(timeline={**one.timeline, "first_chunk_s": 0.1}, process=1, client=1) for one in calls)
    assert kinds(Run(calls=calls)) == ["server_time"]


def test_of_few_calls_only_what_happened_is_said() -> None:
    few = in_a_row(ENOUGH - 1, reused=False, segments=part("queue", "local", 0.5, 0.5))
    assert kinds(Run(calls=tuple(few))) == []
    assert not enough(Run(calls=tuple(few)))
    assert kinds(Run()) == []


def test_the_split_adds_up() -> None:
    rows = split(
        Run(calls=(*in_a_row(segments=part("handshake", "tls", 0.25, 0.75)), call(50.0, 9.0, outcome="error")))
    )
    assert [(row.segment, row.seconds, row.share) for row in rows] == [("handshake", 1.5, 0.25), ("model", 4.5, 0.75)]
    assert split(Run()) == []


# --- whatever comes -----------------------------------------------------------------------------------------------------

_SECONDS = st.floats(0, 100, allow_nan=False)
_SITES = st.none() | st.builds(
    Site, st.sampled_from(["a.py", "b.py"]), st.integers(0, 9), st.sampled_from(["<module>", "f"]), st.text(max_size=5),
    st.sampled_from(["", "openai.OpenAI", "x"]),
)  # fmt: skip
_CALLS = st.builds(
    call,
    _SECONDS,
    _SECONDS,
    reused=st.none() | st.booleans(),
    streamed=st.booleans(),
    outcome=st.sampled_from(["completed", "closed_by_caller", "cancelled", "abandoned", "timeout", "error"]),
    client=st.integers(0, 5),
    inside=st.integers(0, 3),
    process=st.integers(0, 2),
    transport=st.sampled_from(["httpx", "httpx2", "aiohttp", "other"]),
    cpu_s=st.none() | _SECONDS,
    tokens=st.none() | st.integers(0, 100),
    first_s=st.none() | _SECONDS,
    segments=st.none()
    | st.builds(part, st.sampled_from(["queue", "client", "handshake"]), st.sampled_from(["local", "server", "waiting"]), _SECONDS, _SECONDS),
)  # fmt: skip
_RUNS = st.builds(
    Run,
    calls=st.lists(_CALLS, max_size=12).map(tuple),
    clients=st.lists(
        st.builds(Client, number=st.integers(0, 5), cls=st.sampled_from(["httpx2.Client", "aiohttp.ClientSession"]), process=st.integers(0, 2), site=_SITES),
        max_size=8,
    ).map(tuple),
    contexts=st.lists(st.builds(Context, at_s=_SECONDS, process=st.integers(0, 2), site=_SITES), max_size=8).map(tuple),
    roots=st.lists(st.builds(Roots, seconds=_SECONDS, site=_SITES), max_size=4).map(tuple),
    lookups=st.lists(st.builds(Lookup, host=st.just("model.example"), seconds=_SECONDS), max_size=8).map(tuple),
    unfinished=st.lists(_SITES, max_size=2).map(tuple),
)  # fmt: skip


@given(_RUNS, st.sampled_from(["", "x = openai.OpenAI(a)\n" * 9, "def f():\n  for x in y(): pass\n", "\0", "((("]))
def test_whatever_was_seen_it_is_put_into_words(run: Run, source: str) -> None:
    found = findings(run, {"a.py": source})
    order = [finding.severity for finding in found]
    assert order == sorted(order, key=["high", "medium", "note"].index)
    for finding in found:
        assert finding.title
        assert finding.evidence
        assert "\n" not in finding.title + finding.now + finding.instead
        assert finding.severity == "note" or finding.change
    if run.calls and not enough(run):
        certain = {"client_per_call", "ssl_context_per_call", "hidden_retries", "abandoned_streams", "failed_calls"}
        assert {finding.kind for finding in found} <= certain | {"unfinished_calls"}


@given(st.lists(_CALLS, max_size=12))
def test_no_more_is_avoidable_than_was_opened(calls: list[Call]) -> None:
    opened = [one for one in calls if one.reused is False]
    cold = avoidable(calls)
    assert len(cold) <= max(0, len(opened) - bool(cold))
    assert len({id(one.call) for one in cold}) == len(cold)
