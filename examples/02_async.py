"""The async manager: connections made before they are needed, several calls at once, a whole answer."""

import asyncio

import spanwire
from spanwire.testing import LoopbackServer, Script


async def main(endpoint: spanwire.Endpoint) -> None:
    async with spanwire.ConnectionManager() as manager:
        await manager.warm(endpoint, 3)  # pays DNS, TCP and TLS now

        async def ask(question: str) -> str:
            call = spanwire.Call.chat("demo", [{"role": "user", "content": question}], temperature=0)
            async with manager.stream(endpoint, call) as stream:
                return "".join([chunk.text async for chunk in stream])

        for answer in await asyncio.gather(*(ask(f"question {number}") for number in range(3))):
            print(answer)

        reply = await manager.complete(endpoint, spanwire.Call.chat("demo", [{"role": "user", "content": "all of it"}]))
        print(reply.text, reply.usage)
        assert reply.timeline is not None
        print({name: round(segment.duration_s * 1e3, 2) for name, segment in reply.timeline.segments.items()}, "ms")


with LoopbackServer(default=lambda _request: Script.say("Paced, word by word.", gap_s=0.01)) as server:
    asyncio.run(main(server.endpoint()))
