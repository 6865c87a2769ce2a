"""spanwire over HTTP and server-sent events: chat (streamed or not) and embeddings on OpenAI-compatible servers.

``Endpoint(dialect="responses")`` speaks OpenAI's Responses API instead of chat completions.

Nothing here needs to be imported by hand: spanwire loads it for ``http://`` and ``https://`` endpoints. A dialect of
your own registers with ``Dialect(transport="sse", name=..., codec=...)``, where the codec is a :class:`Codec`.
"""

from __future__ import annotations

from spanwire.hookspecs import hookimpl
from spanwire.transport import Dialect, TransportSpec

from .codec import OPTIONS, TIMING_FIELDS, TIMING_HEADERS, OpenAIChat
from .responses import OpenAIResponses
from .transport import SSETransport

__all__ = [
    "AnswerDecoder",
    "Codec",
    "OpenAIChat",
    "OpenAIResponses",
    "Request",
    "SSETransport",
    "register_dialects",
    "register_transports",
]


@hookimpl
def register_transports() -> list[TransportSpec]:
    """``sse``, for ``http`` and ``https``."""
    return [
        TransportSpec(
            name="sse",
            schemes=("http", "https"),
            factory=SSETransport,
            options=frozenset({"http_client", "http_version"}),
            contract=1,
        )
    ]


@hookimpl
def register_dialects() -> list[Dialect]:
    """``openai``: chat completions and embeddings. ``responses``: the Responses API, and the same embeddings."""
    return [
        Dialect(
            transport="sse",
            name="openai",
            codec=OpenAIChat(),
            operations=frozenset({"chat", "embeddings"}),
            options=OPTIONS,
            default=True,
            timing_fields=TIMING_FIELDS,
            timing_headers=TIMING_HEADERS,
        ),
        # Without the fields that ask for times: OpenAI refuses what its schema does not have, and no server is known that
        # takes them here.
        Dialect(
            transport="sse",
            name="responses",
            codec=OpenAIResponses(),
            operations=frozenset({"chat", "embeddings"}),
            timing_headers=TIMING_HEADERS,
        ),
    ]
