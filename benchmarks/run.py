"""What a token and a call cost, beside other clients: one table. README.md says how to read it.

Each measurement is a process of its own (clients.py) that talks to a server in another (server.py). Rounds go through
all clients in turn, so that a machine that grows slower does so for everybody.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: The figure of each workload that is compared, and what it is.
FIGURES = {
    "burst": ("cpu_us_per_token", "us CPU per token"),
    "paced": ("cpu_us_per_token", "us CPU per token"),
    "crowd": ("cpu_us_per_token", "us CPU per token"),
    "latency": ("added_us_median", "us added to the first token"),
    "unary": ("cpu_us_per_call", "us CPU per call"),
    "reuse": ("connections", "connections for the calls"),
}
#: What has to be installed for each client.
PACKAGES = {"raw": "msgspec", "aiohttp": "aiohttp", "httpx": "httpx", "openai": "openai", "spanwire": "spanwire"}
DEFAULT_CLIENTS = "raw,aiohttp,spanwire"
#: For one client in one round, in seconds: a client that hangs does not hang the run.
LIMIT_S = 300

Round = dict[str, float]


class Failed(Exception):
    """A client did not come to the end of a workload."""


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


def measure(client: str, workload: str, port: int, *, core: int | None, quick: bool) -> Round:
    """One client, one workload, once.

    Raises:
        Failed: with what the client wrote to stderr.
    """
    command = [sys.executable, str(HERE / "clients.py"), client, workload, str(port), *_on(core)]
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


def compare(workload: str, clients: Sequence[str], *, rounds: int, quick: bool) -> dict[str, list[Round]]:
    """All rounds of one workload, by client. One that fails is left out from then on, and its list is empty."""
    server_core, client_core = cores()
    results: dict[str, list[Round]] = {client: [] for client in clients}
    failed: set[str] = set()
    with serving(server_core) as port:
        for number in range(1, rounds + 1):
            for client in clients:
                if client in failed:
                    continue
                note(f"{workload}, round {number} of {rounds}: {client}")
                try:
                    results[client].append(measure(client, workload, port, core=client_core, quick=quick))
                except Failed as error:
                    note(f"{client} failed in {workload}: {error}")
                    failed.add(client)
    return {client: [] if client in failed else found for client, found in results.items()}


def rows(workload: str, results: dict[str, list[Round]]) -> Iterator[list[str]]:
    """The table's cells for one workload, a row for each client."""
    key, what = FIGURES[workload]
    base_name, base_rounds = next(iter(results.items()))
    base = statistics.median(one[key] for one in base_rounds) if base_rounds else 0.0
    for client, rounds in results.items():
        if not rounds:
            yield [workload, client, what, "failed", "", "", "", ""]
            continue
        values = [one[key] for one in rounds]
        median = statistics.median(values)
        yield [
            workload,
            client,
            what,
            f"{median:.4g}",
            f"{min(values):.4g} - {max(values):.4g}",
            f"{median / base:.2f} x {base_name}" if base else "",
            f"{statistics.median(one['rss_mib'] for one in rounds):.1f}",
            f"{statistics.median(one['wall_s'] for one in rounds):.2f}" if "wall_s" in rounds[0] else "",
        ]


def table(results: dict[str, dict[str, list[Round]]]) -> str:
    """Everything in Markdown."""
    lines = [["workload", "client", "figure", "median", "spread", "ratio", "rss, MiB", "wall, s"]]
    lines += [row for workload, found in results.items() for row in rows(workload, found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def surroundings() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    versions: dict[str, str | None] = {}
    for package in sorted({*PACKAGES.values(), "opentelemetry-sdk", "uvloop"}):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    server_core, client_core = cores()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cores": {"all": os.cpu_count(), "server": server_core, "client": client_core},
    }


def installed(names: Sequence[str]) -> list[str]:
    """Those of the clients that can be measured here; says which cannot."""
    found = []
    for name in names:
        if util.find_spec(PACKAGES[name]) is None:
            note(f"{name} is skipped: {PACKAGES[name]} is not installed")
        else:
            found.append(name)
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description="What a token and a call cost, beside other clients.")
    options.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(FIGURES)}; default: all")
    options.add_argument(
        "--clients",
        default=DEFAULT_CLIENTS,
        metavar="A,B",
        help=f"of {', '.join(PACKAGES)}; ratios refer to the first one; default: {DEFAULT_CLIENTS}",
    )
    options.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    options.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    options.add_argument("--quick", action="store_true", help="a sixteenth of the load: does it run? No figures")
    given = options.parse_args(arguments)
    given.workloads = list(dict.fromkeys(given.workloads)) or list(FIGURES)
    given.clients = list(dict.fromkeys(given.clients.split(",")))
    for kind, names, known in (("workload", given.workloads, FIGURES), ("client", given.clients, PACKAGES)):
        for name in names:
            if name not in known:
                options.error(f"no {kind} {name!r}; there are {', '.join(known)}")
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a client failed, or none is left to measure."""
    given = parse(arguments)
    clients = installed(given.clients)
    if not clients:
        return 1
    if None in cores():
        note("Server and client are not pinned to two cores here; expect a wide spread.")
    if util.find_spec("uvloop") is None:
        note("uvloop is not installed: asyncio's own loop is measured.")
    results = {
        workload: compare(workload, clients, rounds=given.rounds, quick=given.quick) for workload in given.workloads
    }
    sys.stdout.write(table(results) + "\n")
    if given.quick:
        note("With --quick, these numbers mean nothing.")
    if given.json:
        document = {**surroundings(), "quick": given.quick, "rounds": given.rounds, "workloads": results}
        given.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if all(rounds for found in results.values() for rounds in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
