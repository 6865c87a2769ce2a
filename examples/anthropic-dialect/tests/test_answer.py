"""What only this server's answers have."""

from __future__ import annotations

import pytest
import server
from spanwire_anthropic.answer import MessageDecoder

from spanwire import Chunk
from spanwire.errors import Overloaded, ProtocolError, ServerError


def decode(*events: bytes) -> tuple[MessageDecoder, list[Chunk]]:
    decoder = MessageDecoder()
    chunks = []
    for event in events:
        name, data = event.split(b"\n")[:2]
        chunk = decoder.event(name.removeprefix(b"event: "), data.removeprefix(b"data: "))
        if chunk is not None:
            chunks.append(chunk)
    last = decoder.end()
    return decoder, [*chunks, last] if last is not None else chunks


def stop(reason: str = "end_turn", **usage: object) -> bytes:
    return server.event("message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 5, **usage})


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        ("something_new", "something_new"),
    ],
)
def test_reasons_are_openais(reason: str, expected: str) -> None:
    decoder, chunks = decode(stop(reason))
    assert decoder.finish_reason == expected
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [expected]


def test_usage_is_complete_and_comes_once() -> None:
    first = {"input_tokens": 10, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 30, "output_tokens": 1}
    start = server.event("message_start", message={"id": "msg_1", "model": "m", "usage": first})
    end = stop(output_tokens=7, output_tokens_details={"thinking_tokens": 3})
    decoder, chunks = decode(start, end, server.event("message_stop"))
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (60, 7, 67)
    assert (usage.cached_tokens, usage.reasoning_tokens) == (30, 3)
    assert (decoder.id, decoder.model, decoder.done) == ("msg_1", "m", True)


def test_a_tool_that_the_server_runs_is_not_the_callers() -> None:
    block = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    delta = {"type": "input_json_delta", "partial_json": "{}"}
    _, chunks = decode(
        server.event("content_block_start", index=0, content_block=block),
        server.event("content_block_delta", index=0, delta=delta),
        server.event("content_block_stop", index=0),
        stop(),
    )
    assert not any(chunk.tool_calls for chunk in chunks)


def test_new_kinds_are_passed_over_and_their_bytes_kept() -> None:
    _, chunks = decode(
        server.event("something_new"),
        server.event("content_block_start", index=0, content_block={"type": "new_block"}),
        server.event("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "abc"}),
        server.event("content_block_stop", index=0),
        stop(),
    )
    assert not any(chunk.has_content for chunk in chunks)
    assert b"abc" in chunks[0].raw


def test_an_error_in_a_stream_has_its_kind_and_says_whether_to_try_again() -> None:
    with pytest.raises(Overloaded, match="Overloaded") as caught:
        decode(b"event: error\ndata: " + server.error(529, "Overloaded"))
    assert caught.value.code == "overloaded_error"
    assert caught.value.status is None
    assert caught.value.retryable
    with pytest.raises(ServerError):
        decode(b'event: error\ndata: {"type": "error", "error": "x"}')


@pytest.mark.parametrize(
    "event",
    [
        server.event("content_block_delta", index=0),
        server.event("content_block_start", index=0, content_block=5),
        server.event("content_block_delta", delta={"type": "input_json_delta", "partial_json": "{"}),
        server.event("content_block_delta", index=0, delta={"type": "text_delta", "text": 5}),
    ],
)
def test_an_event_of_another_shape_is_a_protocol_error(event: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(event)
