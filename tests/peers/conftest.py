"""The peers: servers that other people wrote, one fixture each, for the whole session."""

from __future__ import annotations

import json
import secrets
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

import spanwire
from tests.peers.processes import answers, free_port, node_peer, python_peer, running

#: What aimock answers, by a word of the prompt.
HELLO = "Hello from the loopback peer."
SLOW = "Paced answer, token by token."
CUT = "This answer is cut in the middle."
TOOL = ("get_weather", '{"city":"Oslo"}')
SLOW_FIRST_TOKEN_S = 0.200
#: What llm-katan waits before its first token.
KATAN_FIRST_TOKEN_S = 0.050
KATAN_IN_FLIGHT = 2

_FIXTURES = [
    {"match": {"userMessage": "hello"}, "response": {"content": HELLO}},
    {"match": {"userMessage": "weather"}, "response": {"toolCalls": [{"name": TOOL[0], "arguments": TOOL[1]}]}},
    {
        "match": {"userMessage": "slow"},
        "response": {"content": SLOW},
        "chunkSize": 4,
        "streamingProfile": {"ttft": SLOW_FIRST_TOKEN_S * 1e3, "tps": 50, "jitter": 0},
    },
    {"match": {"userMessage": "cut"}, "response": {"content": CUT}, "chunkSize": 4, "truncateAfterChunks": 6},
]

# With only a master key and no database, LiteLLM answers a wrong key with 400 "No connected db."; this is the hook
# that it offers to those who check keys without one.
_LITELLM_AUTH = """
import os

from litellm.proxy._types import ProxyException, UserAPIKeyAuth


async def check(request, api_key):
    if api_key != os.environ["LITELLM_MASTER_KEY"]:
        raise ProxyException(message="Invalid API key", type="auth_error", param="key", code=401)
    return UserAPIKeyAuth(api_key=api_key)
"""


class Peer(NamedTuple):
    """A server that runs. `ca`: what verifies its certificate, None without TLS."""

    name: str
    port: int
    model: str
    api_key: str | None = None
    ca: Path | None = None

    def endpoint(self, **more: object) -> spanwire.Endpoint:
        fields: dict[str, object] = {"url": self.url(), "api_key": self.api_key, "proxy": None}
        if self.ca is not None:
            fields["tls"] = spanwire.TLS(ca=str(self.ca))
        return spanwire.Endpoint(**{**fields, **more})  # type: ignore[arg-type]

    def url(self, port: int | None = None) -> str:
        return f"{'http' if self.ca is None else 'https'}://127.0.0.1:{port or self.port}/v1"

    def call(self, prompt: str) -> spanwire.Call:
        return spanwire.Call.chat(self.model, [{"role": "user", "content": prompt}])


@pytest.fixture(scope="session")
def aimock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A mock of OpenAI's API in Node.js: plain HTTP."""
    command = node_peer("aimock", "@copilotkit/aimock@1.43.0", "@copilotkit/aimock/dist/cli.js", node=(20, 15))
    folder = tmp_path_factory.mktemp("aimock")
    (folder / "fixtures.json").write_text(json.dumps({"fixtures": _FIXTURES}))
    port = free_port()
    with running(
        "aimock",
        [*command, "-h", "127.0.0.1", "-p", str(port), "-f", str(folder), "--latency", "5"],
        ready=lambda: answers(port, "/health"),
        limit_s=30,
        cwd=folder,
    ):
        yield Peer("aimock", port, "gpt-4o")


@pytest.fixture(scope="session")
def litellm(aimock: Peer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """LiteLLM's proxy (uvicorn) in front of aimock: plain HTTP, with a key."""
    python = python_peer("litellm", "litellm[proxy]==1.108.7")
    folder = tmp_path_factory.mktemp("litellm")
    (folder / "spanwire_auth.py").write_text(_LITELLM_AUTH)
    behind = {"model": "openai/gpt-4o", "api_key": "none", "api_base": aimock.url()}
    bridged = {**behind, "model": "hosted_vllm/gpt-4o"}  # over WebSocket: to a server that has none itself
    config = {
        "model_list": [
            {"model_name": "aimock", "litellm_params": behind},
            {"model_name": "bridged", "litellm_params": bridged},
        ],
        "general_settings": {"custom_auth": "spanwire_auth.check"},
        "router_settings": {"disable_cooldowns": True},  # else it refuses everything for 5 s after a failure
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    port, key = free_port(), f"sk-{secrets.token_hex(16)}"
    with running(
        "litellm",
        [
            *(str(python), str(python.with_name("litellm"))),
            *f"--config config.yaml --host 127.0.0.1 --port {port}".split(),
        ],
        ready=lambda: answers(port, "/health/liveliness"),
        limit_s=180,  # it imports for half a minute on a busy machine
        cwd=folder,
        LITELLM_LOCAL_MODEL_COST_MAP="True",  # else it asks the network
        LITELLM_MASTER_KEY=key,
    ):
        yield Peer("litellm", port, "aimock", api_key=key)


@pytest.fixture(scope="session")
def katan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """llm-katan (uvicorn), which echoes the prompt: TLS, with a key that it only wants to see."""
    python = python_peer("katan", "llm-katan==0.22.0")
    folder = tmp_path_factory.mktemp("katan")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    for number, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(str(folder / "cert.pem"), append=number > 0)
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    port = free_port()
    with running(
        "katan",
        [
            *(str(python), str(python.with_name("llm-katan"))),
            *f"--model echo --backend echo --name echo-model --host 127.0.0.1 --port {port}".split(),
            *f"--ttft-ms {KATAN_FIRST_TOKEN_S * 1e3:.0f} --max-inflight {KATAN_IN_FLIGHT}".split(),
            *("--tls-cert", "cert.pem", "--tls-key", "key.pem", "--stats-file", "stats.json"),
        ],
        ready=lambda: answers(port, "/health", tls=trust),
        limit_s=60,
        cwd=folder,
    ):
        yield Peer("katan", port, "echo-model", api_key="any", ca=folder / "ca.pem")


@pytest.fixture(params=["aimock", "litellm", "katan"])
def peer(request: pytest.FixtureRequest) -> Peer:
    """Each peer in turn."""
    found: Peer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["aimock", "litellm"])
def scripted(request: pytest.FixtureRequest) -> Peer:
    """Each peer that gives aimock's answers."""
    found: Peer = request.getfixturevalue(request.param)
    return found
