"""Chat messages as one prompt, for servers that take text: by a chat template, in Jinja's sandbox.

A template comes from the caller, or from the model's metadata, that is from the server: it gets the messages and nothing
else, can change neither them nor anything, and calls nothing that is not in it. Its loops end after a second, and what it
multiplies has a limit. That bounds time, and not every way to use memory: who trusts the server with neither gives a template.

Rendered as Hugging Face's ``apply_chat_template`` does: same whitespace, same extra functions.
Source: https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError

__all__ = ["OPTIONS", "SAYS", "prompt_of"]

#: Names in ``Endpoint.options``. ``chat_template``: the template itself, or ``"plain"``: the messages' texts, one below the
#: other. ``chat_template_kwargs``: further variables of it, such as ``{"bos_token": "<s>"}``.
OPTIONS = frozenset({"chat_template", "chat_template_kwargs"})
#: The header of the reply that says that the prompt was rendered here, and by whose template.
SAYS = "x-spanwire-prompt"
_PLAIN = "plain"
#: Longest time to render, in seconds: it is the event loop's. Those of real models take milliseconds.
_RENDER_S = 1.0
#: Longest template, and longest text that an operator makes of a shorter one, in characters; largest power. The longest
#: templates that models are published with have some 20,000.
_TEMPLATE_CHARACTERS = 256 * 1024
_CHARACTERS = 16 * 1024 * 1024
_BASE, _EXPONENT = 2**64, 64
#: What loops and macros call with each turn.
_TICK = "spanwire_tick"
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
        names = {**variables, "messages": messages, "add_generation_prompt": True, _TICK: _until(_RENDER_S)}
        prompt: str = _compiled(source).render(names)
        return prompt
    except (
        TemplateError, TypeError, ValueError, KeyError, ArithmeticError, AttributeError, RecursionError, MemoryError,
        TimeoutError,
    ) as error:  # fmt: skip
        # Not its words: a template may put a message into them.
        kind = type(error).__name__
        raise ConfigurationError(f"the chat template cannot be rendered: {kind}", endpoint=where) from None


def _until(limit_s: float) -> Callable[[], str]:
    """What stops a template that goes on for longer."""
    end_s = time.perf_counter() + limit_s

    def tick() -> str:
        if time.perf_counter() > end_s:
            raise TimeoutError
        return ""

    return tick


@lru_cache(maxsize=32)
def _compiled(source: str) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
                tick = nodes.Output([nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)])
                node.body.insert(0, tick)  # type: ignore[attr-defined]
                tick.set_lineno(node.lineno)
            tree.set_environment(self)
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
            if operator == "**" and not (numbers and abs(left) <= _BASE and abs(right) <= _EXPONENT):
                raise SecurityError("a power that is too large")
            if operator == "*" and not numbers:
                times, piece = (left, right) if isinstance(left, int) else (right, left)
                if isinstance(times, int) and times * len(piece) > _CHARACTERS:
                    raise SecurityError("a text that is too long")
            return super().call_binop(context, operator, left, right)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return dt.datetime.now().astimezone().strftime(form)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(source)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not parts or len(texts) != len(parts):
        raise ConfigurationError("this dialect carries text, and a message has something else in it", endpoint=where)
    return "".join(texts)
