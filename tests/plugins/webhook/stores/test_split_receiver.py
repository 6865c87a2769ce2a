"""Receivers on a public host, agents that only dial out: the command of the manifests over a real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psycopg
import pytest
from psycopg import sql
from spanwire_webhook.loopback import SECRET, WebhookPart

import spanwire
from spanwire.errors import JobError
from spanwire.jobs.contract import Delivery, JobRow, Wakes
from spanwire.jobs.ids import new_id
from spanwire.jobs.stores import open_store
from spanwire.testing import LoopbackServer, Script
from tests.plugins.webhook.stores.postgresql import PostgreSQL, schema_of, url_of

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


def granted(postgresql: PostgreSQL, tmp_path: Path) -> tuple[str, str]:
    """A store, and what docs/split-receiver.md grants to the roles of receivers and of agents, for roles of this test."""
    open_store(url_of(tmp_path)).close()
    text = (Path(__file__).parents[4] / "docs" / "split-receiver.md").read_text()
    (grants,) = re.findall(r"(?s)```sql\n(.*?)```", text)
    schema = schema_of(tmp_path)
    roles = (f"{schema}_receiver", f"{schema}_agents")
    for name, ours in (("receiver", roles[0]), ("agents", roles[1]), ("spanwire", schema)):
        grants = re.sub(rf"\b{name}\b", ours, grants)
    with psycopg.connect(postgresql.uri, autocommit=True) as connection:
        for role in roles:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        connection.execute(grants)
    receiver, agents = (url_of(tmp_path).replace("postgres:@", f"{role}:@") for role in roles)
    return receiver, agents


def test_the_roles_of_the_docs_can_do_their_work_and_no_other(postgresql: PostgreSQL, tmp_path: Path) -> None:
    """Everything that receivers and agents do with a store."""
    receiver, agents = map(open_store, granted(postgresql, tmp_path))
    large = bytes(range(256)) * 100
    row = JobRow(id=new_id(), group="g", origin="o", dialect="d", input=b"call", poll_s=1.0)
    agents.add([row, JobRow(id="2", dialect="d", provider_id="p-2")])
    assert receiver.instance_key() == agents.instance_key()
    assert (receiver.get(row.id), receiver.find("d", "p-2")) == (row, JobRow(id="2", dialect="d", provider_id="p-2"))
    came = [
        Delivery(endpoint="d", dedupe="1", job=row.id, body=large),
        Delivery(endpoint="d", dedupe="2", provider_id="p-2"),
    ]
    assert receiver.receive(came) == [True, True]
    assert receiver.receive([msgspec.structs.replace(one, verified=False) for one in came]) == [False, False]
    late = Delivery(endpoint="d", dedupe="3", job=row.id, verified=False)
    receiver.receive([late])
    receiver.receive([msgspec.structs.replace(late, verified=True)])
    receiver.verified(receiver.quarantined()[0][0])  # it is here by now: this one goes
    assert receiver.quarantined() == []
    found = agents.unapplied(lease_s=60.0)
    assert [one.dedupe for _, one in found] == ["1", "2", "3"]
    agents.applied([number for number, _ in found])
    assert [one.id for one in agents.due(5.0, parties=[("o", "d")], lease_s=60.0)] == [row.id]
    begun = msgspec.structs.replace(row, state="submitted", provider_id="p-1")
    assert agents.swap(begun, was=("created", 1))
    ended = msgspec.structs.replace(
        begun, state="succeeded", input=b"", result=agents.put_body(large), resolved_s=1.0, revision=1
    )
    assert agents.swap(ended, was=("submitted", 1))
    assert [agents.body(one.result) for one in agents.completed("g")] == [large]
    assert (agents.open_jobs(), agents.states(["2"])) == (1, {"2": "created"})
    for write in (
        lambda: receiver.add([JobRow(id="3")]),
        lambda: receiver.swap(JobRow(id="2", dialect="d", state="failed"), was=("created", 1)),
        lambda: receiver.body(ended.result),
        lambda: agents.receive([Delivery(endpoint="d", dedupe="4", job="2")]),
    ):
        with pytest.raises(JobError, match="permission denied") as caught:
            write()
        assert not caught.value.retryable
    for store in (receiver, agents):
        assert isinstance(store, Wakes)
        woken = threading.Event()
        end = store.subscribe(woken.set)
        assert woken.wait(20)
        end()
        assert store.changed() != 0
    assert agents.sweep(1e9) == 4
    for store in (receiver, agents):
        store.close()


def test_agents_get_what_receivers_elsewhere_were_sent(postgresql: PostgreSQL, tmp_path: Path) -> None:
    """With the rights that the docs give them."""
    receiver, store = granted(postgresql, tmp_path)

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
    with (
        LoopbackServer([Script.say("Hello")], part=part) as server,
        receiving(receiver) as one,
        receiving(receiver) as two,
    ):
        asyncio.run(main([one, two]))
        assert {delivery.status for delivery in part.deliveries} == {204}
