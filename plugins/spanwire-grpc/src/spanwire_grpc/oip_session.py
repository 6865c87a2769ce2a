"""``dialect="oip-stream"``: many requests and their answers on one ``ModelStreamInfer``, as JSON has them.

Which answer is whose is told by ``id``: a request without one gets one. From a request to the end of its answer is a turn.
The end is told by ``triton_final_response`` (Triton, which is asked to say so), by the output ``finish_reason`` (Dynamo), and
not at all by MLServer, which moreover gives all its answers the ``id`` of the first request (measured, 1.7.1): there a session
is one turn, from its first request to its last message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from spanwire.calls import SessionEvent, Usage
from spanwire.endpoint import Endpoint
from spanwire.errors import CallTimeout, ConfigurationError, ServerError, SpanwireError, Truncated
from spanwire.transport import Turn

from . import tensors
from .codec import Ask
from .oip import ABOUT, SERVERS, SERVICE, parse, server_of
from .oip_json import request_of, response_data
from .session import OPTIONS as SESSION_OPTIONS
from .session import Outgoing
from .stubs import oip

__all__ = ["OPTIONS", "OpenInferenceStream"]

#: As of the dialect ``oip``.
OPTIONS = SESSION_OPTIONS | {"oip_server", "text_output"}
_FINAL = "triton_final_response"
_SAY_FINAL = "triton_enable_empty_final_response"


class OpenInferenceStream:
    """``ModelStreamInfer``."""

    learns_by = ("oip_server",)

    async def learn(self, ask: Ask, endpoint: Endpoint) -> str:
        """Which server it is: one of them answers the same method with other messages."""
        given: str | None = endpoint.options.get("oip_server")
        return given if given is not None else await server_of(ask)

    def method(self, endpoint: Endpoint) -> str:
        server = endpoint.options.get("oip_server")
        if server is not None and server not in SERVERS:
            raise ConfigurationError(
                f"Endpoint.options: oip_server must be one of {', '.join(SERVERS)}, not {server!r:.40}",
                endpoint=endpoint.address,
            )
        return SERVICE + "ModelStreamInfer"

    def credentials(self, api_key: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {api_key}"}

    def schema(self, endpoint: Endpoint, model: str, on_turn: Callable[[Turn], None], rtt_ns: int | None) -> _Schema:
        return _Schema(endpoint, model, on_turn, rtt_ns)


class _Asked:
    """A request that is being answered."""

    __slots__ = ("input_tokens", "output_tokens", "turn")

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None


class _Schema:
    def __init__(self, endpoint: Endpoint, model: str, on_turn: Callable[[Turn], None], rtt_ns: int | None) -> None:
        self._address = endpoint.address
        self._text_output = endpoint.options.get("text_output")
        self._model = model
        self._on_turn = on_turn
        self._rtt_ns = rtt_ns
        self._server = "triton"
        self._ids = count(1)
        self._asked: dict[str, list[_Asked]] = {}  # whoever uses an id twice at once is answered in order

    def learned(self, facts: Any) -> None:
        self._server = facts

    # --- out --------------------------------------------------------------------------------------------------------

    def encode(self, message: Mapping[str, Any] | str | bytes) -> Outgoing:
        """A mapping, or the same as JSON; bytes are a ``ModelInferRequest`` already."""
        try:
            request = self._request(message)
        except ConfigurationError as error:
            error.endpoint = error.endpoint or self._address
            raise
        request.id = request.id or f"spanwire-{next(self._ids)}"
        if _SAY_FINAL not in request.parameters:
            request.parameters[_SAY_FINAL].bool_param = True
        return Outgoing(request.SerializeToString(), (request.id, request.model_name))

    def _request(self, message: Mapping[str, Any] | str | bytes) -> Any:
        if isinstance(message, bytes | bytearray | memoryview):
            try:
                request = oip.ModelInferRequest.FromString(bytes(message))
            except Exception as error:
                raise ConfigurationError("these bytes are no ModelInferRequest") from error
            request.model_name = request.model_name or self._model
            return request
        if isinstance(message, str):
            try:
                message = msgspec.json.decode(message)
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
                raise ConfigurationError(f"the message is no JSON: {error}") from error
        if not isinstance(message, Mapping):
            raise ConfigurationError("a request is a mapping with model_name and inputs, or JSON text, or bytes")
        return request_of(message, model=self._model)

    def sent(self, outgoing: Outgoing, at_ns: int) -> None:
        turn = Turn(at_ns)
        turn.marks.sent_ns = at_ns
        turn.marks.rtt_ns = self._rtt_ns
        turn.head.id, turn.head.model = outgoing.about
        turn.head.streamed = True
        self._asked.setdefault(outgoing.about[0], []).append(_Asked(turn))

    # --- in ---------------------------------------------------------------------------------------------------------

    def event(self, data: bytes, arrival_ns: int) -> SessionEvent:
        if self._server == "mlserver":
            response = parse(oip.ModelInferResponse, data)
        else:
            wrapped = parse(oip.ModelStreamInferResponse, data)
            response = wrapped.infer_response
            if wrapped.error_message:
                return self._failed(wrapped.error_message, response.id, arrival_ns)
        outputs = tensors.outputs(response)
        output = self._text_of(outputs)
        text = "" if output is None else "".join(tensors.texts(output))
        asked = self._asked.get(response.id, (None,))[0]
        if asked is not None:
            content = bool(text) or any(o.values for o in outputs.values() if o is not output and o.name not in ABOUT)
            self._heard(asked, outputs, arrival_ns, content=content)
            if self._is_last(response, asked.turn):
                self._over(response.id, asked, arrival_ns)
        return SessionEvent("response", text, raw=msgspec.json.encode(response_data(response, outputs)))

    def _failed(self, words: str, id_: str, at_ns: int) -> SessionEvent:
        """Of which request, if it does not say? Of the only one."""
        open_ = list(self._asked)
        about = id_ if id_ in self._asked else open_[0] if not id_ and len(open_) == 1 else None
        if about is not None:
            asked = self._asked[about][0]
            asked.turn.marks.first_byte_ns = asked.turn.marks.first_byte_ns or at_ns
            asked.turn.outcome = "error"
            asked.turn.error = ServerError(words, endpoint=self._address, retryable=False)
            self._over(about, asked, at_ns)
        return SessionEvent("error", raw=msgspec.json.encode({"error": words, "id": id_ or about or ""}))

    def _text_of(self, outputs: Mapping[str, tensors.Output]) -> tensors.Output | None:
        if self._text_output is not None:
            found = outputs.get(self._text_output)
            return found if found is not None and found.datatype in ("BYTES", "STRING") else None
        texts = [o for o in outputs.values() if o.datatype in ("BYTES", "STRING") and o.name not in ABOUT]
        return next((o for o in texts if o.name == "text_output"), texts[0] if len(texts) == 1 else None)

    def _heard(self, asked: _Asked, outputs: Mapping[str, tensors.Output], at_ns: int, *, content: bool) -> None:
        turn, marks = asked.turn, asked.turn.marks
        if not marks.first_byte_ns:
            marks.first_byte_ns = at_ns
            if marks.rtt_ns:  # it cannot have taken longer than this whole way there and back
                marks.rtt_ns = min(marks.rtt_ns, at_ns - turn.begin_ns)
        marks.last_byte_ns = at_ns
        if content:
            if not marks.first_content_ns:
                marks.first_chunk_ns = marks.first_content_ns = at_ns
            marks.last_chunk_ns = at_ns
        reason = outputs.get("finish_reason")
        words = tensors.texts(reason) if reason is not None and reason.datatype in ("BYTES", "STRING") else []
        if words and words[0] not in ("", "None", "null"):
            turn.finish_reason = words[0]
        asked.input_tokens = tensors.whole_number(outputs.get("num_input_tokens")) or asked.input_tokens
        more = tensors.whole_number(outputs.get("num_output_tokens"))
        if more is not None:  # those of this message
            asked.output_tokens = (asked.output_tokens or 0) + more

    def _is_last(self, response: Any, turn: Turn) -> bool:
        if _FINAL in response.parameters:
            return bool(response.parameters[_FINAL].bool_param)
        return self._server == "dynamo" and turn.finish_reason is not None

    # --- turns --------------------------------------------------------------------------------------------------------

    def _over(self, id_: str, asked: _Asked, at_ns: int) -> None:
        waiting = self._asked[id_]
        waiting.remove(asked)
        if not waiting:
            del self._asked[id_]
        asked.turn.marks.last_byte_ns = asked.turn.marks.ended_ns = at_ns
        self._end(asked, at_ns)

    def _end(self, asked: _Asked, at_ns: int) -> None:
        turn = asked.turn
        known = (asked.input_tokens, asked.output_tokens)
        if known != (None, None):
            turn.head.usage = Usage(*known, None if None in known else sum(number or 0 for number in known))
        turn.end_ns = max(at_ns, turn.begin_ns)
        self._on_turn(turn)

    def ended(self, at_ns: int, error: SpanwireError | None) -> None:
        open_: Sequence[_Asked] = [asked for waiting in self._asked.values() for asked in waiting]
        self._asked = {}
        if self._server == "mlserver":  # what it answered to the others is in the first one's turn
            open_ = [asked for asked in open_ if asked.turn.marks.last_byte_ns] or open_[:1]
        for asked in open_:
            turn = asked.turn
            last_ns = turn.marks.last_byte_ns
            if self._server == "mlserver" and last_ns and (error is None or isinstance(error, Truncated)):
                turn.marks.ended_ns = last_ns  # it says no more than that of an end
                self._end(asked, last_ns)
                continue
            turn.outcome = (
                "closed_by_caller" if error is None else "timeout" if isinstance(error, CallTimeout) else "error"
            )
            turn.error = error
            self._end(asked, at_ns)
