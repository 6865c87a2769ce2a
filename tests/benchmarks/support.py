"""Rounds that nobody measured."""

from collections.abc import Sequence
from typing import Any

from benchmarks import results
from benchmarks.figures import Measured
from benchmarks.workloads import WORKLOADS


def measured(workload: str, client: str, values: Sequence[float], *, loop: str = "uvloop", **more: float) -> Measured:
    """A client whose figure came out as given, with whatever else the table shows of a round."""
    also = {
        "rss_mib": 40.0,
        "at_once": float(WORKLOADS[workload].load.at_once),
        "wall_s": 2.0,
        "added_us_p95": 9.0,
        **more,
    }
    return Measured(workload, loop, client, [{**also, WORKLOADS[workload].figure: value} for value in values])


def failed(workload: str, client: str, *, loop: str = "uvloop") -> Measured:
    return Measured(workload, loop, client, [], "it broke")


def run(measured: Sequence[Measured], **more: Any) -> results.Results:
    machine = results.Machine("Linux", "A processor <fast>", 2, 0, 1)
    return results.Results("abc", "3.11.0", machine, {}, ["raw"], list(measured), **more)
