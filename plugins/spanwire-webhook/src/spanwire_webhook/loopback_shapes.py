"""PURE: what the job server says in the schema of each provider: submits read, answers and webhooks written, no I/O."""

from __future__ import annotations

import datetime as dt
import hashlib
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from spanwire.calls import Usage
from spanwire.testing.loopback import Request
from spanwire.testing.responses_events import whole_response
from spanwire.testing.script import Script

from .loopback_record import Job

__all__ = ["SHAPES", "BadSubmit", "Route", "Shape", "Submit", "route"]

_encode = msgspec.json.encode
_EMBEDDINGS_MOST = 65_536


class BadSubmit(Exception):
    """The provider would not take it: status and words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Submit(NamedTuple):
    """What a submit asks for.

    Attributes:
        call: the body of the call, in whatever shape the client chose.
        model: its name, None where none is said.
        operation: ``chat``, ``responses`` or ``embeddings``.
        callback: where its webhooks go; None for nowhere.
        own: the client's id: a second submit with it is the same job.
    """

    call: Any
    model: str | None
    operation: str
    callback: str | None
    own: str | None = None


class Shape:
    """A provider's schema. Delays are the provider's own, in seconds."""

    name: str = ""
    signs: Literal["standard", "baseten", "fal", "gemini", "none"] = "standard"
    #: Where a submit names no address, webhooks go to the one that is set up for the account (``webhook_url``).
    account: bool = False
    #: It tells when the work begins.
    starts: bool = False
    accepted: int = 202
    #: Waits before the second attempt to deliver, the third, ...
    schedule: Sequence[float] = ()
    #: Statuses with which it tries again; None: all but 2xx.
    again: frozenset[int] | None = None
    #: Statuses with which a webhook is taken; None: all 2xx.
    takes: frozenset[int] | None = None

    def submit(self, body: Any, headers: Mapping[str, str], id: str | None) -> Submit:
        """Raises BadSubmit."""
        raise NotImplementedError

    def addressed(self, submit: Submit, request: Request) -> Submit:
        """With what the request's path and query say. Raises BadSubmit."""
        return submit

    def new_id(self, number: int, submit: Submit) -> str:
        return f"job_{number:08x}"

    def acknowledged(self, job: Job) -> Any:
        return self.told(job)

    def told(self, job: Job) -> Any:
        raise NotImplementedError

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        raise NotImplementedError

    def cancelled(self, job: Job, *, now: bool) -> Any:
        """The answer to a cancel. ``now``: this one has ended it."""
        return self.told(job)

    def result(self, job: Job) -> tuple[int, Any]:
        """Status and body of what holds the result, where that is not the status."""
        return 200, self.told(job)

    #: The status of the answer to a cancel, and of one that comes too late.
    cancelled_status: int = 200
    late_cancel_status: int = 200
    #: The states that can be cancelled, and whether there is a webhook of that.
    cancels: frozenset[str] = frozenset({"queued", "running"})
    tells_cancelled: bool = True

    def output(self, job: Job, script: Script) -> Any:
        """What the model gives; JSON-able, or raw."""
        if script.body is not None:
            return msgspec.Raw(script.body)
        body = job.call if isinstance(job.call, dict) else {}
        if job.operation == "embeddings":
            return _vectors(script, body, job.model)
        if job.operation == "responses":
            return whole_response(script, body, id=job.id)
        return _completion(script, body, job)


class Generic(Shape):
    name = "generic"
    starts = True
    schedule = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
    _OPERATIONS = {"/chat/completions": "chat", "/embeddings": "embeddings", "/responses": "responses"}  # noqa: RUF012

    def submit(self, body: Any, headers: Mapping[str, str], id: str | None) -> Submit:
        body = _object(body, "url", "body")
        operation = self._OPERATIONS.get(body["url"])
        if operation is None:
            raise BadSubmit(400, f"url must be one of {', '.join(self._OPERATIONS)}")
        own = headers.get("idempotency-key") or body.get("custom_id")
        return Submit(body["body"], _model(body["body"]), operation, _address(body.get("webhook_url")), own)

    def told(self, job: Job) -> Any:
        found: dict[str, Any] = {
            "id": job.id,
            "object": "job",
            "custom_id": job.own,
            "status": job.state,
            "model": job.model,
            "created_at": job.accepted_s,
            "started_at": job.started_s,
            "completed_at": job.finished_s,
            "error": None if job.error is None else {"code": job.error[0], "message": job.error[1]},
        }
        if job.state == "succeeded":
            found["output"] = job.output
        return found

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        found = self.told(job)
        if start:  # as it was then, whatever has become of it
            found.pop("output", None)
            found |= {"status": "running", "completed_at": None, "error": None}
        if thin:
            found.pop("output", None)
        return _encode({"type": f"job.{found['status']}", "timestamp": _iso(time.time()), "data": found})


class Baseten(Shape):
    name = "baseten"
    signs = "baseten"
    schedule = (2.0,)
    again = frozenset({500, 502, 503, 504})
    cancels = frozenset({"queued"})
    tells_cancelled = False
    _STATES = {  # noqa: RUF012
        "queued": "QUEUED",
        "running": "IN_PROGRESS",
        "succeeded": "SUCCEEDED",
        "failed": "FAILED",
        "cancelled": "CANCELED",
    }

    def submit(self, body: Any, headers: Mapping[str, str], id: str | None) -> Submit:
        if len(_encode(body)) > 256 * 1024:
            raise BadSubmit(413, "the request is over 256 KiB")
        body = _object(body, "model_input")
        call = body["model_input"]
        return Submit(call, _model(call), _guess(call), _address(body.get("webhook_endpoint")))

    def new_id(self, number: int, submit: Submit) -> str:
        return hashlib.sha256(b"baseten:%d" % number).hexdigest()[:32]

    def acknowledged(self, job: Job) -> Any:
        return {"request_id": job.id}

    def told(self, job: Job) -> Any:
        webhook = job.webhook
        state = "WEBHOOK_FAILED" if job.ended and webhook == "FAILED" else self._STATES[job.state]
        return {
            "request_id": job.id,
            "model_id": "model",
            "deployment_id": "deployment",
            "status": state,
            "webhook_status": webhook if job.callback else "NO_WEBHOOK_PROVIDED",
            "created_at": _iso(job.accepted_s),
            "status_at": _iso(job.finished_s or job.started_s or job.accepted_s),
            "errors": self._errors(job),
        }

    @staticmethod
    def _errors(job: Job) -> list[dict[str, str]]:
        return [] if job.error is None else [{"code": "MODEL_PREDICT_ERROR", "message": job.error[1]}]

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        return _encode(
            {
                "request_id": job.id,
                "model_id": "model",
                "deployment_id": "deployment",
                "type": "async_request_completed",
                "time": _iso(job.finished_s or time.time()),
                "data": job.output if job.state == "succeeded" else None,
                "errors": self._errors(job),
            }
        )

    def cancelled(self, job: Job, *, now: bool) -> Any:
        words = "Successfully canceled async request." if now else "The request is past the point of cancellation."
        return {"request_id": job.id, "canceled": now, "message": words}


class Replicate(Shape):
    name = "replicate"
    starts = True
    accepted = 201
    schedule = (2.0, 8.0, 50.0)
    _STATES = {  # noqa: RUF012
        "queued": "starting",
        "running": "processing",
        "succeeded": "succeeded",
        "failed": "failed",
        "cancelled": "canceled",
    }

    def submit(self, body: Any, headers: Mapping[str, str], id: str | None) -> Submit:
        body = _object(body, "input", *self._more)
        call = body["input"]
        events = body.get("webhook_events_filter")
        callback = _address(body.get("webhook"))
        if callback is not None and events is not None and not isinstance(events, list):
            raise BadSubmit(422, "webhook_events_filter must be a list")
        return Submit(call, body.get("version") or _model(call), _guess(call), callback, id)

    _more: tuple[str, ...] = ("version",)

    def new_id(self, number: int, submit: Submit) -> str:
        return submit.own or hashlib.sha256(b"replicate:%d" % number).hexdigest()[:26]

    def told(self, job: Job) -> Any:
        found: dict[str, Any] = {
            "id": job.id,
            "version": job.model,
            "status": self._STATES[job.state],
            "input": job.call,
            "output": job.output if job.state == "succeeded" else None,
            "error": None if job.error is None else job.error[1],
            "logs": "",
            "created_at": _iso(job.accepted_s),
            "started_at": _iso(job.started_s),
            "completed_at": _iso(job.finished_s),
            "data_removed": False,
            "urls": {"get": f"{job.base}/{job.id}", "cancel": f"{job.base}/{job.id}/cancel"},
        }
        if job.finished_s is not None and job.started_s is not None:
            found["metrics"] = {
                "predict_time": job.finished_s - job.started_s,
                "total_time": job.finished_s - job.accepted_s,
            }
        return found

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        found = self.told(job)
        if start:
            found |= {"status": "processing", "output": None, "error": None, "completed_at": None}
            found.pop("metrics", None)
        return _encode(found)

    def output(self, job: Job, script: Script) -> Any:
        if script.body is None and job.operation == "chat":
            return list(script.tokens)
        return super().output(job, script)


class Cog(Replicate):
    name = "cog"
    signs = "none"
    accepted = 202
    schedule = tuple(0.1 * 2**number for number in range(12))
    again = frozenset({429, 500, 502, 503, 504})
    _more = ()

    def acknowledged(self, job: Job) -> Any:
        return {"id": job.id, "status": "starting"}

    def told(self, job: Job) -> Any:
        found = super().told(job)
        for name in ("version", "created_at", "data_removed", "urls"):
            del found[name]
        return found


class OpenAI(Shape):
    name = "openai"
    account = True
    accepted = 200
    schedule = Generic.schedule
    _STATES = {  # noqa: RUF012
        "queued": "queued",
        "running": "in_progress",
        "succeeded": "completed",
        "failed": "failed",
        "cancelled": "cancelled",
    }

    def submit(self, body: Any, headers: Mapping[str, str], id: str | None) -> Submit:
        body = _object(body, "model", "input")
        if body.get("background") is not True:
            raise BadSubmit(400, "this server answers in the background alone: background must be true")
        return Submit(body, _model(body), "responses", None)

    def new_id(self, number: int, submit: Submit) -> str:
        return f"resp_{number:032x}"

    def told(self, job: Job) -> Any:
        if job.state == "succeeded":
            if isinstance(job.output, msgspec.Raw):
                return job.output
            return {**job.output, "background": True, "created_at": int(job.accepted_s), "completed_at": job.finished_s}
        return {
            "id": job.id,
            "object": "response",
            "created_at": int(job.accepted_s),
            "completed_at": None,
            "background": True,
            "status": self._STATES[job.state],
            "model": job.model,
            "output": [],
            "error": None if job.error is None else {"code": job.error[0], "message": job.error[1]},
            "metadata": job.call.get("metadata") or {},
        }

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        word = self._STATES[job.state]
        if isinstance(job.output, dict) and job.state == "succeeded":
            word = job.output.get("status", word)  # "incomplete"
        created = int(job.finished_s or time.time())
        return _encode(
            {
                "object": "event",
                "id": f"evt_{job.number:08x}",
                "type": f"response.{word}",
                "created_at": created,
                "data": {"id": job.id},
            }
        )


class RunPod(Shape):
    name = "runpod"
    signs = "none"
    accepted = 200
    schedule = (10.0, 10.0)
    takes = frozenset({200})
    _STATES = {  # noqa: RUF012
        "queued": "IN_QUEUE",
        "running": "IN_PROGRESS",
        "succeeded": "COMPLETED",
        "failed": "FAILED",
        "cancelled": "CANCELLED",
    }

    def submit(self, body: Any, headers: Mapping[str, str], id: str | None) -> Submit:
        body = _object(body, "input")
        call = body["input"]
        return Submit(call, _model(call), _guess(call), _address(body.get("webhook")))

    def new_id(self, number: int, submit: Submit) -> str:
        return hashlib.sha256(b"runpod:%d" % number).hexdigest()[:32] + "-u1"

    def acknowledged(self, job: Job) -> Any:
        return {"id": job.id, "status": "IN_QUEUE"}

    def told(self, job: Job) -> Any:
        found: dict[str, Any] = {"id": job.id, "status": self._STATES[job.state]}
        if job.started_s is not None:
            found["delayTime"] = round((job.started_s - job.accepted_s) * 1000)
            if job.finished_s is not None:
                found["executionTime"] = round((job.finished_s - job.started_s) * 1000)
        if job.state == "succeeded":
            found["output"] = job.output
        if job.error is not None:
            found["error"] = job.error[1]
        return found

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        return _encode(self.told(job))


# --- which is asked -------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """What a request asks for."""

    action: Literal["submit", "status", "result", "cancel"]
    shape: Shape
    id: str | None


_GENERIC, _BASETEN, _REPLICATE, _COG, _OPENAI = Generic(), Baseten(), Replicate(), Cog(), OpenAI()
_RUNPOD = RunPod()
SHAPES: Mapping[str, Shape] = {shape.name: shape for shape in (_GENERIC, _BASETEN, _REPLICATE, _COG, _OPENAI, _RUNPOD)}
_COLLECTIONS: Mapping[str, Shape] = {"jobs": _GENERIC, "predictions": _REPLICATE, "responses": _OPENAI}


def route(method: str, path: str) -> Route | None:
    """By the path's last segments, whatever stands before them; None for what is not known."""
    parts = path.strip("/").split("/")
    last = parts[-1]
    before = parts[-2] if len(parts) > 1 else ""
    if method == "POST":
        if last in {"async_predict", "async_run_remote"}:
            return Route("submit", _BASETEN, None)
        if last in _COLLECTIONS:
            return Route("submit", _COLLECTIONS[last], None)
        if last == "run":
            return Route("submit", _RUNPOD, None)
        if before == "cancel":
            return Route("cancel", _RUNPOD, last)
        if last == "cancel" and len(parts) > 2 and parts[-3] in _COLLECTIONS:
            return Route("cancel", _COLLECTIONS[parts[-3]], before)
    if method == "PUT" and before == "predictions":
        return Route("submit", _COG, last)
    if method == "GET" and before in _COLLECTIONS:
        return Route("status", _COLLECTIONS[before], last)
    if method == "GET" and before == "status":
        return Route("status", _RUNPOD, last)
    if method in {"GET", "DELETE"} and before == "async_request":
        return Route("status" if method == "GET" else "cancel", _BASETEN, last)
    return None


# --- pieces ---------------------------------------------------------------------------------------------------------


def _object(body: Any, *needed: str) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadSubmit(400, "the body must be a JSON object")
    for name in needed:
        if name not in body:
            raise BadSubmit(422, f"{name} is missing")
    return body


def _model(call: Any) -> str | None:
    found = call.get("model") if isinstance(call, dict) else None
    return found if isinstance(found, str) else None


def _guess(call: Any) -> str:
    return "embeddings" if isinstance(call, dict) and "input" in call and "messages" not in call else "chat"


def _address(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise BadSubmit(422, "the webhook must be an http:// or https:// address")
    return value


def _iso(moment_s: float | None) -> str | None:
    if moment_s is None:
        return None
    return dt.datetime.fromtimestamp(moment_s, dt.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _words(value: Any) -> int:
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, list):
        return sum(map(_words, value))
    return _words(value.get("content", value.get("text"))) if isinstance(value, dict) else 0


def _completion(script: Script, body: Mapping[str, Any], job: Job) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(script.tokens)}
    if script.reasoning:
        message["reasoning_content"] = "".join(script.reasoning)
    if script.tool_calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": tool.id or f"call_{index}",
                "type": "function",
                "function": {"name": tool.name, "arguments": "".join(tool.arguments)},
            }
            for index, tool in enumerate(script.tool_calls)
        ]
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{job.number:08x}",
        "object": "chat.completion",
        "created": int(job.accepted_s),
        "model": job.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": script.finish}],
    }
    usage = script.usage_for(_words(body.get("messages")), asked=True)
    if usage is not None:
        answer["usage"] = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
        }
    return answer


def _vectors(script: Script, body: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    given = body.get("input")
    inputs = given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]
    asked = body.get("dimensions")
    dimensions = asked if isinstance(asked, int) and 1 <= asked <= _EMBEDDINGS_MOST else script.dimensions
    words = _words(inputs)
    usage = script.usage if isinstance(script.usage, Usage) else Usage(words, None, words)
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _vector(text, dimensions)}
            for index, text in enumerate(inputs)
        ],
        "usage": {"prompt_tokens": usage.input_tokens, "total_tokens": usage.total_tokens},
    }


def _vector(text: Any, dimensions: int) -> list[float]:
    """Numbers from -1 to 1 that depend on nothing but the input."""
    raw = hashlib.shake_128(_encode(text)).digest(4 * dimensions)
    return [(value >> 8) / 2**23 - 1 for value in struct.unpack(f"<{dimensions}I", raw)]
