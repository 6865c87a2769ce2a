"""A LangChain agent with two tools, streamed token by token. Needs `pip install "spanwire[langchain]" langchain`."""

import asyncio

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_spanwire import ChatSpanwire

from spanwire.testing import LoopbackServer, Script, ScriptedTool


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


@tool
def get_time(city: str) -> str:
    """The time in a city."""
    return f"Noon in {city}."


async def main(url: str) -> None:
    agent = create_agent(ChatSpanwire(model="demo", endpoint=url), [get_weather, get_time])
    question = {"messages": [{"role": "user", "content": "What should I wear in Lisbon now?"}]}
    async for mode, found in agent.astream(question, stream_mode=["messages", "updates"]):
        if mode == "messages":
            message = found[0]
            if isinstance(message, AIMessageChunk):
                print(message.text, end="", flush=True)
            elif isinstance(message, ToolMessage):
                print(f"{message.name}: {message.text}")
        elif "model" in found:
            answer: AIMessage = found["model"]["messages"][-1]
            timeline = answer.response_metadata["spanwire"]
            print(f"\n  [{timeline['total_s'] * 1e3:.1f} ms, connection re-used: {timeline['connection']['reused']}]")


city = '{"city": "Lisbon"}'
scripts = [
    Script(tool_calls=[ScriptedTool("get_weather", city), ScriptedTool("get_time", city)]),
    Script.say("It is noon and sunny: wear a hat."),
]
with LoopbackServer(scripts) as server:
    asyncio.run(main(server.url))
    print(f"{len(server.requests)} calls, {server.connections} connection")
