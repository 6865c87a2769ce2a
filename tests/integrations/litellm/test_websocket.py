"""The provider over WebSocket: the same calls, the same answers and errors, one socket."""

from __future__ import annotations

from collections.abc import Iterator

import litellm
import pytest

import spanwire
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from tests.integrations.litellm.support import WAYS, ask, ours, to
from tests.integrations.litellm.test_errors import mapped
from tests.support import MESSAGES

TEXT = "You said: Say hello"
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer(part="websocket") as running:
        yield running
    assert running.faults == []


@each_way
def test_text(server: LoopbackServer, way: str) -> None:
    seen = ask(way, to(server, "spanwire/org/family/m"))
    assert (seen.text, seen.finish_reason, seen.usage, seen.error) == (TEXT, "stop", (2, 4, 6), None)
    (request,) = server.requests
    assert request.body["model"] == "org/family/m"
    assert request.headers["authorization"] == "Bearer sk-test"
    assert seen.report is not None
    assert seen.report["outcome"] == "completed"
    assert seen.report["transport"] == "websocket"
    assert abs(sum(s["duration_s"] for s in seen.report["segments"].values()) - seen.report["total_s"]) < 1e-3


@each_way
def test_reasoning(server: LoopbackServer, way: str) -> None:
    server.script(Script(reasoning=["think", " hard"], tokens=["so", " it", " is"]))
    seen = ask(way, to(server))
    assert (seen.reasoning, seen.text) == ("think hard", "so it is")


@each_way
def test_parallel_tool_calls(server: LoopbackServer, way: str) -> None:
    calls = [ScriptedTool("f", ['{"a"', ":1}"], id="t1"), ScriptedTool("g", '{"b":2}', id="t2")]
    server.script(Script(tokens=["see"], tool_calls=calls))
    seen = ask(way, to(server))
    assert seen.tools == [("t1", "f", '{"a":1}'), ("t2", "g", '{"b":2}')]
    assert (seen.text, seen.finish_reason) == ("see", "tool_calls")


def test_a_tool_loop_sends_only_what_is_new(server: LoopbackServer) -> None:
    server.script(Script(tool_calls=[ScriptedTool("f", id="t1")]), times=1)
    first = ask("completion", to(server)).response.choices[0].message
    messages = [*MESSAGES, first, {"role": "tool", "tool_call_id": "t1", "content": "3"}]
    assert ask("completion", to(server, messages=messages)).error is None
    before, after = server.requests
    assert after.connection == before.connection
    assert after.body["previous_response_id"].startswith("resp_")
    assert [item["type"] for item in after.body["input"]] == ["function_call_output"]


@pytest.mark.parametrize(
    ("status", "cls"),
    [(400, litellm.BadRequestError), (401, litellm.AuthenticationError), (429, litellm.RateLimitError)],
)
def test_the_servers_errors_are_litellms(server: LoopbackServer, status: int, cls: type[Exception]) -> None:
    server.script(Script(status=status))
    error = mapped(ask("acompletion stream", to(server)).error)
    assert isinstance(error, cls)
    assert isinstance(ours(error), spanwire.SpanwireError)
    assert len(server.requests) == 1


def test_what_the_schema_cannot_say_is_named(server: LoopbackServer) -> None:
    error = ask("completion", to(server, stop=["x"])).error
    assert isinstance(error, litellm.BadRequestError)
    assert "stop" in str(error)
    assert server.requests == []
