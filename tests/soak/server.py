"""The scripted loopback server in a process of its own, so that it shares neither our GIL nor our death.

The process (``python -m tests.soak.server FD``) takes orders over a socket pair, one line of JSON each, and ends when
the other end of the pair is closed. A model's name says what to answer: ``kind:number``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

from spanwire.testing import LoopbackServer, Request, Script, ScriptedTool

ROOT = Path(__file__).parents[2]
TEXT = "Hello from the loopback server."
LONG = [f" word{number}" for number in range(3000)]
PACED = [f" t{number}" for number in range(20)]
_START_LIMIT_S = 30.0
_ANSWER_LIMIT_S = 15.0

_ERROR = b'{"error": {"message": "boom, as scripted", "type": "server_error", "code": 500}}'
_CONTENT = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": null}]}\n\n'

#: kind: the answer to a streamed call, the answer to one as a whole.
SCRIPTS: dict[str, tuple[Script, Script]] = {
    "ok": (Script.say(TEXT), Script.say(TEXT)),
    "tools": (Script.say(TEXT, reasoning=["hm", "m"], tool_calls=[ScriptedTool("f", ('{"a"', ":1}"))]),) * 2,
    "slow": (Script(tokens=PACED, queue_s=0.005, gap_s=0.004),) * 2,
    "long": (Script(tokens=LONG),) * 2,
    "late-end": (Script.say(TEXT, end_s=0.01),) * 2,
    "never-end": (Script.say(TEXT, end_s=60.0), Script.say(TEXT)),
    "close": (Script.say(TEXT, close=True),) * 2,
    # Whole and in order, and then the server closes without having said so: the next call may find the corpse.
    "idle-close": (Script.say(TEXT, end_s=0.001, drop_after=99), Script.say(TEXT, drop_after=1)),
    "s400": (Script(status=400),) * 2,
    "s429": (Script(status=429, headers={"retry-after-ms": "5"}),) * 2,
    "s503": (Script(status=503),) * 2,
    "drop-before": (Script.say(TEXT, drop_after="request"),) * 2,
    "drop-mid": (Script.say(TEXT, gap_s=0.002, drop_after=4), Script.say(TEXT, drop_after=0)),
    "reset": (
        Script.say(TEXT, gap_s=0.002, drop_after=4, drop_mode="reset"),
        Script.say(TEXT, drop_after=0, drop_mode="reset"),
    ),
    "stall": (Script.say(TEXT, hang_after=4), Script.say(TEXT, hang_after=0)),
    "mute": (Script.say(TEXT, hang_after="request"),) * 2,
    "heartbeat": (
        Script(writes=[b": ping\n\n"] * 1000, write_gap_s=0.01),
        Script(writes=[b" "] * 1000, write_gap_s=0.01),
    ),
    "error-event": (Script(writes=[_CONTENT, b"event: error\ndata: %b\n\n" % _ERROR]), Script(body=_ERROR)),
    "error-first": (Script(writes=[b"data: %b\n\n" % _ERROR]), Script(body=_ERROR)),
    "truncated": (
        Script.say(TEXT, finish_reason=None, usage=None, done=False),
        Script(body=b'{"id": "x", "choices": [{"index": 0, "mess'),
    ),
    "html": (Script(body=b"<html>Bad gateway</html>", content_type="text/html"),) * 2,
}


class Seen(NamedTuple):
    """One request, as the server saw it. ``left_ns`` is 0 unless the client left; the clock is the machine's."""

    model: str
    connection: int
    state: str
    left_ns: int
    key: str
    traceparent: str


# --- the process ------------------------------------------------------------------------------------------------------


class _Process:
    def __init__(self) -> None:
        self._server: LoopbackServer | None = None
        self._flaky: set[str] = set()
        self._log: int | None = None

    def answer(self, request: Request) -> Script:
        body = request.body
        model = str(body["model"])
        if self._log is not None:  # one small write to the end of a file: stays, whenever we are killed
            os.write(self._log, f"{model}\n".encode())
        kind = model.partition(":")[0]
        if kind == "flaky":
            if model not in self._flaky:
                self._flaky.add(model)
                return Script(status=503)
            kind = "ok"
        streamed, whole = SCRIPTS[kind]
        return streamed if body.get("stream") else whole

    def obey(self, order: dict[str, Any]) -> object:
        if order["do"] == "start":
            if order["log"] is not None:
                self._log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._server = LoopbackServer(default=self.answer, port=order["port"]).start()
            return {"port": self._server.port, "at_ns": time.perf_counter_ns()}
        assert self._server is not None
        return getattr(self, f"_{order.pop('do')}")(self._server, **order)

    def _quiet(self, server: LoopbackServer, *, connections: int, open_now: int) -> object:
        """Wait until all is over; then say what has arrived, and forget it."""

        def over(server: LoopbackServer) -> bool:
            return (server.connections, server.open_connections) == (connections, open_now) and not any(
                _state(request) == "open" for request in server.requests
            )

        with contextlib.suppress(TimeoutError):  # the answer tells what is the matter
            server.wait_for(over, _ANSWER_LIMIT_S)
        seen = [
            Seen(
                request.model or "",
                request.connection,
                _state(request),
                request.left_ns or 0,
                request.headers.get("idempotency-key", ""),
                request.headers.get("traceparent", ""),
            )
            for request in server.requests
        ]
        answer = {
            "seen": seen,
            "faults": server.faults,
            "connections": server.connections,
            "open": server.open_connections,
        }
        server.clear()
        self._flaky.clear()
        return answer


def _state(request: Request) -> str:
    return "left" if request.left else "dropped" if request.dropped_ns else "ended" if request.ended else "open"


def main() -> None:
    process = _Process()
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rwb") as wire:
        wire.write(b'"ready"\n')  # what takes long, the imports, is done
        wire.flush()
        for line in wire:
            wire.write(json.dumps(process.obey(json.loads(line))).encode() + b"\n")
            wire.flush()


# --- its handle -------------------------------------------------------------------------------------------------------


class Server:
    """The process, as the test holds it. Blocks while it asks."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.server", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._channel.settimeout(_START_LIMIT_S)
        self._wire = self._channel.makefile("rb")
        self._is_ready = False
        self.port = 0
        self.at_ns = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def _answer(self) -> Any:
        line = self._wire.readline()
        assert line, "the server's process has ended"
        return json.loads(line)

    def _ask(self, **order: object) -> Any:
        if not self._is_ready:
            self._is_ready = self._answer() == "ready"
        self._channel.sendall(json.dumps(order).encode() + b"\n")
        return self._answer()

    def start(self, port: int = 0, log: Path | None = None) -> Self:
        """Listen; until then it has only been made ready."""
        answer = self._ask(do="start", port=port, log=None if log is None else str(log))
        self.port, self.at_ns = answer["port"], answer["at_ns"]
        return self

    def quiet(self, *, connections: int, open_now: int) -> list[Seen]:
        """What has arrived since the last time. Fails unless all of it is over, and the connections are so many."""
        answer = self._ask(do="quiet", connections=connections, open_now=open_now)
        seen = [Seen(*row) for row in answer["seen"]]
        assert answer["faults"] == []
        still = [row for row in seen if row.state == "open"]
        assert not still, f"{len(still)} requests go on at the server: {still[:5]}"
        assert (answer["connections"], answer["open"]) == (connections, open_now), "connections made, and open"
        return seen

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._wire.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def port_for_restarts() -> int:
    """A free port that the system gives to nobody by itself.

    Else a client that dials while nobody listens is connected with itself once in some ten thousand times, which keeps
    the port from the next server.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, low - 8000), low)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    main()
