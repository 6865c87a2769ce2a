"""Replicate's predictions, and those of Cog, the server that runs in its containers and can be run anywhere.

Sources: replicate.com/docs/topics/webhooks, .../predictions/lifecycle, .../predictions/rate-limits; ``crates/coglet`` of
github.com/replicate/cog at 6110c91. The webhook's body is the prediction itself, without anything around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec.structs import replace

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.jobs.contract import TERMINAL, HTTPAnswer, HTTPRequest, JobRow, Seen, State, Times

from .asking import INPUT, below, encoded, input_of
from .common import ACCEPT, JSON, CommonJobs, judged
from .reading import Fields, digest, fields_of, span

__all__ = ["OPTIONS", "CogJobs", "ReplicateJobs"]

#: Names in ``Endpoint.options``.
OPTIONS = frozenset({INPUT})

#: ``output`` and ``logs`` come up to twice a second, and say nothing that is asked for here.
_EVENTS = ["start", "completed"]
_STATES: Mapping[str, State] = {
    "starting": "queued",
    "processing": "running",
    "succeeded": "succeeded",
    "failed": "failed",
    "canceled": "cancelled",
    "cancelled": "cancelled",
}
_ABORTED = "aborted"


class ReplicateJobs(CommonJobs):
    """``POST {url}/predictions``; the call's model is ``owner/name``, ``owner/name:version``, or a version's id."""

    retention_s = 3600.0  # of inputs and outputs; then `data_removed`
    polls_per_s = 50.0  # 3,000 a minute
    delivery_s = 90.0  # "the last about one minute after the end"

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        body: dict[str, Any] = {"version": call.model, "input": _input(call, endpoint)}
        return HTTPRequest("POST", below(endpoint, "predictions"), JSON, self._called(body, endpoint, callback_url))

    def _called(self, body: dict[str, Any], endpoint: Endpoint, callback_url: str | None) -> bytes:
        if callback_url is not None:
            body["webhook"] = callback_url
            body["webhook_events_filter"] = _EVENTS
        return encoded(body, endpoint, self.most_body_bytes)

    def seen(self, fields: Fields, body: bytes) -> Seen:
        word = fields.text("status")
        if word is None and fields.id() is None:
            raise ValueError("the body is no prediction: it has neither an id nor a status")
        error, output = fields.value("error"), fields.raw("output")
        failed = error is not None and error != ""
        finished_s = fields.moment("completed_at")
        state = _STATES.get(word or "")
        if state is None:
            state = judged(word, ended=finished_s is not None, output=output is not None, error=failed)
            if word == _ABORTED and state is not None:
                state = "failed"  # whatever output it had by then is not the whole
        message = None
        if failed:
            message = error if isinstance(error, str) else (fields.raw("error") or b"").decode("utf-8", "replace")
        if state == "succeeded" and output is None and fields.value("data_removed") is True:
            state, message = "lost", "the prediction's data was removed before its output was fetched"
        return Seen(
            state=state,
            provider_id=fields.id(),
            body=body if state == "succeeded" else None,
            urls=_urls(fields),
            code=word if state in {"failed", "lost"} else None,
            message=None if message is None else message[:1000],
            times=self._times(fields, finished_s),
        )

    def _times(self, fields: Fields, finished_s: float | None) -> Times:
        return span(
            fields.moment("created_at"),
            fields.moment("started_at"),
            finished_s,
            model_s=fields.within("metrics", "predict_time"),
            total_s=fields.within("metrics", "total_time"),
        )

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "GET")

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return _at(row, endpoint, "POST", "cancel")


class CogJobs(ReplicateJobs):
    """``PUT {url}/predictions/{our id}``, which makes no second prediction when it is sent again.

    Cog signs nothing and tells no status: the address of the callback is all there is, and the webhook alone brings the
    result. Its ``start`` event is the beginning of the work. If its environment has a ``WEBHOOK_AUTH_TOKEN``, each webhook
    has it as a bearer token; a receiver that knows the token asks for it.
    """

    scheme: Literal["standard", "baseten", "fal", "gemini", "none"] = "none"
    #: Secrets of a receiver for it are bearer tokens.
    bearer = True
    polls = False
    status_has_output = False
    resubmits = True
    retention_s = 0.0
    polls_per_s = 0.0
    delivery_s = 410.0  # 12 retries, after 100 ms times 2^n

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        if callback_url is None:
            raise ConfigurationError(
                "Cog gives results to a webhook alone, it has no status to ask for: jobs there need a public URL",
                endpoint=endpoint.address,
            )
        headers = {**JSON, "prefer": "respond-async"}
        body = self._called({"input": _input(call, endpoint)}, endpoint, callback_url)
        return HTTPRequest("PUT", below(endpoint, "predictions", _own(row)), headers, body)

    def acknowledged(self, answer: HTTPAnswer) -> Seen:
        fields = fields_of(answer)
        if fields.text("status") is None:  # 202 says it all, and the id is ours
            return Seen(state="submitted", provider_id=fields.id())
        found = self.seen(fields, answer.body)
        return found if found.state in TERMINAL else replace(found, state="submitted")

    def seen(self, fields: Fields, body: bytes) -> Seen:
        found = super().seen(fields, body)
        return replace(found, state="running", urls={}) if found.state == "queued" else replace(found, urls={})

    def _times(self, fields: Fields, finished_s: float | None) -> Times:
        # No time of acceptance: what stands in `created_at` is what the client wrote there.
        return span(None, fields.moment("started_at"), finished_s, model_s=fields.within("metrics", "predict_time"))

    def dedupe(self, headers: Mapping[str, str], body: bytes) -> str:
        try:
            fields = Fields(body)
        except ValueError:
            return digest(body)
        return digest(fields.id(), fields.text("status"), body)

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return None

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return HTTPRequest("POST", below(endpoint, "predictions", row.provider_id or _own(row), "cancel"), ACCEPT)


def _own(row: JobRow) -> str:
    return f"{row.id}.{row.attempt}"


def _input(call: Call, endpoint: Endpoint) -> Any:
    return input_of(call, endpoint, with_model=False)


def _urls(fields: Fields) -> dict[str, str]:
    urls = fields.inner("urls")
    if urls is None:
        return {}
    found = {"status": urls.text("get"), "cancel": urls.text("cancel")}
    return {name: url for name, url in found.items() if url is not None}


def _at(row: JobRow, endpoint: Endpoint, method: str, *action: str) -> HTTPRequest | None:
    """Below the endpoint, never at the address that an answer named."""
    if row.provider_id is None:
        return None
    return HTTPRequest(method, below(endpoint, "predictions", row.provider_id, *action), ACCEPT)
