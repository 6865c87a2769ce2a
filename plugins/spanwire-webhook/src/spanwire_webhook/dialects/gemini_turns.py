"""PURE: chat messages as turns with parts, the form between OpenAI's messages and both of Gemini's schemas.

What Gemini cannot be told is a ConfigurationError that names the message and the field, and never shows content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from spanwire.errors import ConfigurationError

__all__ = ["Called", "Media", "Part", "Returned", "Text", "Turn", "conversation"]


class Text(NamedTuple):
    """Words."""

    text: str


class Media(NamedTuple):
    """An image, a sound or a document: its base64, or where it is."""

    kind: Literal["image", "audio", "document"]
    data: str | None
    uri: str | None
    mime_type: str | None
    detail: str | None = None


class Called(NamedTuple):
    """A function that the model has called."""

    id: str
    name: str
    arguments: Mapping[str, Any]


class Returned(NamedTuple):
    """What a function has given back."""

    id: str
    name: str | None
    text: str


Part = Text | Media | Called | Returned


class Turn(NamedTuple):
    """What one side says in a row."""

    role: Literal["user", "model"]
    parts: list[Part]


_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[^;,]*)*;base64,([A-Za-z0-9+/=_-]*)\Z")
_AUDIO = {"wav": "audio/wav", "mp3": "audio/mp3"}
#: Read here, or kept by clients of an answer, without a meaning for the next one.
_KNOWN = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "reasoning_content"),
        *("reasoning", "reasoning_details", "thinking_blocks", "provider_specific_fields", "parsed", "images"),
    }
)


def conversation(messages: Iterable[Any]) -> tuple[str, list[Turn]]:
    """The system's instruction (``""`` for none), and the turns after it. Messages of one side in a row are one turn.

    Raises:
        ConfigurationError: names the message, and what of it Gemini cannot be told.
    """
    instructions: list[str] = []
    turns: list[Turn] = []
    names: dict[str, str] = {}
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if not isinstance(message, Mapping):
            raise ConfigurationError(f"{where} must be a mapping, not {type(message).__name__}")
        for name, value in message.items():
            if name not in _KNOWN and value is not None:
                raise ConfigurationError(f"{where}.{name}: Gemini has no such field of a message")
        role = message.get("role")
        if role in {"system", "developer"}:
            if turns:
                raise ConfigurationError(
                    f"{where}: Gemini has one system instruction, before the conversation; move it to the beginning"
                )
            instructions.append(_words(message.get("content"), where))
        elif role == "user":
            _add(turns, "user", list(_parts(message.get("content"), where)))
        elif role == "assistant":
            _add(turns, "model", _said(message, where, names))
        elif role == "tool":
            id_ = message.get("tool_call_id")
            if not isinstance(id_, str) or not id_:
                raise ConfigurationError(f"{where}: role 'tool' needs the tool_call_id that it answers")
            name = message.get("name")
            known = names.get(id_) or (name if isinstance(name, str) and name else None)
            _add(turns, "user", [Returned(id_, known, _words(message.get("content"), where))])
        else:
            raise ConfigurationError(
                f"{where}: role {role!r:.40} is none that Gemini can be told: system, developer, user, assistant or tool"
            )
    return "\n\n".join(text for text in instructions if text), turns


def _add(turns: list[Turn], role: Literal["user", "model"], parts: list[Part]) -> None:
    if turns and turns[-1].role == role:
        turns[-1].parts.extend(parts)
    else:
        turns.append(Turn(role, parts))


def _said(message: Mapping[str, Any], where: str, names: dict[str, str]) -> list[Part]:
    parts: list[Part] = []
    content = message.get("content")
    if content is not None:
        words = _words(content, where)
        if words:
            parts.append(Text(words))
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal:
        parts.append(Text(refusal))
    for number, call in enumerate(message.get("tool_calls") or ()):
        at = f"{where}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigurationError(f"{at}: Gemini knows calls of functions alone, with a name")
        id_ = call.get("id")
        if not isinstance(id_, str) or not id_:
            raise ConfigurationError(f"{at}: the call has no id")
        names[id_] = function["name"]
        parts.append(Called(id_, function["name"], _arguments(function.get("arguments"), at)))
    return parts


def _arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise ConfigurationError(f"{where}: Gemini takes arguments that are a JSON object alone")
    return arguments


def _words(content: Any, where: str) -> str:
    """Text alone."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    found = list(_parts(content, where))
    if not all(isinstance(part, Text) for part in found):
        raise ConfigurationError(f"{where}: Gemini takes text alone in a message of this role")
    return "".join(part.text for part in found if isinstance(part, Text))


def _parts(content: Any, where: str) -> Iterable[Part]:
    if isinstance(content, str):
        yield Text(content)
        return
    if not isinstance(content, (list, tuple)):
        raise ConfigurationError(f"{where}: content must be text or a list of parts, not {type(content).__name__}")
    for number, part in enumerate(content):
        at = f"{where}.content[{number}]"
        if not isinstance(part, Mapping):
            raise ConfigurationError(f"{at} must be a mapping with a type, not {type(part).__name__}")
        yield _part(part, at)


def _part(part: Mapping[str, Any], where: str) -> Part:
    kind = part.get("type")
    inner = part.get(kind) if isinstance(kind, str) else None
    if kind in {"text", "input_text", "output_text"} and isinstance(part.get("text"), str):
        return Text(part["text"])
    if kind == "refusal" and isinstance(inner, str):
        return Text(inner)
    if kind == "image_url":
        url, detail = (inner.get("url"), inner.get("detail")) if isinstance(inner, Mapping) else (inner, None)
        if isinstance(url, str) and url:
            if detail not in (None, "auto", "low", "high"):
                raise ConfigurationError(f"{where}: detail {detail!r:.40} is none of auto, low and high")
            return _media("image", url, where, None if detail == "auto" else detail)
    if kind == "input_audio" and isinstance(inner, Mapping) and isinstance(inner.get("data"), str):
        mime_type = _AUDIO.get(str(inner.get("format")))
        if mime_type is None:
            raise ConfigurationError(f"{where}: format {inner.get('format')!r:.40} is none of wav and mp3")
        return Media("audio", inner["data"], None, mime_type)
    if kind == "file" and isinstance(inner, Mapping):
        data, file_id = inner.get("file_data"), inner.get("file_id")
        if isinstance(data, str) and data:
            return _media("document", data, where, None)
        if isinstance(file_id, str) and file_id:
            return Media("document", None, file_id, None)
    raise ConfigurationError(f"{where}: a part of type {kind!r:.40}, or what is in it, is none that Gemini can be told")


def _media(kind: Literal["image", "document"], url: str, where: str, detail: str | None) -> Media:
    if not url.startswith("data:"):
        return Media(kind, None, url, None, detail)
    found = _DATA_URL.match(url)
    if found is None:
        raise ConfigurationError(f"{where}: the data: URL has no MIME type, or is no base64")
    data = found[2].replace("-", "+").replace("_", "/")
    return Media(kind, data, None, found[1], detail)
