"""Hops that terminate TCP, as a CDN or a load balancer does: the client's round trip ends there."""

from __future__ import annotations

import contextlib
import selectors
import shutil
import socket
import socketserver
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HAPROXY", "haproxy", "relay"]

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
_HEADER = b"via: 1.1 edge\r\n"
_START_S = 5.0
_CONFIG = """
global
    maxconn 100
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
    http-reuse always
    option http-no-delay  # else it holds a token back until the next one comes
frontend edge
    bind 0.0.0.0:{port}
    http-response set-header via "1.1 edge"
    default_backend server
backend server
    server one {host}:{upstream}
"""


class _Relay(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__(("0.0.0.0", 0), _Passage)
        self.upstream = upstream


class _Passage(socketserver.BaseRequestHandler):
    server: _Relay

    def handle(self) -> None:
        here: socket.socket = self.request
        with (
            socket.create_connection(self.server.upstream) as there,
            selectors.DefaultSelector() as ready,
            contextlib.suppress(OSError),  # one side has reset: the other one is closed
        ):
            for source in (here, there):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ready.register(source, selectors.EVENT_READ)
            asked = False
            while True:
                for key, _ in ready.select():
                    source = here if key.fileobj is here else there
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is there and asked:  # what comes first after a request begins an answer
                        line, end, rest = data.partition(b"\r\n")
                        data = line + end + _HEADER + rest
                    asked = source is here
                    (there if source is here else here).sendall(data)


@contextlib.contextmanager
def relay(host: str, upstream: int) -> Iterator[int]:
    """The port of a small one in threads of this process, which passes each connection on to ``host``."""
    with _Relay((host, upstream)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            port: int = server.socket.getsockname()[1]
            yield port
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def haproxy(host: str, upstream: int) -> Iterator[int]:
    """The port of a real one, in a process of its own."""
    if HAPROXY is None:
        raise RuntimeError("haproxy is not installed")
    with socket.create_server(("0.0.0.0", 0)) as free:
        port: int = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "haproxy.cfg")
        config.write_text(_CONFIG.format(port=port, host=host, upstream=upstream), encoding="ascii")
        process = subprocess.Popen([HAPROXY, "-db", "-f", config], stderr=subprocess.PIPE)
        try:
            until = time.monotonic() + _START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        raise
                    time.sleep(0.01)
            yield port
        finally:
            process.terminate()
            process.communicate()
