"""LangChain's ChatOpenAI."""

from __future__ import annotations

from typing import Any

from tests.peers.matrix.common import PROMPT, Answer, Job, main


def _model(job: Job) -> Any:
    from langchain_openai import ChatOpenAI
    from spanwire_instrument import chat_openai

    # At a base_url that is not OpenAI's, LangChain asks for no usage in streams; `chat_openai()` does.
    more: dict[str, Any] = chat_openai() if job.explicit else {"stream_usage": True}
    return ChatOpenAI(model="m", base_url=job.url, api_key="k", **more)  # type: ignore[arg-type]


def sync(job: Job) -> list[Answer]:
    model = _model(job)

    def ask() -> Answer:
        return _answer(_sum(list(model.stream(PROMPT))) if job.streamed else model.invoke(PROMPT))

    return job.times(ask)


async def asynchronous(job: Job) -> list[Answer]:
    model = _model(job)

    async def ask() -> Answer:
        if not job.streamed:
            return _answer(await model.ainvoke(PROMPT))
        return _answer(_sum([chunk async for chunk in model.astream(PROMPT)]))

    return await job.times_async(ask)


def _sum(chunks: list[Any]) -> Any:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


def _answer(message: Any) -> Answer:
    reason = message.response_metadata.get("finish_reason")
    return {"text": message.content, "finish_reason": reason, "usage": message.usage_metadata}


if __name__ == "__main__":
    main(sync=sync, asynchronous=asynchronous)
