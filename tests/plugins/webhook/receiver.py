"""A plain receiver of webhooks, and a plain client of job servers, out of the standard library: for the job server's tests."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from spanwire.jobs.contract import HTTPAnswer, HTTPRequest


class Hook(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """``answer`` gives the status of each webhook, or None for none: the connection is closed."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.answer: Callable[[Hook], int | None] = lambda hook: 200
        self.changed = threading.Condition()
        self.url = ""

    def wait_for(self, count: int, timeout_s: float = 5.0) -> list[Hook]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.hooks) >= count, timeout_s), self.hooks
            return list(self.hooks)


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            hook = Hook(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            with receiver.changed:
                receiver.hooks.append(hook)
                receiver.changed.notify_all()
            status = receiver.answer(hook)
            if status is None:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(origin: str, request: HTTPRequest, headers: Mapping[str, str] | None = None) -> HTTPAnswer:
    """Raises OSError where no answer comes."""
    parts = urlsplit(origin)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        connection.request(request.method, request.target, request.body, {**request.headers, **(headers or {})})
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return HTTPAnswer(response.status, found, response.read())
    finally:
        connection.close()
