"""PURE: chat messages as the input items of a Responses request.

Every message stays in its place, system and developer messages too: the items of a later turn begin with those of the
earlier ones, which is what lets a connection send only the new ones. Three things of a message are left out, since an
input item has no place for them and chat servers give them no meaning of their own: ``name`` (the call's id says which
tool it was), the reasoning of earlier answers, and ``annotations``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ...calls import ToolCall
from ...errors import ConfigurationError

__all__ = ["answer_items", "begins_with", "input_items"]

Item = dict[str, Any]

_MESSAGES = frozenset({"system", "developer", "user", "assistant"})
#: See the module's docstring. ``index`` and the like are what clients keep of a streamed answer.
_LEFT_OUT = frozenset(
    {
        *("name", "reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "annotations"),
        *("provider_specific_fields", "parsed", "images"),
    }
)
_READ = frozenset({"role", "content", "tool_calls", "tool_call_id", "refusal", "type"})
#: Parts in which clients keep the reasoning of an answer.
_REASONING = frozenset({"reasoning", "thinking", "redacted_thinking"})
#: Parts of an assistant's message, with the field that has their text.
_TEXTS = {"output_text": "text", "refusal": "refusal"}
_OURS = frozenset({"input_text", "input_image", "input_file", "output_text", "refusal", "summary_text"})


def input_items(messages: Iterable[Mapping[str, Any]], *, custom: Collection[str] = ()) -> list[Item]:
    """Chat messages to input items.

    A mapping with a ``type``, and without ``role`` or with an ``id``, is an item already and stays as it is (reasoning,
    item references, outputs of built-in tools). Fields of a message that are not known here go onto its item: the server judges them.

    Args:
        messages: as chat completions take them.
        custom: names of the request's custom tools, see :func:`.request.custom_tools`. Chat clients write their calls as
            function calls; here they, and what their tools answer, are items of another type.

    Raises:
        ConfigurationError: names the message and the field that Responses cannot say; never shows content.
    """
    items: list[Item] = []
    free_form: set[str] = set()  # ids of calls of custom tools
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = message.get("role")
        # An item already; an answer's message with the server's id has a role as well.
        if isinstance(message.get("type"), str) and (role is None or "id" in message):
            item = dict(message)
            if item["type"] == "custom_tool_call":
                free_form.add(str(item.get("call_id")))
            items.append(item)
        elif role == "tool":
            items.append(_output(message, where, free_form))
        elif role in _MESSAGES:
            if role == "assistant":
                items += _assistant(message, where, custom, free_form)
            else:
                items.append({**_message(role, _content(message, where)), **_more(message)})
        elif role == "function":
            raise ConfigurationError(f"{where}: role 'function' has no id to belong to a call; use role 'tool'")
        else:
            raise ConfigurationError(
                f"{where}: role {role!r:.40} is none that Responses knows: system, developer, user, assistant or tool"
            )
    return items


def answer_items(text: str, tool_calls: Sequence[ToolCall], *, custom: Collection[str] = ()) -> list[Item]:
    """What :func:`input_items` makes of the assistant message that a chat client appends for an answer.

    Args:
        text, tool_calls: of the :class:`~spanwire.calls.Reply`.
        custom: as :func:`input_items` has it.
    """
    items: list[Item] = []
    if text or not tool_calls:
        items.append(_message("assistant", text))
    items += [_call(call.id, call.name, call.arguments, custom) for call in tool_calls]
    return items


def begins_with(items: Sequence[Item], earlier: Sequence[Item]) -> bool:
    """Whether ``earlier`` is the beginning of ``items``.

    Arguments of function calls count as equal when they are the same JSON value: frameworks parse them and write them
    again, with other spaces and escapes.
    """
    if len(earlier) > len(items):
        return False
    return all(mine == old or _same_call(mine, old) for mine, old in zip(items, earlier, strict=False))


def _same_call(mine: Item, old: Item) -> bool:
    if mine.get("type") != "function_call" or old.get("type") != "function_call":
        return False
    if {**mine, "arguments": ""} != {**old, "arguments": ""}:
        return False
    try:
        # Written again, since 1 and 1.0 and true are equal in Python and not to a tool.
        return _written(mine["arguments"]) == _written(old["arguments"])
    except (TypeError, ValueError, RecursionError):
        return False


def _written(arguments: str) -> str:
    return json.dumps(json.loads(arguments or "{}"), sort_keys=True)


def _message(role: str, content: str | list[Item]) -> Item:
    return {"type": "message", "role": role, "content": content}


def _more(message: Mapping[str, Any]) -> Item:
    return {
        name: value
        for name, value in message.items()
        if value is not None and name not in _READ and name not in _LEFT_OUT
    }


# --- assistant --------------------------------------------------------------------------------------------------------


def _assistant(message: Mapping[str, Any], where: str, custom: Collection[str], free_form: set[str]) -> list[Item]:
    for name in ("audio", "function_call"):
        if message.get(name):
            hint = "; use tool_calls" if name == "function_call" else ""
            raise ConfigurationError(f"{where}.{name}: Responses has no place for it{hint}")
    calls = message.get("tool_calls") or ()
    more = _more(message)
    more.pop("audio", None)
    more.pop("function_call", None)
    content = _said(message, where)
    items: list[Item] = []
    if content or not calls or more:
        items.append({**_message("assistant", content), **more})
    for number, call in enumerate(calls):
        item = _tool_call(call, f"{where}.tool_calls[{number}]", custom)
        if item["type"] == "custom_tool_call":
            free_form.add(item["call_id"])
        items.append(item)
    return items


def _said(message: Mapping[str, Any], where: str) -> str | list[Item]:
    """One text wherever it can be: clients that keep an answer as parts, and those that do not, say the same.

    A refusal is what the assistant said, too: the schema has it apart only in items with the server's own id.
    """
    content, refusal = message.get("content"), message.get("refusal") or ""
    if content is None or isinstance(content, str):
        return f"{content or ''}{refusal}"
    found = _parts(content, f"{where}.content", answer=True)
    if not all(map(_is_plain, found)):
        return [*found, *([_text("output_text", refusal)] if refusal else [])]
    return "".join(part[_TEXTS[part["type"]]] for part in found) + refusal


def _is_plain(part: Item) -> bool:
    """Text and nothing else."""
    name = _TEXTS.get(part["type"])
    return name is not None and not any(value for field, value in part.items() if field not in {"type", name})


def _tool_call(call: Any, where: str, custom: Collection[str]) -> Item:
    if not isinstance(call, Mapping):
        raise ConfigurationError(f"{where} must be a mapping, not {type(call).__name__}")
    if call.get("type") in {"function_call", "custom_tool_call"}:
        return dict(call)
    id_ = call.get("id")
    if not isinstance(id_, str) or not id_:
        raise ConfigurationError(f"{where}.id must be the call's id, which its tool message refers to, not {id_!r:.40}")
    if call.get("type") == "custom" or "custom" in call:
        inner = call.get("custom")
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
            return _call(id_, inner["name"], inner.get("input") or "", (inner["name"],))
        raise ConfigurationError(f"{where}.custom must have a name and an input")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(f"{where}.function must have a name and arguments")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return _call(id_, function["name"], arguments, custom)


def _call(id_: str, name: str, arguments: str, custom: Collection[str]) -> Item:
    if name in custom:
        return {"type": "custom_tool_call", "call_id": id_, "name": name, "input": arguments}
    return {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}


# --- tool -------------------------------------------------------------------------------------------------------------


def _output(message: Mapping[str, Any], where: str, free_form: set[str]) -> Item:
    id_ = message.get("tool_call_id")
    if not isinstance(id_, str) or not id_:
        raise ConfigurationError(f"{where}.tool_call_id must be the id of the call that it answers, not {id_!r:.40}")
    kind = "custom_tool_call_output" if id_ in free_form else "function_call_output"
    return {"type": kind, "call_id": id_, "output": _content(message, where), **_more(message)}


# --- content ----------------------------------------------------------------------------------------------------------


def _content(message: Mapping[str, Any], where: str) -> str | list[Item]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "" if content is None else _parts(content, f"{where}.content")


def _parts(content: Any, where: str, *, answer: bool = False) -> list[Item]:
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Iterable):
        raise ConfigurationError(f"{where} must be text or a list of parts, not {type(content).__name__}")
    return [
        _part(part, f"{where}[{number}]", answer=answer)
        for number, part in enumerate(content)
        if not (answer and isinstance(part, Mapping) and part.get("type") in _REASONING)
    ]


def _part(part: Any, where: str, *, answer: bool) -> Item:
    plain = "output_text" if answer else "input_text"
    if isinstance(part, str):
        return _text(plain, part)
    if not isinstance(part, Mapping):
        raise ConfigurationError(f"{where} must be a mapping with a type, not {type(part).__name__}")
    kind = part.get("type")
    rest = {name: value for name, value in part.items() if name not in {"type", kind} and value is not None}
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise _refused(where, "text", "must be text")
        return {**_text(plain, part["text"]), **rest}
    if kind in _OURS:
        return dict(part)
    if answer:
        raise _refused(where, "type", f"{kind!r:.40} is nothing that an assistant's message can hold in Responses")
    if kind == "image_url":
        image = part.get("image_url")
        fields = {"url": image} if isinstance(image, str) else dict(image) if isinstance(image, Mapping) else {}
        if not isinstance(fields.get("url"), str):
            raise _refused(where, "image_url", "must have a url")
        return {
            "type": "input_image",
            "image_url": fields.pop("url"),
            "detail": fields.pop("detail", None) or "auto",
            **fields,
            **rest,
        }
    if kind == "file":
        file = part.get("file")
        if not isinstance(file, Mapping):
            raise _refused(where, "file", "must have file_data or a file_id")
        return {"type": "input_file", **{name: value for name, value in file.items() if value is not None}, **rest}
    raise _refused(where, "type", f"{kind!r:.40} is no input that Responses has: text, image_url and file are")


def _text(kind: str, text: str) -> Item:
    # OpenAI's schema wants annotations on every text of an answer.
    return {"type": kind, "text": text, "annotations": []} if kind == "output_text" else {"type": kind, "text": text}


def _refused(where: str, field: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{where}.{field} {why}")
