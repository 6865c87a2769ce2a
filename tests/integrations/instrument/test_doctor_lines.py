"""The line that is spoken of, and how it would read instead."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_instrument.doctor.lines import construction, shown, with_statement

CODE = dedent("""
    import openai, httpx2

    def answer(question, key):
        client = openai.OpenAI(
            base_url=f"https://{key}/v1",
            api_key=key,
        )
        with httpx2.Client(timeout=3) as http:
            pass
        return openai.OpenAI(api_key="sk-secret").chat.completions.create(model="m")

    async def stream(client):
        for number in range(3):
            try:
                events = await client.chat.completions.create(model="m", stream=True)
                async for event in await client.responses.create(stream=True):
                    print(event)
            except ValueError as error:
                print(openai.AsyncOpenAI(error), "sk-secret")
""")


def at(words: str) -> int:
    (number,) = [number for number, line in enumerate(CODE.splitlines(), 1) if words in line]
    return number


def test_an_assignment_of_several_lines() -> None:
    for line in range(at("client = openai"), at("client = openai") + 4):
        found = construction(CODE, line, "OpenAI")
        assert found is not None
        assert (found.target, found.needs) == ("client", ("key",))
        assert found.now == 'client = openai.OpenAI(base_url="...", api_key=key)'
        assert found.shared() == found.now
        assert found.with_argument("max_retries", "0") == found.now.replace(")", ", max_retries=0)")
        assert found.with_argument("api_key", "None") == 'client = openai.OpenAI(base_url="...", api_key=None)'


def test_part_of_something_else() -> None:
    found = construction(CODE, at("return openai"), "OpenAI")
    assert found is not None
    assert found.shared() == 'client = openai.OpenAI(api_key="...")'
    assert found.with_argument("max_retries", "0") == 'openai.OpenAI(api_key="...", max_retries=0)'
    assert found.needs == ()


def test_the_head_of_a_with() -> None:
    found = construction(CODE, at("httpx2.Client"), "Client")
    assert found is not None
    assert found.now == "with httpx2.Client(timeout=3) as http:"
    assert found.made_by("spanwire_instrument.httpx2_client") == "spanwire_instrument.httpx2_client(timeout=3)"


def test_inside_of_a_handler() -> None:
    found = construction(CODE, at("AsyncOpenAI"), "AsyncOpenAI")
    assert found is not None
    assert found.now == 'print(openai.AsyncOpenAI(error), "...")'


def test_streams_in_a_with() -> None:
    assert with_statement(CODE, at("events = ")) == (
        'events = await client.chat.completions.create(model="...", stream=True)',
        "async with await client.chat.completions.create(...) as events:",
    )
    assert with_statement(CODE, at("async for")) == (
        "async for event in await client.responses.create(stream=True):",
        "async with await client.responses.create(stream=True) as stream:",
    )
    assert with_statement("x = 3", 1) is None


def test_long_arguments_are_left_out() -> None:
    source = f"client = OpenAI({', '.join(f'argument_{number}=None' for number in range(9))})"
    found = construction(source, 1, "OpenAI")
    assert found is not None
    assert found.now == found.shared() == "client = OpenAI(...)"
    assert found.with_argument("http_client", "x()") == "client = OpenAI(..., http_client=x())"


@pytest.mark.parametrize("source", ["", "((", "\0", "x = 1", "def f(): ..."])
def test_nothing_there(source: str) -> None:
    assert construction(source, 1, "OpenAI") is None
    assert construction(source, 99, "OpenAI") is None


@given(st.sampled_from(["client = A({!r})", "f(A(b={!r}))", "with A(c={!r}):\n  pass", "x = await A(f({!r}), d=[{!r}])",
                        "for x in A(y=({!r},)): pass", "if A({!r}): pass"]), st.text(min_size=4))  # fmt: skip
def test_no_text_is_ever_shown(form: str, secret: str) -> None:
    source = form.replace("{!r}", repr(secret + "SECRET"))
    texts = [shown(source, 1), *(with_statement(source, 1) or ())]
    found = construction(source, 1, "A")
    if found is not None:
        texts += [found.now, found.shared(), found.with_argument("z", "1"), found.made_by("b.c")]
    assert texts[0]
    assert all("SECRET" not in (text or "") and "\n" not in (text or "") for text in texts)


@given(st.integers(-5, 40), st.sampled_from(["OpenAI", "Client", "range", ""]))
def test_every_line(line: int, cls: str) -> None:
    found = construction(CODE, line, cls)
    if found is not None:
        ast.parse(found.shared())
        ast.parse(found.with_argument("x", "1"))
    shown(CODE, line)
    with_statement(CODE, line)
