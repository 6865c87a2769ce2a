from typing import Any

import pytest

from spanwire.calls import Usage
from spanwire.errors import ConfigurationError
from spanwire.testing import Script, ScriptedTool


@pytest.mark.parametrize("text", ["", "one", "one two", " one  two ", "line\nline\n", "   "])
def test_say_cuts_a_text_into_pieces_that_join_to_it(text: str) -> None:
    assert "".join(Script.say(text).tokens) == text


def test_say_cuts_at_words_and_takes_the_other_fields() -> None:
    script = Script.say("a b c", gap_s=0.5)
    assert script.tokens == ("a", " b", " c")
    assert script.total_s == 1.0


def test_finish_reason_follows_from_the_answer_unless_it_is_given() -> None:
    tool = ScriptedTool("f")
    assert Script().finish == "stop"
    assert Script(tool_calls=[tool]).finish == "tool_calls"
    assert Script(tool_calls=[tool], finish_reason="stop").finish == "stop"
    assert Script(finish_reason=None).finish is None


def test_usage_is_counted_sent_always_or_never() -> None:
    counted = Script(tokens=["a", "b"], reasoning=["r"], tool_calls=[ScriptedTool("f", ["{", "}"])])
    assert counted.usage_for(7, asked=True) == Usage(7, 6, 13, reasoning_tokens=1)
    assert counted.usage_for(7, asked=False) is None
    assert Script(usage=Usage(1, 2, 3)).usage_for(7, asked=False) == Usage(1, 2, 3)
    assert Script(usage=None).usage_for(7, asked=True) is None


def test_total_is_the_sum_of_all_delays() -> None:
    script = Script(tokens=["a", "b", "c"], queue_s=1, headers_s=2, prefill_s=4, gap_s=8, end_s=16)
    assert script.total_s == 1 + 2 + 4 + 2 * 8 + 16


@pytest.mark.parametrize(("tokens", "decode_s"), [([], 0), (["a"], 0), (["a", "b", "c"], 16)])
def test_decode_is_the_time_between_the_first_and_the_last_piece(tokens: list[str], decode_s: float) -> None:
    assert Script(tokens=tokens, gap_s=8).decode_s == decode_s


def test_lists_become_tuples_so_that_a_script_cannot_change() -> None:
    tokens = ["a"]
    script = Script(tokens=tokens, writes=[b"x"])
    tokens.append("b")
    assert script.tokens == ("a",)
    assert script.writes == (b"x",)
    assert ScriptedTool("f", "{}").arguments == ("{}",)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": "hello"}, "Script.say"),
        ({"tokens": [1]}, "tokens"),
        ({"tokens": ["\ud800"]}, "writes"),
        ({"reasoning": "hello"}, "reasoning"),
        ({"tool_calls": [{"name": "f"}]}, "ScriptedTool"),
        ({"usage": {"total_tokens": 1}}, "usage"),
        ({"queue_s": -1}, "queue_s"),
        ({"gap_s": float("nan")}, "gap_s"),
        ({"end_s": float("inf")}, "end_s"),
        ({"prefill_s": True}, "prefill_s"),
        ({"status": 101}, "status"),
        ({"status": "200 OK"}, "status"),
        ({"headers": {"a": "b\r\nc: d"}}, "headers"),
        ({"content_type": "a\nb"}, "content_type"),
        ({"body": "text"}, "body"),
        ({"body": b"", "writes": [b"x"]}, "choose one"),
        ({"writes": b"bytes"}, "writes"),
        ({"writes": [b""]}, "writes"),
        ({"drop_after": -1}, "drop_after"),
        ({"drop_after": "headers"}, "drop_after"),
        ({"hang_after": 1.5}, "hang_after"),
        ({"drop_after": 1, "hang_after": 1}, "choose one"),
        ({"drop_mode": "abort"}, "drop_mode"),
        ({"drop_mode": 1006}, "drop_mode"),
        ({"drop_mode": 1005}, "drop_mode"),
        ({"drop_mode": 5000}, "drop_mode"),
        ({"drop_mode": True}, "drop_mode"),
        ({"dimensions": 0}, "dimensions"),
        ({"server_timing": "vLLM"}, "server_timing=.* must be one of vllm, llama.cpp, groq, cerebras"),
        ({"server_timing": ["vllm"]}, "server_timing"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Script(**fields)


@pytest.mark.parametrize("code", [1000, 1001, 1012, 3000, 4999])
def test_a_close_code_is_a_way_to_drop(code: int) -> None:
    assert Script(drop_after=1, drop_mode=code).drop_mode == code


def test_a_tool_needs_a_name_and_text() -> None:
    with pytest.raises(ConfigurationError, match="name"):
        ScriptedTool("")
    with pytest.raises(ConfigurationError, match="arguments"):
        ScriptedTool("f", [b"{}"])  # type: ignore[list-item]
