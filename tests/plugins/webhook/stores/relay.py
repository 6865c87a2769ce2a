"""A relay in front of a server that loses what is told to be lost; with TLS, if it gets a context."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from collections.abc import Iterator

__all__ = ["Relay", "relay"]


class Relay:
    """One thread for each connection.

    Attributes:
        lose: how many more answers to requests that contain ``about`` are lost, and their connections with them.
        lost: how many were.
        seen: connections that were made.
    """

    def __init__(self, port: int, context: ssl.SSLContext | None) -> None:
        self.lose, self.about = 0, b""
        self.lost = self.seen = 0
        self._to = port
        self._context = context
        self._ended = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def to(self, port: int) -> None:
        """Where new connections lead."""
        self._to = port

    def close(self) -> None:
        self._ended = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.seen += 1
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        losing = False
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            stack.enter_context(client)
            if self._context is not None:
                client.settimeout(10)
                client = stack.enter_context(self._context.wrap_socket(client, server_side=True))
            server = stack.enter_context(socket.create_connection(("127.0.0.1", self._to)))
            waiting = stack.enter_context(selectors.DefaultSelector())
            for one in (client, server):
                waiting.register(one, selectors.EVENT_READ)
            while not self._ended:
                for key, _ in waiting.select(0.05):
                    data = key.fileobj.recv(262_144)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is server:
                        if losing:
                            self.lost += 1
                            return
                        client.sendall(data)
                    else:
                        if self.lose and self.about in data:
                            self.lose -= 1
                            losing = True
                        server.sendall(data)


@contextlib.contextmanager
def relay(port: int, context: ssl.SSLContext | None = None) -> Iterator[Relay]:
    """To a port of the loopback address."""
    one = Relay(port, context)
    try:
        yield one
    finally:
        one.close()
