"""The kit's own rules: what a subclass may declare and override, and what it does with it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from spanwire.testing import DialectConformance, TransportConformance
from spanwire.testing.conformance import ABILITIES
from spanwire.testing.conformance.abilities import needs, needs_of


def names_of(kit: type) -> list[str]:
    return [name for name in dir(kit) if name.startswith("test_")]


@pytest.mark.parametrize("kit", [TransportConformance, DialectConformance])
def test_every_test_says_what_it_proves_and_where_to_look(kit: type) -> None:
    assert len(names_of(kit)) >= 11
    for name in names_of(kit):
        text = getattr(kit, name).__doc__ or ""
        assert text.startswith("Proves: "), name
        assert "If it fails: " in text, name


def test_every_ability_is_needed_somewhere() -> None:
    import inspect

    from spanwire.testing import conformance

    needed = {
        ability for name in names_of(TransportConformance) for ability in needs_of(getattr(TransportConformance, name))
    }
    source = "".join(
        inspect.getsource(getattr(conformance, name))
        for name in (
            "answers",
            "dialling",
            "failures",
            "leaving",
            "limits",
            "loops",
            "pressure",
            "privacy",
            "segments",
            "harness",
        )
    )
    for ability in ABILITIES:
        assert ability in needed or f'must("{ability}")' in source or f'can("{ability}")' in source, ability


def test_an_ability_that_is_none_cannot_be_needed() -> None:
    with pytest.raises(AssertionError):
        needs("magic")


class Base(TransportConformance):
    scheme = "http"


def meta(kit: type[TransportConformance]) -> None:
    kit().test_no_test_is_overridden_without_a_reason()


def test_a_test_is_not_overridden_without_a_reason() -> None:
    class Silent(Base):
        def test_ten_thousand_chunks(self) -> None:  # type: ignore[override]
            pass

    class Gone(Base):
        test_ten_thousand_chunks = None  # type: ignore[assignment]

    class Reasonless(Base):
        @pytest.mark.xfail
        def test_ten_thousand_chunks(self) -> None:  # type: ignore[override]
            pass

    class Reasoned(Base):
        @pytest.mark.xfail(reason="the wire carries a hundred")
        def test_ten_thousand_chunks(self) -> None:  # type: ignore[override]
            pass

    for kit in (Silent, Gone, Reasonless):
        with pytest.raises(AssertionError, match="test_ten_thousand_chunks"):
            meta(kit)
    meta(Reasoned)
    meta(Base)


@pytest.mark.parametrize("cannot", [{"magic": "no"}, {"reset": ""}, {"reset": None}])
def test_what_is_declared_is_a_known_name_with_a_reason(cannot: Any) -> None:
    class Kit(Base):
        pass

    Kit.cannot = cannot
    with pytest.raises(AssertionError, match=r"magic|reset"):
        meta(Kit)


def test_what_the_wire_cannot_do_is_an_expected_failure_with_its_reason(tmp_path: Any) -> None:
    path = tmp_path / "test_kit.py"
    path.write_text(
        "from spanwire.testing import TransportConformance\n"
        "class TestKit(TransportConformance):\n"
        "    scheme = 'http'\n"
        "    cannot = {'hang': 'it never stops'}\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rx",
            "-p",
            "no:cacheprovider",
            str(path),
            "-k",
            "start_does_not or empty",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert "1 xfailed" in done.stdout
    assert "it never stops" in done.stdout


def test_the_kit_is_loaded_when_it_is_asked_for() -> None:
    code = (
        "import sys, spanwire.testing as t; assert 'pytest' not in sys.modules; "
        "sys.modules['pytest'] = None\n"
        "import spanwire.errors as e\n"
        "try: t.TransportConformance\n"
        "except e.ConfigurationError as error: print(error)\n"
        "try: t.Nothing\n"
        "except AttributeError: print('nothing')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'spanwire[testing]'" in done.stdout
    assert "nothing" in done.stdout
