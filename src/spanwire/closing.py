"""How the books of an attempt are closed, whoever has carried it: our own :mod:`.run`, or a client that is watched."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from .endpoint import Endpoint
from .timeline import AttemptRecord, CallRecord, ConnectionUse
from .transport import Head

if TYPE_CHECKING:
    from .plugins import Registry

__all__ = ["end_at_last_activity", "hear_timing", "reach", "with_rtt"]

_log = logging.getLogger("spanwire.manager")


def hear_timing(registry: Registry, endpoint: Endpoint, head: Head, record: AttemptRecord) -> bool:
    """Read what the server says of its own time into ``record.reported``, and whether its answer was a stream. Never raises.

    Returns whether the answer shows that a hop in between ends the connection.
    """
    streamed = head.streamed
    if streamed is not None:
        record.streamed = streamed  # servers and proxies answer with what they have, whatever was asked for
    try:
        headers, readers = head.headers, registry.timing_readers
        if endpoint.server_timing != "off":
            if streamed is None:  # an error, or a transport that does not tell
                content_type = headers.get("content-type")
                streamed = record.streamed if content_type is None else "event-stream" in content_type
            late = head.late_events
            is_rpc = "rpc.method" in head.attributes  # what stands in metadata has rows of its own
            readings = readers.read(
                headers={} if is_rpc else headers,
                streamed=streamed,
                events=late if streamed else (),
                body=late[0] if late and not streamed else None,
                trailers={} if is_rpc else head.trailers,
            )
            if is_rpc:
                readings += readers.read_metadata(headers, head.trailers)
            if readings:
                record.reported = readers.choose(readings, streamed=streamed)
        return readers.is_edge(headers)
    except Exception:  # noqa: BLE001 - nothing that a server or a plugin says of its time may cost a call
        _log.warning("the server's timing could not be read", exc_info=True)
        return False


def reach(rtt_ns: int | None, *, edge: bool) -> tuple[float | None, str | None]:
    """``ConnectionUse.rtt_min_s`` and ``.rtt_scope``."""
    if not rtt_ns:
        return None, None
    return rtt_ns / 1e9, "edge" if edge else None


def with_rtt(use: ConnectionUse, rtt_ns: int | None, *, edge: bool) -> ConnectionUse:
    """What a client told of its connection, with the round trip to the peer."""
    rtt_s, scope = reach(rtt_ns, edge=edge)
    return use if rtt_s is None else msgspec.structs.replace(use, rtt_min_s=rtt_s, rtt_scope=scope)


def end_at_last_activity(record: CallRecord, attempt: AttemptRecord) -> None:
    """An abandoned call ends when something last happened, and not when the garbage collector came."""
    marks = attempt.marks
    last_ns = max(marks.last_byte_ns, marks.ended_ns, marks.sent_ns, attempt.leased_ns, attempt.asked_ns)
    attempt.end_ns = record.end_ns = max(last_ns, attempt.begin_ns)
