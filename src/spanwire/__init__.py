"""spanwire: transport middleware for LLM clients.

Carries calls over connections that are used again, and says where every millisecond went::

    import spanwire

    endpoint = spanwire.Endpoint("http://127.0.0.1:8000/v1")
    call = spanwire.Call.chat("my-model", [{"role": "user", "content": "Say hello"}])
    async with spanwire.ConnectionManager() as manager:
        async with manager.stream(endpoint, call) as stream:
            async for chunk in stream:
                print(chunk.text, end="")
    print(stream.timeline)

The errors are in :mod:`spanwire.errors`, the plugin contract is in :mod:`spanwire.transport`.
"""

from __future__ import annotations

from .calls import Call, Chunk, Embeddings, Reply, SessionEvent, ToolCall, ToolCallDelta, Usage
from .endpoint import TLS, Endpoint, Limits, Retries, Timeouts
from .errors import SpanwireError
from .hookspecs import hookimpl
from .manager import ConnectionManager, Stream, default_manager
from .session import Session
from .sync import SyncConnectionManager, SyncSession, SyncStream, default_sync_manager
from .telemetry import Telemetry
from .timeline import Timeline

__all__ = [
    "TLS",
    "Call",
    "Chunk",
    "ConnectionManager",
    "Embeddings",
    "Endpoint",
    "Limits",
    "Reply",
    "Retries",
    "Session",
    "SessionEvent",
    "SpanwireError",
    "Stream",
    "SyncConnectionManager",
    "SyncSession",
    "SyncStream",
    "Telemetry",
    "Timeline",
    "Timeouts",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "default_manager",
    "default_sync_manager",
    "hookimpl",
]
