"""A relay that counts the connections made through it: a witness who is neither spanwire nor the server."""

from __future__ import annotations

import contextlib
import selectors
import socket
import socketserver
import threading
from collections.abc import Iterator


class Relay(socketserver.ThreadingTCPServer):
    """Passes bytes on to a port of this machine, both ways."""

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passage)
        self.target = target
        self.connections = 0

    @property
    def port(self) -> int:
        port: int = self.socket.getsockname()[1]
        return port


class _Passage(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        self.server.connections += 1
        with (
            socket.create_connection(("127.0.0.1", self.server.target)) as there,
            selectors.DefaultSelector() as ready,
            contextlib.suppress(OSError),  # one side has reset: the other one is closed
        ):
            here: socket.socket = self.request
            for source, sink in ((here, there), (there, here)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ready.register(source, selectors.EVENT_READ, sink)
            while True:
                for key, _ in ready.select():
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)


@contextlib.contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    with Relay(port) as relay:
        thread = threading.Thread(target=relay.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            relay.shutdown()
            thread.join()
