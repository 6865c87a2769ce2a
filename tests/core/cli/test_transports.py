import json
from importlib.metadata import version

import pytest

from .conftest import Plugin, Spanwire


def test_what_is_installed_is_listed(spanwire: Spanwire) -> None:
    found = spanwire("transports")
    assert (found.exit_code, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["transport", "schemes", "dialects", "capabilities", "from", "contract", "status"]
    (row,) = [line for line in lines if line.startswith("sse ")]
    assert row.split()[1:3] == ["http,", "openai,"]
    assert f"spanwire-sse {version('spanwire-sse')}" in row
    assert row.split()[-2:] == ["1", "ok"]


def test_as_json(spanwire: Spanwire) -> None:
    data = json.loads(spanwire("transports", "--json").stdout)
    assert data["schema"] == 1
    (sse,) = [row for row in data["plugins"] if row["distribution"] == "spanwire-sse"]
    assert (sse["version"], sse["status"]) == (version("spanwire-sse"), "ok")
    (transport,) = sse["transports"]
    assert transport["name"] == "sse"
    assert sorted(transport["schemes"]) == ["http", "https"]
    assert transport["dialects"] == ["openai", "responses"]
    assert transport["contract"] == 1


def test_a_broken_plugin_is_shown_with_the_reason(
    spanwire: Spanwire, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.module("acme_broken", "raise RuntimeError('on purpose')")
    plugin.entries("spanwire.transports", acme="acme_broken")
    code, out, err = spanwire.run("transports")
    assert (code, err) == (0, "")
    (row,) = [line for line in out.splitlines() if line.startswith("acme ")]
    assert "acme-plugin 1.5" in row
    assert row.endswith("broken")
    assert "acme-plugin 1.5: plugin acme-plugin (acme_broken) cannot be imported: RuntimeError: on purpose" in out
    assert any(line.startswith("sse ") and line.endswith("ok") for line in out.splitlines())
    monkeypatch.setenv("SPANWIRE_DISABLE_PLUGINS", "acme-plugin")
    code, out, err = spanwire.run("transports")
    assert (code, err) == (0, "")
    assert any(line.startswith("acme ") and line.endswith("disabled") for line in out.splitlines())


@pytest.mark.parametrize("color", [True, False])
def test_no_colours_in_a_pipe(spanwire: Spanwire, monkeypatch: pytest.MonkeyPatch, color: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    if not color:
        monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in spanwire.run("transports")[1]
