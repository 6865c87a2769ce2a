"""The library's own sockets, one pair for each process: opened before anybody counts what a test leaves behind."""

from __future__ import annotations

import grpc.aio

grpc.aio.init_grpc_aio()
