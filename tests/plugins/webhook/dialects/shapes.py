"""A call, a job and answers, for the tests of all dialects."""

from __future__ import annotations

from typing import Any

import msgspec

import spanwire
from spanwire.jobs.contract import HTTPAnswer, HTTPRequest, JobRow

CALL = spanwire.Call.chat(
    "the-model", [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}], max_tokens=5
)
VECTORS = spanwire.Call.embeddings("e", ["a", "b"])
CALLBACK = "https://example.com/hooks/x/0197d0c0-1234-7abc-8def-0123456789ab.1.mac"


def row(**more: Any) -> JobRow:
    return JobRow(**{"id": "0197d0c0-1234-7abc-8def-0123456789ab", **more})


def endpoint(url: str = "https://example.com/v1", **more: Any) -> spanwire.Endpoint:
    return spanwire.Endpoint(url, **more)


def answer(body: Any = b"", status: int = 200, **headers: str) -> HTTPAnswer:
    data = body if isinstance(body, bytes) else encode(body)
    return HTTPAnswer(status, {name.replace("_", "-"): value for name, value in headers.items()}, data)


def encode(body: Any) -> bytes:
    return msgspec.json.encode(body)


def sent(request: HTTPRequest) -> Any:
    return msgspec.json.decode(request.body)


def completion(text: str = "Hello") -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "the-model-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
