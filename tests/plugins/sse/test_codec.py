"""The built-in dialect: what it asks for, and what it makes of answers."""

from __future__ import annotations

import math

import pytest
from spanwire_sse.codec import OpenAIChat

import spanwire
from spanwire import errors

CODEC = OpenAIChat()
ENDPOINT = spanwire.Endpoint("http://h/v1")
CALL = spanwire.Call.chat("m", [{"role": "user", "content": "x"}])


def body(call: spanwire.Call, *, streamed: bool, endpoint: spanwire.Endpoint = ENDPOINT) -> str:
    return CODEC.encode(call, endpoint, streamed=streamed).body.decode()


def test_a_stream_asks_for_its_usage() -> None:
    assert body(CALL, streamed=True).endswith('"stream":true,"stream_options":{"include_usage":true}}')
    assert "stream" not in body(CALL, streamed=False)


def test_usage_is_not_asked_for_where_the_caller_or_the_endpoint_says_so() -> None:
    own = spanwire.Call.chat("m", [{"role": "user", "content": "x"}], stream_options={"include_usage": False})
    assert body(own, streamed=True).count("include_usage") == 1
    quiet = spanwire.Endpoint("http://h/v1", options={"include_usage": False})
    assert "stream_options" not in body(CALL, streamed=True, endpoint=quiet)


def test_paths_by_operation() -> None:
    assert CODEC.encode(CALL, ENDPOINT, streamed=True).path == "/chat/completions"
    assert CODEC.encode(spanwire.Call.embeddings("e", "x"), ENDPOINT, streamed=False).path == "/embeddings"


@pytest.mark.parametrize("value", [object(), {1, object()}, "\ud83d"])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(errors.ConfigurationError, match="JSON"):
        body(spanwire.Call.chat("m", [{"role": "user", "content": value}]), streamed=False)


def test_a_number_that_json_does_not_have_becomes_null() -> None:
    """As JavaScript does; servers then say themselves that they want a number."""
    assert '"temperature":null' in body(
        spanwire.Call.chat("m", [{"role": "user", "content": "x"}], temperature=math.nan), streamed=False
    )


def test_a_whole_embeddings_answer_is_put_in_order() -> None:
    decoder = CODEC.decoder(spanwire.Call.embeddings("e", ["a", "b"]), streamed=False)
    found = decoder.whole(b'{"data":[{"index":1,"embedding":[2]},{"index":0,"embedding":[1]}],"model":"e1"}')
    assert isinstance(found, spanwire.Embeddings)
    assert found.vectors == [[1.0], [2.0]]
    assert decoder.model == "e1"
