"""What can go wrong, as one tree. Catch :class:`SpanwireError` for everything that spanwire raises by itself.

::

    SpanwireError
    ├── ConfigurationError            a bad endpoint, option or call; nothing was sent
    │   ├── PluginError               a plugin cannot be loaded, or breaks its contract
    │   └── PluginConflict            two plugins claim the same scheme or name
    ├── NoSlot                        the local limits of ``Limits`` refused the call
    │   ├── QueueFull                 ``max_queue`` calls wait already
    │   └── QueueTimeout              waited ``queue_timeout_s`` for a slot
    ├── CallTimeout                   a limit of ``Timeouts`` was hit; ``.limit`` names it
    ├── ConnectionFailed              could not be made, or broke
    ├── ServerError                   the server says that it failed: ``.status``, ``.code``, ``.retry_after_s``
    │   ├── AuthenticationFailed      401, 403
    │   ├── RateLimited               429
    │   ├── BadRequest                any other 4xx
    │   └── Overloaded                503, 529
    ├── ProtocolError                 the answer is not what this operation can be
    │   └── MessageTooBig             a message over ``Limits.max_event_bytes``
    ├── Truncated                     a clean end before the answer was complete
    └── JobError                      a job, or the store of jobs, failed; ``.job`` is the job's id
        ├── JobLost                   the provider has finished it, and the output is gone
        ├── JobExpired                its deadline, or the provider's own limit, came first
        ├── JobCancelled              it was cancelled
        └── SignatureInvalid          a webhook's signature is wrong

Every error carries

* ``endpoint``: host and port (or the unix socket) it was about, never a key, header or query value;
* ``phase``: where in the call it happened: ``configure``, ``queue``, ``dns``, ``tcp``, ``tls``, ``proxy``,
  ``upgrade``, ``connect``, ``send``, ``wait`` (sent, nothing of the answer yet) or ``read``;
* ``retryable``: whether the same call may succeed if it is sent again later;
* ``full``: the server takes no further connection now, and will when one of those that it has is given up: the manager
  waits for that, see :class:`~spanwire.endpoint.Limits`;
* ``again``: the server has not begun, and the same call may be sent again at once, on a new connection; once;
* ``reply``: what had arrived, as a partial :class:`~spanwire.calls.Reply`, or None;
* ``timeline``: where the time went until then, or None;
* ``__cause__``: the exception of the wire library, where there was one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .calls import Reply
    from .timeline import Timeline

__all__ = [
    "AuthenticationFailed",
    "BadRequest",
    "CallTimeout",
    "ConfigurationError",
    "ConnectionFailed",
    "JobCancelled",
    "JobError",
    "JobExpired",
    "JobLost",
    "MessageTooBig",
    "NoSlot",
    "Overloaded",
    "PluginConflict",
    "PluginError",
    "ProtocolError",
    "QueueFull",
    "QueueTimeout",
    "RateLimited",
    "ServerError",
    "SignatureInvalid",
    "SpanwireError",
    "Truncated",
    "server_error",
    "visible",
]

#: What a terminal, or a reader, would obey instead of showing it: control characters (C0 without tab and line feed, DEL, C1),
#: what turns the direction of text, and halves of characters, which no encoding takes. Source: ECMA-48; UAX #9, section 2.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text of others as it may be shown on a terminal or in a log: what would be obeyed is written out, as in JSON."""
    return text if text.isprintable() else _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class SpanwireError(Exception):
    """Base of everything that spanwire raises by itself.

    Args:
        message: what happened, where, and what to do about it. Shown to people: no keys, headers or content; control
            characters in it, which may be a server's, are written out.
        endpoint: host and port the call went to.
        phase: see the module's docstring.
        retryable: the same call may succeed if it is sent again later.
    """

    phase: str = "configure"
    retryable: bool = False
    full: bool = False
    again: bool = False

    def __init__(
        self, message: str, *, endpoint: str | None = None, phase: str | None = None, retryable: bool | None = None
    ) -> None:
        message = visible(str(message))  # a plugin may give an exception
        super().__init__(message)
        self.message = message
        self.endpoint = endpoint
        if phase is not None:
            self.phase = phase
        if retryable is not None:
            self.retryable = retryable
        self.reply: Reply | None = None
        self.timeline: Timeline | None = None

    def __str__(self) -> str:
        return f"{self.message} [{self.endpoint}]" if self.endpoint else self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments make the default reduction fail; errors cross process pools (Celery, multiprocessing).
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[SpanwireError], message: str, state: dict[str, object]) -> SpanwireError:
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigurationError(SpanwireError):
    """A bad endpoint, option or call. Nothing was sent; sending it again cannot help."""


class PluginError(ConfigurationError):
    """A plugin cannot be loaded, or breaks its contract. The message names the plugin and its distribution."""


class PluginConflict(ConfigurationError):
    """Two plugins claim the same scheme or name. The message names both."""


class NoSlot(SpanwireError):
    """The local limits of :class:`~spanwire.endpoint.Limits` refused the call. Nothing was sent."""

    phase = "queue"
    retryable = True


class QueueFull(NoSlot):
    """``Limits.max_queue`` calls wait for this endpoint already."""


class QueueTimeout(NoSlot):
    """The call waited ``Limits.queue_timeout_s`` for a slot, or for room on a server that is full."""


class CallTimeout(SpanwireError):
    """A limit of :class:`~spanwire.endpoint.Timeouts` was hit.

    Attributes:
        limit: the field of ``Timeouts``: ``connect_s``, ``first_content_s``, ``idle_s`` or ``total_s``.
    """

    retryable = True

    def __init__(
        self,
        message: str,
        *,
        limit: str,
        endpoint: str | None = None,
        phase: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, endpoint=endpoint, phase=phase, retryable=retryable)
        self.limit = limit


class ConnectionFailed(SpanwireError):
    """A connection could not be made (phase ``dns``, ``tcp``, ``tls``, ``proxy``, ``upgrade``), or it broke."""

    phase = "connect"
    retryable = True


class ServerError(SpanwireError):
    """The server says that it failed: a status of 300 and above, or an error object inside a 200 answer.

    Attributes:
        status: the HTTP status, or None where the answer had none (an error inside a stream keeps its 200).
        code: the server's own code from the body, as the server wrote it (text or number), or None.
        retry_after_s: how long the server asks to wait, in seconds, or None.
        headers: the answer's headers, names in lower case.
    """

    phase = "read"

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | int | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
        endpoint: str | None = None,
        phase: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, endpoint=endpoint, phase=phase, retryable=retryable)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = headers or {}


class AuthenticationFailed(ServerError):
    """401 or 403: the key is missing, wrong, or may not do this."""


class RateLimited(ServerError):
    """429: too many calls or tokens."""

    retryable = True


class BadRequest(ServerError):
    """Any other 4xx: the server does not accept this call."""


class Overloaded(ServerError):
    """503 or 529: the server cannot take the call now."""

    retryable = True


class ProtocolError(SpanwireError):
    """The answer is not what this operation can be. Shows at most 200 characters of it."""

    phase = "read"


class MessageTooBig(ProtocolError):
    """One message of the answer is over ``Limits.max_event_bytes``."""


class Truncated(SpanwireError):
    """The answer ended cleanly before it was complete; ``.reply`` holds what had arrived."""

    phase = "read"
    retryable = True


class JobError(SpanwireError):
    """A job, or the store of jobs, failed. Base of what only jobs can be.

    A job that the provider reports as failed raises the :class:`ServerError` that fits, as any other call does.

    Attributes:
        job: the job's id; None where it is about no single one.
    """

    phase = "wait"

    def __init__(
        self,
        message: str,
        *,
        job: str | None = None,
        endpoint: str | None = None,
        phase: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, endpoint=endpoint, phase=phase, retryable=retryable)
        self.job = job


class JobLost(JobError):
    """The provider says that the job is done, and its output cannot be had any more."""

    retryable = True


class JobExpired(JobError):
    """The job's deadline came before its result, or the provider gave it up."""

    retryable = True


class JobCancelled(JobError):
    """The job was cancelled, by ``job.cancel()`` or at the provider."""


class SignatureInvalid(JobError):
    """A webhook's signature is wrong. Nobody is resolved by it; the receiver keeps it in quarantine."""

    phase = "read"


#: Statuses that are worth another try, besides those that have a class of their own: request timeout, conflict (a
#: lock), too early, and every 5xx except 501 and 505, which say "never". Source: RFC 9110 section 15, RFC 8470.
_RETRYABLE_4XX = frozenset({408, 409, 425, 429})
_FINAL_5XX = frozenset({501, 505})


def server_error(
    message: str,
    *,
    status: int | None = None,
    code: str | int | None = None,
    retry_after_s: float | None = None,
    headers: dict[str, str] | None = None,
    endpoint: str | None = None,
) -> ServerError:
    """Build the :class:`ServerError` that fits a status, or a numeric code found in the body of a 200 answer.

    The class and ``retryable`` follow ``status`` when it is an error status, else ``code`` when it is a number that
    could be one.
    """
    number = status if status is not None and status >= 300 else _as_status(code)
    cls: type[ServerError] = ServerError
    retryable = False
    if number is not None:
        if number in (401, 403):
            cls = AuthenticationFailed
        elif number == 429:
            cls = RateLimited
        elif 400 <= number < 500:
            cls = BadRequest
        elif number in (503, 529):
            cls = Overloaded
        retryable = number in _RETRYABLE_4XX or (500 <= number < 600 and number not in _FINAL_5XX)
    return cls(
        message,
        status=status,
        code=code,
        retry_after_s=retry_after_s,
        headers=headers,
        endpoint=endpoint,
        retryable=retryable,
    )


def _as_status(code: str | int | None) -> int | None:
    if isinstance(code, str) and code.isascii() and code.isdigit():
        code = int(code[:4])
    return code if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600 else None
