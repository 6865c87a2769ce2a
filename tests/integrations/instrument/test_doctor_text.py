"""How a report looks."""

from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_instrument.doctor.facts import Run
from spanwire_instrument.doctor.findings import Finding, Where
from spanwire_instrument.doctor.launch import Ended
from spanwire_instrument.doctor.text import Report, print_text, program, to_json

from tests.integrations.instrument.test_doctor_findings import in_a_row

LONG = "client = openai.AsyncOpenAI(http_client=spanwire_instrument.httpx2_async_client(limits=httpx2.Limits(max_connections=6)))"


def text(*findings: Finding, command: list[str] | None = None) -> str:
    run = Run(calls=tuple(in_a_row()), processes=1)
    file = io.StringIO()
    print_text(Report(command or ["python", "agent.py"], Ended(0, None, 1.0), run, list(findings)), file)
    return file.getvalue()


def found(**fields: object) -> Finding:
    return msgspec.convert(
        {"kind": "x", "severity": "high", "title": "A title", "evidence": ["1 of 2."], **fields}, Finding
    )


def test_names_give_the_terminal_no_orders() -> None:
    shown = text(found(title="\x1b]0;all right\x07", evidence=["of \x9b2Jgpt."]))
    assert "\\u001b]0;all right" in shown
    assert "of \\u009b2Jgpt." in shown


def test_a_long_line_of_code_is_broken_as_formatters_do() -> None:
    shown = text(found(change="Do it.", now="client = openai.AsyncOpenAI()", instead=LONG))
    assert shown.partition("   Do it.\n")[2].partition("\n\n")[0] == (
        "     - client = openai.AsyncOpenAI()\n"
        "     + client = openai.AsyncOpenAI(\n"
        "     +     http_client=spanwire_instrument.httpx2_async_client(\n"
        "     +         limits=httpx2.Limits(max_connections=6)\n"
        "     +     )\n"
        "     + )"
    )


@given(
    st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=200),
    st.sampled_from(["a.py", "/some/folder/" * 4 + "a.py", "<stdin>"]),
)
def test_80_columns(words: str, file: str) -> None:
    words = " ".join(word[:70] for word in words.split()) or "x"
    shown = text(
        found(title=words, evidence=[words], change=words, where=[msgspec.to_builtins(Where(file, 3, "f"))]),
        command=["python", words.replace(" ", "_")[:60]],
    )
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["python", "agent.py"], "python agent.py"),
        (["/usr/bin/python3.11", "-X", "dev", "a/agent.py", "--key", "sk-1"], "python3.11 agent.py ..."),
        (["python", "-u", "a/agent.py", "--key", "sk-1"], "python agent.py ..."),
        (["python", "-m", "agent"], "python -m agent"),
        (["python", "-c", "print('sk-1')"], "python -c ..."),
        (["./run", "sk-1"], "run ..."),
        (["pytest"], "pytest"),
        (["python"], "python"),
    ],
)
def test_arguments_are_nobody_s_business(command: list[str], shown: str) -> None:
    assert program(command) == shown


def test_json() -> None:
    data = msgspec.json.decode(to_json(Report(["python"], Ended(137, "SIGKILL", 1.25), Run(processes=1), [found()])))
    assert (data["exit_code"], data["signal"], data["calls"], data["time"]) == (137, "SIGKILL", 0, {})
    assert data["findings"][0]["kind"] == "x"
