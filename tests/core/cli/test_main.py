"""``spanwire`` as a process: what is installed, versions, help, plugins' commands."""

import re
from importlib.metadata import version

import pytest

from .conftest import Plugin, Spanwire

BLOCK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize("missing", ["typer", "rich"])
@pytest.mark.parametrize("arguments", [(), ("demo",), ("--version",)])
def test_without_the_extra_it_says_what_to_install(
    spanwire: Spanwire, missing: str, arguments: tuple[str, ...]
) -> None:
    assert spanwire.run(*arguments, first=BLOCK.format(name=missing)) == (
        2,
        "",
        "spanwire's command line needs typer and rich: pip install 'spanwire[cli]'\n",
    )


def test_importing_it_imports_neither_typer_nor_rich(spanwire: Spanwire) -> None:
    check = "import sys, spanwire.cli; sys.exit(repr({'typer', 'rich', 'click'} & set(sys.modules)))\n"
    assert spanwire.run(first=check) == (1, "", "set()\n")


def test_version(spanwire: Spanwire) -> None:
    assert spanwire.run("--version") == (0, f"spanwire {version('spanwire')}\n", "")


@pytest.mark.parametrize("arguments", [(), ("demo",), ("probe",), ("transports",)])
def test_help_fits_80_columns_and_keeps_its_examples(spanwire: Spanwire, arguments: tuple[str, ...]) -> None:
    found = spanwire(*arguments, "--help")
    assert found.exit_code == 0
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert "\b" not in found.stdout
    assert found.stdout == spanwire(*arguments, "-h").stdout


def test_probe_help_has_an_example_for_each_line(spanwire: Spanwire) -> None:
    text = spanwire("probe", "--help").stdout
    assert "    spanwire probe http://127.0.0.1:8000/v1 --model my-model -n 200 -c 8\n" in text


def test_wrong_usage_is_exit_code_2(spanwire: Spanwire) -> None:
    for arguments in (("nonsense",), ("probe",), ("demo", "--nonsense")):
        found = spanwire(*arguments)
        assert (found.exit_code, found.stdout) == (2, "")
        assert "Usage: spanwire" in found.stderr


# --- commands of plugins ----------------------------------------------------------------------------------------------

GOOD = """
import typer

app = typer.Typer(help="Shows jobs.")

@app.command()
def show(number: int) -> None:
    print("job", number)

@app.command()
def fail() -> None:
    from spanwire.errors import ConfigurationError
    raise ConfigurationError("no such\\njob")
"""


def test_entry_points_of_the_backport(spanwire: Spanwire, plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """`importlib_metadata` puts its own finder in the place of the standard library's when it is imported."""
    backport = pytest.importorskip("importlib_metadata")
    plugin.module("acme_backport", GOOD)
    plugin.entries("spanwire.commands", backport="acme_backport:app")
    monkeypatch.setattr("importlib.metadata.entry_points", backport.entry_points)
    assert spanwire("backport", "show", "3").stdout == "job 3\n"


def test_a_plugin_brings_commands_of_its_own(spanwire: Spanwire, plugin: Plugin) -> None:
    plugin.module("acme_good", GOOD)
    plugin.entries("spanwire.commands", errands="acme_good:app")
    assert re.search(r"^ +errands +Shows jobs\.$", spanwire("--help").stdout, re.MULTILINE)
    assert spanwire("errands", "show", "3").stdout == "job 3\n"
    assert "spanwire errands show" in spanwire("errands", "show", "--help").stdout
    failed = spanwire("errands", "fail")
    assert (failed.exit_code, failed.stdout, failed.stderr) == (2, "", "spanwire: no such job\n")


ALONE = """
import typer

app = typer.Typer()

@app.command(name="count", context_settings={"allow_interspersed_args": False})
def count(words: list[str], loud: bool = False) -> None:
    \"""Counts words.\"""
    print(words, loud)
"""


def test_a_single_command_of_the_entry_s_name_is_the_command_itself(spanwire: Spanwire, plugin: Plugin) -> None:
    plugin.module("acme_alone", ALONE)
    plugin.entries("spanwire.commands", count="acme_alone:app", other="acme_alone:app")
    assert re.search(r"^ +count +Counts words\.$", spanwire("--help").stdout, re.MULTILINE)
    assert spanwire("count", "--loud", "--", "a", "--b").stdout == "['a', '--b'] True\n"
    assert spanwire("other", "count", "a", "--loud").stdout == "['a', '--loud'] False\n"
    assert "Usage: spanwire count " in spanwire("count", "--help").stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import acme_is_not_there", "ModuleNotFoundError: No module named 'acme_is_not_there'"),
        ("raise RuntimeError('on purpose')", "RuntimeError: on purpose"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        pytest.param("app = 3", "AttributeError", marks=pytest.mark.long),
        pytest.param(
            "import typer\napp = typer.Typer()\n@app.command()\ndef f(x: int | str) -> None: ...",
            "Union",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_broken_command_is_one_warning_and_stops_nothing(
    spanwire: Spanwire, plugin: Plugin, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    plugin.module("acme_broken", text)
    plugin.module("acme_good", GOOD)
    plugin.entries("spanwire.commands", broken="acme_broken:app", errands="acme_good:app")
    code, out, err = spanwire.run("--help")
    assert code == 0
    assert " errands " in out
    assert " broken " not in out
    assert err.startswith("spanwire: command 'broken' of acme-plugin is left out: ")
    assert words in err
    assert err.count("\n") == 1
    assert spanwire("errands", "show", "3").stderr == ""
    monkeypatch.setenv("SPANWIRE_DISABLE_PLUGINS", "broken")
    assert spanwire.run("--help")[2] == ""


def test_a_plugin_cannot_take_the_place_of_a_command(spanwire: Spanwire, plugin: Plugin) -> None:
    plugin.module("acme_good", GOOD)
    plugin.entries("spanwire.commands", transports="acme_good:app")
    assert "spanwire-sse" in spanwire("transports").stdout
    assert len(re.findall("^ +transports ", spanwire("--help").stdout, re.MULTILINE)) == 1
