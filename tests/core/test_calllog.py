"""The call log: every call is in the file, whole, and no call waits for it."""

from __future__ import annotations

import asyncio
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
from spanwire import calllog
from spanwire.calllog import CallLog
from spanwire.errors import ConfigurationError
from spanwire.timeline import CallRecord, Timeline
from tests.support import chat, hello, run, serving

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
#: Whatever is waited for is there long before.
SEEN_S = 20.0


def timeline(model: str = "m", total_s: float = 0.25) -> Timeline:
    record = CallRecord(1, operation="chat", model=model, endpoint="127.0.0.1:8000", transport="sse")
    record.end_ns = 1 + int(total_s * 1e9)
    return Timeline(record)


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes()
    assert text == b"" or text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def until(condition: Any) -> None:
    end_s = time.monotonic() + SEEN_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def program(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import os, sys, spanwire\nfrom spanwire.calllog import CallLog\nfrom tests.core.test_calllog import timeline\n"
    )
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-W",
            "ignore:This process:DeprecationWarning",
            "-c",
            head + textwrap.dedent(text),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
    )


# --- what is in it ------------------------------------------------------------------------------------------------------


def test_each_call_is_a_line_when_the_manager_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    before_s = time.time()

    async def body() -> list[dict[str, Any]]:
        async with spanwire.ConnectionManager(plugins=[CallLog(path)]) as manager:
            found = []
            for model in ("a", "b"):
                reply = await manager.complete(server.url, chat(model))
                assert reply.timeline is not None
                found.append(reply.timeline.to_dict())
            return found

    with serving(hello()) as server:
        expected = run(body)
    written = lines(path)
    for line in written:
        assert before_s <= line["started_unix_s"] <= time.time()
    for line in (*written, *expected):
        line.pop("started_unix_s", None)
    assert written == expected


def test_the_synchronous_manager_too(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with serving(hello()) as server, spanwire.SyncConnectionManager(plugins=[CallLog(path)]) as manager:
        manager.complete(server.url, chat())
    assert [line["outcome"] for line in lines(path)] == ["completed"]


def test_no_key_no_header_and_no_content_gets_in(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with serving(hello()) as server, spanwire.SyncConnectionManager(plugins=[CallLog(path)]) as manager:
        endpoint = spanwire.Endpoint(
            server.url, api_key="sk-secret-1", headers={"x-team": "secret-2"}, query={"token": "secret-3"}
        )
        call = spanwire.Call.chat("m", [{"role": "user", "content": "secret-4"}])
        reply = manager.complete(endpoint, call)
    assert reply.text
    text = path.read_text()
    assert "secret" not in text
    assert reply.text not in text


def test_a_call_that_failed_is_there_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with spanwire.SyncConnectionManager(plugins=[CallLog(path)]) as manager:
        endpoint = spanwire.Endpoint("http://127.0.0.1:1/v1", retries=spanwire.Retries(max_attempts=1))
        with pytest.raises(spanwire.SpanwireError):
            manager.complete(endpoint, chat())
    (line,) = lines(path)
    assert line["outcome"] == "error"
    assert line["attempts"][-1]["error_type"] == "ConnectionFailed"


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    for model in ("first", "second"):
        log = CallLog(path)
        log.call_ended(timeline(model))
        assert log.flush()
    assert [line["model"] for line in lines(path)] == ["first", "second"]


def test_what_cannot_be_written_as_json_costs_no_other_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = CallLog(tmp_path / "calls.jsonl")
    for model in ("before", "half a pair \ud800", "after"):
        log.call_ended(timeline(model))
    assert log.flush()
    assert [line["model"] for line in lines(log.path) if "model" in line] == ["before", "after"]
    assert log.dropped == 1
    assert "could not be written" in caplog.text


# --- by the environment -------------------------------------------------------------------------------------------------


def test_by_the_environment_alone_and_without_closing_anything(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with serving(hello()) as server:
        done = program(
            """
            import asyncio
            call = spanwire.Call.chat("m", [{"role": "user", "content": "x"}])
            spanwire.default_sync_manager().complete(sys.argv[1], call)
            asyncio.run(spanwire.ConnectionManager().complete(sys.argv[1], call))  # one file for both
            """,
            server.url,
            SPANWIRE_CALL_LOG=str(path),
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["outcome"] for line in lines(path)] == ["completed"] * 2


def test_a_path_that_cannot_be_written_stops_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPANWIRE_CALL_LOG", str(tmp_path / "no" / "such" / "folder.jsonl"))
    with serving(hello()) as server:
        for _ in range(2):
            with spanwire.SyncConnectionManager() as manager:
                assert manager.complete(server.url, chat()).text
    (record,) = [record for record in caplog.records if record.name == "spanwire.calllog"]
    assert record.levelno == logging.ERROR
    assert "has no effect" in record.getMessage()
    assert "No such file" in record.getMessage()


def test_a_program_that_has_a_log_of_that_file_does_not_write_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calls.jsonl"
    monkeypatch.setenv("SPANWIRE_CALL_LOG", str(path))
    with serving(hello()) as server, spanwire.SyncConnectionManager(plugins=[CallLog(path)]) as manager:
        manager.complete(server.url, chat())
    assert len(lines(path)) == 1


def test_without_the_variable_nothing_of_it_is_loaded() -> None:
    done = program(
        "sys.modules.pop('spanwire.calllog'); spanwire.ConnectionManager(); print('spanwire.calllog' in sys.modules)"
    )
    assert done.stdout == "False\n"


# --- bad settings -------------------------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"folder.jsonl' cannot be written: No such file"):
        CallLog(tmp_path / "no" / "folder.jsonl")
    with pytest.raises(ConfigurationError, match="directory"):
        CallLog(tmp_path)
    with pytest.raises(ConfigurationError, match="max_waiting=0"):
        CallLog(tmp_path / "x", max_waiting=0)


# --- threads, processes, exits ------------------------------------------------------------------------------------------


def test_many_threads(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "calls.jsonl")

    def work(name: str) -> None:
        for number in range(300):
            log.call_ended(timeline(f"{name}-{number}"))

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.flush(SEEN_S)
    assert log.dropped == 0
    models = [line["model"] for line in lines(log.path)]
    assert len(models) == 1800
    assert set(models) == {f"{a}-{b}" for a in range(6) for b in range(300)}


def test_several_processes_write_whole_lines_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    work = "log = CallLog(sys.argv[1])\nfor n in range(400): log.call_ended(timeline(f'{os.getpid()}-' + 'x' * (n % 200)))\n"
    head = "import os, sys\nfrom spanwire.calllog import CallLog\nfrom tests.core.test_calllog import timeline\n"
    processes = [
        subprocess.Popen([sys.executable, "-c", head + work, str(path)], cwd=Path(__file__).parents[2])
        for _ in range(3)
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(lines(path)) == 1200


@needs_fork
def test_a_fork_writes_each_call_once(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    done = program(
        """
        log = CallLog(sys.argv[1])
        for number in range(50):
            log.call_ended(timeline(f"parent-{number}"))  # most of them wait when it forks
        child = os.fork()
        for number in range(50):
            log.call_ended(timeline(f"{'parent-late' if child else 'child'}-{number}"))
        if not child:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """,
        str(path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    models = [line["model"] for line in lines(path)]
    assert len(models) == len(set(models)) == 150


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=needs_fork)])
def test_workers_of_multiprocessing(tmp_path: Path, method: str) -> None:
    """They end by os._exit, after multiprocessing's own finalizers alone."""
    path = tmp_path / "calls.jsonl"
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing, sys
            from spanwire.calllog import CallLog
            from tests.core.test_calllog import timeline
            def work():
                CallLog(sys.argv[1]).call_ended(timeline("worker"))
            if __name__ == "__main__":
                worker = multiprocessing.get_context({method!r}).Process(target=work)
                worker.start()
                worker.join()
                sys.exit(worker.exitcode)
            """
        )
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["model"] for line in lines(path)] == ["worker"]


def test_a_call_that_ends_while_the_process_does(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    code = """
import atexit, sys
atexit.register(lambda: log.call_ended(timeline("last")))  # before the log's own: it runs after that
from spanwire.calllog import CallLog
from tests.core.test_calllog import timeline
log = CallLog(sys.argv[1])
log.call_ended(timeline("first"))
"""
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["model"] for line in lines(path)] == ["first", "last"]


def test_a_manager_that_is_closed_while_the_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with serving(hello()) as server:
        done = program(
            """
            import asyncio, atexit
            manager = spanwire.ConnectionManager(plugins=[CallLog(sys.argv[2])])
            atexit.register(lambda: asyncio.run(manager.aclose()))
            asyncio.run(manager.complete(sys.argv[1], spanwire.Call.chat("m", [{"role": "user", "content": "x"}])))
            """,
            server.url,
            str(path),
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(lines(path)) == 1


def test_the_thread_ends_when_nothing_comes_and_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calllog, "_IDLE_S", 0.01)
    log = CallLog(tmp_path / "calls.jsonl")
    for number in range(5):
        log.call_ended(timeline(str(number)))
        assert log.flush()
        until(lambda: log._thread is None)
    assert log.flush()  # with nothing to do it starts none
    assert log._thread is None
    assert [line["model"] for line in lines(log.path)] == ["0", "1", "2", "3", "4"]


def test_nothing_is_lost_between_an_end_and_a_start_of_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calllog, "_IDLE_S", 0.0001)
    monkeypatch.setattr(calllog, "_GATHER_S", 0.0)
    log = CallLog(tmp_path / "calls.jsonl")
    for number in range(1000):
        log.call_ended(timeline(str(number)))
        if number % 3 == 0:
            time.sleep(0.0001)
    assert log.flush(SEEN_S)
    assert sorted(int(line["model"]) for line in lines(log.path)) == list(range(1000))


# --- disks --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_disk_that_stalls_costs_lines_and_never_time(tmp_path: Path) -> None:
    """A pipe that nobody empties is such a disk."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        log = CallLog(path, max_waiting=100)
        sent = 0
        end_s = time.monotonic() + SEEN_S
        stalled = False
        while not stalled:  # from some call on the pipe is full
            for _ in range(20):
                log.call_ended(timeline(str(sent)))
                sent += 1
            stalled = not log.flush(0.5)
            assert time.monotonic() < end_s
        assert log.dropped == 0
        while not log.dropped:
            log.call_ended(timeline(str(sent)))
            sent += 1
        text = b""
        os.set_blocking(reader, False)
        while b'"dropped"' not in text:
            try:
                text += os.read(reader, 65536)
            except BlockingIOError:
                time.sleep(0.005)
                log.call_ended(timeline("late")) if log._waiting.empty() else None
            assert time.monotonic() < end_s
        found = [json.loads(line) for line in text[: text.rindex(b"\n")].splitlines()]
        dropped = next(line["dropped"] for line in found if "dropped" in line)
        on_time = [line for line in found if line.get("model", "late") != "late"]
        assert len(on_time) + dropped == sent
    finally:
        os.close(reader)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = CallLog("/dev/full")
    for _ in range(3):
        log.call_ended(timeline())
        assert log.flush()
    assert log.dropped == 3
    assert [record.getMessage() for record in caplog.records if record.name == "spanwire.calllog"] == [
        "the call log /dev/full cannot be written: No space left on device"
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of Unix")
def test_after_a_line_that_was_cut_off_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    done = program(
        """
        import resource
        log = CallLog(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        for number in range(10):
            log.call_ended(timeline(f"cut-{number}"))
        assert log.flush()
        assert 0 < log.dropped < 10, log.dropped
        print(10 - log.dropped)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.call_ended(timeline("whole"))
        """,
        str(path),
    )
    assert done.returncode == 0, done.stderr
    kept = int(done.stdout)
    text = path.read_text().splitlines()
    assert [json.loads(line)["model"] for line in text[:kept]] == [f"cut-{number}" for number in range(kept)]
    with pytest.raises(json.JSONDecodeError):
        json.loads(text[kept])
    assert [json.loads(line).get("model") or json.loads(line)["dropped"] for line in text[kept + 1 :]] == [
        "whole",
        10 - kept,
    ]


def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    log = CallLog(path)
    log.call_ended(timeline("old"))
    assert log.flush()
    path.rename(tmp_path / "calls.jsonl.1")
    log.call_ended(timeline("new"))
    assert log.flush()
    assert [line["model"] for line in lines(tmp_path / "calls.jsonl.1")] == ["old"]
    assert [line["model"] for line in lines(path)] == ["new"]


def test_the_loop_goes_on_while_a_manager_waits_for_its_log(tmp_path: Path) -> None:
    class Slow:
        def __init__(self) -> None:
            self.go = threading.Event()

        @spanwire.hookimpl
        def register_observers(self) -> list[Any]:
            return [self]

        def call_ended(self, _timeline: Timeline) -> None:
            pass

        def flush(self) -> None:
            assert self.go.wait(SEEN_S)

    async def body() -> None:
        slow = Slow()
        manager = spanwire.ConnectionManager(plugins=[slow])
        closing = asyncio.create_task(manager.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        slow.go.set()  # from the loop, which is not held up
        await closing

    run(body)


def test_an_observer_that_cannot_be_flushed_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        @spanwire.hookimpl
        def register_observers(self) -> list[Any]:
            return [self]

        def call_ended(self, _timeline: Timeline) -> None:
            pass

        def flush(self) -> None:
            raise OSError("no")

    async def body() -> None:
        await spanwire.ConnectionManager(plugins=[Broken()]).aclose()

    run(body)
    assert "could not be flushed" in caplog.text


def test_a_worker_of_multiprocessing_registers_a_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each thread: a worker with a call now and then would register one every few seconds, for ever."""
    from multiprocessing import util

    monkeypatch.setattr("multiprocessing.parent_process", object)
    monkeypatch.setattr(calllog, "_IDLE_S", 0.001)
    registry: dict[Any, Any] = {}
    monkeypatch.setattr(util, "_finalizer_registry", registry)
    log = CallLog(tmp_path / "calls.jsonl")
    for _ in range(3):
        log.call_ended(timeline())
        until(lambda: log._thread is None)
    assert log.flush()
    assert len(lines(log.path)) == 3
    assert len(registry) == 1
