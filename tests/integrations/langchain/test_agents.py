"""LangGraph agents, completed, cancelled and abandoned: whatever happens, nothing stays open on the server."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from langchain_spanwire import ChatSpanwire
from pydantic import BaseModel

import spanwire
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from spanwire.testing.loopback import Request
from tests.support import run, serving, wait_for

THREE = [ScriptedTool("look_up", ['{"what": "', f'{number}"}}'], f"t{number}") for number in range(3)]


def answers(*, slow: bool = False) -> Any:
    """Three calls at once; for the tools, which ask the model again, a short answer; then the last word."""

    def answer(request: Request) -> Script:
        messages = request.body["messages"]
        if messages[-1]["role"] == "tool":
            assert len(messages) == 5
            return Script.say("All three are known.")
        if messages[-1]["content"].startswith("about"):
            return Script(tokens=["w "] * 500, gap_s=0.02) if slow else Script.say("it is known")
        assert len(request.body["tools"]) == 1
        return Script(tool_calls=THREE)

    return answer


def agent_on(server: LoopbackServer, manager: spanwire.ConnectionManager, **more: Any) -> Any:
    model = ChatSpanwire(model="m", endpoint=server.url, manager=manager, **more)

    async def look_up(what: str) -> str:
        """Look something up."""
        return str((await model.ainvoke(f"about {what}", stream=True)).content)

    def look_up_sync(what: str) -> str:
        return str(model.invoke(f"about {what}").content)

    tool = StructuredTool.from_function(look_up_sync, coroutine=look_up, name="look_up", description="Look it up.")
    return create_agent(model, [tool])


QUESTION: Any = {"messages": [{"role": "user", "content": "three things"}]}


def check_completed(state: dict[str, Any]) -> None:
    messages = state["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "tool", "tool", "ai"]
    assert [message.content for message in messages[2:5]] == ["it is known"] * 3
    assert messages[-1].content == "All three are known."
    for message in messages:
        if isinstance(message, AIMessage):
            assert message.response_metadata["spanwire"]["outcome"] == "completed"
            assert message.usage_metadata is not None


@pytest.mark.parametrize("version", [None, "v1"])
def test_completed(version: str | None) -> None:
    async def body() -> None:
        with serving(answers()) as server:
            async with spanwire.ConnectionManager() as manager:
                agent = agent_on(server, manager, output_version=version)
                state = await agent.ainvoke(QUESTION)
                if version is None:
                    check_completed(state)
                assert state["messages"][-1].text == "All three are known."
                assert len(server.requests) == 5
                assert server.connections <= 3  # as many as there were calls at once
            assert all(request.ended for request in server.requests)
            await wait_for(server, lambda s: s.open_connections == 0)

    run(body)


def test_completed_in_synchronous_code() -> None:
    with serving(answers()) as server:
        manager = spanwire.ConnectionManager()
        with spanwire.SyncConnectionManager(manager):
            check_completed(agent_on(server, manager).invoke(QUESTION))
            assert all(request.ended for request in server.requests)
        server.wait_for(lambda s: s.open_connections == 0)


def test_tokens_of_an_agent() -> None:
    """`stream_mode="messages"` makes LangGraph stream what is only invoked."""

    async def body() -> None:
        with serving(answers()) as server:
            async with spanwire.ConnectionManager() as manager:
                seen: dict[str, list[str]] = {}
                agent = agent_on(server, manager)
                async for message, metadata in agent.astream(QUESTION, stream_mode="messages"):
                    if message.type.startswith("AI"):
                        assert metadata["ls_provider"] == "spanwire"
                        seen.setdefault(message.id, []).append(message.text)
                assert "".join(list(seen.values())[-1]) == "All three are known."
                assert all(request.body["stream"] for request in server.requests)

    run(body)


@pytest.mark.parametrize("way", ["cancelled", "abandoned", "closed"])
def test_nothing_stays_open(way: str) -> None:
    async def body() -> None:
        with serving(answers(slow=True)) as server:
            manager = spanwire.ConnectionManager()
            agent = agent_on(server, manager)
            if way == "cancelled":
                task = asyncio.ensure_future(agent.ainvoke(QUESTION))
                await wait_for(server, lambda s: sum(r.content_ns is not None for r in s.requests) == 4)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                stream = agent.astream(QUESTION, stream_mode=["messages", "updates"])
                from_tools = 0
                async for _mode, (*_, metadata) in stream:
                    from_tools += isinstance(metadata, dict) and metadata.get("langgraph_node") == "tools"
                    if from_tools > 5:
                        break
                if way == "closed":
                    await stream.aclose()
                else:
                    del stream
                    gc.collect()
            await wait_for(server, lambda s: all(request.ended or request.left for request in s.requests))
            assert len(server.requests) == 4
            assert sum(request.left for request in server.requests) == 3
            await manager.aclose()
            await wait_for(server, lambda s: s.open_connections == 0)
        async with asyncio.timeout(5):  # LangGraph ends tasks of its own behind a stream that was dropped
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)

    run(body)


def test_answers_in_a_form() -> None:
    class Weather(BaseModel):
        city: str
        degrees: int

    def answer(request: Request) -> Script:
        tools = [tool["function"]["name"] for tool in request.body["tools"]]
        assert tools == ["Weather"]
        return Script(tool_calls=[ScriptedTool("Weather", '{"city": "Oslo", "degrees": 3}')])

    with serving(answer) as server:
        model = ChatSpanwire(model="m", endpoint=server.url)
        state = create_agent(model, [], response_format=Weather).invoke(QUESTION)
    assert state["structured_response"] == Weather(city="Oslo", degrees=3)


def test_answers_in_a_form_by_the_server() -> None:
    from langchain.agents.structured_output import ProviderStrategy

    class Weather(BaseModel):
        city: str
        degrees: int

    with serving(Script.say('{"city": "Oslo", "degrees": 3}')) as server:
        model = ChatSpanwire(model="m", endpoint=server.url)
        state = create_agent(model, [], response_format=ProviderStrategy(Weather)).invoke(QUESTION)
        form = server.requests[0].body["response_format"]
    assert form["json_schema"]["name"] == "Weather"
    assert state["structured_response"] == Weather(city="Oslo", degrees=3)
