"""The job server's webhooks on the wire: signed, sent over HTTP/1.1, their answers read. Redirects are not followed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ssl as tls
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools

__all__ = ["Sender", "sign_baseten", "sign_standard"]

_READ_BYTES = 16 * 1024
_Key = tuple[str, str, int]
_Open = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def sign_standard(
    secrets: Sequence[str], id: str, timestamp: int, body: bytes, *, seed_v1a: str | None = None
) -> dict[str, str]:
    """The headers of a Standard Webhook: a ``v1`` part for each secret, and a ``v1a`` one by the Ed25519 key."""
    signed = f"{id}.{timestamp}.".encode() + body
    parts = []
    for secret in secrets:
        key = base64.b64decode(secret.removeprefix("whsec_"))
        parts.append("v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode())
    if seed_v1a is not None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key_v1a = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed_v1a))
        parts.append("v1a," + base64.b64encode(key_v1a.sign(signed)).decode())
    headers = {"webhook-id": id, "webhook-timestamp": str(timestamp)}
    return {**headers, "webhook-signature": " ".join(parts)} if parts else headers


def sign_baseten(secrets: Sequence[str], request_id: str, body: bytes) -> dict[str, str]:
    """Baseten's headers: the body alone, the secret's text as the key."""
    parts = [f"v1={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}" for secret in secrets]
    headers = {"X-BASETEN-REQUEST-ID": request_id}
    return {**headers, "X-BASETEN-SIGNATURE": ",".join(parts)} if parts else headers


class _Answer:
    """For httptools: the status, and whether it is complete."""

    __slots__ = ("complete", "keep_alive", "parser")

    def __init__(self) -> None:
        self.complete = self.keep_alive = False
        self.parser: Any = httptools.HttpResponseParser(self)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep_alive = self.parser.should_keep_alive()  # asked later, it has forgotten


class Sender:
    """Sends webhooks; keeps connections for the next ones."""

    def __init__(self, *, at_once: int, timeout_s: float, ca: str | None) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._timeout_s = timeout_s
        self._ca = ca
        self._context: tls.SSLContext | None = None
        self._idle: dict[_Key, list[_Open]] = {}

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """The status of the answer. Raises OSError (TimeoutError too) where none came."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = {"host": parts.netloc, "content-type": "application/json", **headers, "content-length": str(len(body))}
        head = f"POST {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        message = head.encode("latin-1") + b"\r\n" + body
        key = (parts.scheme, host, port)
        async with self._slots, asyncio.timeout(self._timeout_s):
            kept = self._idle.get(key, [])
            while kept:
                opened = kept.pop()
                # Not tried again if it breaks: each attempt that may have arrived is in the record.
                if not opened[0].at_eof():
                    return await self._exchange(key, opened, message)
                opened[1].close()
            opened = await asyncio.open_connection(host, port, ssl=self._tls() if parts.scheme == "https" else None)
            return await self._exchange(key, opened, message)

    async def _exchange(self, key: _Key, opened: _Open, message: bytes) -> int:
        reader, writer = opened
        kept = False
        try:
            writer.write(message)
            await writer.drain()
            answer = _Answer()
            while not answer.complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the receiver closed the connection before its answer")
                try:
                    answer.parser.feed_data(data)
                except httptools.HttpParserError as error:
                    raise OSError(f"the receiver's answer is not HTTP/1.1: {error}") from error
            kept = answer.keep_alive
            if kept:
                self._idle.setdefault(key, []).append(opened)
            return int(answer.parser.get_status_code())
        finally:
            if not kept:
                writer.close()

    def _tls(self) -> tls.SSLContext:
        if self._context is None:
            self._context = tls.create_default_context()
            if self._ca is not None:
                self._context.load_verify_locations(cafile=self._ca)
        return self._context

    async def aclose(self) -> None:
        """Close what is kept."""
        idle, self._idle = self._idle, {}
        for kept in idle.values():
            for _, writer in kept:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
