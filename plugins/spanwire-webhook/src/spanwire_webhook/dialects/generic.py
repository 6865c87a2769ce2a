"""Jobs as this project would have them, for a server of one's own to implement: ``docs/webhook-contract.md``.

The call is a row of OpenAI's batch files, the webhook is a Standard Webhook (https://www.standardwebhooks.com, the
specification's text), and sending a submit again with the same ``Idempotency-Key`` makes no second job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.jobs.contract import HTTPRequest, JobRow, Seen, State

from .asking import below, encoded
from .common import ACCEPT, JSON, CommonJobs, judged
from .reading import Fields, span

__all__ = ["GenericJobs"]

_PATHS = {"chat": "/chat/completions", "embeddings": "/embeddings"}
#: With the words of other servers, so that one which is nearly right works.
_STATES: Mapping[str, State] = {
    "queued": "queued",
    "pending": "queued",
    "running": "running",
    "in_progress": "running",
    "succeeded": "succeeded",
    "completed": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
    "canceled": "cancelled",
    "expired": "expired",
}
_TYPE = "job."


class GenericJobs(CommonJobs):
    """``POST /jobs``, ``GET /jobs/{id}``, ``POST /jobs/{id}/cancel`` below the endpoint's URL.

    404 means that the server has forgotten the job, and its result with it: ``lost``. 410 means that the job's time was
    over before it was done: ``expired``.
    """

    resubmits = True
    retention_s = 24 * 3600.0  # what the contract asks of a server
    polls_per_s = 20.0
    #: Standard Webhooks' example of a schedule: 0, 5 s, 5 min, 30 min, 2, 5, 10, 14, 20 and 24 h, one after the other.
    delivery_s = 272_105.0
    gone: Mapping[int, State] = {404: "lost", 410: "expired"}

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        path = _PATHS.get(call.operation)
        if path is None:
            raise ConfigurationError(
                f"the generic dialect of jobs knows {' and '.join(_PATHS)}, not {call.operation!r:.40}",
                endpoint=endpoint.address,
            )
        own = f"{row.id}.{row.attempt}"
        body: dict[str, Any] = {
            "custom_id": own,
            "method": "POST",
            "url": path,
            "body": {"model": call.model, **call.body},
        }
        if callback_url is not None:
            body["webhook_url"] = callback_url
        if row.due_s > row.created_s > 0:
            body["timeout_s"] = round(row.due_s - row.created_s, 3)
        headers = {**JSON, "idempotency-key": own}
        return HTTPRequest("POST", below(endpoint, "jobs"), headers, encoded(body, endpoint, self.most_body_bytes))

    def seen(self, fields: Fields, body: bytes) -> Seen:
        job = _job(fields)
        if job is fields and not ("status" in job or "id" in job):
            raise ValueError("the body is no job: it has neither an id nor a status")
        word = job.text("status")
        if word is None and job is not fields:
            word = (fields.text("type") or "").removeprefix(_TYPE)
        error = job.raw("error") is not None
        accepted_s, finished_s = job.moment("created_at"), job.moment("completed_at")
        state = _STATES.get(word or "") or judged(
            word, ended=finished_s is not None, output=job.raw("output") is not None, error=error
        )
        code, message = _said(job) if error else (None, None)
        thin = state == "succeeded" and job is not fields and "output" not in job
        return Seen(
            state=state,
            provider_id=job.id(),
            body=body if state == "succeeded" and not thin else None,
            fetch=thin,
            code=code if error or state != "failed" else word,
            message=message,
            times=span(accepted_s, job.moment("started_at"), finished_s),
        )

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "GET")

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "POST", "cancel")

    def output(self, fields: Fields) -> tuple[bytes | None, str | None]:
        job = _job(fields)
        return job.raw("output"), job.text("model")


def _job(fields: Fields) -> Fields:
    """The job in a webhook, or the object itself."""
    if "type" not in fields:
        return fields
    job = fields.inner("data")
    if job is None:
        raise ValueError("the webhook has no job in its data")
    return job


def _said(job: Fields) -> tuple[str | None, str | None]:
    error = job.inner("error")
    if error is None:
        return None, job.text("error")
    code = error.value("code")
    return (str(code) if isinstance(code, (str, int)) else error.text("type")), error.text("message")


def _at(row: JobRow, endpoint: Endpoint, method: str, *action: str) -> HTTPRequest | None:
    if row.provider_id is None:
        return None
    return HTTPRequest(method, below(endpoint, "jobs", row.provider_id, *action), ACCEPT)
