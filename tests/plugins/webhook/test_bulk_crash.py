"""Texts embedded in bulk by processes that are killed, and by two at once: each once, as the server counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from spanwire_webhook.loopback import WebhookPart

from spanwire.jobs.sqlite import SQLiteStore
from spanwire.testing import LoopbackServer

TEXTS = 300
PROCESS = """
import asyncio, os, signal, sys
import spanwire
from spanwire.jobs import runner
from spanwire.jobs.bulk import JSONLFile

url, store, file, where = sys.argv[1:]
runner._LEASE_S, runner._DUE_S, runner._LOOK_S = 1.0, 0.1, 0.02  # a test has less patience with the dead
calls = 0

def dying(method):
    async def call(self, *arguments, **more):
        global calls
        calls += 1
        if calls == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return await method(self, *arguments, **more)
    return call

if where:  # "_send": the row is written, nothing was sent. "_acknowledged": the server has it, and nobody knows
    setattr(runner.JobRunner, where, dying(getattr(runner.JobRunner, where)))

async def main():
    options = {"store": store, "poll_after_s": 0.05, "poll_share": 1.0, "grace_s": 0.1}
    endpoint = spanwire.Endpoint(url, transport="webhook", options=options)
    async with spanwire.ConnectionManager() as manager:
        bulk = manager.submit_many(endpoint, JSONLFile(file), group="g", shard=10, window=6)
        results = sorted([result.index async for result in bulk if result.reply is not None])
        assert results == list(range(300)), results
        print(bulk.counts.jobs)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills processes")
@pytest.mark.timeout(60)
def test_each_text_is_embedded_once(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"model": "e", "input": f"text {n}"}) + "\n" for n in range(TEXTS)), "utf-8")
    store = f"sqlite:///{tmp_path}/jobs.db"
    part = WebhookPart()
    with LoopbackServer(part=part) as server:

        def start(where: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", PROCESS, server.url, store, str(file), where]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        for where in ("_send", "_acknowledged"):
            with start(where) as killed:
                assert killed.wait(30) == -9
        half = len(part.jobs)
        assert 0 < half < TEXTS // 10
        both = [start(""), start("")]
        said = [process.communicate(timeout=40)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0]
        assert sum(map(int, said)) <= TEXTS // 10 - half
        embedded = Counter(text for job in part.jobs for text in job.call["input"])
    assert embedded == {f"text {number}": 1 for number in range(TEXTS)}
    opened = SQLiteStore(tmp_path / "jobs.db")
    assert len(opened.completed("g")) == TEXTS // 10
    opened.close()
