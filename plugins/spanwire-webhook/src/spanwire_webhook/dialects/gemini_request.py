"""PURE: a chat call as the body of ``POST /interactions``.

Sources: ai.google.dev/gemini-api/docs/interactions; types ``CreateModelInteraction``, ``GenerationConfig`` and ``Step`` of
google-genai 2.x (API revision 2026-05-20).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanwire.errors import ConfigurationError

from .gemini_turns import Called, Media, Part, Returned, Text, Turn, conversation

__all__ = ["Asked", "asked_of", "interaction_of"]

#: Parameters of chat completions that have the same meaning there, by Gemini's name.
_SAME = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
}
_LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")
#: Parameters of chat completions that Gemini lacks, the values that mean "as without it", and what to do instead.
_LACKING: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "ask for it in generation_config"),
    "frequency_penalty": ((0,), "leave it out"),
    "function_call": ((), "use tool_choice"),
    "functions": ((), "use tools"),
    "logit_bias": (({},), "leave it out"),
    "logprobs": ((False,), "leave it out"),
    "modalities": ((["text"], ("text",)), "it answers in text"),
    "n": ((1,), "make one call for each answer"),
    "parallel_tool_calls": ((True,), "leave it out"),
    "prediction": ((), "leave it out"),
    "presence_penalty": ((0,), "leave it out"),
    "store": ((True,), "what is worked on in the background is stored"),
    "stream_options": ((), "leave it out"),
    "top_logprobs": ((0,), "leave it out"),
    "verbosity": ((), "say it in the system's message"),
    "web_search_options": ((), "use tools=[{'type': 'google_search'}]"),
}
_LEVELS = frozenset({"minimal", "low", "medium", "high", "xhigh"})
_CHOICES = {"auto": "auto", "none": "none", "required": "any"}
#: Fields of an interaction that stand in a call as they are.
_OWN = frozenset(
    {
        *("cached_content", "continuation_token", "environment", "generation_config", "labels"),
        *("previous_interaction_id", "response_modalities", "safety_settings", "service_tier"),
    }
)


class Asked:
    """What a chat call says, in neither schema: for the one of interactions and for that of batches.

    Attributes:
        system, turns: see :func:`~.gemini_turns.conversation`.
        settings: ``temperature``, ``top_p``, ``seed``, ``max_output_tokens``, ``stop_sequences``, ``thinking_level``.
        functions: tools that are functions: name, description, parameters.
        tools: others, in Gemini's own form.
        choice: ``auto``, ``none`` or ``any``, and the names it is about; None if it is not said.
        json: the answer is to be JSON; ``schema``: of this form.
        rest: what else stands in the call.
    """

    __slots__ = ("choice", "functions", "json", "rest", "schema", "settings", "system", "tools", "turns")

    def __init__(self) -> None:
        self.system = ""
        self.turns: list[Turn] = []
        self.settings: dict[str, Any] = {}
        self.functions: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.choice: tuple[str, list[str]] | None = None
        self.json = False
        self.schema: Any = None
        self.rest: dict[str, Any] = {}


def asked_of(body: Mapping[str, Any]) -> Asked:
    """A chat call taken apart. Raises ConfigurationError: names the field that Gemini cannot be told."""
    rest = {name: value for name, value in body.items() if value is not None}
    rest.pop("stream", None)
    rest.pop("model", None)
    asked = Asked()
    for name, (neutral, instead) in _LACKING.items():
        if name in rest:
            value = rest.pop(name)
            if value not in neutral:
                raise ConfigurationError(f"{name}: Gemini has no such parameter; {instead}")
    asked.system, asked.turns = conversation(rest.pop("messages", ()))
    for name, own in _SAME.items():
        if name in rest:
            asked.settings[own] = rest.pop(name)
    _limit(rest, asked)
    stop = rest.pop("stop", None)
    if stop:
        asked.settings["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    effort = rest.pop("reasoning_effort", None)
    if effort is not None:
        if effort not in _LEVELS:
            raise ConfigurationError(
                f"reasoning_effort: {effort!r:.40} is none of Gemini's levels: minimal, low, medium, high, xhigh"
            )
        asked.settings["thinking_level"] = effort
    _tools(rest, asked)
    _form(rest, asked)
    asked.rest = rest
    return asked


def _limit(rest: dict[str, Any], asked: Asked) -> None:
    values = {name: rest.pop(name) for name in _LIMITS if name in rest}
    if values:
        first = next(iter(values.values()))
        if any(value != first for value in values.values()):
            raise ConfigurationError(f"{' and '.join(values)} are one parameter at Gemini, and differ here")
        asked.settings["max_output_tokens"] = first


def _tools(rest: dict[str, Any], asked: Asked) -> None:
    tools = rest.pop("tools", ())
    if not isinstance(tools, (list, tuple)):
        raise ConfigurationError(f"tools must be a list, not {type(tools).__name__}")
    for number, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        inner = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str) or kind == "custom":
            raise ConfigurationError(f"tools[{number}]: Gemini has functions, and tools of its own with a type")
        if kind != "function":
            asked.tools.append(dict(tool))  # Gemini's own: google_search, url_context, code_execution, ...
            continue
        function = inner if isinstance(inner, Mapping) else {n: v for n, v in tool.items() if n != "type"}
        if not isinstance(function.get("name"), str):
            raise ConfigurationError(f"tools[{number}]: the function has no name")
        # `strict` has no counterpart: Gemini holds to the schema as far as it supports it, in any case.
        asked.functions.append({n: v for n, v in function.items() if v is not None and n != "strict"})
    choice = rest.pop("tool_choice", None)
    if choice is not None:
        asked.choice = _choice(choice)


def _choice(choice: Any) -> tuple[str, list[str]]:
    if isinstance(choice, str) and choice in _CHOICES:
        return _CHOICES[choice], []
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    inner = choice.get(kind) if isinstance(kind, str) else None
    if kind == "function" and isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
        return "any", [inner["name"]]
    if kind == "allowed_tools" and isinstance(inner, Mapping) and inner.get("mode") in _CHOICES:
        listed = inner.get("tools")
        named = [
            tool["function"]["name"]
            for tool in (listed if isinstance(listed, (list, tuple)) else ())
            if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) and "name" in tool["function"]
        ]
        if named:
            return _CHOICES[inner["mode"]], named
    raise ConfigurationError(
        "tool_choice: Gemini can be told auto, none, required, one function, or allowed_tools that are functions"
    )


def _form(rest: dict[str, Any], asked: Asked) -> None:
    form = rest.pop("response_format", None)
    if form is None:
        return
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind not in {"text", "json_object", "json_schema"}:
        raise ConfigurationError(
            f"response_format: {kind!r:.40} is none that Gemini has: text, json_object and json_schema are"
        )
    if kind == "text":
        return
    asked.json = True
    if kind == "json_schema":
        inner = form.get("json_schema")
        asked.schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(asked.schema, Mapping):
            raise ConfigurationError("response_format: json_schema has no schema in it")


# --- an interaction -----------------------------------------------------------------------------------------------------


def interaction_of(body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The body of ``POST /interactions`` for a chat call.

    ``previous_interaction_id``, ``safety_settings``, ``generation_config`` and other fields of an interaction may stand in
    the call as they are.

    Raises:
        ConfigurationError: names the field that Gemini cannot be told.
    """
    asked = asked_of(body)
    unknown = [name for name in asked.rest if name not in _OWN]
    if unknown:
        raise ConfigurationError(f"{unknown[0]}: Gemini's interactions have no such parameter")
    found: dict[str, Any] = {"model": model.removeprefix("models/"), "input": list(_steps(asked.turns))}
    if asked.system:
        found["system_instruction"] = asked.system
    tools = [*({"type": "function", **function} for function in asked.functions), *asked.tools]
    if tools:
        found["tools"] = tools
    if asked.json:
        found["response_format"] = {"type": "text", "mime_type": "application/json"}
        if asked.schema is not None:
            found["response_format"]["schema"] = asked.schema
    settings = dict(asked.settings)
    if asked.choice is not None:
        mode, names = asked.choice
        settings["tool_choice"] = {"allowed_tools": {"mode": mode, "tools": names}} if names else mode
    own = asked.rest.pop("generation_config", {})
    if not isinstance(own, Mapping):
        raise ConfigurationError(f"generation_config must be a mapping, not {type(own).__name__}")
    for name in settings.keys() & own.keys():
        if settings[name] != own[name]:
            raise ConfigurationError(f"{name} stands in the call and in its generation_config, and differs")
    if settings or own:
        found["generation_config"] = {**settings, **own}
    return {**found, **asked.rest}


def _steps(turns: list[Turn]) -> Any:
    """Words and media of one turn are one step; calls, and what they gave back, are steps of their own."""
    for turn in turns:
        content: list[dict[str, Any]] = []
        kind = "user_input" if turn.role == "user" else "model_output"
        for part in turn.parts:
            if isinstance(part, (Text, Media)):
                content.append(_content(part))
                continue
            if content:
                yield {"type": kind, "content": content}
                content = []
            yield _step(part)
        if content:
            yield {"type": kind, "content": content}


def _content(part: Text | Media) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    found: dict[str, Any] = {"type": part.kind}
    if part.data is not None:
        found["data"] = part.data
    else:
        found["uri"] = part.uri
    if part.mime_type is not None:
        found["mime_type"] = part.mime_type
    if part.detail is not None:
        found["resolution"] = part.detail
    return found


def _step(part: Part) -> dict[str, Any]:
    if isinstance(part, Called):
        return {"type": "function_call", "id": part.id, "name": part.name, "arguments": part.arguments}
    assert isinstance(part, Returned)
    found: dict[str, Any] = {"type": "function_result", "call_id": part.id, "result": part.text}
    if part.name is not None:
        found["name"] = part.name
    return found
