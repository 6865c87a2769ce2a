"""Tools and answers in a given form: what is bound to a model, and what reads its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from langchain_core import exceptions
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_function, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from spanwire.errors import ConfigurationError

__all__ = ["Tool", "Tools", "parsed_by", "response_format_of", "tool_choice_of", "tools_of"]

Tool = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
Tools = Sequence[Tool]

#: Raised where an answer in a given form was refused. `ModelRefusalError` where langchain-core has it (1.7.5).
_Refusal: type[Exception] = getattr(exceptions, "ModelRefusalError", exceptions.OutputParserException)


def tools_of(tools: Tools, *, strict: bool | None = None) -> list[dict[str, Any]]:
    """Tools in OpenAI's shape."""
    return [convert_to_openai_tool(tool, strict=strict) for tool in tools]


def tool_choice_of(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """``tool_choice`` as servers know it; None to leave it out.

    Args:
        choice: a tool's name, ``"auto"``, ``"none"``, ``"any"`` or ``"required"``, True (the same), False or None
            (left out), or OpenAI's own mapping.
        tools: those that can be chosen.

    Raises:
        ConfigurationError: of another type, or a name that no tool has.
    """
    if choice is None or choice is False:
        return None
    if choice is True or choice in ("any", "required"):
        return "required"
    if isinstance(choice, Mapping):
        return dict(choice)
    if not isinstance(choice, str):
        raise ConfigurationError(
            f"tool_choice must be a tool's name, 'auto', 'none', 'required', True or a mapping, not {type(choice).__name__}"
        )
    names = [tool["function"]["name"] for tool in tools if "function" in tool]
    if choice in names:
        return {"type": "function", "function": {"name": choice}}
    if choice in ("auto", "none"):
        return choice
    if any(choice == tool.get("type") for tool in tools if "function" not in tool):  # a tool that the server has
        return {"type": choice}
    raise ConfigurationError(f"tool_choice={choice!r:.60} is none of the tools: {', '.join(names) or 'there are none'}")


def response_format_of(schema: Any, *, strict: bool | None = None) -> Any:
    """``response_format`` for a class or JSON schema; what is one already stays as it is."""
    if isinstance(schema, Mapping):
        if schema.get("type") in ("json_object", "text") and "properties" not in schema:
            return dict(schema)
        if schema.get("type") == "json_schema" and isinstance(schema.get("json_schema"), Mapping):
            inner = dict(schema["json_schema"])
            if strict is not None:
                inner.setdefault("strict", strict)
            return {"type": "json_schema", "json_schema": inner}
        if "name" in schema and isinstance(schema.get("schema"), Mapping):
            return {"type": "json_schema", "json_schema": dict(schema)}
        schema = dict(schema)
    function = convert_to_openai_function(schema, strict=strict)
    inner = {name: value for name, value in function.items() if name != "parameters"}
    inner["schema"] = function.get("parameters", {"type": "object", "properties": {}})
    return {"type": "json_schema", "json_schema": inner}


def parsed_by(
    model: Runnable[LanguageModelInput, Any], schema: Any, *, method: str, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """The bound model, and after it what reads its answer as ``schema``."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    parser: Runnable[Any, Any]
    if method == "function_calling":
        if is_class:
            parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
        else:
            name = convert_to_openai_tool(schema)["function"]["name"]
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    elif is_class:
        parser = PydanticOutputParser(pydantic_object=schema)
    else:
        parser = JsonOutputParser()
    checked = RunnableGenerator(_unless_refused, _aunless_refused) | parser
    if not include_raw:
        return model | checked
    parse = RunnablePassthrough.assign(parsed=itemgetter("raw") | checked, parsing_error=lambda _: None)
    give_up = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parse.with_fallbacks([give_up], exception_key="parsing_error")


def _check(message: BaseMessage) -> BaseMessage:
    refusal = message.additional_kwargs.get("refusal")
    if refusal:
        raise _Refusal(f"the model refused: {refusal}")
    return message


def _unless_refused(messages: Iterator[BaseMessage]) -> Iterator[BaseMessage]:
    for message in messages:
        yield _check(message)


async def _aunless_refused(messages: AsyncIterator[BaseMessage]) -> AsyncIterator[BaseMessage]:
    async for message in messages:
        yield _check(message)
