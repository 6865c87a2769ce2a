"""Recipes that are servers: FastAPI, Flask, gunicorn, Celery, the LiteLLM proxy."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spanwire.testing import LoopbackServer
from tests.peers.processes import free_port, running

from .conftest import Kitchen, long_answer

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(180, func_only=True)]

ASK = "/ask?question=Say+hello"


def listening(port: int) -> Callable[[], bool]:
    def ready() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return ready


@contextmanager
def serving(kitchen: Kitchen, name: str, command: list[str], port: int, **env: str) -> Iterator[None]:
    with running(f"recipe-{name}", command, ready=listening(port), limit_s=120, cwd=kitchen.folder, **env):
        yield


def get(port: int, path: str = ASK) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
        return text
    finally:
        connection.close()


def leave_in_the_middle(port: int, request: bytes) -> None:
    """Read the first piece of the answer's body, and close."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as wire:
        wire.sendall(request)
        seen = b""
        while b"word" not in seen:
            data = wire.recv(4096)
            assert data, seen
            seen += data


def left(server: LoopbackServer) -> bool:
    return any(request.left for request in server.requests)


def plain(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def test_fastapi(kitchen: Kitchen) -> None:
    kitchen.file("fastapi_app.py")
    port = free_port()
    command = kitchen.command("uvicorn", "fastapi_app:app", "--port", str(port))
    with serving(kitchen, "fastapi", command, port):
        assert kitchen.server.connections == 1  # warm
        assert [get(port), get(port)] == ["You said: Say hello"] * 2
        assert kitchen.server.connections == 1
        kitchen.server.script(long_answer())
        leave_in_the_middle(port, plain(ASK))
        kitchen.server.wait_for(left, timeout_s=30)


def test_flask(kitchen: Kitchen) -> None:
    kitchen.file("flask_app.py")
    port = free_port()
    command = kitchen.command("flask", "--app", "flask_app", "run", "--port", str(port))
    with serving(kitchen, "flask", command, port):
        assert [get(port), get(port)] == ["You said: Say hello"] * 2
        assert kitchen.server.connections == 1
        kitchen.server.script(long_answer())
        leave_in_the_middle(port, plain(ASK))
        kitchen.server.wait_for(left, timeout_s=30)


def test_gunicorn_preload_after_a_call_in_the_parent(kitchen: Kitchen) -> None:
    """Each of two processes has a connection of its own, and nobody writes into the parent's."""
    text = kitchen.file("flask_app.py")
    more = '\n\nimport os\n\n\n@app.get("/pid")\ndef pid() -> str:\n    return str(os.getpid())\n\n\n'
    ask_first = 'print(manager.complete(endpoint, spanwire.Call.chat("my-model", [{"role": "user", "content": "first"}])).text)\n'
    (kitchen.folder / "flask_app.py").write_text(text + more + ask_first, "utf-8")
    port = free_port()
    command = kitchen.command(
        "gunicorn", "--preload", "--workers", "2", "--threads", "8", "--bind", f"127.0.0.1:{port}", "flask_app:app"
    )
    with serving(kitchen, "gunicorn", command, port):
        pids: set[str] = set()
        for _ in range(200):
            pids.add(get(port, "/pid"))
            assert get(port) == "You said: Say hello"
            if len(pids) == 2 and len({r.connection for r in kitchen.server.requests}) >= 3:
                break
        assert len(pids) == 2
        by_connection = {request.connection for request in kitchen.server.requests}
        assert 1 in by_connection
        assert [r.connection for r in kitchen.server.requests].count(1) == 1  # the parent's own call, and no child's


def test_celery_prefork(kitchen: Kitchen) -> None:
    kitchen.file("tasks.py")
    for name in ("queue", "results", "control"):
        (kitchen.folder / name).mkdir()
    # A broker of files: what is shown is spanwire in a pool of forked processes.
    (kitchen.folder / "settings.py").write_text(
        'broker_transport_options = {"data_folder_in": "queue", "data_folder_out": "queue", "control_folder": "control"}\n'
        f'result_backend = "file://{kitchen.folder / "results"}"\n',
        "utf-8",
    )
    env = {"CELERY_BROKER_URL": "filesystem://", "CELERY_CONFIG_MODULE": "settings", "PYTHONPATH": str(kitchen.folder)}
    command = kitchen.command(
        "celery",
        "-A",
        "tasks",
        "worker",
        "--pool",
        "prefork",
        "--concurrency",
        "2",
        "--without-gossip",
        "--without-mingle",
    )
    as_root = {"C_FORCE_ROOT": "1"} if hasattr(os, "geteuid") and os.geteuid() == 0 else {}
    with running("recipe-celery", command, ready=lambda: True, limit_s=60, cwd=kitchen.folder, **env, **as_root):
        code = (
            "import tasks\n"
            "jobs = [tasks.ask.delay(f'Say {n}') for n in range(12)]\n"
            "print('|'.join(job.get(timeout=90) for job in jobs))"
        )
        said = kitchen.run(str(kitchen.python), "-c", code, **env)
    assert said.strip().split("|") == [f"You said: Say {n}" for n in range(12)]
    assert 1 <= kitchen.server.connections <= 2  # one for each process
    assert len(kitchen.server.requests) == 12


def test_the_litellm_proxy(kitchen: Kitchen) -> None:
    kitchen.file("litellm.yaml")
    key = f"sk-{secrets.token_hex(32)}"
    port = free_port()
    command = kitchen.command("litellm", "--config", "litellm.yaml", "--port", str(port))
    body = json.dumps(
        {"model": "my-model", "messages": [{"role": "user", "content": "Say hello"}], "stream": True}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(kitchen, "litellm", command, port, LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_MASTER_KEY=key):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        )
        assert "data: [DONE]" in connection.getresponse().read().decode()
        connection.close()
        kitchen.server.script(long_answer())
        leave_in_the_middle(port, head.encode() + body)
        kitchen.server.wait_for(left, timeout_s=30)
    assert kitchen.server.connections == 1


def test_the_folder_is_what_the_page_has(tmp_path: Path) -> None:
    """So that no recipe is on the page without a test."""
    from .conftest import files

    here = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert [title for title in files() if f'"{title}"' not in here] == []
