"""What pages show fits what there is: code compiles, names and arguments of ours exist, and so do commands, their options,
extras and targets. (That the code of README and docs runs is in test_examples.py; that recipes do, in tests/recipes.)"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

import spanwire
from spanwire.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "plugins/*/README.md", "integrations/*/README.md", "examples/**/README.md")
    for path in ROOT.glob(pattern)
    if not {".venv", ".tools"} & set(path.parts)
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = set(_PROJECT["optional-dependencies"])
#: Of a plugin's own project, in its folder; and of a project that a command makes.
_ELSEWHERE = re.compile(r"^\s*(cd|docker|kubectl|curl|export|git)\b")


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, _, body in _BLOCK.findall(page.read_text("utf-8")):
        if language in languages:
            yield body


# --- Python -----------------------------------------------------------------------------------------------------------


@each_page
def test_code_compiles_and_its_names_are_there(page: Path) -> None:
    for code in blocks(page, "python", "py"):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # notebooks
        compile(code, str(page), "exec", flags=flags, dont_inherit=True)
        tree = ast.parse(code)
        assert [problem for node in ast.walk(tree) for problem in _problems(node)] == [], code


def _problems(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module and not node.level and _ours(node.module):
        module = importlib.import_module(node.module)
        for alias in node.names:
            inside = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{alias.name}") is not None
            if not hasattr(module, alias.name) and not inside:
                yield f"{node.module} has no {alias.name}"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if _ours(alias.name) and importlib.util.find_spec(alias.name) is None:
                yield f"there is no module {alias.name}"
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "spanwire":
        if not hasattr(spanwire, node.attr):
            yield f"spanwire has no {node.attr}"
    elif isinstance(node, ast.Call):
        thing = _called(node.func)
        if thing is not None:
            yield from _misfits(thing, node)


def _ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] in {
        "spanwire",
        *(path.name for pattern in ("plugins", "integrations") for path in ROOT.glob(f"{pattern}/*/src/*")),
    }


def _called(function: ast.expr) -> Any:
    """``spanwire.Endpoint`` or ``spanwire.Call.chat``, if it is one of ours."""
    match function:
        case ast.Attribute(value=ast.Name(id="spanwire"), attr=name):
            return getattr(spanwire, name, None)
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="spanwire"), attr=outer), attr=name):
            return getattr(getattr(spanwire, outer, None), name, None)
    return None


def _misfits(thing: Any, node: ast.Call) -> Iterator[str]:
    try:
        known = inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            yield f"{ast.unparse(node.func)} has no argument {keyword.arg}"


# --- the shell --------------------------------------------------------------------------------------------------------


def lines(page: Path) -> Iterator[list[str]]:
    """Commands of shell blocks, in words; and what stands in the text between backticks."""
    text = page.read_text("utf-8")
    shown = [line for body in blocks(page, "sh", "bash", "") for line in body.replace("\\\n", " ").splitlines()]
    shown += re.findall(r"`((?:spanwire|make|pip install) [^`\n]+)`", _BLOCK.sub("", text))
    for line in shown:
        if _ELSEWHERE.match(line):
            continue
        for piece in re.split(r"&&|\|", line):
            try:
                words = shlex.split(piece, comments=True)
            except ValueError:  # no command: a drawing, or what one prints
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            yield words


@each_page
def test_commands_and_their_options_are_there(page: Path) -> None:
    assert wrong_commands(page) == []


def wrong_commands(page: Path) -> list[str]:
    wrong = []
    for words in lines(page):
        if words[:1] == ["spanwire"] and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            wrong += [f"{' '.join(words)}: {what}" for what in _unknown(words[1:])]
    return wrong


def _unknown(words: list[str]) -> Iterator[str]:
    command: Any = get_command(app)
    with typer.Context(command) as context:  # type: ignore[attr-defined,unused-ignore]
        while words and hasattr(command, "get_command"):
            found = command.get_command(context, words[0])
            if found is None:
                if not words[0].startswith("-"):
                    yield f"no command {words[0]}"
                return
            command, words = found, words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    for word in words:
        if word == "--":  # somebody else's program
            return
        if word.startswith("-") and word != "-" and word.partition("=")[0] not in known:
            yield f"no option {word}"


@each_page
def test_extras_and_targets_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = page.read_text("utf-8")
    named = {extra.strip() for group in re.findall(r"\bspanwire\[([a-z0-9,\s]+)\]", text) for extra in group.split(",")}
    assert named <= EXTRAS
    for words in lines(page):
        if words[:1] == ["make"] and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            assert words[1] in targets, " ".join(words)


def test_what_does_not_fit_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport spanwire\nspanwire.Endpoint('x', nothing=1)\nspanwire.Nothing\n"
        "from spanwire.errors import Nothing\n```\n\n```sh\nspanwire probe --nothing\nspanwire nothing\n"
        "X=1 spanwire jobs list --json | jq\n```\n",
        "utf-8",
    )
    (code,) = blocks(page, "python")
    found = [problem for node in ast.walk(ast.parse(code)) for problem in _problems(node)]
    assert sorted(found) == [
        "spanwire has no Nothing",
        "spanwire.Endpoint has no argument nothing",
        "spanwire.errors has no Nothing",
    ]
    assert wrong_commands(page) == [
        "spanwire probe --nothing: no option --nothing",
        "spanwire nothing: no command nothing",
    ]
