"""The receiver without I/O of its own: a request goes in piece by piece, an answer comes out, and a store holds what is promised.

::

    reception = receiver.begin("POST", path, headers)  # the address's MAC, before any of the body is read
    while reception.reads:
        reception.feed(data)  # verified and spooled as it arrives
    answer = reception.finish()  # durable first, then 2xx: some servers try only twice

``GET .../healthz`` says that the process answers, ``GET .../readyz`` that webhooks can be taken: the store can be written,
and nobody has told the receiver to stop.

Answers: 204 stored (200 to RunPod, which tries again after anything else), 200 was there already, 401 wrong signature, 404 no address of ours, 405, 413 too large, 431 too many
headers, 503 with Retry-After when the store is down and only then.

Nothing that comes is believed: not its length, its encoding, its trace (``traceparent`` is kept with the delivery, for a link,
and is nobody's parent). Nothing unverified resolves a job; it is kept aside where the address was right, since a server that
is answered 401 may never send it again, and the secret may be ours that is wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Final

import msgspec

from spanwire.jobs.contract import Delivery, JobCodec, Seen, Store

from .keys import KeySet, fetch
from .settings import ReceiverSettings
from .signatures import Bearer, Check, Headers, Verdict, Verifier, token_digest, verifier_for
from .url_mac import CallbackPath, URLMac

__all__ = ["SELF_CHECK", "Answer", "Receiver", "Reception"]

logger = logging.getLogger("spanwire.webhook")

#: Name of the provider in addresses that :mod:`spanwire_webhook.selfcheck` asks: answered, and not stored.
SELF_CHECK: Final = "self-check"
_SELF_CHECK_BYTES = 64 * 1024
#: Headers that are kept with a delivery: what schemas and signatures need, and the trace for a link.
_KEPT = frozenset({b"content-type", b"content-encoding", b"traceparent", b"tracestate"})
_KEPT_STARTS = (b"webhook-", b"x-baseten-", b"x-fal-")
_KEPT_BYTES = 32 * 1024
#: Of a wrong bearer token its digest is kept with the delivery, so that it can be judged again. No header of a request is
#: kept under this name.
_TOKEN_DIGEST = "spanwire-token-sha256"  # noqa: S105
#: Of a key that a schema makes of a body.
_MOST_DEDUPE_CHARS = 256
#: Deliveries that are read back from quarantine at once; their bytes have a bound of their own.
_MOST_QUARANTINED = 100_000
#: What a row takes besides its body and its headers, in bytes.
_ROW_BYTES = 512
#: Members of one gzip body (RFC 1952, section 2.2). Real ones have one.
_MOST_MEMBERS = 64
#: What probes ask for, at the end of any path, and how long an answer about the store is good for, in seconds: the address
#: is public.
_HEALTH, _READY = "healthz", "readyz"
_READY_S = 1.0
#: A store that says no after so long has waited for its server, in seconds.
_DOWN_S = 1.0
#: So often a probe writes a row of its own; between them it takes the lock for writing, and finds the row.
_READY_ROW_S = 3600.0


class Answer(msgspec.Struct, frozen=True):
    """A status, headers with names in lower case, and a body."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


_NEW = Answer(204)
_DUPLICATE = Answer(200)  # or, of one that wants it, new
_NOT_FOUND = Answer(404)
_NOT_ALLOWED = Answer(405, ((b"allow", b"POST"),))
_TIMEOUT = Answer(408)
_TOO_LARGE = Answer(413)
_TOO_MANY_HEADERS = Answer(431)


class Receiver:
    """Takes webhooks into a store. Thread-safe; blocks only in :meth:`commit` and :meth:`Reception.finish`.

    Args:
        store: where they go, and stay.
        codecs: schemas, by the name of their dialect.
        settings: see there.
        stored: called with the deliveries that were new, after they are durable, from the thread that committed.
        clock: seconds since the epoch.

    Attributes:
        counters: what happened how often: ``received``, ``stored``, ``duplicate``, ``bad_signature``, ``bad_path``,
            ``bad_mac``, ``stale``, ``unparsed``, ``too_large``, ``quarantined``, ``orphan`` (valid, and of no job that is known),
            ``store_down``, ``disconnected``, ``timeout``.
        tell: is told of each of these, with the dialect or ``""``; from any thread.
        draining: it was told to stop: it takes what comes, and says that it is not ready.

        served_at: where it is reached, if settings do not say it: in the same process.

    Raises:
        ConfigurationError: a secret that is none.
        JobError: the store is down.
    """

    def __init__(
        self,
        store: Store,
        codecs: Mapping[str, JobCodec],
        settings: ReceiverSettings | None = None,
        *,
        stored: Callable[[Sequence[Delivery]], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.settings = settings = settings if settings is not None else ReceiverSettings()
        self.counters: Counter[str] = Counter()
        self._codecs = dict(codecs)
        self._stored = stored
        self._clock = clock
        self._lock = threading.Lock()
        self._quarantine_lock = threading.Lock()
        self._quarantine_left: int | None = None
        self.served_at: str | None = None
        self.tell: Callable[[str, str], None] | None = None
        self.draining = False
        self._ready_lock = threading.Lock()
        self._ready = (float("-inf"), False)
        self.mac = URLMac([*settings.instance_keys, store.instance_key()])
        self._key_sets = {
            scheme: KeySet(load=partial(fetch, url))
            for scheme, url in settings.keys_urls.items()
            if any(codec.scheme == scheme for codec in codecs.values())
        }
        self._verifiers: dict[str, Verifier | None] = {
            name: self._verifier(name, codec) for name, codec in self._codecs.items()
        }
        for name in {*settings.secrets, *settings.unsigned, *settings.body_limits} - self._codecs.keys():
            logger.warning("settings of the receiver name the dialect %r, which is not installed", name)

    def begin(self, method: str, path: str, headers: Headers) -> Reception:
        """A request's head. ``path`` is decoded; its last segments count, see :meth:`URLMac.read`."""
        if method in ("GET", "HEAD"):
            probe = path.partition("?")[0].removesuffix("/").rpartition("/")[2]
            if probe == _HEALTH:
                return Reception(self, CallbackPath("bad_path"), _said(200, "ok"))
            if probe == _READY:
                return Reception(self, CallbackPath("ok", _READY), None)
        where = self.mac.read(path)
        account = ""
        if not where.ok:
            account = path.partition("?")[0].removesuffix("/").rpartition("/")[2]
        self.count("received", where.provider or account)
        if not where.ok:
            codec = self._codecs.get(account)
            # An address that a provider has for all jobs has no MAC: it is open to whoever can sign, and to nobody else.
            if codec is None or not self._for_all_jobs(account, codec):
                self.count(where.reason, where.provider)
                return Reception(self, where, _NOT_FOUND)
            where = CallbackPath("ok", account)
        if method != "POST":
            return Reception(self, where, _NOT_ALLOWED)
        lines = [(_raw(name).lower(), _raw(value)) for name, value in headers]
        if len(lines) > self.settings.most_headers:
            return Reception(self, where, _TOO_MANY_HEADERS)
        return Reception(self, where, None, lines)

    def commit(self, receptions: Sequence[Reception]) -> None:
        """Make deliveries of requests that have arrived, store them in one go, and set their answers. Blocks; never raises."""
        waiting: list[tuple[Reception, Delivery]] = []
        for reception in receptions:
            if reception.answer is not None:
                continue
            try:
                delivery = reception._deliver()
            except Exception:
                logger.warning("a webhook could not be taken in", exc_info=True)
                reception._answer_store_down()
            else:
                if delivery is not None:
                    waiting.append((reception, delivery))
        if waiting:
            self._write(waiting)
        for reception in receptions:
            reception.abandon()

    def _write(self, waiting: Sequence[tuple[Reception, Delivery]]) -> None:
        begin_s = time.monotonic()
        try:
            fresh = self.store.receive([delivery for _, delivery in waiting])
        except Exception as error:  # noqa: BLE001 - whatever a store raises
            # A store that was waited for in vain is down, for all of them: to wait for each would be minutes.
            down = time.monotonic() - begin_s > _DOWN_S
            if len(waiting) > 1 and not down:  # one of them may be what it cannot take: the others are not to suffer
                half = len(waiting) // 2
                self._write(waiting[:half])
                self._write(waiting[half:])
                return
            logger.warning("the store of jobs cannot take a webhook: %s", error)
            for reception, delivery in waiting:
                if not delivery.verified:
                    self._reserve(-_weight(delivery))
                reception._answer_store_down()
            return
        new = [delivery for (_, delivery), is_new in zip(waiting, fresh, strict=True) if is_new and delivery.verified]
        for (reception, delivery), is_new in zip(waiting, fresh, strict=True):
            reception._answer_stored(delivery, is_new)
        self._count_orphans(new)
        if new and self._stored is not None:
            try:
                self._stored(new)
            except Exception:
                logger.warning("whoever waits for webhooks could not be told", exc_info=True)

    def _count_orphans(self, new: Sequence[Delivery]) -> None:
        """Of addresses for all jobs: an address of one job was made with its row."""
        for delivery in new:
            if delivery.job is None and delivery.provider_id is not None:
                dialect = delivery.endpoint.partition("/")[0]
                with contextlib.suppress(Exception):  # it is stored, and that is what counts
                    if self.store.find(dialect, delivery.provider_id) is None:
                        self.count("orphan", dialect)

    def ready(self) -> bool:
        """Webhooks can be taken. Blocks."""
        if self.draining:
            return False
        with self._ready_lock:
            at_s, ready = self._ready
            if time.monotonic() - at_s > _READY_S:
                now_s = self._clock()
                probe = Delivery(endpoint=_READY, dedupe=f"{now_s // _READY_ROW_S:.0f}", received_s=now_s)
                was = ready
                try:
                    self.store.receive([probe])
                    ready = True
                except Exception as error:  # noqa: BLE001 - whatever a store raises
                    ready = False
                    if was or at_s < 0:
                        logger.warning("the store of jobs cannot be written: %s", error)
                self._ready = (time.monotonic(), ready)
            return ready

    def count(self, name: str, dialect: str = "") -> None:
        """One more. ``dialect``: whose; what is none is left out."""
        with self._lock:
            self.counters[name] += 1
        if self.tell is not None:
            with contextlib.suppress(Exception):
                self.tell(name, dialect if dialect in self._codecs else "")

    def verify_again(self) -> tuple[int, int]:
        """Verify what is kept aside, with the secrets of today. Blocks. How many were right now, and how many were tried.

        Raises:
            JobError: the store is down.
        """
        right = tried = 0
        for number, delivery in self.store.quarantined(_MOST_QUARANTINED):
            dialect = delivery.endpoint.partition("/")[0]
            codec = self._codecs.get(dialect)
            tried += 1
            if codec is None:
                continue
            where = CallbackPath("ok", dialect, delivery.job or "", delivery.attempt)
            lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in delivery.headers.items()]
            reception = Reception(self, where, None, lines)
            verifier, digest = self._verifiers[dialect], delivery.headers.get(_TOKEN_DIGEST)
            if isinstance(verifier, Bearer) and digest is not None:
                reception._check = verifier.again(bytes.fromhex(digest))
            reception.feed(delivery.body)
            # The clock of its arrival: what was in time then is not late because a secret was put right.
            verdict = reception._verdict_at(delivery.received_s)
            late = verdict.reason == "too_old" and verdict.signature_ok and not self.settings.strict
            again = (
                reception._verified(codec, delivery.body, verdict, delivery.received_s) if verdict.ok or late else None
            )
            reception.abandon()
            if again is None:
                continue
            # Under its real key first, so that it is there whatever happens next; then the one kept aside is done with.
            self.store.receive([again])
            self.store.verified(number)
            self.store.applied([number])
            right += 1
        return right, tried

    def _verifier(self, name: str, codec: JobCodec) -> Verifier | None:
        if name in self.settings.unsigned:
            return None
        scheme = "bearer" if getattr(codec, "bearer", False) else codec.scheme
        return verifier_for(
            scheme, self.settings.secrets.get(name, ()), self._key_sets, tolerance_s=self.settings.tolerance_s
        )

    def _for_all_jobs(self, name: str, codec: JobCodec) -> bool:
        """Its provider has an address of ours for all jobs, and a secret of ours to sign with."""
        if codec.scheme == "gemini":  # its static webhooks
            return bool(self.settings.secrets.get(name)) and name not in self.settings.unsigned
        return codec.callback == "account" and self._verifiers[name] is not None

    def _by_address(self, name: str, codec: JobCodec) -> bool:
        """The address's MAC is all that is asked for."""
        return self._verifiers[name] is None and (codec.scheme == "none" or name in self.settings.unsigned)

    def _reserve(self, size: int) -> bool:
        """Room for so many bytes more to be kept aside; negative: they were not, after all."""
        with self._quarantine_lock:
            if self._quarantine_left is None:
                kept = sum(_weight(delivery) for _, delivery in self.store.quarantined(_MOST_QUARANTINED))
                self._quarantine_left = self.settings.quarantine_bytes - kept
            if size > self._quarantine_left:
                return False
            self._quarantine_left -= size
            return True


class Reception:
    """One request that is being received.

    Attributes:
        answer: what to answer, once it is known.
        reads: the body, or more of it, is wanted. Else :meth:`finish`, or the answer, is next.
    """

    __slots__ = (
        "_body",
        "_check",
        "_encodings",
        "_hash",
        "_headers",
        "_kept_headers",
        "_limit",
        "_receiver",
        "_size",
        "_too_large",
        "_where",
        "answer",
        "reads",
    )

    def __init__(
        self,
        receiver: Receiver,
        where: CallbackPath,
        answer: Answer | None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._receiver = receiver
        self._where = where
        self.answer = answer
        self.reads = answer is None
        self._headers = headers
        self._kept_headers: dict[str, str] | None = None
        self._size = 0
        self._body: IO[bytes] | bytearray | None = bytearray()
        self._hash = hashlib.sha256()
        self._check: Check | None = None
        self._too_large = False
        if answer is not None:
            return
        self._limit = _SELF_CHECK_BYTES if where.provider == SELF_CHECK else receiver.settings.limit_of(where.provider)
        verifier = receiver._verifiers.get(where.provider)
        if verifier is not None:
            self._check = verifier.begin(headers, audience=self._audience())
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and (len(value) > 15 or int(value) > self._limit):
                self._stop()  # before any of it is read

    def wants_keys(self) -> bool:
        """Public keys may be out of date: call :meth:`reload_keys` (which blocks) before :meth:`finish`."""
        if self.answer is not None or self._too_large or self._check is None:
            return False
        key_set = self._key_set()
        if key_set is None:
            return False
        if not self._check.uses_keys:
            return False
        return key_set.stale() or self._check.verdict(self._receiver._clock()).reason in ("unknown_key", "mismatch")

    def reload_keys(self) -> None:
        """Load the provider's public keys again, if that is allowed yet. Blocks; never raises."""
        key_set = self._key_set()
        if key_set is not None:
            key_set.reload()

    @property
    def size(self) -> int:
        """Bytes of the body so far."""
        return self._size

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""
        if not self.reads or not data:
            return
        self._size += len(data)
        if self._size > self._limit:
            self._stop()
            return
        self._hash.update(data)
        if self._check is not None:
            self._check.feed(data)
        body = self._body
        if isinstance(body, bytearray) and self._size <= self._receiver.settings.spool_bytes:
            body += data
            return
        try:
            if isinstance(body, bytearray):
                spool = tempfile.TemporaryFile(prefix="spanwire-webhook-")  # noqa: SIM115 - closed by abandon()
                spool.write(body)
                self._body = body = spool
            if body is not None:
                body.write(data)
        except OSError as error:
            logger.warning("no room for the body of a webhook: %s", error)
            self._answer_store_down()
            self.abandon()

    def finish(self) -> Answer:
        """All of the body is here: store, and say what to answer. Blocks; never raises."""
        self.reads = False
        self._receiver.commit([self])
        return self.answer if self.answer is not None else self._answer_store_down()

    def give_up(self, why: str) -> Answer:
        """The sender went away (``disconnected``) or is too slow (``timeout``). Nothing is stored."""
        self._receiver.count(why, self._where.provider)
        self.answer = _TIMEOUT
        self.abandon()
        return self.answer

    def abandon(self) -> None:
        """Let go of the body."""
        self.reads = False
        body, self._body = self._body, None
        if body is not None and not isinstance(body, bytearray):
            with contextlib.suppress(OSError):
                body.close()

    # --- what to store -----------------------------------------------------------------------------------------------

    def _deliver(self) -> Delivery | None:
        """What to store of it; None where that is nothing, and the answer is set."""
        receiver, where = self._receiver, self._where
        now_s = receiver._clock()
        if where.provider == SELF_CHECK:
            self.answer = self._echo(now_s)
            return None
        if where.provider == _READY:
            words = "draining" if receiver.draining else "the store cannot be written"
            self.answer = _said(200, "ok") if receiver.ready() else _said(503, words)
            return None
        if self._too_large:
            return self._without_body(now_s)
        codec = receiver._codecs.get(where.provider)
        verdict = self._verdict_at(now_s)
        if codec is None or not (verdict.ok or self._acceptable(codec, verdict)):
            return self._refused(verdict, now_s)
        return self._verified(codec, self._whole(), verdict, now_s)

    def _verdict_at(self, now_s: float) -> Verdict:
        if self._check is not None:
            return self._check.verdict(now_s)
        codec = self._receiver._codecs.get(self._where.provider)
        if codec is not None and self._where.job and self._receiver._by_address(self._where.provider, codec):
            return Verdict("ok", True)
        return Verdict("unknown_key")  # it can sign, and we have nothing to verify with

    def _acceptable(self, codec: JobCodec, verdict: Verdict) -> bool:
        """Right, late, and of a job that we know: a sender that tries for hours does not always sign anew."""
        if not (verdict.reason == "too_old" and verdict.signature_ok) or self._receiver.settings.strict:
            return False
        if self._where.job:
            return self._receiver.store.get(self._where.job) is not None
        seen = self._seen(codec, self._kept(), verdict.payload if verdict.payload is not None else self._whole())
        provider_id = _storable(seen.provider_id) if seen is not None else None
        return provider_id is not None and self._receiver.store.find(self._where.provider, provider_id) is not None

    def _verified(self, codec: JobCodec, raw: bytes, verdict: Verdict, now_s: float) -> Delivery | None:
        """What is believed."""
        flags: list[str] = []
        if verdict.reason != "ok":
            flags.append("stale")
        body: bytes | None = raw
        if verdict.payload is not None:
            body = verdict.payload  # a token that does not cover the body: what is signed is the event
        else:
            encodings = [
                part.strip()
                for name, value in self._headers
                if name == b"content-encoding"
                for part in value.lower().split(b",")
            ]
            encodings = [one for one in encodings if one not in (b"", b"identity")]
            if encodings:
                try:
                    body = _decompress(raw, encodings, self._limit)
                except ValueError:
                    body = None
                if body is None:
                    flags.append("undecoded")
                elif len(body) > self._limit:
                    return self._without_body(now_s)
        headers = self._kept()
        if "undecoded" not in flags:
            headers.pop("content-encoding", None)
        seen = self._seen(codec, headers, body) if body is not None else None
        if seen is None:
            flags.append("unparsed")
        return Delivery(
            endpoint=self._endpoint(),
            dedupe=self._dedupe(codec, headers, raw if body is None else body),
            job=self._where.job or None,
            attempt=self._where.attempt,
            provider_id=_storable(seen.provider_id) if seen is not None else None,
            received_s=now_s,
            headers=headers,
            body=raw if body is None else body,
            flags=tuple(flags),
        )

    def _refused(self, verdict: Verdict, now_s: float) -> Delivery | None:
        """Kept aside if the address is ours; an open address would be an invitation to fill the disk."""
        receiver = self._receiver
        receiver.count("bad_signature", self._where.provider)
        self.answer = Answer(401, ((b"content-type", b"text/plain; charset=utf-8"),), verdict.reason.encode())
        if not self._where.job:
            return None
        headers = self._kept()
        if isinstance(receiver._verifiers.get(self._where.provider), Bearer):
            token = next((value for name, value in self._headers if name == b"authorization"), b"")
            digest = token_digest(token)
            if digest is not None:
                headers = {**headers, _TOKEN_DIGEST: digest.hex()}
        delivery = Delivery(
            endpoint=self._endpoint(),
            dedupe=f"{verdict.reason}:{self._hash.hexdigest()}",
            job=self._where.job,
            attempt=self._where.attempt,
            received_s=now_s,
            headers=headers,
            body=self._whole(),
            verified=False,
            flags=("stale", "unverified") if verdict.signature_ok else ("unverified",),
        )
        if not receiver._reserve(_weight(delivery)):
            return None
        self.answer = None
        return delivery

    def _without_body(self, now_s: float) -> Delivery | None:
        """Too large: it says that there is something to ask for, no more. By the address alone, so that is all it may do."""
        self._receiver.count("too_large", self._where.provider)
        self.answer = _TOO_LARGE
        if not self._where.job:
            return None
        self.answer = None
        return Delivery(
            endpoint=self._endpoint(),
            dedupe="too_large",
            job=self._where.job,
            attempt=self._where.attempt,
            received_s=now_s,
            flags=("too_large", "unparsed"),
        )

    def _seen(self, codec: JobCodec, headers: Mapping[str, str], body: bytes) -> Seen | None:
        try:
            return codec.webhook(headers, body)
        except (ValueError, RecursionError):
            return None
        except Exception:
            logger.warning("the dialect %r cannot read a webhook", self._where.provider, exc_info=True)
            return None

    def _dedupe(self, codec: JobCodec, headers: Mapping[str, str], body: bytes) -> str:
        try:
            key = _storable(codec.dedupe(headers, body))
        except Exception:  # noqa: BLE001 - of a body that cannot be read, for instance
            key = ""
        if not key:
            return f"sha256:{hashlib.sha256(body).hexdigest()}"
        return (
            key
            if len(key) <= _MOST_DEDUPE_CHARS
            else f"sha256:{hashlib.sha256(key.encode('utf-8', 'replace')).hexdigest()}"
        )

    # --- what to answer ----------------------------------------------------------------------------------------------

    def _answer_stored(self, delivery: Delivery, is_new: bool) -> None:
        receiver = self._receiver
        if not delivery.verified:
            if is_new:
                receiver.count("quarantined", self._where.provider)
            else:
                receiver._reserve(-_weight(delivery))
            self.answer = Answer(
                401, ((b"content-type", b"text/plain; charset=utf-8"),), delivery.dedupe.partition(":")[0].encode()
            )
        elif "too_large" in delivery.flags:
            self.answer = _TOO_LARGE
        else:
            receiver.count("stored" if is_new else "duplicate", self._where.provider)
            for flag in ("stale", "unparsed"):
                if flag in delivery.flags:
                    receiver.count(flag, self._where.provider)
            codec = receiver._codecs.get(self._where.provider)
            # What takes 200 alone for an answer says so.
            self.answer = _NEW if is_new and not getattr(codec, "wants_200", False) else _DUPLICATE

    def _answer_store_down(self) -> Answer:
        self._receiver.count("store_down", self._where.provider)
        after = str(self._receiver.settings.retry_after_s).encode()
        self.answer = Answer(503, ((b"retry-after", after),))
        return self.answer

    def _echo(self, now_s: float) -> Answer:
        """For the self-check: what arrived here."""
        if self._too_large:
            return _TOO_LARGE
        said = {"id": self._where.job, "sha256": self._hash.hexdigest(), "bytes": self._size, "time": now_s}
        return Answer(200, ((b"content-type", b"application/json"),), msgspec.json.encode(said))

    # --- inner -------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._too_large = True
        self._check = None
        self.abandon()

    def _whole(self) -> bytes:
        body = self._body
        if body is None:
            return b""
        if isinstance(body, bytearray):
            return bytes(body)
        body.seek(0)
        return body.read()

    def _endpoint(self) -> str:
        where = self._where
        return f"{where.provider}/{where.job}.{where.attempt}" if where.job else where.provider

    def _audience(self) -> tuple[str, ...]:
        settings, where = self._receiver.settings, self._where
        if not where.job:
            return ()  # an address for all jobs: anybody can have a token made out to it, of a job of his own
        public_url = settings.public_url or self._receiver.served_at
        if public_url is None:
            return settings.audience
        base = public_url.rstrip("/")
        own = self._receiver.mac.urls(base, where.provider, where.job, where.attempt)
        return (*settings.audience, *own, *(f"{one}/" for one in own), public_url)

    def _key_set(self) -> KeySet | None:
        codec = self._receiver._codecs.get(self._where.provider)
        return self._receiver._key_sets.get(codec.scheme) if codec is not None else None

    def _kept(self) -> dict[str, str]:
        """The headers that are worth keeping; of two lines the first. Credentials of the sender are not among them."""
        if self._kept_headers is not None:
            return self._kept_headers
        kept = self._kept_headers = {}
        size = 0
        for name, value in self._headers:
            if name in _KEPT or name.startswith(_KEPT_STARTS):
                size += len(name) + len(value)
                if size > _KEPT_BYTES:
                    break
                kept.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        return kept


def _said(status: int, words: str) -> Answer:
    return Answer(status, ((b"content-type", b"text/plain; charset=utf-8"),), f"{words}\n".encode())


def _weight(delivery: Delivery) -> int:
    """Bytes that a delivery takes in a store, about: a small body may come with many headers."""
    return _ROW_BYTES + len(delivery.body) + sum(len(name) + len(value) for name, value in delivery.headers.items())


def _storable(said: object) -> str | None:
    """Text that any store can take, and give back. What a body says may be no text, or half a character of UTF-16."""
    if not isinstance(said, str) or "\0" in said:
        return None
    try:
        said.encode()
    except UnicodeEncodeError:
        return None
    return said


def _raw(value: bytes | str) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)


def _decompress(raw: bytes, encodings: Sequence[bytes], limit: int) -> bytes:
    """Decoded, cut one byte behind the limit: whoever gets more than the limit knows that there is more.

    Raises:
        ValueError: an encoding that we do not know, or that it does not have.
    """
    if len(encodings) != 1 or encodings[0] not in (b"gzip", b"x-gzip", b"deflate"):
        raise ValueError("an unknown content encoding")
    bits = zlib.MAX_WBITS | 16 if encodings[0] != b"deflate" else zlib.MAX_WBITS
    whole = bytearray()
    for _ in range(_MOST_MEMBERS):
        decoder = zlib.decompressobj(bits)
        try:
            whole += decoder.decompress(raw, limit + 1 - len(whole))
        except zlib.error as error:
            raise ValueError("it is not what its content encoding says") from error
        if len(whole) > limit:
            return bytes(whole)
        if not decoder.eof:
            raise ValueError("it ends in the middle")
        raw = decoder.unused_data
        if not raw.startswith(b"\x1f\x8b"):
            return bytes(whole)
    raise ValueError("too many members")
