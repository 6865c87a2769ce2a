"""A tool call comes in pieces; the reply has it whole. Its result goes back as one more message."""

import json
from typing import Any

import spanwire
from spanwire.testing import LoopbackServer, Script, ScriptedTool

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def get_weather(city: str) -> str:
    return f"Sunny in {city}."


scripts = [Script(tool_calls=[ScriptedTool("get_weather", ('{"city":', ' "Lisbon"}'))]), Script.say("Take sunglasses.")]
with LoopbackServer(scripts) as server, spanwire.SyncConnectionManager() as manager:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What should I take to Lisbon?"}]
    while True:
        with manager.stream(server.endpoint(), spanwire.Call.chat("demo", messages, tools=TOOLS)) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        reply = stream.reply
        if not reply.tool_calls:
            break
        asked = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
        messages.append({"role": "assistant", "content": reply.text or None, "tool_calls": asked})
        for call in reply.tool_calls:
            print(f"{call.name}({call.arguments})")
            result = get_weather(**json.loads(call.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print()
