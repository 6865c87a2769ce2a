"""Tracing and connection re-use under existing clients of models.

::

    import openai
    from spanwire_instrument import httpx2_client

    client = openai.OpenAI(http_client=httpx2_client())

or, for all clients in the process, ``spanwire_instrument.instrument()``: see :mod:`.instrumentor`.

Every call to a model then has a span and a timeline whose segments add up, and streams give their connection back. What
answers look like, and what they raise, stays the library's. See :mod:`.clients`.
"""

from __future__ import annotations

from .aiohttp_family import trace_aiohttp
from .clients import (
    chat_openai,
    httpx2_async_client,
    httpx2_async_transport,
    httpx2_client,
    httpx2_transport,
    httpx_async_client,
    httpx_async_transport,
    httpx_client,
    httpx_transport,
)
from .grpc_family import grpc_aio_interceptors
from .instrumentor import SpanwireInstrumentor, instrument, is_instrumented, uninstrument
from .recognise import Rules
from .websockets_family import websocket_options

__all__ = [
    "Rules",
    "SpanwireInstrumentor",
    "chat_openai",
    "grpc_aio_interceptors",
    "httpx2_async_client",
    "httpx2_async_transport",
    "httpx2_client",
    "httpx2_transport",
    "httpx_async_client",
    "httpx_async_transport",
    "httpx_client",
    "httpx_transport",
    "instrument",
    "is_instrumented",
    "trace_aiohttp",
    "uninstrument",
    "websocket_options",
]
