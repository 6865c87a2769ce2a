"""Two states of the sources beside each other: ``compare.py BASE [WORKLOAD ...]``, BASE being what git can name.

BASE is checked out into .bench/base, with an environment of its own. Its sources, the working tree's and another client
as the measure are taken in turn, by the working tree's benchmarks, on one server. What is compared is the ratio to that
other client in the same round, so that a machine that changes its pace does so for both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import results
from benchmarks.figures import OURS, Finding, Measured, Spread, Verdict, by_workload, find, ratios
from benchmarks.peers import PEERS
from benchmarks.processes import Runner, installed, note, rounds_of
from benchmarks.run import loops_of
from benchmarks.table import comparison, regressions
from benchmarks.workloads import WORKLOADS, Workload, chosen

#: Names of the two in the results.
BEFORE, AFTER = "before", "after"
#: Order statistics of fewer rounds say little about a median.
ROUNDS = 5
TREE = results.SCRATCH / "base"


class Unprepared(Exception):
    """BASE cannot be measured; says why."""


def _say(command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command; returns what it wrote."""
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unprepared(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise Unprepared(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def check_out(base: str, root: Path = results.ROOT, tree: Path = TREE) -> str:
    """Put BASE into the folder ``tree``, a worktree of ours; returns its commit.

    Raises:
        Unprepared: there is no such commit, or no git.
    """
    try:
        commit = _say(["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"], root)
    except Unprepared as error:
        raise Unprepared(
            f"git knows no such commit here; name a branch, a tag or a commit: BASE=main ({error})"
        ) from error
    if (tree / ".git").exists():
        _say(["git", "checkout", "--quiet", "--force", "--detach", commit], tree)
    else:
        _say(["git", "worktree", "prune"], root)
        tree.parent.mkdir(parents=True, exist_ok=True)
        _say(["git", "worktree", "add", "--quiet", "--force", "--detach", str(tree), commit], root)
    return commit


def environment(tree: Path = TREE) -> str:
    """Make the environment of the sources in ``tree``; returns its Python.

    Raises:
        Unprepared: it cannot be made, or has other sources in it.
    """
    script, folder = tree / "scripts" / "bootstrap.sh", tree / ".tools" / "bench"
    if not script.exists():
        raise Unprepared(f"these sources have no {script.relative_to(tree)}: too old to be measured this way")
    env = {
        **os.environ,
        "UV_PROJECT_ENVIRONMENT": str(folder),
        "PYTHON": getattr(sys, "_base_executable", sys.executable),
    }
    _say(["sh", str(script), "sync", "--quiet", "--locked", "--only-group", "bench"], tree, env)
    python = str(folder / "bin" / "python")
    where = _say([python, "-c", "import spanwire; print(spanwire.__file__)"], tree)
    if not Path(where).is_relative_to(tree):
        raise Unprepared(f"{python} imports spanwire from {where}, not from {tree}; is PYTHONPATH set?")
    return python


def findings(measured: Sequence[Measured], to: str) -> list[Finding]:
    """What became of each ratio. Without those who failed."""
    found = []
    for group in by_workload(measured):
        names = group[0].workload, group[0].loop
        base, before, after = (find(group, *names, client) for client in (to, BEFORE, AFTER))
        if base is None or before is None or after is None:
            continue
        values = ratios(before, base), ratios(after, base)
        if all(values):
            found.append(Finding(*names, OURS, to, *(Spread.of_median(side) for side in values)))
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description="Two states of the sources beside each other.")
    gated = [row.name for row in WORKLOADS.values() if row.gated]
    others = ", ".join(name for name in PEERS if name != OURS)
    options.add_argument("base", metavar="BASE", help="a branch, a tag or a commit")
    options.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(gated)}; default: all of these"
    )
    options.add_argument("--to", default="raw", metavar="CLIENT", help=f"what ratios refer to: {others}; default: raw")
    options.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}, and no fewer")
    options.add_argument("--loop", choices=["asyncio", "uvloop", "both"], help="for workloads that stream")
    options.add_argument("--quick", action="store_true", help="a small part of the load: does it run? No verdict")
    given = options.parse_args(arguments)
    for name in given.workloads:
        if name not in gated:
            options.error(f"no workload {name!r} to compare; there are {', '.join(gated)}")
    given.workloads = chosen(given.workloads or gated)
    if given.to not in PEERS or given.to == OURS:
        options.error(f"no client {given.to!r} to compare with; there are {others}")
    if given.rounds < ROUNDS and not given.quick:
        options.error(f"--rounds must be at least {ROUNDS}: fewer say too little about a median")
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    return given


def _measured(given: argparse.Namespace, python: str) -> Iterator[Measured]:
    runners = [Runner(given.to, given.to), Runner(BEFORE, OURS, python), Runner(AFTER, OURS)]
    rows: list[Workload] = given.workloads
    for row in rows:
        for loop in loops_of(row, given.loop):
            yield from rounds_of(row, loop, runners, rounds=given.rounds, quick=given.quick)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 for a regression, for a client that failed, and if BASE cannot be measured."""
    given = parse(arguments)
    if len(installed([given.to, OURS])) < 2:
        return 1
    try:
        commit = check_out(given.base)
        note(f"Making the environment of {given.base} ({commit[:12]})")
        python = environment()
    except Unprepared as error:
        note(f"{given.base} cannot be measured: {error}")
        return 1
    measured = list(_measured(given, python))
    found = findings(measured, given.to)
    sys.stdout.write(comparison(found, f"{given.base} ({commit[:12]})", f"working tree ({results.commit()})") + "\n")
    good = all(one.rounds for one in measured)
    if given.quick:
        note("With --quick, these numbers mean nothing.")
        return 0 if good else 1
    if any(one.verdict is Verdict.UNCLEAR for one in found):
        note("Where the spread is too wide to judge: more rounds, or a machine with less to do.")
    worse = regressions(found)
    for sentence in worse:
        note(f"Regression: {sentence}")
    return 0 if good and not worse else 1


if __name__ == "__main__":
    sys.exit(main())
