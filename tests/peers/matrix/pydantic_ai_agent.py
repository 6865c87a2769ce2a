"""An agent of pydantic-ai."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.peers.matrix.common import PROMPT, Answer, Job, main


async def asynchronous(job: Job) -> list[Answer]:
    from pydantic_ai import Agent  # type: ignore[import-not-found]
    from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
    from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]
    from spanwire_instrument import httpx2_async_client

    more: dict[str, Any] = {"http_client": httpx2_async_client()} if job.explicit else {}
    agent = Agent(OpenAIChatModel("m", provider=OpenAIProvider(base_url=job.url, api_key="k", **more)))

    async def ask() -> Answer:
        if not job.streamed:
            result = await agent.run(PROMPT)
            return _answer(result.output, result)
        async with agent.run_stream(PROMPT) as result:
            text = "".join([piece async for piece in result.stream_text(delta=True)])
            return _answer(text, result)

    return await job.times_async(ask)


def _answer(text: str, result: Any) -> Answer:
    usage = result.usage() if callable(result.usage) else result.usage
    return {"text": text, "finish_reason": result.response.finish_reason, "usage": dataclasses.asdict(usage)}


if __name__ == "__main__":
    main(asynchronous=asynchronous)
