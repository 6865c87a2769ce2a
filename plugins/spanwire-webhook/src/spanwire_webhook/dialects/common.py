"""PURE: what most providers' schemas of jobs have in common. Each of them says the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec.structs import replace

from spanwire.calls import Embeddings, Reply
from spanwire.endpoint import Endpoint
from spanwire.errors import ProtocolError, ServerError, server_error
from spanwire.jobs.contract import TERMINAL, HTTPAnswer, HTTPRequest, JobRow, Seen, State
from spanwire.wire.retry_after import retry_after_s

from .output import reply_of
from .reading import Fields, digest, fields_of

__all__ = ["ACCEPT", "JSON", "CommonJobs", "judged"]

JSON: Mapping[str, str] = {"content-type": "application/json", "accept": "application/json"}
ACCEPT: Mapping[str, str] = {"accept": "application/json"}


class CommonJobs:
    """A :class:`~spanwire.jobs.contract.JobCodec` but for ``submit`` and ``seen``; the attributes are described there."""

    scheme: Literal["standard", "baseten", "fal", "gemini", "none"] = "standard"
    callback: Literal["request", "account"] = "request"
    polls: bool = True
    status_has_output: bool = True
    resubmits: bool = False
    most_body_bytes: int | None = None
    retention_s: float = 3600.0
    polls_per_s: float = 10.0
    delivery_s: float = 3600.0

    #: What it means when the status is asked for and is not there.
    gone: Mapping[int, State] = {404: "lost", 410: "lost"}

    def seen(self, fields: Fields, body: bytes) -> Seen:
        """What a job's object says. For each provider its own."""
        raise NotImplementedError

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {api_key}"}

    def acknowledged(self, answer: HTTPAnswer) -> Seen:
        found = self._answered(answer)
        if found.provider_id is None:
            raise ProtocolError("the server took the job, and its answer has no id of it")
        return found if found.state in TERMINAL else replace(found, state="submitted")

    def _answered(self, answer: HTTPAnswer) -> Seen:
        """Raises ServerError, ProtocolError."""
        fields = fields_of(answer)
        try:
            return self.seen(fields, answer.body)
        except ValueError as error:
            raise ProtocolError(f"the server's answer cannot be read: {error}") from None

    def webhook(self, headers: Mapping[str, str], body: bytes) -> Seen:
        return self.seen(Fields(body), body)

    def dedupe(self, headers: Mapping[str, str], body: bytes) -> str:
        return headers.get("webhook-id") or digest(body)

    def told(self, answer: HTTPAnswer) -> Seen:
        if answer.status in self.gone:
            state = self.gone[answer.status]
            words = "the provider does not know this job any more, nor its result"
            return Seen(state=state, code=str(answer.status), message=words)
        found = self._answered(answer)
        wait_s = retry_after_s(answer.headers)
        return found if wait_s is None else replace(found, retry_after_s=wait_s)

    def status(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        raise NotImplementedError

    def result(self, row: JobRow, endpoint: Endpoint) -> HTTPRequest | None:
        return self.status(row, endpoint)

    def reply(self, call_operation: str, body: bytes) -> Reply | Embeddings:
        try:
            output, model = self.output(Fields(body))
        except ValueError as error:
            raise ProtocolError(f"the job's result cannot be read: {error}") from None
        return reply_of(call_operation, output or b"", model=model)

    def output(self, fields: Fields) -> tuple[bytes | None, str | None]:
        """Where in a job's object the result is, as JSON, and the model's name. Raises ValueError."""
        return fields.raw("output"), fields.text("model")

    def failure(self, row: JobRow) -> ServerError | None:
        if row.state != "failed":
            return None
        return server_error(row.message or "the job failed, and the provider does not say why", code=row.code)


def judged(status: str | None, *, ended: bool, output: bool, error: bool) -> State | None:
    """The state of a status that nobody has heard of: terminal if there is an end, an output or an error; else None."""
    if error:
        return "failed"
    if output:
        return "succeeded"
    return "failed" if ended else None
