"""The hand-written codec beside the generated one: the same bytes, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_grpc.protowire import body_and_number, request
from spanwire_grpc.stubs import openai_json

from spanwire.errors import ProtocolError

BODIES = st.one_of(st.binary(max_size=300), st.integers(16_000, 17_000).map(bytes))


@given(BODIES, st.dictionaries(st.text(max_size=20), st.text(max_size=60), max_size=3))
def test_a_request_is_what_generated_code_reads(body: bytes, entries: dict[str, str]) -> None:
    entries = {_fit(name): _fit(value) for name, value in entries.items()}
    found = openai_json.OpenAIRequest.FromString(request(body, entries))
    assert found.json_body == body
    assert dict(found.trace_headers) == entries


@given(BODIES, st.booleans())
def test_a_chunk_that_generated_code_writes_is_read(body: bytes, finished: bool) -> None:
    raw = openai_json.OpenAIStreamChunk(json_chunk=body, finished=finished).SerializeToString()
    assert body_and_number(raw) == (body, int(finished))


@given(BODIES, st.integers(0, 2**31 - 1))
def test_so_is_a_reply_with_a_status(body: bytes, status: int) -> None:
    raw = openai_json.OpenAIResponse(json_body=body, status_code=status).SerializeToString()
    assert body_and_number(raw) == (body, status)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_answer_or_an_error_of_ours(data: bytes) -> None:
    try:
        body, number = body_and_number(data)
    except ProtocolError:
        return
    assert isinstance(body, bytes)
    assert number >= 0


@given(BODIES, st.integers(3, 2000), st.binary(max_size=20))
def test_fields_of_later_versions_are_skipped(body: bytes, field: int, more: bytes) -> None:
    tag = field << 3 | 2
    unknown = bytes([tag & 0x7F | 0x80, tag >> 7 & 0x7F | (0x80 if tag > 0x3FFF else 0)])
    unknown = unknown + bytes([tag >> 14]) if tag > 0x3FFF else unknown
    if tag <= 0x7F:
        unknown = bytes([tag])
    raw = unknown + bytes([len(more)]) + more + openai_json.OpenAIStreamChunk(json_chunk=body).SerializeToString()
    assert body_and_number(raw) == (body, 0)


@pytest.mark.parametrize("data", [b"\x0a\x05abc", b"\x0a", b"\x0a\x80", b"\x0d\x01", b"\x0b\x01"])
def test_what_ends_early_is_told(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        body_and_number(data)


def _fit(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
