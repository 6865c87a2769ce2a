"""PURE: what is common to the submits of providers: where to, what of the call, and within which limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError

__all__ = ["INPUT", "below", "encoded", "input_of", "optional_number", "optional_text"]

#: ``Endpoint.options["input"]``: what the model gets, with the call's fields in it. See :func:`input_of`.
INPUT = "input"
_FIELD = re.compile(r"\{(\w+)\}")
_DEEPEST = 32


def below(endpoint: Endpoint, *parts: str) -> str:
    """A path below the endpoint's URL. The parts are quoted."""
    return "/".join([endpoint.path, *(quote(part, safe="") for part in parts)])


def encoded(body: Mapping[str, Any], endpoint: Endpoint, most_bytes: int | None = None) -> bytes:
    """The body as JSON. Raises ConfigurationError."""
    try:
        data = msgspec.json.encode(body)
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
        raise ConfigurationError(
            f"the call cannot be written as JSON: {error}; parameters must be text, numbers, lists and mappings",
            endpoint=endpoint.address,
        ) from error
    if most_bytes is not None and len(data) > most_bytes:
        raise ConfigurationError(
            f"the submit has {len(data):,} bytes, and this provider takes {most_bytes:,}: cut the call into smaller ones, "
            "or give the model an address from where it gets its input",
            endpoint=endpoint.address,
        )
    return data


def input_of(call: Call, endpoint: Endpoint, *, with_model: bool) -> Any:
    """What the model gets: the call's body, or what ``Endpoint.options["input"]`` makes of it.

    In that, ``"{name}"`` stands for a field of the call's body, whatever it is; what the call does not have is left out.
    ``{model}`` is its model; of a chat call ``{prompt}`` is all text of its messages, ``{system}`` that of the system's,
    ``{user}`` that of the last one of the user. Inside a longer text they are text, ``""`` for what is not there.
    """
    template = endpoint.options.get(INPUT)
    if template is None:
        return {"model": call.model, **call.body} if with_model else dict(call.body)
    if not isinstance(template, Mapping):
        raise ConfigurationError(
            'Endpoint.options: input must be a mapping such as {"prompt": "{prompt}", "max_tokens": "{max_tokens}"}',
            endpoint=endpoint.address,
        )
    try:
        return _filled(template, {**_said(call), **call.body, "model": call.model}, 0)
    except RecursionError:
        raise ConfigurationError("Endpoint.options: input is nested too deeply", endpoint=endpoint.address) from None


_MISSING: Any = object()


def _filled(template: Any, fields: Mapping[str, Any], depth: int) -> Any:
    if depth > _DEEPEST:
        raise RecursionError
    if isinstance(template, str):
        whole = _FIELD.fullmatch(template)
        if whole is not None:
            return fields.get(whole[1], _MISSING)
        return _FIELD.sub(lambda found: _as_text(fields.get(found[1], "")), template)
    if isinstance(template, Mapping):
        filled = {name: _filled(value, fields, depth + 1) for name, value in template.items()}
        return {name: value for name, value in filled.items() if value is not _MISSING}
    if isinstance(template, (list, tuple)):
        return [value for item in template if (value := _filled(item, fields, depth + 1)) is not _MISSING]
    return template


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _said(call: Call) -> dict[str, str]:
    messages = call.body.get("messages")
    if not isinstance(messages, (list, tuple)):
        return {}
    said = [
        (message.get("role"), _words(message.get("content"))) for message in messages if isinstance(message, Mapping)
    ]
    return {
        "prompt": "\n".join(text for _, text in said if text),
        "system": "\n".join(text for role, text in said if role in {"system", "developer"} and text),
        "user": next((text for role, text in reversed(said) if role == "user"), ""),
    }


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else ()
    return "".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def optional_text(endpoint: Endpoint, name: str) -> str | None:
    """An option that is text. Raises ConfigurationError."""
    value = endpoint.options.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigurationError(f"Endpoint.options: {name} must be text, not {value!r:.40}", endpoint=endpoint.address)
    return value


def optional_number(endpoint: Endpoint, name: str, least: int, most: int) -> int | None:
    """An option that is a whole number. Raises ConfigurationError."""
    value = endpoint.options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigurationError(
            f"Endpoint.options: {name} must be a whole number from {least} to {most}, not {value!r:.40}",
            endpoint=endpoint.address,
        )
    return value
