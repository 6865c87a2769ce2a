"""The transport passes the conformance kit, as an ordinary user of it."""

# ruff: noqa: RUF012 - settings of a class, as every author of a transport writes them

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spanwire_grpc.loopback import GRPCPart

from spanwire.testing import LoopbackServer, TransportConformance

#: Between our look at the channel and its own, gRPC may notice the end of a connection, and then makes another one.
DIALS = {"dials": "the channel replaces a connection whose end it has noticed"}


class TestGRPC(TransportConformance):
    scheme = "grpc"
    cannot = DIALS


@pytest.mark.long
class TestTLS(TransportConformance):
    scheme = "grpcs"
    cannot = DIALS
    served = {"tls": True}


@pytest.mark.skipif(sys.platform == "win32", reason="asyncio has no unix sockets on Windows")
@pytest.mark.long
class TestUnixSocket(TransportConformance):
    scheme = "grpc"
    cannot = {**DIALS, "reset": "a unix socket knows no RST"}

    @contextlib.contextmanager
    def serve(self, *scripts: Any, default: Any = None) -> Iterator[LoopbackServer]:
        more = {} if default is None else {"default": default}
        with tempfile.TemporaryDirectory() as folder:
            with LoopbackServer([*scripts], part="grpc", uds=str(Path(folder, "grpc.sock")), **more) as server:
                yield server


TEXT_ONLY = {
    **DIALS,
    "embeddings": "this server has none",
    "reasoning": "text is all that it sends",
    "status": "INTERNAL, which is what 500 is here, is not tried again",
    "tools": "text is all that it sends",
}


@pytest.mark.long
class TestTriton(TransportConformance):
    scheme = "grpc"
    part = GRPCPart(oip="triton")
    settings = {"dialect": "oip", "options": {"chat_template": "plain"}}
    cannot = TEXT_ONLY


@pytest.mark.long
class TestMLServer(TransportConformance):
    scheme = "grpc"
    part = GRPCPart(oip="mlserver")
    settings = {"dialect": "oip", "options": {"chat_template": "plain"}}
    cannot = {
        **TEXT_ONLY,
        "finish": "the end of the call is the only sign that an answer is complete",
        "truncate": "the same",
        "usage": "it counts no tokens",
    }

    @pytest.mark.xfail(reason="it gives no finish reason, and none is made up", strict=True)
    def test_chunks_come_in_order_and_unchanged(self) -> None:
        super().test_chunks_come_in_order_and_unchanged()

    @pytest.mark.xfail(reason="the same", strict=True)
    def test_an_empty_answer_is_an_answer(self) -> None:
        super().test_an_empty_answer_is_an_answer()


@pytest.mark.long
class TestVLLM(TransportConformance):
    scheme = "grpc"
    settings = {"dialect": "vllm", "options": {"chat_template": "plain"}}
    cannot = TEXT_ONLY
