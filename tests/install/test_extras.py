"""Each extra alone, all together, and beside what people have already: from wheels, by pip and by uv."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ROOT, VERSIONS, Environment, Installer, interpreter, uv

pytestmark = [pytest.mark.install, pytest.mark.timeout(600)]

EXTRAS = list(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
#: Wires that come along.
WIRES = {
    "websocket": ["websocket"],
    "grpc": ["grpc"],
    "webhook": ["webhook"],
    "postgresql": ["webhook"],
    "redis": ["webhook"],
    "all": ["grpc", "webhook", "websocket"],
}
ANSWER = "You said: Say hello"
#: What is asked of an extra besides calls over its wires.
CHECKS = {
    "cli": {"cli": "sse"},
    "otel": {"otel": "chat m"},
    "testing": {"testing": ANSWER},
    "http2": {"http2": "h2"},
    "socks": {"socks": "refused by the proxy"},
    "uvloop": {"uvloop": ANSWER},
    "langchain": {"langchain": ANSWER},
    "litellm": {"litellm": ANSWER},
    "instrument": {"instrument": "instrumented"},
    "all": {
        "cli": "grpc sse webhook websocket",
        "otel": "chat m",
        "http2": "h2",
        "socks": "refused by the proxy",
        "langchain": ANSWER,
        "litellm": ANSWER,
        "instrument": "instrumented",
    },
}
each_installer = pytest.mark.parametrize("installer", ["pip", "uv"])


def expected(extra: str) -> dict[str, str]:
    return {**{f"over {wire}": ANSWER for wire in ("sse", *WIRES.get(extra, []))}, **CHECKS.get(extra, {})}


def sound(made: Environment) -> None:
    """What is installed fits together, by the installer's own judgement."""
    uv("pip", "check", "--python", made.python)


@each_installer
@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_an_extra_alone(
    extra: str, installer: Installer, environment: Callable[..., Environment], ours: tuple[str | Path, ...]
) -> None:
    made = environment(installer)
    made.install(f"spanwire[{extra}]" if extra else "spanwire", *ours)
    sound(made)
    assert made.calls(*CHECKS.get(extra, {})) == expected(extra)


@each_installer
def test_beside_openai_langchain_and_litellm(
    installer: Installer, environment: Callable[..., Environment], ours: tuple[str | Path, ...]
) -> None:
    """`openai[realtime]` and LiteLLM pin `websockets`, LiteLLM `openai` and others exactly: ours must fit in."""
    made = environment(installer)
    made.install("openai[realtime]", "langchain", "litellm")
    before = made.code("from importlib.metadata import version as v; print(v('openai'), v('litellm'), v('websockets'))")
    made.install("spanwire[all]", *ours)
    sound(made)
    after = made.code("from importlib.metadata import version as v; print(v('openai'), v('litellm'), v('websockets'))")
    assert after.stdout == before.stdout
    found = made.calls("langchain", "litellm", "openai")
    assert found == {**{f"over {wire}": ANSWER for wire in ("grpc", "sse", "webhook", "websocket")},
                     "langchain": ANSWER, "litellm": ANSWER, "openai": ANSWER}  # fmt: skip


def test_an_extra_that_is_missing_is_named(
    environment: Callable[..., Environment], ours: tuple[str | Path, ...]
) -> None:
    made = environment("uv")
    made.install("spanwire", *ours)
    for url, line in (
        ("ws://127.0.0.1:9/v1", "pip install 'spanwire[websocket]'"),
        ("grpc://127.0.0.1:9", "pip install 'spanwire[grpc]'"),
    ):
        code = (
            "import sys, spanwire\n"
            "try: spanwire.SyncConnectionManager().complete(spanwire.Endpoint(sys.argv[1]), spanwire.Call.chat('m', []))\n"
            "except spanwire.errors.ConfigurationError as error: print(error)"
        )
        assert line in made.code(code, url).stdout
    done = made.code("from spanwire.cli import main; main()", fails=True)
    assert (done.returncode, "pip install 'spanwire[cli]'" in done.stderr) == (2, True)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_of_it_on_each_python(
    version: str, environment: Callable[..., Environment], ours: tuple[str | Path, ...]
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here; SPANWIRE_PYTHON_{version.replace('.', '_')} names one")
    made = environment("pip", python)
    made.install("spanwire[all]", *ours)
    sound(made)
    assert made.calls(*CHECKS["all"]) == expected("all")
