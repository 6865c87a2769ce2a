"""Jobs whose store is in Valkey: the manager, a receiver of webhooks as if it were elsewhere, and the URL that names the store."""

from __future__ import annotations

import asyncio

import pytest
from spanwire_webhook.dialects import dialects
from spanwire_webhook.embedded import EmbeddedReceiver
from spanwire_webhook.loopback import SECRET, WebhookPart
from spanwire_webhook.receiver import Receiver
from spanwire_webhook.settings import ReceiverSettings
from spanwire_webhook.stores.redis_store import RedisStore

import spanwire
from spanwire.errors import ConfigurationError
from spanwire.jobs.stores import open_store
from spanwire.testing import LoopbackServer, Script
from tests.plugins.webhook.stores.valkey import Valkey


def test_jobs_end_by_webhook(shared_valkey: Valkey) -> None:
    """Of two managers each gets the replies to its own; whoever takes a webhook in."""
    url = shared_valkey.url("jobs", scheme="redis")
    store = open_store(url)
    assert isinstance(store, RedisStore)
    codecs = {dialect.name: dialect.codec for dialect in dialects()}
    receiver = Receiver(store, codecs, ReceiverSettings(secrets={"generic": (SECRET,)}))
    call = spanwire.Call.chat("m", [{"role": "user", "content": "Say hello"}])
    part = WebhookPart(duplicate=0.3)

    async def submit(server: LoopbackServer, public_url: str) -> None:
        options = {"store": url, "public_url": public_url, "poll_after_s": 30.0}
        endpoint = server.endpoint(transport="webhook", dialect="generic", options=options)
        async with spanwire.ConnectionManager() as manager:
            jobs = [await manager.submit(endpoint, call, group="g") for _ in range(10)]
            for job in jobs:
                reply = await asyncio.wait_for(job.result(), 30)
                assert isinstance(reply, spanwire.Reply)
                assert reply.text == "Hello there"
                assert job.row is not None
                assert job.row.resolved_by == "webhook"

    async def main(server: LoopbackServer, public_url: str) -> None:
        await asyncio.gather(submit(server, public_url), submit(server, public_url))

    with (
        EmbeddedReceiver(receiver) as served,
        LoopbackServer([Script.say("Hello there", queue_s=0.02, prefill_s=0.02)], part=part) as server,
    ):
        asyncio.run(main(server, served.url))
    assert store.open_jobs() == 0
    assert len(store.completed("g")) == 20
    store.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys", "redis+unix"])
def test_all_schemes_are_ours(scheme: str) -> None:
    """By their entry points."""
    with pytest.raises(ConfigurationError, match="it can be prefix"):
        open_store(f"{scheme}:///x?no_such=1")
