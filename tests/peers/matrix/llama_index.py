"""LlamaIndex's OpenAI."""

from __future__ import annotations

from typing import Any

from tests.peers.matrix.common import PROMPT, Answer, Job, main

STREAM = {"stream_options": {"include_usage": True}}


def _model(job: Job) -> tuple[Any, list[Any]]:
    from llama_index.core.llms import ChatMessage  # type: ignore[import-not-found]
    from llama_index.llms.openai import OpenAI  # type: ignore[import-not-found]
    from spanwire_instrument import httpx_async_client, httpx_client

    more: dict[str, Any] = (
        {"http_client": httpx_client(), "async_http_client": httpx_async_client()} if job.explicit else {}
    )
    # A model's name that it knows: it looks up the length of the context.
    return OpenAI(model="gpt-4o-mini", api_base=job.url, api_key="k", **more), [
        ChatMessage(role="user", content=PROMPT)
    ]


def sync(job: Job) -> list[Answer]:
    model, messages = _model(job)

    def ask() -> Answer:
        if not job.streamed:
            return _whole(model.chat(messages))
        return _joined(list(model.stream_chat(messages, **STREAM)))

    return job.times(ask)


async def asynchronous(job: Job) -> list[Answer]:
    model, messages = _model(job)

    async def ask() -> Answer:
        if not job.streamed:
            return _whole(await model.achat(messages))
        return _joined([part async for part in await model.astream_chat(messages, **STREAM)])

    return await job.times_async(ask)


def _whole(response: Any) -> Answer:
    raw = response.raw
    return {
        "text": response.message.content,
        "finish_reason": raw.choices[0].finish_reason,
        "usage": raw.usage.model_dump(),
    }


def _joined(parts: list[Any]) -> Answer:
    text = "".join(part.delta or "" for part in parts)
    assert text == parts[-1].message.content
    reasons = [choice.finish_reason for part in parts for choice in part.raw.choices if choice.finish_reason]
    usage = [part.raw.usage.model_dump() for part in parts if part.raw.usage]
    return {"text": text, "finish_reason": reasons[-1] if reasons else None, "usage": usage[-1] if usage else None}


if __name__ == "__main__":
    main(sync=sync, asynchronous=asynchronous)
