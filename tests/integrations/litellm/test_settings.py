"""What LiteLLM hands over, as endpoint, call and limits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from litellm_spanwire.settings import SETTINGS, call_of, embeddings_of, endpoint_of, split, timeouts_of

from spanwire import TLS, Endpoint, Limits, Retries, Timeouts
from spanwire.errors import ConfigurationError
from tests.support import MESSAGES

URL = "http://127.0.0.1:8000/v1"


def test_settings_and_parameters_part() -> None:
    settings, body = split(
        {
            "temperature": 0,
            "top_k": 3,
            "stream": True,
            "max_retries": 2,
            "transport": "sse",
            "dialect": "openai",
            "spanwire": {"uds": "/run/vllm.sock"},
            "extra_body": {"top_k": 4, "guided_json": {}},
        },
        {},
    )
    assert settings == {"uds": "/run/vllm.sock", "transport": "sse", "dialect": "openai"}
    assert body == {"temperature": 0, "top_k": 4, "guided_json": {}}


def test_what_stands_in_the_mapping_wins() -> None:
    assert split({"transport": "a", "spanwire": {"transport": "b"}}, {})[0] == {"transport": "b"}


@pytest.mark.parametrize("name", ["spanwire", "transport", "dialect"])
def test_clients_of_the_proxy_choose_no_socket(name: str) -> None:
    value: Any = {"uds": "/var/run/docker.sock"} if name == "spanwire" else "x"
    request = {"proxy_server_request": {"body": {"model": "m", name: value}}}
    with pytest.raises(ConfigurationError, match=f"{name}.*not by its clients"):
        split({name: value}, request)
    assert split({name: value}, {"proxy_server_request": {"body": {"model": "m"}}})[0]


@pytest.mark.parametrize(
    ("given", "says"), [({"spanwire": "x"}, "spanwire=... must be a mapping"), ({"extra_body": 1}, "extra_body")]
)
def test_what_is_no_mapping(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        split(given, {})


def test_every_setting() -> None:
    endpoint = endpoint_of(
        URL,
        "key",
        {
            "transport": "sse",
            "dialect": "openai",
            "headers": {"a": "b"},
            "query": {"api-version": "1"},
            "tls": {"verify": True, "ca": "/ca.pem", "cert": ["/cert.pem", "/key.pem"]},
            "proxy": "",
            "uds": "/run/vllm.sock",
            "timeouts": {"idle_s": 3},
            "limits": {"max_concurrent": 8},
            "retries": {"max_attempts": 2},
            "options": {"include_usage": False},
        },
    )
    assert endpoint == Endpoint(
        URL,
        "key",
        transport="sse",
        dialect="openai",
        headers={"a": "b"},
        query={"api-version": "1"},
        tls=TLS(ca="/ca.pem", cert=("/cert.pem", "/key.pem")),
        proxy=None,
        uds="/run/vllm.sock",
        timeouts=Timeouts(idle_s=3),
        limits=Limits(max_concurrent=8),
        retries=Retries(max_attempts=2),
        options={"include_usage": False},
    )
    assert set(SETTINGS) == set(Endpoint.__struct_fields__) - {"url"}


def test_attempts_are_litellms_to_repeat() -> None:
    assert endpoint_of(URL, None, {}).retries.max_attempts == 1


def test_one_endpoint_for_the_same_settings() -> None:
    settings = {"limits": {"max_concurrent": 2}, "tls": {"cert": ["a", "b"]}}
    assert endpoint_of(URL, "k", settings) is endpoint_of(URL, "k", dict(reversed(settings.items())))
    assert endpoint_of(URL, "k", settings) is not endpoint_of(URL, "other", settings)
    assert endpoint_of(URL, "k", settings) is not endpoint_of(URL, "k", {})


def test_settings_without_a_hash_are_taken_too() -> None:
    assert endpoint_of(URL, None, {"options": {"x": bytearray(b"y")}}).options == {"x": bytearray(b"y")}


@pytest.mark.parametrize(
    ("api_base", "settings", "says"),
    [
        (None, {}, "api_base"),
        ("", {}, "api_base"),
        ("127.0.0.1:8000", {}, "scheme"),
        (URL, {"timeout": 3, "verify": False}, "does not know timeout, verify; it knows api_key, headers, query"),
        (URL, {"tls": {"verfy": False}}, "'tls'.* does not know verfy; it knows verify, ca, cert"),
        (URL, {"limits": 8}, "'limits'.* must be a mapping, not int"),
        (URL, {"limits": {"max_concurrent": 0}}, "at least 1"),
        (URL, {"options": []}, "Endpoint.options must be a mapping"),
    ],
)
def test_what_is_refused_is_named(api_base: str | None, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        endpoint_of(api_base, None, settings)


def limits(timeout: Any, settings: dict[str, Any] | None = None, *, streamed: bool = True) -> Timeouts:
    settings = settings or {}
    return timeouts_of(timeout, settings, endpoint_of(URL, None, settings), streamed=streamed)


def test_timeout_of_a_stream() -> None:
    assert limits(600.0) == Timeouts(connect_s=10, first_content_s=600, idle_s=600, total_s=None)
    assert limits(2) == Timeouts(connect_s=2, first_content_s=2, idle_s=2, total_s=None)
    assert limits(None) == Timeouts(connect_s=10, first_content_s=None, idle_s=None, total_s=None)


def test_timeout_of_a_whole_answer() -> None:
    whole = limits(5, streamed=False)
    assert whole == Timeouts(connect_s=5, first_content_s=None, idle_s=None, total_s=5)


def test_timeout_of_httpx() -> None:
    assert limits(httpx.Timeout(30, connect=1)) == Timeouts(connect_s=1, first_content_s=30, idle_s=30)


def test_named_limits_win() -> None:
    named = {"timeouts": {"first_content_s": 60, "total_s": 90}}
    assert limits(600, named) == Timeouts(connect_s=10, first_content_s=60, idle_s=600, total_s=90)
    whole = Timeouts(idle_s=1)
    assert limits(600, {"timeouts": whole}) is whole


def test_a_call() -> None:
    call = call_of("m", MESSAGES, {"temperature": 0, "top_p": None}, {"x": 1, "y": None}, user="u")
    assert (call.operation, call.model, dict(call.headers)) == ("chat", "m", {"x": "1"})
    assert call.body == {"messages": MESSAGES, "temperature": 0, "user": "u"}


def test_extra_body_may_hold_any_name() -> None:
    call = call_of("m", MESSAGES, {"model": "other", "headers": {"a": 1}, "self": 2, "user": "mine"}, None, user="u")
    assert call.model == "other"
    assert call.body == {"messages": MESSAGES, "headers": {"a": 1}, "self": 2, "user": "mine"}


def test_two_answers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one answer"):
        call_of("m", MESSAGES, {"n": 2}, None)


@pytest.mark.parametrize(
    ("include", "given", "sent"),
    [
        (True, {"include_usage": False}, {"include_usage": False}),
        (True, {"continuous": 1}, {"include_usage": True, "continuous": 1}),
        (True, None, None),  # the transport asks
        (False, {"include_usage": True}, None),
        (None, {"x": 1}, {"x": 1}),
    ],
)
def test_usage_is_asked_for(include: bool | None, given: Any, sent: Any) -> None:
    call = call_of("m", MESSAGES, {"stream_options": given}, None, include_usage=include)
    assert call.body.get("stream_options") == sent


def test_an_embeddings_call() -> None:
    call = embeddings_of("e", ["a"], {"dimensions": 3}, None)
    assert (call.operation, call.model, call.body) == ("embeddings", "e", {"input": ["a"], "dimensions": 3})
    with pytest.raises(ConfigurationError, match="empty"):
        embeddings_of("e", [], {}, None)
