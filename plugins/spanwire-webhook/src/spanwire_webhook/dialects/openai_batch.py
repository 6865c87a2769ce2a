"""PURE: OpenAI's batches: a file of calls, a batch of the file, files of results.

::

    POST /files (purpose=batch) ─► POST /batches ─► webhook ``batch.*``, or GET /batches/{id} ─► GET /files/{id}/content

Sources: developers.openai.com, guide "batch"; ``openai.types.batch``, ``batch_create_params`` and ``file_create_params`` of the
SDK 3.57. Results are found by ``custom_id``: the files are in any order, and a file of errors holds what was not answered.

A batch that expired, or was cancelled there, has the results of what was answered until then, which are paid for: it is a
success whose other calls have errors. Only one without any result is ``expired`` or ``cancelled``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from spanwire.calls import BatchReply, Call, Embeddings, Reply
from spanwire.endpoint import Endpoint
from spanwire.errors import (
    BadRequest,
    ConfigurationError,
    JobCancelled,
    JobExpired,
    JobLost,
    ProtocolError,
    RateLimited,
    ServerError,
    SpanwireError,
    server_error,
)
from spanwire.jobs.contract import TERMINAL, BatchLimits, HTTPAnswer, HTTPRequest, JobRow, Seen, State
from spanwire.wire.openai_chat import error_in
from spanwire.wire.openai_responses import encode_responses

from .asking import below, encoded, optional_number
from .common import ACCEPT, JSON, judged
from .output import reply_of
from .reading import Fields, fields_of, refused, span, value_of

__all__ = [
    "LIMITS",
    "OPTIONS",
    "event",
    "failure",
    "fetched",
    "fetches",
    "follow",
    "is_batch",
    "replies",
    "request",
    "seek",
    "seen",
    "sought",
    "upload",
]

#: Names in ``Endpoint.options``. ``batch_endpoint``: where the chat calls of a batch go, ``chat/completions`` (the default:
#: a call's body is in that shape, so nothing of it is translated or refused, and every server with batches has it) or
#: ``responses``, for models that are nowhere else. ``keep_files_s``: OpenAI deletes the batch's files so long after they
#: were made, 3,600 to 2,592,000 s (by default the longest, 30 days); the calls' own file no sooner than 25 h.
OPTIONS = frozenset({"batch_endpoint", "keep_files_s"})
_MOST_BYTES, _MOST_CALLS, _MOST_INPUTS = 200_000_000, 50_000, 50_000
#: Somewhat less than the file may have: who cuts calls into batches knows their own bytes, and not what is put around them.
LIMITS = BatchLimits(
    operations=frozenset({"chat", "embeddings"}),
    most_calls=_MOST_CALLS,
    most_bytes=_MOST_BYTES * 9 // 10,
    most_inputs=_MOST_INPUTS,
)
#: Of a file of results: 50,000 vectors of 3,072 numbers are 0.8 GB in base64.
_MOST_RESULT_BYTES = 2**30
_CHAT = ("chat/completions", "responses")
_KEEP_S = (3600, 2_592_000)
#: The window of a batch is 24 h, in which its file is read.
_KEEP_INPUT_S = 25 * 3600
_STATES: Mapping[str, State] = {
    "validating": "queued",
    "in_progress": "running",
    "finalizing": "running",
    "cancelling": "running",
    "completed": "succeeded",
    "failed": "failed",
    "expired": "expired",
    "cancelled": "cancelled",
}
_ENDS = ("completed_at", "failed_at", "expired_at", "cancelled_at")
_WORDS = {
    "succeeded": "the batch is complete",
    "expired": "the batch expired before it was complete",
    "cancelled": "the batch was cancelled before it was complete",
    "failed": "the batch failed",
}
_JOB = "spanwire_job"
#: Of a list of batches; and how far two clocks may be apart, in seconds.
_PAGE, _MOST_PAGES, _SKEW_S = 100, 100, 3600.0
#: Lines of what is wrong with a file of calls that are shown.
_SHOWN = 5
_HEAD = "spanwire_batch"
_Item = Reply | Embeddings | SpanwireError


# --- the submit ---------------------------------------------------------------------------------------------------------


def upload(call: Call, endpoint: Endpoint, row: JobRow) -> HTTPRequest:
    """The file of calls. Raises ConfigurationError."""
    data = _lines(call, endpoint)
    if len(data) > _MOST_BYTES:
        raise ConfigurationError(
            f"the batch's file has {len(data):,} bytes, and OpenAI takes {_MOST_BYTES:,}: make several batches of it "
            "(manager.submit_many does)",
            endpoint=endpoint.address,
        )
    fields = {"purpose": "batch"}
    keep_s = optional_number(endpoint, "keep_files_s", *_KEEP_S)
    if keep_s is not None:
        fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(max(keep_s, _KEEP_INPUT_S))}
    boundary = f"spanwire-{row.id}"  # JSON has no bare line breaks in it, so no line of the file begins with it
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    parts.append(
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{row.id}.{row.attempt}.jsonl"\r\n'
        "Content-Type: application/jsonl\r\n\r\n".encode()
    )
    body = b"".join([*parts, data, f"\r\n--{boundary}--\r\n".encode()])
    headers = {"content-type": f"multipart/form-data; boundary={boundary}", "accept": "application/json"}
    return HTTPRequest("POST", below(endpoint, "files"), headers, body)


def follow(call: Call, endpoint: Endpoint, row: JobRow, uploaded: HTTPAnswer) -> HTTPRequest:
    """The batch of the file. Raises ServerError, ProtocolError."""
    file = fields_of(uploaded).id()
    if file is None:
        raise ProtocolError("the server took the batch's file, and its answer has no id of it")
    # Its webhooks have no word of ours: with these, whoever looks at a batch finds the job and its trace, and so do we.
    metadata = {_JOB: f"{row.id}.{row.attempt}"}
    if "traceparent" in row.trace:
        metadata["traceparent"] = row.trace["traceparent"]
    body: dict[str, Any] = {
        "input_file_id": file,
        "endpoint": f"/v1/{_target(call, endpoint)}",
        "completion_window": "24h",
        "metadata": metadata,
    }
    keep_s = optional_number(endpoint, "keep_files_s", *_KEEP_S)
    if keep_s is not None:
        body["output_expires_after"] = {"anchor": "created_at", "seconds": keep_s}
    return HTTPRequest("POST", below(endpoint, "batches"), JSON, encoded(body, endpoint))


def _target(call: Call, endpoint: Endpoint) -> str:
    if call.body["operation"] == "embeddings":
        return "embeddings"
    chosen = endpoint.options.get("batch_endpoint", _CHAT[0])
    if chosen not in _CHAT:
        raise ConfigurationError(
            f"Endpoint.options: batch_endpoint must be {' or '.join(map(repr, _CHAT))}, not {chosen!r:.40}",
            endpoint=endpoint.address,
        )
    return str(chosen)


def _lines(call: Call, endpoint: Endpoint) -> bytes:
    operation, requests = call.body["operation"], call.body["requests"]
    if operation not in LIMITS.operations:
        raise ConfigurationError(
            f"OpenAI's batches have chat calls or embeddings, not {operation!r:.40}", endpoint=endpoint.address
        )
    inputs = sum(_inputs(one["body"].get("input")) for one in requests) if operation == "embeddings" else 0
    if len(requests) > _MOST_CALLS or inputs > _MOST_INPUTS:
        what = f"{len(requests):,} calls" if len(requests) > _MOST_CALLS else f"{inputs:,} texts"
        raise ConfigurationError(
            f"the batch has {what}, and OpenAI takes 50,000: make several batches of it (manager.submit_many does)",
            endpoint=endpoint.address,
        )
    target = _target(call, endpoint)
    lines = []
    for one in requests:
        try:
            body = _body(target, call.model, one["body"])
            line = {"custom_id": one["custom_id"], "method": "POST", "url": f"/v1/{target}", "body": body}
            lines.append(encoded(line, endpoint))
        except ConfigurationError as error:
            raise ConfigurationError(
                f"call {one['custom_id']!r:.60} of the batch: {error.message}", endpoint=endpoint.address
            ) from error
    return b"\n".join([*lines, b""])


def _body(target: str, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    if target == "responses":
        return encode_responses(body, model)
    given = {name: value for name, value in body.items() if name not in {"model", "stream", "stream_options"}}
    if target == "embeddings":  # a quarter of the bytes that numbers in digits are, and no less exact
        given.setdefault("encoding_format", "base64")
    return {"model": model, **given}


def _inputs(given: Any) -> int:
    return len(given) if isinstance(given, (list, tuple)) and given and not isinstance(given[0], int) else 1


# --- what is said of a batch --------------------------------------------------------------------------------------------


def is_batch(fields: Fields) -> bool:
    """Whether an object is one."""
    return fields.text("object") == "batch"


def seen(fields: Fields) -> Seen:
    """What a batch object says."""
    word = fields.text("status")
    ended_s = next((moment for name in _ENDS if (moment := fields.moment(name)) is not None), None)
    files = {name: id_ for name in ("output_file", "error_file") if (id_ := fields.id(f"{name}_id")) is not None}
    problems = fields.inner("errors")
    state = _STATES.get(word or "") or judged(
        word, ended=ended_s is not None, output="output_file" in files, error=problems is not None
    )
    code, message = _problems(problems) if state == "failed" else (None, None)
    return Seen(
        state=state,
        provider_id=fields.id(),
        fetch=state == "succeeded" or (state in TERMINAL and "output_file" in files),
        urls=files if state in TERMINAL else {},
        code=code,
        message=message or (_WORDS[state] if state in TERMINAL and state != "succeeded" and state in _WORDS else None),
        times=span(fields.moment("created_at"), fields.moment("in_progress_at"), ended_s),
    )


def _problems(errors: Fields | None) -> tuple[str | None, str | None]:
    """What is wrong with the file of calls: the first code, and the first lines."""
    found = errors.value("data") if errors is not None else None
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    if not rows:
        return None, None
    said = []
    for row in rows[:_SHOWN]:
        message, code, line = row.get("message"), row.get("code"), row.get("line")
        words = message if isinstance(message, str) and message else str(code or "it is not valid")
        said.append(f"line {line}: {words}" if isinstance(line, int) else words)
    if len(rows) > _SHOWN:
        said.append(f"and {len(rows) - _SHOWN} more")
    code = next((row["code"] for row in rows if isinstance(row.get("code"), str) and row["code"]), None)
    return code, "; ".join(said)


def event(word: str, data: Fields) -> Seen:
    """What a webhook ``batch.{word}`` says: it is thin."""
    state = _STATES.get(word)
    if state not in TERMINAL:
        return Seen(provider_id=data.id())
    return Seen(state=state, provider_id=data.id(), fetch=True)


def request(row: JobRow, endpoint: Endpoint, method: str, *action: str) -> HTTPRequest | None:
    """About a batch, or to it."""
    if row.provider_id is None:
        return None
    return HTTPRequest(method, below(endpoint, "batches", row.provider_id, *action), ACCEPT)


def failure(row: JobRow) -> ServerError:
    """Of a batch that was not begun."""
    message = row.message or "the batch failed, and the provider does not say why"
    if row.code is not None and ("limit" in row.code or "quota" in row.code):
        return RateLimited(message, code=row.code)  # the queue of the organisation is full: later it may be taken
    return BadRequest(message, code=row.code)  # it fails in no other way than by a file that is not valid


def seek(row: JobRow, endpoint: Endpoint, answers: Sequence[HTTPAnswer]) -> HTTPRequest | None:
    """The next page of the list of batches, which begins with the newest."""
    target = below(endpoint, "batches") + f"?limit={_PAGE}"
    if not answers:
        return HTTPRequest("GET", target, ACCEPT)
    fields, batches = _page(answers[-1])
    last = batches[-1].id() if batches else None
    older = all(_is_older(batch, row) for batch in batches)
    if (
        fields.value("has_more") is not True
        or last is None
        or older
        or len(answers) >= _MOST_PAGES
        or any(_is_of(batch, row) for batch in batches)
    ):
        return None
    return HTTPRequest("GET", f"{target}&after={last}", ACCEPT)


def sought(row: JobRow, answers: Sequence[HTTPAnswer]) -> Seen | None:
    """The batch of this job, if it is in the list: of several the one that has not come to a bad end."""
    found = [seen(batch) for answer in answers for batch in _page(answer)[1] if _is_of(batch, row)]
    found = [one for one in found if one.provider_id is not None]
    found.sort(key=lambda one: one.state in {"failed", "expired", "cancelled"})
    if not found:
        return None
    return found[0] if found[0].state in TERMINAL else msgspec.structs.replace(found[0], state="submitted")


def _page(answer: HTTPAnswer) -> tuple[Fields, list[Fields]]:
    fields = fields_of(answer)
    try:
        rows = msgspec.json.decode(fields.raw("data") or b"[]", type=list[msgspec.Raw])
        return fields, [Fields(row) for row in rows]
    except (ValueError, RecursionError):
        raise ProtocolError("the server's list of batches cannot be read") from None


def _is_of(batch: Fields, row: JobRow) -> bool:
    metadata = batch.inner("metadata")
    named = metadata.text(_JOB) if metadata is not None else None
    return named is not None and named.startswith(f"{row.id}.") and not _is_older(batch, row)


def _is_older(batch: Fields, row: JobRow) -> bool:
    """Than the job: of a store that is gone, whose jobs had the same ids."""
    return (batch.moment("created_at") or 0.0) < row.created_s - _SKEW_S


# --- results ------------------------------------------------------------------------------------------------------------


def _files(row: JobRow) -> list[str]:
    return [name for name in ("output_file", "error_file") if name in row.urls]


def fetches(row: JobRow, endpoint: Endpoint) -> list[HTTPRequest]:
    """Its files."""
    return [
        HTTPRequest(
            "GET", below(endpoint, "files", row.urls[name], "content"), {"accept": "*/*"}, b"", _MOST_RESULT_BYTES
        )
        for name in _files(row)
    ]


def fetched(row: JobRow, told: Seen, names: Sequence[str], answers: Sequence[HTTPAnswer]) -> Seen:
    """All of its files as one body, with what is needed to read them. Raises ServerError."""
    files: dict[str, bytes] = {}
    for name, answer in zip(_files(row), answers, strict=True):
        if 200 <= answer.status < 300:
            files[name] = answer.body
        elif answer.status not in {404, 410}:
            raise refused(answer)
        elif name == "output_file":
            message = (
                "the file of results is not there any more: OpenAI deletes it after 30 days, or when it is told to"
            )
            return msgspec.structs.replace(told, state="lost", fetch=False, code=str(answer.status), message=message)
    output = files.get("output_file", b"")
    if told.state != "succeeded" and not output.strip():
        return msgspec.structs.replace(told, fetch=False)
    head = msgspec.json.encode({_HEAD: 1, "ended": told.state, "names": list(names)})
    body = b"\n".join([head, output, files.get("error_file", b"")])
    more: dict[str, Any] = {"code": None, "message": None}
    if told.state != "succeeded":
        more = {
            "code": f"batch_{told.state}",
            "message": f"{_WORDS[told.state or 'failed']}: what was answered is kept",
        }
    return msgspec.structs.replace(told, state="succeeded", fetch=False, body=body, **more)


def replies(body: bytes) -> BatchReply:
    """What came of each call. Raises ProtocolError."""
    lines = _split(body)
    try:
        head = Fields(next(lines, b""))
    except ValueError:
        head = None
    if head is None or _HEAD not in head:
        raise ProtocolError("the batch's result was not written by this schema")
    ended = head.text("ended") or "succeeded"
    names: Sequence[str] = head.value("names") or ()
    found: dict[str, _Item | None] = dict.fromkeys(names)
    unread = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            fields = Fields(line)
        except ValueError:
            unread += 1
            continue
        name = fields.text("custom_id")
        if name is None:
            unread += 1
        elif name in found or not names:  # else it is none of ours
            known = found.get(name)
            if known is None or isinstance(known, SpanwireError):  # of two rows the one that has an answer
                item = _item(fields)
                if known is None or not isinstance(item, SpanwireError):
                    found[name] = item
    return BatchReply({name: _missing(ended, unread) if item is None else item for name, item in found.items()})


def _split(body: bytes) -> Iterator[bytes]:
    """Lines, by line feeds alone: JSON may have other line breaks in its text."""
    start = 0
    while (end := body.find(b"\n", start)) >= 0:
        yield body[start:end]
        start = end + 1
    yield body[start:]


def _item(fields: Fields) -> _Item:
    response = fields.inner("response")
    try:
        if response is None:
            return _refusal(fields)
        status, body = response.value("status_code"), response.raw("body") or b""
        if isinstance(status, int) and not 200 <= status < 300:
            return error_in(body, status=status)
        reply = reply_of(_operation(body), body)
    except SpanwireError as error:
        return error
    id_ = response.text("request_id")
    return reply if id_ is None else msgspec.structs.replace(reply, headers={"x-request-id": id_})


def _operation(body: bytes) -> str:
    try:
        fields = Fields(body)
    except ValueError as error:
        raise ProtocolError(f"the row's answer cannot be read: {error}") from None
    if fields.text("object") == "list" or ("data" in fields and "choices" not in fields and "output" not in fields):
        return "embeddings"
    return "chat"


def _refusal(fields: Fields) -> SpanwireError:
    raw = fields.raw("error")
    if raw is None:
        return ProtocolError("the call's row has neither an answer nor an error")
    try:
        given = value_of(raw)
    except ValueError:
        given = None
    code, message = (given.get("code"), given.get("message")) if isinstance(given, dict) else (None, given)
    words = message if isinstance(message, str) and message else "the call was not answered"
    if code == "batch_expired":
        return JobExpired(words)
    if code == "batch_cancelled":
        return JobCancelled(words)
    return server_error(words, code=code if isinstance(code, (str, int)) and not isinstance(code, bool) else None)


def _missing(ended: str, unread: int) -> SpanwireError:
    if unread:
        return ProtocolError(f"the batch's files have no row of this call, and {unread} lines that cannot be read")
    if ended == "expired":
        return JobExpired("the batch expired before this call was answered")
    if ended == "cancelled":
        return JobCancelled("the batch was cancelled before this call was answered")
    return JobLost("the batch's files have no row of this call")
