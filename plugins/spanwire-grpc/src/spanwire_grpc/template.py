"""Chat messages as one prompt, for servers that take text: by a chat template, in Jinja's sandbox.

A template comes from the caller, or from the model's metadata, that is from the server: it gets the messages and nothing
else, can change neither them nor anything, and calls nothing that is not in it. It ends after a second, and what it makes has
limits (:mod:`spanwire_grpc.sandbox`).

Rendered as Hugging Face's ``apply_chat_template`` does: same whitespace, same extra functions.
Source: https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError

from .sandbox import environment, within

__all__ = ["OPTIONS", "SAYS", "prompt_of"]

#: Names in ``Endpoint.options``. ``chat_template``: the template itself, or ``"plain"``: the messages' texts, one below the
#: other. ``chat_template_kwargs``: further variables of it, such as ``{"bos_token": "<s>"}``.
OPTIONS = frozenset({"chat_template", "chat_template_kwargs"})
#: The header of the reply that says that the prompt was rendered here, and by whose template.
SAYS = "x-spanwire-prompt"
_PLAIN = "plain"
#: Longest time to render, in seconds: it is the event loop's. Those of real models take milliseconds.
_RENDER_S = 1.0
#: Longest template, in characters. The longest that models are published with have some 20,000.
_TEMPLATE_CHARACTERS = 128 * 1024
#: What cannot be done with text in and text out.
_NOT_TEXT = ("tools", "tool_choice", "functions", "function_call", "response_format")


def prompt_of(call: Call, endpoint: Endpoint, from_model: str | None) -> tuple[str, str]:
    """The prompt, and what to say of it: ``rendered; template=given``, ``model`` or ``plain``.

    Raises:
        ConfigurationError: no template, one that cannot be rendered, or a call that needs more than text.
    """
    where = endpoint.address
    refused = [name for name in _NOT_TEXT if call.body.get(name)]
    if refused:
        raise ConfigurationError(
            f"this dialect carries text, and no {' or '.join(refused)}: use openai-json, or a server's HTTP endpoint",
            endpoint=where,
        )
    messages = call.body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigurationError("a chat call needs messages", endpoint=where)
    given = endpoint.options.get("chat_template")
    if given is not None and (not isinstance(given, str) or not given):
        raise ConfigurationError("Endpoint.options: chat_template must be a template's text", endpoint=where)
    if given == _PLAIN:
        return "\n".join(_text(message.get("content"), where) for message in messages), "rendered; template=plain"
    source = given or from_model
    if not source:
        raise ConfigurationError(
            "this dialect takes text, and neither the endpoint nor the model's metadata have a chat template: give "
            "options={'chat_template': ...}, or 'plain' for the messages' texts as they are",
            endpoint=where,
        )
    variables = endpoint.options.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        raise ConfigurationError("Endpoint.options: chat_template_kwargs must be a mapping", endpoint=where)
    return _render(source, messages, variables, where), f"rendered; template={'given' if given else 'model'}"


def _render(source: str, messages: list[Any], variables: Mapping[str, Any], where: str) -> str:
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        raise ConfigurationError(
            "a chat template needs jinja2: pip install 'spanwire[grpc]'", endpoint=where
        ) from error
    if len(source) > _TEMPLATE_CHARACTERS:
        raise ConfigurationError(
            f"the chat template is longer than {_TEMPLATE_CHARACTERS:,} characters", endpoint=where
        )
    try:
        environment()  # imports Jinja, which is not the template's doing
        with within(_RENDER_S):
            template = _compiled(source)
        with within(_RENDER_S):
            prompt: str = template.render({**variables, "messages": messages, "add_generation_prompt": True})
        return prompt
    except (
        TemplateError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError, RecursionError, MemoryError,
        TimeoutError,
    ) as error:  # fmt: skip
        # Not its words: a template may put a message into them.
        kind = type(error).__name__
        raise ConfigurationError(f"the chat template cannot be rendered: {kind}", endpoint=where) from None


@lru_cache(maxsize=32)
def _compiled(source: str) -> Any:
    return environment().from_string(source)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not parts or len(texts) != len(parts):
        raise ConfigurationError("this dialect carries text, and a message has something else in it", endpoint=where)
    return "".join(texts)
