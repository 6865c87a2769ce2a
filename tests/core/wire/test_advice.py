"""What is added to a refusal that says no more than its status."""

from __future__ import annotations

import pytest

from spanwire import Endpoint
from spanwire.errors import server_error
from spanwire.wire.advice import advice, nothing_there
from spanwire.wire.openai_chat import error_in

URL = "http://127.0.0.1:8000/secret/v1"


def advised(body: bytes, status: int, url: str = URL, *, api_key: str | None = None, **headers: str) -> str:
    return advice(error_in(body, status=status), Endpoint(url), api_key=api_key, headers=headers)


@pytest.mark.parametrize(
    "body",
    [
        b'{"detail":"Not Found"}',  # FastAPI: vLLM, SGLang
        b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}',  # llama.cpp
        b"404 page not found",  # Go: Ollama
        b"404: Not Found",  # Tornado, aiohttp
        b"<html><head><title>404 Not Found</title></head></html>",  # nginx
        b"",
    ],
)
def test_a_path_at_which_nothing_is(body: bytes) -> None:
    assert advised(body, 404) == "; is the endpoint's URL the server's base URL?"
    short = advised(body, 404, "http://127.0.0.1:8000/secret")
    assert short == "; is the endpoint's URL the server's base URL, which ends in /v1 with most servers?"


def test_a_path_that_takes_no_calls() -> None:
    assert nothing_there(error_in(b'{"detail":"Method Not Allowed"}', status=405))


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","code":404}}',  # vLLM
        b'{"error":{"message":"model \'x\' not found","type":"api_error"}}',  # Ollama
        b'{"error":{"code":"DeploymentNotFound","message":"The API deployment for this resource does not exist."}}',  # Azure
        b'{"error":{"message":"Invalid URL (POST /v1/v1/chat/completions)"}}',  # OpenAI
    ],
)
def test_who_says_what_is_missing_is_left_alone(body: bytes) -> None:
    assert advised(body, 404) == ""


def test_the_same_words_by_another_status_are_the_servers_own_matter() -> None:
    assert not nothing_there(server_error("Not Found", status=500))


def test_a_key_that_was_not_given() -> None:
    said = b'{"error":{"message":"Incorrect API key provided."}}'
    assert advised(said, 401) == "; the endpoint has no api_key"
    assert advised(said, 401, api_key="k") == ""
    assert advised(said, 401, Authorization="Basic k") == ""
    error = error_in(said, status=401)
    assert advice(error, Endpoint(URL, headers={"X-API-Key": "k"}), api_key=None, headers={}) == ""
    assert advised(said, 403) == ""  # who is known may still not be allowed to
