"""A server that speaks HTTP/2 (hypercorn) and streams one answer after the other, for clients that multiplex."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import trustme
from hypercorn.asyncio import serve
from hypercorn.config import Config

_EVENTS = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "over"}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": " h2"}, "finish_reason": "stop"}]}\n\n',
    b"data: [DONE]\n\n",
)


class H2Server:
    """Streams ``over h2``; a call whose path has ``hang`` in it gets the first event only."""

    def __init__(self, ca: trustme.CA) -> None:
        self.port = 0
        self.versions: list[str] = []
        self.peers: set[tuple[str, int]] = set()
        self.gone = threading.Event()
        self._ca = ca

    @property
    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self._ca.configure_trust(context)
        return context

    @property
    def ca_pem(self) -> str:
        return self._ca.cert_pem.bytes().decode()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.versions.append(scope["http_version"])
        self.peers.add(tuple(scope["client"]))
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for event in _EVENTS:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if "hang" in scope["path"]:
                while (await receive())["type"] != "http.disconnect":
                    pass
                self.gone.set()
                return
        await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def h2_server(folder: Path) -> Iterator[H2Server]:
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1")
    (folder / "key.pem").write_bytes(certificate.private_key_pem.bytes())
    (folder / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    made = H2Server(ca)
    listening = socket.create_server(("127.0.0.1", 0))
    made.port = listening.getsockname()[1]
    config = Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.certfile, config.keyfile = str(folder / "cert.pem"), str(folder / "key.pem")
    config.accesslog = config.errorlog = None
    config.graceful_timeout = 0.1
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        stop = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stop))

        async def stopped() -> None:
            await stop.wait()

        await serve(made.app, config, shutdown_trigger=stopped)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    loop, stop = ready.result(10)
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
