"""The receiver served by uvicorn: in a thread of this process, or as the process."""

from __future__ import annotations

import socket
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from spanwire.errors import ConfigurationError

from .asgi import WebhookApp
from .receiver import Receiver

if TYPE_CHECKING:
    import uvicorn

__all__ = ["EmbeddedReceiver", "listen", "server_for"]

#: Of a request's head. uvicorn's fast parser has no limit of its own: one connection could fill the memory.
_MOST_HEAD_BYTES = 256 * 1024
#: For a request's head to arrive, in seconds.
_HEAD_S = 30.0


class EmbeddedReceiver:
    """A receiver in a thread of its own, with a loop of its own. Signal handlers stay as they are.

    ::

        with EmbeddedReceiver(receiver) as served:
            served.url  # http://127.0.0.1:49152

    Args:
        receiver: what it does.
        host, port: where it listens; port 0: any that is free.

    Raises:
        ConfigurationError: it cannot listen there, or uvicorn is missing.
    """

    def __init__(self, receiver: Receiver, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.receiver = receiver
        self._socket = listen(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        receiver.served_at = receiver.served_at or self.url
        self._server = server_for(receiver)
        self._thread = threading.Thread(target=self._run, name="spanwire-receiver", daemon=True)
        self._ready = threading.Event()
        self._closed = False
        started = self._server.startup

        async def startup(sockets: list[socket.socket] | None = None) -> None:
            await started(sockets)
            self._ready.set()

        self._server.startup = startup  # type: ignore[method-assign] # it has no event to wait for
        self._thread.start()
        self._ready.wait()
        if not self._server.started:
            self.close()
            raise ConfigurationError("the webhook receiver could not be started")

    @property
    def url(self) -> str:
        """Its own address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop to listen; what has arrived is answered. Blocks."""
        if self._closed:
            return
        self._closed = True
        self.receiver.draining = True
        self._server.should_exit = True
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._ready.set()


def server_for(receiver: Receiver, *, drain_s: float = 0.0, grace_s: int = 10) -> uvicorn.Server:
    """A uvicorn server, not started. Without a log of requests: addresses of callbacks are half a secret.

    A signal to stop makes it drain: it is not ready any more, goes on for ``drain_s`` so that whoever sends to it learns of
    that, then listens no more, finishes what is being received within ``grace_s``, and returns. A second signal ends
    the wait, a third one the rest.

    Raises:
        ConfigurationError: uvicorn is missing.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigurationError("the webhook receiver needs uvicorn: pip install 'spanwire[webhook]'") from error
    from .bounded import protocol_class

    config = uvicorn.Config(
        WebhookApp(receiver),
        http=protocol_class(_MOST_HEAD_BYTES, _HEAD_S),
        ws="none",
        lifespan="on",
        log_config=None,  # its loggers belong to the process; ours may be one of several uvicorns in it
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=grace_s,
    )

    class DrainingServer(uvicorn.Server):
        """Does not raise the signal again once it has ended: to stop when told to is no failure."""

        _until_s: float | None = None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.force_exit = self.should_exit
            self.should_exit = self._until_s is not None or drain_s <= 0
            if self._until_s is None:
                self._until_s = time.monotonic() + drain_s
            receiver.draining = True

        async def on_tick(self, counter: int) -> bool:
            if self._until_s is not None and time.monotonic() >= self._until_s:
                self.should_exit = True
            return await super().on_tick(counter)

    return DrainingServer(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigurationError(f"the webhook receiver cannot listen on {host}:{port}: {error}") from error
    listening.setblocking(False)
    return listening
