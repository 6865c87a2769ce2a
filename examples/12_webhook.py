"""Jobs: submitted and acknowledged at once, answered later by webhook, also to a process that did not submit them."""

import asyncio
import tempfile

from spanwire_webhook.loopback import SECRET

import spanwire
from spanwire.testing import LoopbackServer, Request, Script, echo


async def submit(endpoint: spanwire.Endpoint) -> str:
    """Three jobs of one group, and one that nobody here waits for."""
    async with spanwire.ConnectionManager() as manager:
        for city in ("Oslo", "Lima", "Kyoto"):
            call = spanwire.Call.chat("my-model", [{"role": "user", "content": f"One sentence about {city}"}])
            job = await manager.submit(endpoint, call, group="cities")
            print(job.id, await job.status())
        async for reply in manager.jobs.completed("cities", endpoint=endpoint):
            print(reply.text)

        left = await manager.submit(endpoint, spanwire.Call.chat("my-model", [{"role": "user", "content": "Bye"}]))
        return left.id


async def take_up(endpoint: spanwire.Endpoint, id: str) -> None:
    """As another process would: it has the store and the job's id, and nothing else."""
    async with spanwire.ConnectionManager() as manager:
        job = manager.jobs.attach(id, endpoint=endpoint)
        print((await job).text)
        print(job.timeline)


def scripted(request: Request) -> Script:
    """100 ms in the queue, 150 ms at work."""
    return Script(tokens=echo(request).tokens, queue_s=0.1, prefill_s=0.15)


with tempfile.TemporaryDirectory() as folder, LoopbackServer(default=scripted, part="webhook") as server:
    endpoint = server.endpoint(
        transport="webhook",
        options={
            "store": f"sqlite:///{folder}/jobs.db",
            "receiver": "127.0.0.1:0",  # in this process; or `spanwire receive`, and "public_url"
            "receiver_options": {"secrets": {"generic": (SECRET,)}},
            "poll_after_s": 0.5,  # what was not delivered, as while no receiver was there, is asked for; 60 by default
        },
    )
    asyncio.run(take_up(endpoint, asyncio.run(submit(endpoint))))
