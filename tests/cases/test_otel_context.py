"""C31: whose child a call's span is, whatever thread, task or callback it runs on. The call's context is that of its start.

(b) and (d), batch and graphs, are the adapter's: its tests have them.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import spanwire
from spanwire.testing import LoopbackServer, Script
from tests.cases.play import nothing_left
from tests.cases.spans import Spans, attributes, parent_id, span_id
from tests.support import AT_ONCE, NEVER, chat, hello, read, run, serving, wait_for

Facade = spanwire.SyncConnectionManager


def complete(manager: Facade, endpoint: spanwire.Endpoint) -> None:
    assert manager.complete(endpoint, chat()).text


def stream(manager: Facade, endpoint: spanwire.Endpoint) -> None:
    with manager.stream(endpoint, chat()) as found:
        assert "".join(chunk.text for chunk in found)


sync_ways = pytest.mark.parametrize("call", [complete, stream])


@sync_ways
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("how", ["pool", "thread", "executor", "to_thread"])
def test_a_worker_thread_has_the_parent_that_its_caller_copies(
    how: str, copied: bool, call: Callable[..., None]
) -> None:
    spans = Spans()
    with serving(hello()) as server, nothing_left(server), Facade(telemetry=spans.telemetry()) as manager:
        work: Callable[[], None] = lambda: call(manager, server.endpoint())  # noqa: E731

        async def in_loop() -> None:
            with spans.tracer.start_as_current_span("P"):
                if how == "to_thread":
                    await asyncio.to_thread(work)
                else:
                    task = contextvars.copy_context().run if copied else None
                    await asyncio.get_running_loop().run_in_executor(None, *((task, work) if task else (work,)))

        if how in ("executor", "to_thread"):
            run(in_loop)
        else:
            with spans.tracer.start_as_current_span("P"):
                context = contextvars.copy_context()
                target: Callable[[], Any] = (lambda: context.run(work)) if copied else work
                if how == "pool":
                    with ThreadPoolExecutor(1) as pool:
                        pool.submit(target).result()
                else:
                    thread = threading.Thread(target=target)
                    thread.start()
                    thread.join()
    parent = span_id(spans.one("P"))
    assert parent_id(spans.one()) == (parent if copied or how == "to_thread" else None)


def test_calls_at_once_from_many_threads_keep_their_own_parents() -> None:
    """One facade, one loop thread, connections that are shared: nobody's span lands below somebody else's."""
    spans = Spans()
    with LoopbackServer(default=lambda _request: hello(prefill_s=0.005)) as server, nothing_left(server):
        with Facade(telemetry=spans.telemetry()) as manager:

            def work(n: int) -> None:
                for _ in range(3):
                    with spans.tracer.start_as_current_span(f"P{n}"):
                        manager.complete(server.endpoint(), chat(f"m{n}"))

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(work, range(8)))
    for n in range(8):
        parents = {span_id(span) for span in spans.all(f"P{n}")}
        assert {parent_id(span) for span in spans.all(f"chat m{n}")} == parents
        assert len(parents) == 3


@pytest.mark.parametrize("kind", ["gather", "TaskGroup", "create_task"])
def test_tasks_inherit_the_parent(kind: str) -> None:
    spans = Spans()
    with LoopbackServer() as server, nothing_left(server):

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=spans.telemetry()) as manager:
                with spans.tracer.start_as_current_span("P"):
                    calls = [manager.complete(server.endpoint(), chat()) for _ in range(2)]
                    if kind == "gather":
                        await asyncio.gather(*calls)
                    elif kind == "TaskGroup":
                        async with asyncio.TaskGroup() as group:
                            for call in calls:
                                group.create_task(call)
                    else:
                        tasks = [asyncio.create_task(call) for call in calls]
                if kind == "create_task":  # begun under P, and it ends after it
                    await asyncio.gather(*tasks)
                await manager.complete(server.endpoint(), chat("later"))

        run(body)
    parent = span_id(spans.one("P"))
    assert [parent_id(span) for span in spans.all()] == [parent, parent]
    assert parent_id(spans.one("chat later")) is None


@pytest.mark.parametrize("read_in", ["another span", "another task", "another thread"])
def test_the_parent_is_what_was_current_when_the_call_began(read_in: str) -> None:
    spans = Spans()
    with serving(hello(gap_s=0.001)) as server, nothing_left(server):
        telemetry = spans.telemetry()

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=telemetry) as manager:
                with spans.tracer.start_as_current_span("P"):
                    found = await manager.stream(server.endpoint(), chat()).__aenter__()
                with spans.tracer.start_as_current_span("Q"):
                    await (read(found) if read_in == "another span" else asyncio.create_task(read(found)))

        if read_in != "another thread":
            run(body)
        else:
            with Facade(telemetry=telemetry) as manager:
                with spans.tracer.start_as_current_span("P"):
                    found = manager.stream(server.endpoint(), chat()).__enter__()
                with spans.tracer.start_as_current_span("Q"):
                    thread = threading.Thread(target=lambda: list(found))
                    thread.start()
                    thread.join()
    assert parent_id(spans.one()) == span_id(spans.one("P"))


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_what_our_own_threads_and_tasks_make_has_the_calls_context(kind: str) -> None:
    """(e): connection, attempts, and the end of a call that was dropped are found by tasks and sweeps of ours."""
    spans = Spans()
    with LoopbackServer() as server, nothing_left(server):
        server.script(Script(status=503), model="m", times=1)
        server.script(hello(), model="m")
        server.script(Script(tokens=["a"], hang_after=2), model="dropped")
        endpoint = server.endpoint(retries=AT_ONCE)

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=spans.telemetry()) as manager:
                with spans.tracer.start_as_current_span("P"):
                    await manager.complete(endpoint, chat())
                    dropped = manager.stream(endpoint, chat("dropped"))
                    await anext(dropped)
                with spans.tracer.start_as_current_span("Q"):
                    del dropped
                    gc.collect()
                    await wait_for(server, lambda s: s.requests[-1].left)

        if kind == "async":
            run(body)
        else:
            with Facade(telemetry=spans.telemetry()) as manager:
                with spans.tracer.start_as_current_span("P"):
                    manager.complete(endpoint, chat())
                    dropped = manager.stream(endpoint, chat("dropped"))
                    next(dropped)
                with spans.tracer.start_as_current_span("Q"):
                    del dropped
                    gc.collect()
                    server.wait_for(lambda s: s.requests[-1].left)
    parent, call, abandoned = spans.one("P"), spans.one(), spans.one("chat dropped")
    assert parent_id(call) == parent_id(abandoned) == span_id(parent)
    assert attributes(abandoned)["spanwire.outcome"] == "abandoned"
    assert {parent_id(span) for span in spans.all("spanwire.attempt")} == {span_id(call)}
    assert parent_id(spans.one("spanwire.connection_setup")) == span_id(call)
    contexts = {span.get_span_context().trace_id for span in (parent, call, abandoned)}  # type: ignore[union-attr]
    assert len(contexts) == 1


def test_a_connection_made_for_one_call_is_no_child_of_another_that_uses_it() -> None:
    """It is linked to instead; and a background dial keeps nobody's context for the next one."""
    spans = Spans()
    with LoopbackServer() as server, nothing_left(server):

        async def body() -> None:
            async with spanwire.ConnectionManager(telemetry=spans.telemetry()) as manager:
                for name in ("P", "Q"):
                    with spans.tracer.start_as_current_span(name):
                        await manager.complete(server.endpoint(retries=NEVER), chat())

        run(body)
    first, second = spans.all()
    setup = spans.one("spanwire.connection_setup")
    assert parent_id(setup) == span_id(first)
    assert [link.context.span_id for link in second.links] == [span_id(setup)]
    assert parent_id(second) == span_id(spans.one("Q"))


def test_an_observer_and_a_hook_run_without_making_our_span_current() -> None:
    """Callbacks of the user's see the user's own span, never ours, on the facade's thread too."""
    from opentelemetry import trace

    from spanwire.hookspecs import hookimpl

    seen: list[Any] = []

    class Hook:
        @hookimpl
        def span_attributes(self, timeline: spanwire.Timeline) -> dict[str, Any]:
            seen.append(trace.get_current_span().get_span_context().span_id)
            return {}

    spans = Spans()
    with serving(hello()) as server, nothing_left(server):
        with Facade(telemetry=spans.telemetry(), plugins=[Hook()]) as manager:
            with spans.tracer.start_as_current_span("P"):
                complete(manager, server.endpoint())
                stream(manager, server.endpoint())
    assert span_id(spans.all()[0]) not in seen
    assert seen == [span_id(spans.one("P"))] * 2
