"""The scenarios: what is injected, and what a timeline has to give back. PURE.

The network holds each packet for half a round trip, the server works to a script and looks at its own clock, and the
client is told how to behave. Expectations are written in terms of what was really injected into each call
(:class:`Injected`): what the network's record and the server's clock say, not what they were told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from spanwire.testing import Script
from spanwire.testing.delaynet import Link

__all__ = ["PEERS", "SCENARIOS", "Injected", "Scenario", "address"]

How = Literal["reused", "cold", "warmed", "slow_reader", "late_reader", "upload", "riders", "retried", "limited"]

SLOW_MBIT = 20.0
UPLOAD_BYTES = 2_000_000
READ_S = 0.030
LATE_S = 0.200
BACKOFF_MS = 120
DNS_S = 0.015


def address(rtt_ms: float, rate_mbit: float | None = None) -> str:
    """The peer that is so far away: its last number is the round trip in ms, and that of a slow line one more."""
    return f"198.18.0.{rtt_ms + (0 if rate_mbit is None else 1):.0f}"


PEERS: Mapping[str, Link] = {
    **{address(rtt_ms): Link(rtt_ms / 1e3) for rtt_ms in (20, 40, 60, 80)},
    address(40, SLOW_MBIT): Link(0.040, SLOW_MBIT * 1e6),
}


@dataclass(frozen=True, kw_only=True)
class Injected:
    """What one call was given, in ms.

    Attributes:
        rtt: the round trip to the address that the client connects to, from the network's record.
        upstream: that between an edge and the server behind it; 0 without one.
        queue, prefill, decode: of the server, by its own clock.
        server: from the request's arrival to the answer's last byte, likewise.
        crypto: what TLS takes beside its round trip, measured on this machine without a network.
        dns: what the resolver takes.
        backoff: what the server asks to wait.
        upload: from the call's begin to the arrival of the whole request at the server.
        ahead: from the call's begin to the end of the call before it.
        unread: from the moment at which the whole answer is at the client to the end of its reading.
    """

    rtt: float
    upstream: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    server: float = 0.0
    crypto: float = 0.0
    dns: float = 0.0
    backoff: float = 0.0
    upload: float = 0.0
    ahead: float = 0.0
    unread: float = 0.0


Rule = Callable[[Injected], float]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One.

    Attributes:
        name: for tests and the command line.
        group: those that are measured in one process; the test file's name.
        title: for the table.
        how: what the client does; see ``inside.py``.
        rtt_ms: round trip to where the client connects to.
        script: what the server does.
        expect: ms by segment (``network``), part (``model.prefill``), or the sum of some (``queue+model``). A segment
            that is in none of them must be (nearly) absent, and the total must be the sum.
        sources: of segments.
        absent: segments that must not be there at all.
        streamed, tls: the call.
        rate_mbit: the line's limit.
        edge: what terminates TCP between client and server: our relay, or a real proxy.
        upstream_ms: round trip from there to the server.
    """

    name: str
    group: str
    title: str
    how: How = "reused"
    rtt_ms: float = 80
    script: Script
    expect: Mapping[str, Rule]
    sources: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    streamed: bool = True
    tls: bool = False
    rate_mbit: float | None = None
    edge: Literal["relay", "haproxy"] | None = None
    upstream_ms: float = 60

    @property
    def peer(self) -> str:
        """The address that the client connects to."""
        return address(self.rtt_ms, self.rate_mbit)


def _script(queue_ms: float, prefill_ms: float, decode_ms: float, server_timing: str | None = None) -> Script:
    tokens = 16 if decode_ms else 1
    return Script(
        tokens=[f" t{number}" for number in range(tokens)],
        queue_s=queue_ms / 1e3,
        prefill_s=prefill_ms / 1e3,
        gap_s=decode_ms / 1e3 / max(tokens - 1, 1),
        server_timing=server_timing,
    )


# --- what comes back --------------------------------------------------------------------------------------------------

#: Of a stream, from a server that says nothing: its queue cannot be told from its prefill.
_ESTIMATED: Mapping[str, Rule] = {
    "network": lambda t: t.rtt,
    "model.prefill": lambda t: t.queue + t.prefill,
    "model.decode": lambda t: t.decode,
    "model": lambda t: t.queue + t.prefill + t.decode,
}
_ESTIMATED_WHOLE: Mapping[str, Rule] = {
    "network": lambda t: t.rtt,
    "model": lambda t: t.queue + t.prefill + t.decode,
}
_REPORTED: Mapping[str, Rule] = {
    "network": lambda t: t.rtt + t.upstream,
    "queue": lambda t: t.queue,
    "queue.server": lambda t: t.queue,
    "model": lambda t: t.prefill + t.decode,
    "model.prefill": lambda t: t.prefill,
    "model.decode": lambda t: t.decode,
}
#: A total and no parts: how it divides is not known, and what it is not is the network.
_TOTAL_ONLY: Mapping[str, Rule] = {
    "network": lambda t: t.rtt + t.upstream,
    "queue+model+unattributed": lambda t: t.queue + t.prefill + t.decode,
}
#: A queue and the time to the headers; the rest of the stream is estimated.
_QUEUE_FIRST: Mapping[str, Rule] = {
    "network": lambda t: t.rtt + t.upstream,
    "queue": lambda t: t.queue,
    "model": lambda t: t.prefill + t.decode,
    "model.decode": lambda t: t.decode,
}
#: Prefill and decode, and nobody knows whether the rest is a queue.
_NO_QUEUE: Mapping[str, Rule] = {
    "network+unattributed": lambda t: t.rtt + t.queue,
    "model.prefill": lambda t: t.prefill,
    "model.decode": lambda t: t.decode,
    "model": lambda t: t.prefill + t.decode,
}
_TRUE_SOURCES = {"queue": "reported", "model": "reported"}
_GUESSED = {"network": "estimated", "model": "estimated"}


def _textbook(dialect: str | None, *, streamed: bool, expect: Mapping[str, Rule], **more: object) -> Scenario:
    shape = "stream" if streamed else "whole"
    sources = more.pop("sources", _TRUE_SOURCES if dialect is not None else _GUESSED)
    return Scenario(
        name=f"textbook-{shape}-{dialect or 'silent'}",
        group="textbook",
        title=f"40 + 10 + 250 + 40 ms, {'streamed' if streamed else 'not streamed'}, "
        + ("server says nothing" if dialect is None else f"server reports as {dialect}"),
        script=_script(10, 100, 150, dialect),
        streamed=streamed,
        expect=expect,
        absent=("handshake",),
        sources=sources,  # type: ignore[arg-type]
    )


def _handshake(how: How, rtt_ms: float) -> Scenario:
    expect: dict[str, Rule] = {
        "network": lambda t: t.rtt,
        "model": lambda t: t.prefill,
    }
    if how == "cold":
        expect |= {
            "handshake": lambda t: t.dns + 2 * t.rtt + t.crypto,
            "handshake.dns": lambda t: t.dns,
            "handshake.tcp": lambda t: t.rtt,
            "handshake.tls": lambda t: t.rtt + t.crypto,
        }
    return Scenario(
        name=f"tls-{how}-{rtt_ms:.0f}",
        group="handshake",
        title=f"TLS, {'a connection for each call' if how == 'cold' else 'pre-warmed'}, round trip {rtt_ms:.0f} ms",
        how=how,
        rtt_ms=rtt_ms,
        script=_script(0, 20, 0),
        tls=True,
        expect=expect,
        absent=() if how == "cold" else ("handshake",),
        sources={"handshake": "measured"} if how == "cold" else {},
    )


def _edge(edge: Literal["relay", "haproxy"], dialect: str | None, expect: Mapping[str, Rule]) -> Scenario:
    return Scenario(
        name=f"edge-{edge}-{dialect or 'silent'}",
        group="edge",
        title=f"20 ms to an edge ({'HAProxy' if edge == 'haproxy' else 'a relay'}), 60 ms from there, "
        + ("server says nothing" if dialect is None else f"server reports as {dialect}"),
        rtt_ms=20,
        upstream_ms=60,
        edge=edge,
        script=_script(10, 30, 30, dialect),
        expect=expect,
        absent=("handshake",),
        sources=_TRUE_SOURCES if dialect == "vllm" else {},
    )


#: Only the way to the edge is known; what lies behind it looks like the server's.
_EDGE_SILENT: Mapping[str, Rule] = {
    "network": lambda t: t.rtt,
    "model.prefill": lambda t: t.upstream + t.queue + t.prefill,
    "model.decode": lambda t: t.decode,
    "model": lambda t: t.upstream + t.queue + t.prefill + t.decode,
}
_READ_LATE: Mapping[str, Rule] = {
    **_ESTIMATED,
    "client": lambda t: t.unread,
    "client.waiting": lambda t: t.unread,
}

SCENARIOS: tuple[Scenario, ...] = (
    _textbook(None, streamed=True, expect=_ESTIMATED),
    _textbook("vllm", streamed=True, expect=_REPORTED),
    _textbook("groq", streamed=True, expect=_REPORTED),
    _textbook("server-timing", streamed=True, expect=_QUEUE_FIRST, sources={"queue": "reported"}),
    _textbook(None, streamed=False, expect=_ESTIMATED_WHOLE),
    _textbook("vllm", streamed=False, expect=_REPORTED),
    _textbook("server-timing", streamed=False, expect=_REPORTED),
    *(
        Scenario(
            name=f"dialect-{'stream' if streamed else 'whole'}-{dialect}",
            group="dialects",
            title=f"20 + 60 ms, {'streamed' if streamed else 'not streamed'}, server reports as {dialect}",
            rtt_ms=20,
            script=_script(10, 20, 30, dialect),
            streamed=streamed,
            expect=expect,
        )
        for dialect, streamed, expect in (
            ("cerebras", True, _REPORTED),
            ("llama.cpp", True, _NO_QUEUE),
            ("fireworks", False, _REPORTED),
            ("tgi", False, {**_TOTAL_ONLY, "queue": lambda t: t.queue, "model": lambda t: t.prefill + t.decode}),
            ("openai", False, _TOTAL_ONLY),
            ("openai", True, {**_TOTAL_ONLY, "model.decode": lambda t: t.decode}),
        )
    ),
    _handshake("cold", 80),
    _handshake("cold", 20),
    _handshake("warmed", 80),
    _handshake("warmed", 20),
    Scenario(
        name="riders-leader",
        group="handshake",
        title="HTTP/2, the first of two cold calls at once",
        how="riders",
        rtt_ms=40,
        script=_script(0, 20, 0),
        tls=True,
        expect={
            "handshake": lambda t: 2 * t.rtt + t.crypto,
            "handshake.tcp": lambda t: t.rtt,
            "handshake.tls": lambda t: t.rtt + t.crypto,
            "network": lambda t: t.rtt,
            "model": lambda t: t.prefill,
        },
    ),
    Scenario(
        name="riders-rider",
        group="handshake",
        title="HTTP/2, the second one, on the same connection",
        how="riders",
        rtt_ms=40,
        script=_script(0, 20, 0),
        tls=True,
        expect={
            "handshake": lambda t: 2 * t.rtt + t.crypto,
            "handshake.shared": lambda t: 2 * t.rtt + t.crypto,
            "network": lambda t: t.rtt,
            "model": lambda t: t.prefill,
        },
    ),
    *(
        _edge(edge, dialect, expect)
        for edge in ("relay", "haproxy")
        for dialect, expect in ((None, _EDGE_SILENT), ("vllm", _REPORTED), ("openai", _TOTAL_ONLY))
    ),
    Scenario(
        name="slow-reader",
        group="client",
        title="the client works for 30 ms on each chunk",
        how="slow_reader",
        rtt_ms=40,
        script=Script.say("one two three four five six", prefill_s=0.020, gap_s=0.010),
        expect=_READ_LATE,
        absent=("handshake",),
    ),
    Scenario(
        name="late-reader",
        group="client",
        title="the client begins to read after 200 ms",
        how="late_reader",
        rtt_ms=40,
        script=Script.say("one two three four", prefill_s=0.020, gap_s=0.010),
        expect=_READ_LATE,
        absent=("handshake",),
    ),
    Scenario(
        name="upload",
        group="client",
        title="a prompt of 2 MB over a line of 20 Mbit/s",
        how="upload",
        rtt_ms=40,
        rate_mbit=SLOW_MBIT,
        script=_script(0, 100, 0),
        # The server reads the two million bytes as JSON before it waits: some ms, more on a slow machine, by its own clock.
        expect={"network+client": lambda t: t.upload + t.rtt / 2, "model": lambda t: t.server},
        absent=("handshake",),
    ),
    Scenario(
        name="retried",
        group="client",
        title=f"503 and Retry-After of {BACKOFF_MS} ms, then an answer",
        how="retried",
        rtt_ms=40,
        script=_script(0, 20, 0),
        expect={
            "queue": lambda t: t.backoff,
            "queue.backoff": lambda t: t.backoff,
            "network": lambda t: 2 * t.rtt,
            "model": lambda t: t.prefill,
        },
        sources={"queue": "measured"},
        absent=("handshake",),
    ),
    Scenario(
        name="limited",
        group="client",
        title="Limits(max_concurrent=1), the second of two calls at once",
        how="limited",
        rtt_ms=40,
        script=_script(0, 40, 0),
        expect={
            "queue": lambda t: t.ahead,
            "queue.local": lambda t: t.ahead,
            "network": lambda t: t.rtt,
            "model": lambda t: t.prefill,
        },
        sources={"queue": "measured"},
        absent=("handshake",),
    ),
)
