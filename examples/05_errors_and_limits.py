"""Every error says what, where and for how long; a failed call still has a timeline."""

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script

CALL = spanwire.Call.chat("demo", [{"role": "user", "content": "hi"}])
busy = Script(status=503, headers={"retry-after-ms": "20"})

with LoopbackServer([busy, Script.say("Second try.")]) as server, spanwire.SyncConnectionManager() as manager:
    reply = manager.complete(server.endpoint(), CALL)
    assert reply.timeline is not None
    print(reply.text, [attempt["outcome"] for attempt in reply.timeline.to_dict()["attempts"]])

    server.script(Script.say("never heard", hang_after=2))
    endpoint = server.endpoint(
        limits=spanwire.Limits(max_concurrent=1, queue_timeout_s=0.1),
        timeouts=spanwire.Timeouts(connect_s=5, first_content_s=30, idle_s=0.2, total_s=60),
    )
    try:
        with manager.stream(endpoint, CALL) as stream:
            for _chunk in stream:
                try:
                    manager.complete(endpoint, CALL)  # the only slot is held by the stream around it
                except errors.NoSlot as error:
                    print("no slot:", error.phase, error.retryable)
    except errors.CallTimeout as error:
        assert error.reply is not None
        print(f"{error.limit} was hit; until then came {error.reply.text!r}")

    server.script(Script(status=401))
    try:
        manager.complete(server.endpoint(api_key="wrong"), CALL)
    except errors.AuthenticationFailed as error:
        print(error.status, error.endpoint == f"127.0.0.1:{server.port}")
