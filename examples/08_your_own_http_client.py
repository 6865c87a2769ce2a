"""A client of your own: its proxies, certificates, authentication and event hooks, with spanwire's timeline on top."""

import asyncio

import httpx

import spanwire
from spanwire.testing import LoopbackServer


async def tell(response: httpx.Response) -> None:
    print("the client's own hook:", response.status_code, response.headers["content-type"])


async def main(url: str) -> None:
    # Whatever httpx can do: proxy=, mounts=, verify=, cert=, auth=, http2=, limits= ... An httpx2 client does as well.
    client = httpx.AsyncClient(event_hooks={"response": [tell]}, limits=httpx.Limits(max_connections=1))
    endpoint = spanwire.Endpoint(url, options={"http_client": client})
    call = spanwire.Call.chat("demo", [{"role": "user", "content": "Say hello"}])
    async with client, spanwire.ConnectionManager() as manager:
        async with manager.stream(endpoint, call) as stream:
            async for chunk in stream:
                print(chunk.text, end="")
        print()
        print(stream.timeline)
        # One connection for two calls at once: the second one waits in the client's pool, which is queue local.
        for reply in await asyncio.gather(*(manager.complete(endpoint, call) for _ in range(2))):
            print(reply.timeline)


def main_without_asyncio(url: str) -> None:
    with httpx.Client() as client, spanwire.SyncConnectionManager() as manager:
        call = spanwire.Call.chat("demo", [{"role": "user", "content": "Say hello"}])
        print(manager.complete(spanwire.Endpoint(url, options={"http_client": client}), call).text)


with LoopbackServer() as server:
    asyncio.run(main(server.url))
    main_without_asyncio(server.url)
