"""What must not be shown: keys, headers, queries, and what the call is about."""

# A manager and a stream in it are two steps; an error may come anywhere while a stream is entered and read.

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator

from ...calls import Call
from ...endpoint import Endpoint, Timeouts
from ...errors import SpanwireError
from ...manager import ConnectionManager
from ..script import Script
from .abilities import needs
from .answers import hello
from .harness import Kit, Scene, read

KEY = "sk-kit-0123456789-key"
SECRETS = {
    "the key": KEY,
    "a header of the endpoint": "kit-endpoint-header",
    "a header of the call": "kit-call-header",
    "a value of the query": "kit-query-value",
    "the prompt": "kit-prompt-text",
    "the answer": "kit-answer-text",
}


class _Log(logging.Handler):
    def __init__(self, modules: tuple[str, ...]) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        self._modules = modules

    def emit(self, record: logging.LogRecord) -> None:
        # What others log for debugging is theirs: hpack shows every header there.
        if record.levelno >= logging.INFO or record.name.split(".")[0] in self._modules:
            self.lines.append(f"{record.name}: {record.getMessage()} {record.exc_text or ''}")
            if record.exc_info:
                self.lines += traceback.format_exception(*record.exc_info)


class Privacy(Kit):
    """What must not be shown."""

    @contextlib.contextmanager
    def _logged(self) -> Iterator[_Log]:
        modules = {"spanwire", *(type(factory).__module__.split(".")[0] for factory in self.plugins())}
        modules.add(getattr(self.spec().factory, "__module__", "spanwire").split(".")[0])
        handler = _Log(tuple(modules))
        root = logging.getLogger()
        before = root.level
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        try:
            yield handler
        finally:
            root.removeHandler(handler)
            root.setLevel(before)

    def _secret_call(self) -> Call:
        messages = [{"role": "user", "content": SECRETS["the prompt"]}]
        return Call.chat("m", messages, headers={"x-kit": SECRETS["a header of the call"]})

    @needs("credentials")
    def test_credentials_reach_the_server(self) -> None:
        """Proves: the key, the endpoint's headers, the call's and ``traceparent`` are sent with the call.

        If it fails: the call's own are ``attempt.headers`` (they win), the key is ``attempt.api_key``. A wire whose
        handshake sends them has them in ``key()`` too.
        """
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    endpoint = scene.endpoint(
                        api_key=KEY,
                        headers={"x-endpoint": SECRETS["a header of the endpoint"], "x-kit": "the endpoint's"},
                        query={"token": SECRETS["a value of the query"]},
                    )
                    async with manager.stream(endpoint, self._secret_call()) as stream:
                        await read(stream)

            scene.run(body)
            request = scene.server.requests[0]
            assert any(KEY in value for value in request.headers.values()), "the key was not sent"
            assert request.headers["x-endpoint"] == SECRETS["a header of the endpoint"]
            if self.can("call_headers"):
                assert request.headers["x-kit"] == SECRETS["a header of the call"]
                assert "traceparent" in request.headers
            assert SECRETS["a value of the query"] in request.query

    def test_secrets_are_shown_nowhere(self) -> None:
        """Proves: in ``repr``, logs, errors with their causes, spans and timelines, of calls that succeed, are refused, break
        and time out, there is no key, header, query value, prompt or answer.

        If it fails: the message names the place. Never put a request, a URL with its query, or an event's bytes into an
        error's text or a log line; wrap the errors of libraries that do.
        """
        answer = Script(tokens=[SECRETS["the answer"], " and more"])
        scripts = [answer]
        if self.can("status"):
            scripts += [Script(status=401), Script(status=500)]
        if self.can("drop"):
            scripts += [Script(drop_after="request"), Script(tokens=answer.tokens, drop_after=1, role_chunk=False)]
        if self.can("truncate"):
            scripts.append(Script(tokens=answer.tokens, finish_reason=None, usage=None, done=False))
        if self.can("hang"):
            scripts.append(Script(hang_after="request"))
        shown: dict[str, str] = {}
        with self._logged() as log:
            with self.scene(*scripts) as scene:
                scene.run(lambda: self._calls(scene, len(scripts), shown))
            if self.can("stop"):  # it is gone by now
                scene.run(lambda: self._calls(scene, 1, shown, "after the end"))
        shown["the log"] = "\n".join(log.lines)
        shown["a span"] = scene.spans.text()
        found = [f"{what} is in {where}" for where, text in shown.items() for what, s in SECRETS.items() if s in text]
        assert found == []

    async def _calls(self, scene: Scene, count: int, shown: dict[str, str], when: str = "") -> None:
        endpoint = self._endpoint(scene, when)
        async with scene.manager() as manager:
            for number in range(count):
                where = f"call {number + 1} {when}"
                stream = manager.stream(endpoint, self._secret_call())
                try:
                    async with stream:
                        await read(stream)
                        shown[f"the timeline of {where}"] = f"{stream.timeline} {stream.timeline.to_dict()}"
                except SpanwireError as error:
                    shown[f"the error of {where}"] = "".join(
                        [repr(error), str(error), *traceback.format_exception(error)]
                    )
                self._look_at(manager, shown, where)
                shown[f"the stream of {where}"] = repr(stream)
            shown["the endpoint"] = repr(endpoint)

    def _endpoint(self, scene: Scene, when: str) -> Endpoint:
        if not when:
            self._made: Endpoint = scene.endpoint(
                api_key=KEY,
                headers={"x-endpoint": SECRETS["a header of the endpoint"]},
                query={"token": SECRETS["a value of the query"]},
                timeouts=Timeouts(first_content_s=0.1),
            )
        return self._made

    @staticmethod
    def _look_at(manager: ConnectionManager, shown: dict[str, str], where: str) -> None:
        shown[f"the manager of {where}"] = repr(manager)
        for pool in manager.state().pools.values():
            shown[f"the pool of {where}"] = repr(pool)
            shown[f"the transport of {where}"] = repr(pool.transport)
            for member in pool.state.members:
                shown[f"a connection of {where}"] = repr(member.connection)
