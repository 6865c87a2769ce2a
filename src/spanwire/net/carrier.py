"""What an HTTP connection and the reader of one answer on it ask of each other."""

from __future__ import annotations

from typing import Protocol

from ..errors import SpanwireError

__all__ = ["Carrier", "Sink"]


class Sink(Protocol):
    """Takes one answer, on the connection's loop. What it raises ends the exchange as its error."""

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Status and headers of the final answer; names in lower case, repeated ones joined with ``", "``."""

    def on_body(self, data: bytes) -> None:
        """Bytes of the body, transfer coding removed."""

    def on_batch(self) -> None:
        """The bytes of one read have been handed over."""

    def on_sent(self) -> None:
        """The request is in the kernel's buffer, later than the request was handed over returned."""

    def on_trailers(self, trailers: dict[str, str]) -> None:
        """Fields after the body, in the form of headers; :meth:`on_end` follows."""

    def on_end(self) -> None:
        """The message has ended; the connection may take another one."""

    def on_lost(self, error: SpanwireError) -> None:
        """It broke before the message ended; the connection is closed."""


class Carrier(Protocol):
    """Carries one answer: an HTTP/1.1 connection, one stream of an HTTP/2 connection, a client that somebody brought.

    Attributes:
        arrival_ns: when the bytes that are being handed over arrived.
        first_arrival_ns: when the first bytes of the current answer arrived, 0 before.
    """

    arrival_ns: int
    first_arrival_ns: int

    def leave(self, sink: Sink) -> None:
        """Give up on an answer, and tell the server. Harmless when it has ended."""

    def pause_reading(self) -> None:
        """Stop the peer: the consumer is slower. A second call is ignored."""

    def resume_reading(self) -> None:
        """Go on after :meth:`pause_reading`."""

    def rtt_min_ns(self) -> int | None:
        """Minimum round trip to the peer; None if unknown, or if a proxy stands between."""

    def backlog_ns(self) -> int:
        """How long a request that was just sent takes to leave the kernel's buffer, in ns; estimated. 0: no time."""
