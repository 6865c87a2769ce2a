"""A run's results as a JSON document, with what they depend on besides the code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from benchmarks.figures import Measured

ROOT = Path(__file__).resolve().parent.parent
#: Where results go that are not given a name. Git ignores it.
SCRATCH = ROOT / ".bench"
LATEST = SCRATCH / "latest.json"
#: Whose versions are noted.
DISTRIBUTIONS = (
    "aiohttp",
    "httptools",
    "httpx",
    "httpx2",
    "langchain-core",
    "langchain-openai",
    "litellm",
    "msgspec",
    "openai",
    "opentelemetry-sdk",
    "spanwire",
    "uvloop",
)


class Machine(msgspec.Struct):
    """Where it ran.

    Attributes:
        platform: system, kernel, architecture.
        cpu: the processor's own name, as far as the system tells.
        cores: that this process may use; ``server_core`` and ``client_core`` are those that were given out.
    """

    platform: str
    cpu: str
    cores: int
    server_core: int | None = None
    client_core: int | None = None


class Results(msgspec.Struct):
    """A run. ``commit`` ends in ``+`` where files differ from it; ``clients`` begins with whom ratios refer to."""

    commit: str
    python: str
    machine: Machine
    versions: dict[str, str]
    clients: list[str]
    measured: list[Measured]
    quick: bool = False
    schema: int = 1


class Unreadable(Exception):
    """A file that is not what it should be; says which, and why."""


def commit() -> str:
    """The commit of this folder; ``unknown`` outside of git."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(server_core: int | None, client_core: int | None) -> Machine:
    """This one."""
    cpu = platform.processor()
    names = Path("/proc/cpuinfo")
    if names.exists():
        lines = [line for line in names.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(":")[2].strip() if lines else cpu
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Machine(platform.platform(), cpu, cores, server_core, client_core)


def versions() -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write(path: Path, document: msgspec.Struct) -> None:
    """As JSON that can be read and compared line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def read(path: Path) -> Results:
    """Results that a run wrote.

    Raises:
        Unreadable: no such file, or not ours.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}; `make bench` writes one") from error
    except msgspec.MsgspecError as error:
        raise Unreadable(f"{path} holds no results of a run: {error}") from error
