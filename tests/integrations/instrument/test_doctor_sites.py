"""Whose line it is."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import Any
from weakref import ref

from spanwire_instrument.doctor.sites import Clients, find


def library(tmp_path: Path, text: str) -> Any:
    """A module that lies where installed ones do."""
    module = types.ModuleType("acme.inner")
    file = tmp_path / "site-packages" / "acme" / "inner.py"
    vars(module)["find"] = find
    exec(compile(text, str(file), "exec"), vars(module))
    return module


TEXT = """
class Client:
    def __init__(self):
        self.site = find(1)

def once():
    return inner()

def inner():
    return find(1)

def again():
    return inner(), inner()
"""


def here() -> int:
    return sys._getframe(1).f_lineno


def test_the_line_of_the_user_and_the_library_that_it_called(tmp_path: Path) -> None:
    acme = library(tmp_path, TEXT)
    site, line = acme.once(), here()
    assert (site.file, site.line, site.function, site.library, site.made) == (
        __file__,
        line,
        "test_the_line_of_the_user_and_the_library_that_it_called",
        "acme",
        "",
    )
    assert acme.Client().site.made == "acme.Client"
    assert find(1).library == ""


def test_one_call_into_a_library_has_one_number(tmp_path: Path) -> None:
    if sys.gettrace() is not None:
        return  # under a debugger numbers are unknown
    acme = library(tmp_path, TEXT)
    first, second = acme.again()
    assert first.call == second.call > 0
    assert len({acme.once().call for _ in range(5)}) == 5  # though their frames are at one address


def test_nothing_of_the_program_is_kept_alive(tmp_path: Path) -> None:
    class Thing:
        pass

    acme = library(tmp_path, "def use(thing):\n    return find(1)\n")
    thing = Thing()
    gone = ref(thing)
    acme.use(thing)
    gc.disable()
    try:
        del thing
        assert gone() is None
    finally:
        gc.enable()


def test_which_client_sends() -> None:
    clients = Clients()

    class Client:
        def send(self) -> int:
            return clients.sending()

    clients.sends(Client.send)
    one, two = Client(), Client()
    numbers = [clients.add(one), clients.add(two)]
    assert [one.send(), two.send(), one.send()] == [*numbers, numbers[0]]
    assert Client().send() == 0
    assert clients.sending() == 0
