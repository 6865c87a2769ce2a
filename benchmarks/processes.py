"""Starts the server and the clients, each in a process of its own, and collects what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Measured, Round
from benchmarks.peers import PEERS
from benchmarks.workloads import Workload

HERE = Path(__file__).resolve().parent
#: For one client in one round, in seconds: a client that hangs does not hang the run.
LIMIT_S = 300


class Failed(Exception):
    """A client did not come to the end of a workload."""


class Runner(NamedTuple):
    """A client, under the name that it has in the results, and the Python in whose environment it runs."""

    label: str
    client: str
    python: str = sys.executable


def note(text: str) -> None:
    """Tell the user something that is not a result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def cores() -> tuple[int | None, int | None]:
    """Cores for server and client: two different ones, or none where there are not two or the system cannot pin."""
    if sys.platform == "linux":
        first, *others = sorted(os.sched_getaffinity(0))
        if others:
            return first, others[0]
    return None, None


def _on(core: int | None) -> list[str]:
    return [] if core is None else ["--core", str(core)]


def has_uvloop() -> bool:
    """Whether it is installed."""
    return util.find_spec("uvloop") is not None


def installed(names: Sequence[str]) -> list[str]:
    """Those of the clients that can be measured here; says which cannot."""
    found = []
    for name in names:
        if util.find_spec(PEERS[name].package) is None:
            note(f"{name} is skipped: {PEERS[name].package} is not installed")
        else:
            found.append(name)
    return found


@contextmanager
def serving(core: int | None) -> Iterator[int]:
    """A server in a process of its own; gives its port."""
    command = [sys.executable, str(HERE / "server.py"), *_on(core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line:
                raise RuntimeError("the server did not start; what it said is above")
            yield int(line)
        finally:
            server.terminate()


def measure(runner: Runner, workload: str, port: int, *, loop: str, core: int | None, quick: bool) -> Round:
    """One client, one workload, once.

    Raises:
        Failed: with what the client wrote to stderr.
    """
    command = [runner.python, str(HERE / "clients.py"), runner.client, workload, str(port), "--loop", loop, *_on(core)]
    if quick:
        command.append("--quick")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"not done after {LIMIT_S} s") from error
    if done.returncode:
        raise Failed(done.stderr.strip() or f"exit status {done.returncode}")
    figures: Round = json.loads(done.stdout.splitlines()[-1])
    return figures


def rounds_of(row: Workload, loop: str, runners: Sequence[Runner], *, rounds: int, quick: bool) -> list[Measured]:
    """All rounds of one workload, through all runners in turn. One that fails is left out from then on."""
    server_core, client_core = cores()
    found = {runner.label: Measured(row.name, loop, runner.label, []) for runner in runners}
    with serving(server_core) as port:
        for number in range(1, rounds + 1):
            for runner in runners:
                one = found[runner.label]
                if one.failed is not None:
                    continue
                note(f"{row.name} on {loop}, round {number} of {rounds}: {runner.label}")
                try:
                    one.rounds.append(measure(runner, row.name, port, loop=loop, core=client_core, quick=quick))
                except Failed as error:
                    note(f"{runner.label} failed in {row.name}: {error}")
                    one.failed = str(error)
                    one.rounds.clear()
    return list(found.values())
