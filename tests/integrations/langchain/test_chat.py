from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField, RunnableConfig
from langchain_spanwire import ChatSpanwire

import spanwire
from spanwire import errors
from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from tests.integrations.langchain.asking import STREAMS, WAYS, ask, model_on
from tests.support import AT_ONCE, hello, run, serving, wait_for

way_of = pytest.mark.parametrize("way", WAYS)
stream_of = pytest.mark.parametrize("way", STREAMS)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with serving() as server:
        yield server


def chat(server: LoopbackServer, **more: Any) -> ChatSpanwire:
    return ChatSpanwire(model="m", endpoint=more.pop("endpoint", server.url), **more)


def body_of(server: LoopbackServer, way: str = "invoke", prompt: Any = "q", /, **fields: Any) -> dict[str, Any]:
    call = fields.pop("call", {})
    assert ask(way, chat(server, **fields), prompt, **call).error is None
    body = dict(server.requests[-1].body)
    assert body.pop("messages")
    return body


# --- what is sent -----------------------------------------------------------------------------------------------------

ALL = {
    "temperature": 0.0,
    "top_p": 0.5,
    "max_tokens": 7,
    "max_completion_tokens": 8,
    "seed": 0,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {"5": 1},
    "reasoning_effort": "low",
    "verbosity": "low",
    "service_tier": "flex",
    "stop": ["x"],
}


@way_of
def test_the_fields_are_sent(server: LoopbackServer, way: str) -> None:
    sent = body_of(server, way, **{**ALL, "logit_bias": {5: 1}})
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if way in STREAMS else {}
    assert sent == {"model": "m", **ALL, **streamed}


def test_nothing_is_sent_that_was_not_given(server: LoopbackServer) -> None:
    assert body_of(server, stop=[]) == {"model": "m"}


@way_of
def test_messages(server: LoopbackServer, way: str) -> None:
    ask(way, chat(server), [SystemMessage("be brief"), HumanMessage("q")])
    assert server.requests[-1].body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q"},
    ]


@way_of
def test_parameters_of_one_call(server: LoopbackServer, way: str) -> None:
    call = {"model": "other", "temperature": 1, "stop": ["y"], "user": "u", "seed": None, "extra_body": {"top_k": 3}}
    sent = body_of(server, way, temperature=0, stop=["x"], seed=5, extra_body={"top_k": 1, "min_p": 0.1}, call=call)
    for name in ("stream", "stream_options"):
        sent.pop(name, None)
    assert sent == {"model": "other", "temperature": 1, "stop": ["y"], "user": "u", "top_k": 3, "min_p": 0.1}


def test_which_word_is_the_last(server: LoopbackServer) -> None:
    sent = body_of(server, temperature=0, top_p=0, model_kwargs={"temperature": 1, "top_p": 1}, extra_body={"top_p": 2})
    assert sent == {"model": "m", "temperature": 1, "top_p": 2}


def test_a_limit_of_one_call_replaces_the_model_s_whatever_its_name(server: LoopbackServer) -> None:
    assert body_of(server, max_completion_tokens=5, call={"max_tokens": 1}) == {"model": "m", "max_tokens": 1}
    assert body_of(server, max_tokens=5, call={"max_completion_tokens": 1}) == {
        "model": "m",
        "max_completion_tokens": 1,
    }


def test_the_last_word_on_the_model(server: LoopbackServer) -> None:
    assert body_of(server, extra_body={"model": "x"}, call={"model": "y"}) == {"model": "x"}
    assert body_of(server, model_kwargs={"model": "x"}) == {"model": "x"}
    assert body_of(server, call={"model": None}) == {"model": "m"}


@pytest.mark.parametrize("name", ["messages", "headers", "stream"])
def test_what_is_no_parameter(server: LoopbackServer, name: str) -> None:
    assert isinstance(ask("invoke", chat(server, model_kwargs={name: []})).error, ConfigurationError)
    assert isinstance(ask("ainvoke", chat(server, extra_body={name: []})).error, ConfigurationError)


def test_no_stop_for_one_call(server: LoopbackServer) -> None:
    assert body_of(server, stop=["x"], call={"stop": []}) == {"model": "m"}


@way_of
def test_headers_of_one_call(server: LoopbackServer, way: str) -> None:
    ask(way, chat(server, default_headers={"x-a": "1", "x-b": "1"}), extra_headers={"X-B": "2"})
    headers = server.requests[-1].headers
    assert (headers["x-a"], headers["x-b"]) == ("1", "2")


@stream_of
def test_usage_may_not_be_asked_for(server: LoopbackServer, way: str) -> None:
    for fields, call in (({"stream_usage": False}, {}), ({}, {"stream_usage": False})):
        seen = ask(way, chat(server, **fields), **call)
        assert seen.message.usage_metadata is None
        assert "stream_options" not in server.requests[-1].body
    assert server.connections <= 2  # each loop's one; the same connection serves both


@way_of
def test_several_answers_are_refused(server: LoopbackServer, way: str) -> None:
    assert isinstance(ask(way, chat(server), n=2).error, ConfigurationError)
    assert not server.requests


# --- when it streams ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "call", "streamed"),
    [
        ({}, {}, False),
        ({"streaming": True}, {}, True),
        ({"streaming": False}, {}, False),
        ({}, {"stream": True}, True),
        ({"streaming": True}, {"stream": False}, False),
        ({"streaming": True, "disable_streaming": True}, {}, False),
    ],
)
@pytest.mark.parametrize("way", ["ainvoke", "invoke"])
def test_invoke_streams_if_it_is_told_to(
    server: LoopbackServer, way: str, fields: dict[str, Any], call: dict[str, Any], streamed: bool
) -> None:
    sent = body_of(server, way, **fields, call=call)
    assert sent.get("stream", False) is streamed


@stream_of
def test_streaming_can_be_turned_off(server: LoopbackServer, way: str) -> None:
    tools = chat(server, disable_streaming="tool_calling").bind_tools([{"type": "function", "function": {"name": "f"}}])
    for model in (chat(server, disable_streaming=True), chat(server, streaming=False), tools):
        seen = ask(way, model)
        assert "stream" not in server.requests[-1].body
        assert seen.message.content == "You said: q"


# --- what comes back ------------------------------------------------------------------------------------------------------


@way_of
def test_the_timeline_reaches_the_user_once(server: LoopbackServer, way: str) -> None:
    seen = ask(way, chat(server))
    timeline = seen.timeline
    assert timeline["outcome"] == "completed"
    total = sum(segment["duration_s"] for segment in timeline["segments"].values())
    assert total == pytest.approx(timeline["total_s"], abs=1e-3)
    assert timeline["model"] == "m"
    if way in STREAMS:
        assert sum("spanwire" in chunk.response_metadata for chunk in seen.chunks) == 1


@way_of
def test_metadata(server: LoopbackServer, way: str) -> None:
    server.script(hello(headers={"x-request-id": "r1"}))
    message = ask(way, chat(server, include_response_headers=True)).message
    metadata = message.response_metadata
    assert (metadata["model_name"], metadata["finish_reason"], metadata["request_id"]) == ("m", "stop", "r1")
    assert metadata["headers"]["x-request-id"] == "r1"
    assert message.usage_metadata is not None
    assert message.id is not None


@way_of
@pytest.mark.parametrize("version", [None, "v0", "v1"])
def test_content_blocks(server: LoopbackServer, way: str, version: str | None) -> None:
    tools = [ScriptedTool("f", ['{"a"', ": 1}"]), ScriptedTool("g", "{}")]
    server.script(Script(reasoning=["h", "m"], tokens=["a", "b"], tool_calls=tools))
    message = ask(way, chat(server, output_version=version)).message
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text", "tool_call", "tool_call"]
    assert [call["args"] for call in message.tool_calls] == [{"a": 1}, {}]
    assert isinstance(message.content, list) is (version == "v1")
    assert message.text == "ab"
    again = ask(way, chat(server, output_version=version), [HumanMessage("q"), message])
    assert again.error is None
    sent = server.requests[-1].body["messages"][1]
    assert sent["content"] == "ab"
    assert [call["function"]["name"] for call in sent["tool_calls"]] == ["f", "g"]
    assert sent.keys() == {"role", "content", "tool_calls"}


@way_of
def test_log_probabilities(server: LoopbackServer, way: str) -> None:
    found = {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}]}
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"logprobs":%b}]}\n\n'
    whole = {"choices": [{"index": 0, "message": {"content": "a"}, "logprobs": found, "finish_reason": "stop"}]}
    if way in STREAMS:
        answer = Script(writes=[event % msgspec.json.encode(found), b"data: [DONE]\n\n"])
    else:
        answer = Script(body=msgspec.json.encode(whole))
    server.script(answer)
    assert ask(way, chat(server, logprobs=True)).message.response_metadata["logprobs"] == found
    assert ask(way, chat(server), logprobs=True).message.response_metadata["logprobs"] == found
    assert "logprobs" not in ask(way, chat(server)).message.response_metadata


def test_many_at_once(server: LoopbackServer) -> None:
    model = chat(server)
    prompts: list[Any] = [str(number) for number in range(20)]
    assert [str(m.content) for m in model.batch(prompts)] == [f"You said: {p}" for p in prompts]
    found = run(lambda: model.abatch(prompts))
    assert [str(m.content) for m in found] == [f"You said: {p}" for p in prompts]


def test_counts_of_several_prompts_are_added_up(server: LoopbackServer) -> None:
    result = chat(server).generate([[HumanMessage("one two")], [HumanMessage("three")]])
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["prompt_tokens"] == 3
    assert result.llm_output["model_name"] == "m"


def test_usage_callback(server: LoopbackServer) -> None:
    callback = UsageMetadataCallbackHandler()
    chat(server).invoke("one two", config={"callbacks": [callback]})
    assert callback.usage_metadata["m"]["input_tokens"] == 2


@pytest.mark.parametrize("way", ["ainvoke", "invoke"])  # LangChain does not look into its cache for streams
def test_a_cache(server: LoopbackServer, way: str) -> None:
    model = chat(server, cache=InMemoryCache())
    assert ask(way, model).message.content == ask(way, model).message.content
    assert len(server.requests) == 1
    for other in ({"temperature": 1}, {"extra_body": {"top_k": 1}}, {"model_kwargs": {"user": "u"}}):
        assert ask(way, chat(server, cache=model.cache, **other)).error is None
    assert len(server.requests) == 4


@way_of
def test_a_rate_limiter(server: LoopbackServer, way: str) -> None:
    limiter = InMemoryRateLimiter(requests_per_second=1000, check_every_n_seconds=0.001, max_bucket_size=1)
    assert ask(way, chat(server, rate_limiter=limiter)).error is None


def test_events_v2(server: LoopbackServer) -> None:
    async def body() -> list[dict[str, Any]]:
        return [dict(event) async for event in chat(server).astream_events("q", version="v2")]

    events = run(body)
    assert events[0]["event"] == "on_chat_model_start"
    assert events[0]["metadata"]["ls_provider"] == "spanwire"
    assert "".join(e["data"]["chunk"].content for e in events if e["event"] == "on_chat_model_stream") == "You said: q"
    assert events[-1]["data"]["output"].response_metadata["spanwire"]["outcome"] == "completed"


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
@pytest.mark.parametrize("version", [None, "v1"])
def test_events_v3(server: LoopbackServer, version: str | None) -> None:
    server.script(Script(reasoning=["h", "m"], tokens=["a", "b"], tool_calls=[ScriptedTool("f", ['{"a"', ": 1}"])]))
    stream = chat(server, output_version=version).stream_events("q", version="v3")
    kinds = [event["event"] for event in stream]
    assert kinds[0] == "message-start"
    assert kinds[-1] == "message-finish"
    message = stream.output
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text", "tool_call"]
    assert message.tool_calls[0]["args"] == {"a": 1}
    assert message.usage_metadata is not None


def test_langsmith_parameters(server: LoopbackServer) -> None:
    model = chat(server, temperature=0.5, max_tokens=7, stop=["x"])
    assert model._get_ls_params() == {
        "ls_provider": "spanwire",
        "ls_model_name": "m",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 7,
        "ls_stop": ["x"],
    }
    found = model._get_ls_params(stop=["y"], model="other", temperature=1, max_completion_tokens=3)
    assert (found["ls_model_name"], found["ls_temperature"], found["ls_stop"]) == ("other", 1, ["y"])
    assert found["ls_max_tokens"] == 3


def test_fields_can_be_set_by_the_configuration(server: LoopbackServer) -> None:
    fields = {
        "temperature": ConfigurableField(id="heat"),
        "model_name": ConfigurableField(id="which"),
        "endpoint": ConfigurableField(id="where"),
    }
    model: Any = chat(server, endpoint="http://127.0.0.1:1/v1", temperature=0, api_key="k").configurable_fields(
        **fields
    )
    config = {"configurable": {"heat": 0.7, "which": "other", "where": server.url}}
    assert model.invoke("q", config=config).content == "You said: q"
    body = server.requests[-1].body
    assert (body["temperature"], body["model"]) == (0.7, "other")
    assert server.requests[-1].headers["authorization"] == "Bearer k"


# --- errors -----------------------------------------------------------------------------------------------------------------


@way_of
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.BadRequest),
        (401, errors.AuthenticationFailed),
        (429, errors.RateLimited),
        (500, errors.ServerError),
        (503, errors.Overloaded),
    ],
)
def test_errors_are_spanwire_s(way: str, status: int, kind: type[errors.SpanwireError]) -> None:
    with serving(Script(status=status)) as server:
        seen = ask(way, chat(server, max_retries=0))
        assert len(server.requests) == 1
    assert isinstance(seen.error, kind)
    assert seen.error.timeline is not None


@way_of
def test_retries_of_the_model(way: str) -> None:
    endpoint: dict[str, Any] = {"retries": AT_ONCE}
    with serving(Script(status=500), Script(status=429), hello()) as server:
        seen = ask(way, chat(server, endpoint=server.endpoint(**endpoint), max_retries=2))
        assert len(server.requests) == 3
    assert seen.message.content == "Hello from the loopback server."
    assert len(seen.timeline["attempts"]) == 3


@way_of
def test_retries_and_fallbacks_of_langchain(way: str) -> None:
    with serving(Script(status=503), Script(status=503), hello()) as server:
        model = chat(server, max_retries=0)
        again = model.with_retry(retry_if_exception_type=(errors.Overloaded,), wait_exponential_jitter=False)
        if way not in STREAMS:  # LangChain retries no streams
            assert ask(way, again).error is None
            assert len(server.requests) == 3
    with serving(Script(status=503)) as broken, serving() as server:
        both = chat(broken, max_retries=0).with_fallbacks([chat(server)], exceptions_to_handle=(errors.SpanwireError,))
        seen = ask(way, both)
        assert seen.error is None
        assert len(server.requests) == len(broken.requests) == 1
    assert "".join(str(c.content) for c in seen.chunks) in ("", "You said: q")


@way_of
def test_time_limits(way: str) -> None:
    with serving(Script(hang_after="request")) as server:
        seen = ask(way, chat(server, max_retries=0, timeout=0.05))
        assert isinstance(seen.error, errors.CallTimeout)
        assert seen.error.limit == "first_content_s"
        seen = ask(way, chat(server, max_retries=0), timeout=spanwire.Timeouts(total_s=0.05))
        assert isinstance(seen.error, errors.CallTimeout)
        assert seen.error.limit == "total_s"


# --- leaving early: nothing stays open ---------------------------------------------------------------------------------

SLOW = Script(tokens=["a"] * 1000, gap_s=0.02)


def test_leaving_a_synchronous_stream() -> None:
    with serving(SLOW) as server, model_on(server) as model:
        stream = model.stream("q")
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        server.wait_for(lambda s: s.requests[0].left)
        for chunk in model.stream("q"):
            assert chunk.content
            break
        gc.collect()
        server.wait_for(lambda s: all(request.left for request in s.requests))


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "cancel a chain", "cancel ainvoke", "events v3"])
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_leaving_an_asynchronous_call(way: str) -> None:
    async def read(model: Any, got: asyncio.Event) -> None:
        async for _ in model.astream("q"):
            got.set()

    async def body() -> None:
        with serving(SLOW) as server:
            manager = spanwire.ConnectionManager()
            model: Any = chat(server, manager=manager)
            if way == "break":
                async for _ in model.astream("q"):
                    break
                gc.collect()
            elif way == "aclose":
                stream = model.astream("q")
                await anext(stream)
                await stream.aclose()
            elif way == "events v3":
                events = await model.astream_events("q", version="v3")
                async for _ in events:
                    break
                await events.aclose()
            else:
                if way == "cancel a chain":
                    model = ChatPromptTemplate.from_messages([("human", "{q}")]) | model
                got = asyncio.Event()
                work = model.ainvoke("q") if way == "cancel ainvoke" else read(model, got)
                task = asyncio.ensure_future(work)
                if way == "cancel ainvoke":
                    await wait_for(server, lambda s: s.requests)
                else:
                    await got.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await wait_for(server, lambda s: s.requests[0].left and not s.open_connections)
            await manager.aclose()

    run(body)


def test_config_reaches_the_call_and_content_is_left_alone(server: LoopbackServer) -> None:
    config: RunnableConfig = {"tags": ["t"], "metadata": {"a": 1}}
    message = HumanMessage("q")
    assert isinstance(chat(server).invoke([message], config=config), AIMessage)
    assert message == HumanMessage("q")


# --- looked at from outside -------------------------------------------------------------------------------------------


@way_of
def test_a_variable_alone_shows_each_call(
    way: str, server: LoopbackServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPANWIRE_WATERFALL", "1")
    with spanwire.SyncConnectionManager() as manager:
        asked = ask(way, chat(server, manager=manager), "q")
    assert asked.error is None
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"chat m  {server.url.split('/')[2]} over sse"
    assert lines[1].startswith("completed in ")
    assert [line.split()[0] for line in lines].count("total") == 1
    assert lines[-1].startswith("total ")
