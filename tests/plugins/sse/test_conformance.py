"""The transport passes the conformance kit, as an ordinary user of it: over each of its wires."""

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
from tests.http2_part import PART


class TestHTTP1(TransportConformance):
    scheme = "http"


@pytest.mark.long
class TestTLS(TransportConformance):
    scheme = "https"
    served = {"tls": True}


class TestHTTP2(TransportConformance):
    """Without TLS: by prior knowledge."""

    scheme = "http"
    part = PART
    settings = {"options": {"http_version": "2"}}


@pytest.mark.skipif(sys.platform == "win32", reason="asyncio has no unix sockets on Windows")
@pytest.mark.long
class TestUnixSocket(TransportConformance):
    scheme = "http"
    cannot = {"reset": "a unix socket knows no RST"}

    @contextlib.contextmanager
    def serve(self, *scripts: Any, default: Any = None) -> Iterator[LoopbackServer]:
        more = {} if default is None else {"default": default}
        with tempfile.TemporaryDirectory() as folder:
            with LoopbackServer([*scripts], uds=str(Path(folder, "sse.sock")), **more) as server:
                yield server
