"""Two streamed calls: the second one finds the connection of the first."""

import spanwire
from spanwire.testing import LoopbackServer

with LoopbackServer() as server, spanwire.SyncConnectionManager() as manager:
    call = spanwire.Call.chat("demo", [{"role": "user", "content": "Say hello"}])
    for _ in range(2):
        with manager.stream(server.endpoint(), call) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()
        print(stream.timeline)
