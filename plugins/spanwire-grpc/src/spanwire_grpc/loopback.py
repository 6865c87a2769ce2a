"""gRPC for the loopback server: a server of grpc.aio that speaks all dialects of this plugin, as scripted.

What scripts say, on this wire:

* ``headers`` are initial metadata; one named ``trailer-NAME`` is sent as ``NAME`` after the answer instead;
* a header ``grpc-status`` (with ``grpc-message``) ends the answer with this status, after its pieces;
* ``status`` from 400 is an error object in ``openai-json``, where the call itself ends well, and the status that comes
  nearest in the other dialects;
* a session's message (method :data:`ECHO`) is a request, and comes back, or ``writes`` do;
* ``writes``, or ``body``, are the JSON chunks of ``openai-json``.

``Request.body`` is what was asked, as OpenAI's JSON has it, in every dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl as tls
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc

from spanwire.testing.loopback import Book, Request
from spanwire.testing.script import Script

from . import loopback_json as js
from . import tensors
from .loopback_hop import Hop
from .loops import bind_loop
from .metadata import QUERY, incoming
from .oip import SERVICE
from .stubs import oip, vllm
from .stubs import openai_json as openai

__all__ = ["ECHO", "PART", "GRPCPart"]

#: The method for sessions of no schema.
ECHO = "/spanwire.testing.Raw/Echo"

#: Before a connection is cut after some pieces, in seconds: the library drops what it has received and not handed out when
#: its connection breaks, so that what a client was sent and what it can know would differ from run to run.
_BEFORE_A_CUT_S = 0.05
_TRAILER = "trailer-"
#: Statuses of HTTP as gRPC has them. Source: google.rpc.Code, and the other way round grpc ``doc/http-grpc-status-mapping.md``.
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
#: What the library raises there; it exports neither.
_GONE = frozenset({"ExecuteBatchError", "InternalError"})
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class Turn:
    """One call: its request, its script, and what may still become of it."""

    def __init__(self, book: Book, hop: Hop, context: Any, method: str) -> None:
        self.book = book
        self.context = context
        self.loop = asyncio.get_running_loop()
        self._method = method
        self._pipe = hop.pipe_of(context.peer())
        self.request: Request = None  # type: ignore[assignment] # made in the first step of every call
        self.script = Script()
        self.report = js.Report(self.script, Request(method="", path="", query="", headers={}, raw=b"", connection=0))
        self._over = False
        self._begun = False

    def arrived(self, raw: bytes, model: str | None) -> None:
        """The request is here, or the next one of the same call; finds its script."""
        self._over = False
        headers = incoming(self.context.invocation_metadata())
        self.request = Request(
            method="POST",
            path=self._method,
            query=headers.get(QUERY, ""),
            headers=headers,
            raw=raw,
            connection=self._pipe.number if self._pipe is not None else 0,
        )
        self.book.arrived(self.request)
        self.script = self.book.script_for(self.request, model)
        self.report = js.Report(self.script, self.request)

    async def begin(self, *, streamed: bool) -> None:
        """The wait before the answer, and its initial metadata."""
        script = self.script
        if script.drop_after == "request":
            await self.cut()
        if script.hang_after == "request":
            await self.loop.create_future()
        await asyncio.sleep(script.queue_s)
        self.request.queued_ns = time.perf_counter_ns()
        if not streamed:
            await asyncio.sleep(script.headers_s + script.prefill_s)
            self.request.prefilled_ns = time.perf_counter_ns()
            await asyncio.sleep(script.decode_s)
            self.request.decoded_ns = time.perf_counter_ns()
            await asyncio.sleep(script.end_s)
        if self._begun:
            self.book.wrote(self.request, headers=True)
            return
        self._begun = True
        plain = {name.lower(): value for name, value in script.headers.items()}
        first = {**self.report.headers(streamed=streamed)}
        first |= {n: v for n, v in plain.items() if not n.startswith((_TRAILER, "grpc-"))}
        self.book.wrote(self.request, headers=True)
        await self.context.send_initial_metadata(tuple(first.items()))
        last = {n[len(_TRAILER) :]: v for n, v in plain.items() if n.startswith(_TRAILER)}
        self.context.set_trailing_metadata(tuple(last.items()))

    async def play(self, events: Iterable[js.Event], frame: Callable[[bytes], bytes], last: bytes | None) -> None:
        """A stream. ``last``: the terminal message, where there is one."""
        script, request = self.script, self.request
        stops = {script.drop_after, script.hang_after}
        played = 0
        due = self.loop.time()
        for event in events:
            if played in stops:
                await self._stop()
            now = self.loop.time()
            due = (due if event.paced else now) + event.wait_s
            if event.wait_s and due > now:
                await asyncio.sleep(due - now)
            if event.content:
                self.book.wrote(request, content=True)
                if request.prefilled_ns is None:
                    request.prefilled_ns = request.content_ns
                request.decoded_ns = time.perf_counter_ns()
            await self.context.write(frame(event.data))
            played += 1
        if played in stops or script.drop_after is not None or script.hang_after is not None:
            await self._stop()
        await self.refuse_if_told()
        if last is None:
            await asyncio.sleep(script.end_s)
            self.ended()
            return
        if not script.end_s:
            self.ended()
        await self.context.write(last)
        if script.end_s:
            await asyncio.sleep(script.end_s)
            self.ended()

    async def whole(self, make: Callable[[], bytes]) -> bytes:
        """One message, made when its time has come."""
        script = self.script
        await self.refuse_if_told()
        if script.drop_after == 0:
            await self.cut()
        if script.hang_after == 0:
            await self.loop.create_future()
        self.book.wrote(self.request, content=True)
        made = make()
        if script.drop_after is not None:
            await self.cut()
        self.ended()
        return made

    async def refuse_if_told(self) -> None:
        """The status of a script that names one."""
        plain = {name.lower(): value for name, value in self.script.headers.items()}
        code = _BY_NUMBER.get(int(plain.get("grpc-status", "0")), grpc.StatusCode.UNKNOWN)
        if code is not grpc.StatusCode.OK:
            await self.refuse(code, plain.get("grpc-message", ""))

    async def refuse_status(self) -> None:
        """The nearest to an HTTP status, for dialects whose errors are gRPC's."""
        status = self.script.status
        if status >= 400:
            await self.refuse(_CODES.get(status, grpc.StatusCode.UNKNOWN), f"the script says {status}", ended=True)

    async def refuse(self, code: Any, message: str, *, ended: bool = True) -> NoReturn:
        """End with a status."""
        if ended:
            self.ended()
        await self.context.abort(code, message, self.context.trailing_metadata() or ())
        raise AssertionError("abort() has come back")

    def ended(self) -> None:
        """The whole answer was written."""
        self._over = True
        self.book.ended(self.request)

    def left(self) -> None:
        """The client has gone, if it is not over anyway."""
        if not self._over and self.request is not None:
            self._over = True
            self.book.left(self.request)

    async def _stop(self) -> None:
        if self.script.hang_after is not None:
            await self.loop.create_future()
        await asyncio.sleep(_BEFORE_A_CUT_S)
        await self.cut()

    async def cut(self) -> None:
        """Cut the connection that the call came on."""
        self._over = True
        self.book.dropped(self.request)
        if self._pipe is not None:
            self._pipe.cut(reset=self.script.drop_mode == "reset")
        await self.loop.create_future()  # until the library has noticed


#: What a method does: with its requests, and a Turn.
Answer = Callable[[Turn, AsyncIterator[bytes]], Awaitable[bytes | None]]


class Service(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """Methods by their full names."""

    def __init__(self, book: Book, hop: Hop) -> None:
        self._book = book
        self._hop = hop
        self._methods: dict[str, Any] = {}

    def add(self, method: str, shape: str, answer: Answer) -> None:
        """``shape``: ``unary_unary``, ``unary_stream`` or ``stream_stream``."""

        async def handle(request: Any, context: Any) -> bytes | None:
            turn = Turn(self._book, self._hop, context, method)
            requests = request if shape == "stream_stream" else _one(request)
            try:
                return await answer(turn, requests)
            except asyncio.CancelledError:
                turn.left()
                raise
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                if type(error).__name__ in _GONE or context.done():  # the client has left while something was written
                    turn.left()
                    return None
                self._book.fault(f"the loopback server failed in {method}: {error!r}")
                raise

        self._methods[method] = getattr(grpc, f"{shape}_rpc_method_handler")(handle)

    def service(self, details: Any) -> Any:
        return self._methods.get(details.method)


async def _one(request: bytes) -> AsyncIterator[bytes]:
    yield request


# --- openai-json --------------------------------------------------------------------------------------------------------


def _chunk(data: bytes) -> bytes:
    made: bytes = openai.OpenAIStreamChunk(json_chunk=data).SerializeToString()
    return made


_FINISHED: bytes = openai.OpenAIStreamChunk(finished=True).SerializeToString()


async def _openai_request(turn: Turn, requests: AsyncIterator[bytes]) -> Any:
    message = openai.OpenAIRequest.FromString(await anext(requests))
    raw: bytes = message.json_body
    try:
        body = json.loads(raw)
    except ValueError:
        body = {}
    model = body.get("model") if isinstance(body, dict) else None
    turn.arrived(raw, model)
    return body


async def chat_complete(turn: Turn, requests: AsyncIterator[bytes]) -> None:
    """``ChatComplete``: a stream in any case."""
    body = await _openai_request(turn, requests)
    script = turn.script
    streamed = bool(body.get("stream"))
    wrong = None if isinstance(body.get("messages"), list) and body["messages"] else "messages must be a list"
    failed = script.status >= 400
    await turn.begin(streamed=streamed and not failed)
    events: Iterable[js.Event]
    given: Sequence[bytes] | None = script.writes if script.writes is not None else None
    if script.body is not None:
        given = [script.body]
    if wrong is not None:
        events = [js.Event(0, False, False, js.error(400, wrong))]
    elif given is not None:
        events = [js.Event(script.write_gap_s, True, True, data) for data in given]
    elif failed:
        events = [js.Event(0, False, False, js.error(script.status, f"the script says {script.status}"))]
    elif "grpc-status" in script.headers and not (streamed and script.pieces):
        events = []
    elif streamed:
        events = js.chunks(script, body, turn.report)
    else:
        events = _made(lambda: js.whole(script, body, turn.report))
    await turn.play(events, _chunk, _FINISHED if script.done else None)


def _made(make: Callable[[], bytes]) -> Iterable[js.Event]:
    yield js.Event(0, False, True, make())


async def openai_embed(turn: Turn, requests: AsyncIterator[bytes]) -> bytes:
    """``OpenAIEmbed``: a status of its own, in an answer that is OK."""
    body = await _openai_request(turn, requests)
    script = turn.script
    await turn.begin(streamed=False)

    def make() -> bytes:
        status, raw = 200, script.body
        if script.status >= 400:
            status, raw = script.status, raw or js.error(script.status, f"the script says {script.status}")
        raw = raw if raw is not None else js.embeddings(script, body)
        made: bytes = openai.OpenAIResponse(json_body=raw, status_code=status).SerializeToString()
        return made

    return await turn.whole(make)


# --- sessions -------------------------------------------------------------------------------------------------------------


async def echo(turn: Turn, requests: AsyncIterator[bytes]) -> None:
    """Messages of nobody's schema come back, one after the other; each is a request of the book. Of its script count the
    times before the first piece, ``writes`` (instead of the echo), ``headers``, and what ends connections and calls."""
    async for message in requests:
        turn.arrived(message, None)
        script = turn.script
        await turn.begin(streamed=True)
        given = [message] if script.writes is None else script.writes
        wait_s = script.headers_s + script.prefill_s
        events = (js.Event(script.write_gap_s if n else wait_s, bool(n), True, data) for n, data in enumerate(given))
        await turn.play(events, _as_it_is, None)


# --- text: the other two dialects ---------------------------------------------------------------------------------------


class Text(NamedTuple):
    """What is sent of a script where only text can be.

    Attributes:
        wait_s, paced: as in :class:`~spanwire_grpc.loopback_json.Event`.
        last: nothing comes after it.
        prompt_tokens, tokens: counted so far.
    """

    wait_s: float
    paced: bool
    text: str
    finish: str | None
    last: bool
    prompt_tokens: int | None
    tokens: int


def _texts(script: Script, prompt: str) -> Iterator[Text]:
    usage = script.usage_for(js.words(prompt), asked=True)
    prompt_tokens = None if usage is None else usage.input_tokens
    made = 0 if usage is None else usage.output_tokens or 0
    wait_s, paced = script.headers_s + script.prefill_s, False
    for number, token in enumerate(script.tokens):
        yield Text(wait_s, paced, token, None, False, prompt_tokens, min(number + 1, made))
        wait_s, paced = script.gap_s, True
    if script.finish is not None or script.done:
        yield Text(0.0 if paced else wait_s, paced, "", script.finish, True, prompt_tokens, made)


def _counted(pieces: Iterable[Text]) -> Iterator[tuple[Text, int]]:
    """Each with the tokens that are new in it: those of the last one make the sum right, whatever the script says."""
    before = 0
    for piece in pieces:
        yield piece, max(piece.tokens - before, 0)
        before = max(piece.tokens, before)


def _joined(pieces: Sequence[Text]) -> list[Text]:
    """One answer, and the sign that it was the last."""
    text = "".join(piece.text for piece in pieces)
    return [piece._replace(wait_s=0.0, paced=False, text=t) for piece, t in ((pieces[0], text), (pieces[-1], ""))][
        len(pieces) == 1 :
    ]


def _asked(turn: Turn, model: str, prompt: str, more: dict[str, Any]) -> None:
    """As if it had been asked in OpenAI's JSON."""
    body = {"model": model, "prompt": prompt, "messages": [{"role": "user", "content": prompt}], **more}
    turn.arrived(json.dumps(body).encode(), model)


async def vllm_generate(turn: Turn, requests: AsyncIterator[bytes]) -> bytes:
    """``Generate``."""
    request = vllm.GenerateRequest.FromString(await anext(requests))
    _asked(turn, request.model, request.text, _fields(request))
    await turn.begin(streamed=False)
    await turn.refuse_status()

    def make() -> bytes:
        pieces = list(_texts(turn.script, request.text))
        return _vllm_message(pieces[-1], "".join(piece.text for piece in pieces), first=True)

    return await turn.whole(make)


async def vllm_stream(turn: Turn, requests: AsyncIterator[bytes]) -> None:
    """``GenerateStream``."""
    request = vllm.GenerateRequest.FromString(await anext(requests))
    _asked(turn, request.model, request.text, _fields(request))
    await turn.begin(streamed=True)
    await turn.refuse_status()
    texts = _texts(turn.script, request.text)
    events = (
        js.Event(t.wait_s, t.paced, bool(t.text), _vllm_message(t, t.text, first=not number))
        for number, t in enumerate(texts)
    )
    await turn.play(events, _as_it_is, None)


def _vllm_message(piece: Text, text: str, *, first: bool) -> bytes:
    message = vllm.GenerateResponse()
    if first and piece.prompt_tokens is not None:
        message.prompt_info.num_prompt_tokens = piece.prompt_tokens
    output = message.outputs.add(text=text, num_tokens=1)
    if piece.finish is not None:
        output.finish_info.finish_reason = {"length": 1, "stop": 2}.get(piece.finish, 3)
        output.finish_info.num_output_tokens = piece.tokens
    made: bytes = message.SerializeToString()
    return made


def _fields(message: Any) -> dict[str, Any]:
    """The parameters of a request, flat, as they were sent."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name in {"sampling", "stopping"}:
            found.update(_fields(value))
        elif field.name not in {"model", "text", "request_id"}:
            found[field.name] = list(value) if field.name.startswith("stop_") else value
    return found


def _as_it_is(data: bytes) -> bytes:
    return data


class Inference:
    """The Open Inference Protocol, as one of its servers speaks it."""

    def __init__(self, server: str, template: str | None) -> None:
        self._server = server
        self._template = template

    async def server_metadata(self, turn: Turn, _requests: AsyncIterator[bytes]) -> bytes:
        """Dynamo does not know it."""
        if self._server == "dynamo":
            await turn.context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        made: bytes = oip.ServerMetadataResponse(name=self._server, version="0").SerializeToString()
        return made

    async def model_metadata(self, turn: Turn, requests: AsyncIterator[bytes]) -> bytes:
        """Triton lists a model's inputs."""
        request = oip.ModelMetadataRequest.FromString(await anext(requests))
        if request.name == "missing":
            await turn.context.abort(grpc.StatusCode.NOT_FOUND, f"Model {request.name} not found")
        found = oip.ModelMetadataResponse(name=request.name, platform="dynamo" if self._server == "dynamo" else "")
        names = {
            "triton": ("text_input", "stream", "sampling_parameters", "return_finish_reason"),
            "dynamo": ("text_input", "streaming"),
        }
        for name in names.get(self._server, ()):
            found.inputs.add(name=name, datatype="BYTES", shape=[1])
        if self._template is not None:
            found.parameters["chat_template"].string_param = self._template
        made: bytes = found.SerializeToString()
        return made

    async def infer(self, turn: Turn, requests: AsyncIterator[bytes]) -> bytes:
        """``ModelInfer``: chat, or vectors for a model whose name begins with ``embed``."""
        request = oip.ModelInferRequest.FromString(await anext(requests))
        if self._server == "triton":
            await turn.context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        texts = self._arrived(turn, request)
        await turn.begin(streamed=False)
        await turn.refuse_status()

        def make() -> bytes:
            if request.model_name.startswith("embed"):
                return self._vectors(request, texts, turn.script)
            pieces = list(_texts(turn.script, texts[0]))
            return self._response(request, "".join(piece.text for piece in pieces), pieces[-1]).SerializeToString()  # type: ignore[no-any-return]

        return await turn.whole(make)

    async def stream(self, turn: Turn, requests: AsyncIterator[bytes]) -> None:
        """``ModelStreamInfer``: one request after the other, whose answers end as those of this server do."""
        first: str | None = None
        async for raw in requests:  # it is open until the client has done with it
            request = oip.ModelInferRequest.FromString(raw)
            first = request.id if first is None else first
            if self._server == "mlserver":  # whose answers have this one's, all of them
                request.id = first
            await self._answer(turn, request)
            if turn.script.finish is None and not turn.script.done:  # truncated
                return

    async def _answer(self, turn: Turn, request: Any) -> None:
        texts = self._arrived(turn, request)
        if self._server == "kserve":
            await turn.context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        body = turn.request.body
        streamed = body.get("stream", body.get("streaming", True))
        await turn.begin(streamed=streamed)
        if turn.script.status >= 400 and self._server in {"triton", "dynamo"}:
            wrapped = oip.ModelStreamInferResponse(error_message=f"the script says {turn.script.status}")
            turn.ended()
            await turn.context.write(wrapped.SerializeToString())
            return
        await turn.refuse_status()
        pieces: Iterable[Text] = _texts(turn.script, texts[0])
        if not streamed:
            pieces = _joined(list(pieces))
        events = (
            js.Event(t.wait_s, t.paced, bool(t.text), self._piece(request, t, new)) for t, new in _counted(pieces)
        )
        await turn.play(events, _as_it_is, None)

    def _arrived(self, turn: Turn, request: Any) -> list[str]:
        inputs = tensors.outputs(_AsResponse(request))
        named = inputs.get("text_input") or next(iter(inputs.values()))
        texts = tensors.texts(named)
        more = {name: _value(parameter) for name, parameter in request.parameters.items()}
        more |= {
            name: tensors.texts(given)[0] if given.datatype == "BYTES" else given.values[0]
            for name, given in inputs.items()
            if given is not named
        }
        _asked(turn, request.model_name, texts[0], more)
        return texts

    def _piece(self, request: Any, piece: Text, new: int) -> bytes:
        response = self._response(request, piece.text, piece, new)
        made: bytes
        if self._server == "mlserver":
            made = response.SerializeToString()
            return made
        if self._server == "triton":
            response.parameters["triton_final_response"].bool_param = piece.last
        made = oip.ModelStreamInferResponse(infer_response=response).SerializeToString()
        return made

    def _response(self, request: Any, text: str, piece: Text, new: int = 0) -> Any:
        response = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
        outputs: list[tuple[str, str, list[Any]]] = [("text_output", "BYTES", [text.encode()])]
        if self._server in {"triton", "dynamo"}:
            outputs.append(("finish_reason", "BYTES", [(piece.finish or "").encode()]))
        if self._server == "triton" and piece.prompt_tokens is not None:
            outputs.append(("num_input_tokens", "UINT32", [piece.prompt_tokens]))
            outputs.append(("num_output_tokens", "UINT32", [new]))
        for name, datatype, values in outputs:
            shape = [1, 1] if self._server == "mlserver" else [1]
            tensor = response.outputs.add(name=name, datatype=datatype, shape=shape)
            if self._server == "triton":  # raw, all of them
                raw = b"".join(
                    len(v).to_bytes(4, "little") + v if datatype == "BYTES" else struct.pack("<I", v) for v in values
                )
                response.raw_output_contents.append(raw)
            else:
                tensor.contents.bytes_contents.extend(values)
        return response

    @staticmethod
    def _vectors(request: Any, texts: Sequence[str], script: Script) -> bytes:
        response = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
        numbers = [number for text in texts for number in js.vector(text, script.dimensions)]
        shape = [len(texts), script.dimensions]
        tensor = response.outputs.add(name="embedding", datatype="FP32", shape=shape)
        tensor.contents.fp32_contents.extend(numbers)
        made: bytes = response.SerializeToString()
        return made


class _AsResponse:
    """A request's inputs, as :func:`spanwire_grpc.tensors.outputs` reads an answer's."""

    def __init__(self, request: Any) -> None:
        self.outputs = request.inputs
        self.raw_output_contents = request.raw_input_contents


def _value(parameter: Any) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice") or "bool_param")


# --- the part -----------------------------------------------------------------------------------------------------------


class _Listener:
    """See :class:`spanwire.testing.loopback.Listener`."""

    def __init__(self, server: Any, hop: Hop) -> None:
        self._server = server
        self._hop = hop
        self.address = hop.address

    def disconnect(self, *, reset: bool) -> None:
        self._hop.disconnect(reset=reset)

    async def aclose(self) -> None:
        await self._hop.aclose()
        await self._server.stop(None)
        with contextlib.suppress(TimeoutError):
            await self._server.wait_for_termination(1.0)


def _hear_no_others(loop: asyncio.AbstractEventLoop) -> None:
    """The library has one queue of events for all loops of a process, and any loop that takes one of a loop which was
    closed hears that this cannot be done: no fault of this server, nor of its client."""
    before = loop.get_exception_handler()

    def handler(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "PollerCompletionQueue" in context["message"] and isinstance(context.get("exception"), RuntimeError):
            return
        if before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handler)


class GRPCPart:
    """See :class:`spanwire.testing.loopback.LoopbackPart`.

    Args:
        oip: which server of the Open Inference Protocol to be: ``triton``, ``mlserver``, ``kserve`` or ``dynamo``.
        chat_template: in the metadata of that server's models.
        max_request_bytes: larger requests are refused; None for no limit.
        options: further ones of the library's server, such as ``("grpc.max_connection_age_ms", 1000)``.
    """

    name = "grpc"
    alpn = ("h2",)

    def __init__(
        self,
        *,
        oip: str = "triton",
        chat_template: str | None = None,
        max_request_bytes: int | None = None,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._options = tuple(options)
        self._oip = oip
        self._chat_template = chat_template
        self._max_request_bytes = max_request_bytes

    async def start(
        self, book: Book, *, host: str, port: int, uds: str | None, ssl: tls.SSLContext | None
    ) -> _Listener:
        """Listen."""
        _hear_no_others(asyncio.get_running_loop())
        bind_loop()
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._max_request_bytes or -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                *self._options,
            ]
        )
        inner = server.add_insecure_port("127.0.0.1:0")
        hop = Hop(book, inner)
        service = Service(book, hop)
        service.add("/sglang.runtime.v1.SglangService/ChatComplete", "unary_stream", chat_complete)
        service.add("/sglang.runtime.v1.SglangService/OpenAIEmbed", "unary_unary", openai_embed)
        service.add("/vllm.Inference/Generate", "unary_unary", vllm_generate)
        service.add("/vllm.Inference/GenerateStream", "unary_stream", vllm_stream)
        service.add(ECHO, "stream_stream", echo)
        inference = Inference(self._oip, self._chat_template)
        service.add(SERVICE + "ServerMetadata", "unary_unary", inference.server_metadata)
        service.add(SERVICE + "ModelMetadata", "unary_unary", inference.model_metadata)
        service.add(SERVICE + "ModelInfer", "unary_unary", inference.infer)
        service.add(SERVICE + "ModelStreamInfer", "stream_stream", inference.stream)
        server.add_generic_rpc_handlers((service,))
        await server.start()
        try:
            await hop.start(host=host, port=port, uds=uds, ssl=ssl)
        except BaseException:
            await server.stop(None)
            raise
        return _Listener(server, hop)

    @staticmethod
    def url(host: str, port: int, *, secure: bool) -> str:
        return f"{'grpcs' if secure else 'grpc'}://{host}{f':{port}' if port else ''}"


PART = GRPCPart()
