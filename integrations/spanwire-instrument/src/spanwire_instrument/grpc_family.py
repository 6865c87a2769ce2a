"""grpc.aio: interceptors for a channel of yours, and the same without a line of code.

::

    grpc.aio.secure_channel(target, credentials, interceptors=grpc_aio_interceptors(target))

Only methods that are known for inference are looked at: the Open Inference Protocol, TensorFlow Serving, TGI's and its
kin, and those that ``Rules(paths={"/pkg.Service/Method": "chat"})`` names. Requests that are streamed are not consumed to
look into them. Messages pass through as they are; of an answer that is streamed it is seen when its reader gets them.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from spanwire.errors import ConfigurationError
from spanwire.manager import ConnectionManager
from spanwire.pool import _ids
from spanwire.timeline import ConnectionUse
from spanwire.witness import Witness, watching

from .patches import Patches
from .recognise import Rules
from .watched import Settings, endpoint_of

__all__ = ["METHODS", "grpc_aio_interceptors", "patch_grpc"]

_log = logging.getLogger("spanwire.instrument")
_now = time.perf_counter_ns

#: Methods of inference, with their operation. Sources: open-inference-protocol's ``grpc_predict_v2.proto``; TensorFlow
#: Serving's ``prediction_service.proto``; text-generation-inference's ``generate.proto``; ``generation.proto`` of
#: vLLM's and TGIS's adapter.
METHODS: Mapping[str, str] = {
    "/inference.GRPCInferenceService/ModelInfer": "inference",
    "/inference.GRPCInferenceService/ModelStreamInfer": "inference",
    "/tensorflow.serving.PredictionService/Predict": "inference",
    "/tensorflow.serving.PredictionService/Classify": "inference",
    "/tensorflow.serving.PredictionService/Regress": "inference",
    "/generate.v2.TextGenerationService/Generate": "text_completion",
    "/generate.v2.TextGenerationService/GenerateStream": "text_completion",
    "/fmaas.GenerationService/Generate": "text_completion",
    "/fmaas.GenerationService/GenerateStream": "text_completion",
}


class _Target(NamedTuple):
    """Where a channel leads."""

    scheme: str
    host: str
    port: int | None

    @classmethod
    def of(cls, target: str, *, secure: bool) -> _Target:
        """Names as gRPC has them: ``host:port``, ``dns:///host:port``, ``ipv4:1.2.3.4:80``, ``unix:/path``."""
        scheme = "grpcs" if secure else "grpc"
        text = target
        for prefix in ("dns:", "ipv4:", "ipv6:", "passthrough:", "xds:"):
            text = text.removeprefix(prefix)
        text = text.rpartition("/")[2].partition(",")[0]
        if target.startswith("unix") or not text:
            return cls(scheme, "localhost", None)
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or host.endswith(":"):
            host, port = text, ""
        return cls(scheme, host.strip("[]"), int(port) if port else None)


class _Call:
    """One call that is watched. Its methods never raise."""

    __slots__ = ("_marks", "_streamed", "_task", "witness")

    def __init__(self, settings: Settings, target: _Target, operation: str, request: Any, *, streamed: bool) -> None:
        manager = settings.manager
        more: dict[str, Any] = {}
        if manager is not None:
            more = {"telemetry": manager.telemetry, "registry": manager.registry}
        self.witness = Witness.begin(
            endpoint_of(*target),
            operation=operation,
            model=_model_of(request),
            streamed=streamed,
            transport="grpc",
            **more,
        )
        self._marks = self.witness.marks
        self._streamed = streamed
        self._task: asyncio.Task[None] | None = None

    def metadata(self, given: Any, grpc: ModuleType) -> Any:
        """What is sent: as given, and the trace, where there is none."""
        present = {str(key).lower() for key, _ in given or ()}
        added = self.witness.headers(present)
        return grpc.aio.Metadata(*(given or ()), *added.items()) if added else given

    def goes_out(self, channel: Any, grpc: ModuleType) -> None:
        """``channel``: None if it is not known."""
        reused = True
        if channel is not None:
            ready = grpc.ChannelConnectivity.READY
            reused = channel.get_state() is ready
            if not reused:
                self._marks.begin("connect", _now())
                self._task = asyncio.get_running_loop().create_task(
                    _connected(channel, ready, self._marks), name="spanwire grpc", context=contextvars.Context()
                )
        self._marks.use = ConnectionUse(f"c{next(_ids)}", reused, protocol="h2", engine="grpc")

    def watch(self, call: Any, grpc: ModuleType) -> None:
        """``call``: as grpc.aio has made it."""
        if self._streamed and "_response_deserializer" in vars(call):
            call._response_deserializer = self._reading(call._response_deserializer)
        call.add_done_callback(lambda done: self._done(done, grpc))

    def _reading(self, deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
        marks = self._marks

        def read(data: bytes) -> Any:
            at_ns = _now()
            if not marks.first_byte_ns:
                marks.first_byte_ns = marks.first_chunk_ns = at_ns
            if data and not marks.first_content_ns:
                marks.first_content_ns = at_ns
            marks.last_chunk_ns = marks.last_byte_ns = at_ns
            return data if deserialize is None else deserialize(data)

        return read

    def _done(self, call: Any, grpc: ModuleType) -> None:
        try:
            code = _at_once(call.code())
            marks, at_ns = self._marks, _now()
            if code is grpc.StatusCode.OK:
                marks.first_byte_ns = marks.first_byte_ns or at_ns
                marks.first_chunk_ns = marks.first_chunk_ns or at_ns
                marks.last_byte_ns = marks.ended_ns = marks.last_byte_ns or at_ns
                self.end("completed")
            elif call.cancelled() or code is grpc.StatusCode.CANCELLED:
                self.end("closed_by_caller" if self._marks.first_byte_ns else "cancelled")
            else:
                empty = grpc.aio.Metadata()
                error = grpc.aio.AioRpcError(code, empty, empty, details=_at_once(call.details()))
                self.end("timeout" if code is grpc.StatusCode.DEADLINE_EXCEEDED else "error", error)
        except Exception:  # noqa: BLE001 - see the class
            _log.warning("the end of a call cannot be seen", exc_info=True)
            self.end("completed")

    def end(self, outcome: Any, error: BaseException | None = None) -> None:
        """A second call is ignored."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self.witness.end(outcome, error)


async def _connected(channel: Any, ready: Any, marks: Any) -> None:
    """Mark when a channel is connected. gRPC tells no parts of that."""
    try:
        state = channel.get_state()
        while state is not ready:
            await channel.wait_for_state_change(state)
            state = channel.get_state()
        marks.end("connect", _now())
    except Exception:  # noqa: BLE001 - it was closed: the call says so
        _log.debug("a connect cannot be seen", exc_info=True)


def _at_once(coroutine: Any) -> Any:
    """The result of a coroutine that has nothing to wait for, None if it has."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    finally:
        coroutine.close()
    return None


def _model_of(request: Any) -> str:
    for name in ("model_name", "model_id"):
        found = getattr(request, name, None)
        if isinstance(found, str) and found:
            return found
    found = getattr(getattr(request, "model_spec", None), "name", None)
    return found if isinstance(found, str) else ""


def _operation(rules: Rules, method: str, host: str) -> str | None:
    """What the method is for, None if it is nobody's business."""
    found = METHODS.get(method)
    if found is None:
        for ending, operation in rules.paths.items():
            if method.endswith(ending):
                found = operation
                break
    return found if found is not None and rules.takes_host(host) else None


# ------------------------------------------------------------------------------------------------------------ interceptors


def grpc_aio_interceptors(
    target: str, *, rules: Rules | None = None, manager: ConnectionManager | None = None
) -> list[Any]:
    """Interceptors for one channel of ``grpc.aio``. Give them last, so that they see what is really sent.

    An interceptor does not see its channel: the time to connect is part of the wait for the first answer here, and is
    told apart by :func:`~.instrumentor.instrument`.

    Args:
        target: as given to the channel, for the spans.
        rules: hosts, and further methods in ``paths``, see :class:`Rules`.
        manager: whose telemetry, observers and tables are used; the process's default one if it is not given.

    Raises:
        ConfigurationError: grpcio is not installed, or ``target`` is no text.
    """
    try:
        import grpc
    except ImportError as error:
        raise ConfigurationError("grpc is not installed: pip install grpcio") from error
    if not isinstance(target, str) or not target:
        raise ConfigurationError(
            'grpc_aio_interceptors(target): the text given to the channel, such as "127.0.0.1:8001"'
        )
    settings = Settings(rules=rules, manager=manager)
    return _interceptors(grpc, settings, _Target.of(target, secure=False), None)


def _interceptors(grpc: ModuleType, settings: Settings, target: _Target, channel: Any) -> list[Any]:
    return [cls(settings, target, channel) for cls in _interceptor_classes(grpc)]


@lru_cache(maxsize=4)
def _interceptor_classes(grpc: ModuleType) -> tuple[type[Any], ...]:
    class Interceptor:
        streamed = False

        def __init__(self, settings: Settings, target: _Target, channel: Any) -> None:
            self._settings = settings
            self._target = target
            self._channel = channel

        async def intercept(self, proceed: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
            method = details.method.decode() if isinstance(details.method, bytes) else details.method
            watched = _begin(self._settings, self._target, method, request, streamed=self.streamed)
            if watched is None:
                return await proceed(details, request)
            sent = details
            try:
                sent = details._replace(metadata=watched.metadata(details.metadata, grpc))
                watched.goes_out(self._channel, grpc)
            except Exception:  # noqa: BLE001 - the call goes on without us
                _log.warning("a call cannot be watched", exc_info=True)
            try:
                call = await proceed(sent, request)
            except BaseException as error:
                watched.end("error" if isinstance(error, Exception) else "cancelled", error)
                raise
            return _watch(watched, call, grpc)

    class UnaryUnary(Interceptor, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc, name-defined]
        intercept_unary_unary = Interceptor.intercept

    class UnaryStream(Interceptor, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc, name-defined]
        streamed = True
        intercept_unary_stream = Interceptor.intercept

    class StreamStream(Interceptor, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[misc, name-defined]
        streamed = True
        intercept_stream_stream = Interceptor.intercept

    return UnaryUnary, UnaryStream, StreamStream


def _begin(settings: Settings, target: _Target, method: str, request: Any, *, streamed: bool) -> _Call | None:
    try:
        operation = _operation(settings.rules, method, target.host)
        if operation is None or watching.get() is not None:
            return None
        return _Call(settings, target, operation, request, streamed=streamed)
    except Exception:  # noqa: BLE001 - the call goes on without us
        _log.warning("a call cannot be watched", exc_info=True)
        return None


def _watch(watched: _Call, call: Any, grpc: ModuleType) -> Any:
    try:
        watched.watch(call, grpc)
    except Exception:  # noqa: BLE001 - as above
        _log.warning("a call cannot be watched", exc_info=True)
        watched.end("completed")
    return call


# ----------------------------------------------------------------------------------------------------- without a line of code


def patch_grpc(aio: ModuleType, patches: Patches, settings: Settings) -> None:
    """Channels that are made from now on. Only methods that look like inference get anything of ours."""
    import grpc
    from grpc.aio._channel import Channel

    targets: WeakKeyDictionary[Any, _Target] = WeakKeyDictionary()

    def made(original: Any) -> Any:
        def init(self: Any, target: str, options: Any, credentials: Any, *args: Any, **kwargs: Any) -> None:
            original(self, target, options, credentials, *args, **kwargs)
            if patches.on and isinstance(target, str):
                targets[self] = _Target.of(target, secure=credentials is not None)

        return init

    def callable_of(*, streamed: bool) -> Callable[[Any], Any]:
        def replacement(original: Any) -> Any:
            def multicallable(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
                made = original(self, method, *args, **kwargs)
                target = targets.get(self)
                if patches.on and target is not None and _operation(settings.rules, method, target.host) is not None:
                    _intercept(made, grpc, _Watching(patches, settings, target, self, method, streamed))
                return made

            return multicallable

        return replacement

    patches.replace(Channel, "__init__", made)
    patches.replace(Channel, "unary_unary", callable_of(streamed=False))
    patches.replace(Channel, "unary_stream", callable_of(streamed=True))
    patches.replace(Channel, "stream_stream", callable_of(streamed=True))


class _Watching(NamedTuple):
    """What the calls of one callable need."""

    patches: Patches
    settings: Settings
    target: _Target
    channel: Any
    method: str
    streamed: bool


def _intercept(made: Any, grpc: ModuleType, watching_it: _Watching) -> None:
    """Let one callable of a stub tell of its calls. It keeps being an instance of what it was."""
    if made._interceptors:  # then ours is the last of them: it sees what is really sent
        all_kinds = _interceptors(grpc, watching_it.settings, watching_it.target, watching_it.channel)
        made._interceptors = [*made._interceptors, *(one for one in all_kinds if _fits(one, made, grpc))]
        return
    made._spanwire = watching_it
    base: Any = type(made)
    made.__class__ = _callable_class(base, grpc)


@lru_cache(maxsize=16)
def _callable_class(base: Any, grpc: ModuleType) -> type[Any]:
    class Callable(base):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            patches, settings, target, channel, method, streamed = self._spanwire
            watched = None
            if patches.on:
                request = args[0] if args else kwargs.get("request")
                watched = _begin(settings, target, method, request, streamed=streamed)
            if watched is None:
                return super().__call__(*args, **kwargs)
            try:
                if len(args) < 3:  # else it stands among them: see the signature of a stream both ways
                    kwargs["metadata"] = watched.metadata(kwargs.get("metadata"), grpc)
                watched.goes_out(channel, grpc)
            except Exception:  # noqa: BLE001 - the call goes on without us
                _log.warning("a call cannot be watched", exc_info=True)
            try:
                call = super().__call__(*args, **kwargs)
            except BaseException as error:
                watched.end("error", error)
                raise
            return _watch(watched, call, grpc)

    Callable.__name__, Callable.__qualname__, Callable.__module__ = base.__name__, base.__qualname__, base.__module__
    return Callable


def _fits(interceptor: Any, made: Any, grpc: ModuleType) -> bool:
    for kind in ("UnaryUnary", "UnaryStream", "StreamStream"):
        if isinstance(made, getattr(grpc.aio, f"{kind}MultiCallable")):
            return isinstance(interceptor, getattr(grpc.aio, f"{kind}ClientInterceptor"))
    return False
