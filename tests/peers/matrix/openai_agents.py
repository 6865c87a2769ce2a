"""An agent of OpenAI's Agents SDK, on chat completions."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tests.peers.matrix.common import PROMPT, Answer, Job, main


async def asynchronous(job: Job) -> list[Answer]:
    import openai
    from agents import (  # type: ignore[import-not-found]
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        set_tracing_disabled,
    )
    from spanwire_instrument import httpx2_async_client

    set_tracing_disabled(True)  # it would send its traces to OpenAI
    more: dict[str, Any] = {"http_client": httpx2_async_client()} if job.explicit else {}
    client = openai.AsyncOpenAI(base_url=job.url, api_key="k", **more)
    model = OpenAIChatCompletionsModel("m", openai_client=client)
    agent = Agent(name="a", model=model, model_settings=ModelSettings(include_usage=True))

    async def ask() -> Answer:
        if not job.streamed:
            result = await Runner.run(agent, PROMPT)
            return _answer(result)
        result = Runner.run_streamed(agent, PROMPT)
        text = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        assert text == result.final_output
        return _answer(result)

    answers = await job.times_async(ask)
    await client.close()
    return answers


def _answer(result: Any) -> Answer:
    """It shows no finish reason; the item's status says whether it is whole."""
    (response,) = result.raw_responses
    usage = json.loads(json.dumps(dataclasses.asdict(response.usage), default=lambda value: value.model_dump()))
    return {"text": result.final_output, "finish_reason": response.output[-1].status, "usage": usage}


if __name__ == "__main__":
    main(asynchronous=asynchronous)
