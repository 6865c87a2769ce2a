from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spanwire_instrument.patches import ImportHook, Patches


class Base:
    def method(self) -> str:
        return "base"


class Derived(Base):
    pass


def louder(original: Any) -> Any:
    def method(self: Any) -> str:
        return str(original(self)).upper()

    return method


def test_an_inherited_method_is_replaced_where_it_was_asked_for_alone() -> None:
    patches = Patches()
    patches.replace(Derived, "method", louder)
    assert (Derived().method(), Base().method()) == ("BASE", "base")
    patches.undo()
    assert "method" not in vars(Derived)
    assert Derived().method() == "base"
    assert not patches.on


def test_replacements_are_undone_in_the_order_of_a_stack() -> None:
    before = vars(Base)["method"]
    patches = Patches()
    patches.replace(Base, "method", louder)
    patches.replace(Base, "method", louder)
    patches.undo()
    assert vars(Base)["method"] is before


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "spanwire_test_module"
    (tmp_path / f"{name}.py").write_text("VALUE = 1\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_hook_is_called_when_its_module_is_complete(module: str) -> None:
    told: list[int] = []
    hook = ImportHook({module: lambda made: told.append(made.VALUE)})
    hook.install()
    hook.install()
    try:
        made = importlib.import_module(module)
        importlib.import_module(module)
        assert told == [1]
        assert made.__spec__ is not None
        assert "exec_module" not in vars(made.__spec__.loader)
    finally:
        hook.remove()
        hook.remove()
    assert hook not in sys.meta_path


def test_a_hook_that_raises_does_not_break_the_import(module: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any) -> None:
        raise ValueError("on purpose")

    hook = ImportHook({module: broken})
    hook.install()
    try:
        assert importlib.import_module(module).VALUE == 1
    finally:
        hook.remove()
    assert f"{module} cannot be instrumented" in caplog.text


def test_a_hook_that_was_removed_between_finding_and_import_is_not_called(module: str) -> None:
    told: list[Any] = []
    hook = ImportHook({module: told.append})
    hook.install()
    spec = importlib.util.find_spec(module)
    hook.remove()
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert told == []


def test_a_module_that_is_not_there_is_not_there(module: str) -> None:
    hook = ImportHook({"spanwire_test_nothing": print})
    hook.install()
    try:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("spanwire_test_nothing")
    finally:
        hook.remove()
