"""What a store of jobs does a second, by kind of store and by how many work on it at once.

``python -m benchmarks.stores sqlite postgresql valkey`` on servers of this machine, from the wheels that the tests use, with what
they are asked for on the disk before they answer (``fsync``, ``appendfsync always``); ``--store URL`` on another one, which must be
empty. A column is so many processes with so many threads each, as that many submitters or receivers would be:

* ``submit``: a row is written, then swapped to ``submitting`` and to ``submitted`` (three durable writes a job);
* ``receive``: webhooks of 0.5 KB go into the inbox, 1 or 50 at once (one durable write for each lot);
* ``apply``: a delivery is taken from the inbox, its job is swapped to ``succeeded``, the delivery is marked;
* ``life``: all of it, and the result is read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if not __package__:  # started by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec

from spanwire.jobs.contract import Delivery, JobRow, Store
from spanwire.jobs.ids import new_id
from spanwire.jobs.stores import open_store

BODY = json.dumps(
    {"type": "job.succeeded", "data": {"id": "job_1", "status": "succeeded", "output": "x" * 420}}
).encode()
INPUT = json.dumps(["chat", "m", {"messages": [{"role": "user", "content": "y" * 300}]}]).encode()
LOTS = {"receive 1": 1, "receive 50": 50}


def fresh(group: str) -> JobRow:
    """A new job's row, as a submit writes it."""
    now_s = time.time()
    return JobRow(
        id=new_id(),
        group=group,
        endpoint="127.0.0.1:8000",
        origin="http://127.0.0.1:8000/v1",
        dialect="generic",
        model="m",
        created_s=now_s,
        due_s=now_s + 86400.0,
        poll_s=now_s + 3600.0,
        input=INPUT,
    )


def submit(store: Store, group: str) -> JobRow:
    """Three writes: the row, and two steps."""
    row = fresh(group)
    store.add([row])
    for was, state in (("created", "submitting"), ("submitting", "submitted")):
        row = msgspec.structs.replace(row, state=state, provider_id=f"p-{row.id}" if state == "submitted" else None)
        assert store.swap(row, was=(was, 1))  # type: ignore[arg-type]
        row.revision += 1
    return row


def delivery(row: JobRow) -> Delivery:
    """Its webhook."""
    return Delivery(
        endpoint="generic/hooks", dedupe=f"m-{row.id}", job=row.id, attempt=1, received_s=time.time(), body=BODY
    )


def end(store: Store, row: JobRow, number: int) -> None:
    """What whoever applies a delivery does."""
    known = store.get(row.id)
    assert known is not None
    done = msgspec.structs.replace(
        known, state="succeeded", result=store.put_body(BODY), resolved_s=time.time(), resolved_by="webhook", input=b""
    )
    assert store.swap(done, was=(known.state, 1))
    store.applied([number])


def life(store: Store, group: str) -> int:
    """One job from its row to its result."""
    row = submit(store, group)
    store.receive([delivery(row)])
    ((number, _),) = store.unapplied(job=row.id)
    end(store, row, number)
    found = store.get(row.id)
    assert found is not None
    assert store.body(found.result) == BODY
    return 1


def work(url: str, what: str, threads: int, seconds: float, begin: Any, counted: Any) -> None:
    """One process: as often as it goes in so many seconds."""
    store = open_store(url)
    group = f"g-{os.getpid()}"
    counts = [0] * threads
    turns: list[Callable[[], int]] = []
    for _ in range(threads):
        if what == "submit":
            turns.append(lambda: len([submit(store, group)]))
        elif what == "life":
            turns.append(lambda: life(store, group))
        elif what == "apply":
            rows = [submit(store, group) for _ in range(200)]
            store.receive([delivery(row) for row in rows])
            numbers = {row.id: store.unapplied(job=row.id)[0][0] for row in rows}
            ready = iter(rows)

            def one(ready: Any = ready, numbers: dict[str, int] = numbers) -> int:
                row = next(ready, None)
                if row is None:
                    return 0
                end(store, row, numbers[row.id])
                return 1

            turns.append(one)
        else:
            row, lot = fresh(group), LOTS[what]

            def some(row: JobRow = row, lot: int = lot) -> int:
                store.receive([delivery(msgspec.structs.replace(row, id=new_id())) for _ in range(lot)])
                return lot

            turns.append(some)
    begin.wait()
    until_s = time.monotonic() + seconds

    def run(number: int) -> None:
        while time.monotonic() < until_s:
            done = turns[number]()
            if not done:
                break
            counts[number] += done

    start_s = time.monotonic()
    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    counted.put((sum(counts), time.monotonic() - start_s))
    store.close()


def measure(url: str, what: str, at_once: str, seconds: float) -> float:
    """Jobs, or webhooks, a second over all processes."""
    processes, threads = map(int, at_once.split("x"))
    context = multiprocessing.get_context("spawn")
    begin, counted = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=work, args=(url, what, threads, seconds, begin, counted)) for _ in range(processes)
    ]
    for process in started:
        process.start()
    found = [counted.get(timeout=seconds + 120.0) for _ in started]
    for process in started:
        process.join()
    return float(sum(count / took_s for count, took_s in found))


@contextlib.contextmanager
def sqlite() -> Iterator[Callable[[], str]]:
    """In a folder of this one's file system: /tmp may be memory."""
    with tempfile.TemporaryDirectory(prefix="spanwire-bench-", dir=".") as folder:
        yield lambda: f"sqlite:///{Path(folder).absolute()}/{new_id()}.db"


@contextlib.contextmanager
def postgresql() -> Iterator[Callable[[], str]]:
    """A server that waits for its disk."""
    import psycopg

    from tests.plugins.webhook.stores.postgresql import serving

    with serving() as server:
        with psycopg.connect(server.uri, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = on")
            connection.execute("SELECT pg_reload_conf()")
        yield lambda: f"{server.uri}&schema=s{new_id().replace('-', '')}"


@contextlib.contextmanager
def valkey() -> Iterator[Callable[[], str]]:
    """The same."""
    from tests.plugins.webhook.stores.valkey import valkey as serving

    with serving(appendonly="yes", appendfsync="always") as server:
        yield server.url


@contextlib.contextmanager
def valkey_everysec() -> Iterator[Callable[[], str]]:
    """As most are set up: with ``WAITAOF`` all the same."""
    from tests.plugins.webhook.stores.valkey import valkey as serving

    with serving(appendonly="yes", appendfsync="everysec") as server:
        yield server.url


KINDS: dict[str, Callable[[], contextlib.AbstractContextManager[Callable[[], str]]]] = {
    "sqlite": sqlite,
    "postgresql": postgresql,
    "valkey": valkey,
    "valkey-everysec": valkey_everysec,
}


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("kind", nargs="*", default=["sqlite"], help=", ".join(KINDS))
    parser.add_argument("--store", metavar="URL", help="this one, instead of those")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--what", nargs="+", default=["submit", *LOTS, "apply", "life"])
    parser.add_argument("--at-once", nargs="+", default=["1x1", "1x16", "2x16", "4x16"], metavar="PROCESSESxTHREADS")
    chosen = parser.parse_args(arguments)
    for kind in [""] if chosen.store else chosen.kind:
        with contextlib.nullcontext(lambda: chosen.store) if chosen.store else KINDS[kind]() as url:
            print(f"| {kind or 'a second'} | " + " | ".join(chosen.at_once) + " |")
            print("| --- |" + " ---: |" * len(chosen.at_once))
            for what in chosen.what:
                rates = [measure(url(), what, shape, chosen.seconds) for shape in chosen.at_once]
                print(f"| {what} | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |", flush=True)
            print()


if __name__ == "__main__":
    main()
