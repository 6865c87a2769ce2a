"""Many short texts embedded: by calls over SSE's transport, 8 at once, and in bulk over webhook; and interrupted twice.

``python benchmarks/bulk.py --texts 50000``. The server is the loopback server, in this process; each client is a process of its
own, and so is the receiver of its webhooks. Prints a table: seconds and CPU seconds of the client, requests in both directions,
connections that the client has made. The last row is a client that is killed (SIGKILL) after a third and after two thirds of the
results and started again on the same file; every text has to be embedded once, as the server counts, or the run fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import spanwire
from benchmarks.table import markdown, number
from spanwire.pool import Dial
from spanwire.telemetry import Telemetry

SHARD = 100
AT_ONCE = 8
DIMENSIONS = 64
ROWS = ("one", "hundred", "bulk", "killed")


class Dials(Telemetry):
    """Counts connections."""

    dialled = 0

    def connected(
        self,
        endpoint: spanwire.Endpoint,
        transport: str,
        dial: Dial,
        protocol: str | None,
        error: spanwire.SpanwireError | None,
    ) -> Any:
        """One more."""
        self.dialled += error is None
        return super().connected(endpoint, transport, dial, protocol, error)


# --- clients ------------------------------------------------------------------------------------------------------------


async def calls(manager: spanwire.ConnectionManager, url: str, texts: list[str], size: int) -> dict[str, Any]:
    """So many texts a request, 8 requests at once."""
    endpoint = spanwire.Endpoint(url)
    batches = iter([texts[start : start + size] for start in range(0, len(texts), size)])
    count = vectors = 0

    async def work() -> None:
        nonlocal count, vectors
        for batch in batches:
            count += 1
            found = await manager.embed(endpoint, spanwire.Call.embeddings("e", batch, dimensions=DIMENSIONS))
            vectors += len(found.vectors)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return {"requests": count, "vectors": vectors}


async def bulk(manager: spanwire.ConnectionManager, url: str, file: Path, die_at: int) -> dict[str, Any]:
    """Of a file, with its receiver in this process; dies after so many results, if that is not 0."""
    from spanwire_webhook.loopback import SECRET

    from spanwire.jobs import runner
    from spanwire.jobs.bulk import JSONLFile

    runner._LEASE_S = 2.0  # after which a submit of the dead is taken up; 20 by default
    options = {
        "store": f"sqlite:///{file.parent}/jobs.db",
        "receiver": "127.0.0.1:0",
        "receiver_options": {"secrets": {"generic": (SECRET,)}},
        "poll_after_s": 1.0,
        "grace_s": 0.5,
    }
    endpoint = spanwire.Endpoint(url, transport="webhook", options=options)
    vectors = 0
    async with manager.submit_many(endpoint, JSONLFile(file), group="texts", shard=SHARD) as made:
        async for result in made:
            vectors += result.reply is not None
            if vectors == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return {"requests": made.counts.jobs, "vectors": vectors}


def cpu_s(whose: int = resource.RUSAGE_SELF) -> float:
    """CPU that was used until now, in seconds."""
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def client(row: str, url: str, file: Path, die_at: int) -> None:
    """Measures itself, and prints JSON."""
    dials = Dials()
    few = row in ("one", "hundred")
    texts = [json.loads(line)["input"] for line in file.read_text("utf-8").splitlines()] if few else []

    async def main() -> dict[str, Any]:
        async with spanwire.ConnectionManager(telemetry=dials) as manager:
            start_s = time.perf_counter()
            if few:
                found = await calls(manager, url, texts, 1 if row == "one" else SHARD)
            else:
                found = await bulk(manager, url, file, die_at)
            return {**found, "seconds": time.perf_counter() - start_s}

    begin_s = cpu_s()
    found = asyncio.run(main())
    print(json.dumps({**found, "cpu_s": cpu_s() - begin_s, "connections": dials.dialled}))


# --- the run ------------------------------------------------------------------------------------------------------------


def start(row: str, url: str, file: Path, die_at: int = 0) -> dict[str, Any]:
    """One client; what it says, nothing if it was killed. With the seconds and the CPU of the process as a whole."""
    command = [sys.executable, str(Path(__file__).resolve()), "--client", row, "--url", url, "--file", str(file)]
    before_s, start_s = cpu_s(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([*command, "--die-at", str(die_at)], stdout=subprocess.PIPE, check=False)
    if done.returncode != (-signal.SIGKILL if die_at else 0):
        raise SystemExit(f"{row}: the client has ended with {done.returncode}")
    found = json.loads(done.stdout) if done.stdout else {}
    whole_cpu_s = cpu_s(resource.RUSAGE_CHILDREN) - before_s
    return {**found, "whole_s": time.perf_counter() - start_s, "whole_cpu_s": whole_cpu_s}


def write(path: Path, texts: int) -> Path:
    """A file of calls."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for n in range(texts):
            file.write(
                json.dumps({"model": "e", "input": f"a short text, number {n}", "dimensions": DIMENSIONS}) + "\n"
            )
    return path


def measure(row: str, texts: int, folder: Path) -> list[str]:
    """A line of the table."""
    from spanwire_webhook.loopback import WebhookPart

    from spanwire.testing import LoopbackServer

    file = write(folder / row / "texts.jsonl", texts)
    if row in ("one", "hundred"):
        with LoopbackServer() as server:
            found = start(row, server.url, file)
        said = [found["seconds"], found["cpu_s"], found["requests"], 0, found["connections"]]
        assert found["vectors"] == texts
    else:
        part = WebhookPart()
        with LoopbackServer(part=part) as server:
            parts = [start(row, server.url, file, texts * n // 3) for n in (1, 2)] if row == "killed" else []
            found = start(row, server.url, file)
            embedded = Counter(text for job in part.jobs for text in job.call["input"])
            deliveries, jobs = part.counts["deliveries"], part.counts["jobs"]
        assert found["vectors"] == texts
        assert len(embedded) == texts
        assert set(embedded.values()) == {1}, "a text was embedded twice"
        seconds = found["seconds"] if not parts else sum(one["whole_s"] for one in [*parts, found])
        used_s = found["cpu_s"] if not parts else sum(one["whole_cpu_s"] for one in [*parts, found])
        said = [seconds, used_s, jobs, deliveries, found["connections"]]
    name = {
        "one": f"calls, 1 text each, {AT_ONCE} at once",
        "hundred": f"calls, {SHARD} texts each, {AT_ONCE} at once",
        "bulk": f"bulk over webhook, shards of {SHARD}",
        "killed": "the same, killed twice and started again",
    }[row]
    return [name, *map(number, said)]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=50_000)
    parser.add_argument("--rows", default=",".join(ROWS), help="some of them")
    parser.add_argument("--client", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--die-at", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client(given.client, given.url, given.file, given.die_at)
        return
    with tempfile.TemporaryDirectory(prefix="spanwire-bench-", dir=".") as folder:
        lines = [measure(row, given.texts, Path(folder).absolute()) for row in given.rows.split(",")]
    print(markdown((f"{given.texts:,} texts", "s", "CPU s", "requests", "webhooks", "connections"), lines))


if __name__ == "__main__":
    main()
