"""Pages that list what the code has list all of it. That their code runs is in test_examples.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from spanwire import errors, hookspecs
from spanwire.endpoint import Retries, Timeouts
from spanwire.retry import retry_wait_s
from spanwire.testing.conformance import ABILITIES

DOCS = Path(__file__).parent.parent / "docs"
ERRORS = [
    thing for name in errors.__all__ if inspect.isclass(thing := getattr(errors, name)) and issubclass(thing, Exception)
]
HOOKS = [name for name, thing in vars(hookspecs).items() if hasattr(thing, f"{hookspecs.PROJECT}_spec")]


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def section(name: str, title: str) -> str:
    """What stands below a heading."""
    found = re.search(
        rf"^(##+) {re.escape(title)}\n(.*?)(?=^#{{1,3}} |\Z)", _without_comments(page(name)), re.DOTALL | re.MULTILINE
    )
    assert found is not None, f"{name} has no heading {title!r}"
    return found[2]


def _without_comments(text: str) -> str:
    """Comments of code look like headings."""
    return re.sub(
        r"^(```.*?^```)",
        lambda block: re.sub(r"^#", " #", block[1], flags=re.MULTILINE),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_is_in_the_catalogue_with_what_to_do(error: type[errors.SpanwireError]) -> None:
    text = section("errors.md", error.__name__)
    for row in ("means", "comes when", "tried again", "what to do"):
        assert re.search(rf"^\| {row} \| \S", text, re.MULTILINE), row
    own = set(inspect.signature(error).parameters) - set(inspect.signature(errors.SpanwireError).parameters)
    if own and "__init__" not in vars(error):
        inherited = next(parent for parent in error.__mro__ if "__init__" in vars(parent))
        assert f"| attributes | those of `{inherited.__name__}` |" in text
    else:
        assert {name for name in own if f"`.{name}`" not in text} == set()


def test_the_catalogue_has_no_error_that_there_is_not() -> None:
    titles = re.findall(r"^### (\w+)$", page("errors.md"), re.MULTILINE)
    assert sorted(titles) == sorted(error.__name__ for error in ERRORS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_the_catalogue_says_what_is_tried_again(error: type[errors.SpanwireError]) -> None:
    (said,) = re.findall(r"^\| tried again \| (\w+)", section("errors.md", error.__name__), re.MULTILINE)
    made = error("x", limit="idle_s") if error is errors.CallTimeout else error("x")
    if said != "by":  # its status
        assert (retry_wait_s(made, 1, Retries(), 0.5) is not None) == (said == "yes")


@pytest.mark.parametrize(
    ("name", "statuses", "final"),
    [("ServerError", (500, 502, 504), (501, 505)), ("BadRequest", (408, 409, 425), (400, 404, 422))],
)
def test_the_catalogue_names_the_statuses_that_are_tried_again(
    name: str, statuses: tuple[int, ...], final: tuple[int, ...]
) -> None:
    (row,) = re.findall(r"^\| tried again \| by (.*)$", section("errors.md", name), re.MULTILINE)
    for status in (*statuses, *final):
        error = errors.server_error("x", status=status)
        assert type(error).__name__ == name
        assert error.retryable == (status in statuses)
    for status in statuses:
        assert str(status) in row


def test_every_phase_is_in_the_catalogue() -> None:
    assert errors.__doc__ is not None
    (words,) = re.findall(r"\* ``phase``:(.*?)\* ``retryable``", errors.__doc__, re.DOTALL)
    phases = re.findall(r"``(\w+)``", words)
    assert len(phases) >= 11
    rows = re.findall(r"^\| `(\w+)`", section("errors.md", "Phases"), re.MULTILINE)
    assert rows == phases


def test_every_limit_is_in_the_catalogue() -> None:
    text = section("errors.md", "CallTimeout")
    for name in Timeouts.__struct_fields__:
        assert f"`{name}`" in text


# --- hooks and the kit ------------------------------------------------------------------------------------------------


def test_there_are_hooks() -> None:
    assert len(HOOKS) == 6


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_row_and_an_example(hook: str) -> None:
    assert re.search(rf"^\| \[`{hook}\(", page("hooks.md"), re.MULTILINE)
    text = section("hooks.md", hook)
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert f"def {hook}(" in block


def test_the_page_on_transports_names_what_a_wire_may_be_unable_to_do() -> None:
    assert "backpressure" in ABILITIES
    for name in re.findall(r"A wire that cannot: `(\w+)`", page("transports.md")):
        assert name in ABILITIES


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_run_that_is_shown() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([\d.,]+) \|$", page("which-transport.md"), re.MULTILINE)
    assert len(rows) >= 7
    for workload, figure in rows:
        (shown,) = re.findall(
            rf"^\| {workload} \| \w+ \| spanwire \| ([\d.,]+) \|", page("benchmarks.md"), re.MULTILINE
        )
        assert figure == shown, workload
