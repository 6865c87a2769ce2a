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

from spanwire.testing import LoopbackServer, TransportConformance


class TestGRPC(TransportConformance):
    scheme = "grpc"


class TestTLS(TransportConformance):
    scheme = "grpcs"
    served = {"tls": True}


@pytest.mark.skipif(sys.platform == "win32", reason="asyncio has no unix sockets on Windows")
class TestUnixSocket(TransportConformance):
    scheme = "grpc"
    cannot = {"reset": "a unix socket knows no RST"}

    @contextlib.contextmanager
    def serve(self, *scripts: Any, default: Any = None) -> Iterator[LoopbackServer]:
        more = {} if default is None else {"default": default}
        with tempfile.TemporaryDirectory() as folder:
            with LoopbackServer([*scripts], part="grpc", uds=str(Path(folder, "grpc.sock")), **more) as server:
                yield server
