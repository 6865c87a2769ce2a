"""Receivers on a public host, agents that only dial out: the command of the manifests over a real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from spanwire_webhook.loopback import SECRET, WebhookPart

import spanwire
from spanwire.testing import LoopbackServer, Script
from tests.plugins.webhook.stores.postgresql import url_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")
CALL = spanwire.Call.chat("m", [{"role": "user", "content": "Say hello"}])


@contextlib.contextmanager
def receiving(store: str) -> Iterator[str]:
    """``spanwire receive`` as a process; ends well when it is told to stop."""
    command = [str(Path(sys.executable).with_name("spanwire")), "receive", "--host", "127.0.0.1", "--port", "0"]
    environ = {"SPANWIRE_STORE": store, "SPANWIRE_WEBHOOK_SECRETS_GENERIC": SECRET}
    process = subprocess.Popen(command, env={**os.environ, **environ}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""  # first, that this database does not flush
        while (found := re.search(r"http://\S+", said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield found.group()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("postgresql")
def test_agents_get_what_receivers_elsewhere_were_sent(tmp_path: Path) -> None:
    store = url_of(tmp_path)

    async def main(addresses: list[str]) -> None:
        async with spanwire.ConnectionManager() as manager:
            for address in addresses:
                options = {"store": store, "public_url": address, "poll_after_s": 60.0}
                endpoint = server.endpoint(transport="webhook", options=options)
                jobs = await asyncio.gather(*(manager.submit(endpoint, CALL) for _ in range(5)))
                for job in jobs:
                    reply = await asyncio.wait_for(job.result(), 20)
                    assert isinstance(reply, spanwire.Reply)
                    assert job.row is not None
                    assert (reply.text, job.row.resolved_by) == ("Hello", "webhook")

    part = WebhookPart(start_events=False)
    with LoopbackServer([Script.say("Hello")], part=part) as server, receiving(store) as one, receiving(store) as two:
        asyncio.run(main([one, two]))
        assert {delivery.status for delivery in part.deliveries} == {204}
