"""Forks, exits, signals, daemon threads, other schedulers: each in a process of its own, which must end in silence."""

from __future__ import annotations

import copy
import importlib.util
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Request, Script
from tests.support import hello, serving

HELLO = "Hello from the loopback server."
SEEN_S = 0.3
#: How long a process may take: a start with everything imported is less than a second, so more is a hang.
PROCESS_S = 20.0

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
needs_sigint = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT that a test could send")

#: What each process begins with. `endpoint(...)`, `call` and two managers that have done nothing yet.
PRELUDE = """
import asyncio, atexit, gc, logging, os, signal, sys, threading, time
import spanwire

# This machine may be busy, and development mode tells of everything that is slow.
logging.getLogger("asyncio").addFilter(lambda record: not record.msg.startswith("Executing"))
URL = "{url}"
call = spanwire.Call.chat("m", [{{"role": "user", "content": "x"}}])


def endpoint(**more):
    return spanwire.Endpoint(URL, proxy=None, **more)


manager = spanwire.ConnectionManager()
blocking = spanwire.SyncConnectionManager()
"""


def command(url: str, body: str, *, flags: tuple[str, ...] = ("-X", "dev")) -> list[str]:
    warnings = ["-W", "error"]
    if sys.version_info >= (3, 12):  # Python's own advice to whoever forks; not ours to heed
        warnings += ["-W", "ignore:This process:DeprecationWarning"]
    return [sys.executable, *warnings, *flags, "-c", PRELUDE.format(url=url) + textwrap.dedent(body)]


def run_process(url: str, body: str, *, flags: tuple[str, ...] = ("-X", "dev")) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, body, flags=flags), capture_output=True, text=True, timeout=PROCESS_S, check=False
    )


class Child:
    """A process that is talked to while it runs."""

    def __init__(self, url: str, body: str) -> None:
        self.process = subprocess.Popen(
            command(url, body),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self, text: str = "\n") -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(text, timeout=PROCESS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            pytest.fail(f"the process hangs; it said {out!r} {err!r}")
        return self.process.returncode, out, err


def hangs_or_says_hello(request: Request) -> Script:
    """By model: an answer that stops after two words, or one that is whole."""
    return hello(hang_after=3) if request.model == "hangs" else hello()


# --- exits ------------------------------------------------------------------------------------------------------------

ASYNC_EXITS = {
    "a stream is open": """
        kept = []
        async def main():
            kept.append(manager.stream(endpoint(), call))
            await anext(kept[0])
        asyncio.run(main())
        """,
    "a task reads": """
        async def main():
            stream = manager.stream(endpoint(), call)
            await anext(stream)
            main.task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
        asyncio.run(main())
        """,
    "two managers": """
        async def main():
            main.kept = [m.stream(endpoint(), call) for m in (manager, spanwire.default_manager())]
            for stream in main.kept:
                await anext(stream)
        asyncio.run(main())
        """,
    "under uvloop": """
        import uvloop
        async def main():
            main.kept = manager.stream(endpoint(), call)
            await anext(main.kept)
        uvloop.run(main())
        """,
    "inside a generator": """
        async def texts():
            async with manager.stream(endpoint(), call) as stream:
                async for chunk in stream:
                    yield chunk.text
        async def main():
            main.kept = texts()
            await anext(main.kept)
        asyncio.run(main())
        """,
}
SYNC_EXITS = {
    "a sync stream is open": """
        kept = blocking.stream(endpoint(), call)
        next(kept)
        """,
    "a sync stream in a generator": """
        def texts():
            with blocking.stream(endpoint(), call) as stream:
                for chunk in stream:
                    yield chunk.text
        kept = texts()
        next(kept)
        """,
    "a daemon thread reads": """
        def read():
            with blocking.stream(endpoint(), call) as stream:
                for chunk in stream:
                    if chunk.text:
                        ready.set()
        ready = threading.Event()
        threading.Thread(target=read, daemon=True).start()
        ready.wait()
        """,
    "ten daemon threads read": """
        def read(ready):
            with blocking.stream(endpoint(), call) as stream:
                for chunk in stream:
                    if chunk.text:
                        ready.set()
        ready = [threading.Event() for _ in range(10)]
        for event in ready:
            threading.Thread(target=read, args=(event,), daemon=True).start()
        for event in ready:
            event.wait()
        """,
    "a sync and an async stream of one manager": """
        both = spanwire.SyncConnectionManager(manager)
        kept = both.stream(endpoint(), call)
        next(kept)
        async def main():
            main.kept = manager.stream(endpoint(), call)
            await anext(main.kept)
        asyncio.run(main())
        """,
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.long) if number % 2 else what
        for number, what in enumerate([*ASYNC_EXITS, *SYNC_EXITS])
    ],
)
def test_an_exit_is_silent_and_the_server_sees_it(what: str) -> None:
    if what == "under uvloop":
        pytest.importorskip("uvloop")
    with serving(hello(hang_after=3)) as server:
        done = run_process(server.url, {**ASYNC_EXITS, **SYNC_EXITS}[what])
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        server.wait_for(lambda s: s.requests and all(request.left for request in s.requests), SEEN_S)
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("raise KeyError('theirs')", 1, "KeyError: 'theirs'"),
        pytest.param("sys.exit(3)", 3, "", marks=pytest.mark.long),
        pytest.param("raise KeyboardInterrupt", -2, "KeyboardInterrupt", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("how", ["async block", "async handle", "sync block", "sync handle"])
def test_a_program_that_fails_with_a_stream_open_says_only_that(how: str, ending: str, code: int, last: str) -> None:
    body = {
        "async block": """
            async def main():
                async with manager.stream(endpoint(), call) as stream:
                    async for chunk in stream:
                        ENDING
            asyncio.run(main())
            """,
        "async handle": """
            async def main():
                main.kept = manager.stream(endpoint(), call)
                await anext(main.kept)
                ENDING
            asyncio.run(main())
            """,
        "sync block": """
            with blocking, blocking.stream(endpoint(), call) as stream:
                for chunk in stream:
                    ENDING
            """,
        "sync handle": """
            kept = blocking.stream(endpoint(), call)
            next(kept)
            ENDING
            """,
    }[how]
    if sys.platform == "win32" and code == -2:
        code = 0xC000013A  # STATUS_CONTROL_C_EXIT
    with serving(hello(hang_after=3)) as server:
        done = run_process(server.url, body.replace("ENDING", ending))
        assert done.returncode == code
        if last:
            assert done.stderr.startswith("Traceback (most recent call last):\n")
            assert done.stderr.endswith(f"{last}\n")
            assert done.stderr.count("Traceback") == 1 + done.stderr.count("During handling")
        else:
            assert done.stderr == ""
        for word in ("ignored", "Warning", "never retrieved", "destroyed", "unclosed"):
            assert word not in done.stderr
        server.wait_for(lambda s: s.requests[0].left, SEEN_S)


def test_a_loop_that_is_never_closed_does_not_disturb_the_exit() -> None:
    """Python tells of the loop itself in development mode only; without that there is not a word."""
    with serving(hello(hang_after=3)) as server:
        done = run_process(
            server.url,
            """
            kept = manager.stream(endpoint(), call)
            loop = asyncio.new_event_loop()
            loop.run_until_complete(kept.__anext__())
            """,
            flags=("-W", "default", "-W", "ignore::ResourceWarning"),
        )
        assert (done.returncode, done.stderr) == (0, "")
        server.wait_for(lambda s: s.requests[0].left, SEEN_S)


@pytest.mark.parametrize("stage", ["slot", "dial", "warm", "back-off"])
def test_an_exit_while_a_daemon_thread_waits(stage: str) -> None:
    """For a slot, a handshake, the end of a back-off: it just ends with the process."""
    with serving(Script(status=503) if stage == "back-off" else hello(hang_after=3)) as server:
        done = run_process(
            server.url,
            f"""
            import socket
            silent = socket.create_server(("127.0.0.1", 0))
            shared = endpoint(retries=spanwire.Retries(base_s=3600, max_wait_s=3600),
                              limits=spanwire.Limits(max_concurrent=1))
            stuck = spanwire.Endpoint(f"https://127.0.0.1:{{silent.getsockname()[1]}}/v1", proxy=None)
            waits, arguments, words = {{
                "slot": (blocking.complete, (shared, call), "1 waiting"),
                "dial": (blocking.complete, (stuck, call), "1 dialling"),
                "warm": (blocking.warm, (stuck, 2), "2 dialling"),
                "back-off": (blocking.complete, (shared, call), ""),
            }}["{stage}"]
            if "{stage}" == "slot":
                kept = blocking.stream(shared, call)
                next(kept)
            threading.Thread(target=waits, args=arguments, daemon=True).start()

            def there():
                states = list(blocking._manager._states.values())
                if "{stage}" == "back-off":
                    return any(run._backoff_until_ns for state in states for run in list(state.runs))
                return words in repr([blocking._manager._prepare(shared).slots, *(list(s.pools.values()) for s in states)])

            while not there():
                time.sleep(0.001)
            silent.close()
            """,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_thread_that_is_no_daemon_reads_its_stream_to_the_end_before_the_exit() -> None:
    with serving(hello(gap_s=0.02)) as server:
        done = run_process(
            server.url,
            """
            def read():
                with blocking.stream(endpoint(), call) as stream:
                    print("".join(chunk.text for chunk in stream))
            blocking.warm(endpoint())  # Python 3.12.0 and 3.12.1 start no thread any more once the main one has ended
            threading.Thread(target=read).start()
            """,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{HELLO}\n", "")


@pytest.mark.parametrize("used", [True, False])
def test_a_call_in_an_exit_handler_works_or_says_why_not(*, used: bool) -> None:
    """It runs after ours if it was registered before, and then the loop thread is gone. It never hangs."""
    with serving() as server:
        done = run_process(
            server.url,
            f"""
            def last():
                try:
                    print(bool(blocking.complete(endpoint(), call).text))
                except spanwire.SpanwireError as error:
                    print(type(error).__name__, "exiting" in str(error))
            atexit.register(last)
            if {used}:
                print(bool(blocking.complete(endpoint(), call).text))
                atexit.register(last)
            """,
        )
        out = done.stdout.split("\n")
        assert done.stderr == ""
        if used:
            assert out == ["True", "True", "ConnectionFailed True", ""]
        else:
            assert out in (["True", ""], ["ConnectionFailed True", ""])


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

INTERRUPTED = {
    "async stream": """
        async def main():
            async with manager.stream(ENDPOINT, call) as stream:
                async for chunk in stream:
                    if chunk.text:
                        print("reads", flush=True)
        def once():
            asyncio.run(main())
        def after():
            async def again():
                return (await manager.complete(ENDPOINT, call)).text
            return asyncio.run(again())
        """,
    "sync stream": """
        def once():
            with blocking.stream(ENDPOINT, call) as stream:
                for chunk in stream:
                    if chunk.text:
                        print("reads", flush=True)
        def after():
            return blocking.complete(ENDPOINT, call).text
        """,
    "sync stream without a block": """
        def once():
            stream = blocking.stream(ENDPOINT, call)
            for chunk in stream:
                if chunk.text:
                    print("reads", flush=True)
        def after():
            return blocking.complete(ENDPOINT, call).text
        """,
    "sync stream by its handle": """
        kept = []
        def once():
            kept.append(blocking.stream(ENDPOINT, call))
            for chunk in kept[0]:
                if chunk.text:
                    print("reads", flush=True)
        def after():
            kept.pop().close()
            return blocking.complete(ENDPOINT, call).text
        """,
}


@needs_sigint
@pytest.mark.parametrize("how", INTERRUPTED)
def test_ctrl_c_while_a_stream_is_read(how: str) -> None:
    """The server sees it while the process lives on, the slot comes back, and the next call goes."""
    body = (
        INTERRUPTED[how]
        + """
        shared = endpoint(limits=spanwire.Limits(max_concurrent=1))
        try:
            once()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        if KEPT:
            print(after(), flush=True)
        sys.stdin.readline()
        if not KEPT:
            print(after(), flush=True)
        """
    )
    kept = how == "sync stream by its handle"
    body = body.replace("ENDPOINT", "shared").replace("KEPT", str(kept))
    with serving(hello(hang_after=3), hello()) as server:
        child = Child(server.url, body)
        assert [child.line(), child.line()] == ["reads", "reads"]  # the two words; then it hangs
        child.interrupt()
        assert child.line() == "interrupted"
        server.wait_for(lambda s: s.requests[0].left, SEEN_S)  # while the process still runs
        code, out, err = child.end()
        assert (code, out, err) == (0, f"{HELLO}\n", "")


@needs_sigint
@pytest.mark.parametrize("stage", ["slot", "dial", "back-off"])
def test_ctrl_c_while_a_sync_stream_is_opened(stage: str) -> None:
    body = f"""
        import socket
        silent = socket.create_server(("127.0.0.1", 0))
        slow = spanwire.Retries(base_s=3600, max_wait_s=3600)
        limits = spanwire.Limits(max_concurrent=1)
        shared = endpoint(limits=limits, retries=slow)
        if "{stage}" == "dial":
            shared = spanwire.Endpoint(f"https://127.0.0.1:{{silent.getsockname()[1]}}/v1", proxy=None, limits=limits)
        holder = None
        if "{stage}" == "slot":
            holder = blocking.stream(shared, call)
            next(holder)

        def tell():
            states = blocking._manager._states
            while True:
                runs = [run for state in list(states.values()) for run in list(state.runs)]
                if len(runs) == (2 if holder else 1) and all(run._record.attempts for run in runs):
                    pools = repr([pool for state in list(states.values()) for pool in list(state.pools.values())])
                    slots = repr(blocking._manager._prepare(shared).slots)
                    if "{stage}" == "slot" and "1 waiting" in slots:
                        break
                    if "{stage}" == "dial" and "1 dialling" in pools:
                        break
                    if "{stage}" == "back-off" and runs[0]._backoff_until_ns:
                        break
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=tell).start()
        try:
            with blocking.stream(shared, call) as stream:
                for chunk in stream:
                    print("not a word, surely")
        except KeyboardInterrupt:
            print("interrupted")
        if holder is not None:
            holder.close()
        while "0 of 1 in use, 0 waiting" not in repr(blocking._manager._prepare(shared).slots):
            time.sleep(0.001)
        blocking.close()
        silent.close()
        """
    with serving(hello(hang_after=3) if stage == "slot" else Script(status=503)) as server:
        done = run_process(server.url, body)
        assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


# --- forks ------------------------------------------------------------------------------------------------------------


@needs_fork
def test_prefork_workers_that_were_warmed_in_their_parent() -> None:
    """As under Celery or gunicorn: the parent has connections; each child has its own, and exits in silence."""
    with serving(default=hangs_or_says_hello) as server:
        done = run_process(
            server.url,
            """
            hangs = spanwire.Call.chat("hangs", [{"role": "user", "content": "x"}])
            shared = endpoint(limits=spanwire.Limits(max_concurrent=2))
            blocking.warm(shared, 2)
            assert blocking.complete(shared, call).timeline.connection.reused
            open_stream = blocking.stream(shared, hangs)
            next(open_stream)

            def work():
                used = [blocking.complete(shared, call).timeline.connection for _ in range(3)]
                assert [use.reused for use in used] == [False, True, True]
                async def main():
                    async with spanwire.ConnectionManager() as own:
                        return (await own.complete(shared, call)).text
                assert asyncio.run(main())

            def spawn(depth):
                child = os.fork()
                if child == 0:
                    work()
                    if depth:
                        spawn(depth - 1)  # a child's child
                    sys.exit(7)
                _, status = os.waitpid(child, 0)
                assert os.waitstatus_to_exitcode(status) == 7, status

            for depth in (0, 0, 1):
                spawn(depth)
            children = [os.fork() for _ in range(1)]
            if children == [0]:
                work()
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
            assert blocking.complete(shared, call).timeline.connection.reused
            open_stream.close()
            print("parent")
            """,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "parent\n", "")
        server.wait_for(lambda s: s.open_connections == 0, SEEN_S)
        assert server.connections == 2 + 5 * 2


@needs_fork
@pytest.mark.parametrize("does", ["close", "read", "leave the block", "drop", "timeline"])
def test_a_sync_stream_of_the_parent_in_a_child(does: str) -> None:
    """It belongs to the parent, which reads it to the end; the child cannot use it, and does not hang."""
    with serving(hello(gap_s=0.02)) as server:
        done = run_process(
            server.url,
            f"""
            with blocking.stream(endpoint(), call) as stream:
                text = next(stream).text
                child = os.fork()
                if child == 0:
                    signal.alarm(5)
                    try:
                        if "{does}" == "close":
                            stream.close()
                        elif "{does}" == "read":
                            list(stream)
                        elif "{does}" == "drop":
                            del stream
                            gc.collect()
                            os._exit(0)
                        elif "{does}" == "timeline":
                            stream.timeline
                    except (spanwire.SpanwireError, RuntimeError) as error:
                        print(type(error).__name__, file=sys.stderr if not str(error) else sys.stdout)
                        os._exit(0)
                    sys.exit(0)
                text += "".join(chunk.text for chunk in stream)
            assert text == "{HELLO}", text
            assert stream.timeline.outcome == "completed"
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, status
            """,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert not server.requests[0].left


@needs_fork
@pytest.mark.parametrize("does", ["leave the block", "aclose", "drop", "read"])
def test_an_async_stream_of_the_parent_in_a_child(does: str) -> None:
    """The child is inside a copy of the parent's loop. What it does to the stream must not reach the parent's socket."""
    with serving(hello(gap_s=0.02)) as server:
        done = run_process(
            server.url,
            f"""
            async def main():
                async with manager.stream(endpoint(), call) as stream:
                    text = (await anext(stream)).text
                    child = os.fork()
                    if child:
                        text += "".join([chunk.text async for chunk in stream])
                if child == 0:
                    os._exit(0)
                assert text == "{HELLO}", text
                assert stream.timeline.outcome == "completed"
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

            async def other():
                stream = manager.stream(endpoint(), call)
                text = (await anext(stream)).text
                child = os.fork()
                if child == 0:
                    signal.alarm(5)
                    try:
                        if "{does}" == "aclose":
                            await stream.aclose()
                        elif "{does}" == "read":
                            async for chunk in stream:
                                break
                        else:
                            del stream
                            gc.collect()
                            await asyncio.sleep(0)
                    except (spanwire.SpanwireError, RuntimeError) as error:
                        pass
                    os._exit(0)
                os.waitpid(child, 0)  # it has done it before we read on
                text += "".join([chunk.text async for chunk in stream])
                assert text == "{HELLO}", text

            asyncio.run(main() if "{does}" == "leave the block" else other())
            """,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert not server.requests[0].left


@needs_fork
def test_a_child_uses_the_async_manager_on_a_loop_of_its_own() -> None:
    """The parent's loop runs, with a connection and a stream on it, when it forks; both go on."""
    with serving(default=hangs_or_says_hello) as server:
        done = run_process(
            server.url,
            """
            hangs = spanwire.Call.chat("hangs", [{"role": "user", "content": "x"}])

            async def child_main():
                reply = await manager.complete(endpoint(), call)
                assert not reply.timeline.connection.reused
                return reply.text

            async def main():
                await manager.complete(endpoint(), call)
                stream = manager.stream(endpoint(), hangs)
                await anext(stream)
                await manager.warm(endpoint())
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        asyncio.events._set_running_loop(None)
                        code = 0 if asyncio.run(child_main()) else 2
                    finally:
                        os._exit(code)
                _, status = await asyncio.to_thread(os.waitpid, child, 0)
                assert status == 0, status
                assert (await anext(stream)).text
                await stream.aclose()
                assert (await manager.complete(endpoint(), call)).timeline.connection.reused

            asyncio.run(main())
            """,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_fork
def test_forks_while_threads_are_calling() -> None:
    """A child never meets a lock that a thread of its parent held."""
    with serving() as server:
        done = run_process(
            server.url,
            """
            shared = endpoint(limits=spanwire.Limits(max_concurrent=3))
            stop = threading.Event()
            blocking.complete(shared, call)  # forks in the middle of the first one are another test's

            def busy():
                while not stop.is_set():
                    blocking.complete(shared, call)
                    blocking.complete(endpoint(), call)
                    spanwire.default_sync_manager().complete(shared, call)

            threads = [threading.Thread(target=busy) for _ in range(6)]
            for thread in threads:
                thread.start()
            failed = 0
            for _ in range(12):
                child = os.fork()
                if child == 0:
                    signal.alarm(8)
                    try:
                        blocking.complete(shared, call)
                        spanwire.default_sync_manager().complete(endpoint(), call)
                    except BaseException as error:
                        os.write(2, repr(error).encode())
                        os._exit(1)
                    os._exit(0)
                failed += os.waitpid(child, 0)[1] != 0
            stop.set()
            for thread in threads:
                thread.join()
            print(failed)
            """,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


@needs_fork
def test_a_fork_in_the_middle_of_another_threads_first_call() -> None:
    """That thread is importing the transport: the child would wait for ever for the lock of a half-made module."""
    with serving() as server:
        done = run_process(
            server.url,
            """
            importing = threading.Event()

            class Slow:
                # Takes its time to find one module of the transport.
                @staticmethod
                def find_spec(name, path=None, target=None):
                    if name == "spanwire_sse.exchange" and not importing.is_set():
                        importing.set()
                        time.sleep(0.3)  # the delay under test

            sys.meta_path.insert(0, Slow)
            thread = threading.Thread(target=blocking.complete, args=(endpoint(), call))
            thread.start()
            assert importing.wait(5)
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                try:
                    assert blocking.complete(endpoint(), call).text
                    assert spanwire.SyncConnectionManager().complete(endpoint(), call).text
                except BaseException as error:
                    os.write(2, repr(error).encode())
                    os._exit(1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            thread.join()
            print(os.waitstatus_to_exitcode(status))
            """,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


@needs_fork
def test_a_parents_call_has_one_span_whatever_its_child_does() -> None:
    """The child leaves the block, drops the handle, closes the manager: the call, its span and its count are the parent's."""
    with serving(hello(gap_s=0.02)) as server:
        done = run_process(
            server.url,
            """
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor
            from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

            exporter = InMemorySpanExporter()
            provider = TracerProvider(shutdown_on_exit=False)
            provider.add_span_processor(SimpleSpanProcessor(exporter))
            traced = spanwire.ConnectionManager(telemetry=spanwire.Telemetry(tracer_provider=provider))

            def outcomes():
                return [s.attributes["spanwire.outcome"] for s in exporter.get_finished_spans() if s.name == "chat m"]

            async def main():
                stream = traced.stream(endpoint(), call)
                await anext(stream)
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        await stream.aclose()
                        code = 0 if outcomes() == [] else 2
                    finally:
                        os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                async for chunk in stream:
                    pass
                assert outcomes() == ["completed"]

            asyncio.run(main())
            """,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_workers_of_multiprocessing(method: str, tmp_path: Path) -> None:
    """By whatever method they are started; they get an endpoint that was used, and use a manager of their module."""
    with serving() as server:
        program = tmp_path / "program.py"
        program.write_text(
            textwrap.dedent(
                f"""
                import asyncio, multiprocessing, sys
                import spanwire

                manager = spanwire.ConnectionManager()
                call = spanwire.Call.chat("m", [{{"role": "user", "content": "x"}}])

                def work(endpoint):
                    first = spanwire.default_sync_manager().complete(endpoint, call)
                    async def main():
                        return await manager.complete(endpoint, call)
                    second = asyncio.run(main())
                    return bool(first.text and second.text), first.timeline.connection.reused

                if __name__ == "__main__":
                    shared = spanwire.Endpoint("{server.url}", proxy=None, limits=spanwire.Limits(max_concurrent=4))
                    spanwire.default_sync_manager().complete(shared, call)
                    context = multiprocessing.get_context("{method}")
                    with context.Pool(2, maxtasksperchild=1) as pool:
                        print(pool.map(work, [shared] * 4, 1))
                        pool.close()
                        pool.join()
                    print(spanwire.default_sync_manager().complete(shared, call).timeline.connection.reused)
                """
            ),
            encoding="utf-8",
        )
        warnings = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
        done = subprocess.run(
            [sys.executable, *warnings, str(program)], capture_output=True, text=True, timeout=PROCESS_S, check=False
        )
        assert done.stderr == ""
        assert done.stdout == f"{[(True, False)] * 4}\nTrue\n"


@pytest.mark.parametrize("kind", [spanwire.ConnectionManager, spanwire.SyncConnectionManager])
@pytest.mark.parametrize("way", [pickle.dumps, copy.deepcopy])
def test_a_manager_cannot_be_sent_to_another_process_and_says_what_to_send(
    kind: Callable[[], object], way: Callable[[object], object]
) -> None:
    with pytest.raises(errors.ConfigurationError, match="send the endpoint"):
        way(kind())


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "copy"])
def test_an_endpoint_and_a_call_can_be_copied_after_their_use(way: str) -> None:
    """To a worker, or with the settings that hold them. The copy is as good as new."""
    ways: dict[str, Any] = {
        "pickle": lambda value: pickle.loads(pickle.dumps(value)),
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
    }
    with LoopbackServer() as server, spanwire.SyncConnectionManager() as manager:
        endpoint = server.endpoint(
            api_key="sk-1",
            headers={"x-a": "b"},
            limits=spanwire.Limits(max_concurrent=1),
            options={"include_usage": True},
        )
        call = spanwire.Call.chat("m", [{"role": "user", "content": "x"}])
        manager.complete(endpoint, call)
        twin, same_call = ways[way]((endpoint, call))
        assert twin == endpoint
        assert (same_call.operation, same_call.model, same_call.body) == (call.operation, call.model, call.body)
        assert manager.complete(twin, same_call).text
        assert server.connections == 1
        assert server.requests[1].headers["authorization"] == "Bearer sk-1"


# --- gevent -----------------------------------------------------------------------------------------------------------

GEVENT = {
    "patched first": ("from gevent import monkey; monkey.patch_all()", ""),
    "patched first, but threads": ("from gevent import monkey; monkey.patch_all(thread=False)", ""),
    "patched after the import": ("", "from gevent import monkey; monkey.patch_all()"),
    "patched after the import, but threads": ("", "from gevent import monkey; monkey.patch_all(thread=False)"),
    "patched after a call": ("", "assert use() == 'works'\nfrom gevent import monkey; monkey.patch_all()"),
    "patched after a call, but threads": (
        "",
        "assert use() == 'works'\nfrom gevent import monkey; monkey.patch_all(thread=False)",
    ),
    "not patched": ("import gevent", ""),
}


@pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed")
@pytest.mark.parametrize("side", ["sync", "async"])
@pytest.mark.parametrize(
    "when", [pytest.param(when, marks=pytest.mark.long) if "but" in when else when for when in GEVENT]
)
def test_under_gevent_it_works_or_refuses_at_once(when: str, side: str) -> None:
    """From the main greenlet and from others, whatever was patched when: it never hangs."""
    before, after = GEVENT[when]
    uses = {
        "sync": """
            def once():
                with manager.stream(shared, call) as stream:
                    text = "".join(chunk.text for chunk in stream)
                assert text == manager.complete(shared, call).text
            """,
        "async": """
            aio = spanwire.ConnectionManager()
            def once():
                async def main():
                    async with aio.stream(shared, call) as stream:
                        return "".join([chunk.text async for chunk in stream])
                assert asyncio.run(main())
            """,
    }
    parts = [
        before,
        "import asyncio, spanwire",
        'call = spanwire.Call.chat("m", [{"role": "user", "content": "x"}])',
        'shared = spanwire.Endpoint("URL", proxy=None, limits=spanwire.Limits(max_concurrent=2))',
        "manager = spanwire.SyncConnectionManager()",
        textwrap.dedent(uses[side]),
        textwrap.dedent(
            """
            def use():
                try:
                    once()
                except spanwire.errors.ConfigurationError as error:
                    return "refused" if "gevent" in str(error) else str(error)
                return "works"
            """
        ),
        after,
        textwrap.dedent(
            """
            import gevent
            found = [use()]
            # asyncio's loops are one for each thread, and gevent's greenlets share theirs: one after the other.
            greenlets = [gevent.spawn(use) for _ in range(4 if SYNC else 1)]
            gevent.joinall(greenlets, timeout=8)
            found += [greenlet.value for greenlet in greenlets]
            print(*sorted(set(map(str, found))))
            """
        ).replace("SYNC", str(side == "sync")),
    ]
    with serving() as server:
        url = f"http://localhost:{server.port}/v1"  # a name, so that DNS is used too
        program = "\n".join(parts).replace("URL", url)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS_S, check=False
        )
        assert done.returncode == 0
        assert done.stdout in ("works\n", "works\n" if when == "not patched" else "refused\n")
        if side == "sync" and "after a call" not in when:  # patched that late, the end of a thread is noisy
            assert done.stderr == ""
