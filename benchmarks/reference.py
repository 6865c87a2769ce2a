"""The ratios that a run is held against: a small file in the repository.

Usage: ``reference.py [RESULTS.json]`` writes it anew from a full run; without a name from the last one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec

from benchmarks import results
from benchmarks.figures import MINIMUM_ROUNDS, OURS, Finding, Measured, Spread, find, ratios
from benchmarks.workloads import WORKLOADS

FILE = Path(__file__).resolve().parent / "reference.json"


class Entry(msgspec.Struct):
    """A ratio: ``client`` to ``to``, the median of the rounds between what it may be."""

    workload: str
    loop: str
    client: str
    to: str
    low: float
    ratio: float
    high: float


class Reference(msgspec.Struct):
    """What was measured last when somebody looked."""

    commit: str
    python: str
    cpu: str
    ratios: list[Entry]


class Refused(Exception):
    """Results that are no reference; says why."""


def make(run: results.Results) -> Reference:
    """A reference out of a run.

    Raises:
        Refused: a quick run, too few rounds, or a workload or a client that is missing.
    """
    if run.quick:
        raise Refused("these are results of --quick, which mean nothing")
    first, entries = run.clients[0], []
    if first == OURS:
        raise Refused(f"the ratios refer to {OURS} itself; name another client first")
    for row in WORKLOADS.values():
        if not row.gated:
            continue
        found = [one for one in run.measured if one.workload == row.name and one.client == OURS and one.rounds]
        if not found:
            raise Refused(
                f"{OURS} was not measured in {row.name}; `make bench` without ARGS measures all that is needed"
            )
        for one in found:
            if len(one.rounds) < MINIMUM_ROUNDS:
                raise Refused(f"{row.name} has {len(one.rounds)} rounds, a reference takes {MINIMUM_ROUNDS}")
            base = find(run.measured, one.workload, one.loop, first)
            values = [] if base is None else ratios(one, base)
            if not values:
                raise Refused(f"{first} has no figures in {row.name}")
            spread = Spread.of_median(values)
            entries.append(Entry(row.name, one.loop, OURS, first, *(round(value, 3) for value in spread)))
    return Reference(run.commit, run.python, run.machine.cpu, entries)


def check(reference: Reference, measured: Sequence[Measured]) -> list[Finding]:
    """The run's ratios beside those of the reference, as far as both have them."""
    findings = []
    for entry in reference.ratios:
        one = find(measured, entry.workload, entry.loop, entry.client)
        base = find(measured, entry.workload, entry.loop, entry.to)
        values = ratios(one, base) if one is not None and base is not None else []
        if values:
            before, after = Spread(entry.low, entry.ratio, entry.high), Spread.of_median(values)
            findings.append(Finding(entry.workload, entry.loop, entry.client, entry.to, before, after))
    return findings


def read(path: Path) -> Reference | None:
    """The reference; None where there is no file.

    Raises:
        results.Unreadable: it is not one.
    """
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Reference)
    except msgspec.MsgspecError as error:
        raise results.Unreadable(f"{path} is no reference: {error}; `make bench-reference` writes one") from error


def main(arguments: Sequence[str] | None = None, file: Path = FILE) -> int:
    """Returns the exit status: 1 if the results will not do."""
    options = argparse.ArgumentParser(description="Write the ratios that later runs are held against.")
    options.add_argument("results", nargs="?", type=Path, default=results.LATEST, metavar="RESULTS.json")
    given = options.parse_args(arguments)
    try:
        reference = make(results.read(given.results))
    except (Refused, results.Unreadable) as error:
        sys.stderr.write(f"{given.results}: {error}\n" if isinstance(error, Refused) else f"{error}\n")
        return 1
    results.write(file, reference)
    sys.stdout.write(f"{file.name}: {len(reference.ratios)} ratios of {reference.commit}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
