"""spanwire-instrument under the clients that people use, on loopback with TLS: each as it is, with ours handed in, and
with ``instrument()``. The answers are the same; every call has one timeline; streams give their connection back.

``python -m pytest -m peers tests/peers/test_instrument_matrix.py -s`` prints the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from spanwire.testing import LoopbackServer, Script
from tests.peers.matrix.common import CALLS, ORIGIN, WAYS
from tests.peers.matrix.messages_server import messages_server
from tests.peers.processes import ROOT, python_peer

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900, func_only=True)]

SYNC = ("sync-whole", "sync-stream")
ASYNC = ("async-whole", "async-stream")
TEXT = "Hello from the loopback server."
_RUN_LIMIT_S = 300.0


class Server(NamedTuple):
    """`connections(kind)`: of the connections on which each request of that kind came, in order."""

    origin: str
    ca: str
    connections: Callable[[str], list[int]]


@contextmanager
def chat_server() -> Iterator[Server]:
    with LoopbackServer([Script.say(TEXT)], tls=True) as server:

        def connections(kind: str) -> list[int]:
            return [request.connection for request in server.requests if request.path.startswith(f"/{kind}/")]

        yield Server(server.origin, str(server.ca), connections)
    assert server.faults == []


@contextmanager
def anthropic_server() -> Iterator[Server]:
    with messages_server() as server:

        def connections(kind: str) -> list[int]:
            return [request.connection for request in server.requests if request.path.startswith(f"/{kind}/")]

        yield Server(server.origin, server.ca, connections)


class Client(NamedTuple):
    """Some rows of the table.

    Attributes:
        module: the runner, in tests/peers/matrix.
        package: whose version is told; the one of the development environment without `pinned`.
        pinned: requirements of an environment of its own.
        usage: the client asks for it.
    """

    name: str
    module: str
    package: str
    pinned: tuple[str, ...] = ()
    kinds: tuple[str, ...] = SYNC + ASYNC
    server: Callable[[], AbstractContextManager[Server]] = chat_server
    environment: Mapping[str, str] = {}
    usage: bool = True

    def python(self) -> str:
        if not self.pinned:
            return sys.executable
        ours = (f"{ROOT}[testing]", ROOT / "plugins/spanwire-sse", ROOT / "integrations/spanwire-instrument")
        return str(python_peer(f"matrix-{self.package}", *self.pinned, *(f"--editable={folder}" for folder in ours)))

    def version(self) -> str:
        return self.pinned[0].partition("==")[2] if self.pinned else version(self.package)


CLIENTS = [
    Client("openai 3", "openai_sdk", "openai"),
    Client("openai 2", "openai_sdk", "openai2", ("openai==2.54.0",)),
    Client("anthropic", "anthropic_sdk", "anthropic", ("anthropic==2.14.0",), server=anthropic_server),
    Client("ChatOpenAI", "chat_openai", "langchain-openai"),
    Client("litellm openai/", "litellm_sdk", "litellm", environment={"MATRIX_PROVIDER": "openai"}),
    Client("litellm hosted_vllm/", "litellm_sdk", "litellm", environment={"MATRIX_PROVIDER": "hosted_vllm"}),
    Client(
        "litellm hosted_vllm/, no usage",
        "litellm_sdk",
        "litellm",
        kinds=("sync-stream", "async-stream"),
        environment={"MATRIX_PROVIDER": "hosted_vllm", "MATRIX_NO_USAGE": "1"},
        usage=False,
    ),
    Client("pydantic-ai", "pydantic_ai_agent", "pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",), ASYNC),
    Client("openai-agents", "openai_agents", "openai-agents", ("openai-agents==0.24.0",), ASYNC),
    Client("LlamaIndex", "llama_index", "llama-index", ("llama-index-llms-openai==0.8.3",)),
]


class Run(NamedTuple):
    """One client, in one way."""

    answers: dict[str, list[dict[str, Any]]]
    connections: dict[str, list[int]]
    calls: list[dict[str, Any]]

    def opened(self, kind: str) -> int:
        return len(set(self.connections[kind]))


def run(client: Client, way: str, folder: Path) -> Run:
    log = folder / f"{way}.jsonl"
    inherited = {key: value for key, value in os.environ.items() if not key.upper().endswith("_PROXY")}
    with client.server() as server:
        done = subprocess.run(
            [client.python(), "-m", f"tests.peers.matrix.{client.module}", way, *client.kinds],
            capture_output=True,
            text=True,
            timeout=_RUN_LIMIT_S,
            cwd=ROOT,
            check=False,
            env={
                **inherited,
                **client.environment,
                ORIGIN: server.origin,
                "SSL_CERT_FILE": server.ca,
                "SPANWIRE_CALL_LOG": str(log),
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network
            },
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed = json.loads(done.stdout.splitlines()[-1])
        assert printed["logged"] == []  # what goes wrong in the tracing is never raised
        connections = {kind: server.connections(kind) for kind in client.kinds}
    calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return Run(printed["answers"], connections, calls)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    print("\n\n| client | calls | answers | timelines | connections for six: bare | explicit | zero code |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_same_answers_with_one_timeline_each_and_fewer_connections(
    client: Client, table: list[str], tmp_path: Path
) -> None:
    runs = {way: run(client, way, tmp_path) for way in WAYS}
    bare = runs["bare"]
    faults: list[str] = []
    for position, kind in enumerate(client.kinds):
        same, single = [], []
        for way in WAYS[1:]:
            found = runs[way]
            same.append(found.answers[kind] == bare.answers[kind])
            ended = sorted(found.calls, key=lambda call: call["started_unix_s"])
            own = ended[position * CALLS : (position + 1) * CALLS]
            single.append(
                len(found.calls) == CALLS * len(client.kinds)
                and all(_is_whole(call, kind, usage=client.usage) for call in own)
            )
            if not same[-1]:
                faults.append(f"{kind}, {way}: {found.answers[kind][0]} instead of {bare.answers[kind][0]}")
            if not single[-1]:
                faults.append(f"{kind}, {way}: {len(found.calls)} timelines in all, {json.dumps(own[:1])[:1500]}")
            if found.opened(kind) != 1:
                faults.append(f"{kind}, {way}: {found.opened(kind)} connections")
        for answer in bare.answers[kind]:
            assert answer["text"] == TEXT
            assert answer["finish_reason"] in {"stop", "end_turn", "completed"}
            assert bool(answer["usage"]) is client.usage
        assert all(len(one.connections[kind]) == CALLS for one in runs.values())
        opened = " | ".join(str(runs[way].opened(kind)) for way in WAYS)
        marks = ["the same" if all(same) else "**differ**", "1 each" if all(single) else "**wrong**"]
        table.append(
            f"| {client.name} ({client.version()}) | {kind.replace('-', ', ')} | {' | '.join(marks)} | {opened} |"
        )
    assert bare.calls == []
    assert faults == []


def _is_whole(call: dict[str, Any], kind: str, *, usage: bool) -> bool:
    """It ended well, is one of this kind, its segments add up, and the answer was read along."""
    total = sum(segment["duration_s"] for segment in call["segments"].values())
    streamed = kind.endswith("-stream")
    return (
        call["outcome"] == "completed"
        and abs(total - call["total_s"]) < 1e-5
        and call["streamed"] is streamed
        and ("first_content_s" in call or not streamed)
        and call.get("usage", {}).get("output_tokens") == (len(TEXT.split()) if usage else None)
    )
