from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core import exceptions
from langchain_spanwire import SpanwireEmbeddings
from langchain_spanwire.errors import as_model_error

import spanwire
from spanwire import errors
from spanwire.testing import Script
from tests.integrations.langchain.asking import WAYS, ask
from tests.integrations.langchain.test_chat import chat
from tests.support import run, serving

way_of = pytest.mark.parametrize("way", WAYS)
pytestmark = pytest.mark.skipif(
    not hasattr(exceptions, "ModelError"), reason="langchain-core before 1.6 has no such errors"
)

OVERFLOW = b'{"error": {"message": "This model\'s maximum context length is 10 tokens.", "code": 400}}'
ANSWERS: dict[str, tuple[Script, str, str, bool]] = {
    "400": (Script(status=400), "BadRequest", "ModelInvalidRequestError", False),
    "401": (Script(status=401), "AuthenticationFailed", "ModelAuthenticationError", False),
    "403": (Script(status=403), "AuthenticationFailed", "ModelPermissionDeniedError", False),
    "404": (Script(status=404), "BadRequest", "ModelNotFoundError", False),
    "429": (Script(status=429), "RateLimited", "ModelRateLimitError", True),
    "500": (Script(status=500), "ServerError", "ModelAPIError", True),
    "501": (Script(status=501), "ServerError", "ModelAPIError", False),
    "503": (Script(status=503), "Overloaded", "ModelAPIError", True),
    "no answer": (Script(drop_after="request"), "ConnectionFailed", "ModelConnectionError", True),
    "another answer": (Script(body=b"<html>"), "ProtocolError", "ModelError", False),
    "too long, by words": (Script(status=400, body=OVERFLOW), "BadRequest", "ContextOverflowError", False),
    "too long, by code": (
        Script(status=400, body=b'{"error": {"message": "No.", "code": "context_length_exceeded"}}'),
        "BadRequest",
        "ContextOverflowError",
        False,
    ),
}


def check(error: Any, ours: str, theirs: str, *, retryable: bool) -> None:
    assert isinstance(error, getattr(errors, ours))
    assert isinstance(error, getattr(exceptions, theirs))
    assert isinstance(error, exceptions.ModelError)
    found: Any = error
    assert found.is_retryable is found.retryable is retryable
    assert type(error).__name__ == ours
    assert found.timeline is not None


@way_of
@pytest.mark.parametrize("name", ANSWERS)
def test_errors_are_langchain_s_too(name: str, way: str) -> None:
    script, ours, theirs, retryable = ANSWERS[name]
    with serving(script) as server:
        error = ask(way, chat(server, max_retries=0)).error
    check(error, ours, theirs, retryable=retryable)
    if error is not None and error.__traceback__ is not None:
        assert error.__traceback__.tb_next is not None


@way_of
def test_in_the_middle_of_an_answer(way: str) -> None:
    with serving(Script(tokens=["a", "b"], drop_after=2)) as server:
        seen = ask(way, chat(server, max_retries=0), stream=True)
    check(
        seen.error,
        "ConnectionFailed",
        "ModelConnectionError",
        retryable=False if seen.error is None else seen.error.retryable,
    )


@way_of
def test_time_limits(way: str) -> None:
    with serving(Script(hang_after="request")) as server:
        error = ask(way, chat(server, max_retries=0, timeout=0.05)).error
    check(error, "CallTimeout", "ModelTimeoutError", retryable=True)


@pytest.mark.parametrize("way", ["async", "sync"])
def test_of_embeddings(way: str) -> None:
    with serving(Script(status=429)) as server:
        model = SpanwireEmbeddings(model="e", endpoint=server.url, max_retries=0)
        with pytest.raises(exceptions.ModelRateLimitError) as error:
            if way == "async":
                run(lambda: model.aembed_query("q"))
            else:
                model.embed_query("q")
    assert isinstance(error.value, errors.RateLimited)


def test_a_mistake_of_the_caller_is_no_model_s_error() -> None:
    with serving() as server:
        error = ask("invoke", chat(server), n=2).error
    assert type(error) is errors.ConfigurationError


MADE: list[Callable[[], errors.SpanwireError]] = [
    lambda: errors.QueueFull("full", endpoint="e"),
    lambda: errors.QueueTimeout("waited"),
    lambda: errors.Truncated("cut"),
    lambda: errors.MessageTooBig("big"),
    lambda: errors.CallTimeout("late", limit="idle_s"),
    lambda: errors.server_error("no", status=429, retry_after_s=3.0, headers={"a": "b"}),
]


@pytest.mark.parametrize("make", MADE)
def test_they_are_pickled_with_all_they_carry(make: Callable[[], errors.SpanwireError]) -> None:
    error: Any = make()
    kind = type(error)
    error.reply = spanwire.Reply(text="half")
    as_model_error(error)
    assert isinstance(error, exceptions.ModelError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert isinstance(again, kind)
    assert str(again) == str(error)
    assert {name: value for name, value in vars(again).items() if name != "reply"} == {
        name: value for name, value in vars(error).items() if name != "reply"
    }
    assert again.reply.text == "half"
    as_model_error(again)
    assert type(again) is type(error)
