"""A plugin: hears of every call when it has ended, and sets a header. Packaging is a matter of one entry point."""

import spanwire
from spanwire.testing import LoopbackServer


class SlowCalls:
    """Keeps the slowest call."""

    def __init__(self) -> None:
        self.slowest: spanwire.Timeline | None = None

    def call_ended(self, timeline: spanwire.Timeline) -> None:
        if self.slowest is None or timeline.total_s > self.slowest.total_s:
            self.slowest = timeline


class Plugin:
    """What spanwire is given; only the hooks that it needs."""

    def __init__(self, observer: SlowCalls) -> None:
        self.observer = observer

    @spanwire.hookimpl
    def register_observers(self) -> list[SlowCalls]:
        return [self.observer]

    @spanwire.hookimpl
    def request_metadata(self, call: spanwire.Call) -> dict[str, str]:
        return {"x-team": "search", "x-model": call.model}


observer = SlowCalls()
with LoopbackServer() as server, spanwire.SyncConnectionManager(plugins=[Plugin(observer)]) as manager:
    for number in range(5):
        manager.complete(server.endpoint(), spanwire.Call.chat("demo", [{"role": "user", "content": str(number)}]))
    print({request.headers["x-team"] for request in server.requests}, server.connections, "connection")
print(observer.slowest)
