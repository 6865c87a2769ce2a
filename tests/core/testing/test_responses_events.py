"""The scripted answers in the Responses schema, judged by the types of OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponsesServerEvent
from openai.types.responses.responses_server_event import ResponseWsError
from pydantic import TypeAdapter

from spanwire.calls import Usage
from spanwire.testing import Script, ScriptedTool
from spanwire.testing.responses_events import Step, error_event, input_tokens, response_events, whole_response

BODY = {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "one two"}]}]}
FULL = Script(
    reasoning=("I", " think"),
    tokens=("Hello", " you"),
    tool_calls=(ScriptedTool("f", ['{"a":', "1}"], id="call_a"), ScriptedTool("g")),
    usage=Usage(7, 11, 18, 3, 2),
)
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)


def _events(steps: list[Step]) -> list[dict[str, Any]]:
    return [event for step in steps for event in step.events]


def _types(step: Step) -> list[str]:
    return [event["type"].removeprefix("response.") for event in step.events]


@pytest.mark.parametrize("finish", ["stop", "length", "content_filter", "error"])
def test_every_event_is_one_of_the_schema_and_they_are_numbered(finish: str) -> None:
    script = Script(
        reasoning=FULL.reasoning,
        tokens=FULL.tokens,
        tool_calls=FULL.tool_calls,
        usage=FULL.usage,
        finish_reason=finish,
        queue_s=1,
    )
    events = _events([*response_events(script, BODY, shows_queue=True)])
    for event in events:
        _EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    Response.model_validate(whole_response(script, BODY))


def test_the_steps_are_the_scripts_pieces() -> None:
    steps = [*response_events(FULL, BODY)]
    assert [step.content for step in steps] == [False, *[True] * FULL.pieces, False]
    assert all(step.counts for step in steps)
    assert _types(steps[0]) == ["created", "in_progress"]
    assert _types(steps[3]) == [
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
    ]
    assert _types(steps[4]) == ["output_text.delta"]
    assert _types(steps[-1]) == ["function_call_arguments.done", "output_item.done", "completed"]


def test_without_a_role_the_first_piece_opens_the_answer() -> None:
    first, _, last = response_events(Script(tokens=("a", "b"), role_chunk=False), BODY)
    assert _types(first)[:2] == ["created", "in_progress"]
    assert first.content
    assert _types(last)[-1] == "completed"
    (only,) = response_events(Script(role_chunk=False), BODY)
    assert _types(only) == ["created", "in_progress", "completed"]
    (only,) = response_events(Script(role_chunk=False, finish_reason=None), BODY)
    assert _types(only) == ["created", "in_progress"]


def test_the_waits_are_the_scripts() -> None:
    script = Script(tokens=("a", "b", "c"), queue_s=1, headers_s=2, prefill_s=4, gap_s=8)
    shown = [*response_events(script, BODY, shows_queue=True)]
    assert [step.wait_s for step in shown] == [0, 3, 4, 8, 8, 0]
    assert [step.paced for step in shown] == [False, False, False, True, True, True]
    assert _types(shown[0]) == ["created", "queued"]
    assert shown[0].events[0]["response"]["status"] == "queued"
    assert not shown[0].counts
    assert [step.wait_s for step in response_events(script, BODY)] == [2, 4, 8, 8, 0]


def test_a_whole_answer_is_what_the_stream_ends_with() -> None:
    last = _events([*response_events(FULL, BODY, id="resp_x", timing=lambda: {"metrics": {"queue_time_ms": 1}})])[-1]
    whole = whole_response(FULL, BODY, id="resp_x", timing=lambda: {"metrics": {"queue_time_ms": 1}})
    for response in (last["response"], whole):
        response.pop("created_at")
        for item in response["output"]:
            item.pop("id")
    assert last["response"] == whole
    assert whole["metrics"] == {"queue_time_ms": 1}
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]


def test_timing_is_merged_into_usage() -> None:
    whole = whole_response(Script(), BODY, timing=lambda: {"usage": {"queue_time": 1.5}})
    assert whole["usage"] == {"input_tokens": 2, "output_tokens": 0, "total_tokens": 2, "queue_time": 1.5}
    assert whole_response(Script(usage=None), BODY)["usage"] is None


def test_errors_come_nested_and_flat() -> None:
    nested = error_event("slow down", code="x", type="y", status=429, headers={"retry-after": "1"})
    error = ResponseWsError.model_validate(nested)
    assert (error.status, error.error.code, error.error.headers) == (429, "x", {"retry-after": "1"})
    flat = error_event("slow down", code="x", nested=False, sequence_number=3)
    assert flat == {"type": "error", "code": "x", "message": "slow down", "param": None, "sequence_number": 3}
    _EVENT.validate_python(error_event("m"))


def test_tokens_of_a_request_are_its_words() -> None:
    body = {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": "a b c"},
            {"type": "function_call", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "output": [{"type": "input_text", "text": "d e"}]},
        ],
    }
    assert input_tokens(body) == 8
    assert input_tokens({"input": "a b"}) == 2
