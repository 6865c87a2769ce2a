"""Two states of the sources beside each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.compare import AFTER, BEFORE
from benchmarks.figures import Measured, Verdict
from benchmarks.workloads import Workload
from tests.benchmarks.support import failed, measured


def rounds(before: list[float], after: list[float], raw: list[float] | None = None) -> list[Measured]:
    return [
        measured("burst", "raw", raw or [1.0] * len(before)),
        measured("burst", BEFORE, before),
        measured("burst", AFTER, after),
    ]


def test_ratios_cancel_what_the_machine_does() -> None:
    """It becomes three times slower in the middle, for all alike."""
    raw = [1.0, 1.0, 2.0, 3.0, 3.0]
    (found,) = compare.findings(rounds([2 * value for value in raw], [2.1 * value for value in raw], raw), "raw")
    assert (found.before.median, found.after.median) == pytest.approx((2, 2.1))
    assert found.grown == pytest.approx(0.05)
    assert (found.client, found.to, found.verdict) == ("spanwire", "raw", Verdict.SAME)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([2.4, 2.5, 2.5, 2.6, 2.4], Verdict.REGRESSION),
        ([1.9, 2.5, 2.5, 2.6, 2.4], Verdict.UNCLEAR),
        ([2.0, 2.1, 2.1, 2.2, 2.1], Verdict.SAME),
        ([1.4, 1.5, 1.5, 1.6, 1.5], Verdict.BETTER),
    ],
)
def test_verdicts_of_synthetic_rounds(after: list[float], verdict: Verdict) -> None:
    (found,) = compare.findings(rounds([2.0, 2.1, 1.9, 2.0, 2.05], after), "raw")
    assert found.verdict is verdict


def test_one_round_of_eight_that_went_wrong_changes_nothing() -> None:
    (found,) = compare.findings(rounds([2.0] * 8, [2.0] * 7 + [9.0]), "raw")
    assert found.verdict is Verdict.SAME


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_without_one_of_the_three_there_is_nothing_to_find(missing: int) -> None:
    all_of_them = rounds([2.0] * 5, [2.0] * 5)
    broken = [failed("burst", one.client) if number == missing else one for number, one in enumerate(all_of_them)]
    assert compare.findings(broken, "raw") == []
    assert compare.findings(all_of_them[:missing] + all_of_them[missing + 1 :], "raw") == []


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    for text in ("old", "new"):
        (root / "file").write_text(text, encoding="utf-8")
        git(root, "add", "file")
        git(root, "commit", "--quiet", "--message", text)
    return root


def test_base_is_checked_out_beside_and_again(repository: Path) -> None:
    tree = repository / ".bench" / "base"
    assert compare.check_out("main~1", repository, tree) == git(repository, "rev-parse", "main~1")
    assert (tree / "file").read_text(encoding="utf-8") == "old"
    (tree / "file").write_text("touched", encoding="utf-8")
    compare.check_out("main", repository, tree)
    assert (tree / "file").read_text(encoding="utf-8") == "new"
    assert (repository / "file").read_text(encoding="utf-8") == "new"
    assert git(repository, "branch", "--show-current") == "main"


def test_base_is_checked_out_where_the_folder_was_removed(repository: Path) -> None:
    tree = repository / ".bench" / "base"
    compare.check_out("main", repository, tree)
    subprocess.run(["rm", "-r", str(tree)], check=True)
    compare.check_out("main~1", repository, tree)
    assert (tree / "file").read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize("base", ["nowhere", "--help", "main:file", ""])
def test_what_git_does_not_know_is_refused(base: str, repository: Path) -> None:
    with pytest.raises(compare.Unprepared, match="git knows no such commit"):
        compare.check_out(base, repository, repository / ".bench" / "base")


def test_sources_without_an_environment_are_refused(tmp_path: Path) -> None:
    with pytest.raises(compare.Unprepared, match=r"no scripts/bootstrap\.sh"):
        compare.environment(tmp_path)


def test_environment_with_other_sources_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "bootstrap.sh"
    script.parent.mkdir()
    script.write_text(
        f'mkdir -p "$UV_PROJECT_ENVIRONMENT/bin"; ln -s {sys.executable} "$UV_PROJECT_ENVIRONMENT/bin/python"'
    )
    with pytest.raises(compare.Unprepared, match=r"spanwire"):
        compare.environment(tmp_path)


def test_environment_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "bootstrap.sh"
    script.parent.mkdir()
    script.write_text("echo no group called bench >&2; exit 2")
    with pytest.raises(compare.Unprepared, match="no group called bench"):
        compare.environment(tmp_path)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """BASE is what the tests run on."""
    monkeypatch.setattr(compare, "check_out", lambda _base: "0123456789abcdef")
    monkeypatch.setattr(compare, "environment", lambda: sys.executable)


@pytest.mark.usefixtures("prepared")
def test_quick_comparison_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["main", "reuse", "--rounds=1", "--quick"]) == 0
    output = capsys.readouterr()
    assert "main (0123456789ab)" in output.out
    assert "| reuse " in output.out
    assert [line.rpartition(" ")[2] for line in output.err.splitlines() if "round 1 of 1" in line] == [
        *("raw", BEFORE, AFTER),
    ]


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        (rounds([2.0] * 5, [2.0] * 5), 0, "within 15%"),
        (rounds([2.0] * 5, [2.6] * 5), 1, "Regression: burst on uvloop: spanwire takes 2.60 x raw"),
        (rounds([1.5, 2.0, 2.0, 2.0, 2.5], [1.5, 2.0, 2.0, 2.0, 2.5]), 0, "too wide to judge: more rounds"),
        ([*rounds([2.0] * 5, [2.0] * 5)[:2], failed("burst", AFTER)], 1, ""),
    ],
)
def test_exit_status(
    found: list[Measured], status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rounds_of(row: Workload, loop: str, runners: object, **_: object) -> list[Measured]:
        return found

    monkeypatch.setattr(compare, "rounds_of", rounds_of)
    assert compare.main(["main", "burst"]) == status
    output = capsys.readouterr()
    assert said in output.out + output.err


def test_base_that_cannot_be_measured_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["no-such-branch", "burst"]) == 1
    assert "no-such-branch cannot be measured: git knows no such commit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: BASE"),
        (["main", "burts"], "no workload 'burts'"),
        (["main", "thousand"], "no workload 'thousand'"),
        (["main", "--to", "spanwire"], "no client 'spanwire'"),
        (["main", "--rounds", "3"], "at least 5"),
        (["main", "--quick", "--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert message in capsys.readouterr().err
