"""The environment in which chat templates are rendered: Jinja's immutable sandbox, with limits on time and on sizes.

Jinja's own sandbox keeps a template from reaching anything. It does not keep one from going on for hours, or from making
a text of gigabytes out of one line. So what chat templates have no use for is left out, and what is left looks at the clock
with each turn of a loop, each call, filter and test, and at the size of what it is about to make.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["environment", "within"]

#: Longest text, longest list, largest number as an argument; bits of a whole number; largest indent.
_CHARACTERS, _ITEMS, _BITS, _INDENT = 16 * 1024 * 1024, 1_000_000, 8192, 64
_BASE, _EXPONENT = 2**64, 64
#: Of formats: a width of four digits or more, or one that is an argument.
_WIDE = re.compile(r"\d{4}|%[^a-zA-Z%]*\*|\{[^}]*\{")
#: What templates that models are published with use, and some more. Left out: what makes much of little (center, batch, slice,
#: wordwrap, xmlattr), adds lists one by one (sum, groupby), or is for HTML.
_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format",
    "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "title",
    "tojson", "trim", "unique", "upper",
)  # fmt: skip
#: What loops and macros call with each turn, and what joins texts.
_TICK, _JOIN = "spanwire_tick", "spanwire_join"
_end_s: ContextVar[float] = ContextVar("_end_s", default=float("inf"))


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Compile and render in this block: what goes on for longer raises TimeoutError."""
    before = _end_s.set(time.perf_counter() + limit_s)
    try:
        yield
    finally:
        _end_s.reset(before)


def _tick() -> str:
    if time.perf_counter() > _end_s.get():
        raise TimeoutError
    return ""


def _check(size: int, most: int = _CHARACTERS) -> None:
    if size > most:
        from jinja2.exceptions import SecurityError

        raise SecurityError("what a template makes is too large")


def _sized(value: Any) -> Any:
    """What was made, if it is not too large already."""
    if isinstance(value, (str, bytes)):
        _check(len(value))
    elif isinstance(value, (list, tuple, dict)):
        _check(len(value), _ITEMS)
    return value


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # and with it whether it wants the environment
    def run(*arguments: Any, **named: Any) -> Any:
        _tick()
        return _sized(function(*arguments, **named))

    return run


def _joined(parts: Iterable[Any], between: str = "") -> str:
    texts, size = [], 0
    for part in parts:
        _tick()
        texts.append(str(part))
        size += len(texts[-1]) + len(between)
        _check(size)
    return between.join(texts)


def _replaced(text: str, old: str, new: str, count: int | None = None) -> str:
    found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    _check(len(text) + found * len(new))
    return text.replace(old, new, found)


def _dumped(value: Any, indent: int | str | None = None) -> str:
    _check(len(indent) if isinstance(indent, str) else indent or 0, _INDENT)
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    _check(len(form), _INDENT)
    return dt.datetime.now().astimezone().strftime(form)


def _before_call(function: Any, arguments: tuple[Any, ...]) -> None:
    """Refuse what would be too large before it is there."""
    for one in arguments:
        if isinstance(one, int):
            _check(abs(one), _ITEMS)
    method = getattr(function, "__wrapped__", function)
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(owner, str):
        return
    if name in ("format", "format_map") and _WIDE.search(owner):
        _check(_CHARACTERS + 1)
    elif name == "replace" and len(arguments) > 1 and all(isinstance(one, str) for one in arguments[:2]):
        _check(len(owner) + owner.count(arguments[0]) * len(arguments[1]))
    elif name == "join" and arguments and hasattr(arguments[0], "__len__"):
        _check(len(owner) * len(arguments[0]) + sum(len(one) for one in arguments[0] if isinstance(one, str)))
    elif name == "join":
        _check(len(owner), _INDENT)
    elif name == "expandtabs":
        _check(owner.count("\t") * max([8, *(one for one in arguments if isinstance(one, int))]))
    elif name == "translate":
        _check(_CHARACTERS + 1)


def _before_binop(operator: str, left: Any, right: Any) -> None:
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    if operator == "**":
        if not (numbers and abs(left) <= _BASE and abs(right) <= _EXPONENT):
            _check(_CHARACTERS + 1)
    elif operator == "*" and isinstance(left, int) and isinstance(right, int):
        _check(left.bit_length() + right.bit_length(), _BITS)
    elif operator == "*" and not numbers:
        times, piece = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int):
            _check(times * len(piece), _CHARACTERS if isinstance(piece, str) else _ITEMS)
    elif operator == "+" and not numbers and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check(len(left) + len(right), _CHARACTERS if isinstance(left, str) else _ITEMS)
    elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
        _check(_CHARACTERS + 1)


@functools.cache
def environment() -> Any:
    """The one environment of the process."""
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Ticking(NodeTransformer):
        """Puts the looks at the clock, and at sizes, into a template."""

        def _turning(self, node: Any) -> Any:
            self.generic_visit(node)
            tick = nodes.Output([nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)])
            node.body.insert(0, tick)
            return node

        visit_For = visit_Macro = visit_CallBlock = _turning  # noqa: N815 - Jinja's names

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802 - the same
            self.generic_visit(node)
            return nodes.Call(nodes.Name(_JOIN, "load"), [nodes.List(node.nodes)], [], None, None)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+", "%"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree: nodes.Template = Ticking().visit(super()._parse(source, name, filename))
            tree.set_lineno(1)  # of what was put in; the rest has its own
            tree.set_environment(self)
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _tick()
            _before_binop(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
            _tick()
            _before_call(function, (*arguments, *named.values()))
            return _sized(super().call(context, function, *arguments, **named))

    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    jinjas = {name: made.filters[name] for name in _FILTERS}

    def join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        return _joined(value if attribute is None else jinjas["map"](context, value, attribute=attribute), str(d))

    context: Any = made.from_string("").new_context()

    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        _check((str(s).count("\n") + 1) * (len(width) if isinstance(width, str) else width) + len(s))
        text: str = jinjas["indent"](s, width, first, blank)
        return text

    def replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
        return _replaced(str(s), str(old), str(new), count)

    def title(s: str) -> str:
        _check(len(s), _ITEMS)  # by a regular expression
        text: str = jinjas["title"](s)
        return text

    def rounded(value: float, precision: int = 0, method: str = "common") -> float:
        _check(abs(precision), _INDENT)
        number: float = jinjas["round"](value, precision, method)
        return number

    def format_(value: str, *arguments: Any, **named: Any) -> str:
        _before_binop("%", value, None)
        text: str = jinjas["format"](value, *arguments, **named)
        return text

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    ours = {"format": format_, "indent": indent, "join": join, "replace": replace, "round": rounded, "title": title}
    filters: dict[str, Any] = {**jinjas, **ours, "tojson": _dumped}
    tests: dict[str, Any] = made.tests
    made.filters = {name: _checked(function) for name, function in filters.items()}
    made.tests = {name: _checked(function) for name, function in tests.items()}
    for name in ("lipsum", "cycler", "joiner"):
        made.globals.pop(name)
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": _strftime_now,
        _TICK: _tick,
        _JOIN: _joined,
    }
    return made
