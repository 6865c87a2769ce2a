"""Chat and embeddings through LiteLLM, as its users call them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import litellm
import litellm_spanwire
import pydantic
import pytest

import spanwire
from spanwire.testing import LoopbackServer, Script, ScriptedTool
from tests.cases.play import DONE, choice, data, whole
from tests.integrations.litellm.support import WAYS, ask, run, to
from tests.support import MESSAGES

each_way = pytest.mark.parametrize("way", WAYS)
TEXT = "You said: Say hello"

# --- registering ----------------------------------------------------------------------------------------------------------


def test_registering_twice_is_once_and_leaves_others_alone() -> None:
    before = list(litellm.custom_provider_map)
    assert litellm_spanwire.register() is litellm_spanwire.handler
    assert litellm.custom_provider_map == before
    other = {"provider": "other", "custom_handler": litellm.CustomLLM()}
    kept, litellm.custom_provider_map = litellm.custom_provider_map, [other]  # as the proxy does
    try:
        litellm_spanwire.register()
        assert litellm.custom_provider_map[0] is other
        assert litellm.custom_provider_map[1]["custom_handler"] is litellm_spanwire.handler
    finally:
        litellm.custom_provider_map = kept
    assert litellm.provider_list.count("spanwire") == 1


def test_a_name_that_is_taken_is_told() -> None:
    theirs = {"provider": "spanwire", "custom_handler": litellm.CustomLLM()}
    kept, litellm.custom_provider_map = litellm.custom_provider_map, [theirs]
    try:
        with pytest.raises(spanwire.errors.ConfigurationError, match="already, of CustomLLM"):
            litellm_spanwire.register()
        assert litellm.custom_provider_map == [theirs]
    finally:
        litellm.custom_provider_map = kept


def test_litellm_has_no_provider_of_this_name() -> None:
    from litellm.llms.openai_like.json_loader import JSONProviderRegistry
    from litellm.types.utils import LlmProvidersSet

    assert "spanwire" not in LlmProvidersSet
    assert not JSONProviderRegistry.exists("spanwire")


def test_the_proxy_finds_the_handler_by_its_name() -> None:
    from litellm.proxy.types_utils.utils import get_instance_fn

    assert get_instance_fn("litellm_spanwire.handler", "/nowhere/config.yaml") is litellm_spanwire.handler


def test_a_manager_of_ones_own(server: LoopbackServer) -> None:
    seen = []

    class Observer:
        def call_ended(self, timeline: spanwire.Timeline) -> None:
            seen.append(timeline.outcome)

    class Plugin:
        @spanwire.hookimpl
        def register_observers(self) -> list[Observer]:
            return [Observer()]

    manager = spanwire.ConnectionManager(plugins=[Plugin()])
    litellm_spanwire.register(manager)
    litellm_spanwire.register()  # keeps it
    assert ask("completion", to(server)).text == TEXT
    assert ask("acompletion stream", to(server)).text == TEXT
    litellm_spanwire.handler.sync_manager.close()
    assert seen == ["completed", "completed"]


def test_by_default_it_shares_the_connections_of_the_process(server: LoopbackServer) -> None:
    with spanwire.sync.default_sync_manager() as manager:
        manager.complete(server.endpoint(), spanwire.Call.chat("m", MESSAGES))
        assert ask("completion", to(server)).text == TEXT
    assert server.connections == 1


# --- answers ----------------------------------------------------------------------------------------------------------------


@each_way
def test_text(server: LoopbackServer, way: str) -> None:
    seen = ask(way, to(server, "spanwire/org/family/m"))
    assert (seen.text, seen.finish_reason, seen.usage, seen.error) == (TEXT, "stop", (2, 4, 6), None)
    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    assert request.body["model"] == "org/family/m"
    assert request.headers["authorization"] == "Bearer sk-test"
    made = seen.chunks or [seen.response]
    assert {answer.model for answer in made[:1]} == {"org/family/m"}
    (id_,) = {answer.id for answer in made}  # LiteLLM's own last chunks repeat it
    assert id_.startswith("chatcmpl-000")  # as the server numbers its answers
    assert seen.report is not None
    assert seen.report["outcome"] == "completed"
    assert abs(sum(s["duration_s"] for s in seen.report["segments"].values()) - seen.report["total_s"]) < 1e-3
    assert not {"usage_source", "finish_reason"} & seen.report.keys()


@each_way
def test_reasoning(server: LoopbackServer, way: str) -> None:
    server.script(Script(reasoning=["think", " hard"], tokens=["so", " it", " is"]))
    seen = ask(way, to(server))
    assert (seen.reasoning, seen.text) == ("think hard", "so it is")


@each_way
def test_parallel_tool_calls(server: LoopbackServer, way: str) -> None:
    calls = [ScriptedTool("f", ['{"a"', ":1}"], id="t1"), ScriptedTool("g", '{"b":2}', id="t2")]
    server.script(Script(tokens=["see"], tool_calls=calls))
    seen = ask(way, to(server))
    assert seen.tools == [("t1", "f", '{"a":1}'), ("t2", "g", '{"b":2}')]
    assert (seen.text, seen.finish_reason) == ("see", "tool_calls")
    if seen.chunks:
        assert {call.type for c in seen.chunks if c.choices for call in c.choices[0].delta.tool_calls or []} == {
            "function"
        }
        built = litellm.stream_chunk_builder(seen.chunks)
        assert [call.function.arguments for call in built.choices[0].message.tool_calls] == ['{"a":1}', '{"b":2}']


@each_way
def test_tool_calls_without_index_or_id(server: LoopbackServer, way: str) -> None:
    entry = {"function": {"name": "f", "arguments": "{}"}}
    more = {"function": {"name": "g", "arguments": "{}"}}
    if "stream" in way:
        server.script(Script(writes=[data(choice(tool_calls=[entry, more])), data(choice("tool_calls")), DONE]))
    else:
        server.script(Script(body=whole("tool_calls", content=None, tool_calls=[entry, more])))
    seen = ask(way, to(server))
    assert [tool[1:] for tool in seen.tools] == [("f", "{}"), ("g", "{}")]
    assert len({tool[0] for tool in seen.tools}) == 2


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 10,
    "total_tokens": 19,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


@each_way
@pytest.mark.parametrize("place", ["after the finish", "on the finish", "before the finish"])
def test_usage_is_the_servers(server: LoopbackServer, way: str, place: str) -> None:
    alone = data({"choices": [], "usage": USAGE})
    writes = {
        "after the finish": [data(choice("stop")), alone],
        "on the finish": [data({**choice("stop"), "usage": USAGE})],
        "before the finish": [alone, data(choice("stop"))],
    }[place]
    if "stream" in way:
        server.script(Script(writes=[data(choice(content="ab")), *writes, DONE]))
    else:
        server.script(Script(body=whole(content="ab", usage=USAGE)))
    seen = ask(way, to(server))
    assert seen.usage == (9, 10, 19)
    assert seen.response.usage.prompt_tokens_details.cached_tokens == 2
    assert seen.response.usage.completion_tokens_details.reasoning_tokens == 3


@each_way
def test_usage_that_nobody_has_counted_is_marked(server: LoopbackServer, way: str) -> None:
    server.script(Script.say("Hello there", usage=None))
    seen = ask(way, to(server))
    assert seen.report is not None
    if "stream" in way:
        assert seen.report["usage_source"] == "estimated"
        assert seen.usage is not None  # by LiteLLM, which has no way to say that nobody knows
    else:
        assert (seen.usage, seen.report["usage_source"]) == (None, "unknown")


@each_way
def test_half_of_the_usage_is_marked(server: LoopbackServer, way: str) -> None:
    server.script(Script.say("Hello", usage=spanwire.Usage(input_tokens=3)))
    seen = ask(way, to(server))
    assert seen.usage == (3, 0, 3)
    assert seen.report is not None
    assert seen.report["usage_source"] == "incomplete"


@each_way
def test_what_only_some_servers_send(server: LoopbackServer, way: str) -> None:
    logprobs = {"content": [{"token": "ab", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
    common = {"id": "c1", "created": 1700000000, "model": "m-0125", "system_fingerprint": "fp"}
    if "stream" in way:
        first = {**choice(content="ab"), **common}
        first["choices"][0]["logprobs"] = logprobs
        refused = {**choice(refusal="no"), **common}
        server.script(Script(writes=[data(first), data(refused), data({**choice("stop"), **common}), DONE]))
    else:
        body = json.loads(whole(content="ab", refusal="no")) | common
        body["choices"][0]["logprobs"] = logprobs
        server.script(Script(body=json.dumps(body).encode()))
    seen = ask(way, to(server, logprobs=True))
    answers = seen.chunks[:1] or [seen.response]
    assert (answers[0].id, answers[0].created, answers[0].model) == ("c1", 1700000000, "m-0125")
    assert answers[0].system_fingerprint == "fp"
    assert answers[0].choices[0].logprobs.content[0].logprob == -0.5
    parts = [c.choices[0].delta for c in seen.chunks if c.choices] or [seen.response.choices[0].message]
    assert [part.refusal for part in parts if getattr(part, "refusal", None)] == ["no"]


@each_way
def test_the_answers_headers(server: LoopbackServer, way: str) -> None:
    server.script(Script.say("x", headers={"x-request-id": "r1", "x-ratelimit-remaining-requests": "5"}))
    seen = ask(way, to(server))
    hidden = (seen.chunks or [seen.response])[0]._hidden_params
    assert hidden["additional_headers"]["llm_provider-x-request-id"] == "r1"
    assert hidden["additional_headers"]["x-ratelimit-remaining-requests"] == "5"
    assert hidden["custom_llm_provider"] == "spanwire"


# --- requests -----------------------------------------------------------------------------------------------------------------


class Answer(pydantic.BaseModel):
    a: int


#: Parameters of OpenAI's that LiteLLM hands to every custom provider.
PASSED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "stop": ["x"],
    "max_tokens": 5,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"1": 2},
    "user": "u",
    "seed": 1,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "service_tier": "flex",
    "store": True,
    "prompt_cache_key": "k",
    "prediction": {"type": "content", "content": "x"},
    "top_k": 3,
    "guided_regex": "a+",
}


@each_way
def test_nothing_of_the_request_is_lost(server: LoopbackServer, way: str) -> None:
    assert ask(way, to(server, **PASSED, extra_body={"min_p": 0.1}, extra_headers={"x-a": "b"})).error is None
    (request,) = server.requests
    expected = {**PASSED, "min_p": 0.1, "model": "m", "messages": MESSAGES}
    if "stream" in way:
        expected |= {"stream": True, "stream_options": {"include_usage": True}}
    assert request.body == expected
    assert request.headers["x-a"] == "b"


def test_names_that_litellm_changes(server: LoopbackServer) -> None:
    assert ask("completion", to(server, max_completion_tokens=7, response_format=Answer, max_retries=3)).error is None
    (request,) = server.requests
    assert request.body["max_tokens"] == 7
    assert request.body["response_format"]["json_schema"]["schema"]["required"] == ["a"]
    assert "max_retries" not in request.body


@pytest.mark.parametrize("name", ["reasoning_effort", "verbosity"])
def test_parameters_that_have_to_be_allowed(server: LoopbackServer, name: str) -> None:
    seen = ask("completion", to(server, **{name: "low"}))
    assert isinstance(seen.error, litellm.UnsupportedParamsError)
    for more in ({name: "low", "allowed_openai_params": [name]}, {"extra_body": {name: "low"}}):
        assert ask("completion", to(server, **more)).error is None
        assert server.requests[-1].body[name] == "low"


@each_way
def test_two_answers_are_refused_and_not_one_given(server: LoopbackServer, way: str) -> None:
    seen = ask(way, to(server, n=2))
    assert isinstance(seen.error, litellm.BadRequestError)
    assert "one answer" in str(seen.error)
    assert server.requests == []


def test_a_conversation_with_tools_goes_back(server: LoopbackServer) -> None:
    server.script(Script(tool_calls=[ScriptedTool("f", id="t1")]), times=1)
    first = ask("completion", to(server)).response.choices[0].message
    messages = [*MESSAGES, first, {"role": "tool", "tool_call_id": "t1", "content": "3"}]
    assert ask("completion", to(server, messages=messages)).error is None
    sent = server.requests[-1].body["messages"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert sent[2]["content"] == "3"


@each_way
def test_settings_of_the_endpoint(server: LoopbackServer, way: str) -> None:
    settings = {"headers": {"x-a": "b"}, "query": {"v": "1"}, "options": {"include_usage": False}, "proxy": None}
    assert ask(way, to(server, transport="sse", spanwire=settings)).text == TEXT
    (request,) = server.requests
    assert (request.headers["x-a"], request.query) == ("b", "v=1")
    assert "stream_options" not in request.body
    assert not {"spanwire", "transport"} & request.body.keys()


async def _key() -> str:
    return "sk-async"


@each_way
@pytest.mark.parametrize(("key", "sent"), [(lambda: "sk-made", "sk-made"), (_key, "sk-async")])
def test_a_key_that_is_made_for_each_call(server: LoopbackServer, way: str, key: Any, sent: str) -> None:
    assert ask(way, to(server, spanwire={"proxy": None, "api_key": key})).text == TEXT
    assert server.requests[0].headers["authorization"] == f"Bearer {sent}"


@each_way
def test_a_unix_socket(tmp_path: Path, way: str) -> None:
    path = str(tmp_path / "s")
    with LoopbackServer(uds=path) as server:
        given = to(server, api_base="http://localhost/v1", spanwire={"uds": path})
        assert ask(way, given).text == TEXT


@each_way
def test_a_server_with_a_certificate_of_its_own(way: str) -> None:
    with LoopbackServer(tls=True) as server:
        trusted = to(server, spanwire={"proxy": None, "tls": {"ca": server.endpoint().tls.ca}})
        assert ask(way, trusted).text == TEXT
        seen = ask(way, to(server))
        assert "not trusted" in str(seen.error)


@each_way
def test_unknown_settings_are_named(server: LoopbackServer, way: str) -> None:
    seen = ask(way, to(server, spanwire={"verify": False}))
    assert isinstance(seen.error, litellm.BadRequestError)
    assert "does not know verify" in str(seen.error)
    assert ask(way, {**to(server), "api_base": None}).error.status_code == 400


# --- routes that LiteLLM builds on chat ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_responses(server: LoopbackServer, streamed: bool) -> None:
    made = litellm.responses(model="spanwire/m", input="Say hello", api_base=server.url, stream=streamed)
    if streamed:
        assert "".join(e.delta for e in made if e.type == "response.output_text.delta") == TEXT
    else:
        assert made.output_text == TEXT
    assert server.requests[0].path == "/v1/chat/completions"


def test_messages_and_text_completion(server: LoopbackServer) -> None:
    async def body() -> None:
        given = {"model": "spanwire/m", "api_base": server.url}
        made = await litellm.anthropic_messages(messages=MESSAGES, max_tokens=5, **given)
        assert made["content"][0]["text"] == TEXT
        assert (await litellm.atext_completion(prompt="Say hello", **given)).choices[0].text == TEXT

    run(body)


# --- embeddings -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["aembedding", "embedding"])
def test_embeddings(server: LoopbackServer, way: str) -> None:
    given: dict[str, Any] = {
        "model": "spanwire/org/e",
        "input": ["a", "b"],
        "api_base": server.url,
        "api_key": "k",
        "extra_body": {"dimensions": 3},
        "spanwire": {"proxy": None},
    }
    made = run(lambda: litellm.aembedding(**given)) if way == "aembedding" else litellm.embedding(**given)
    assert [row["index"] for row in made.data] == [0, 1]
    assert [len(row["embedding"]) for row in made.data] == [3, 3]
    assert made.model == "org/e"
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0
    found = litellm_spanwire.report(made)
    assert found is not None
    assert (found["outcome"], found.get("usage")) == ("completed", None)
    (request,) = server.requests
    assert request.body == {"model": "org/e", "input": ["a", "b"], "dimensions": 3}


def test_embeddings_without_usage(server: LoopbackServer) -> None:
    server.script(Script(usage=None))
    made = litellm.embedding("spanwire/e", ["a"], api_base=server.url)
    found = litellm_spanwire.report(made)
    assert found is not None
    assert (made.usage, found["usage_source"]) == (None, "unknown")


def test_embeddings_that_fail(server: LoopbackServer) -> None:
    server.script(Script(status=429, headers={"retry-after": "3"}))
    with pytest.raises(litellm.RateLimitError) as caught:
        litellm.embedding("spanwire/e", ["a"], api_base=server.url)
    assert caught.value.response.headers["retry-after"] == "3"


# --- cost and callbacks -----------------------------------------------------------------------------------------------------------


@each_way
def test_cost_and_callbacks(server: LoopbackServer, way: str) -> None:
    """The price is looked up by what was asked for, also where the server calls its model by another name."""
    heard: list[tuple[dict[str, Any], Any]] = []

    class Logger(litellm.integrations.custom_logger.CustomLogger):  # type: ignore[misc]
        def log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            if kwargs["model"] == "priced":  # LiteLLM tells of earlier calls late
                heard.append((kwargs, response_obj))

        async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            self.log_success_event(kwargs, response_obj, start_time, end_time)

    async def body() -> None:
        given = to(server, "spanwire/priced", stream="stream" in way)
        if way.startswith("acompletion"):
            made = await litellm.acompletion(**given)
            if "stream" in way:
                async for _ in made:
                    pass
        else:
            made = litellm.completion(**given)
            if "stream" in way:
                list(made)
        async with asyncio.timeout(20):
            while not heard:
                await asyncio.sleep(0.001)

    prices = {
        "input_cost_per_token": 1.0,
        "output_cost_per_token": 10.0,
        "litellm_provider": "spanwire",
        "mode": "chat",
    }
    litellm.register_model({"spanwire/priced": prices})
    litellm.callbacks = [Logger()]
    named = {"id": "c1", "model": "priced-0125", "usage": USAGE}
    if "stream" in way:
        server.script(Script(writes=[data({**choice(content="a"), **named}), data({**choice("stop"), **named}), DONE]))
    else:
        server.script(Script(body=json.dumps(json.loads(whole(content="a")) | named).encode()))
    run(body)
    kwargs, response = heard[0]
    assert kwargs["response_cost"] == 9 * 1.0 + 10 * 10.0
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (9, 10)
    assert kwargs["spanwire"]["outcome"] == "completed"


# --- looked at from outside -----------------------------------------------------------------------------------------------


@each_way
def test_a_variable_alone_shows_each_call(
    way: str, server: LoopbackServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPANWIRE_WATERFALL", "1")
    with spanwire.SyncConnectionManager() as manager:
        litellm_spanwire.handler.use(manager.manager)
        seen = ask(way, to(server))
    assert (seen.error, seen.text) == (None, TEXT)
    lines = [line for line in capsys.readouterr().err.splitlines() if "LiteLLM:" not in line]  # its own log
    assert lines[0] == f"chat m  {server.url.split('/')[2]} over sse"
    assert lines[1].startswith("completed in ")
    assert lines[-1].startswith("total ")
    assert [line.split()[0] for line in lines].count("total") == 1
