"""What the parts of a job agree on: states, what is seen of a job, its row, the store, and a provider's schema.

A job is a call that is answered later. Its life, and who writes what::

    manager.submit ──► row (created) ──► submit exchange ──► acknowledged: provider_id (submitted)
                                                                  │
         receiver ──► inbox row, durable, then 2xx ──► Seen ──────┤
         poller   ──► status exchange ─────────────► Seen ──────► states.advance(row, seen) ──► compare-and-set
                                                                  │
                                        terminal: the result's reference, resolved once, whoever waits is woken

Everything here is data, or a protocol without I/O of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from ..calls import BatchReply, Call, Embeddings, Reply
from ..endpoint import Endpoint
from ..errors import ServerError

__all__ = [
    "DAMAGED",
    "OPEN",
    "TERMINAL",
    "BatchCodec",
    "BatchLimits",
    "Delivery",
    "HTTPAnswer",
    "HTTPRequest",
    "JobCodec",
    "JobRow",
    "Mode",
    "Seeks",
    "Seen",
    "State",
    "Steps",
    "Store",
    "Times",
    "Wakes",
]

State = Literal[
    "created",  # the row is written, nothing was sent
    "submitting",  # the request is being sent
    "submit_unknown",  # it was sent, and no answer came
    "submitted",  # acknowledged
    "queued",
    "running",
    "succeeded",
    "failed",
    "cancelled",
    "expired",  # the deadline, or the provider's own limit
    "lost",  # the provider says that it is done, and the output is gone
]
OPEN: frozenset[State] = frozenset({"created", "submitting", "submit_unknown", "submitted", "queued", "running"})
TERMINAL: frozenset[State] = frozenset({"succeeded", "failed", "cancelled", "expired", "lost"})

#: A flag of a delivery whose body cannot be read in the store any more.
DAMAGED = "damaged"

#: How results come: by webhook with polling as the fallback, or by polling alone (no public URL).
Mode = Literal["webhook", "poll"]


class Times(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a provider says of its own time: seconds since the epoch by its own clock, and durations in seconds."""

    accepted_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None
    queue_s: float | None = None
    model_s: float | None = None
    total_s: float | None = None


class Seen(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that was learned of a job: by an acknowledgement, a webhook, or a status.

    Attributes:
        state: what it says; None if it says nothing that we know (an unknown status without an end, output or error).
        provider_id: the provider's id of the job.
        body: raw bytes that hold the result; None if they do not (a thin webhook).
        fetch: the result, or why there is none, has to be asked for first, with :meth:`JobCodec.result`, and of a batch then
            with :meth:`BatchCodec.fetches`.
        urls: addresses that the provider gave: ``status``, ``result``, ``cancel``; and ids of files.
        code, message: of a failure.
        times: the provider's own.
        retry_after_s: it asks not to be asked before.
    """

    state: State | None = None
    provider_id: str | None = None
    body: bytes | None = None
    fetch: bool = False
    urls: Mapping[str, str] = {}
    code: str | None = None
    message: str | None = None
    times: Times = Times()
    retry_after_s: float | None = None


class JobRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A job as the store has it. Times are seconds since the epoch by our clock.

    Attributes:
        id: UUIDv7 as text, made here.
        group: the caller's name for jobs that belong together, ``""`` for none.
        endpoint: host and port, for people; ``origin`` identifies the endpoint for whoever takes the job over.
        transport, dialect: names of the transport and of the provider's schema.
        mode: how its result comes.
        model, operation: of the call.
        attempt: number of the submit, from 1: it is in the callback's URL.
        provider_id, urls: as the provider gave them.
        state: see :data:`State`.
        created_s, submitted_s, resolved_s: 0.0 = not yet.
        running_s: when it was first seen at work, by a webhook, or by a status after one that said ``queued``; 0.0 = never.
        due_s: the deadline; poll_s: when to ask next (0.0 = not planned).
        times: the provider's.
        trace: ``traceparent`` and the like of the producer span.
        input: the encoded call, to submit it again; b"" once it is not needed, or if the store cannot read it any more.
        result: where the result's body is: ``b""`` for none, else a reference that only the store understands.
        code, message: of a failure.
        resolved_by: ``webhook``, ``poll``, ``ack`` or ``local``.
        flags: ``late_result``, ``stale``, ``unverified``, ``resubmitted`` ...
        revision: how often it was written since it was added: :meth:`Store.swap` counts, and compares.
    """

    id: str
    group: str = ""
    endpoint: str = ""
    origin: str = ""
    transport: str = "webhook"
    dialect: str = ""
    mode: Mode = "webhook"
    model: str = ""
    operation: str = "chat"
    attempt: int = 1
    provider_id: str | None = None
    urls: dict[str, str] = {}
    state: State = "created"
    created_s: float = 0.0
    submitted_s: float = 0.0
    resolved_s: float = 0.0
    running_s: float = 0.0
    due_s: float = 0.0
    poll_s: float = 0.0
    times: Times = Times()
    trace: dict[str, str] = {}
    input: bytes = b""
    result: bytes = b""
    code: str | None = None
    message: str | None = None
    resolved_by: str = ""
    flags: tuple[str, ...] = ()
    revision: int = 0


class Delivery(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One webhook that came, as it is put into the inbox before it is answered.

    Attributes:
        endpoint: whose it is: the dialect's name, then the receiver's path (``openai/hooks/openai``).
        dedupe: equal for repeated deliveries of the same thing; unique together with ``endpoint``.
        job: our id of the job, None where only the provider's is known.
        attempt: of the URL, 0 if unknown.
        provider_id: as the body says, None if unknown.
        received_s: our clock.
        headers: those that a schema needs, names in lower case.
        body: the raw bytes, up to the limit.
        verified: its signature, or its URL's MAC where the schema has no signature, was right.
        flags: ``stale``, ``unverified``, ``unparsed`` ... and :data:`DAMAGED`, by the store: its body is gone.
    """

    endpoint: str
    dedupe: str
    job: str | None = None
    attempt: int = 0
    provider_id: str | None = None
    received_s: float = 0.0
    headers: dict[str, str] = {}
    body: bytes = b""
    verified: bool = True
    flags: tuple[str, ...] = ()


class HTTPRequest(msgspec.Struct, frozen=True):
    """A request to a provider: an absolute path below the endpoint's origin, or a whole URL at an allowed host.

    ``most_bytes``: of the answer, where that may be larger than ``Limits.max_event_bytes``: a file.
    """

    method: str
    target: str
    headers: Mapping[str, str] = {}
    body: bytes = b""
    most_bytes: int = 0


class HTTPAnswer(msgspec.Struct, frozen=True):
    """Its answer. Header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@runtime_checkable
class JobCodec(Protocol):
    """PURE: a provider's schema of jobs. What ``Dialect.codec`` is for a transport with the capability ``jobs``.

    Attributes:
        scheme: how its webhooks are signed: ``standard``, ``baseten``, ``fal``, ``gemini``, or ``none`` (the URL's MAC alone).
        callback: where the callback's URL goes: ``request`` (each submit names it) or ``account`` (set up at the provider; its
            webhooks are told apart by the provider's id).
        polls: its status can be asked for.
        status_has_output: and says the result, or where it is: else a job without a public URL is refused.
        resubmits: the submit may be sent again with the same id (idempotent).
        most_body_bytes: of a submit; None for no limit.
        retention_s: how long a result is kept.
        polls_per_s: how many status requests a second the provider allows; a share of it is used.
        delivery_s: how long it goes on trying to deliver.
    """

    scheme: Literal["standard", "baseten", "fal", "gemini", "none"]
    callback: Literal["request", "account"]
    polls: bool
    status_has_output: bool
    resubmits: bool
    most_body_bytes: int | None
    retention_s: float
    polls_per_s: float
    delivery_s: float

    def credentials(self, api_key: str) -> Mapping[str, str]:
        """Headers that carry the key."""

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        """The submit. Raises ConfigurationError for what cannot be said, or is too large."""

    def acknowledged(self, answer: HTTPAnswer) -> Seen:
        """What the provider answered to the submit. Raises ServerError."""

    def webhook(self, headers: Mapping[str, str], body: bytes) -> Seen:
        """What a verified webhook says. Raises ValueError for a body that cannot be read."""

    def dedupe(self, headers: Mapping[str, str], body: bytes) -> str:
        """Equal for repeated deliveries of the same thing."""

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        """Asks how a job stands; None where there is no way."""

    def told(self, answer: HTTPAnswer) -> Seen:
        """What the status says. 404 is ``expired`` or ``lost`` as the provider means it. Raises ServerError."""

    def result(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        """Asks for the result of a job that is done."""

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        """Asks to stop it."""

    def reply(self, call_operation: str, body: bytes) -> Reply | Embeddings:
        """The result. Raises ServerError, ProtocolError."""

    def failure(self, row: JobRow) -> ServerError | None:
        """The provider's error of a job that has failed."""


@runtime_checkable
class Steps(Protocol):
    """PURE: what a codec also has whose submit takes several requests, such as a file's upload and then the batch.

    Only the last one begins anything: those before it may be sent again, and if one fails the job has not been taken.
    """

    def steps(self, call: Call) -> int:
        """How many requests the submit of this call takes."""

    def follow(
        self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None, answers: Sequence[HTTPAnswer]
    ) -> HTTPRequest:
        """What is sent next, after the submit's request and those that followed it were answered so. Raises ServerError,
        ProtocolError for an answer with which it cannot go on."""


class BatchLimits(msgspec.Struct, frozen=True):
    """What a provider takes as one batch.

    Attributes:
        operations: of the calls in it, ``chat`` and ``embeddings``; all of one batch have the same one, and the same model.
        most_calls: in one batch.
        most_inputs: texts of all its embeddings together; None for no limit.
        most_bytes: of the file.
    """

    operations: frozenset[str]
    most_calls: int
    most_bytes: int
    most_inputs: int | None = None


@runtime_checkable
class BatchCodec(Protocol):
    """PURE: what a codec also has whose provider takes many calls as one job. Such a job's call is a ``Call.batch()``."""

    batches: BatchLimits

    def fetches(self, row: JobRow, endpoint: Endpoint) -> Sequence[HTTPRequest]:
        """What to ask for, once a batch has ended, to have its result: its files. Empty if there is nothing.

        ``row.urls`` has what the status said."""

    def fetched(self, row: JobRow, seen: Seen, names: Sequence[str], answers: Sequence[HTTPAnswer]) -> Seen:
        """What these say: ``body`` is all of it, for :meth:`replies`. Not asked where there was nothing to fetch.

        Args:
            seen: what the status said.
            names: of the calls, in their order; empty if that is not known any more.

        Raises:
            ServerError: a file cannot be had now.
        """

    def replies(self, body: bytes) -> BatchReply:
        """The results of a batch. A call that failed has its error there. Raises ProtocolError."""


@runtime_checkable
class Seeks(Protocol):
    """PURE: what a codec also has whose provider can be searched for a job of ours, after a submit without an answer."""

    def seek(self, row: JobRow, endpoint: Endpoint, answers: Sequence[HTTPAnswer]) -> HTTPRequest | None:
        """What to ask for next, after these answers to what was asked before; None if there is no more, or no way for this
        job. Raises ServerError, ProtocolError."""

    def sought(self, row: JobRow, answers: Sequence[HTTPAnswer]) -> Seen | None:
        """The acknowledgement of any attempt of this job, if it is in them. Raises ServerError, ProtocolError."""


@runtime_checkable
class Wakes(Protocol):
    """What a store also has that hears of others' writes, and need not be asked."""

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake``, from any thread and soon, after anybody wrote. Returns what ends it."""


@runtime_checkable
class Store(Protocol):
    """Where jobs are. Every method is safe from any thread, and durable when it returns. Times are seconds since the epoch.

    One job's damage is not another's: a row whose input is gone comes without it, a delivery whose body is gone with the flag
    :data:`DAMAGED`, and what cannot be read now is left out of :meth:`due` and :meth:`unapplied`, where others can be.

    Raises:
        JobError: the store is down (retryable).
    """

    def add(self, rows: Sequence[JobRow]) -> None:
        """New jobs."""

    def get(self, id: str) -> JobRow | None:
        """A job."""

    def find(self, dialect: str, provider_id: str) -> JobRow | None:
        """A job by the provider's id of it, or of one of its attempts."""

    def swap(self, row: JobRow, *, was: tuple[State, int]) -> bool:
        """Compare-and-set: write the row if the stored one has this state and attempt, and the revision that ``row`` has. It is
        stored with the next revision. False if the stored one is another, or gone."""

    def receive(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Put deliveries into the inbox; False for each that was there already."""

    def unapplied(
        self,
        *,
        job: str | None = None,
        provider: tuple[str, str] | None = None,
        limit: int = 1000,
        lease_s: float = 0.0,
    ) -> list[tuple[int, Delivery]]:
        """Verified deliveries that were not applied yet, the oldest first: of one job, of one (dialect, provider's id), or of
        all whose job is here.

        ``lease_s``, only for the last: so long nobody else who gives one is given them, by the store's clock. A lease is a
        hint that saves work: one that ends too soon does no harm.
        """

    def applied(self, numbers: Sequence[int]) -> None:
        """These deliveries have been applied."""

    def put_body(self, body: bytes) -> bytes:
        """Keep a result; returns its reference."""

    def body(self, reference: bytes) -> bytes:
        """A result's bytes."""

    def due(
        self,
        now_s: float,
        limit: int = 500,
        *,
        parties: Sequence[tuple[str, str]] | None = None,
        lease_s: float = 0.0,
    ) -> list[JobRow]:
        """Open jobs whose deadline or next poll has come, the one that waits longest first.

        Args:
            parties: only those of these (origin, dialect).
            lease_s: so long they are not due for anybody, unless they are written meanwhile. 0.0: only look.
        """

    def states(self, ids: Sequence[str]) -> dict[str, State]:
        """How these jobs stand; those that are not here are left out."""

    def open_jobs(self, group: str | None = None) -> int:
        """How many are open."""

    def completed(self, group: str, after: tuple[float, str] = (0.0, "")) -> list[JobRow]:
        """Jobs of a group that are terminal, in order of ``(resolved_s, id)``, from there on."""

    def changed(self) -> int:
        """A number that differs once anything was written, also by another process. Cheap: asked several times a second."""

    def quarantined(self, limit: int = 1000) -> list[tuple[int, Delivery]]:
        """Deliveries that could not be verified."""

    def verified(self, number: int) -> None:
        """One of those could be, after all."""

    def instance_key(self) -> bytes:
        """32 random bytes that were made with the store, the same for whoever opens it: what signs callback URLs where no
        other key is set."""

    def sweep(self, now_s: float) -> int:
        """Delete what is older than its retention; returns how many rows went."""

    def close(self) -> None:
        """Let go of everything."""
