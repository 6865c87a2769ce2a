"""The ratios that runs are held against."""

from pathlib import Path

import pytest

from benchmarks import reference, results
from benchmarks.figures import Measured, Verdict
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.support import failed, measured, run

GATED = [row.name for row in WORKLOADS.values() if row.gated]


def full(times: float = 2.0, noise: float = 0.01, rounds: int = 3) -> list[Measured]:
    """All that a reference holds, spanwire at ``times`` raw, give or take ``noise``."""
    ours = [times * (1 + noise * (number - rounds // 2)) for number in range(rounds)]
    return [one for name in GATED for one in (measured(name, "raw", [1] * rounds), measured(name, "spanwire", ours))]


def test_reference_holds_our_ratios_with_what_they_may_be() -> None:
    made = reference.make(run(full()))
    assert [entry.workload for entry in made.ratios] == GATED
    assert {entry.client for entry in made.ratios} == {"spanwire"}
    assert (made.ratios[0].to, made.ratios[0].low, made.ratios[0].ratio, made.ratios[0].high) == ("raw", 1.98, 2, 2.02)


def without(name: str, client: str) -> list[Measured]:
    return [one for one in full() if (one.workload, one.client) != (name, client)]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (run(full(), quick=True), "--quick"),
        (run(full(rounds=2)), "2 rounds"),
        (run(without("crowd", "spanwire")), "was not measured in crowd"),
        (run(without("crowd", "raw")), "raw has no figures in crowd"),
        (run([*without("unary", "spanwire"), failed("unary", "spanwire")]), "was not measured in unary"),
    ],
)
def test_what_is_no_reference_is_refused(refused: results.Results, message: str) -> None:
    with pytest.raises(reference.Refused, match=message):
        reference.make(refused)


def test_reference_to_ourselves_is_refused() -> None:
    odd = run(full())
    odd.clients = ["spanwire", "raw"]
    with pytest.raises(reference.Refused, match="spanwire itself"):
        reference.make(odd)


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (full(2.05), Verdict.SAME),
        (full(2.5), Verdict.REGRESSION),
        (full(2.5, noise=0.3), Verdict.UNCLEAR),
        (full(1.2), Verdict.BETTER),
    ],
)
def test_run_is_held_against_the_reference(now: list[Measured], verdict: Verdict) -> None:
    findings = reference.check(reference.make(run(full())), now)
    assert {finding.verdict for finding in findings} == {verdict}
    assert len(findings) == len(GATED)


def test_only_what_both_have_is_compared() -> None:
    known = reference.make(run(full()))
    assert reference.check(known, [measured("burst", "spanwire", [9])]) == []  # raw is missing
    assert reference.check(known, [measured("burst", "raw", [1]), failed("burst", "spanwire")]) == []
    others = [measured("burst", "raw", [1], loop="asyncio"), measured("burst", "spanwire", [9], loop="asyncio")]
    assert reference.check(known, others) == []


def test_command_writes_what_a_run_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, kept = tmp_path / "latest.json", tmp_path / "reference.json"
    assert reference.read(kept) is None
    assert reference.main([str(file)], kept) == 1
    assert "`make bench` writes one" in capsys.readouterr().err
    results.write(file, run(full(), quick=True))
    assert reference.main([str(file)], kept) == 1
    assert "--quick" in capsys.readouterr().err
    assert not kept.exists()
    results.write(file, run(full()))
    assert reference.main([str(file)], kept) == 0
    assert reference.read(kept) == reference.make(run(full()))


def test_damaged_reference_is_named(tmp_path: Path) -> None:
    kept = tmp_path / "reference.json"
    kept.write_text("{}", encoding="utf-8")
    with pytest.raises(results.Unreadable, match=r"reference.json is no reference"):
        reference.read(kept)


def test_the_one_in_the_repository_can_be_read() -> None:
    known = reference.read(reference.FILE)
    for entry in known.ratios if known else []:
        assert WORKLOADS[entry.workload].gated
        assert 0 < entry.low <= entry.ratio <= entry.high
