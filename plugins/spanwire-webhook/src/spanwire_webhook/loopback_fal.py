"""PURE: the job server in fal's schema: the app is the path, the callback is in the query.

Sources: ``fal_client`` 1.0.3; docs.fal.ai, "queue", "webhooks" and "request errors".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from spanwire.testing.loopback import Request

from .loopback_record import Job
from .loopback_shapes import Shape, Submit, _address, _encode, _guess, _model, _object

__all__ = ["Fal"]

_STATES = {"queued": "IN_QUEUE", "running": "IN_PROGRESS"}
#: Where an error of the model says that it does not take its input.
_BAD_INPUT = 422


class Fal(Shape):
    """``POST /{owner}/{app}``, ``GET .../requests/{id}/status``, ``GET .../requests/{id}``, ``PUT .../requests/{id}/cancel``."""

    name = "fal"
    signs = "fal"
    accepted = 200
    #: "Ten attempts in two hours".
    schedule = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3000.0)
    tells_cancelled = False
    cancelled_status = 202
    late_cancel_status = 400

    def submit(self, body: Any, headers: Mapping[str, str], id: str | None) -> Submit:
        call = _object(body)
        return Submit(call, _model(call), _guess(call), None)

    def addressed(self, submit: Submit, request: Request) -> Submit:
        (callback,) = parse_qs(request.query).get("fal_webhook", [None])[:1] or (None,)
        return submit._replace(callback=_address(callback), model=submit.model or _app(request.path))

    def new_id(self, number: int, submit: Submit) -> str:
        digest = hashlib.sha256(b"fal:%d" % number).hexdigest()
        return f"{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"

    def acknowledged(self, job: Job) -> Any:
        return {**self._known(job), "status": "IN_QUEUE", "queue_position": 0}

    @staticmethod
    def _known(job: Job) -> dict[str, Any]:
        parts = urlsplit(job.base)
        below = "/".join(parts.path.rstrip("/").split("/")[: _begin(parts.path) + 2])
        url = f"{parts.scheme}://{parts.netloc}{below}/requests/{job.id}"
        return {
            "request_id": job.id,
            "gateway_request_id": job.id,
            "response_url": url,
            "status_url": f"{url}/status",
            "cancel_url": f"{url}/cancel",
        }

    def told(self, job: Job) -> Any:
        found = {**self._known(job), "status": _STATES.get(job.state, "COMPLETED")}
        if job.state == "queued":
            found["queue_position"] = 0
        elif job.ended:
            found["metrics"] = {"inference_time": _lasted_s(job)}
            if job.state == "cancelled":
                found |= {"error": "Request cancelled by the client", "error_type": "client_cancelled"}
            elif job.error is not None:
                found |= {"error": job.error[1], "error_type": "runner_server_error"}
        return found

    def result(self, job: Job) -> tuple[int, Any]:
        """What ``response_url`` gives: the model's own output, without anything around."""
        if job.state == "succeeded":
            return 200, job.output
        if not job.ended:
            return 400, {"detail": "Request is still in progress"}
        words = "Request cancelled by the client" if job.error is None else job.error[1]
        return _BAD_INPUT, {"detail": words, "error_type": "runner_server_error"}

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        found: dict[str, Any] = {"request_id": job.id, "gateway_request_id": job.id, "status": "OK", "payload": None}
        if job.error is not None:
            found |= {"status": "ERROR", "error": job.error[1], "error_type": "runner_server_error"}
        elif thin:
            found["payload_error"] = "Response payload is too large to be sent"
        else:
            found["payload"] = job.output
        return _encode(found)

    def cancelled(self, job: Job, *, now: bool) -> Any:
        return {"status": "CANCELLATION_REQUESTED" if now else "ALREADY_COMPLETED"}


def _lasted_s(job: Job) -> float | None:
    return None if job.started_s is None or job.finished_s is None else job.finished_s - job.started_s


def _begin(path: str) -> int:
    """Which segment of a path is the app's owner: the first one, but for a version such as ``v1``."""
    parts = path.split("/")
    return 2 if len(parts) > 1 and parts[1][:1] == "v" and parts[1][1:].isdigit() else 1


def _app(path: str) -> str:
    return "/".join(path.strip("/").split("/")[_begin(path) - 1 :])
