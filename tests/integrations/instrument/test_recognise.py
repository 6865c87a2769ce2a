from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_instrument.recognise import Recognised, Rules, recognise

from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.telemetry.attributes import Labels

MESSAGES = [{"role": "user", "content": "hi"}]


def ask(path: str, body: Any = None, *, method: str = "POST", kind: str = "application/json", host: str = "h",
        rules: Rules | None = None) -> Recognised | None:  # fmt: skip
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    return recognise(method, host, path, kind, data, rules or Rules())


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": MESSAGES}, ("chat", "m", False)),
        ("/v1/chat/completions", {"model": "m", "messages": MESSAGES, "stream": True}, ("chat", "m", True)),
        ("/v1/chat/completions", {"model": "m", "messages": MESSAGES, "stream": None}, ("chat", "m", False)),
        ("/openai/deployments/gpt-x/chat/completions", {"messages": MESSAGES}, ("chat", "gpt-x", False)),
        ("/v1/completions", {"model": "m", "prompt": "x"}, ("text_completion", "m", False)),
        ("/v1/responses", {"model": "m", "input": "x", "stream": True}, ("chat", "m", True)),
        ("/v1/embeddings", {"model": "m", "input": ["x"]}, ("embeddings", "m", False)),
        ("/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 1, "stream": True}, ("chat", "m", True)),
        ("/v1beta/models/g-2:generateContent", {"contents": []}, ("generate_content", "g-2", False)),
        ("/v1beta/models/g-2:streamGenerateContent", {"contents": []}, ("generate_content", "g-2", True)),
        ("/v1beta/models/g-2:embedContent", {"content": {}}, ("embeddings", "g-2", False)),
        ("/api/chat", {"model": "m", "messages": MESSAGES}, ("chat", "m", True)),
        ("/api/chat", {"model": "m", "messages": MESSAGES, "stream": False}, ("chat", "m", False)),
        ("/api/generate", {"model": "m", "prompt": "x"}, ("text_completion", "m", True)),
        ("/api/embed", {"model": "m", "input": "x"}, ("embeddings", "m", False)),
    ],
)
def test_requests_of_known_apis(path: str, body: Any, expected: tuple[str, str, bool]) -> None:
    found = ask(path, body)
    assert found is not None
    assert found[:3] == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", {"model": "m", "messages": MESSAGES}),
        ("/v1/threads/t_1/messages", {"role": "user", "content": "x", "messages": MESSAGES}),
        ("/v1/chat/completions", {"model": "m"}),
        ("/v1/chat/completions", {"messages": None}),
        ("/v1/chat/completions", [1]),
        ("/v1/chat/completions", b"\x1f\x8b\x08"),
        ("/v1/chat/completions", b""),
        ("/v1/chat/completions/x", {"messages": MESSAGES}),
        ("/mychat/completionsx", {"messages": MESSAGES}),
        ("/v1/files", {"input": "x"}),
        ("", {"messages": MESSAGES}),
    ],
)
def test_everything_else_is_nobodys_business(path: str, body: Any) -> None:
    assert ask(path, body) is None


def test_only_a_post_of_json() -> None:
    body = {"model": "m", "messages": MESSAGES}
    assert ask("/v1/chat/completions", body, method="GET") is None
    assert ask("/v1/chat/completions", body, kind="multipart/form-data") is None
    assert ask("/v1/chat/completions", body, kind="") is None
    assert ask("/v1/chat/completions", body, kind="application/json; charset=utf-8") is not None


def test_a_body_that_is_not_there_is_told_by_its_path() -> None:
    found = ask("/v1/models/g:streamGenerateContent")
    assert found is not None
    assert found[:3] == ("generate_content", "g", True)
    found = ask("/v1/chat/completions")
    assert found is not None
    assert found[:3] == ("chat", "", False)


def test_parameters_have_one_set_of_names() -> None:
    found = ask("/v1/x:generateContent", {"contents": [], "generationConfig": {"topP": 0.5, "maxOutputTokens": 3}})
    assert found is not None
    assert found.params == {"top_p": 0.5, "max_tokens": 3}
    found = ask("/v1/responses", {"input": "x", "max_output_tokens": 7, "temperature": 1})
    assert found is not None
    assert found.params == {"temperature": 1, "max_tokens": 7}
    found = ask("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 4, "seed": 1}})
    assert found is not None
    assert found.params == {"max_tokens": 4, "seed": 1}


def test_hosts_can_be_chosen() -> None:
    body = {"messages": MESSAGES}
    rules = Rules(hosts=["*.Example.com", "other"], never=("secret.example.com",))  # type: ignore[arg-type]
    hosts = ("api.example.com", "API.example.com", "other", "example.com", "secret.example.com", "x.other")
    taken = [host for host in hosts if ask("/v1/chat/completions", body, host=host, rules=rules)]
    assert taken == ["api.example.com", "API.example.com", "other"]


def test_paths_can_be_added() -> None:
    rules = Rules(paths={"/v2/generate": "text_completion"})
    found = ask("/llm/v2/generate", {"model": "m", "stream": True}, rules=rules)
    assert found == Recognised("text_completion", "m", True, {})
    assert ask("/v1/chat/completions", {"messages": MESSAGES}, rules=rules) is not None


@pytest.mark.parametrize(
    "wrong",
    [{"hosts": "example.com"}, {"never": (1,)}, {"paths": ["/x"]}, {"paths": {"x": "chat"}}, {"paths": {"/x": ""}}],
)
def test_rules_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"Rules\\({next(iter(wrong))}"):
        Rules(**wrong)


@given(path=st.text(max_size=40), body=st.none() | st.binary(max_size=60))
def test_nothing_raises(path: str, body: bytes | None) -> None:
    for end in ("", "/chat/completions", ":generateContent"):
        recognise("POST", "h", path + end, "application/json", body)


@pytest.mark.parametrize(
    ("path", "body", "provider"),
    [
        ("/v1/messages", {"messages": MESSAGES}, "anthropic"),
        ("/v1beta/models/g-2:generateContent", {"contents": []}, "gcp.gemini"),
        ("/v1/chat/completions", {"messages": MESSAGES}, ""),
    ],
)
def test_whose_schema_it_is(path: str, body: Any, provider: str) -> None:
    found = ask(path, body)
    assert found is not None
    assert found.provider == provider


def test_a_schema_names_the_provider_where_the_host_says_nothing() -> None:
    unknown = Labels(Endpoint("http://gateway.internal"), "chat", "m", streamed=False, provider="anthropic")
    assert unknown.genai["gen_ai.provider.name"] == "anthropic"
    known = Labels(Endpoint("https://api.mistral.ai"), "chat", "m", streamed=False, provider="anthropic")
    assert known.genai["gen_ai.provider.name"] == "mistral_ai"
    assert Labels(Endpoint("http://h"), "chat", "m", streamed=False).genai["gen_ai.provider.name"] == "openai"
