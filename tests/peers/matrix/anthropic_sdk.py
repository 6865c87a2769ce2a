"""The Anthropic SDK."""

from __future__ import annotations

from typing import Any

from tests.peers.matrix.common import MESSAGES, Answer, Job, main

ASKED: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": MESSAGES}


def sync(job: Job) -> list[Answer]:
    import anthropic
    from spanwire_instrument import httpx2_client

    more: dict[str, Any] = {"http_client": httpx2_client()} if job.explicit else {}
    with anthropic.Anthropic(base_url=job.origin, api_key="k", **more) as client:

        def ask() -> Answer:
            if not job.streamed:
                return _answer(client.messages.create(**ASKED))
            with client.messages.stream(**ASKED) as stream:
                text = "".join(stream.text_stream)
                return _answer(stream.get_final_message(), text)

        return job.times(ask)


async def asynchronous(job: Job) -> list[Answer]:
    import anthropic
    from spanwire_instrument import httpx2_async_client

    more: dict[str, Any] = {"http_client": httpx2_async_client()} if job.explicit else {}
    async with anthropic.AsyncAnthropic(base_url=job.origin, api_key="k", **more) as client:

        async def ask() -> Answer:
            if not job.streamed:
                return _answer(await client.messages.create(**ASKED))
            async with client.messages.stream(**ASKED) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                return _answer(await stream.get_final_message(), text)

        return await job.times_async(ask)


def _answer(message: Any, text: str | None = None) -> Answer:
    whole = "".join(block.text for block in message.content)
    assert text is None or text == whole
    return {"text": whole, "finish_reason": message.stop_reason, "usage": message.usage.model_dump()}


if __name__ == "__main__":
    main(sync=sync, asynchronous=asynchronous)
