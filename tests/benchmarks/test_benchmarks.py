"""The benchmarks run. What they measure is not looked at: that depends on who else uses the machine."""

import json
from pathlib import Path

import pytest

from benchmarks import clients, run


def test_run_and_clients_know_the_same_names() -> None:
    assert run.PACKAGES.keys() == clients.CLIENTS.keys()
    assert run.FIGURES.keys() == clients.LOADS.keys()


def test_every_kind_of_workload_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workloads = ["burst", "latency", "unary", "reuse"]  # `paced` and `crowd` are `burst` with patience
    file = tmp_path / "results.json"
    status = run.main([*workloads, "--clients=raw,spanwire", "--rounds=1", "--quick", f"--json={file}"])
    output = capsys.readouterr()
    assert status == 0, output.err
    lines = output.out.splitlines()
    assert len(lines) == 2 + 2 * len(workloads)
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    results = json.loads(file.read_text(encoding="utf-8"))["workloads"]
    for workload in workloads:
        for client in ("raw", "spanwire"):
            (figures,) = results[workload][client]
            assert figures[run.FIGURES[workload][0]] > 0
            assert figures["rss_mib"] > 1
    assert results["reuse"]["spanwire"][0]["connections"] == 1


def test_paced_tokens_all_arrive() -> None:
    with run.serving(None) as port:
        assert run.measure("raw", "paced", port, core=None, quick=True)["wall_s"] >= 2.0  # 100 tokens, 20 ms apart


def test_client_that_is_not_installed_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run.PACKAGES, "httpx", "no_such_package")
    assert run.main(["reuse", "--clients=httpx,raw", "--rounds=1", "--quick"]) == 0
    output = capsys.readouterr()
    assert "httpx is skipped: no_such_package is not installed" in output.err
    assert "httpx" not in output.out
    assert "1.00 x raw" in output.out


def test_client_that_fails_is_shown_as_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run.PACKAGES, "unheard-of", "msgspec")
    assert run.main(["reuse", "--clients=unheard-of,raw", "--rounds=1", "--quick"]) == 1
    output = capsys.readouterr()
    assert "unheard-of failed in reuse: " in output.err
    assert "failed" in output.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["burts"], "no workload 'burts'"),
        (["--clients", "requests"], "no client 'requests'"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert message in capsys.readouterr().err
