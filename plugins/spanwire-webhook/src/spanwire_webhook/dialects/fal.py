"""fal's queue: ``POST https://queue.fal.run/{app}``; the body is the model's input, the callback is in the query.

Sources: ``fal_client`` 1.0.3; docs.fal.ai, "webhooks" and "queue". The acknowledgement names the addresses for everything
else; they are used as they are, within what core allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import quote, urlsplit

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.jobs.contract import HTTPAnswer, HTTPRequest, JobRow, Seen, State, Times

from .asking import INPUT, encoded, input_of, optional_number
from .common import ACCEPT, JSON, CommonJobs
from .reading import Fields, digest, refused

__all__ = ["OPTIONS", "FalJobs"]

#: Names in ``Endpoint.options``. ``timeout_s``: how long fal may work on a job. ``priority``: ``"low"`` or ``"normal"``.
#: ``no_retry``: fal is not to try a job again whose runner failed.
OPTIONS = frozenset({INPUT, "no_retry", "priority", "timeout_s"})

_APP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)+\Z")
_STATES: Mapping[str, State] = {"IN_QUEUE": "queued", "IN_PROGRESS": "running", "COMPLETED": "succeeded"}
#: ``error_type`` of a request that was cancelled while it was worked on. Source: docs.fal.ai, "request errors".
_CANCELLED = "client_cancelled"
#: The model does not take its input: what asking for the result of such a job gives.
_BAD_INPUT = 422


class FalJobs(CommonJobs):
    """The endpoint's URL is ``https://queue.fal.run``; the call's model is the app, such as ``fal-ai/any-llm``."""

    scheme: Literal["standard", "baseten", "fal", "gemini", "none"] = "fal"
    retention_s = 360.0  # about an hour, but about six minutes for outputs of 10 KB and more
    polls_per_s = 10.0  # no limit is documented
    delivery_s = 7200.0  # ten attempts in two hours

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Key {api_key}"}

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        if not _APP.match(call.model):
            raise ConfigurationError(
                f"the model of a call to fal is its app, such as 'fal-ai/any-llm', not {call.model!r:.60}",
                endpoint=endpoint.address,
            )
        headers = dict(JSON)
        timeout_s = optional_number(endpoint, "timeout_s", 1, 86_400)
        if timeout_s is not None:
            headers["x-fal-request-timeout"] = str(timeout_s)
        priority = endpoint.options.get("priority")
        if priority is not None:
            if priority not in ("low", "normal"):
                raise ConfigurationError(
                    f'Endpoint.options: priority must be "low" or "normal", not {priority!r:.40}',
                    endpoint=endpoint.address,
                )
            headers["x-fal-queue-priority"] = priority
        no_retry = endpoint.options.get("no_retry", False)
        if not isinstance(no_retry, bool):
            raise ConfigurationError("Endpoint.options: no_retry must be True or False", endpoint=endpoint.address)
        if no_retry:
            headers["x-fal-no-retry"] = "1"
        target = f"{endpoint.path}/{call.model}"
        if callback_url is not None:
            target += f"?fal_webhook={quote(callback_url, safe='')}"
        return HTTPRequest("POST", target, headers, encoded(input_of(call, endpoint, with_model=False), endpoint))

    def webhook(self, headers: Mapping[str, str], body: bytes) -> Seen:
        fields = Fields(body)
        word, provider_id = fields.text("status"), fields.id("request_id")
        if word == "ERROR":
            if _code(fields) == _CANCELLED:  # as the status says it
                return Seen(state="cancelled", provider_id=provider_id)
            message = fields.text("error") or "the model failed, without a message"
            return Seen(state="failed", provider_id=provider_id, code=_code(fields), message=message[:1000])
        if word != "OK":
            if provider_id is None and word is None:
                raise ValueError("the webhook has neither an id nor a status")
            return Seen(provider_id=provider_id)
        if fields.value("payload_error") is not None:  # too large, or no JSON: it is there all the same
            return Seen(state="succeeded", provider_id=provider_id, fetch=True)
        return Seen(state="succeeded", provider_id=provider_id, body=body)

    def dedupe(self, headers: Mapping[str, str], body: bytes) -> str:
        try:
            fields = Fields(body)
        except ValueError:
            return digest(body)
        provider_id, word = fields.id("request_id"), fields.text("status")
        return digest(body) if provider_id is None else f"{provider_id}/{word}"

    def told(self, answer: HTTPAnswer) -> Seen:
        """The status, or the result: what comes from ``response_url`` is the model's own output, without anything around."""
        if answer.status == _BAD_INPUT:
            error = refused(answer)
            return Seen(state="failed", code=str(error.code or _BAD_INPUT), message=error.message)
        if 200 <= answer.status < 300:
            try:
                fields = Fields(answer.body)
                is_status = fields.text("status") in _STATES and ("status_url" in fields or "request_id" in fields)
            except ValueError:
                is_status = False
            if not is_status and answer.status == 200 and answer.body:
                return Seen(state="succeeded", body=answer.body)
        return super().told(answer)

    def seen(self, fields: Fields, body: bytes) -> Seen:
        word = fields.text("status")
        provider_id = fields.id("request_id")
        if word is None and provider_id is None:
            raise ValueError("the body has neither an id nor a status")
        state = _STATES.get(word or "")
        error = fields.text("error")
        if state == "succeeded" and error is not None:
            state = "cancelled" if _code(fields) == _CANCELLED else "failed"
        return Seen(
            state=state,
            provider_id=provider_id,
            fetch=state == "succeeded",
            urls=_urls(fields),
            code=_code(fields) if state == "failed" else None,
            message=error if state == "failed" else None,
            times=Times(model_s=fields.within("metrics", "inference_time")),
        )

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "GET", "status", "/status")

    def result(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "GET", "result", "")

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "PUT", "cancel", "/cancel")

    def output(self, fields: Fields) -> tuple[bytes | None, str | None]:
        if fields.text("status") == "OK" and "request_id" in fields and "payload" in fields:
            return fields.raw("payload"), None
        return fields.whole(), None


def _code(fields: Fields) -> str | None:
    return fields.text("error_type")


def _urls(fields: Fields) -> dict[str, str]:
    found = {
        name: fields.text(f"{field}_url") for name, field in (("status",) * 2, ("result", "response"), ("cancel",) * 2)
    }
    return {name: url for name, url in found.items() if url is not None}


def _at(row: JobRow, endpoint: Endpoint, method: str, name: str, end: str) -> HTTPRequest | None:
    """Where the acknowledgement says; without one, where fal has it: below the first two parts of the app."""
    url = row.urls.get(name)
    if url is not None:
        parts = urlsplit(url)
        if (parts.scheme, parts.netloc) == urlsplit(endpoint.url)[:2]:
            url = parts.path + (f"?{parts.query}" if parts.query else "")
        return HTTPRequest(method, url, ACCEPT)
    if row.provider_id is None or not _APP.match(row.model):
        return None
    app = "/".join(row.model.split("/")[:2])
    return HTTPRequest(method, f"{endpoint.path}/{app}/requests/{row.provider_id}{end}", ACCEPT)
