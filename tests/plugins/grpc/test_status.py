from __future__ import annotations

from typing import Any

import pytest
from spanwire_grpc.status import connect_error, error_of, retry_after_s

from spanwire.errors import (
    AuthenticationFailed,
    BadRequest,
    ConnectionFailed,
    MessageTooBig,
    Overloaded,
    RateLimited,
    ServerError,
)


def of(
    code: str,
    details: str = "",
    *,
    heard: bool = False,
    connected: bool = True,
    most: int | None = None,
    **metadata: str,
) -> Any:
    named = {name.replace("_", "-"): value for name, value in metadata.items()}
    return error_of(
        code, details, named, endpoint="h:1", method="/a/B", heard=heard, connected=connected, max_event_bytes=most
    )


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        ("UNAVAILABLE", Overloaded, True),
        ("RESOURCE_EXHAUSTED", RateLimited, True),
        ("ABORTED", ServerError, True),
        ("DEADLINE_EXCEEDED", ServerError, False),
        ("CANCELLED", ServerError, False),
        ("INTERNAL", ServerError, False),
        ("UNKNOWN", ServerError, False),
        ("DATA_LOSS", ServerError, False),
        ("INVALID_ARGUMENT", BadRequest, False),
        ("FAILED_PRECONDITION", BadRequest, False),
        ("NOT_FOUND", BadRequest, False),
        ("UNIMPLEMENTED", BadRequest, False),
        ("UNAUTHENTICATED", AuthenticationFailed, False),
        ("PERMISSION_DENIED", AuthenticationFailed, False),
    ],
)
def test_each_status(code: str, kind: type[ServerError], retryable: bool) -> None:
    error = of(code, "words of the server")
    assert type(error) is kind
    assert error.code == code
    assert error.status is None
    assert error.retryable is retryable
    assert "words of the server" in str(error)
    assert not of(code, "words", heard=True).retryable


def test_a_message_that_is_too_large_is_no_rate_limit() -> None:
    error = of("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (5242885 vs. 4194304)")
    assert type(error) is MessageTooBig
    assert (error.phase, error.retryable) == ("read", False)
    assert "5242885" in str(error)
    assert "max_event_bytes" in str(error)
    ours = of("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (5242885 vs. 4194304)")
    assert type(ours) is MessageTooBig
    assert ours.phase == "send"
    # Before grpcio 1.65 without a side.
    before = "Received message larger than max (1001 vs. 1000)"
    assert of("RESOURCE_EXHAUSTED", before, most=1000).phase == "read"
    assert of("RESOURCE_EXHAUSTED", before, most=2000).phase == "send"
    assert of("RESOURCE_EXHAUSTED", "Sent message larger than max (9 vs. 8)").phase == "send"


def test_a_reader_that_is_too_slow_is_no_overload() -> None:
    error = of("RESOURCE_EXHAUSTED", "gRPC response channel full: client not consuming")
    assert type(error) is ServerError
    assert not error.retryable


def test_the_server_says_when_to_come_again_or_never() -> None:
    error = of("RESOURCE_EXHAUSTED", "queue full", grpc_retry_pushback_ms="250")
    assert (error.retry_after_s, error.retryable) == (0.25, True)
    assert not of("UNAVAILABLE", "full", grpc_retry_pushback_ms="-1").retryable
    assert retry_after_s({"retry-after-ms": "20"}) == 0.02
    assert retry_after_s({"retry-after": "3"}) == 3
    assert retry_after_s({"retry-after": "soon"}) is None


def test_a_broken_connection_is_no_overload() -> None:
    for details in (
        "Socket closed",
        "recvmsg:Connection reset by peer",
        "GOAWAY received; Error code: 11; too_many_pings",
        "Too many pings",
    ):
        assert type(of("UNAVAILABLE", details)) is ConnectionFailed
    assert type(of("UNAVAILABLE", "busy", connected=False)) is ConnectionFailed
    assert of("UNAVAILABLE", "Socket closed", heard=True).retryable is False
    assert of("UNAVAILABLE", "Socket closed").phase == "wait"


def test_what_is_no_grpc_server_is_told() -> None:
    details = "failed to connect to all addresses; last error: UNKNOWN: Failed parsing HTTP/2 (Expected SETTINGS frame"
    error = connect_error(details, endpoint="h:1")
    assert "not a gRPC server" in str(error)
    assert not error.retryable
    older = connect_error("last error: INTERNAL: Trying to connect an http1.x server", endpoint="h:1")
    assert "not a gRPC server" in str(older)
    assert not older.retryable
    proxied = of("UNAVAILABLE", "Received http2 header with status: 504")
    assert "HTTP status 504" in str(proxied)


@pytest.mark.parametrize(
    ("details", "phase", "retryable"),
    [
        ("DNS resolution failed for nowhere.invalid:80", "dns", True),
        (
            "failed to connect to all addresses; last error: Failed to connect to remote host: Connection refused",
            "tcp",
            True,
        ),
        ("Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED", "tls", False),
        ("Hostname Verification Check failed: certificate", "tls", False),
        ("last error: UNKNOWN: HTTP proxy returned response code 407", "proxy", False),
        ("last error: UNKNOWN: HTTP proxy returned response code 403", "proxy", False),
        ("last error: UNKNOWN: HTTP proxy returned response code 429", "proxy", True),
        ("last error: UNKNOWN: HTTP proxy returned response code 502", "proxy", True),
        ("failed", "connect", True),
        ("", "connect", True),
    ],
)
def test_where_a_connect_failed(details: str, phase: str, retryable: bool) -> None:
    error = connect_error(details, endpoint="h:1")
    assert (error.phase, error.retryable) == (phase, retryable)
