"""OpenAI's Responses over one WebSocket: turns, lanes, the connection's memory of responses, and its end.

After OpenAI's guide "WebSocket mode" and the README of its SDK (``openai/lib/responses_websocket``): responses of one
lane (``stream_id``) are made one after the other, those of different lanes interleave; a connection knows the responses
that were made on it, and every connection those that were stored; there is no event to cancel one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec.structs import replace

from spanwire.testing.loopback import Request
from spanwire.testing.reports import DIALECTS
from spanwire.testing.responses_events import error_event, response_events
from spanwire.testing.script import Script

from .loopback_connection import Gone, Peer
from .loopback_play import Frames, as_it_is, frames, play
from .loopback_rules import Rules

__all__ = ["Responses", "Stored"]

#: Ids of responses that any connection may go on from, with the items up to their end.
Stored = dict[str, list[Any]]

_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}\Z")
#: What the schema's error objects say for a status: type and code.
_ERRORS = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("not_found_error", "model_not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("server_error", "server_is_overloaded"),
}

_encode = msgspec.json.encode


class _Turn:
    """One ``response.create``."""

    __slots__ = ("body", "lane", "request")

    def __init__(self, request: Request, body: dict[str, Any], lane: str | None) -> None:
        self.request = request
        self.body = body
        self.lane = lane


class Responses:
    """One connection. Use: ``await Responses(peer, rules, stored).run()``."""

    def __init__(self, peer: Peer, rules: Rules, stored: Stored) -> None:
        self._peer = peer
        self._rules = rules
        self._stored = stored
        self._known: Stored = {}
        self._lanes: set[str] = set()
        self._waiting: deque[_Turn] = deque()
        self._busy: set[str | None] = set()
        self._turns = 0
        self._end_code: int | None = None
        self._born = peer.loop.time()

    async def run(self) -> None:
        """Serve until the client or the rules end it. Raises websockets' ConnectionClosed."""
        peer, rules = self._peer, self._rules
        timer = None
        if rules.max_age_s is not None and rules.when_old == "close":
            timer = peer.loop.call_later(rules.max_age_s, self._retire)
        try:
            while True:
                message = await peer.recv(decode=False)
                assert isinstance(message, bytes)
                self._take(message)
        except Gone:
            await peer.wait_closed()
        finally:
            if timer is not None:
                timer.cancel()

    # --- what comes -------------------------------------------------------------------------------------------------

    def _take(self, message: bytes) -> None:
        peer = self._peer
        try:
            body = msgspec.json.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = None
        if not isinstance(body, dict):
            peer.book.fault(f"connection {peer.number}: a message that is not a JSON object")
            self._say(error_event("the message is not a JSON object", code="invalid_json", status=400))
            return
        kind = body.pop("type", None)
        if kind == "response.steer":
            self._refuse_steering(body)
        elif kind != "response.create":
            self._say(error_event(f"there is no event {kind!r:.60}", code="unknown_event", status=400, param="type"))
        else:
            self._create(peer.arrived(message, "response.create"), body)

    def _refuse_steering(self, body: Mapping[str, Any]) -> None:
        steer = {"previous_response_id": body.get("previous_response_id"), "input": body.get("input")}
        error = {
            "type": "invalid_request_error",
            "code": "steering_not_supported",
            "message": "the loopback server's models cannot be steered",
        }
        self._say({"type": "response.steer.failed", "sequence_number": 0, "steer": steer, "error": error})

    def _create(self, request: Request, body: dict[str, Any]) -> None:
        lane = body.pop("stream_id", None) if self._rules.lanes else None
        wrong = self._wrong_with(body, lane)
        if wrong is not None:
            self._refuse(request, None if wrong["error"]["code"] == "invalid_stream_id" else lane, wrong)
            return
        if lane is not None:
            self._lanes.add(lane)
        if self._old() and self._rules.when_old == "error":
            words = "this connection has reached its limit; make a new one"
            self._refuse(request, lane, error_event(words, code="websocket_connection_limit_reached", status=400))
            self._end_code = 1000
            self._end_if_idle()
            return
        self._turns += 1
        self._waiting.append(_Turn(request, body, lane))
        self._begin()

    def _wrong_with(self, body: Mapping[str, Any], lane: object) -> dict[str, Any] | None:
        """What a real server would refuse, so that a client's mistake is seen here too."""
        if lane is not None:
            if not isinstance(lane, str) or not _LANE.match(lane):
                words = "stream_id must be 1 to 256 of A-Z a-z 0-9 _ - ."
                return error_event(words, code="invalid_stream_id", status=400, param="stream_id")
            if lane not in self._lanes and len(self._lanes) >= self._rules.max_lanes:
                words = f"a connection has at most {self._rules.max_lanes} lanes"
                return error_event(words, code="websocket_stream_limit_reached", status=400, param="stream_id")
        if not isinstance(body.get("model"), str):
            return error_event("model must be text", code="missing_required_parameter", status=400, param="model")
        if not isinstance(body.get("input", ""), (str, list)):
            return error_event("input must be text or a list of items", code="invalid_type", status=400, param="input")
        for name in ("stream", "background"):
            if body.get(name) is not None:
                words = f"{name} has no meaning on a WebSocket"
                return error_event(words, code="unsupported_parameter", status=400, param=name)
        return None

    # --- turns ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start what may start: the first of each lane that has none under way."""
        held: deque[_Turn] = deque()
        blocked: set[str | None] = set()
        while self._waiting and len(self._busy) < self._rules.max_active:
            turn = self._waiting.popleft()
            if turn.request not in self._peer.running:
                continue  # the connection is gone
            if turn.lane in self._busy or turn.lane in blocked:
                blocked.add(turn.lane)
                held.append(turn)
                continue
            self._busy.add(turn.lane)
            self._peer.answer(turn.request, partial(self._answer, turn)).add_done_callback(partial(self._over, turn))
        self._waiting.extendleft(reversed(held))

    def _over(self, turn: _Turn, _: object) -> None:
        self._busy.discard(turn.lane)
        self._begin()
        if self._rules.when_old == "close" and self._old():
            self._end_code = 1001
        self._end_if_idle()

    def _old(self) -> bool:
        rules = self._rules
        return (rules.max_age_s is not None and self._peer.loop.time() - self._born >= rules.max_age_s) or (
            rules.max_turns is not None and self._turns >= rules.max_turns
        )

    def _retire(self) -> None:
        """The connection is old."""
        self._end_code = 1001
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._end_code is not None and not self._peer.running:
            self._peer.close_soon(self._end_code, "the connection is old")

    async def _answer(self, turn: _Turn) -> None:
        peer, request, body, lane = self._peer, turn.request, turn.body, turn.lane
        parent = body.get("previous_response_id")
        history: list[Any] = []
        if parent is not None:
            found = self._known.get(parent, self._stored.get(parent)) if isinstance(parent, str) else None
            if found is None:
                words = f"previous response with id {parent!r:.80} not found"
                code, name = "previous_response_not_found", "previous_response_id"
                self._refuse(request, lane, error_event(words, code=code, status=400, param=name))
                return
            history = found
        try:
            script = peer.book.script_for(request, body["model"])
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            peer.book.fault(f"the script for {request.path} failed: {error!r}")
            self._refuse(request, lane, error_event(f"the script failed: {error!r}", type="server_error", status=500))
            return
        if script.status >= HTTPStatus.BAD_REQUEST and isinstance(parent, str):
            self._known.pop(parent, None)  # as the real server does
        if body.get("generate") is False:  # a warm-up: its delays and its errors, without an answer
            script = replace(script, tokens=(), reasoning=(), tool_calls=())
        given = frames(script)
        if given is not None:
            await play(peer, request, script, given, as_it_is)
        elif script.status >= HTTPStatus.BAD_REQUEST:
            await play(peer, request, script, self._error(script, turn), as_it_is)
        else:
            items = history + _items(body.get("input"))
            steps = response_events(
                script, {**body, "input": items}, shows_queue=self._rules.shows_queue, timing=_timing(script, turn)
            )
            shown = self._rules.shows_queue and script.queue_s > 0
            event = partial(self._event, turn, items)
            await play(peer, request, script, steps, event, queue_shown=shown, truncates=True)

    def _event(self, turn: _Turn, items: list[Any], event: dict[str, Any]) -> bytes:
        """An event's bytes; a terminal event is the moment in which its response becomes one to go on from."""
        if event["type"] in {"response.completed", "response.incomplete"}:
            response = event["response"]
            self._known[response["id"]] = [*items, *response["output"]]
            if turn.body.get("store") is True:
                self._stored[response["id"]] = self._known[response["id"]]
        if turn.lane is not None:
            event["stream_id"] = turn.lane
        return _encode(event)

    def _error(self, script: Script, turn: _Turn) -> list[Frames]:
        kind, code = _ERRORS.get(script.status, ("server_error" if script.status >= 500 else None, None))
        headers = dict(script.headers)
        dialect = DIALECTS[script.server_timing] if script.server_timing is not None else None
        if dialect is not None and dialect.on_errors and dialect.headers is not None:
            headers = {**dialect.headers(turn.request.times), **headers}
        event = error_event(
            f"status {script.status}, as scripted",
            code=code,
            type=kind or "invalid_request_error",
            status=script.status,
            headers=headers,
        )
        if turn.lane is not None:
            event["stream_id"] = turn.lane
        return [Frames(script.headers_s + script.prefill_s, False, False, True, (_encode(event),))]

    # --- answers without a script -----------------------------------------------------------------------------------

    def _refuse(self, request: Request, lane: object, event: dict[str, Any]) -> None:
        if isinstance(lane, str):
            event["stream_id"] = lane
        self._peer.ended(request)
        self._say(event)

    def _say(self, event: dict[str, Any]) -> None:
        self._peer.push([_encode(event)])


def _items(given: Any) -> list[Any]:
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "role": "user", "content": content}]
    return list(given) if isinstance(given, list) else []


def _timing(script: Script, turn: _Turn) -> Any:
    """What the server says of its own time, for the response object of the terminal event."""
    dialect = DIALECTS[script.server_timing] if script.server_timing is not None else None
    if dialect is None or (dialect.asked_by is not None and not turn.body.get(dialect.asked_by)):
        return None
    fields = dialect.fields or dialect.event_fields
    return None if fields is None else lambda: fields(turn.request.times)
