"""RunPod's serverless endpoints: ``POST https://api.runpod.ai/v2/{endpoint}/run``.

Source: docs.runpod.io (github.com/runpod/docs at a900806). It signs nothing: the callback's address is what it is known by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.jobs.contract import HTTPRequest, JobRow, Seen, State, Times

from .asking import INPUT, below, encoded, input_of, optional_number
from .common import ACCEPT, JSON, CommonJobs, judged
from .reading import Fields, digest

__all__ = ["OPTIONS", "RunPodJobs"]

#: Names in ``Endpoint.options``. ``execution_timeout_s``: how long a worker may take. ``low_priority``: do not start a
#: worker for it. The job's deadline is its ``ttl`` there.
OPTIONS = frozenset({INPUT, "execution_timeout_s", "low_priority"})

_LEAST_TTL_S, _MOST_TTL_S = 10.0, 7 * 86_400.0
_STATES: Mapping[str, State] = {
    "IN_QUEUE": "queued",
    "IN_PROGRESS": "running",
    "RUNNING": "running",
    "COMPLETED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "TIMED_OUT": "expired",
}


class RunPodJobs(CommonJobs):
    """The endpoint's URL is ``https://api.runpod.ai/v2/{endpoint}``. After the job's ``ttl`` its status is 404: expired."""

    scheme: Literal["standard", "baseten", "fal", "gemini", "none"] = "none"
    #: It tries again unless it is answered 200: 204 is not enough.
    wants_200 = True
    most_body_bytes = 10 * 1024 * 1024
    retention_s = 1800.0
    polls_per_s = 200.0  # 2,000 in 10 s
    delivery_s = 30.0  # three attempts, 10 s apart
    gone: Mapping[int, State] = {404: "expired"}

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        body: dict[str, Any] = {"input": input_of(call, endpoint, with_model=True)}
        if callback_url is not None:
            body["webhook"] = callback_url
        policy: dict[str, Any] = {}
        timeout_s = optional_number(endpoint, "execution_timeout_s", 5, int(_MOST_TTL_S))
        if timeout_s is not None:
            policy["executionTimeout"] = timeout_s * 1000
        if row.due_s > row.created_s > 0:
            policy["ttl"] = int(min(max(row.due_s - row.created_s, _LEAST_TTL_S), _MOST_TTL_S) * 1000)
        low = endpoint.options.get("low_priority")
        if low is not None:
            if not isinstance(low, bool):
                raise ConfigurationError(
                    "Endpoint.options: low_priority must be True or False", endpoint=endpoint.address
                )
            policy["lowPriority"] = low
        if policy:
            body["policy"] = policy
        return HTTPRequest("POST", below(endpoint, "run"), JSON, encoded(body, endpoint, self.most_body_bytes))

    def seen(self, fields: Fields, body: bytes) -> Seen:
        word = fields.text("status")
        if word is None and fields.id() is None:
            raise ValueError("the body is no job: it has neither an id nor a status")
        error = fields.value("error")
        failed = error is not None and error != ""
        state = _STATES.get(word or "") or judged(
            word, ended=False, output=fields.raw("output") is not None, error=failed
        )
        queue_s, model_s = fields.seconds("delayTime", 1e-3), fields.seconds("executionTime", 1e-3)
        if state in {"queued", "running"}:  # so far
            queue_s = model_s = None
        message = None
        if failed:
            message = error if isinstance(error, str) else (fields.raw("error") or b"").decode("utf-8", "replace")
        return Seen(
            state=state,
            provider_id=fields.id(),
            body=body if state == "succeeded" else None,
            code=word if state in {"failed", "expired"} else None,
            message=None if message is None else message[:1000],
            times=Times(
                queue_s=queue_s,
                model_s=model_s,
                total_s=None if queue_s is None or model_s is None else queue_s + model_s,
            ),
        )

    def dedupe(self, headers: Mapping[str, str], body: bytes) -> str:
        try:
            fields = Fields(body)
        except ValueError:
            return digest(body)
        return digest(fields.id(), fields.text("status"), body)

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "GET", "status")

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "POST", "cancel")


def _at(row: JobRow, endpoint: Endpoint, method: str, action: str) -> HTTPRequest | None:
    if row.provider_id is None:
        return None
    return HTTPRequest(method, below(endpoint, action, row.provider_id), ACCEPT)
