"""``python -m benchmarks.truth``: what was injected against what the timelines gave back, as a Markdown table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby

from benchmarks.table import markdown
from benchmarks.truth import edges
from benchmarks.truth.judge import TOLERANCE_MS, Finding, faults, judge, run
from benchmarks.truth.scenarios import SCENARIOS, Scenario
from spanwire.testing import delaynet

_HEAD = ("scenario", "segment", "injected, ms", "recovered, ms", "off by", "worst of nine")


def _rows(scenario: Scenario, findings: Sequence[Finding]) -> list[list[str]]:
    rows = []
    shown = scenario.title
    for finding in findings:
        if not finding.injected_ms and finding.ok and abs(finding.worst_ms) < 1:
            continue  # a segment that is absent and should be
        off = f"{finding.off_ms:+.1f}" if finding.ok else f"**{finding.off_ms:+.1f}**"
        rows.append(
            [
                shown,
                finding.key.replace(".", " ").replace("+", " + "),
                f"{finding.injected_ms:.1f}",
                f"{finding.recovered_ms:.1f}",
                off,
                f"{finding.worst_ms:+.1f}",
            ]
        )
        shown = ""
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Exit code 1: a median is off by more than 3 ms."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only scenarios with one of these words in their name")
    words = parser.parse_args(arguments).words
    reason = delaynet.available()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    chosen = [
        scenario
        for scenario in SCENARIOS
        if (not words or any(word in scenario.name for word in words))
        and (scenario.edge != "haproxy" or edges.HAPROXY is not None)
    ]
    rows: list[list[str]] = []
    missed = 0
    for _, group in groupby(chosen, key=lambda scenario: scenario.group):
        scenarios = list(group)
        outcomes = run(scenarios)
        for scenario in scenarios:
            findings = judge(scenario, outcomes[scenario.name])
            for fault in faults(scenario, outcomes[scenario.name]):
                print(f"{scenario.name}: {fault}", file=sys.stderr)
            missed += sum(not finding.ok for finding in findings)
            rows += _rows(scenario, findings)
    print(markdown(_HEAD, rows))
    if missed:
        print(f"{missed} of the medians are off by more than {TOLERANCE_MS:.0f} ms", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
