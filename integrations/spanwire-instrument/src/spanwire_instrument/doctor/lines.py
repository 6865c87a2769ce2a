"""PURE: the line of the user's code that is spoken of, and how it would read instead.

What is shown is made anew from the syntax, with every text in it replaced by ``"..."``: lines that make clients are where
keys stand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ["Construction", "construction", "shown", "with_statement"]

#: Longer code has its arguments left out, in characters: what fits into 80 columns with its indent.
_WIDE = 72


class Construction(msgspec.Struct, frozen=True):
    """Where a client is made.

    Attributes:
        now: the call, with its assignment.
        target: the name that it is assigned to, ``""`` if it is part of something else.
        needs: names of the function around it on which its arguments depend.
    """

    now: str
    target: str
    call: Any
    needs: tuple[str, ...] = ()

    def shared(self) -> str:
        """The same, to stand at module level."""
        target = self.target or "client"
        return f"{target} = {_text(self.call, _WIDE - len(target) - 3)}"

    def with_argument(self, name: str | None, value: str) -> str:
        """The same with one argument more, or another value of it; without a name: ``**value``."""
        call: ast.Call = self.call
        keywords = [one for one in call.keywords if one.arg != name or name is None]
        keywords.append(ast.keyword(arg=name, value=ast.parse(value, mode="eval").body))
        text = _clean(ast.Call(func=call.func, args=call.args, keywords=keywords))
        if len(text) > self._width and (call.args or len(keywords) > 1):
            text = _clean(ast.Call(func=call.func, args=[ast.Constant(value=...)], keywords=keywords[-1:]))
        return self._left + text

    def made_by(self, function: str) -> str:
        """The same, made by another function from the same arguments."""
        call: ast.Call = self.call
        func = ast.parse(function, mode="eval").body
        return self._left + _text(ast.Call(func=func, args=call.args, keywords=call.keywords), self._width)

    @property
    def _left(self) -> str:
        return f"{self.target} = " if self.target else ""

    @property
    def _width(self) -> int:
        return _WIDE - len(self._left)


def construction(source: str, line: int, cls: str) -> Construction | None:
    """The call in this line that makes an object of a class; None if there is none to be found.

    Args:
        source: of the file.
        line: from 1.
        cls: name of the class, without its module.
    """
    found = _at(source, line)
    if found is None:
        return None
    calls = [node for node in found.nodes if isinstance(node, ast.Call)]
    named = [node for node in calls if _name(node.func) == cls]
    if not calls:
        return None
    call = (named or calls)[0]
    statement = found.statement
    target = ""
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is call:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name):
            target = targets[0].id
    needs: tuple[str, ...] = ()
    if found.function is not None:
        own = set(_own_names(found.function))
        used = (node.id for arg in _arguments(call) for node in ast.walk(arg) if isinstance(node, ast.Name))
        needs = tuple(dict.fromkeys(name for name in used if name in own))
    return Construction(
        now=_statement(statement, call),
        target=target,
        call=call,
        needs=needs,
    )


def shown(source: str, line: int) -> str | None:
    """The statement in this line, or the head of a compound one, on one line, without its texts."""
    found = _at(source, line)
    if found is None:
        return None
    calls = [node for node in found.nodes if isinstance(node, ast.Call)]
    return _statement(found.statement, calls[0] if calls else None)


def with_statement(source: str, line: int) -> tuple[str, str] | None:
    """A line that makes a stream, as it is, and as a ``with`` that closes it; None for what is of another form."""
    found = _at(source, line)
    if found is None:
        return None
    statement = found.statement
    value: ast.expr | None = None
    name = "stream"
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        value = statement.value
        if isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        value = statement.iter
    elif isinstance(statement, ast.Expr):
        value = statement.value
    call = value.value if isinstance(value, ast.Await) else value
    if not isinstance(call, ast.Call):
        return None
    awaited = isinstance(value, ast.Await) or isinstance(statement, ast.AsyncFor)
    text = _text(call, _WIDE - 20 - len(name))
    with_ = f"async with await {text}" if isinstance(value, ast.Await) else f"with {text}"
    if awaited and not with_.startswith("async"):
        with_ = f"async {with_}"
    return _statement(statement, call), f"{with_} as {name}:"


class _Found(msgspec.Struct):
    statement: Any
    nodes: list[Any]
    function: Any


def _at(source: str, line: int) -> _Found | None:
    """The innermost statement around a line, and the expressions of it that span the line, the outermost first."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    statement: ast.stmt | None = None
    function: ast.AST | None = None
    node: ast.AST = tree
    while True:
        inner = next((one for one in _statements(node) if one.lineno <= line <= (one.end_lineno or 0)), None)
        if inner is None:
            break
        statement = node = inner
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = inner
    if statement is None:
        return None
    nodes = [one for one in _expressions(statement) if one.lineno <= line <= (one.end_lineno or 0)]
    if function is statement:
        function = None
    return _Found(statement, nodes, function)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from _statements(child)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Of the statement itself, not of those in its body; outer ones before inner ones."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                continue
            if isinstance(child, ast.expr):
                yield child
            waiting.append(child)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _own_names(function: Any) -> Iterator[str]:
    """Parameters, and what is assigned inside."""
    arguments = function.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if one is not None:
            yield one.arg
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


class _NoTexts(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(value="...") if isinstance(node.value, (str, bytes)) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant(value="...")


def _clean(node: Any) -> str:
    """Source of an expression or statement, its texts left out."""
    copy = ast.parse(ast.unparse(ast.fix_missing_locations(node)))
    text = ast.unparse(ast.fix_missing_locations(_NoTexts().visit(copy)))
    return text.replace("'...'", '"..."')


def _text(call: ast.Call, width: int) -> str:
    text = _clean(call)
    if (len(text) <= width and "\n" not in text) or not (call.args or call.keywords):
        return text
    return _clean(ast.Call(func=call.func, args=[ast.Constant(value=...)], keywords=[]))


def _statement(statement: ast.stmt, call: ast.Call | None) -> str:
    """One line of it."""
    simple = not any(True for _ in _statements(statement))
    text = _clean(statement) if simple else ""
    if not simple or "\n" in text or len(text) > _WIDE:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is call and call is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            left = " = ".join(_clean(target) for target in targets)
            return f"{left} = {_text(call, _WIDE - len(left) - 3)}"
        if not simple and not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            head = _head(statement)
            if len(head) <= _WIDE:
                return head
        if call is not None:
            return _text(call, _WIDE)
        return text.partition("\n")[0][:_WIDE]
    return text


def _head(statement: Any) -> str:
    """The first line of a compound statement."""
    body: dict[str, Any] = {
        name: [] for name in ("body", "orelse", "finalbody", "handlers") if hasattr(statement, name)
    }
    fields = {name: getattr(statement, name, None) for name in statement._fields}
    fields.update(body)
    if "body" in fields:
        fields["body"] = [ast.Pass()]
    try:
        copy = type(statement)(**fields)
        return _clean(copy).partition("\n")[0]
    except (TypeError, ValueError, SyntaxError, RecursionError):
        return ""
