from __future__ import annotations

from typing import Any

import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_spanwire import ChatSpanwire, SpanwireEmbeddings
from langchain_spanwire.names import REPLACED, known_names

from spanwire.errors import ConfigurationError

URL = "http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temprature": 0}, "did you mean temperature="),
        ({"modl": "x"}, "did you mean model"),
        ({"base_ur": "x"}, "did you mean base_url="),
        ({"maxtokens": 1}, "did you mean max_tokens="),
        ({"zzz": 1}, "extra_body"),
        ({"n": 2}, "batch"),
        ({"http_client": None}, "manager="),
        ({"openai_api_key": "secret"}, "use api_key"),
        ({"use_responses_api": True}, "dialect"),
        ({"request_timeout": 1}, "use timeout"),
    ],
)
def test_what_to_write_instead(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match="ChatSpanwire") as error:
        ChatSpanwire(model="m", endpoint=URL, **given)
    assert says in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(("theirs", "ours"), [(ChatOpenAI, ChatSpanwire), (OpenAIEmbeddings, SpanwireEmbeddings)])
def test_each_field_of_the_openai_models_is_taken_or_has_a_replacement(theirs: Any, ours: Any) -> None:
    assert known_names(theirs) - known_names(ours) - REPLACED.keys() == set()


def test_nothing_that_is_taken_is_said_to_be_replaced() -> None:
    assert known_names(ChatSpanwire) & known_names(SpanwireEmbeddings) & REPLACED.keys() == set()
    assert known_names(ChatSpanwire) & REPLACED.keys() == set()


@pytest.mark.parametrize("n", [None, 1])
def test_one_answer_may_be_asked_for(n: int | None) -> None:
    assert ChatSpanwire(model="m", endpoint=URL, n=n).model_name == "m"  # type: ignore[call-arg]


def test_fields_of_a_subclass_are_known() -> None:
    class Mine(ChatSpanwire):
        mine: int = 1

    assert Mine(model="m", endpoint=URL, mine=2).mine == 2
    with pytest.raises(ConfigurationError, match="Mine has no field 'mein'"):
        Mine(model="m", endpoint=URL, mein=2)  # type: ignore[call-arg]
