"""In bulk to a provider of batches: files of calls on the loopback server, as OpenAI takes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from spanwire_webhook.loopback import WebhookPart

import spanwire
from spanwire.errors import BadRequest
from spanwire.testing import LoopbackServer, Request, Script, echo

OPTIONS: dict[str, Any] = {"poll_after_s": 0.05, "poll_share": 1.0}


def test_calls_are_batches_and_one_that_fails_is_retried_alone(tmp_path: Path) -> None:
    broken = True

    def scripted(request: Request) -> Script:
        if broken and "no. 3" in str(request.body):
            return Script(status=400)
        return echo(request)

    calls = [spanwire.Call.chat("m", [{"role": "user", "content": f"no. {number}"}]) for number in range(10)]
    calls += [spanwire.Call.embeddings("e", f"text {number}") for number in range(3)]
    part = WebhookPart()
    with LoopbackServer(default=scripted, part=part) as server:
        options = {**OPTIONS, "store": f"sqlite:///{tmp_path}/jobs.db"}
        endpoint = server.endpoint(transport="webhook", dialect="openai", options=options)

        async def main(**more: Any) -> tuple[dict[int, Any], Any]:
            async with spanwire.ConnectionManager() as manager:
                bulk = manager.submit_many(endpoint, calls, group="g", shard=6, **more)
                found = {result.index: result.reply or result.error async for result in bulk}
                stored = {result.index: type(result.reply or result.error) for result in bulk.stored()}
                assert stored == {index: type(one) for index, one in found.items()}
                return found, bulk.counts

        found, counts = asyncio.run(main())
        assert counts.jobs == 3
        assert isinstance(found[3], BadRequest)
        assert sorted(found) == list(range(13))
        assert [found[number].text for number in range(10) if number != 3] == [
            f"You said: no. {number}" for number in range(10) if number != 3
        ]
        assert len(found[12].vectors) == 1
        broken = False
        found, counts = asyncio.run(main(retry_failed=True))
        assert (counts.failed, counts.jobs) == (0, 1)
        assert found[3].text == "You said: no. 3"
