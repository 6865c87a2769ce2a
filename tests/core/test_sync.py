"""The synchronous facade on a real server."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import spanwire
from spanwire import errors
from spanwire.sync import SyncConnectionManager
from spanwire.testing import LoopbackServer, Script
from tests.support import AT_ONCE, assert_adds_up, chat, hello, serving

HELLO = "Hello from the loopback server."


def test_a_stream_gives_the_same_as_the_async_one() -> None:
    with serving(hello()) as server, SyncConnectionManager() as manager:
        with manager.stream(server.endpoint(), chat()) as stream:
            text = "".join(chunk.text for chunk in stream)
        assert text == stream.reply.text == HELLO
        assert stream.timeline.outcome == "completed"
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert_adds_up(stream.timeline)


def test_complete_embed_and_warm() -> None:
    with serving(hello()) as server, SyncConnectionManager() as manager:
        manager.warm(server.endpoint())
        reply = manager.complete(server.endpoint(), chat())
        assert reply.text == HELLO
        assert reply.timeline is not None
        assert "handshake" not in reply.timeline.segments
        assert len(manager.embed(server.endpoint(), spanwire.Call.embeddings("e", ["a", "b"])).vectors) == 2
        assert server.connections == 1


def test_six_streamed_calls_use_one_connection() -> None:
    with serving(default=lambda _request: hello()) as server, SyncConnectionManager() as manager:
        for _ in range(6):
            with manager.stream(server.endpoint(), chat()) as stream:
                assert "".join(chunk.text for chunk in stream) == HELLO
        assert server.connections == 1


def test_leaving_early_tells_the_server() -> None:
    with serving(hello(hang_after=3)) as server, SyncConnectionManager() as manager:
        with manager.stream(server.endpoint(), chat()) as stream:
            for chunk in stream:
                if chunk.text:
                    break
        server.wait_for(lambda s: s.requests[0].left)
        assert stream.timeline.outcome == "closed_by_caller"
        assert list(stream) == []


def test_a_stream_that_is_dropped_is_noticed() -> None:
    with serving(hello(hang_after=3)) as server, SyncConnectionManager() as manager:
        stream = manager.stream(server.endpoint(), chat())
        next(stream)
        del stream
        gc.collect()
        server.wait_for(lambda s: s.requests[0].left)


def test_errors_are_the_same() -> None:
    with serving(default=lambda _request: Script(status=503)) as server, SyncConnectionManager() as manager:
        with pytest.raises(errors.Overloaded) as caught:
            manager.complete(server.endpoint(retries=AT_ONCE), chat())
        assert caught.value.timeline is not None
        with pytest.raises(errors.Overloaded), manager.stream(server.endpoint(retries=AT_ONCE), chat()) as stream:
            list(stream)
        with pytest.raises(errors.ConfigurationError):
            manager.stream("nonsense", chat())


def test_many_threads_share_the_connections() -> None:
    with serving(default=lambda _request: hello()) as server, SyncConnectionManager() as manager:
        endpoint = server.endpoint(limits=spanwire.Limits(max_concurrent=4))

        def call(_number: int) -> str:
            with manager.stream(endpoint, chat()) as stream:
                return "".join(chunk.text for chunk in stream)

        with ThreadPoolExecutor(50) as threads:
            assert list(threads.map(call, range(200))) == [HELLO] * 200
        assert server.connections <= 4


def test_it_works_on_a_thread_whose_loop_is_running() -> None:
    """As in a notebook: it blocks, and does not deadlock."""
    with serving(hello()) as server, SyncConnectionManager() as manager:

        async def cell() -> str:
            return manager.complete(server.endpoint(), chat()).text

        assert asyncio.run(cell()) == HELLO


def test_on_its_own_loop_thread_it_refuses() -> None:
    found: list[object] = []
    with serving(hello()) as server:

        class Observer:
            def call_ended(self, _timeline: spanwire.Timeline) -> None:
                try:
                    manager.complete(server.endpoint(), chat())
                except RuntimeError as error:
                    found.append(error)

        class Plugin:
            @spanwire.hookimpl
            def register_observers(self) -> list[Observer]:
                return [Observer()]

        with SyncConnectionManager(plugins=[Plugin()]) as manager:
            manager.complete(server.endpoint(), chat())
    assert "own loop thread" in str(found[0])


def test_facades_of_one_manager_share_its_connections() -> None:
    with serving() as server:
        inner = spanwire.ConnectionManager()
        with SyncConnectionManager(inner) as one:
            one.complete(server.endpoint(), chat())
            SyncConnectionManager(inner).complete(server.endpoint(), chat())
            assert server.connections == 1
    assert spanwire.default_sync_manager() is spanwire.default_sync_manager()


#: Development mode complains of every step over 100 ms, which says how busy the machine is.
_NOT_SLOW = """\
import logging
logging.getLogger("asyncio").addFilter(lambda record: "took" not in record.getMessage())
"""


def script(body: str) -> list[str]:
    return [sys.executable, "-W", "error", "-X", "dev", "-c", _NOT_SLOW + textwrap.dedent(body)]


def test_the_interpreter_exits_quietly_with_a_stream_open() -> None:
    with serving(hello(hang_after=2)) as server:
        done = subprocess.run(
            script(
                f"""
                import spanwire
                manager = spanwire.SyncConnectionManager()
                stream = manager.stream(spanwire.Endpoint("{server.url}", proxy=None),
                                        spanwire.Call.chat("m", [{{"role": "user", "content": "x"}}]))
                print(next(stream).text == "")
                """
            ),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
        server.wait_for(lambda s: s.requests[0].left)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT that a test could send to one process")
def test_ctrl_c_ends_the_call_on_the_loop_too() -> None:
    with serving(Script(hang_after="request")) as server:
        child = subprocess.Popen(
            script(
                f"""
                import spanwire
                manager = spanwire.SyncConnectionManager()
                endpoint = spanwire.Endpoint("{server.url}", proxy=None)
                call = spanwire.Call.chat("m", [{{"role": "user", "content": "x"}}])
                try:
                    manager.complete(endpoint, call)
                except KeyboardInterrupt:
                    print("interrupted")
                    input()
                """
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        server.wait_for(lambda s: len(s.requests) == 1, 20)
        child.send_signal(signal.SIGINT)
        server.wait_for(lambda s: s.requests[0].left)  # while the process still runs
        out, err = child.communicate("\n", timeout=30)
        assert (out, err) == ("interrupted\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_starts_afresh_and_leaves_the_parents_connection_alone() -> None:
    with LoopbackServer() as server:
        done = subprocess.run(
            script(
                f"""
                import os, spanwire
                manager = spanwire.default_sync_manager()
                endpoint = spanwire.Endpoint("{server.url}", proxy=None)
                call = spanwire.Call.chat("m", [{{"role": "user", "content": "x"}}])
                manager.complete(endpoint, call)
                child = os.fork()
                if child == 0:
                    assert manager.complete(endpoint, call).timeline.connection.reused is False
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                print(status, manager.complete(endpoint, call).timeline.connection.reused)
                """
            ),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.stdout, done.stderr) == ("0 True\n", "")
        assert server.connections == 2


def test_no_thread_is_started_before_it_is_needed() -> None:
    done = subprocess.run(
        script("import threading, spanwire; spanwire.SyncConnectionManager(); print(threading.active_count())"),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert threading.active_count() >= 1


LOOPS = """
    import sys
    import spanwire
    from spanwire.sync import _loop_thread

    endpoint = spanwire.Endpoint("{url}", proxy=None)
    call = spanwire.Call.chat("m", [{{"role": "user", "content": "x"}}])
    with spanwire.SyncConnectionManager() as manager:
        manager.warm(endpoint)
        with manager.stream(endpoint, call) as stream:
            text = "".join(chunk.text for chunk in stream)
        with manager.stream(endpoint, call) as left:
            next(left)
        reply = manager.complete(endpoint, call)
        print(text == reply.text, left.timeline.outcome, type(_loop_thread().loop).__module__)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop on Windows")
@pytest.mark.parametrize(("name", "module"), [("", "asyncio"), ("asyncio", "asyncio"), (" uvLoop", "uvloop")])
def test_the_environment_chooses_the_loop(name: str, module: str) -> None:
    with serving(hello(), hello(hang_after=2), hello()) as server:
        done = subprocess.run(
            script(LOOPS.format(url=server.url)),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={**os.environ, "SPANWIRE_LOOP": name},
        )
        assert done.stderr == ""
        words = done.stdout.split()
        assert words[:2] == ["True", "closed_by_caller"]
        assert words[2].startswith(module)
        server.wait_for(lambda s: s.requests[1].left)


@pytest.mark.parametrize(
    ("name", "hide", "words"),
    [
        ("trio", "", "SPANWIRE_LOOP='trio': it can be asyncio or uvloop"),
        ("uvloop", "sys.modules['uvloop'] = None", "SPANWIRE_LOOP=uvloop needs uvloop: pip install 'spanwire[uvloop]'"),
    ],
)
def test_a_loop_that_there_is_not_is_refused(name: str, hide: str, words: str) -> None:
    done = subprocess.run(
        script(
            f"""
            import sys
            {hide}
            import spanwire
            try:
                spanwire.SyncConnectionManager().warm("http://127.0.0.1:9/v1")
            except spanwire.errors.ConfigurationError as error:
                print(error)
            """
        ),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "SPANWIRE_LOOP": name},
    )
    assert (done.stdout, done.stderr) == (words + "\n", "")


def test_the_manager_below_is_told() -> None:
    manager = spanwire.ConnectionManager()
    assert spanwire.SyncConnectionManager(manager).manager is manager
    assert spanwire.default_sync_manager().manager is spanwire.default_manager()


# --- sessions ---------------------------------------------------------------------------------------------------------


def echo_endpoint(server: LoopbackServer) -> spanwire.Endpoint:
    return spanwire.Endpoint(server.url.removesuffix("/v1") + "/raw", proxy=None, dialect="raw")


def test_a_session_with_a_reader_thread_and_writer_threads() -> None:
    """Nothing is lost, each writer's messages stay in order, and closing it ends the reader."""
    with serving(part="websocket") as server, SyncConnectionManager() as manager:
        with manager.session(echo_endpoint(server)) as session:
            got: list[bytes] = []
            all_came = threading.Event()

            def read() -> None:
                for event in session:
                    got.append(event.raw)
                    if len(got) == 200:
                        all_came.set()

            def write(name: str) -> None:
                for number in range(100):
                    session.send(f"{name}{number}")

            threads = [threading.Thread(target=read), *(threading.Thread(target=write, args=(name,)) for name in "ab")]
            for thread in threads:
                thread.start()
            assert all_came.wait(20)
            session.close()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
        for name in ("a", "b"):
            assert [raw.decode() for raw in got if raw.decode()[0] == name] == [f"{name}{n}" for n in range(100)]
        assert session.timeline.outcome == "closed_by_caller"
        assert list(session) == []
        with pytest.raises(errors.ConnectionFailed):
            session.send("too late")


def test_a_sessions_turns_and_what_can_be_sent() -> None:
    with serving(hello(), part="websocket") as server, SyncConnectionManager() as manager:
        with manager.session(server.endpoint(), model="m") as session:
            session.send({"type": "session.update", "session": {"output_modalities": ["text"]}})
            session.send('{"type": "response.create"}')
            text = ""
            for event in session:
                text += event.text
                if event.type == "response.done":
                    break
            with pytest.raises(errors.ConfigurationError):
                session.send({"type": object()})
            assert text == HELLO
            assert [turn.outcome for turn in session.turns] == ["completed"]
            assert_adds_up(session.turns[0])
            assert "SyncSession" in repr(session)
            with pytest.raises(RuntimeError, match="has not ended"):
                _ = session.timeline


def test_a_session_that_is_dropped_is_noticed() -> None:
    with serving(part="websocket") as server, SyncConnectionManager() as manager:
        session = manager.session(echo_endpoint(server))
        session.__enter__()
        server.wait_for(lambda s: s.open_connections == 1)
        del session
        gc.collect()
        server.wait_for(lambda s: s.open_connections == 0)


def test_a_session_is_refused_and_ended_as_the_async_one() -> None:
    with serving(part="websocket", options={"upgrades": [403, 101]}) as server, SyncConnectionManager() as manager:
        with pytest.raises(RuntimeError, match="not entered"):
            next(manager.session(echo_endpoint(server)))
        with pytest.raises(errors.AuthenticationFailed), manager.session(echo_endpoint(server)):
            pass
        with manager.session(echo_endpoint(server)) as session:
            server.disconnect()
            with pytest.raises(errors.ConnectionFailed, match="1001"):
                next(session)
        with pytest.raises(errors.ConfigurationError):
            manager.session("http://127.0.0.1:9/v1")
