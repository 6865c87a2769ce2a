"""What holds for every command, found by looking at what is there: also the ones of plugins, and those added later."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.main import get_command

from spanwire.cli.app import app
from spanwire.cli.commands import SpanwireGroup

from .conftest import MAIN, Spanwire

#: What prints nothing that another program would read: servers, and what runs somebody's program.
_WITHOUT_JSON = {
    "receive",
    "jobs reverify",
    "jobs check",
    "jobs show",
    "jobs export",
}  # the last two print nothing else
#: Processes take their time: one that draws a table, and one whose words are written by the library below.
_COMPLETE = [("transports",), ("--version",)]


def _commands(group: Any, context: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name), command
        if hasattr(command, "list_commands"):
            yield from _commands(command, context, (*path, name))


def everything() -> list[Any]:
    group = get_command(app)
    assert isinstance(group, SpanwireGroup)
    with typer.Context(group) as context:  # type: ignore[attr-defined,unused-ignore]
        return [pytest.param(path, command, id=" ".join(path)) for path, command in _commands(group, context)]


EVERYTHING = everything()
each = pytest.mark.parametrize(("path", "command"), EVERYTHING)


def test_they_are_found() -> None:
    names = {param.id for param in EVERYTHING}
    assert {"demo", "probe", "report", "transports", "new-transport", "new-dialect", "doctor", "jobs list"} <= names


@each
def test_help_says_what_it_does_and_each_option(spanwire: Spanwire, path: tuple[str, ...], command: Any) -> None:
    found = spanwire(*path, "--help")
    assert (found.exit_code, found.stderr) == (0, "")
    assert f"Usage: spanwire {' '.join(path)} " in found.stdout
    assert found.stdout == spanwire(*path, "-h").stdout
    assert command.help
    for option in command.params:
        assert getattr(option, "help", None), f"{option.name} has no help text"


@each
def test_its_line_in_the_list_is_whole(spanwire: Spanwire, path: tuple[str, ...], command: Any) -> None:
    if path[0] == "jobs":  # its list has room for shorter names
        return
    assert "..." not in command.get_short_help_str(80 - 2 - 2 - len("new-transport"))


@each
def test_an_unknown_option_is_wrong_usage(spanwire: Spanwire, path: tuple[str, ...], command: Any) -> None:
    found = spanwire(*path, "--no-such-option")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "No such option: --no-such-option" in found.stderr
    assert "Traceback" not in found.stderr


@each
def test_what_prints_something_can_print_json(spanwire: Spanwire, path: tuple[str, ...], command: Any) -> None:
    if hasattr(command, "list_commands") or " ".join(path) in _WITHOUT_JSON:
        return
    assert "--json" in {name for option in command.params for name in option.opts}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("probe", "nonsense", "-m", "m"), "has no scheme and host"),
        (("probe", "http://127.0.0.1:99999", "-m", "m"), "Port out of range"),
        (("probe", "pigeon://x", "-m", "m"), "no installed transport serves the URL scheme 'pigeon'"),
        (("probe", "http://u:hunter2@h/v1", "-m", "m"), "user name or password"),
        (("probe", "http://127.0.0.1:1", "-m", "m", "-H", "a"), "Name: value"),
        (("probe", "http://127.0.0.1:1", "-m", "m", "-H", "a b: c"), "is not a header name"),
        (("probe", "https://127.0.0.1:1", "-m", "m", "--ca", "nowhere.pem"), "does not exist"),
        (("probe", "https://127.0.0.1:1", "-m", "m", "--api-key-env", "NO_SUCH_NAME"), "NO_SUCH_NAME is not set"),
        (("report", "nowhere.jsonl"), "No such file"),
        (("report", "nowhere.jsonl", "--since", "yesterday"), "is no time"),
        (("new-transport", "Bad Name!"), "is no name for a transport"),
        (("new-transport", "grpc"), "choose another name"),
        (("new-dialect", "openai", "-o", "."), "choose another name"),
        (("jobs", "list", "--store", "mysql://x"), "is not known"),
        (("jobs", "list", "--store", "sqlite:///nowhere/x.db"), "there is no store of jobs"),
        (("frobnicate",), "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_told_without_a_traceback(spanwire: Spanwire, arguments: tuple[str, ...], words: str) -> None:
    found = spanwire(*arguments)
    assert (found.exit_code, found.stdout) == (2, "")
    assert words in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr
    assert "hunter2" not in found.stderr


def test_what_failed_is_1(spanwire: Spanwire) -> None:
    found = spanwire("probe", "http://127.0.0.1:1/v1", "-m", "m", "-n", "1")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.count("\n") == 1


def test_a_command_of_an_extra_that_is_missing_names_it(spanwire: Spanwire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANWIRE_DISABLE_PLUGINS", "doctor")
    monkeypatch.setattr(get_command(app), "_found", None)
    found = spanwire("doctor", "--", "python", "x.py")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "'doctor' is not installed: pip install 'spanwire[instrument]'" in " ".join(found.stderr.split())


def test_ctrl_c_is_130(spanwire: Spanwire, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("spanwire.cli.demo.run_demo", interrupted)
    found = spanwire("demo")
    assert (found.exit_code, found.stdout, found.stderr) == (130, "", "")


# --- where the output goes --------------------------------------------------------------------------------------------


def shell(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -W error -c "{MAIN}"'
    return subprocess.run(
        ["bash", "-c", script.replace("spanwire ", f"{command} ")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("arguments", _COMPLETE, ids=" ".join)
def test_a_reader_that_goes_away_hears_nothing(arguments: tuple[str, ...]) -> None:
    done = shell(f"spanwire {' '.join(arguments)} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode in (0, 1)  # 0: it was faster
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")  # noqa: PTH110
@pytest.mark.parametrize("arguments", [*_COMPLETE, ("demo",)], ids=" ".join)
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    done = shell(f"spanwire {' '.join(arguments)} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "spanwire: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("arguments", _COMPLETE, ids=" ".join)
def test_a_closed_stdout_is_no_mistake(arguments: tuple[str, ...]) -> None:
    done = shell(f"spanwire {' '.join(arguments)} >&-")
    assert (done.returncode, done.stderr) == (0, "")


def on_a_terminal(*arguments: str, **env: str) -> bytes:
    """What it shows on stdout and stderr, which are a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdout=theirs, stderr=theirs, stdin=theirs, env={**os.environ, "TERM": "xterm-256color", **env},
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 65536):
                shown += data
        except OSError:  # how Linux says that the other side is closed
            pass
        os.close(ours)
        process.wait(60)
    return shown


_COLOUR = re.compile(rb"\x1b\[[0-9;]*3[0-9][0-9;]*m")


def test_colours_only_on_a_terminal_and_without_no_color(spanwire: Spanwire) -> None:
    assert b"\x1b[1m" in on_a_terminal("transports")  # the head of the table
    assert _COLOUR.search(on_a_terminal("transports", NO_COLOR="1")) is None
    assert "\x1b" not in spanwire("transports").stdout


# --- completion -------------------------------------------------------------------------------------------------------


def test_completion_can_be_installed_and_knows_the_commands_of_plugins(spanwire: Spanwire) -> None:
    assert "--install-completion" in spanwire("--help").stdout
    done = shell("spanwire ", _SPANWIRE_COMPLETE="complete_bash", COMP_WORDS="spanwire ", COMP_CWORD="1")
    assert {"demo", "probe", "doctor", "jobs"} <= set(done.stdout.split())
    done = shell("spanwire ", _SPANWIRE_COMPLETE="complete_bash", COMP_WORDS="spanwire probe --mo", COMP_CWORD="2")
    assert done.stdout.split() == ["--model"]
    assert done.stderr == ""
