"""PURE: Gemini's batches with their requests in the submit: ``:batchGenerateContent`` and ``:asyncBatchEmbedContent``.

Sources: ai.google.dev/api/batch-api and .../docs/batch-api; ``batches`` of google-genai 2.x. The status of a batch has its
results. An embeddings call is a batch of its texts, in their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from spanwire.calls import BatchReply, Call, Embeddings, Reply
from spanwire.errors import ConfigurationError, ProtocolError, ServerError, SpanwireError
from spanwire.jobs.contract import BatchLimits, JobRow, Seen, State

from .gemini_answer import embedding_of, reply_of_content
from .gemini_request import Asked, asked_of
from .gemini_turns import Called, Media, Part, Returned, Text
from .reading import Fields, id_of, json_of, span

__all__ = ["LIMITS", "embeddings_of", "is_batch", "replies_of", "seen_of", "submit_of"]

#: Requests in the submit may have 20 MB together; for more there are files. No count is documented: this one keeps an
#: answer in memory.
LIMITS = BatchLimits(frozenset({"chat", "embeddings"}), most_calls=10_000, most_bytes=20 * 1024 * 1024)

_STATES: Mapping[str, State] = {
    "PENDING": "queued",
    "QUEUED": "queued",
    "RUNNING": "running",
    "CANCELLING": "running",
    "SUCCEEDED": "succeeded",
    "PARTIALLY_SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "EXPIRED": "expired",
}
#: ``generationConfig`` by the names of :attr:`Asked.settings`.
_SETTINGS = {
    "temperature": "temperature",
    "top_p": "topP",
    "seed": "seed",
    "max_output_tokens": "maxOutputTokens",
    "stop_sequences": "stopSequences",
}
_MODES = {"auto": "AUTO", "any": "ANY", "none": "NONE"}
#: Parameters of an embeddings call, by Gemini's name.
_EMBEDDING = {"dimensions": "outputDimensionality", "task_type": "taskType", "title": "title"}


def submit_of(call: Call, row: JobRow, webhook: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """What stands behind ``models/``, and the body. Raises ConfigurationError: names what Gemini cannot be told."""
    model = call.model.removeprefix("models/")
    operation = call.body["operation"] if call.operation == "batch" else call.operation
    if call.operation == "batch":
        named = [(request["custom_id"], request["body"]) for request in call.body["requests"]]
    else:
        named = [("", call.body)]
    if operation == "chat":
        method = "batchGenerateContent"
        requests = [{"request": _content_request(body), "metadata": {"key": f"c:{name}"}} for name, body in named]
    elif operation == "embeddings":
        method = "asyncBatchEmbedContent"
        requests = [
            {"request": one, "metadata": {"key": f"e{index}:{name}"}}
            for name, body in named
            for index, one in enumerate(_embed_requests(body, model))
        ]
    else:
        raise ConfigurationError(f"Gemini has batches of chat and embeddings, not of {operation!r:.40}")
    batch: dict[str, Any] = {
        "displayName": f"spanwire {row.id}.{row.attempt}",
        "inputConfig": {"requests": {"requests": requests}},
    }
    if webhook is not None:
        batch["webhookConfig"] = {"uris": webhook["uris"], "userMetadata": webhook["user_metadata"]}
    return f"{model}:{method}", {"batch": batch}


def _embed_requests(body: Mapping[str, Any], model: str) -> list[dict[str, Any]]:
    rest = {name: value for name, value in body.items() if value is not None and name != "model"}
    given = rest.pop("input", ())
    texts = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigurationError("input: Gemini embeds texts, not token ids")
    if rest.pop("encoding_format", "float") not in ("float", "base64"):
        raise ConfigurationError("encoding_format: Gemini gives floats")
    more = {_EMBEDDING[name]: rest.pop(name) for name in list(rest) if name in _EMBEDDING}
    if rest:
        raise ConfigurationError(f"{next(iter(rest))}: Gemini's embeddings have no such parameter")
    return [{"model": f"models/{model}", "content": {"parts": [{"text": text}]}, **more} for text in texts]


def _content_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat call as a request of ``generateContent``."""
    asked = asked_of(body)
    found: dict[str, Any] = {
        "contents": [{"role": turn.role, "parts": [_part(part) for part in turn.parts]} for turn in asked.turns]
    }
    if asked.system:
        found["systemInstruction"] = {"parts": [{"text": asked.system}]}
    if asked.tools:
        raise ConfigurationError(f"tools: a batch has functions alone, not {asked.tools[0].get('type')!r:.40}")
    if asked.functions:
        found["tools"] = [{"functionDeclarations": [_declared(function) for function in asked.functions]}]
    if asked.choice is not None:
        mode, names = asked.choice
        config: dict[str, Any] = {"mode": _MODES[mode]}
        if names:
            config["allowedFunctionNames"] = names
        found["toolConfig"] = {"functionCallingConfig": config}
    settings = _settings(asked)
    if settings:
        found["generationConfig"] = settings
    safety = asked.rest.pop("safety_settings", None)
    if safety is not None:
        found["safetySettings"] = safety
    if asked.rest:
        raise ConfigurationError(f"{next(iter(asked.rest))}: Gemini's batches have no such parameter")
    return found


def _declared(function: Mapping[str, Any]) -> dict[str, Any]:
    """JSON Schema has a field of its own there; ``parameters`` is a dialect of OpenAPI."""
    return {"parametersJsonSchema" if name == "parameters" else name: value for name, value in function.items()}


def _settings(asked: Asked) -> dict[str, Any]:
    found = {_SETTINGS[name]: value for name, value in asked.settings.items() if name in _SETTINGS}
    level = asked.settings.get("thinking_level")
    if level is not None:
        found["thinkingConfig"] = {"thinkingLevel": level}
    if asked.json:
        found["responseMimeType"] = "application/json"
        if asked.schema is not None:
            found["responseJsonSchema"] = asked.schema
    return found


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"text": part.text}
    if isinstance(part, Called):
        return {"functionCall": {"id": part.id, "name": part.name, "args": part.arguments}}
    if isinstance(part, Returned):
        if part.name is None:
            raise ConfigurationError(f"the result of the call {part.id!r:.60} belongs to no call before it")
        return {"functionResponse": {"id": part.id, "name": part.name, "response": {"result": part.text}}}
    return _media(part)


def _media(part: Media) -> dict[str, Any]:
    mime = {} if part.mime_type is None else {"mimeType": part.mime_type}
    if part.data is not None:
        return {"inlineData": {**mime, "data": part.data}}
    return {"fileData": {**mime, "fileUri": part.uri}}


# --- what comes back ----------------------------------------------------------------------------------------------------


def is_batch(fields: Fields) -> bool:
    """An operation, and no interaction."""
    name = fields.value("name")
    return isinstance(name, str) and name.startswith("batches/")


def seen_of(fields: Fields, body: bytes) -> Seen:
    """An operation: what was acknowledged, and the status."""
    metadata = fields.inner("metadata") or Fields(b"{}")
    name = fields.value("name")
    word = (
        (metadata.text("state") or fields.text("state") or "").removeprefix("BATCH_STATE_").removeprefix("JOB_STATE_")
    )
    state = _STATES.get(word)
    error = fields.inner("error")
    if fields.value("done") is True and state not in {"succeeded", "failed", "cancelled", "expired"}:
        state = "failed" if error is not None else "succeeded"
    if state == "succeeded" and not _has_answers(fields):
        return Seen(
            state="lost", provider_id=_id(name), message="the batch is done, and its results are in a file or are gone"
        )
    ended = state in {"succeeded", "failed", "cancelled", "expired"}
    code: str | None = None
    message: str | None = None
    if state == "failed":
        number = error.value("code") if error is not None else None
        code = str(number) if isinstance(number, (int, str)) and not isinstance(number, bool) else word or "FAILED"
        message = (error.text("message") if error is not None else None) or "the batch failed, without a message"
    return Seen(
        state=state,
        provider_id=_id(name),
        body=body if state == "succeeded" else None,
        code=code,
        message=None if message is None else message[:1000],
        times=span(metadata.moment("createTime"), None, metadata.moment("endTime") if ended else None),
    )


def _id(name: Any) -> str | None:
    return id_of(name.removeprefix("batches/")) if isinstance(name, str) else None


def _has_answers(fields: Fields) -> bool:
    try:
        return bool(_answers({name: fields.value(name) for name in ("metadata", "response")}))
    except ProtocolError:
        return False


def _answers(operation: Any) -> list[Any]:
    """``response``, or in it or in the metadata ``output``, has them: ``inlinedResponses.inlinedResponses``."""
    if isinstance(operation, dict):
        metadata = operation.get("metadata")
        outer = [operation.get("response"), metadata.get("output") if isinstance(metadata, dict) else None]
        for place in [*outer, *(one.get("output") for one in outer if isinstance(one, dict))]:
            for name in ("inlinedResponses", "inlinedEmbedContentResponses"):
                inner = place.get(name) if isinstance(place, dict) else None
                listed = inner.get("inlinedResponses") if isinstance(inner, dict) else inner
                if isinstance(listed, list):
                    return listed
    raise ProtocolError("the batch has no results in it")


def embeddings_of(operation: Any) -> Embeddings:
    """Of an embeddings call: one answer for each text. Raises ServerError: one of them has an error; ProtocolError."""
    answers = _answers(operation)
    keys = [_key(answer) for answer in answers]
    if any(key is not None for key in keys):  # else the order is all there is
        answers = _in_order(
            {-1 if key is None or key[0] is None else key[0]: one for key, one in zip(keys, answers, strict=True)}
        )
        if len(answers) != len(keys):
            raise ProtocolError("the batch has several results of one text")
    for answer in answers:
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            raise ServerError(str(answer["error"].get("message") or "a text could not be embedded"))
    model = operation.get("metadata", {}).get("model") if isinstance(operation.get("metadata"), dict) else None
    return embedding_of(
        [answer.get("response") if isinstance(answer, dict) else None for answer in answers],
        model.removeprefix("models/") if isinstance(model, str) else None,
    )


def replies_of(operation: Any, meant: Callable[[str, str | None], ServerError]) -> BatchReply:
    """By the names of the calls. Raises ProtocolError."""
    items: dict[str, Reply | Embeddings | SpanwireError] = {}
    failed: dict[str, SpanwireError] = {}
    vectors: dict[str, dict[int, Any]] = {}
    answers = _answers(operation)
    keys = [_key(answer) for answer in answers]
    if answers and not any(keys):
        raise ProtocolError("the results of the batch have no keys of ours: nobody knows whose they are")
    for key, answer in zip(keys, answers, strict=True):
        if key is None:  # one that nobody can place is no reason to lose the others
            continue
        index, name = key
        response, error = answer.get("response"), answer.get("error")
        if isinstance(error, dict):
            number = error.get("code")
            failed[name] = meant(
                str(error.get("message") or "the call failed"), None if number is None else str(number)
            )
            continue
        try:
            if index is None:
                items[name] = reply_of_content(response, json_of(response))
            else:
                vectors.setdefault(name, {})[index] = response
        except SpanwireError as problem:
            failed[name] = problem
    for name, found in vectors.items():
        if name not in failed:
            try:
                items[name] = embedding_of(_in_order(found), None)
            except SpanwireError as problem:
                failed[name] = problem
    return BatchReply(failed | items)  # of two rows the one that has an answer


def _in_order(found: Mapping[int, Any]) -> list[Any]:
    """Of texts by their numbers. Raises ProtocolError: one has no result, and those after it would have its place."""
    missing = next((index for index in range(len(found)) if index not in found), None)
    if missing is not None:
        raise ProtocolError(f"the batch has no result of text {missing}")
    return [found[index] for index in range(len(found))]


_KEY = re.compile(r"(?:c|e([0-9]{1,9})):(.*)\Z", re.DOTALL)


def _key(answer: Any) -> tuple[int | None, str] | None:
    """Which text of which call, as the submit has named it: ``c:name`` of a chat call, ``e0:name`` of a text."""
    metadata = answer.get("metadata") if isinstance(answer, dict) else None
    key = metadata.get("key") if isinstance(metadata, dict) else None
    found = _KEY.match(key) if isinstance(key, str) else None
    return None if found is None else (None if found[1] is None else int(found[1]), found[2])
