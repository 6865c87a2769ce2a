"""``spanwire jobs submit | watch | retry | export``, against the loopback server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spanwire_webhook.bulk_commands import _progress
from spanwire_webhook.loopback import SECRET, WebhookPart
from typer.testing import CliRunner, Result

from spanwire.cli.app import app
from spanwire.jobs.bulk import BulkCounts
from spanwire.jobs.sqlite import SQLiteStore
from spanwire.testing import LoopbackServer, Request, Script

_SECRETS = json.dumps({"secrets": {"generic": SECRET}})
HOOKS = ("--option", "receiver=127.0.0.1:0", "--option", f"receiver_options={_SECRETS}")


class Server:
    """Texts with ``bad`` in them fail, while ``fails``."""

    def __init__(self) -> None:
        self.part = WebhookPart()
        self.fails = True
        self.loopback = LoopbackServer(default=self.script, part=self.part)

    def script(self, request: Request) -> Script:
        call = json.loads(request.raw)
        bad = self.fails and "bad" in json.dumps(call)
        return Script(finish_reason="error") if bad else Script()

    @property
    def texts(self) -> list[str]:
        inputs = [job.call["input"] for job in self.part.jobs if job.state == "succeeded"]
        return sorted(text for one in inputs for text in ([one] if isinstance(one, str) else one))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with made.loopback:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows: list[Any] = [
        {"custom_id": f"t{number}", "url": "/v1/embeddings", "body": {"input": f"text {number}"}} for number in range(9)
    ]
    rows[4]["body"]["input"] = "bad"
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def run(path: Path, *arguments: str) -> Result:
    store = f"sqlite:///{path}/jobs.db"
    return CliRunner().invoke(app, ["jobs", *arguments], env={"SPANWIRE_STORE": store, "SPANWIRE_API_KEY": "sk-test"})


def read(path: Path) -> dict[str, Any]:
    return {row["custom_id"]: row for row in map(json.loads, path.read_text("utf-8").splitlines())}


def test_submit_again_retry_and_export(server: Server, file: Path, tmp_path: Path) -> None:
    url = server.loopback.url
    done = run(tmp_path, "submit", str(file), "--url", url, "-m", "e", "--shard", "4", *HOOKS, "--json")
    assert done.exit_code == 1, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["total"], counts["done"], counts["failed"], counts["found"]) == (9, 8, 1, 0)
    assert counts["group"].startswith("texts-")
    assert "line 5: ServerError" in done.stderr
    assert f"jobs retry {file}" in done.stderr
    assert len(server.texts) == 8

    again = run(tmp_path, "submit", str(file), "--url", url, "-m", "e", "--shard", "4", *HOOKS)
    assert again.exit_code == 1
    assert "9 of them in the store before" in again.stderr
    assert len(server.texts) == 8

    out = tmp_path / "out.jsonl"
    exported = run(tmp_path, "export", str(file), "-m", "e", "--shard", "4", "-o", str(out))
    assert exported.exit_code == 1
    assert "8 succeeded, 1 failed" in exported.stderr
    rows = read(out)
    assert list(rows) == [f"t{number}" for number in range(9)]
    assert rows["t4"]["error"]["message"] == "the script says that it fails"
    assert rows["t0"]["response"]["body"]["data"][0]["embedding"]
    failed = run(tmp_path, "export", str(file), "-m", "e", "--shard", "4", "--failed")
    assert [json.loads(line)["custom_id"] for line in failed.stdout.splitlines()] == ["t4"]

    server.fails = False
    mended = run(tmp_path, "retry", str(file), "-m", "e", "--shard", "4", "-o", str(out), *HOOKS)
    assert mended.exit_code == 0, mended.stderr
    assert not any(row["error"] for row in read(out).values())
    assert len(read(out)) == len(server.texts) == 9
    assert not list(tmp_path.glob(".out*"))


def test_detach_and_watch(server: Server, file: Path, tmp_path: Path) -> None:
    server.fails = False
    left = run(tmp_path, "submit", str(file), "--url", server.loopback.url, "-m", "e", "--detach", *HOOKS)
    assert left.exit_code == 0, left.stderr
    assert "9 of 9 submitted" in left.stderr
    watched = run(tmp_path, "watch", str(file), *HOOKS, "--json")
    assert watched.exit_code == 0, watched.stderr
    assert json.loads(watched.stdout)["jobs"] == {"succeeded": 1}
    assert run(tmp_path, "export", str(file), "-m", "e").exit_code == 0
    assert "tries the others apart" not in watched.stderr
    nothing = run(tmp_path, "export", str(file), "-m", "other")
    assert nothing.exit_code == 2
    assert "were --model" in nothing.stderr


def test_who_watches_is_told_how_one_bad_text_is_kept_from_the_others(
    server: Server, file: Path, tmp_path: Path
) -> None:
    arguments = [str(file), "--url", server.loopback.url, "-m", "e", *HOOKS]
    assert run(tmp_path, "submit", *arguments, "--detach").exit_code == 0
    watched = run(tmp_path, "watch", str(file), *HOOKS)
    assert watched.exit_code == 1
    assert "`spanwire jobs submit`, as before, tries the others apart" in watched.stderr
    assert "8 of 9 succeeded, 1 failed" in run(tmp_path, "submit", *arguments).stderr


def test_wrong_usage(file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input": "a", "model": "e"}\n{"input": 1}\n', "utf-8")
    refused = run(tmp_path, "submit", str(bad), "--url", "http://127.0.0.1:9")
    assert refused.exit_code == 2
    assert "line 2" in refused.stderr
    assert run(tmp_path, "submit", str(tmp_path / "none"), "--url", "http://127.0.0.1:9").exit_code == 2
    assert run(tmp_path, "submit", str(file)).exit_code == 2
    for arguments in (
        ["--option", "x"],
        ["--header", "x"],
        ["--api-key-env", "NOT_SET_ANYWHERE"],
        ["--dialect", "none"],
    ):
        found = run(tmp_path, "submit", str(file), "--url", "http://127.0.0.1:9", "-m", "e", *arguments)
        assert found.exit_code == 2, found.stderr
    for out in (file, tmp_path, tmp_path / "none" / "out"):  # told before anything is submitted
        found = run(tmp_path, "submit", str(file), "--url", "http://127.0.0.1:9", "-m", "e", "-o", str(out))
        assert found.exit_code == 2
        assert str(out) in found.stderr
    both = run(tmp_path, "submit", str(file), "--url", "http://127.0.0.1:9", "-m", "e", "--detach", "-o", "out")
    assert both.exit_code == 2
    assert "--detach has no results" in both.stderr
    SQLiteStore(tmp_path / "jobs.db").close()
    unknown = run(tmp_path, "watch", "no-such-group")
    assert unknown.exit_code == 2
    assert "give --url" in unknown.stderr
    assert run(tmp_path, "export", str(file), "-o", str(file), "--url", "http://127.0.0.1:9", "-m", "e").exit_code == 2


@pytest.mark.skipif(sys.platform == "win32", reason="has no pipes with a name")
def test_a_pipe_is_refused_and_not_taken_for_an_empty_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = run(tmp_path, "submit", str(tmp_path / "pipe"), "--url", "http://127.0.0.1:9", "-m", "e")
    assert refused.exit_code == 2
    assert "write it to a file first" in refused.stderr


def test_a_file_that_went_to_two_servers_is_asked_which(server: Server, file: Path, tmp_path: Path) -> None:
    """The group follows from the file alone: what the one server gave is not to be taken for what the other did."""
    server.fails = False
    with LoopbackServer(part=WebhookPart()) as other:
        for url in (server.loopback.url, other.url):
            assert run(tmp_path, "submit", str(file), "--url", url, "-m", "e", *HOOKS).exit_code == 0
        for command in ("export", "retry", "watch"):
            unclear = run(tmp_path, command, str(file), *(() if command == "watch" else ("-m", "e")))
            assert unclear.exit_code == 2
            assert "say which" in unclear.stderr
            assert str(other.port) in unclear.stderr
        found = run(tmp_path, "export", str(file), "-m", "e", "--url", other.url)
        assert found.exit_code == 0, found.stderr
        assert run(tmp_path, "watch", str(file), "--url", other.url, *HOOKS).exit_code == 0
        unknown = run(tmp_path, "retry", str(file), "-m", "e", "--url", "http://127.0.0.1:9/v1", *HOOKS)
        assert unknown.exit_code == 2
        assert "alone: give both" in unknown.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_ctrl_c_says_how_to_go_on(file: Path, tmp_path: Path) -> None:
    part = WebhookPart()
    with LoopbackServer(default=lambda request: Script(prefill_s=600), part=part) as server:
        command = [sys.executable, "-c", "from spanwire.cli import main; main()", "jobs", "submit", str(file)]
        environ = {**os.environ, "SPANWIRE_STORE": f"sqlite:///{tmp_path}/jobs.db"}
        process = subprocess.Popen(
            [*command, "--url", server.url, "-m", "e", "--shard", "4"], stderr=subprocess.PIPE, text=True, env=environ
        )
        with part._record.changed:  # type: ignore[union-attr]
            assert part._record.changed.wait_for(lambda: part._record.counts["jobs"] == 3, 30)  # type: ignore[union-attr]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command submits what is missing" in said
    assert "Traceback" not in said


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with _progress("texts") as show:
        show(BulkCounts(10, 5, 3, 1, 0, 5))
    assert "1 failed" in capsys.readouterr().err
