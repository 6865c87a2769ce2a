"""Many texts in bulk: few jobs, a bad text that fails alone, and a run that is interrupted and taken up again."""

import asyncio
import tempfile

from spanwire_webhook.loopback import SECRET

import spanwire
from spanwire.testing import LoopbackServer, Request, Script

TEXTS = [f"text {number}" for number in range(500)]
TEXTS[123] = "poison"
CALLS = [spanwire.Call.embeddings("my-embedder", text) for text in TEXTS]


async def begin(endpoint: spanwire.Endpoint) -> None:
    """Leave after the first 60 results, as a process that is killed would."""
    async with spanwire.ConnectionManager() as manager:
        async with manager.submit_many(endpoint, CALLS, group="texts", shard=20, window=4) as bulk:
            async for _ in bulk:
                if bulk.counts.done >= 60:
                    break
        print("left", bulk.counts)


async def go_on(endpoint: spanwire.Endpoint) -> None:
    """The same calls in the same group: what has ended is given again, and only what is missing is submitted."""
    vectors: list[list[float]] = [[] for _ in CALLS]
    async with spanwire.ConnectionManager() as manager:
        async with manager.submit_many(endpoint, CALLS, group="texts", shard=20) as bulk:
            async for result in bulk:
                if isinstance(result.reply, spanwire.Embeddings):
                    vectors[result.index] = result.reply.vectors[0]
                else:
                    print(f"text {result.index} failed: {result.error}")
        print("done", bulk.counts)
        print(sum(map(bool, vectors)), "vectors")
        # What has failed is submitted again on request alone.
        again = manager.submit_many(endpoint, CALLS, group="texts", shard=20, retry_failed=True)
        print("retried", await again.wait())


def scripted(request: Request) -> Script:
    """A server that cannot take one of the texts."""
    return Script(finish_reason="error" if "poison" in request.body["input"] else "stop")


with tempfile.TemporaryDirectory() as folder, LoopbackServer(default=scripted, part="webhook") as server:
    endpoint = server.endpoint(
        transport="webhook",
        options={
            "store": f"sqlite:///{folder}/jobs.db",
            "receiver": "127.0.0.1:0",
            "receiver_options": {"secrets": {"generic": (SECRET,)}},
            "poll_after_s": 0.5,  # what was not delivered while nobody listened is asked for; 60 by default
        },
    )
    asyncio.run(begin(endpoint))
    asyncio.run(go_on(endpoint))
