"""The file: complete in itself, under a policy that its own parts keep, and free of what names could smuggle in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spanwire.report import build
from spanwire.report.calls import Call
from spanwire.report.findings import findings
from spanwire.report.page import GENERATOR, _asset, read_json, render
from spanwire.report.read import Found
from spanwire.report.summary import summarize
from spanwire.timeline import SEGMENTS
from tests.core.report import traffic
from tests.core.report.test_summary import some_calls

ASSETS = resources.files("spanwire.report") / "assets"
EVIL = "</script><!--<script>\"'&\u2028\u2029]]>"


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._tag = tag
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in self.inside:
            self.inside[self._tag][-1] += data


def page(folder: Path, timelines: list[dict[str, Any]], *more: str) -> str:
    log = folder / "calls.jsonl"
    log.write_text("".join(json.dumps(timeline) + "\n" for timeline in timelines) + "".join(more), encoding="utf-8")
    return build([str(log)]).to_html()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page(tmp_path_factory.mktemp("page"), list(traffic.timelines(800)))


def test_its_parts_keep_its_policy(text: str) -> None:
    parsed = Parsed(text)
    (policy,) = [attrs["content"] for tag, attrs in parsed.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = {rule.split()[0]: set(rule.split()[1:]) for rule in policy.split("; ")}
    data, *scripts = parsed.inside["script"]
    assert json.loads(data)

    def hashes(parts: list[str]) -> set[str]:
        return {f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts}

    assert rules == {
        "default-src": {"'none'"},
        "script-src": hashes(scripts),
        "style-src": hashes(parsed.inside["style"]),
        "img-src": {"data:"},
        "base-uri": {"'none'"},
        "form-action": {"'none'"},
    }
    assert not any("style" in attrs or any(name.startswith("on") for name in attrs) for _, attrs in parsed.tags)


def test_nothing_in_it_points_elsewhere(text: str) -> None:
    for tag, attrs in Parsed(text).tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, attrs)
    assert "@import" not in text
    assert "url(" not in text
    assert "sourceMappingURL" not in text


def test_it_is_small_and_knows_itself(text: str) -> None:
    assert len(text) < 1_500_000
    assert GENERATOR in text[:4096]


def test_the_data_say_what_was_read(text: str) -> None:
    data = read_json(text)
    every = data["selections"]["-1,-1,-1"]
    assert every["calls"] == 800
    assert data["segments"] == list(SEGMENTS)
    assert sum(every["over"]["calls"]) == 800
    for call in data["calls"]:
        assert sum(call["durations"]) / 1e6 == pytest.approx(call["total"], abs=1e-5)
        assert len(call["durations"]) == len(data["pieces"][call["pieces"]])
    parts = [f"{a} {b}" for a, b, _ in data["pieces"][data["calls"][0]["pieces"]]]
    assert parts.index("model prefill") < parts.index("model decode") < parts.index("client waiting")


def test_names_are_text_everywhere(tmp_path: Path) -> None:
    timelines = list(traffic.timelines(30))
    for timeline in timelines:
        timeline["model"] = timeline["endpoint"] = timeline["operation"] = timeline["trace_id"] = EVIL
        timeline["attempts"] = [{"outcome": "error", "error_type": EVIL}]
        timeline["outcome"] = "error"
        timeline["segments"][EVIL] = {"duration_s": 1e-3, "source": EVIL, "parts": {EVIL: {"duration_s": 1e-3}}}
    found = page(tmp_path, timelines, EVIL + "\n")
    parsed = Parsed(found)
    assert [tag for tag, _ in parsed.tags].count("script") == 3
    data = parsed.inside["script"][0]
    assert not set("<>&\u2028\u2029") & set(data)
    assert json.loads(data)["models"] == [EVIL]
    body = found.replace(data, "")
    assert EVIL not in body
    assert "<!--<script" not in body


def test_the_files_and_their_faults_are_named(tmp_path: Path) -> None:
    found = page(tmp_path, list(traffic.timelines(3)), "what?\n", '{"schema": 1, "dropped": 4}\n', '{"sch')
    assert "calls.jsonl: 3 calls" in found
    assert "4 calls more were made and are in no file" in found
    assert "1 line that could not be read: left out" in found
    assert "calls.jsonl:4: no JSON: &#x27;what?&#x27;" in found
    assert "1 last line still being written" in found


def test_unknown_is_left_blank(tmp_path: Path) -> None:
    line = {"schema": 1, "outcome": "completed", "total_s": 0.3}
    data = read_json(page(tmp_path, [line]))
    every = data["selections"]["-1,-1,-1"]
    assert list(every["times"]) == ["total"]
    assert (every["cold"], every["warm"], every["rows"]) == (0, 0, [])
    (call, sample) = data["calls"]
    assert call | {"kind": 2} == sample
    assert [call[name] for name in ("started", "first", "cold", "input", "output", "cached", "error")] == [None] * 7
    assert (data["begin"], data["buckets"]) == (None, 0)


@given(some_calls(), st.sampled_from([0.0, 1.7e9, 253_402_300_000.0]))
def test_any_calls_make_a_page(members: list[Call], later_s: float) -> None:
    moved = [
        replace(
            call,
            started_unix_s=None if call.started_unix_s is None else min(call.started_unix_s + later_s, 253_402_300_799),
        )
        for call in members
    ]
    summary = summarize(moved)
    text = render(summary, Found(calls=moved), findings(summary), made_unix_s=1.7e9, version="1")
    assert read_json(text)["selections"]["-1,-1,-1"]["calls"] == len(moved)


def test_the_vendored_library_is_what_its_pin_says() -> None:
    pin = json.loads(_asset("uplot.json"))
    for name, sha256 in pin["files"].items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == sha256, name
    assert f"(v{pin['version']})" in _asset("uPlot.iife.min.js")
    assert "MIT License" in _asset("uPlot.LICENSE")


def test_the_assets_can_stand_inside_their_elements() -> None:
    for name in ("uPlot.iife.min.js", "page.js"):
        assert not re.search(r"</script|<!--", _asset(name), re.IGNORECASE), name
    for name in ("uPlot.min.css", "page.css"):
        assert "</style" not in _asset(name).lower(), name
    for forbidden in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "XMLHttpRequest"):
        assert forbidden not in _asset("page.js")
