"""What a token and a call cost, beside other clients: one table. README.md says how to read it.

Each measurement is a process of its own (clients.py) that talks to a server in another (server.py). Rounds go through
all clients in turn, so that a machine that grows slower does so for everybody.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import reference, results
from benchmarks.figures import OURS, Measured, Verdict, by_workload, work_out
from benchmarks.peers import PEERS
from benchmarks.processes import Runner, cores, has_uvloop, installed, note, rounds_of
from benchmarks.table import comparison, pace_table, regressions, table
from benchmarks.workloads import WORKLOADS, Workload, chosen, groups, with_needs

DEFAULT_CLIENTS = "raw,aiohttp,httpx,openai,spanwire"


def loops_of(row: Workload, wanted: str | None) -> list[str]:
    """The loops that a workload is measured on."""
    if not row.loops:
        return ["asyncio"]
    if wanted == "both":
        return ["asyncio", "uvloop"]
    return [wanted or ("uvloop" if has_uvloop() else "asyncio")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description="What a token and a call cost, beside other clients.")
    usual = ", ".join(row.name for row in WORKLOADS.values() if row.usual)
    options.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(groups())}, or all; default: {usual}"
    )
    options.add_argument(
        "--clients",
        default=DEFAULT_CLIENTS,
        metavar="A,B",
        help=f"of {', '.join(PEERS)}, or all; ratios refer to the first one; default: {DEFAULT_CLIENTS}",
    )
    options.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    options.add_argument(
        "--loop",
        choices=["asyncio", "uvloop", "both"],
        help="for workloads that stream; default: uvloop where it is installed",
    )
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write every round there; default: .bench/latest.json"
    )
    options.add_argument("--quick", action="store_true", help="a small part of the load: does it run? No figures")
    given = options.parse_args(arguments)
    names = groups() if given.workloads == ["all"] else given.workloads
    try:
        given.workloads = chosen(names)
    except KeyError as error:
        options.error(f"no workload {error}; there are {', '.join(groups())}")
    given.clients = list(PEERS) if given.clients == "all" else list(dict.fromkeys(given.clients.split(",")))
    for name in given.clients:
        if name not in PEERS:
            options.error(f"no client {name!r}; there are {', '.join(PEERS)}")
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    if given.loop in {"uvloop", "both"} and not has_uvloop():
        options.error(f"--loop {given.loop}: uvloop is not installed here")
    if given.json is None:
        given.json = results.SCRATCH / "quick.json" if given.quick else results.LATEST
    return given


def measure_all(given: argparse.Namespace, clients: Sequence[str]) -> list[Measured]:
    """Every chosen workload, on every loop, with every client that has what it takes."""
    measured: list[Measured] = []
    rows = with_needs(given.workloads)
    for row in rows:
        if not row.measure:
            continue
        runners = [Runner(name, name) for name in clients if row.clients is None or name in row.clients]
        left_out = [name for name in clients if row.clients is not None and name not in row.clients]
        if left_out:
            note(f"{row.name} is not measured for {', '.join(left_out)}: no way to follow every token (peers.py)")
        for loop in loops_of(row, given.loop) if runners else []:
            measured += rounds_of(row, loop, runners, rounds=given.rounds, quick=given.quick)
    return measured + work_out(rows, measured)


def held_against_reference(measured: Sequence[Measured], file: Path) -> bool:
    """Compare with the ratios in the repository; says what it finds. False for a regression."""
    known = reference.read(file)
    if known is None:
        note(f"There is no {file.name} to compare with; `make bench-reference` writes one.")
        return True
    findings = reference.check(known, measured)
    if not findings:
        note(f"{file.name} has none of these ratios: nothing to compare with.")
        return True
    sys.stdout.write(f"\nBeside {file.name} ({known.commit}, {known.cpu}):\n\n")
    sys.stdout.write(comparison(findings, "reference", "now") + "\n")
    if any(one.verdict is Verdict.UNCLEAR for one in findings):
        note("Where the spread is too wide to judge: more rounds, or a machine with less to do.")
    worse = regressions(findings)
    for sentence in worse:
        note(f"Regression: {sentence}")
    return not worse


def main(arguments: Sequence[str] | None = None, reference_file: Path = reference.FILE) -> int:
    """Returns the exit status: 1 if a client failed, none is left to measure, or a ratio of ours grew too much."""
    given = parse(arguments)
    clients = installed(given.clients)
    if not clients:
        return 1
    if None in cores():
        note("Server and client are not pinned to two cores here; expect a wide spread.")
    if not has_uvloop():
        note("uvloop is not installed: asyncio's own loop is measured.")
    measured = measure_all(given, clients)
    if not measured:
        note("None of these clients can be measured in these workloads.")
        return 1
    sys.stdout.write(table(measured, clients[0]) + "\n")
    if pace := pace_table(measured):
        sys.stdout.write(f"\n{pace}\n")
    here = results.machine(*cores())
    document = results.Results(
        results.commit(), platform.python_version(), here, results.versions(), clients, measured, given.quick
    )
    results.write(given.json, document)
    note(f"Every round is in {given.json}.")
    good = all(one.rounds for group in by_workload(measured) for one in group)
    if given.quick:
        note("With --quick, these numbers mean nothing.")
    elif OURS in clients:
        try:
            good = held_against_reference(measured, reference_file) and good
        except results.Unreadable as error:
            note(str(error))
            good = False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
