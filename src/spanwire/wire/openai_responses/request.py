"""PURE: a chat call as the body of ``POST /v1/responses``, or of a ``response.create`` event.

What has the same meaning in Responses gets its name there; what has none is refused by name; everything else is sent as
it is, so that fields of Responses alone (``previous_response_id``, ``include``, ``reasoning``, ``truncation``, ...) and
fields that only one server knows can stand in a call. Names after ``openai.types.responses.ResponseCreateParams``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigurationError
from .items import input_items

__all__ = ["custom_tools", "encode_responses"]

#: Parameters of chat completions that Responses lacks, the values that mean "as without it", and what to do instead.
_LACKING: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "it answers in text"),
    "frequency_penalty": ((0,), "leave it out"),
    "function_call": ((), "use tool_choice"),
    "functions": ((), "use tools"),
    "logit_bias": (({},), "leave it out"),
    "modalities": ((["text"], ("text",)), "it answers in text"),
    "n": ((1,), "make one call for each answer"),
    "prediction": ((), "leave it out"),
    "presence_penalty": ((0,), "leave it out"),
    "seed": ((), "leave it out"),
    "stop": (([], (), ""), "cut the text where it is used"),
    "web_search_options": ((), "use tools=[{'type': 'web_search'}]"),
}
_LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")
_LOGPROBS = "message.output_text.logprobs"


def encode_responses(body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The body of ``POST /v1/responses`` for a chat call, without ``stream``.

    ``store`` is False unless the call says otherwise: OpenAI keeps answers for 30 days by default, and who makes a chat
    call does not ask for that. ``strict`` of a function tool is False unless it says otherwise, as in chat completions;
    Responses would take it for True.

    Args:
        body: of the :class:`~spanwire.calls.Call`: chat completions' parameters, without ``model``.
        model: the model's name.

    Raises:
        ConfigurationError: names the field that Responses cannot say, or two fields that contradict each other.
    """
    rest = {name: value for name, value in body.items() if value is not None}
    rest.pop("stream", None)
    for name, (neutral, instead) in _LACKING.items():
        if name in rest:
            value = rest.pop(name)
            if value not in neutral or isinstance(value, bool):
                raise ConfigurationError(f"{name}: the Responses API has no such parameter; {instead}")
    found: dict[str, Any] = {"model": model, "input": _input(rest), "store": rest.pop("store", False)}
    _limit(rest, found)
    _tools(rest, found)
    _text(rest, found)
    _reasoning(rest, found)
    _logprobs(rest, found)
    _stream_options(rest, found)
    rest.pop("model", None)
    return {**found, **rest}


def custom_tools(body: Mapping[str, Any]) -> frozenset[str]:
    """Names of the custom tools in a call's ``tools``, in the form of either API."""
    tools = body.get("tools")
    if not isinstance(tools, (list, tuple)):
        return frozenset()
    names = set()
    for tool in tools:
        if isinstance(tool, Mapping) and tool.get("type") == "custom":
            inner = tool.get("custom")
            name = (inner if isinstance(inner, Mapping) else tool).get("name")
            if isinstance(name, str):
                names.add(name)
    return frozenset(names)


def _input(rest: dict[str, Any]) -> Any:
    messages = rest.pop("messages", None)
    given = rest.pop("input", None)
    if given is None:
        return input_items(messages or (), custom=custom_tools(rest))
    if messages:
        raise ConfigurationError("messages and input are two ways to say the same; leave messages empty, or input out")
    return given


def _limit(rest: dict[str, Any], found: dict[str, Any]) -> None:
    values = {name: rest.pop(name) for name in _LIMITS if name in rest}
    if values:
        first = next(iter(values.values()))
        if any(value != first for value in values.values()):
            raise ConfigurationError(f"{' and '.join(values)} are one parameter in Responses, and differ here")
        found["max_output_tokens"] = first


# --- tools ------------------------------------------------------------------------------------------------------------


def _tools(rest: dict[str, Any], found: dict[str, Any]) -> None:
    if "tools" in rest:
        tools = rest.pop("tools")
        if not isinstance(tools, (list, tuple)):
            raise ConfigurationError(f"tools must be a list, not {type(tools).__name__}")
        found["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if "tool_choice" in rest:
        choice = rest.pop("tool_choice")
        found["tool_choice"] = _choice(choice) if isinstance(choice, Mapping) else choice


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise ConfigurationError(f"{where} must be a mapping with a type, not {type(tool).__name__}")
    kind = tool.get("type")
    inner = tool.get(kind) if kind in {"function", "custom"} else None
    if not isinstance(inner, Mapping):
        return dict(tool)  # in the form of Responses already, or one of its built-in tools
    more = {name: value for name, value in tool.items() if name not in {"type", kind}}
    fields = {name: value for name, value in inner.items() if value is not None}
    if kind == "custom":
        if isinstance(fields.get("format"), Mapping):
            fields["format"] = _format(fields["format"])
        return {"type": "custom", **fields, **more}
    fields.setdefault("parameters", {"type": "object", "properties": {}})
    fields.setdefault("strict", False)
    return {"type": "function", **fields, **more}


def _format(format_: Mapping[str, Any]) -> dict[str, Any]:
    grammar = format_.get("grammar")
    if isinstance(grammar, Mapping):
        return {**{name: value for name, value in format_.items() if name != "grammar"}, **grammar}
    return dict(format_)


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    inner = choice.get(kind) if isinstance(kind, str) else None
    if not isinstance(inner, Mapping):
        return dict(choice)
    fields = dict(inner)
    if kind == "allowed_tools" and isinstance(fields.get("tools"), (list, tuple)):
        fields["tools"] = [_choice(tool) if isinstance(tool, Mapping) else tool for tool in fields["tools"]]
    return {"type": kind, **fields}


# --- the form of the answer -------------------------------------------------------------------------------------------


def _text(rest: dict[str, Any], found: dict[str, Any]) -> None:
    text = _mapping(rest, "text")
    if "response_format" in rest:
        format_ = _response_format(rest.pop("response_format"))
        if text.setdefault("format", format_) != format_:
            raise ConfigurationError("response_format and text.format are one parameter in Responses, and differ here")
    if "verbosity" in rest:
        verbosity = rest.pop("verbosity")
        if text.setdefault("verbosity", verbosity) != verbosity:
            raise ConfigurationError("verbosity and text.verbosity are one parameter in Responses, and differ here")
    if text:
        found["text"] = text


def _response_format(format_: Any) -> dict[str, Any]:
    kind = format_.get("type") if isinstance(format_, Mapping) else None
    if kind not in {"text", "json_object", "json_schema"}:
        raise ConfigurationError(
            f"response_format: {kind!r:.40} is none that Responses has: text, json_object and json_schema are"
        )
    inner = format_.get("json_schema")
    if kind != "json_schema" or not isinstance(inner, Mapping):
        return dict(format_)
    return {"type": kind, **{name: value for name, value in inner.items() if value is not None}}


def _reasoning(rest: dict[str, Any], found: dict[str, Any]) -> None:
    reasoning = _mapping(rest, "reasoning")
    if "reasoning_effort" in rest:
        effort = rest.pop("reasoning_effort")
        if reasoning.setdefault("effort", effort) != effort:
            raise ConfigurationError(
                "reasoning_effort and reasoning.effort are one parameter in Responses, and differ here"
            )
    if reasoning:
        found["reasoning"] = reasoning


def _logprobs(rest: dict[str, Any], found: dict[str, Any]) -> None:
    if rest.pop("logprobs", None):
        include = rest.pop("include", None) or []
        found["include"] = [*include, *([] if _LOGPROBS in include else [_LOGPROBS])]


def _stream_options(rest: dict[str, Any], found: dict[str, Any]) -> None:
    """Usage comes in any case, at the end."""
    options = _mapping(rest, "stream_options")
    options.pop("include_usage", None)
    if options:
        found["stream_options"] = options


def _mapping(rest: dict[str, Any], name: str) -> dict[str, Any]:
    value = rest.pop(name, None)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} must be a mapping, not {type(value).__name__}")
    return dict(value)
