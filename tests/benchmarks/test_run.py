"""The benchmarks run. What they measure is not looked at: that depends on who else uses the machine."""

from pathlib import Path

import pytest

from benchmarks import peers, processes, reference, results, run
from benchmarks.figures import Measured, Round
from benchmarks.workloads import WORKLOADS, Workload
from tests.benchmarks.support import measured
from tests.benchmarks.test_reference import full


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


def go(json_file: Path, *arguments: str, known: Path | None = None) -> int:
    return run.main([*arguments, f"--json={json_file}"], known or json_file.with_name("reference.json"))


#: Three of one kind: that of the fewest streams does for all.
_AGAIN = {"thousand/250", "thousand/500", "thousand/1000"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in _AGAIN else []) for name in WORKLOADS]
)
def test_every_workload_runs(name: str, json_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = go(json_file, name, "--clients=raw,spanwire", "--rounds=1", "--quick")
    output = capsys.readouterr()
    assert status == 0, output.err
    row, document = WORKLOADS[name], results.read(json_file)
    assert document.quick
    assert document.commit
    assert document.versions["msgspec"]
    found = {one.client: one for one in document.measured if one.workload == name}
    assert list(found) == ["raw", "spanwire"]
    for one in found.values():
        (figures,) = one.rounds
        assert row.figure in figures
        assert not row.measure or figures["rss_mib"] > 1
        assert f"| {row.name} " in output.out
    assert {one.workload for one in document.measured} == {name, *row.needs}


def test_calls_in_a_row_share_a_connection(json_file: Path) -> None:
    assert go(json_file, "reuse", "--clients=raw,spanwire", "--rounds=1", "--quick") == 0
    assert [one.values() for one in results.read(json_file).measured] == [[1], [1]]


def test_both_loops(json_file: Path) -> None:
    pytest.importorskip("uvloop")
    assert go(json_file, "burst", "reuse", "--clients=raw", "--rounds=1", "--quick", "--loop=both") == 0
    found = [(one.workload, one.loop) for one in results.read(json_file).measured]
    assert found == [("burst", "asyncio"), ("burst", "uvloop"), ("reuse", "asyncio")]


def test_stream_that_is_not_read_on_costs_little_and_the_others_go_on(json_file: Path) -> None:
    """19 MiB wait for it: whoever takes them all in grows by more than that."""
    assert go(json_file, "backpressure", "--clients=spanwire", "--rounds=1", "--quick") == 0
    (one,) = results.read(json_file).measured
    assert one.values()[0] < 8


def test_client_that_is_not_installed_is_skipped(
    json_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.PEERS, "httpx", peers.PEERS["httpx"]._replace(package="no_such_package"))
    assert go(json_file, "reuse", "--clients=httpx,raw", "--rounds=1", "--quick") == 0
    output = capsys.readouterr()
    assert "httpx is skipped: no_such_package is not installed" in output.err
    assert "httpx" not in output.out
    assert "1.00 x raw" in output.out
    assert go(json_file, "reuse", "--clients=httpx", "--quick") == 1


def test_client_that_fails_is_shown_as_failed(
    json_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.PEERS, "unheard-of", peers.PEERS["raw"])  # not in the client's own process
    assert go(json_file, "reuse", "--clients=unheard-of,raw", "--rounds=2", "--quick") == 1
    output = capsys.readouterr()
    assert output.err.count("unheard-of failed in reuse: ") == 1  # and is left out of the second round
    assert "failed" in output.out
    broken, good = results.read(json_file).measured
    assert (broken.rounds, len(good.rounds)) == ([], 2)
    assert "invalid choice: 'unheard-of'" in (broken.failed or "")


def test_client_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIMIT_S", 0.01)
    runner = processes.Runner("raw", "raw")
    with processes.serving(None) as port, pytest.raises(processes.Failed, match=r"not done after 0\.01 s"):
        processes.measure(runner, "burst", port, loop="asyncio", core=None, quick=True)


def test_client_without_a_way_to_follow_tokens_is_left_out(
    json_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.PEERS, "litellm", peers.PEERS["raw"])
    assert go(json_file, "backpressure", "--clients=litellm", "--quick") == 1
    err = capsys.readouterr().err
    assert "backpressure is not measured for litellm" in err
    assert "None of these clients" in err


def pretend(monkeypatch: pytest.MonkeyPatch, found: list[Measured]) -> None:
    """Have rounds come out as given."""

    def rounds_of(row: Workload, loop: str, runners: object, **_: object) -> list[Measured]:
        return [one for one in found if one.workload == row.name]

    monkeypatch.setattr(run, "rounds_of", rounds_of)


@pytest.mark.parametrize(
    ("now", "status", "said"),
    [
        (full(2.0), 0, "within 15%"),
        (full(2.6), 1, "Regression: burst on uvloop: spanwire takes 2.60 x raw, 2.00 before (+30%)"),
        (full(2.6, noise=0.4), 0, "too wide to judge: more rounds"),
    ],
)
def test_ratio_that_grew_fails_the_run(
    now: list[Measured],
    status: int,
    said: str,
    json_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, full(2.0))
    known = json_file.with_name("reference.json")
    assert go(json_file, known=known) == 0
    assert "`make bench-reference` writes one" in capsys.readouterr().err
    assert reference.main([str(json_file)], known) == 0
    pretend(monkeypatch, now)
    capsys.readouterr()
    assert go(json_file, known=known) == status
    output = capsys.readouterr()
    assert said in output.out + output.err
    assert go(json_file, "--quick", known=known) == 0  # never fails on figures


def test_damaged_reference_fails_the_run(
    json_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, [measured("burst", "raw", [1.0]), measured("burst", "spanwire", [2.0])])
    known = json_file.with_name("reference.json")
    known.write_text("[]", encoding="utf-8")
    assert go(json_file, "burst", known=known) == 1
    assert "is no reference" in capsys.readouterr().err


def test_results_go_where_git_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.parse([]).json == results.LATEST
    assert run.parse(["--quick"]).json != results.LATEST  # nor take the place of those that mean something
    assert results.LATEST.is_relative_to(results.ROOT / ".bench")
    assert ".bench/" in (results.ROOT / ".gitignore").read_text(encoding="utf-8").split()


def test_all_is_all() -> None:
    given = run.parse(["all", "--clients=all"])
    assert [row.name for row in given.workloads] == list(WORKLOADS)
    assert given.clients == list(peers.PEERS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["burts"], "no workload 'burts'"),
        (["--clients", "requests"], "no client 'requests'"),
        (["--rounds", "0"], "at least 1"),
        (["--loop", "trio"], "invalid choice: 'trio'"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert message in capsys.readouterr().err


def test_uvloop_that_is_not_there_is_no_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "has_uvloop", lambda: False)
    with pytest.raises(SystemExit):
        run.parse(["--loop=both"])
    assert "uvloop is not installed here" in capsys.readouterr().err
    assert run.loops_of(WORKLOADS["burst"], None) == ["asyncio"]


def test_rounds_go_through_all_runners_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def measure(runner: processes.Runner, *_: object, **__: object) -> Round:
        order.append(runner.label)
        return {"connections": 1}

    monkeypatch.setattr(processes, "measure", measure)
    runners = [processes.Runner(label, "raw") for label in "ABC"]
    processes.rounds_of(WORKLOADS["reuse"], "asyncio", runners, rounds=2, quick=True)
    assert order == list("ABCABC")
