"""From one release to the next, when only one distribution is named: it works, or says which command makes it work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Environment, Installer, release

pytestmark = [pytest.mark.install, pytest.mark.timeout(600)]

ANSWER = "You said: Say hello"
WIRES = "websocket,grpc,webhook"
MEMBERS = ["spanwire", "spanwire-grpc", "spanwire-sse", "spanwire-webhook", "spanwire-websocket"]
each_installer = pytest.mark.parametrize("installer", ["pip", "uv"])
#: One call over a URL: the answer's text, or what it raised.
_CALL = """
import sys, spanwire
from spanwire.testing import LoopbackServer
with LoopbackServer(part=sys.argv[1]) as server, spanwire.SyncConnectionManager() as manager:
    try:
        print(manager.complete(server.endpoint(proxy=None), spanwire.Call.chat("m", [{"role": "user", "content": "Say hello"}])).text)
    except spanwire.errors.SpanwireError as error:
        print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release(tmp_path_factory.mktemp("older"), "0.1.0")


@pytest.fixture(scope="module")
def patch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release(tmp_path_factory.mktemp("patch"), "0.1.1")


@pytest.fixture(scope="module")
def minor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release(tmp_path_factory.mktemp("minor"), "0.2.0")


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release(tmp_path_factory.mktemp("contract"), "0.2.0", contract=2)


def have(made: Environment, older: Path) -> None:
    made.install("--find-links", older, *(f"{name}==0.1.0" for name in MEMBERS), f"spanwire[cli,{WIRES}]==0.1.0")
    assert set(made.versions().values()) == {"0.1.0"}


@each_installer
@pytest.mark.parametrize("member", ["spanwire", "spanwire-grpc", "spanwire-sse"])
def test_a_patch_of_one_member(
    member: str, installer: Installer, environment: Callable[..., Environment], older: Path, patch: Path
) -> None:
    made = environment(installer)
    have(made, older)
    made.install("--no-index", "--find-links", older, "--find-links", patch, "-U", member)
    assert made.versions()[member] == "0.1.1"
    found = made.calls("cli")
    assert found.pop("cli") == "grpc sse webhook websocket"
    assert set(found.values()) == {ANSWER}


@each_installer
def test_a_minor_release_of_one_member_takes_core_along(
    installer: Installer, environment: Callable[..., Environment], older: Path, minor: Path
) -> None:
    """It requires core's own minor version, so that the older members are left beside a newer core. Their contract is the
    same: they go on working."""
    made = environment(installer)
    have(made, older)
    said = made.install("--no-index", "--find-links", older, "--find-links", minor, "-U", "spanwire-grpc")
    versions = made.versions()
    assert {versions[name] for name in ("spanwire", "spanwire-grpc", "spanwire-sse")} == {"0.2.0"}
    assert versions["spanwire-websocket"] == "0.1.0"
    if installer == "pip":  # uv leaves that to `uv pip check`
        assert "spanwire-websocket 0.1.0 requires spanwire<0.2,>=0.1" in said
    found = made.calls("cli")
    assert found.pop("cli") == "grpc sse webhook websocket"
    assert set(found.values()) == {ANSWER}


@each_installer
def test_another_contract_names_the_command_and_the_command_helps(
    installer: Installer, environment: Callable[..., Environment], older: Path, contract: Path
) -> None:
    made = environment(installer)
    have(made, older)
    places = ("--no-index", "--find-links", older, "--find-links", contract)
    made.install(*places, "-U", "spanwire")
    assert made.code(_CALL, "sse").stdout.strip() == ANSWER
    said = made.code(_CALL, "grpc").stdout
    assert said.startswith("PluginError ")
    assert "contract 1 of spanwire's transports, this is contract 2; run `pip install -U spanwire-grpc`" in said
    made.install(*places, "-U", "spanwire-grpc")
    assert made.code(_CALL, "grpc").stdout.strip() == ANSWER


def test_a_newer_plugin_names_the_upgrade_of_core(
    environment: Callable[..., Environment], older: Path, contract: Path
) -> None:
    made = environment("pip")
    have(made, older)
    (wheel,) = contract.glob("spanwire_grpc-*.whl")
    made.install("--no-deps", wheel)  # what a hand-made lock file may come to
    said = made.code(_CALL, "grpc").stdout
    assert "contract 2 of spanwire's transports, this is contract 1; run `pip install -U spanwire`" in said
    assert made.code(_CALL, "sse").stdout.strip() == ANSWER
