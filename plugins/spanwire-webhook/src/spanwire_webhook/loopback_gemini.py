"""PURE: the job server in Gemini's schemas: interactions in the background, and batches with their requests in the submit.

Sources: ai.google.dev/gemini-api/docs/interactions, .../webhooks, .../batch-api; types of google-genai 2.x.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from spanwire.testing.script import Script

from .loopback_record import Job
from .loopback_shapes import BadSubmit, Shape, Submit, _address, _encode, _iso, _object, _vector, _words

__all__ = ["Gemini", "GeminiBatch", "event_of"]


class Gemini(Shape):
    """``POST /interactions``, ``GET /interactions/{id}``, ``POST /interactions/{id}/cancel``."""

    name = "gemini"
    signs = "gemini"
    account = True
    accepted = 200
    #: Up to 24 hours.
    schedule = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0)
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
        if body.get("store") is False:
            raise BadSubmit(400, "what is worked on in the background is stored")
        return Submit(body, body["model"], "interaction", _callback(body.get("webhook_config"), "uris"))

    def new_id(self, number: int, submit: Submit) -> str:
        return "v1_" + hashlib.sha256(b"gemini:%d" % number).hexdigest()[:40]

    def told(self, job: Job) -> Any:
        if isinstance(job.output, msgspec.Raw) and job.state == "succeeded":
            return job.output
        found: dict[str, Any] = {
            "id": job.id,
            "object": "interaction",
            "model": job.model,
            "status": self._STATES[job.state],
            "created": _iso(job.accepted_s),
            "updated": _iso(job.finished_s or job.started_s or job.accepted_s),
        }
        if job.state == "succeeded":
            found |= job.output
        if job.error is not None:
            found["errors"] = [{"code": "INTERNAL", "message": job.error[1]}]
        return found

    def output(self, job: Job, script: Script) -> Any:
        if script.body is not None:
            return msgspec.Raw(script.body)
        steps: list[dict[str, Any]] = []
        if script.reasoning:
            steps.append({"type": "thought", "summary": [{"type": "text", "text": "".join(script.reasoning)}]})
        if script.tokens:
            steps.append({"type": "model_output", "content": [{"type": "text", "text": "".join(script.tokens)}]})
        for index, tool in enumerate(script.tool_calls):
            arguments = msgspec.json.decode("".join(tool.arguments) or "{}")
            id_ = tool.id or f"call_{index}"
            steps.append({"type": "function_call", "id": id_, "name": tool.name, "arguments": arguments})
        status = "requires_action" if script.tool_calls else "incomplete" if script.finish == "length" else "completed"
        found: dict[str, Any] = {"status": status, "steps": steps}
        usage = script.usage_for(_words(_texts(job.call.get("input"))), asked=True)
        if usage is not None:
            found["usage"] = {
                "total_input_tokens": usage.input_tokens,
                "total_output_tokens": usage.output_tokens,
                "total_tokens": usage.total_tokens,
                "total_thought_tokens": usage.reasoning_tokens or 0,
            }
        return found

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        return _encode(event_of(job))


class GeminiBatch(Shape):
    """``POST /models/{model}:batchGenerateContent`` and ``:asyncBatchEmbedContent``, ``GET /batches/{id}``."""

    name = "gemini_batch"
    signs = "gemini"
    account = True
    accepted = 200
    schedule = Gemini.schedule
    _STATES = {  # noqa: RUF012
        "queued": "BATCH_STATE_PENDING",
        "running": "BATCH_STATE_RUNNING",
        "succeeded": "BATCH_STATE_SUCCEEDED",
        "failed": "BATCH_STATE_FAILED",
        "cancelled": "BATCH_STATE_CANCELLED",
    }

    def submit(self, body: Any, headers: Mapping[str, str], id: str | None) -> Submit:
        batch = _object(_object(body, "batch")["batch"], "displayName", "inputConfig")
        inner = _object(_object(batch["inputConfig"], "requests")["requests"], "requests")["requests"]
        if (
            not isinstance(inner, list)
            or not inner
            or not all(isinstance(one, dict) and "request" in one for one in inner)
        ):
            raise BadSubmit(400, "inputConfig.requests.requests must be a list of requests")
        operation = "embeddings" if "content" in inner[0]["request"] else "chat"
        return Submit(body, id, operation, _callback(batch.get("webhookConfig"), "uris"))

    def new_id(self, number: int, submit: Submit) -> str:
        return hashlib.sha256(b"gemini batch:%d" % number).hexdigest()[:32]

    def told(self, job: Job) -> Any:
        metadata: dict[str, Any] = {
            "model": f"models/{job.model}",
            "state": self._STATES[job.state],
            "createTime": _iso(job.accepted_s),
            "updateTime": _iso(job.finished_s or job.started_s or job.accepted_s),
        }
        found: dict[str, Any] = {"name": f"batches/{job.id}", "metadata": metadata}
        if job.ended:
            metadata["endTime"] = _iso(job.finished_s)
            found["done"] = True
        if job.state == "succeeded":
            found["response"] = job.output
        if job.error is not None:
            found["error"] = {"code": 13, "message": job.error[1]}
        return found

    def output(self, job: Job, script: Script) -> Any:
        if script.body is not None:
            return msgspec.Raw(script.body)
        requests = job.call["batch"]["inputConfig"]["requests"]["requests"]
        answer = self._vector if job.operation == "embeddings" else self._content
        answers = [
            {"response": answer(one["request"], script), "metadata": one.get("metadata") or {}} for one in requests
        ]
        name = "inlinedEmbedContentResponses" if job.operation == "embeddings" else "inlinedResponses"
        return {name: {"inlinedResponses": answers}}

    @staticmethod
    def _vector(request: Any, script: Script) -> Any:
        text = " ".join(_texts(request.get("content")))
        dimensions = request.get("outputDimensionality")
        return {
            "embedding": {"values": _vector(text, dimensions if isinstance(dimensions, int) else script.dimensions)}
        }

    @staticmethod
    def _content(request: Any, script: Script) -> Any:
        parts: list[dict[str, Any]] = [{"text": "".join(script.tokens)}]
        if script.reasoning:
            parts.insert(0, {"text": "".join(script.reasoning), "thought": True})
        for tool in script.tool_calls:
            args = msgspec.json.decode("".join(tool.arguments) or "{}")
            parts.append({"functionCall": {"id": tool.id, "name": tool.name, "args": args}})
        reason = "MAX_TOKENS" if script.finish == "length" else "STOP"
        found: dict[str, Any] = {
            "candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": reason, "index": 0}]
        }
        usage = script.usage_for(_words(_texts(request.get("contents"))), asked=True)
        if usage is not None:
            found["usageMetadata"] = {
                "promptTokenCount": usage.input_tokens,
                "candidatesTokenCount": usage.output_tokens,
                "totalTokenCount": usage.total_tokens,
            }
        return found

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        return _encode(event_of(job))


def event_of(job: Job) -> dict[str, Any]:
    """The event that a webhook's body, and a token's claims, are."""
    if job.dialect == "gemini_batch":
        kind = {"succeeded": "batch.succeeded", "failed": "batch.failed"}.get(job.state, "batch.cancelled")
        data: dict[str, Any] = {"id": f"batches/{job.id}"}
    else:
        waits = isinstance(job.output, dict) and job.output.get("status") == "requires_action"
        word = {"succeeded": "requires_action" if waits else "completed", "failed": "failed"}.get(
            job.state, "cancelled"
        )
        kind = f"interaction.{word}"
        data = {"id": job.id}
    if job.error is not None:
        data |= {"error_code": "INTERNAL", "error_message": job.error[1]}
    config = job.call.get("webhook_config") or job.call.get("batch", {}).get("webhookConfig") or {}
    event = {"type": kind, "version": "v1", "timestamp": _iso(job.finished_s), "data": data}
    metadata = config.get("user_metadata", config.get("userMetadata"))
    return event if metadata is None else {**event, "user_metadata": metadata}


def _callback(config: Any, name: str) -> str | None:
    uris = config.get(name) if isinstance(config, dict) else None
    if config is not None and not (isinstance(uris, list) and len(uris) == 1):
        raise BadSubmit(400, "the webhook's configuration must have one address in uris")
    return _address(uris[0]) if uris else None


def _texts(value: Any) -> list[str]:
    """All text in steps, contents and parts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, dict):
        return [text for name in ("text", "content", "parts") for text in _texts(value.get(name))]
    return []
