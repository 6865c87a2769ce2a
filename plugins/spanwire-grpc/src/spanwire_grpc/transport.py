"""Makes connections: a channel for each, which has to be ready before it counts as one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Hashable
from typing import Any

import grpc

from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, SpanwireError
from spanwire.net.dial import route_of
from spanwire.transport import Attempt

from .channel import Settings, key_of, open_channel, settings_of
from .connection import GRPCConnection, close_now
from .loops import bind_loop
from .roundtrip import open_sockets, rtt_of_new_ns
from .session import buffer_bytes_of
from .status import connect_error

__all__ = ["GRPCTransport"]

_State = grpc.ChannelConnectivity
#: A change of state may be missed while the library backs off (measured): it is asked again after so many seconds.
_LOOK_AGAIN_S = 0.1
#: Asks a channel that has just failed for the reason, which its state does not tell. It does not leave this machine, unless
#: the channel has recovered meanwhile; then a health check is what it is.
_WHY = "/grpc.health.v1.Health/Check"
_WHY_S = 1.0

#: The process in which the library was first used.
_used_in: list[int] = []


class GRPCTransport:
    """Makes connections for ``grpc://`` and ``grpcs://`` endpoints. Keeps none."""

    def expect(self, endpoint: Endpoint) -> int:
        """Calls at once on a connection: what the option ``max_streams`` says."""
        return _settings(endpoint).max_streams

    def key(self, endpoint: Endpoint) -> Hashable:
        """Credentials are sent with each call, so endpoints that differ in them share connections."""
        settings = _settings(endpoint)
        buffer_bytes_of(endpoint)
        return endpoint.connection_key(), settings, key_of(settings.tls)

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> GRPCConnection:
        """DNS, TCP, TLS and HTTP/2's settings: the library does them in one, so they are one part."""
        _check_process(endpoint)
        bind_loop()
        settings = _settings(endpoint)
        if attempt.dialect is not None and "session" in attempt.dialect.operations:
            attempt.dialect.codec.method(endpoint)  # before anything is dialled for it
        marks = attempt.marks
        # Of a proxy, or of one of several servers, it would be somebody else's.
        direct = endpoint.uds is None and route_of(endpoint).proxy is None and "target" not in endpoint.options
        before = open_sockets() if direct else {}
        marks.begin("connect", time.perf_counter_ns())
        channel = open_channel(settings)
        try:
            await _ready(channel, endpoint)
            marks.end("connect", time.perf_counter_ns())
            rtt_ns = rtt_of_new_ns(before, endpoint.origin.port) if before else 0 if endpoint.uds is not None else None
            connection = GRPCConnection(channel, settings, endpoint.address, rtt_ns)
        except BaseException:  # cancelled, too
            close_now(channel)
            raise
        return connection


def _settings(endpoint: Endpoint) -> Settings:
    """Made once for each endpoint, with what the environment says of proxies then."""
    found: Settings | None = endpoint.__dict__.get("_grpc_settings")
    if found is None:
        found = endpoint.__dict__["_grpc_settings"] = settings_of(endpoint)
    return found


def _check_process(endpoint: Endpoint) -> None:
    """The library does not survive a fork: its calls would hang until their deadlines. Raises ConfigurationError."""
    here = os.getpid()
    if not _used_in:
        _used_in.append(here)
        bind_loop()
        grpc.aio.init_grpc_aio()  # once more than needed: else its thread would end and start with each last connection
    elif (
        _used_in[0] != here
    ):  # also with GRPC_ENABLE_FORK_SUPPORT: a thread of grpc.aio's is always in the library (measured)
        raise ConfigurationError(
            f"gRPC was used in the process {_used_in[0]}, of which this one was forked, and its calls would hang here: "
            "make the first call after the fork, or start processes with multiprocessing's 'spawn' or 'forkserver'",
            endpoint=endpoint.address,
        )


async def _ready(channel: Any, endpoint: Endpoint) -> None:
    """Wait until the channel is ready. Raises ConnectionFailed; there is no limit of time here but the caller's."""
    while True:
        state = channel.get_state(try_to_connect=True)
        if state is _State.READY:
            return
        if state in (_State.TRANSIENT_FAILURE, _State.SHUTDOWN):
            problem = await _why(channel, endpoint)
            if problem is not None:
                raise problem
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_AGAIN_S):
                await channel.wait_for_state_change(state)


async def _why(channel: Any, endpoint: Endpoint) -> SpanwireError | None:
    """Why a channel has failed; None if it has recovered."""
    try:
        await channel.unary_unary(_WHY)(b"", timeout=_WHY_S)
    except grpc.aio.AioRpcError as error:
        if channel.get_state() is _State.READY:
            return None
        found = connect_error(error.details() or "", endpoint=endpoint.address, secure=endpoint.secure)
        found.__cause__ = error.with_traceback(None)  # whose frames would keep the channel open
        return found
    return None
