"""Messages are on spans where the application asks for them, in the schema of the conventions."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import pytest
from opentelemetry.util.genai import types as theirs

import spanwire
from spanwire.errors import ConfigurationError
from spanwire.manager import ConnectionManager
from spanwire.testing import Script, ScriptedTool
from tests.core.telemetry.heard import Heard, attributes
from tests.support import run, serving

VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
SECRET = "sk-secret"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": "https://h/cat.png"}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type": "input_audio", "input_audio": {"data": "BBBB", "format": "wav"}},
            {"type": "file", "file": {"file_id": "f1"}},
            {"type": "unheard of", "x": 1},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{no json"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
    {"role": "user", "content": f"my key is {SECRET}"},
]


def asked(heard: Heard, script: Script, *, way: str = "complete") -> dict[str, Any]:
    with serving(script) as server:
        endpoint = server.endpoint(api_key=SECRET)
        call = spanwire.Call.chat("m", MESSAGES)

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                if way == "complete":
                    await manager.complete(endpoint, call)
                    return
                async with manager.stream(endpoint, call) as stream:
                    async for _ in stream:
                        if way == "break":
                            break

        run(body)
    return attributes(heard.one("chat m"))


def messages(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = json.loads(found[name])
    return made


@pytest.mark.parametrize("mode", ["span_only", "SPAN_AND_EVENT", " Span_Only "])
@pytest.mark.parametrize("way", ["complete", "stream"])
def test_messages_where_they_are_asked_for(heard: Heard, monkeypatch: pytest.MonkeyPatch, mode: str, way: str) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    found = asked(heard, Script(tokens=["Hel", "lo"], reasoning=["hm"]), way=way)
    system, user, assistant, tool, last = messages(found, "gen_ai.input.messages")
    assert system == {"role": "system", "parts": [{"type": "text", "content": "Be kind"}]}
    assert user["role"] == "user"
    assert user["parts"] == [
        {"type": "text", "content": "What is this?"},
        {"type": "uri", "mime_type": None, "modality": "image", "uri": "https://h/cat.png"},
        {"type": "blob", "mime_type": "image/png", "modality": "image", "content": "AAAA"},
        {"type": "blob", "mime_type": "audio/wav", "modality": "audio", "content": "BBBB"},
        {"type": "file", "mime_type": None, "modality": "document", "file_id": "f1"},
    ]
    assert assistant["parts"] == [
        {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": 1}},
        {"type": "tool_call", "id": "c2", "name": "look", "arguments": "{no json"},
    ]
    assert tool == {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "a cat"}]}
    assert last["parts"] == [{"type": "text", "content": "my key is ***"}]
    assert messages(found, "gen_ai.output.messages") == [
        {
            "role": "assistant",
            "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "Hello"}],
            "finish_reason": "stop",
        }
    ]


def test_the_schema_is_that_of_the_conventions_own_library(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "span_only")
    found = asked(heard, Script(tokens=["a"]))
    parts = {
        "text": theirs.TextPart,
        "uri": theirs.UriPart,
        "blob": theirs.BlobPart,
        "file": theirs.FilePart,
        "tool_call": theirs.ToolCallRequestPart,
        "tool_call_response": theirs.ToolCallResponsePart,
        "reasoning": theirs.ReasoningPart,
    }
    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        for message in messages(found, name):
            for part in message.pop("parts"):
                made: Any = parts[part["type"]](**part)  # its fields, and no others
                assert dataclasses.asdict(made) == part
            kind = theirs.InputMessage if "input" in name else theirs.OutputMessage
            assert dataclasses.asdict(kind(parts=[], **message)).items() >= message.items()


def test_tool_calls_of_the_answer(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "span_only")
    script = Script(tool_calls=[ScriptedTool("look", '{"at":2}', "c9")])
    (answer,) = messages(asked(heard, script), "gen_ai.output.messages")
    assert answer["parts"] == [{"type": "tool_call", "id": "c9", "name": "look", "arguments": {"at": 2}}]
    assert answer["finish_reason"] == "tool_call"


def test_an_answer_that_was_left_has_what_was_read(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "span_only")
    found = asked(heard, Script(tokens=["Hel", "lo"], hang_after=2), way="break")
    assert "gen_ai.input.messages" in found
    assert "lo" not in json.dumps(
        messages(found, "gen_ai.output.messages") if "gen_ai.output.messages" in found else []
    )


@pytest.mark.parametrize("mode", [None, "", "no_content", "event_only", "true", "yes"])
def test_not_otherwise(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str | None
) -> None:
    if mode is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, mode)
    with caplog.at_level(logging.WARNING, "spanwire.telemetry"):
        found = asked(heard, Script(tokens=["a"]))
    assert not [name for name in found if "messages" in name]
    assert bool(caplog.records) == (mode in ("true", "yes"))


def test_where_somebody_else_tells_of_the_call_it_is_their_business(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "span_only")
    with serving(Script(tokens=["a"])) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                with heard.tracer.start_as_current_span("theirs", attributes={"gen_ai.operation.name": "chat"}):
                    await manager.complete(server.endpoint(), spanwire.Call.chat("m", MESSAGES))

        run(body)
    assert "messages" not in heard.one("theirs").to_json()
    assert "messages" not in heard.one("spanwire.attempt").to_json()


def test_odd_messages_are_left_out(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "span_only")
    odd: list[Any] = [
        {"role": "user", "content": 7},
        {"role": "user", "content": [1, {"type": 2}, {"type": "image_url", "image_url": "x"}]},
        {"role": "assistant", "tool_calls": [1, {"function": 2}, {"function": {}}]},
    ]
    with serving(Script(tokens=["a"])) as server:

        async def body() -> None:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                await manager.complete(server.endpoint(), spanwire.Call.chat("m", odd))

        run(body)
    first, second, third = messages(attributes(heard.one("chat m")), "gen_ai.input.messages")
    assert (first["parts"], second["parts"]) == ([], [])
    assert third["parts"] == [{"type": "tool_call", "id": None, "name": None, "arguments": None}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": object()},
        {"role": "tool", "content": "half of a pair: \ud800"},
        {"role": "assistant", "tool_calls": 5},
    ],
)
def test_messages_that_cannot_be_written_cost_no_span(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    """Most of them fail their call, which is the one to be found in the trace."""
    monkeypatch.setenv(VARIABLE, "span_only")
    with serving(Script.say("Hello")) as server:

        async def body() -> str:
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                try:
                    await manager.complete(server.endpoint(), spanwire.Call.chat("m", [message]))
                except ConfigurationError:
                    return "error"
                return "completed"

        outcome = run(body)
    found = attributes(heard.one("chat m"))
    assert found["spanwire.outcome"] == outcome
    assert "gen_ai.input.messages" not in found
