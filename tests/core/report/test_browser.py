"""The page in a real browser: it draws, its filters work, it complains of nothing, and it asks for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spanwire.report import build
from tests.core.report import traffic
from tests.core.report.browser import BROWSER, Browser

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH (Debian: apt-get install chromium)")

#: What a name could be that wants to be more than a name.
EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 2'>\"'&lt;\u2028${x}"


def page(folder: Path, timelines: list[dict[str, Any]]) -> Path:
    log = folder / "calls.jsonl"
    log.write_text("".join(json.dumps(timeline) + "\n" for timeline in timelines))
    path = folder / "report.html"
    path.write_text(build([str(log)]).to_html(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def as_it_was(browser: Browser) -> None:
    browser.complaints.clear()
    browser.requests.clear()
    browser.size(1280, 900)
    browser.dark(False)


def charts(browser: Browser) -> int:
    """How many charts have more than one colour on them."""
    found: int = browser.run("""
        [...document.querySelectorAll("#time canvas")].filter((canvas) => {
            const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
            return new Set(pixels).size > 10;
        }).length
    """)
    return found


def text(browser: Browser, selector: str) -> str:
    found: str = browser.run(f"document.querySelector({json.dumps(selector)}).innerText")
    return found


def test_everything_is_drawn_and_nothing_is_asked_for(browser: Browser, tmp_path: Path) -> None:
    path = page(tmp_path, list(traffic.timelines(1500)))
    browser.open(path)
    assert browser.run("document.documentElement.dataset.ready") == "true"
    assert browser.run("document.title").startswith("spanwire report: 1,500 calls to 3 models at 2 endpoints")
    assert charts(browser) == 3
    assert browser.run("document.querySelectorAll('.findings li').length") >= 3
    assert browser.run("document.querySelectorAll('#pairs tbody tr').length") == 4
    assert browser.run("document.querySelectorAll('.tile').length") == 6
    assert browser.run("document.querySelectorAll('details.call').length") == 20
    assert "p95" in text(browser, "#tiles")
    assert "measured" in text(browser, "#where")
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("file://", "data:"))] == []
    assert len([url for url in browser.requests if url.startswith("file://")]) == 1


def test_the_policy_holds_against_the_page_itself(browser: Browser, tmp_path: Path) -> None:
    """Were a script smuggled in after all, it could neither run nor call home."""
    browser.open(page(tmp_path, list(traffic.timelines(20))))
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x.png\">'); 1")
    browser.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.evil = 1'})); 1"
    )
    browser.wait_for_frame()
    assert browser.run("window.evil") is None
    assert browser.run("fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.name)") == "TypeError"
    assert len([complaint for complaint in browser.complaints if "Content Security Policy" in complaint]) >= 3


def test_filters(browser: Browser, tmp_path: Path) -> None:
    timelines = list(traffic.timelines(1500))
    browser.open(page(tmp_path, timelines))

    def choose(label: str, option: str) -> None:
        browser.run(f"""(() => {{
            const box = document.querySelector('select[aria-label="{label}"]');
            box.value = [...box.options].find((one) => one.text === {json.dumps(option)}).value;
            box.dispatchEvent(new Event("change"));
        }})()""")

    def expected(**wanted: str) -> str:
        some = sum(all(timeline[key] == value for key, value in wanted.items()) for timeline in timelines)
        return f"{some:,} of 1,500 calls"

    assert text(browser, "#filters output") == expected(outcome="completed")
    choose("Model", "llama-3.3-70b")
    assert text(browser, "#filters output") == expected(outcome="completed", model="llama-3.3-70b")
    assert browser.run("document.querySelectorAll('#pairs tbody tr').length") == 1
    assert charts(browser) == 3
    choose("Outcome", "all outcomes")
    assert text(browser, "#filters output") == expected(model="llama-3.3-70b")
    choose("Endpoint", "10.0.3.7:8000")  # which does not have it
    assert text(browser, "#filters output") == "0 of 1,500 calls"
    assert browser.run("document.getElementById('tiles').hidden")
    choose("Model", "all models")
    choose("Outcome", "error")
    assert text(browser, "#filters output") == expected(endpoint="10.0.3.7:8000", outcome="error")
    assert browser.complaints == []


def test_buttons_tables_and_waterfalls(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path, list(traffic.timelines(400))))
    for name in ("Share", "Sum", "Mean without model", "Slowest to the first token", "A sample over time", "Show more"):
        browser.run(f"[...document.querySelectorAll('button')].find((b) => b.textContent.startsWith('{name}')).click()")
        browser.wait_for_frame()
        assert charts(browser) == 3
    assert browser.run("document.querySelectorAll('details.call').length") > 20
    browser.run("document.querySelectorAll('#time details').forEach((one) => { one.open = true; })")
    browser.wait_for_frame()
    rows = browser.run(
        "[...document.querySelectorAll('#time details')].map((one) => one.querySelectorAll('tbody tr').length)"
    )
    assert len(rows) == 3
    assert min(rows) > 10
    assert "model decode" in text(browser, "details.call[open] .fall")
    widths = browser.run(
        "[...document.querySelectorAll('details.call[open] .fall .bar span')].map((bar) => parseFloat(bar.style.width))"
    )
    assert sum(widths) == pytest.approx(100, abs=0.01)
    assert browser.complaints == []


def test_the_theme_follows_the_system_and_the_button(browser: Browser, tmp_path: Path) -> None:
    def background() -> str:
        found: str = browser.run("getComputedStyle(document.body).backgroundColor")
        return found

    browser.open(page(tmp_path, list(traffic.timelines(50))))
    light = background()
    browser.dark(True)
    dark = background()
    assert dark != light
    browser.run("document.getElementById('theme').click()")
    assert background() == light
    assert charts(browser) == 3
    browser.run("document.getElementById('theme').click()")
    assert background() == dark
    browser.run("localStorage.clear()")
    assert browser.complaints == []


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_nothing_is_wider_than_the_window(browser: Browser, tmp_path: Path, width: int) -> None:
    timelines = list(traffic.timelines(300))
    timelines[0]["model"] = "a-very-long-name/" * 11
    browser.size(width, 900)
    browser.open(page(tmp_path, timelines))
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert charts(browser) == 3
    browser.size(390, 900)
    browser.wait_for_frame()
    browser.wait_for_frame()
    assert browser.run("document.documentElement.scrollWidth") <= 390


def test_everything_can_be_reached_by_the_keyboard_and_has_a_name(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path, list(traffic.timelines(300))))
    nameless = browser.run("""
        [...document.querySelectorAll("button, select, summary, [role=img], [role=region], [role=group], section")].filter(
            (one) => !(one.textContent.trim() || one.getAttribute("aria-label") || one.getAttribute("aria-labelledby"))
        ).map((one) => one.outerHTML.slice(0, 80))
    """)
    assert nameless == []
    seen = set()
    for _ in range(60):
        for kind in ("keyDown", "keyUp"):
            browser("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        seen.add(browser.run("document.activeElement.tagName"))
    assert {"A", "BUTTON", "SELECT", "SUMMARY", "DIV"} <= seen


def test_names_that_want_to_be_more(browser: Browser, tmp_path: Path) -> None:
    timelines = list(traffic.timelines(60))
    for timeline in timelines:
        timeline["model"] = timeline["endpoint"] = timeline["trace_id"] = timeline["transport"] = EVIL
        timeline["attempts"][-1] = {"outcome": "error", "error_type": EVIL}
        timeline["segments"][EVIL] = timeline["segments"].pop("unattributed")
        timeline["outcome"] = "error" if timeline["started_unix_s"] % 2 < 1 else EVIL
    log = tmp_path / f"{EVIL.replace('/', '')}.jsonl"
    log.write_text("".join(json.dumps(timeline) + "\n" for timeline in timelines) + f"{EVIL}\n", encoding="utf-8")
    path = tmp_path / "report.html"
    path.write_text(build([str(log)]).to_html(), encoding="utf-8")
    browser.open(path)
    assert browser.run("window.evil") is None
    assert browser.run("document.images.length") == 0
    assert browser.run("document.scripts.length") == 3
    assert "<img src=x" in text(browser, "#pairs")
    assert charts(browser) == 3
    assert browser.complaints == []


def test_calls_without_times_of_day(browser: Browser, tmp_path: Path) -> None:
    timelines = list(traffic.timelines(30))
    for timeline in timelines:
        del timeline["started_unix_s"], timeline["connection"]
    browser.open(page(tmp_path, timelines))
    assert "no time of day" in text(browser, "#time")
    assert "Nothing is known about the connections" in text(browser, "#cold")
    assert browser.complaints == []


def test_one_call(browser: Browser, tmp_path: Path) -> None:
    browser.open(page(tmp_path, list(traffic.timelines(1))))
    assert charts(browser) >= 1
    assert text(browser, "#filters output") == "1 of 1 calls"
    assert browser.complaints == []
