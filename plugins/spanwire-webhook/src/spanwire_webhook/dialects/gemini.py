"""Gemini's interactions in the background: ``POST /interactions``, a thin webhook, ``GET /interactions/{id}``.

Sources: ai.google.dev/gemini-api/docs/interactions and .../webhooks (2026-05-28); types of google-genai 2.x, whose API
revision is named in each request. An embeddings call, and a batch, is a batch there: see :mod:`.gemini_batch`.

Webhooks come in two ways. *Dynamic* ones are named by each submit, and signed with a token whose claims are the event.
They may never fire (github.com/google-gemini/cookbook/issues/1297), so the status is asked for as well. *Static* ones are
set up for a project, and signed with its secret as Standard Webhooks: with ``options={"webhooks": "static"}`` a submit names
none, and jobs are told apart by Gemini's id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from spanwire.calls import BatchReply, Call, Embeddings, Reply
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, ProtocolError, ServerError, server_error
from spanwire.jobs.contract import BatchLimits, HTTPAnswer, HTTPRequest, JobRow, Seen, State, Times

from . import gemini_batch
from .asking import below, encoded
from .common import ACCEPT, JSON, CommonJobs, judged
from .gemini_answer import reply_of_interaction
from .gemini_request import interaction_of
from .reading import Fields, id_of, span, value_of

__all__ = ["OPTIONS", "GeminiJobs"]

#: Names in ``Endpoint.options``. ``webhooks``: ``"dynamic"`` (the default: each submit names its own) or ``"static"``.
OPTIONS = frozenset({"webhooks"})

#: The schema with ``steps``. Source: google-genai, ``GOOGLE_GENAI_API_REVISION``.
_REVISION: Mapping[str, str] = {"api-revision": "2026-05-20"}
_STATES: Mapping[str, State] = {
    "queued": "queued",
    "in_progress": "running",
    "completed": "succeeded",
    "requires_action": "succeeded",  # with the calls of functions that it waits for
    "incomplete": "succeeded",  # these three with a finish reason that says so
    "budget_exceeded": "succeeded",
    "requires_continuation": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
}
#: Events, by what follows ``interaction.`` and ``batch.``.
_EVENTS: Mapping[str, State] = {
    "interaction.completed": "succeeded",
    "interaction.requires_action": "succeeded",
    "interaction.failed": "failed",
    "interaction.cancelled": "cancelled",
    "batch.succeeded": "succeeded",
    "batch.failed": "failed",
    "batch.cancelled": "cancelled",
    "batch.expired": "expired",
}
#: The HTTP status that each code of ``google.rpc.Code`` stands for, by number and by name. Source: googleapis, code.proto.
_CODES = {
    "3": 400,
    "INVALID_ARGUMENT": 400,
    "4": 504,
    "DEADLINE_EXCEEDED": 504,
    "5": 404,
    "NOT_FOUND": 404,
    "7": 403,
    "PERMISSION_DENIED": 403,
    "8": 429,
    "RESOURCE_EXHAUSTED": 429,
    "9": 400,
    "FAILED_PRECONDITION": 400,
    "10": 409,
    "ABORTED": 409,
    "13": 500,
    "INTERNAL": 500,
    "14": 503,
    "UNAVAILABLE": 503,
    "16": 401,
    "UNAUTHENTICATED": 401,
}


class GeminiJobs(CommonJobs):
    """The endpoint's URL is ``https://generativelanguage.googleapis.com/v1beta``."""

    scheme: Literal["standard", "baseten", "fal", "gemini", "none"] = "gemini"
    retention_s = 86_400.0  # a day without billing, 55 days with it
    polls_per_s = 10.0  # no limit of its own is documented
    delivery_s = 24 * 3600.0
    batches: BatchLimits = gemini_batch.LIMITS

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"x-goog-api-key": api_key}

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        kind = endpoint.options.get("webhooks", "dynamic")
        if kind not in ("dynamic", "static"):
            raise ConfigurationError(
                f'Endpoint.options: webhooks must be "dynamic" or "static", not {kind!r:.40}', endpoint=endpoint.address
            )
        webhook: dict[str, Any] | None = None
        if callback_url is not None and kind == "dynamic":
            known = {"spanwire_job": f"{row.id}.{row.attempt}", **row.trace}
            webhook = {"uris": [callback_url], "user_metadata": known}
        try:
            if call.operation != "chat":
                target, body = gemini_batch.submit_of(call, row, webhook)
                most = self.batches.most_bytes
                return HTTPRequest("POST", below(endpoint, "models", target), _HEADERS, encoded(body, endpoint, most))
            body = interaction_of(call.body, call.model)
        except ConfigurationError as error:
            error.endpoint = error.endpoint or endpoint.address
            raise
        body |= {"background": True, "store": True}
        if webhook is not None:
            body["webhook_config"] = webhook
        return HTTPRequest("POST", below(endpoint, "interactions"), _HEADERS, encoded(body, endpoint))

    def webhook(self, headers: Mapping[str, str], body: bytes) -> Seen:
        """The body of a static webhook, or the claims of a dynamic one's token: the same event."""
        fields = Fields(body)
        kind, data = fields.text("type"), fields.inner("data")
        if kind is None or data is None:
            raise ValueError("the webhook has no type, or no data")
        state = _EVENTS.get(kind)
        name = data.value("id")
        failed = state == "failed"
        message = data.text("error_message")
        return Seen(
            state=state,
            provider_id=id_of(name.removeprefix("batches/")) if isinstance(name, str) else None,
            fetch=state in {"succeeded", "failed"},  # of a failure, the reason
            code=(data.text("error_code") or kind) if failed else None,
            message=(message or f"Gemini says {kind}")[:1000] if failed else None,
            times=Times(finished_s=fields.moment("timestamp")) if state is not None else Times(),
        )

    def seen(self, fields: Fields, body: bytes) -> Seen:
        if gemini_batch.is_batch(fields):
            return gemini_batch.seen_of(fields, body)
        word = fields.text("status")
        if fields.id() is None and word is None:
            raise ValueError("the body is no interaction: it has neither an id nor a status")
        code, message = _error(fields)
        state = _STATES.get(word or "") or judged(
            word, ended=False, output=False, error=code is not None or message is not None
        )
        ended = state in {"succeeded", "failed", "cancelled"}
        return Seen(
            state=state,
            provider_id=fields.id(),
            body=body if state == "succeeded" else None,
            code=(code or word) if state == "failed" else None,
            message=message if state == "failed" else None,
            times=span(fields.moment("created"), None, fields.moment("updated") if ended else None),
        )

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "GET")

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "POST", cancel=True)

    def reply(self, call_operation: str, body: bytes) -> Reply | Embeddings:
        try:
            value = value_of(body)
        except ValueError as error:
            raise ProtocolError(f"the job's result cannot be read: {error}") from None
        if call_operation == "embeddings":
            return gemini_batch.embeddings_of(value)
        if isinstance(value, dict) and isinstance(value.get("error"), dict):
            words = value["error"]
            raise _meant(str(words.get("message") or "the interaction failed"), str(words.get("code")))
        return reply_of_interaction(value, body)

    def failure(self, row: JobRow) -> ServerError | None:
        if row.state != "failed":
            return None
        return _meant(row.message or "the interaction failed, and Gemini does not say why", row.code)

    # --- batches --------------------------------------------------------------------------------------------------------

    def fetches(self, row: JobRow, endpoint: Endpoint) -> Sequence[HTTPRequest]:
        """Nothing: the results are in the status."""
        return ()

    def fetched(self, row: JobRow, seen: Seen, names: Sequence[str], answers: Sequence[HTTPAnswer]) -> Seen:
        return replace(seen, fetch=False)

    def replies(self, body: bytes) -> BatchReply:
        try:
            return gemini_batch.replies_of(value_of(body), _meant)
        except ValueError as error:
            raise ProtocolError(f"the batch's results cannot be read: {error}") from None


_HEADERS: Mapping[str, str] = {**JSON, **_REVISION}


def _at(row: JobRow, endpoint: Endpoint, method: str, *, cancel: bool = False) -> HTTPRequest | None:
    if row.provider_id is None:
        return None
    if row.operation == "chat":
        more = ("cancel",) if cancel else ()
        return HTTPRequest(method, below(endpoint, "interactions", row.provider_id, *more), {**ACCEPT, **_REVISION})
    target = below(endpoint, "batches", row.provider_id) + (":cancel" if cancel else "")
    return HTTPRequest(method, target, {**ACCEPT, **_REVISION})


def _error(fields: Fields) -> tuple[str | None, str | None]:
    """The first of an interaction's ``errors``."""
    errors = fields.value("errors")
    first = errors[0] if isinstance(errors, list) and errors else fields.value("error")
    if not isinstance(first, dict):
        return None, None
    code, message = first.get("code"), first.get("message")
    return (
        str(code)[:200] if isinstance(code, (str, int)) and not isinstance(code, bool) else None,
        message[:1000] if isinstance(message, str) and message else "Gemini gives no message",
    )


def _meant(message: str, code: str | None) -> ServerError:
    meant = _CODES.get((code or "").rpartition("/")[2].upper())
    if meant is None:
        return server_error(message, code=code)
    found = server_error(message, status=meant, code=code)
    found.status = None  # it decides class and `retryable`; nobody has answered with it
    return found
