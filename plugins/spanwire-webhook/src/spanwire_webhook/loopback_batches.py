"""OpenAI's files and batches on the job server: upload, create, work, list, fetch, cancel.

A batch is a job: its script (asked for with the path of its submit) says how long it waits and works, and whether it fails its
validation (``finish_reason="error"``). Then each call of its file is played by a script of its own, at once and whatever its
delays. An error ``status``, or ``finish_reason="error"``: it is in the file of errors. ``drop_after="request"``: it is in no file.
``hang_after="request"``: it is not answered before the batch is cancelled, or its window has passed (``batch_window_s``).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import struct
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from spanwire.testing.loopback import Book, Request
from spanwire.testing.script import Script

from .loopback_http import Answer, error_body
from .loopback_record import Job
from .loopback_rules import Rules
from .loopback_shapes import BadSubmit, Generic, Route, Shape, Submit

__all__ = ["Batches"]

_encode = msgspec.json.encode
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/embeddings": "embeddings"}
_MOST_CALLS = 50_000
_KEPT_S = 30 * 86_400
#: Calls that are played before others on the loop have their turn.
_TURN = 200
_EXPIRED = "This request could not be executed before the completion window expired."


class _File(NamedTuple):
    id: str
    name: str
    purpose: str
    created_s: float
    keep_s: float
    content: bytes

    def told(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.content),
            "created_at": int(self.created_s),
            "expires_at": int(self.created_s + self.keep_s),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class _Call(msgspec.Struct):
    """A line of a file of calls."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _Progress:
    """How far a batch is."""

    def __init__(self) -> None:
        self.problems: list[dict[str, Any]] = []
        self.waiting: dict[str, None] = {}  # calls without an answer, in order
        self.total = 0
        self.answered: list[bytes] = []
        self.refused: list[bytes] = []
        self.failed = 0
        self.cancelling_s: float | None = None
        self.output_file: str | None = None
        self.error_file: str | None = None


class Batches(Shape):
    """The schema of batches, with the files and batches of one server."""

    name = "openai"
    accepted = 200
    schedule = Generic.schedule
    _STATES = {  # noqa: RUF012
        "queued": "validating",
        "running": "in_progress",
        "succeeded": "completed",
        "failed": "failed",
        "expired": "expired",
        "cancelled": "cancelled",
    }

    def __init__(self, book: Book) -> None:
        self.files: dict[str, _File] = {}
        self._book = book
        self._jobs: dict[str, Job] = {}
        self._progress: dict[str, _Progress] = {}

    # --- requests ---------------------------------------------------------------------------------------------------

    def route(self, method: str, path: str) -> Route | None:
        """A submit, a status, a cancel."""
        parts = path.strip("/").split("/")
        if method == "POST" and parts[-1] == "batches":
            return Route("submit", self, None)
        if method == "POST" and parts[-1] == "cancel" and parts[-3:-2] == ["batches"]:
            return Route("cancel", self, parts[-2])
        if method == "GET" and parts[-2:-1] == ["batches"]:
            return Route("status", self, parts[-1])
        return None

    def has(self, job: Job) -> bool:
        """Whether it is one of these batches."""
        return job.id in self._jobs

    def answer(self, request: Request, rules: Rules) -> Answer | None:
        """Files, and the list of batches; None for what is something else."""
        parts = request.path.strip("/").split("/")
        query = {name: values[-1] for name, values in parse_qs(request.query).items()}
        if parts[-1] == "batches" and request.method == "GET":
            return Answer(200, _encode(self._list(query)))
        if parts[-1] == "files":
            if request.method == "GET":
                data = [file.told() for file in reversed(self.files.values())]
                return Answer(200, _encode({"object": "list", "data": data, "has_more": False}))
            if request.method == "POST":
                return self._upload(request, rules)
        if parts[-2:-1] == ["files"] or (parts[-3:-2] == ["files"] and parts[-1] == "content"):
            id_ = parts[-2] if parts[-1] == "content" else parts[-1]
            file = self.files.get(id_)
            if file is None:
                return Answer(404, error_body(404, f"No such File object: {id_}"))
            if request.method == "GET" and parts[-1] == "content":
                return Answer(200, file.content, {"content-type": "application/octet-stream"})
            if request.method == "GET":
                return Answer(200, _encode(file.told()))
            if request.method == "DELETE":
                del self.files[id_]
                return Answer(200, _encode({"id": id_, "object": "file", "deleted": True}))
        return None

    def _list(self, query: Mapping[str, str]) -> dict[str, Any]:
        ids = list(reversed(self._jobs))
        after = query.get("after")
        if after in self._jobs:
            ids = ids[ids.index(after) + 1 :]
        limit = int(query.get("limit", "20"))
        some = ids[:limit]
        return {
            "object": "list",
            "data": [self.told(self._jobs[id_]) for id_ in some],
            "first_id": some[0] if some else None,
            "last_id": some[-1] if some else None,
            "has_more": len(ids) > limit,
        }

    def _upload(self, request: Request, rules: Rules) -> Answer:
        if rules.upload_status is not None:
            return Answer(rules.upload_status, error_body(rules.upload_status, "the file was not taken"))
        try:
            fields = _form(request)
            content, name = fields["file"]
            purpose = fields["purpose"][0].decode()
            keep_s = float(fields.get("expires_after[seconds]", (str(_KEPT_S).encode(), None))[0])
        except (KeyError, ValueError) as error:
            return Answer(400, error_body(400, f"the form cannot be read: {error}"))
        return Answer(200, _encode(self._keep(content, name or "file", purpose, keep_s).told()))

    def _keep(self, content: bytes, name: str, purpose: str, keep_s: float = _KEPT_S) -> _File:
        id_ = "file-" + hashlib.sha256(b"%d" % len(self.files) + content).hexdigest()[:22]
        file = self.files[id_] = _File(id_, name, purpose, time.time(), keep_s, content)
        return file

    # --- the schema -------------------------------------------------------------------------------------------------

    def submit(self, body: Any, headers: Mapping[str, str], id: str | None) -> Submit:
        if not isinstance(body, dict):
            raise BadSubmit(400, "the body must be a JSON object")
        if body.get("endpoint") not in _OPERATIONS:
            raise BadSubmit(400, f"endpoint must be one of {', '.join(_OPERATIONS)}")
        if body.get("completion_window") != "24h":
            raise BadSubmit(400, "completion_window must be 24h")
        if body.get("input_file_id") not in self.files:
            raise BadSubmit(400, f"No such File object: {body.get('input_file_id')}")
        return Submit(body, None, "batch", None)

    def new_id(self, number: int, submit: Submit) -> str:
        return f"batch_{number:032x}"

    def acknowledged(self, job: Job) -> Any:
        self._jobs[job.id] = job
        self._progress[job.id] = _Progress()
        return self.told(job)

    def cancelled(self, job: Job, *, now: bool) -> Any:
        return {**self.told(job), "status": "cancelling"} if now else self.told(job)

    def told(self, job: Job) -> Any:
        progress, call, state = self._progress[job.id], job.call, job.state
        ended_s = None if job.finished_s is None else int(job.finished_s)
        return {
            "id": job.id,
            "object": "batch",
            "endpoint": call["endpoint"],
            "model": job.model,
            "errors": {"object": "list", "data": progress.problems} if progress.problems else None,
            "input_file_id": call["input_file_id"],
            "completion_window": call["completion_window"],
            "status": self._STATES[state],
            "output_file_id": progress.output_file,
            "error_file_id": progress.error_file,
            "created_at": int(job.accepted_s),
            "in_progress_at": None if job.started_s is None or state == "failed" else int(job.started_s),
            "expires_at": int(job.accepted_s) + 86_400,
            "finalizing_at": ended_s if state == "succeeded" else None,
            "completed_at": ended_s if state == "succeeded" else None,
            "failed_at": ended_s if state == "failed" else None,
            "expired_at": ended_s if state == "expired" else None,
            "cancelling_at": ended_s if state == "cancelled" else None,
            "cancelled_at": ended_s if state == "cancelled" else None,
            "request_counts": {
                "total": progress.total,
                "completed": len(progress.answered),
                "failed": progress.failed,
            },
            "usage": None,
            "metadata": call.get("metadata"),
        }

    def event(self, job: Job, *, start: bool, thin: bool) -> bytes:
        return _encode(
            {
                "object": "event",
                "id": f"evt_{job.number:08x}",
                "type": f"batch.{self._STATES[job.state]}",
                "created_at": int(job.finished_s or time.time()),
                "data": {"id": job.id},
            }
        )

    # --- the work ---------------------------------------------------------------------------------------------------

    async def work(self, job: Job, script: Script, window_s: float) -> None:
        """Validate and answer; sets the job's state."""
        progress = self._progress[job.id]
        calls = self._read(job, progress)
        if script.finish == "error":
            progress.problems.append(
                {"code": "server_error", "message": "the script says that it fails", "param": None, "line": None}
            )
        if progress.problems:
            job.error = ("failed", "the batch failed")
            self.end(job, "failed")
            return
        job.model = calls[0].body.get("model") if calls else None
        progress.total = len(calls)
        progress.waiting = {call.custom_id: None for call in calls}
        try:
            async with asyncio.timeout(window_s):
                hangs = False
                for number, call in enumerate(calls):
                    if number % _TURN == _TURN - 1:
                        await asyncio.sleep(0)
                    hangs = not self._play(job, progress, number, call) or hangs
                if hangs:
                    await asyncio.get_running_loop().create_future()
        except TimeoutError:
            self.end(job, "expired")
        else:
            self.end(job, "succeeded")

    def end(self, job: Job, state: str) -> None:
        """Write the files of what has been answered."""
        progress = self._progress[job.id]
        if state == "expired":
            for custom_id in progress.waiting:
                error = {"code": "batch_expired", "message": _EXPIRED}
                progress.refused.append(_line(job, custom_id, None, error))
            progress.failed += len(progress.waiting)
        job.finished_s, job.state = time.time(), state
        # In another order than the calls came: who reads them goes by their ids.
        keep_s = (job.call.get("output_expires_after") or {}).get("seconds", _KEPT_S)
        if progress.answered:
            content = b"\n".join([*reversed(progress.answered), b""])
            progress.output_file = self._keep(content, f"{job.id}_output.jsonl", "batch_output", keep_s).id
        if progress.refused:
            content = b"\n".join([*reversed(progress.refused), b""])
            progress.error_file = self._keep(content, f"{job.id}_error.jsonl", "batch_output", keep_s).id

    def _read(self, job: Job, progress: _Progress) -> list[_Call]:
        file = self.files.get(job.call["input_file_id"])
        calls: list[_Call] = []
        seen: set[str] = set()

        def wrong(code: str, line: int | None, message: str) -> None:
            progress.problems.append({"code": code, "message": message, "param": None, "line": line})

        if file is None:
            wrong("file_not_found", None, "the file of calls has been deleted")
            return calls
        for number, line in enumerate(file.content.splitlines(), start=1):
            try:
                call = msgspec.json.decode(line, type=_Call)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                wrong("invalid_json_line", number, f"This line is not parseable as valid JSON: {error}")
                continue
            if call.custom_id in seen:
                wrong("duplicate_custom_id", number, "The custom_id for this request is a duplicate.")
            elif call.url != job.call["endpoint"] or call.method != "POST":
                wrong("mismatched_url", number, "The URL of this request is not the batch's endpoint.")
            seen.add(call.custom_id)
            calls.append(call)
        if not calls and not progress.problems:
            wrong("empty_file", None, "The input file is empty.")
        if len(calls) > _MOST_CALLS:
            wrong("too_many_tasks", None, f"The file has more than {_MOST_CALLS} requests.")
        return calls

    def _play(self, job: Job, progress: _Progress, number: int, call: _Call) -> bool:
        """Answer one call. False: not before the end."""
        model = call.body.get("model")
        request = Request(method="POST", path=call.url, query="", headers={}, raw=_encode(call.body), connection=0)
        try:
            script = self._book.script_for(request, model if isinstance(model, str) else None)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._book.fault(f"the script for call {call.custom_id!r} of {job.id} failed: {error!r}")
            script = Script(status=500)
        if script.hang_after == "request":
            return False
        del progress.waiting[call.custom_id]
        if script.drop_after == "request":
            return True
        if script.status >= 300 or script.finish == "error":
            status = script.status if script.status >= 300 else 500
            words = "as scripted" if script.status >= 300 else "the script says that it fails"
            body: Any = msgspec.Raw(script.body if script.body is not None else error_body(status, words))
            progress.refused.append(_line(job, call.custom_id, (status, body), None))
            progress.failed += 1
            return True
        played = Job(
            number=job.number * 100_000 + number,
            id=f"resp_{job.number:08x}{number:024x}",
            own=None,
            dialect=self.name,
            model=model,
            operation=_OPERATIONS[call.url],
            call=call.body,
            callback=None,
            base="",
            headers={},
            accepted_s=job.accepted_s,
        )
        body = self.output(played, script)
        if played.operation == "embeddings" and call.body.get("encoding_format") == "base64" and isinstance(body, dict):
            for row in body["data"]:
                packed = struct.pack(f"<{len(row['embedding'])}f", *row["embedding"])
                row["embedding"] = base64.b64encode(packed).decode()
        progress.answered.append(_line(job, call.custom_id, (200, body), None))
        return True


def _line(job: Job, custom_id: str, answer: tuple[int, Any] | None, error: Any) -> bytes:
    id_ = hashlib.sha256(f"{job.id} {custom_id}".encode()).hexdigest()[:32]
    response = None
    if answer is not None:
        response = {"status_code": answer[0], "request_id": f"req_{id_}", "body": answer[1]}
    return _encode({"id": f"batch_req_{id_}", "custom_id": custom_id, "response": response, "error": error})


_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary=(?:"([^"]+)"|([^\s;]+))', re.IGNORECASE | re.DOTALL)
_NAME = re.compile(rb'form-data\s*;.*?\bname="([^"]*)"(?:.*?\bfilename="([^"]*)")?', re.IGNORECASE)


def _form(request: Request) -> dict[str, tuple[bytes, str | None]]:
    """The fields of a multipart form (RFC 7578): contents and file names. Raises ValueError."""
    found = _BOUNDARY.match(request.headers.get("content-type", ""))
    if found is None:
        raise ValueError("it is no multipart/form-data with a boundary")
    mark = b"\r\n--" + (found[1] or found[2]).encode()
    fields: dict[str, tuple[bytes, str | None]] = {}
    for part in (b"\r\n" + request.raw).split(mark)[1:]:
        if part.startswith(b"--"):
            return fields
        head, gap, content = part.partition(b"\r\n\r\n")
        named = _NAME.search(head)
        if not gap or named is None:
            raise ValueError("a part has no name")
        fields[named[1].decode()] = (content, None if named[2] is None else named[2].decode())
    raise ValueError("its end is missing")
