"""The spans of a cold and a warm call. Needs `pip install "spanwire[otel]"`.

Set the SDK up as you always do; spanwire uses the global providers.
"""

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

import spanwire
from spanwire.testing import LoopbackServer, Script


def line(span: ReadableSpan) -> str:
    duration_ms = ((span.end_time or 0) - (span.start_time or 0)) / 1e6
    found = {
        name.removeprefix("spanwire."): value
        for name, value in (span.attributes or {}).items()
        if name.startswith(("spanwire.segment.", "spanwire.connection.reused")) and name.count(".") <= 3
    }
    return f"{span.name:<26}{duration_ms:8.1f} ms  {found}\n"


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
trace.set_tracer_provider(provider)

with LoopbackServer(default=lambda _request: Script.say("Traced.", prefill_s=0.02)) as server:
    with spanwire.SyncConnectionManager() as manager, trace.get_tracer("app").start_as_current_span("agent"):
        for _ in range(2):
            manager.complete(server.endpoint(), spanwire.Call.chat("demo", [{"role": "user", "content": "hi"}]))
provider.shutdown()
