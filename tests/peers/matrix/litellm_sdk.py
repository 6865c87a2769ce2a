"""LiteLLM: ``python -m tests.peers.matrix.litellm_sdk WAY KIND...``, with the provider in MATRIX_PROVIDER.

With MATRIX_NO_USAGE, streams do not ask for usage. With it, LiteLLM reads to the body's end; without it, it stops before.

What can be handed in depends on the provider: a client for the process (``openai/``), a handler for the call
(``hosted_vllm/``).
"""

from __future__ import annotations

import os
from typing import Any

from tests.peers.matrix.common import MESSAGES, Answer, Job, main, of_chunks, of_chunks_async, of_completion

PROVIDER = os.environ.get("MATRIX_PROVIDER", "openai")


def _asked(job: Job) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": f"{PROVIDER}/m", "messages": MESSAGES, "api_base": job.url, "api_key": "k"}
    if job.streamed:
        asked["stream"] = True
        if "MATRIX_NO_USAGE" not in os.environ:
            asked["stream_options"] = {"include_usage": True}
    return asked


def sync(job: Job) -> list[Answer]:
    import litellm
    from litellm.llms.custom_httpx.http_handler import HTTPHandler
    from spanwire_instrument import httpx_client

    asked = _asked(job)
    if job.explicit and PROVIDER == "openai":
        litellm.client_session = httpx_client()
    elif job.explicit:
        asked["client"] = HTTPHandler(client=httpx_client())

    def ask() -> Answer:
        answer = litellm.completion(**asked)
        return of_chunks(answer) if job.streamed else of_completion(answer)

    return job.times(ask)


async def asynchronous(job: Job) -> list[Answer]:
    import litellm
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler
    from spanwire_instrument import httpx_async_client, httpx_async_transport

    asked = _asked(job)
    if job.explicit and PROVIDER == "openai":
        litellm.aclient_session = httpx_async_client()
    elif job.explicit:
        asked["client"] = AsyncHTTPHandler(transport=httpx_async_transport())

    async def ask() -> Answer:
        answer = await litellm.acompletion(**asked)
        return await of_chunks_async(answer) if job.streamed else of_completion(answer)

    return await job.times_async(ask)


if __name__ == "__main__":
    main(sync=sync, asynchronous=asynchronous)
