"""``python -m benchmarks.truth``: what was injected against what the timelines gave back, as a Markdown table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

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


_BRIEF_HEAD = ("scenario", "injected → recovered, ms", "off by", "worst of nine")
_BEGIN, _END = "<!-- table -->", "<!-- end of the table -->"


def _brief(scenario: Scenario, findings: Sequence[Finding]) -> list[str]:
    """One line: the undivided figures, and of all of them the one that is off the most."""
    alone = {finding.key.split(".")[0] for finding in findings if "." in finding.key}
    told = [
        f"{finding.key.replace('.', ' ').replace('+', ' + ')} {finding.injected_ms:.1f} → {finding.recovered_ms:.1f}"
        for finding in findings
        if finding.key not in alone and (finding.injected_ms or not finding.ok)
    ]
    off = max((finding.off_ms for finding in findings if finding.key != "total"), key=abs)
    worst = max((finding.worst_ms for finding in findings if finding.key != "total"), key=abs)
    return [scenario.title, ", ".join(told), f"{off:+.1f}", f"{worst:+.1f}"]


def _write_into(path: Path, table: str) -> None:
    """Put the table where the last one stands."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"{path} has no place for a table: {_BEGIN} and {_END}")
    path.write_text(f"{head}{_BEGIN}\n\n{table}\n\n{_END}{tail}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Exit code 1: a median is off by more than 3 ms."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only scenarios with one of these words in their name")
    parser.add_argument("--into", type=Path, metavar="FILE", help="write a brief table into this page too")
    options = parser.parse_args(arguments)
    words = options.words
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
    brief: list[list[str]] = []
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
            brief.append(_brief(scenario, findings))
    print(markdown(_HEAD, rows))
    if options.into is not None:
        _write_into(options.into, markdown(_BRIEF_HEAD, brief))
    if missed:
        print(f"{missed} of the medians are off by more than {TOLERANCE_MS:.0f} ms", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
