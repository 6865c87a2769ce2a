"""What a transport says of the jobs of an endpoint: :class:`JobSettings`, from ``Transport.jobs(endpoint, dialect)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, runtime_checkable

import msgspec

from ..endpoint import Endpoint
from ..transport import Dialect
from .contract import HTTPAnswer, HTTPRequest, JobCodec, JobRow, Mode, Store
from .stores import redacted

__all__ = ["Ask", "Heard", "JobSettings", "JobTransport", "Receiving"]


class Receiving(Protocol):
    """A receiver of webhooks inside this process."""

    @property
    def public_url(self) -> str:
        """Where providers reach it."""

    def close(self) -> None:
        """Take no more; what was begun is finished. Blocking."""


@runtime_checkable
class Heard(Protocol):
    """What a receiver also has that says what becomes of webhooks, for metrics."""

    def hear(self, tell: Callable[[str, str], None]) -> None:
        """Call ``tell``, from any thread, with what happened (``stored``, ``duplicate``, ...) and the dialect or ``""``."""


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the jobs of one endpoint are kept, answered, and looked after.

    Attributes:
        store: its URL, or a store that its owner closes.
        mode: ``webhook``: a callback's URL is given along, or the account has one. ``poll``: nobody can reach us.
        public_url: the base of callback URLs; None where there is none, or ``receiver`` brings it.
        callback: makes a callback's URL of the base, the row, and the store's key.
        receiver: starts one in this process: gets the store, the codecs of all dialects by name, and what to call, from any
            thread, when something has come. Blocking. One for each store and ``receiver_at``.
        deadline_s: how long a job may take where its caller does not say, in seconds.
        batch_deadline_s: the same of a batch, for which providers take up to 24 hours themselves.
        grace_s: how long to wait after a submit without an answer, before it is submitted again.
        on_lost: what to do where the provider has finished the job and the output is gone.
        poll_after_s: ask for the status at the earliest after so long; None: a minute with webhooks, a second without.
        poll_share: of the status requests that the provider allows.
        check_url: gives back an address that a provider has named, if it may be asked. Raises ProtocolError.
    """

    store: str | Store
    mode: Mode
    callback: Callable[[str, JobRow, bytes], str]
    check_url: Callable[[str], str]
    public_url: str | None = None
    receiver: Callable[[Store, Mapping[str, JobCodec], Callable[[], None]], Receiving] | None = None
    receiver_at: str = ""
    deadline_s: float = 86_400.0
    batch_deadline_s: float = 26 * 3600.0
    grace_s: float = 60.0
    on_lost: Literal["raise", "resubmit"] = "raise"
    poll_after_s: float | None = None
    poll_share: float = 0.5

    def __repr__(self) -> str:  # a store's URL may have a password
        store = redacted(self.store) if isinstance(self.store, str) else self.store
        return f"JobSettings(store={store!r}, mode={self.mode!r})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("store", redacted(self.store) if isinstance(self.store, str) else self.store), ("mode", self.mode)]


class Ask(msgspec.Struct, frozen=True):
    """What ``Connection.start`` of such a transport finds in ``call.body["ask"]``: one exchange of bytes.

    Attributes:
        request: what to send, with the credentials and headers of the attempt added.
        read: makes something of the whole answer, whatever its status; what it gives is the exchange's ``learned``. Raises
            what the exchange then ends with.
    """

    request: HTTPRequest
    read: Callable[[HTTPAnswer], object]


@runtime_checkable
class JobTransport(Protocol):
    """What a transport with the capability ``jobs`` has besides the methods of :class:`~spanwire.transport.Transport`.

    The calls that it gets have ``{"ask": Ask(...)}`` as their body; their exchange has an attribute ``learned`` and gives
    one empty chunk.
    """

    def jobs(self, endpoint: Endpoint, dialect: Dialect) -> JobSettings:
        """How this endpoint's jobs are handled. Raises ConfigurationError for options that cannot work."""
