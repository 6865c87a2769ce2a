"""SPANWIRE_WATERFALL: what print(timeline) shows, of every call, and nothing else; no call is the worse for it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import spanwire
from spanwire.callprint import CallPrint, _is_on
from spanwire.timeline import CallRecord, Timeline
from tests.support import chat, hello, run, serving

ROOT = Path(__file__).parents[2]


def timeline(model: str = "m") -> Timeline:
    record = CallRecord(1, operation="chat", model=model, endpoint="127.0.0.1:8000", transport="sse")
    record.end_ns = 250_000_001
    return Timeline(record)


def program(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text), *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"} | environment,
        cwd=ROOT,
    )


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANWIRE_WATERFALL", "1")


# --- what is shown ------------------------------------------------------------------------------------------------------


def test_by_the_environment_alone_every_call_of_the_process_is_shown() -> None:
    with serving(hello()) as server:
        done = program(
            """
            import asyncio, json, sys, spanwire
            call = spanwire.Call.chat("m", [{"role": "user", "content": "x"}])
            shown = [str(spanwire.default_sync_manager().complete(sys.argv[1], call).timeline)]
            async def main():
                async with spanwire.ConnectionManager() as manager:
                    shown.append(str((await manager.complete(sys.argv[1], call)).timeline))
                    async with manager.stream(sys.argv[1], call) as stream:
                        async for _ in stream:
                            pass
                    shown.append(str(stream.timeline))
            asyncio.run(main())
            json.dump(shown, sys.stdout)
            """,
            server.url,
            SPANWIRE_WATERFALL="1",
        )
    shown = json.loads(done.stdout)
    assert len(shown) == 3
    assert "\nhandshake tcp  " in shown[0]
    assert (done.returncode, done.stderr) == (0, "".join(f"{one}\n" for one in shown))


@pytest.mark.usefixtures("on")
def test_a_call_that_failed_or_was_left_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    with spanwire.SyncConnectionManager() as manager:
        endpoint = spanwire.Endpoint("http://127.0.0.1:1/v1", retries=spanwire.Retries(max_attempts=1))
        with pytest.raises(spanwire.SpanwireError) as failed:
            manager.complete(endpoint, chat())
        assert capsys.readouterr().err == f"{failed.value.timeline}\n"
        with serving(hello()) as server:
            with manager.stream(server.url, chat()) as stream:
                next(iter(stream))
            assert capsys.readouterr().err == f"{stream.timeline}\n"


@pytest.mark.usefixtures("on")
def test_no_key_no_header_and_no_content_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(hello()) as server, spanwire.SyncConnectionManager() as manager:
        endpoint = spanwire.Endpoint(
            server.url, api_key="sk-secret-1", headers={"x-team": "secret-2"}, query={"token": "secret-3"}
        )
        reply = manager.complete(endpoint, spanwire.Call.chat("m", [{"role": "user", "content": "secret-4"}]))
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"{reply.timeline}\n")
    assert "secret" not in err
    assert reply.text
    assert reply.text not in err


@pytest.mark.usefixtures("on")
def test_beside_a_plugin_that_watches_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(hello()) as server:
        for _ in range(2):  # one object for all managers
            with spanwire.SyncConnectionManager(plugins=[CallPrint()]) as manager:
                manager.complete(server.url, chat())
            assert capsys.readouterr().err.count("chat m ") == 2  # who gives one himself asks for two


# --- on and off ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "0", "false", "No", " off "])
def test_off_nobody_is_told(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no observer a call does not even make its timeline for one."""
    monkeypatch.delenv("SPANWIRE_WATERFALL", raising=False)
    if value is not None:
        monkeypatch.setenv("SPANWIRE_WATERFALL", value)
    manager = spanwire.ConnectionManager()
    assert not manager.registry.has_observers
    run(manager.aclose)


def test_without_the_variable_nothing_of_it_is_loaded() -> None:
    code = "import sys, spanwire; spanwire.ConnectionManager(); print('spanwire.callprint' in sys.modules)"
    assert program(code).stdout == "False\n"


def test_a_value_that_is_neither_yes_nor_no_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    _is_on.cache_clear()
    monkeypatch.setenv("SPANWIRE_WATERFALL", "calls.txt")
    with serving(hello()) as server:
        for _ in range(2):
            with spanwire.SyncConnectionManager() as manager:
                assert manager.complete(server.url, chat()).text
    (record,) = [record for record in caplog.records if record.name == "spanwire.callprint"]
    assert (record.levelno, record.getMessage()) == (
        logging.ERROR,
        "SPANWIRE_WATERFALL=calls.txt has no effect: 1 prints every call's waterfall, 0 none",
    )
    assert capsys.readouterr().err == ""


# --- threads, forks, streams that are broken ----------------------------------------------------------------------------


class Narrow(io.TextIOBase):
    """Takes a few characters, and lets other threads run."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        for begin in range(0, len(text), 50):
            self.pieces.append(text[begin : begin + 50])
            time.sleep(0)
        return len(text)


def test_waterfalls_of_many_threads_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Narrow()
    monkeypatch.setattr(sys, "stderr", stream)
    printing = CallPrint()
    models = [f"{thread}-{number}" for thread in range(6) for number in range(30)]

    def work(mine: list[str]) -> None:
        for model in mine:
            printing.call_ended(timeline(model))

    threads = [threading.Thread(target=work, args=(models[begin : begin + 30],)) for begin in range(0, 180, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = "".join(stream.pieces)
    for model in models:
        whole = f"{timeline(model)}\n"
        assert text.count(whole) == 1
        text = text.replace(whole, "")
    assert text == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_the_child_of_a_fork_in_the_middle_of_a_write_prints_as_well() -> None:
    done = program(
        """
        import os, sys, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        from spanwire import callprint
        from tests.core.test_callprint import timeline
        err, begun, go = sys.stderr, threading.Event(), threading.Event()
        class Held:
            def write(self, text):
                begun.set()
                go.wait()
                err.write(text)
            flush = staticmethod(err.flush)
        sys.stderr = Held()
        thread = threading.Thread(target=callprint._shared.call_ended, args=[timeline("parent")])
        thread.start()
        begun.wait()
        child = os.fork()
        if not child:
            sys.stderr = err
            callprint._shared.call_ended(timeline("child"))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go.set()
        thread.join()
        """
    )
    assert (done.returncode, done.stderr) == (0, f"{timeline('child')}\n{timeline('parent')}\n")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def unread() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("broken", [closed, unread, lambda: None])
def test_a_stderr_that_takes_nothing_costs_no_call_and_is_asked_again(
    broken: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later = io.StringIO()
    stream = broken()
    with serving(hello()) as server, spanwire.SyncConnectionManager() as manager:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            assert manager.complete(server.url, chat()).text
            patch.setattr(sys, "stderr", later)
            reply = manager.complete(server.url, chat())
    if stream is not None and not stream.closed:
        stream.close()
    assert later.getvalue() == f"{reply.timeline}\n"
    assert caplog.records == []


def test_an_encoding_without_bars_shows_them_as_pythons_own_stderr_does(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii", newline="\n") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        CallPrint().call_ended(timeline())
        monkeypatch.undo()
        assert raw.getvalue() == f"{timeline()}\n".encode("ascii", "backslashreplace")
