"""A schema of jobs for tests: small JSON, nothing signed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from spanwire.calls import Call, Embeddings, Reply
from spanwire.endpoint import Endpoint
from spanwire.errors import ProtocolError, ServerError, server_error
from spanwire.jobs.contract import HTTPAnswer, HTTPRequest, JobRow, Seen, State, Times

STATES: dict[str, State] = {
    "queued": "queued",
    "running": "running",
    "done": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
    "gone": "lost",
}


class Simple:
    """``POST /jobs {callback, input}``, ``GET /jobs/{id}``, ``DELETE /jobs/{id}``; a webhook is what the GET gives."""

    scheme: Literal["standard", "baseten", "fal", "gemini", "none"] = "none"
    polls = True
    status_has_output = True
    resubmits = False
    most_body_bytes: int | None = None
    retention_s = 3600.0
    polls_per_s = 1000.0
    delivery_s = 60.0

    def __init__(self, callback: Literal["request", "account"] = "request", **more: Any) -> None:
        self.callback: Literal["request", "account"] = callback
        vars(self).update(more)

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {api_key}"}

    def submit(self, call: Call, endpoint: Endpoint, row: JobRow, callback_url: str | None) -> HTTPRequest:
        body = msgspec.json.encode({"callback": callback_url, "model": call.model, "input": call.body})
        return HTTPRequest("POST", f"{endpoint.path}/jobs", {"content-type": "application/json"}, body)

    def acknowledged(self, answer: HTTPAnswer) -> Seen:
        self._check(answer)
        try:
            return Seen(state="submitted", provider_id=msgspec.json.decode(answer.body)["id"])
        except ValueError:
            raise ProtocolError("the server's answer cannot be read") from None

    def webhook(self, headers: Mapping[str, str], body: bytes) -> Seen:
        found = msgspec.json.decode(body)
        if not isinstance(found, dict):
            raise ValueError("no object")  # noqa: TRY004 - what the contract says
        return Seen(
            state=STATES.get(found.get("status", "")),
            provider_id=found.get("id"),
            body=body if "output" in found else None,
            fetch=bool(found.get("thin")),
            code=found.get("code"),
            message=found.get("error"),
            times=msgspec.convert(found.get("times", {}), Times),
        )

    def dedupe(self, headers: Mapping[str, str], body: bytes) -> str:
        return headers.get("webhook-id") or hashlib.sha256(body).hexdigest()

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return HTTPRequest("GET", f"{endpoint.path}/jobs/{row.provider_id}") if row.provider_id else None

    def told(self, answer: HTTPAnswer) -> Seen:
        if answer.status == 404:
            return Seen(state="expired", message="the server does not know it any more")
        self._check(answer)
        return self.webhook(answer.headers, answer.body)

    def result(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return self.status(row, endpoint)

    def cancel(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return HTTPRequest("DELETE", f"{endpoint.path}/jobs/{row.provider_id}") if row.provider_id else None

    def reply(self, call_operation: str, body: bytes) -> Reply | Embeddings:
        output = msgspec.json.decode(body)["output"]
        if call_operation == "embeddings":
            return Embeddings(output)
        return Reply(text=output, finish_reason="stop", raw=body)

    def failure(self, row: JobRow) -> ServerError | None:
        return server_error(row.message or "it failed", status=None, code=row.code)

    @staticmethod
    def _check(answer: HTTPAnswer) -> None:
        if answer.status >= 300:
            raise server_error(f"status {answer.status}", status=answer.status)


def said(status: str, provider_id: str = "p-1", **more: Any) -> bytes:
    return msgspec.json.encode({"id": provider_id, "status": status, **more})
