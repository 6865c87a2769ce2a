"""Webhooks accepted per second: durable, against a handler that stores nothing.

``python benchmarks/webhooks.py --seconds 10``. Both servers are uvicorn in a process of their own, with the same client:
signed requests (Standard Webhooks, each with an id of its own) over connections that stay open, the next one when the last was
answered. Ours answers when the webhook is on the disk (SQLite, ``synchronous=FULL``). The other one is what people write:
Starlette, ``standardwebhooks``, 204; it needs ``pip install starlette standardwebhooks``, and is left out without them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import hmac
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from spanwire_webhook.url_mac import URLMac

from spanwire.jobs.ids import new_id

SECRET = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
KEY = bytes.fromhex("eb29ac9c2719c9cbb6b20157a6368055c81de582655ef5f5c62d25b9e8abfc1d")
SERVERS = ("ours", "starlette")


# --- servers ----------------------------------------------------------------------------------------------------------


def serve_ours(listening: socket.socket, store: str) -> None:
    """A receiver over a store in a file."""
    from spanwire_webhook.dialects import dialects
    from spanwire_webhook.embedded import server_for
    from spanwire_webhook.receiver import Receiver
    from spanwire_webhook.settings import ReceiverSettings

    from spanwire.jobs.stores import open_store

    settings = ReceiverSettings(secrets={"generic": (SECRET,)}, instance_keys=(KEY,))
    receiver = Receiver(open_store(store), {dialect.name: dialect.codec for dialect in dialects()}, settings)
    server_for(receiver).run(sockets=[listening])


def serve_starlette(listening: socket.socket, store: str) -> None:
    """What people write: verify, and say yes."""
    import uvicorn

    # By name: they are in no group of ours, and type checkers do not find them.
    library, applications, responses, routing = map(
        import_module,
        ("standardwebhooks.webhooks", "starlette.applications", "starlette.responses", "starlette.routing"),
    )
    webhook = library.Webhook(SECRET)

    async def hook(request: Any) -> Any:
        body = await request.body()
        try:
            webhook.verify(body, dict(request.headers))
        except library.WebhookVerificationError:
            return responses.Response(status_code=401)
        return responses.Response(status_code=204)

    app = applications.Starlette(routes=[routing.Route("/{path:path}", hook, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning")).run(sockets=[listening])


@contextmanager
def serving(which: str) -> Iterator[int]:
    """One of them in a process; its port."""
    with tempfile.TemporaryDirectory(prefix="spanwire-bench-", dir=".") as folder, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        listening.set_inheritable(True)
        command = [sys.executable, __file__, "--serve", which, "--fd", str(listening.fileno())]
        store = f"sqlite:///{Path(folder).absolute() / 'jobs.db'}"
        process = subprocess.Popen([*command, "--store", store], pass_fds=[listening.fileno()])
        try:
            yield listening.getsockname()[1]
        finally:
            process.terminate()
            process.wait(30)


# --- client -----------------------------------------------------------------------------------------------------------


def request(path: str, body: bytes) -> bytes:
    """A request with an id of its own."""
    message, timestamp = new_id(), int(time.time())
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    mac = base64.b64encode(hmac.digest(key, f"{message}.{timestamp}.".encode() + body, hashlib.sha256)).decode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"webhook-id: {message}\r\nwebhook-timestamp: {timestamp}\r\nwebhook-signature: v1,{mac}\r\n\r\n"
    ).encode() + body


async def send(port: int, body: bytes, until_s: float, counts: dict[str, int]) -> None:
    """One connection: the next one when the last is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    mac = URLMac([KEY])
    while time.perf_counter() < until_s:
        writer.write(request(mac.path("generic", new_id()), body))
        head = await reader.readuntil(b"\r\n\r\n")
        status = head[9:12].decode()
        counts[status] = counts.get(status, 0) + 1
    writer.close()


async def measure(port: int, body: bytes, seconds: float, connections: int) -> dict[str, Any]:
    """Accepted a second, after half a second to warm up."""
    warm: dict[str, int] = {}
    await asyncio.gather(*(send(port, body, time.perf_counter() + 0.5, warm) for _ in range(connections)))
    counts: dict[str, int] = {}
    start_s = time.perf_counter()
    await asyncio.gather(*(send(port, body, start_s + seconds, counts) for _ in range(connections)))
    took_s = time.perf_counter() - start_s
    refused = sum(count for status, count in counts.items() if status != "204")
    return {"accepted_per_s": round(counts.get("204", 0) / took_s, 1), "refused": refused}


def body_of(size: int) -> bytes:
    """A webhook of the generic dialect, of so many bytes."""
    job: dict[str, Any] = {"id": "job_1", "status": "succeeded", "output": ""}
    start = len(json.dumps({"type": "job.succeeded", "data": job}))
    job["output"] = "x" * max(0, size - start)
    return json.dumps({"type": "job.succeeded", "data": job}).encode()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--sizes", type=int, nargs="+", default=[500, 60_000], metavar="BYTES")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        listening = socket.socket(fileno=arguments.fd)
        listening.setblocking(False)
        {"ours": serve_ours, "starlette": serve_starlette}[arguments.serve](listening, arguments.store)
        return
    servers = [name for name in SERVERS if name == "ours" or (find_spec("starlette") and find_spec("standardwebhooks"))]
    figures: list[dict[str, Any]] = []
    for _ in range(arguments.rounds):
        for size in arguments.sizes:
            for name in servers:
                with serving(name) as port:
                    figure = asyncio.run(measure(port, body_of(size), arguments.seconds, arguments.connections))
                figures.append({"server": name, "bytes": size, **figure})
                if not arguments.json:
                    print(f"{name:<10} {size:>7} bytes  {figure['accepted_per_s']:>8} /s  {figure['refused']} refused")
    if arguments.json:
        print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
