"""A scripted server on HTTP/2 (hypercorn): the loopback server speaks HTTP/1.1 only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import trustme
from hypercorn.asyncio import serve
from hypercorn.config import Config

from spanwire.testing import Request, Script

__all__ = ["H2Server", "h2_server"]

_START_S = 10.0


def _event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    data = {"id": "x", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


class H2Server:
    """Answers every call to the script's ``prefill_s`` and ``tokens``; keeps what arrived as the loopback server does."""

    def __init__(self, script: Script, pem: str) -> None:
        self.script = script
        self.pem = pem
        self.port = 0
        self.requests: list[Request] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        request = Request(method="POST", path=scope["path"], query="", headers={}, raw=b"", connection=1)
        self.requests.append(request)
        request.queued_ns = request.arrived_ns
        await asyncio.sleep(self.script.prefill_s)
        request.prefilled_ns = request.decoded_ns = request.content_ns = time.perf_counter_ns()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        events = b"".join(_event({"content": token}) for token in self.script.tokens)
        request.ended_ns = time.perf_counter_ns()
        await send({"type": "http.response.body", "body": events + _event({}, "stop") + b"data: [DONE]\n\n"})


@contextlib.contextmanager
def h2_server(script: Script, host: str) -> Iterator[H2Server]:
    """One on all addresses, in a thread of its own, with a certificate for ``host``."""
    authority = trustme.CA()
    certificate = authority.issue_cert(host, "127.0.0.1")
    server = H2Server(script, authority.cert_pem.bytes().decode("ascii"))
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main(config: Config) -> None:
        stop = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stop))
        await serve(server, config, shutdown_trigger=stop.wait)

    with tempfile.TemporaryDirectory() as folder, socket.create_server(("0.0.0.0", 0)) as listening:
        server.port = listening.getsockname()[1]
        config = Config()
        config.bind = [f"fd://{listening.fileno()}"]
        config.errorlog = None
        config.alpn_protocols = ["h2"]
        config.graceful_timeout = 0.1
        config.shutdown_timeout = 1
        config.certfile, config.keyfile = f"{folder}/cert.pem", f"{folder}/key.pem"
        certificate.private_key_pem.write_to_path(config.keyfile)
        Path(config.certfile).write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
        thread = threading.Thread(target=lambda: asyncio.run(main(config)))
        thread.start()
        loop, stop = ready.result(_START_S)
        try:
            yield server
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            with contextlib.suppress(OSError):
                listening.detach()  # hypercorn has closed it
