"""A voice session in both directions at once: frames of 20 ms up while others come down, and how late each one was.

Server and client are processes of their own on one machine, so that one monotonic clock stamps what is sent and what has
come (Linux: ``CLOCK_MONOTONIC`` is the same for all). Each frame says its number and when it was sent; late is what lies
between that and the moment in which the other side has it decoded. The server is the ``websockets`` library's own.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import os
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec
from spanwire_websocket import realtime

import spanwire

FRAME_MS = 20
#: PCM16, mono, 24 kHz.
FRAME_BYTES = FRAME_MS * realtime.SAMPLE_RATE_HZ // 1000 * 2
#: The frame's number, and when it was sent.
_HEAD = struct.Struct(">IQ")


class Way(NamedTuple):
    """What became of the frames of one direction."""

    frames: int
    lost: int
    reordered: int
    damaged: int
    p50_ms: float
    p99_ms: float
    most_ms: float


class Figures(NamedTuple):
    """Attributes:
    up, down: what the server has heard, and what the client has.
    rss_kib: the client's memory, once in a second.
    cpu_us: of the client's processor for a frame up and a frame down.
    turns: outcomes of the session's turns.
    """

    up: Way
    down: Way
    rss_kib: list[int]
    cpu_us: float
    turns: list[str]


def frame(number: int) -> bytes:
    """Frame ``number``, stamped now."""
    return _HEAD.pack(number, time.perf_counter_ns()) + bytes([number % 251]) * (FRAME_BYTES - _HEAD.size)


class Ear:
    """Takes the frames of one direction."""

    def __init__(self) -> None:
        self._next = 0
        self._lost = self._reordered = self._damaged = 0
        self._late_ns = array("q")

    def hear(self, pcm: bytes) -> None:
        """A frame is here."""
        now_ns = time.perf_counter_ns()
        number, sent_ns = _HEAD.unpack_from(pcm)
        self._late_ns.append(now_ns - sent_ns)
        if len(pcm) != FRAME_BYTES or pcm.count(number % 251, _HEAD.size) != FRAME_BYTES - _HEAD.size:
            self._damaged += 1
        if number < self._next:
            self._reordered += 1
        else:
            self._lost += number - self._next
            self._next = number + 1

    def told(self, count: int) -> Way:
        """Of ``count`` frames that were sent."""
        late = sorted(self._late_ns) or [0]
        return Way(
            len(self._late_ns),
            self._lost + max(count - self._next, 0),
            self._reordered,
            self._damaged,
            late[len(late) // 2] / 1e6,
            late[len(late) * 99 // 100] / 1e6,
            late[-1] / 1e6,
        )


@contextlib.contextmanager
def first_in_line() -> Iterator[None]:
    """Let this thread go before all others, where we may: else what is measured is what else the machine does."""
    try:
        before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):  # not Linux, or not root
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, parameters)


async def paced(count: int) -> AsyncIterator[int]:
    """The numbers of the frames, each when it is due: a microphone does not wait for who was late."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    for number in range(count):
        left_s = begin + number * FRAME_MS / 1000 - loop.time()
        if left_s > 0:
            await asyncio.sleep(left_s)
        yield number


# --- the server -------------------------------------------------------------------------------------------------------


async def serve() -> None:
    """Serve until the standard input ends; the port is printed."""
    from websockets.asyncio.server import ServerConnection
    from websockets.asyncio.server import serve as listen

    async def speak(socket: ServerConnection, count: int) -> None:
        await socket.send('{"type":"response.created","response":{"id":"r"}}')
        async for number in paced(count):
            pcm = base64.b64encode(frame(number)).decode()
            delta = {"type": "response.output_audio.delta", "response_id": "r", "item_id": "i", "content_index": 0}
            await socket.send(msgspec.json.encode({**delta, "delta": pcm}), text=True)
        await socket.send('{"type":"response.done","response":{"id":"r","status":"completed"}}')

    async def handle(socket: ServerConnection) -> None:
        ear, speaking, count = Ear(), None, 0
        await socket.send('{"type":"session.created","session":{}}')
        async for message in socket:
            event = msgspec.json.decode(message)
            kind = event["type"]
            if kind == "input_audio_buffer.append":
                ear.hear(base64.b64decode(event["audio"]))
            elif kind == "response.create":
                count = event["response"]["frames"]
                speaking = asyncio.ensure_future(speak(socket, count))
            elif kind == "report":
                await socket.send(msgspec.json.encode({"type": "report", "way": ear.told(count)}), text=True)
        if speaking is not None:
            speaking.cancel()

    async with listen(handle, "127.0.0.1", 0, compression=None) as server:
        print(next(iter(server.sockets)).getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A server in a process of its own; its URL."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"ws://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


# --- the client -------------------------------------------------------------------------------------------------------


async def play(url: str, seconds: float) -> Figures:
    """Speak and listen for so long."""
    count = int(seconds * 1000) // FRAME_MS
    ear = Ear()
    rss: list[int] = []
    endpoint = spanwire.Endpoint(url, proxy=None)
    async with (
        spanwire.ConnectionManager() as manager,
        manager.session(endpoint, model="duplex") as session,
    ):
        await session.send(realtime.create_response(frames=count))

        async def speak() -> None:
            async for number in paced(count):
                await session.send(realtime.append_audio(frame(number)))

        async def listen() -> None:
            heard = 0
            async for event in session:
                if event.audio:
                    ear.hear(event.audio)
                    heard += 1
                    if heard % (1000 // FRAME_MS) == 0:
                        rss.append(_rss_kib())
                elif event.type == "response.done":
                    return

        begin_s = time.process_time()
        await asyncio.gather(speak(), listen())
        cpu_us = (time.process_time() - begin_s) * 1e6 / max(count, 1)
        await session.send({"type": "report"})
        async for event in session:
            if event.type == "report":
                up = Way(*event.data["way"])
                break
        else:
            raise AssertionError("the server did not report")
        return Figures(up, ear.told(count), rss, cpu_us, [turn.outcome for turn in session.turns])


def _rss_kib() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4
    except OSError:
        return 0


def table(figures: Figures) -> str:
    """As Markdown."""
    lines = [
        "| way | frames | lost | reordered | damaged | late, ms: p50 | p99 | most |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, way in (("up", figures.up), ("down", figures.down)):
        late = f"{way.p50_ms:.2f} | {way.p99_ms:.2f} | {way.most_ms:.2f}"
        lines.append(f"| {name} | {way.frames} | {way.lost} | {way.reordered} | {way.damaged} | {late} |")
    grown = figures.rss_kib[-1] - figures.rss_kib[len(figures.rss_kib) // 10] if figures.rss_kib else 0
    lines += ["", f"The client took {figures.cpu_us:.0f} us for a frame each way, and its memory grew by {grown} KiB."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Frames of 20 ms in both directions at once.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options: Any = parser.parse_args(arguments)
    if options.serve:
        with first_in_line():
            asyncio.run(serve())
        return
    with serving() as url, first_in_line():
        print(table(asyncio.run(play(url, options.seconds))))


if __name__ == "__main__":
    main()
