"""Baseten's async inference: ``async_predict``, and ``async_run_remote`` for chains.

Source: docs.baseten.co/inference/async, as of 2026. Its webhook is the only way to the output: it tries twice, about two
seconds apart, and the status never has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError, ServerError, server_error
from spanwire.jobs.contract import HTTPRequest, JobRow, Seen, State

from .asking import INPUT, below, encoded, input_of, optional_number
from .common import ACCEPT, JSON, CommonJobs, judged
from .reading import Fields, digest, id_of, span

__all__ = ["OPTIONS", "BasetenJobs"]

#: Names in ``Endpoint.options``. ``priority``: 0 (first, the default) to 2. ``max_time_in_queue_s``: 10 to 259,200; by
#: default the job's deadline. ``retries``: Baseten's ``inference_retry_config``.
OPTIONS = frozenset({INPUT, "priority", "max_time_in_queue_s", "retries"})

#: What comes after a model's root in the endpoint's URL; the status of a request is below the root.
_ENVIRONMENT = re.compile(r"/(?:production|development|environments/[^/]+|deployment/[^/]+)\Z")
_QUEUE_S = (10, 259_200)
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_RETRY_FIELDS = {"max_attempts": (1, 10), "initial_delay_ms": (0, 10_000), "max_delay_ms": (0, 60_000)}
_STATES: Mapping[str, State] = {
    "QUEUED": "queued",
    "IN_PROGRESS": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "EXPIRED": "expired",
    "CANCELED": "cancelled",
    "WEBHOOK_FAILED": "lost",
}
#: The status of the webhook with which a result will never come.
_UNDELIVERED = frozenset({"FAILED", "CANCELED", "NO_WEBHOOK_PROVIDED"})
#: The HTTP status that each code stands for.
_CODES = {
    "MODEL_NOT_READY": 400,
    "MODEL_DOES_NOT_EXIST": 404,
    "MODEL_INVALID_INPUT": 422,
    "MODEL_PREDICT_ERROR": 500,
    "MODEL_UNAVAILABLE": 503,
    "MODEL_PREDICT_TIMEOUT": 504,
}


class BasetenJobs(CommonJobs):
    """``POST {url}/async_predict``; the URL ends with the environment: ``https://model-ab12.api.baseten.co/production``."""

    scheme: Literal["standard", "baseten", "fal", "gemini", "none"] = "baseten"
    status_has_output = False
    most_body_bytes = 256 * 1024
    retention_s = 3600.0  # of the status; the output is not kept
    polls_per_s = 20.0  # older pages; newer ones say 100
    delivery_s = 30.0  # two attempts of 10 s each, about 2 s apart

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Api-Key {api_key}"}

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        if callback_url is None:
            raise ConfigurationError(
                "Baseten gives results to a webhook alone, its status has none: jobs there need a public URL",
                endpoint=endpoint.address,
            )
        parts = urlsplit(callback_url)
        if parts.scheme != "https" and parts.hostname not in _LOCAL:
            raise ConfigurationError("Baseten takes webhooks with https:// alone", endpoint=endpoint.address)
        body: dict[str, Any] = {
            "model_input": input_of(call, endpoint, with_model=True),
            "webhook_endpoint": callback_url,
        }
        priority = optional_number(endpoint, "priority", 0, 2)
        if priority is not None:
            body["priority"] = priority
        queue_s = optional_number(endpoint, "max_time_in_queue_s", *_QUEUE_S)
        if queue_s is None and row.due_s > row.created_s > 0:  # nobody waits for it after that
            queue_s = int(min(max(row.due_s - row.created_s, _QUEUE_S[0]), _QUEUE_S[1]))
        if queue_s is not None:
            body["max_time_in_queue_seconds"] = queue_s
        retries = _retries(endpoint)
        if retries:
            body["inference_retry_config"] = retries
        action = "async_run_remote" if endpoint.origin.host.startswith("chain-") else "async_predict"
        return HTTPRequest("POST", below(endpoint, action), JSON, encoded(body, endpoint, self.most_body_bytes))

    def webhook(self, headers: Mapping[str, str], body: bytes) -> Seen:
        fields = Fields(body)
        provider_id = fields.id("request_id") or id_of(headers.get("x-baseten-request-id"))
        code, message = _first(fields)
        failed = code is not None or message is not None
        if not failed and "data" not in fields:
            raise ValueError("the webhook has neither data nor errors")
        return Seen(
            state="failed" if failed else "succeeded",
            provider_id=provider_id,
            body=None if failed else body,
            code=code,
            message=message,
            times=span(None, None, fields.moment("time")),
        )

    def dedupe(self, headers: Mapping[str, str], body: bytes) -> str:
        try:
            found = Fields(body).id("request_id")
        except ValueError:
            found = None
        return found or id_of(headers.get("x-baseten-request-id")) or digest(body)

    def seen(self, fields: Fields, body: bytes) -> Seen:
        """The acknowledgement, and the status."""
        word, webhook = fields.text("status"), fields.text("webhook_status")
        code, message = _first(fields)
        failed = code is not None or message is not None
        state = _STATES.get(word or "")
        if state is None and word is not None:
            state = judged(word, ended=False, output=False, error=failed)
        elif state == "lost" and failed:
            state = "failed"  # what would have been delivered is known all the same
        elif state == "succeeded":
            # The output is on its way, or was taken by somebody. If that was not us, the status is gone in an hour.
            state = "lost" if webhook in _UNDELIVERED else "running"
        if state == "lost":
            code, message = (
                word,
                f"Baseten is done and could not deliver the output (webhook: {webhook}), which is gone",
            )
        ended = word in {"SUCCEEDED", "FAILED", "WEBHOOK_FAILED"}
        return Seen(
            state=state,
            provider_id=fields.id("request_id"),
            code=code if failed or state != "failed" else word,
            message=message,
            times=span(fields.moment("created_at"), None, fields.moment("status_at") if ended else None),
        )

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "GET")

    def result(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return None

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        """Only what is queued can be cancelled there."""
        return _at(row, endpoint, "DELETE")

    def output(self, fields: Fields) -> tuple[bytes | None, str | None]:
        return fields.raw("data"), None

    def failure(self, row: JobRow) -> ServerError | None:
        error = super().failure(row)
        meant = _CODES.get(row.code or "")
        if error is None or meant is None:
            return error
        found = server_error(error.message, status=meant, code=row.code)
        found.status = None  # it decides class and `retryable`; nobody has answered with it
        return found


def _first(fields: Fields) -> tuple[str | None, str | None]:
    errors = fields.value("errors")
    if not isinstance(errors, list) or not errors:
        return None, None
    first = errors[0]
    if not isinstance(first, dict):
        return None, str(first)[:1000]
    code, message = first.get("code"), first.get("message")
    return (
        str(code) if isinstance(code, (str, int)) else None,
        message if isinstance(message, str) and message else "the model failed, without a message",
    )


def _retries(endpoint: Endpoint) -> dict[str, int]:
    given = endpoint.options.get("retries")
    if given is None:
        return {}
    known = ", ".join(f"{name} ({least} to {most})" for name, (least, most) in _RETRY_FIELDS.items())
    if not isinstance(given, Mapping) or not all(
        name in _RETRY_FIELDS
        and isinstance(value, int)
        and not isinstance(value, bool)
        and _RETRY_FIELDS[name][0] <= value <= _RETRY_FIELDS[name][1]
        for name, value in given.items()
    ):
        raise ConfigurationError(
            f"Endpoint.options: retries must be a mapping of whole numbers: {known}", endpoint=endpoint.address
        )
    return dict(given)


def _at(row: JobRow, endpoint: Endpoint, method: str) -> HTTPRequest | None:
    if row.provider_id is None:
        return None
    root = _ENVIRONMENT.sub("", endpoint.path)
    return HTTPRequest(method, f"{root}/async_request/{row.provider_id}", ACCEPT)
