from __future__ import annotations

import json
import warnings
from typing import Any, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_spanwire.structured import response_format_of, tool_choice_of, tools_of
from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModelV1

from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, Script
from tests.integrations.langchain.asking import WAYS, ask
from tests.integrations.langchain.server import answer
from tests.integrations.langchain.test_chat import chat
from tests.support import serving

way_of = pytest.mark.parametrize("way", WAYS)


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


class JokeV1(BaseModelV1):
    """A joke."""

    setup: str
    punchline: str


class JokeDict(TypedDict):
    """A joke."""

    setup: str
    punchline: str


SCHEMA = Joke.model_json_schema()
FORMS: dict[str, Any] = {"pydantic": Joke, "pydantic v1": JokeV1, "typed dict": JokeDict, "json schema": SCHEMA}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def now() -> str:
    """The time."""
    return "noon"


@way_of
@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
@pytest.mark.parametrize("form", FORMS)
def test_answers_in_a_form(form: str, method: Any, strict: bool | None, way: str) -> None:
    if method == "json_mode" and strict is not None:
        strict = None
    schema = FORMS[form]
    with serving(answer) as server:
        bound = chat(server).with_structured_output(schema, method=method, strict=strict)
        found: Any = None
        if way == "stream":
            *_, found = bound.stream("q")
        elif way == "invoke":
            found = bound.invoke("q")
        else:
            seen = ask("ainvoke", bound)
            found = seen._message
        body = server.requests[-1].body
    if isinstance(schema, type) and issubclass(schema, (BaseModel, BaseModelV1)):
        assert isinstance(found, schema)
        assert dict(found).keys() == {"setup", "punchline"}
    else:
        assert found.keys() == {"setup", "punchline"}
    if method == "function_calling":
        function = body["tools"][0]["function"]
        assert body["tool_choice"] == {"type": "function", "function": {"name": function["name"]}}
        assert body["parallel_tool_calls"] is False
        assert function.get("strict") is strict
    elif method == "json_schema":
        inner = body["response_format"]["json_schema"]
        assert inner["schema"]["properties"].keys() == {"setup", "punchline"}
        assert inner["name"]
        assert inner.get("strict") is strict
    else:
        assert body["response_format"] == {"type": "json_object"}


@way_of
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_the_message_too(method: Any, way: str) -> None:
    if way == "astream":
        way = "ainvoke"
    with serving(answer, Script.say("no JSON")) as server:
        bound = chat(server).with_structured_output(Joke, method=method, include_raw=True)
        good: Any = bound.invoke("q") if way != "ainvoke" else ask(way, bound)._message
        bad: Any = bound.invoke("q")
    assert isinstance(good["raw"], AIMessage)
    assert good["raw"].response_metadata["spanwire"]
    assert isinstance(good["parsed"], Joke)
    assert good["parsing_error"] is None
    assert bad["parsed"] is None
    assert method == "function_calling" or isinstance(bad["parsing_error"], OutputParserException)


def test_json_mode_without_a_schema() -> None:
    with serving(Script.say('{"a": 1}')) as server:
        assert chat(server).with_structured_output(method="json_mode").invoke("q") == {"a": 1}


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_refusals_are_errors(way: str) -> None:
    body = {"choices": [{"index": 0, "message": {"content": None, "refusal": "I won't."}, "finish_reason": "stop"}]}
    with serving(Script(body=json.dumps(body).encode())) as server:
        bound = chat(server).with_structured_output(Joke, method="json_schema")
        with pytest.raises(Exception, match="I won't") as error:
            ask(way, bound)
        assert type(error.value).__name__ in ("ModelRefusalError", "OutputParserException")
        raw: Any = chat(server).with_structured_output(Joke, method="json_schema", include_raw=True).invoke("q")
        assert raw["parsed"] is None
        assert "I won't" in str(raw["parsing_error"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"schema": Joke, "method": "magic"}, "function_calling, json_schema or json_mode"),
        ({"schema": None}, "needs a schema"),
        ({"schema": None, "method": "json_schema"}, "needs a schema"),
        ({"schema": Joke, "method": "json_mode", "strict": True}, "says nothing"),
    ],
)
def test_what_makes_no_form(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says), LoopbackServer() as server:
        chat(server).with_structured_output(**given)


# --- tools ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (None, None),
        (False, None),
        (True, "required"),
        ("any", "required"),
        ("required", "required"),
        ("auto", "auto"),
        ("none", "none"),
        ("add", {"type": "function", "function": {"name": "add"}}),
        ({"type": "function", "function": {"name": "now"}}, {"type": "function", "function": {"name": "now"}}),
    ],
)
def test_which_tool(choice: Any, sent: Any) -> None:
    assert tool_choice_of(choice, tools_of([add, now])) == sent


def test_a_tool_with_a_word_of_ours_as_name_is_that_tool() -> None:
    tools = [{"type": "function", "function": {"name": "auto", "parameters": {}}}]
    assert tool_choice_of("auto", tools) == {"type": "function", "function": {"name": "auto"}}


def test_a_tool_of_the_server_is_chosen_by_its_type() -> None:
    assert tool_choice_of("web_search", [{"type": "web_search"}]) == {"type": "web_search"}


@pytest.mark.parametrize("choice", ["ad", 5, ["add"]])
def test_no_such_tool(choice: Any) -> None:
    with pytest.raises(ConfigurationError, match="tool_choice"):
        tool_choice_of(choice, tools_of([add]))


@way_of
def test_tools_are_called(way: str) -> None:
    with serving(answer) as server:
        bound = chat(server).bind_tools([add, now, Joke], tool_choice="add", strict=True, parallel_tool_calls=False)
        message = ask(way, bound, "3 and 4").message
        body = server.requests[-1].body
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("add", {"a": 3, "b": 4})]
    assert [one["function"]["name"] for one in body["tools"]] == ["add", "now", "Joke"]
    assert all(one["function"]["strict"] for one in body["tools"])
    assert body["parallel_tool_calls"] is False


def test_tools_and_a_form_together() -> None:
    """As agents bind them."""
    form = {"type": "json_schema", "json_schema": {"name": "Joke", "schema": SCHEMA}}
    with serving(answer) as server:
        for given in (form, Joke, JokeDict, SCHEMA):
            chat(server).bind_tools([add], response_format=given).invoke("q")
        sent = [request.body["response_format"] for request in server.requests]
    assert {one["type"] for one in sent} == {"json_schema"}
    assert all(one["json_schema"]["schema"]["properties"].keys() == {"setup", "punchline"} for one in sent)


def test_tools_and_forms_of_one_call() -> None:
    with serving(answer) as server:
        chat(server).invoke("q", tools=[add], response_format=Joke)
        body = server.requests[-1].body
    assert body["tools"][0]["function"]["name"] == "add"
    assert body["response_format"]["json_schema"]["name"] == "Joke"


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "text"}])
def test_a_form_that_is_one_stays(form: dict[str, Any]) -> None:
    assert response_format_of(form) == form
    assert response_format_of(form) is not form


def test_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schema in FORMS.values():
            response_format_of(schema, strict=True)
