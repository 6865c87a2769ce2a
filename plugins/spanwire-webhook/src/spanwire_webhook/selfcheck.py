"""Does what is sent to our public address arrive, and as it was sent? Blocking; follows no redirect.

Asked is an address that only this instance can make, by a body that no JSON encoder gives back: relays that read and write it
again, and so break every signature, are found before the first job depends on it.
"""

from __future__ import annotations

import hashlib
import http.client
import secrets
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from spanwire.endpoint import TLS
from spanwire.errors import ConfigurationError
from spanwire.jobs.ids import new_id

from .receiver import SELF_CHECK
from .url_mac import URLMac

__all__ = ["Checked", "self_check"]

#: Clocks that differ by more make signatures look old or new; the tolerance is 300 s.
_MOST_OFFSET_S = 60.0


class Checked(msgspec.Struct, frozen=True):
    """What came out.

    Attributes:
        problems: what is wrong, and what to do; empty if nothing is.
        round_trip_s: from the request to the answer.
        offset_s: the receiver's clock less ours, as far as the round trip tells.
    """

    problems: tuple[str, ...] = ()
    round_trip_s: float | None = None
    offset_s: float | None = None


class _Echo(msgspec.Struct):
    id: str
    sha256: str
    bytes: int
    time: float


def self_check(
    public_url: str, mac: URLMac, *, timeout_s: float = 10.0, clock: Callable[[], float] = time.time
) -> Checked:
    """POST to our own public address, both spellings.

    Raises:
        ConfigurationError: the address is none.
    """
    address = urlsplit(public_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigurationError("the public URL has to be http:// or https://")
    problems: list[str] = []
    best: tuple[float, float] | None = None
    for slash in ("", "/"):
        job = new_id()
        target = urlsplit(mac.url(public_url, SELF_CHECK, job)).path + slash
        # Spelled as no encoder would: an exponent, an escape, a number without a double, a name twice, blanks, no newline.
        body = (
            b'{ "nonce":"%s","a":1e3,"b":"\\u00e9","c":"x\\/y","d":12345678901234567890.5,"e":1,"e":2,"f":"\xc3\xa9"} '
            % secrets.token_hex(16).encode()
        )
        sent_s = clock()
        try:
            status, kind, answer = _post(address.scheme, address.hostname, address.port, target, body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            what = str(error) or type(error).__name__
            problems.append(
                f"{address.hostname} cannot be reached: {what}; is it public, and does something listen there?"
            )
            break
        took_s = clock() - sent_s
        problem, offset_s = _judge(job, body, status, kind, answer, sent_s + took_s / 2)
        if problem is not None:
            problems.append(f"{'with' if slash else 'without'} a slash at the end: {problem}")
        elif best is None or took_s < best[0]:
            best = took_s, offset_s
    if best is not None and abs(best[1]) > _MOST_OFFSET_S:
        problems.append(f"the receiver's clock differs from ours by {best[1]:.0f} s: signatures will look old, or new")
    return Checked(tuple(problems), *(best or (None, None)))


def _judge(job: str, body: bytes, status: int, kind: str, answer: bytes, middle_s: float) -> tuple[str | None, float]:
    if 300 <= status < 400:
        return (
            f"it answers with a redirect ({status}), which providers do not follow: give the address that it leads to",
            0.0,
        )
    if "html" in kind or answer.lstrip()[:1] == b"<":
        return f"it answers {status} with a page of HTML: something else, or a proxy's login, stands there", 0.0
    if status == 404:
        return "it answers 404: another instance key, or another path, than the receiver has", 0.0
    try:
        echo = msgspec.json.decode(answer, type=_Echo)
    except (ValueError, RecursionError):
        return f"it answers {status}, and not as the receiver does", 0.0
    if status != 200 or echo.id != job:
        return f"it answers {status} for another request: something in between has a cache", 0.0
    if echo.sha256 != hashlib.sha256(body).hexdigest():
        return (
            f"the body arrives changed ({echo.bytes} bytes for {len(body)}): a relay writes it anew, and no signature "
            "can be right behind it"
        ), 0.0
    return None, echo.time - middle_s


def _post(
    scheme: str, host: str, port: int | None, target: str, body: bytes, timeout_s: float
) -> tuple[int, str, bytes]:
    connection: http.client.HTTPConnection
    if scheme == "https":
        from spanwire.net.tls import context_for

        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context_for(TLS()))
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.connect()
        if isinstance(connection.sock, socket.socket):
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.request("POST", target, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, (answer.getheader("content-type") or "").lower(), answer.read(64 * 1024)
    finally:
        connection.close()
