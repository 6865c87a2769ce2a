import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from spanwire.cli.report import moment
from spanwire.report.page import GENERATOR
from spanwire.testing import LoopbackServer
from tests.core.report import traffic

from .conftest import MAIN, Spanwire


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def log(path: str = "calls.jsonl", n: int = 200) -> str:
    Path(path).write_text("".join(json.dumps(timeline) + "\n" for timeline in traffic.timelines(n)))
    return path


# --- what goes well ---------------------------------------------------------------------------------------------------


def test_a_page_and_three_lines(spanwire: Spanwire) -> None:
    found = spanwire("report", log())
    assert (found.exit_code, found.stderr) == (0, "")
    where, *lines = found.stdout.splitlines()
    assert where.startswith("report.html (")
    assert len(lines) == 3
    assert lines[0].startswith("200 calls to 3 models at 2 endpoints, from 2026-09-21 14:13:20 UTC to ")
    assert lines[1].startswith("time to first token ")
    assert " on a re-used connection (" in lines[2]
    assert GENERATOR in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1049, "1,049"), (1_234_567, "1,234,567"), (417, "417"), (46, "46"), (3, "3")]
)
def test_a_speed_is_written_out(spanwire: Spanwire, tokens: int, expected: str) -> None:
    (timeline,) = traffic.timelines(1)
    timeline |= {"last_chunk_s": timeline["first_content_s"] + 1, "usage": {"output_tokens": tokens}}
    Path("calls.jsonl").write_text(json.dumps(timeline) + "\n")
    (_, _, times, _) = spanwire("report", "calls.jsonl").stdout.splitlines()
    assert times.endswith(f"; {expected} tokens/s")


def test_what_a_program_recorded_without_a_change(spanwire: Spanwire, server: LoopbackServer) -> None:
    code = (
        "import spanwire, sys\n"
        "call = spanwire.Call.chat('m', [{'role': 'user', 'content': 'x'}])\n"
        "for _ in range(3): spanwire.default_sync_manager().complete(sys.argv[1], call)\n"
    )
    environment = os.environ | {"SPANWIRE_CALL_LOG": "calls.jsonl"}
    subprocess.run([sys.executable, "-c", code, server.url], env=environment, check=True, timeout=60)
    found = spanwire("report", "calls.jsonl", "-o", "page.html")
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout.splitlines()[1].startswith("3 calls to 1 model at 1 endpoint, from ")
    assert found.stdout.splitlines()[3] == "100 % completed; 67 % on a re-used connection (1 handshake)"
    assert f"127.0.0.1:{server.port}" in Path("page.html").read_text()


def test_the_file_of_the_environment_is_the_default(spanwire: Spanwire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANWIRE_CALL_LOG", log("mine.jsonl", 30))
    found = spanwire("report")
    assert found.exit_code == 0
    assert "30 calls" in found.stdout


def test_the_shape_of_the_json(spanwire: Spanwire) -> None:
    found = spanwire("report", log(), "--json")
    assert (found.exit_code, found.stderr) == (0, "")
    assert not Path("report.html").exists()
    data = json.loads(found.stdout)
    assert data["schema"] == 1
    assert (data["calls"], data["files"], data["bad"]) == (200, {"calls.jsonl": 200}, [])
    assert all(isinstance(text, str) for text in data["findings"])
    every = data["selections"][0]
    assert [every[name] for name in ("endpoint", "model", "outcome")] == [None, None, None]
    assert {"n", "min", "mean", "p50", "p95", "p99", "max"} == set(every["times"]["total"])
    assert sum(row["sum_s"] for row in every["rows"] if not row["part"]) == pytest.approx(every["sum_s"])
    names = {(s["endpoint"], s["model"]) for s in data["selections"]}
    assert ("10.0.3.7:8000", "mixtral-8x22b") in names
    assert spanwire("report", "calls.jsonl", "--json", "-o", "too.html").exit_code == 0
    assert Path("too.html").exists()


def test_from_standard_input_to_standard_output(tmp_path: Path) -> None:
    text = Path(log()).read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "report", "-", "-o", "-"], input=text, capture_output=True, timeout=60, check=True
    )
    assert done.stderr == b""
    assert done.stdout.startswith(b"<!doctype html>")
    assert done.stdout.endswith(b"</html>\n")
    assert not Path("report.html").exists()


def test_a_window_of_time(spanwire: Spanwire) -> None:
    log(n=600)  # over six hours from 14:13:20
    found = spanwire("report", "calls.jsonl", "--since", "2026-09-21T15:13:20", "--until", "2026-09-21T18:13:20+02:00")
    assert found.exit_code == 0
    calls = int(found.stdout.splitlines()[1].split()[0])
    assert 98 <= calls <= 102
    found = spanwire("report", "calls.jsonl", "--since", "2030-01-01")
    assert found.exit_code == 1
    assert found.stderr == "spanwire: nothing to report: none of 600 calls began since 2030-01-01 00:00:00 UTC\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-02", 86_400.0), ("1970-01-01T01:00", 3600.0), ("1970-01-01T01:00+01:00", 0.0), ("1970-01-01T00:00:01Z", 1.0),
        ("2h", 1e6 - 7200), ("90 min", 1e6 - 5400), ("1.5d", 1e6 - 129_600), ("30s", 1e6 - 30), (" 1w ", 1e6 - 604_800),
    ],
)  # fmt: skip
def test_moments(text: str, seconds: float) -> None:
    assert moment(text, 1e6, "--since") == seconds


@pytest.mark.parametrize("text", ["", "soon", "2h ago", "-2h", "13:00", "2026-13-01", "0001-01-01T00:00+23:59"])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no time"):
        moment(text, 1e6, "--since")


# --- what does not ------------------------------------------------------------------------------------------------------


def test_lines_that_cannot_be_read_are_told(spanwire: Spanwire) -> None:
    with Path(log()).open("a") as file:
        file.write("one\ntwo\n")
    found = spanwire("report", "calls.jsonl")
    assert found.exit_code == 0
    assert found.stderr == "spanwire: 2 lines could not be read, the first is calls.jsonl:201: no JSON: 'one'\n"
    assert "200 calls" in found.stdout


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "none.jsonl",
            None,
            "none.jsonl: No such file or directory; SPANWIRE_CALL_LOG=FILE makes one, of a program's calls",
        ),
        ("empty.jsonl", "", "nothing to report: no call in empty.jsonl"),
        ("foreign.txt", "hello\n", "nothing to report: foreign.txt:1: no JSON: 'hello'; a report is made of call logs"),
    ],
)
def test_nothing_to_report(spanwire: Spanwire, name: str, content: str | None, message: str) -> None:
    if content is not None:
        Path(name).write_text(content)
    found = spanwire("report", name)
    assert (found.exit_code, found.stdout) == (2 if content is None else 1, "")
    assert found.stderr.startswith(f"spanwire: {message}")
    assert found.stderr.count("\n") == 1
    assert not Path("report.html").exists()


def test_without_files_it_says_how_to_make_one(spanwire: Spanwire) -> None:
    found = spanwire("report")
    assert found.exit_code == 2
    assert "SPANWIRE_CALL_LOG=calls.jsonl" in " ".join(found.stderr.split())


def test_it_writes_over_reports_and_nothing_else(spanwire: Spanwire) -> None:
    log()
    for _ in range(2):
        assert spanwire("report", "calls.jsonl").exit_code == 0
    Path("notes.html").write_text("<p>mine")
    found = spanwire("report", "calls.jsonl", "-o", "notes.html")
    assert found.exit_code == 2
    assert "is no report of spanwire" in found.stderr
    assert Path("notes.html").read_text() == "<p>mine"
    assert spanwire("report", "calls.jsonl", "-o", "notes.html", "--force").exit_code == 0
    assert GENERATOR in Path("notes.html").read_text()
    before = Path("calls.jsonl").read_bytes()
    found = spanwire("report", "calls.jsonl", "-o", "./calls.jsonl", "--force")
    assert found.exit_code == 2
    assert "is among the files to read" in found.stderr
    assert Path("calls.jsonl").read_bytes() == before


def test_where_it_cannot_be_written(spanwire: Spanwire) -> None:
    found = spanwire("report", log(), "-o", "no/folder.html")
    assert (found.exit_code, found.stderr) == (
        2,
        "spanwire: no/folder.html cannot be written: No such file or directory\n",
    )
    Path("taken").mkdir()
    found = spanwire("report", "calls.jsonl", "-o", "taken")
    assert found.exit_code == 2
    assert "cannot be written" in found.stderr


def test_the_help_has_examples_in_80_columns(spanwire: Spanwire) -> None:
    found = spanwire("report", "--help")
    assert found.exit_code == 0
    assert "SPANWIRE_CALL_LOG=calls.jsonl python my_program.py" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80
