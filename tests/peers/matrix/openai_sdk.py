"""The OpenAI SDK, of either generation: 3 is made on httpx2, 2 on httpx."""

from __future__ import annotations

from typing import Any

from tests.peers.matrix.common import MESSAGES, Answer, Job, main, of_chunks, of_chunks_async, of_completion

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def _library() -> str:
    import openai

    return "httpx" if openai.__version__.startswith("2.") else "httpx2"


def sync(job: Job) -> list[Answer]:
    import openai
    import spanwire_instrument

    more: dict[str, Any] = (
        {"http_client": getattr(spanwire_instrument, f"{_library()}_client")()} if job.explicit else {}
    )
    with openai.OpenAI(base_url=job.url, api_key="k", **more) as opened:
        client: Any = opened

        def ask() -> Answer:
            if not job.streamed:
                return of_completion(client.chat.completions.create(model="m", messages=MESSAGES))
            return of_chunks(client.chat.completions.create(model="m", messages=MESSAGES, **STREAM))

        return job.times(ask)


async def asynchronous(job: Job) -> list[Answer]:
    import openai
    import spanwire_instrument

    more: dict[str, Any] = (
        {"http_client": getattr(spanwire_instrument, f"{_library()}_async_client")()} if job.explicit else {}
    )
    async with openai.AsyncOpenAI(base_url=job.url, api_key="k", **more) as opened:
        client: Any = opened

        async def ask() -> Answer:
            if not job.streamed:
                return of_completion(await client.chat.completions.create(model="m", messages=MESSAGES))
            return await of_chunks_async(await client.chat.completions.create(model="m", messages=MESSAGES, **STREAM))

        return await job.times_async(ask)


if __name__ == "__main__":
    main(sync=sync, asynchronous=asynchronous)
