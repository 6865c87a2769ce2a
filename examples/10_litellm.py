"""LiteLLM's provider `spanwire`: streams that keep their connection, a router with a fallback, and the timeline."""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # LiteLLM: no list of prices from the network

import litellm
import litellm_spanwire

from spanwire.testing import LoopbackServer, Script

litellm_spanwire.register()
litellm.suppress_debug_info = True
messages = [{"role": "user", "content": "Say hello"}]

with LoopbackServer() as server, LoopbackServer() as overloaded:
    for _ in range(2):
        stream = litellm.completion("spanwire/demo", messages, api_base=server.url, stream=True)
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        timeline = litellm_spanwire.report(stream)
        print(f"\n{timeline['total_s'] * 1e3:.1f} ms, reused={timeline['connection']['reused']}")
    print(server.connections, "connection")

    overloaded.script(Script(status=503))
    router = litellm.Router(
        [
            {"model_name": name, "litellm_params": {"model": "spanwire/demo", "api_base": url}}
            for name, url in (("first", overloaded.url), ("second", server.url))
        ],
        fallbacks=[{"first": ["second"]}],
        num_retries=0,
    )
    print(router.completion("first", messages).choices[0].message.content)
