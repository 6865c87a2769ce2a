"""OpenAI's background responses: ``POST /responses`` with ``background``, a thin webhook, ``GET /responses/{id}``.

Sources: developers.openai.com, guides "background mode" and "webhooks"; ``openai.types.webhooks`` and
``openai.types.responses`` of the SDK 3.57. Endpoints for webhooks belong to a project and are set up there.

A ``Call.batch()`` goes another way: see :mod:`.openai_batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from spanwire.calls import BatchReply, Call, Embeddings, Reply, ReplyBuilder
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, ServerError
from spanwire.jobs.contract import HTTPAnswer, HTTPRequest, JobRow, Seen, State, Times
from spanwire.wire.openai_responses import decode_response, encode_responses, response_error

from . import openai_batch
from .asking import below, encoded
from .common import ACCEPT, JSON, CommonJobs, judged
from .reading import Fields, json_of, span

__all__ = ["OpenAIJobs"]

_STATES: Mapping[str, State] = {
    "queued": "queued",
    "in_progress": "running",
    "completed": "succeeded",
    "incomplete": "succeeded",  # with a finish reason that says so
    "failed": "failed",
    "cancelled": "cancelled",
}
_EVENT, _BATCH_EVENT = "response.", "batch."
_ENDS = frozenset({"completed", "incomplete", "failed", "cancelled"})
#: Pairs of ``metadata`` that OpenAI takes.
_MOST_PAIRS = 16


class OpenAIJobs(CommonJobs):
    """Chat calls as background responses, and batches. Responses are stored, unless the call says ``store=False``: OpenAI
    then deletes them about ten minutes after they have ended, and a project without retention does so in any case. A batch's
    files are kept for 30 days, see :data:`.openai_batch.OPTIONS`."""

    callback: Literal["request", "account"] = "account"
    retention_s = 600.0
    polls_per_s = 10.0  # no limit of its own is documented
    delivery_s = 72 * 3600.0
    batches = openai_batch.LIMITS

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        if call.operation == "batch":
            return openai_batch.upload(call, endpoint, row)
        if call.operation != "chat":
            raise ConfigurationError(
                f"OpenAI answers chat calls in the background, not {call.operation!r:.40}: submit those as a batch "
                "(Call.batch(...), or manager.submit_many())",
                endpoint=endpoint.address,
            )
        try:
            body = encode_responses(call.body, call.model)
        except ConfigurationError as error:
            error.endpoint = error.endpoint or endpoint.address
            raise
        body["background"] = True
        if call.body.get("store") is None:
            body["store"] = True
        metadata = body.get("metadata", {})
        if isinstance(metadata, Mapping):
            # Its webhooks have no word of ours: with these, whoever looks at a response finds the job and its trace.
            own = {"spanwire_job": f"{row.id}.{row.attempt}"}
            if "traceparent" in row.trace:
                own["traceparent"] = row.trace["traceparent"]
            body["metadata"] = dict([*metadata.items(), *own.items()][:_MOST_PAIRS])
        return HTTPRequest("POST", below(endpoint, "responses"), JSON, encoded(body, endpoint, self.most_body_bytes))

    def steps(self, call: Call) -> int:
        return 2 if call.operation == "batch" else 1

    def follow(
        self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None, answers: Sequence[HTTPAnswer]
    ) -> HTTPRequest:
        return openai_batch.follow(call, endpoint, row, answers[0])

    def webhook(self, headers: Mapping[str, str], body: bytes) -> Seen:
        fields = Fields(body)
        kind = fields.text("type")
        data = fields.inner("data")
        if kind is None or data is None:
            raise ValueError("the webhook has no type, or no data")
        if kind.startswith(_BATCH_EVENT):
            return openai_batch.event(kind.removeprefix(_BATCH_EVENT), data)
        word = kind.removeprefix(_EVENT)
        state = _STATES.get(word) if kind.startswith(_EVENT) and word in _ENDS else None
        failed = state == "failed"
        return Seen(
            state=state,
            provider_id=data.id(),
            fetch=state in {"succeeded", "failed"},  # of a failure, the error
            code=kind if failed else None,
            message="the response failed" if failed else None,
            times=Times(finished_s=fields.moment("created_at")) if state is not None else Times(),
        )

    def seen(self, fields: Fields, body: bytes) -> Seen:
        if openai_batch.is_batch(fields):
            return openai_batch.seen(fields)
        word = fields.text("status")
        if fields.id() is None and word is None:
            raise ValueError("the body is no response object: it has neither an id nor a status")
        error = fields.inner("error")
        finished_s = fields.moment("completed_at")
        output = fields.value("output") if word not in _STATES else None
        state = _STATES.get(word or "") or judged(
            word, ended=finished_s is not None, output=bool(output), error=error is not None
        )
        code, message = (error.text("code"), error.text("message")) if error is not None else (None, None)
        return Seen(
            state=state,
            provider_id=fields.id(),
            body=body if state == "succeeded" else None,
            code=code or (word if state == "failed" else None),
            message=message,
            times=span(fields.moment("created_at"), None, finished_s),
        )

    def told(self, answer: HTTPAnswer) -> Seen:
        found = super().told(answer)
        if found.state == "lost":
            return Seen(
                state="lost",
                code=found.code,
                message="OpenAI has deleted it: a response without storage about ten minutes after its end",
            )
        return found

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        if row.operation == "batch":
            return openai_batch.request(row, endpoint, "GET")
        return _at(row, endpoint, "GET")

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        if row.operation == "batch":
            return openai_batch.request(row, endpoint, "POST", "cancel")
        return _at(row, endpoint, "POST", "cancel")

    def reply(self, call_operation: str, body: bytes) -> Reply | Embeddings:
        chunk, id_, model = decode_response(body)
        builder = ReplyBuilder()
        builder.add([chunk])
        return builder.reply(id=id_, model=model, raw=body)

    def failure(self, row: JobRow) -> ServerError | None:
        if row.state != "failed":
            return None
        if row.operation == "batch":
            return openai_batch.failure(row)
        words: dict[str, Any] = {"message": row.message or "the response failed", "code": row.code}
        return response_error(json_of({"error": words}))

    def fetches(self, row: JobRow, endpoint: Endpoint) -> Sequence[HTTPRequest]:
        return openai_batch.fetches(row, endpoint)

    def fetched(self, row: JobRow, seen: Seen, names: Sequence[str], answers: Sequence[HTTPAnswer]) -> Seen:
        return openai_batch.fetched(row, seen, names, answers)

    def replies(self, body: bytes) -> BatchReply:
        return openai_batch.replies(body)

    def seek(self, row: JobRow, endpoint: Endpoint, answers: Sequence[HTTPAnswer]) -> HTTPRequest | None:
        return openai_batch.seek(row, endpoint, answers) if row.operation == "batch" else None

    def sought(self, row: JobRow, answers: Sequence[HTTPAnswer]) -> Seen | None:
        return openai_batch.sought(row, answers)


def _at(row: JobRow, endpoint: Endpoint, method: str, *action: str) -> HTTPRequest | None:
    if row.provider_id is None:
        return None
    return HTTPRequest(method, below(endpoint, "responses", row.provider_id, *action), ACCEPT)
