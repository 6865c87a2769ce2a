"""Results as a picture."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import chart, results
from benchmarks.figures import Measured
from tests.benchmarks.support import failed, measured, run

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*all_of_them: Measured, quick: bool = False) -> ET.Element:
    return ET.fromstring(chart.svg(run(all_of_them, quick=quick)))


def texts(picture: ET.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def widths(picture: ET.Element, kind: str) -> list[float]:
    return [float(bar.attrib["width"]) for bar in picture.iter(f"{SVG}rect") if bar.attrib["class"] == kind]


def test_bars_are_as_long_as_ratios() -> None:
    picture = drawn(
        measured("burst", "raw", [1]), measured("burst", "aiohttp", [6]), measured("burst", "spanwire", [3])
    )
    (first,), (ours,), (other,) = (widths(picture, kind) for kind in ("first", "ours", "bar"))
    assert (ours, other) == pytest.approx((3 * first, 6 * first), rel=0.01)
    said = texts(picture)
    assert said[2] == "All tokens of an answer at once: us of CPU per token"
    assert said[3:9] == ["raw", "1 x  (1)", "spanwire", "3 x  (3)", "aiohttp", "6 x  (6)"]


def test_bar_that_would_hide_all_others_is_broken_off() -> None:
    picture = drawn(measured("burst", "raw", [1]), measured("burst", "litellm", [200]))
    (first,), (other,) = widths(picture, "first"), widths(picture, "bar")
    assert other == pytest.approx(chart.LONGEST * first, rel=0.01)
    assert len([line for line in picture.iter(f"{SVG}line") if line.attrib["class"] == "break"]) == 2
    assert "200 x  (200)" in texts(picture)


def test_budget_is_a_line_where_it_ends() -> None:
    picture = drawn(measured("burst", "raw", [1]), measured("burst", "spanwire", [4]))
    (line,) = [line for line in picture.iter(f"{SVG}line") if line.attrib["class"] == "budget"]
    (bar,) = [bar for bar in picture.iter(f"{SVG}rect") if bar.attrib["class"] == "ours"]
    left, width = float(bar.attrib["x"]), float(bar.attrib["width"])
    assert float(line.attrib["x1"]) == pytest.approx(left + width / 2, abs=0.2)


def test_nothing_leaves_the_picture() -> None:
    names = ("raw", "aiohttp", "httpx", "openai", "langchain", "litellm", "spanwire")
    picture = drawn(*[measured("burst", name, [10.0**number]) for number, name in enumerate(names)])
    width, height = (float(picture.attrib[side]) for side in ("width", "height"))
    for bar in picture.iter(f"{SVG}rect"):
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height
    for text in picture.iter(f"{SVG}text"):  # 6.5 pixels a letter are ample at this size
        if text.attrib.get("text-anchor") != "end":
            assert float(text.attrib["x"]) + 6.5 * len(text.text or "") <= width


def test_light_and_dark_and_nothing_from_elsewhere() -> None:
    text = chart.svg(run([measured("burst", "raw", [1]), measured("burst", "spanwire", [2])]))
    assert "prefers-color-scheme: dark" in text
    assert "url(" not in text
    assert "href" not in text
    assert "A processor &lt;fast&gt;" in text


def test_panels_need_somebody_to_compare() -> None:
    found = chart.panels(
        run(
            [
                failed("burst", "raw"),
                measured("burst", "spanwire", [2]),
                measured("unary", "raw", [2]),
                measured("backpressure", "raw", [1]),
                measured("backpressure", "spanwire", [1]),
                measured("paced", "raw", [2]),
                measured("paced", "spanwire", [5]),
                failed("paced", "openai"),
            ]
        )
    )
    assert [[bar.client for bar in panel.bars] for panel in found] == [["raw", "spanwire"]]


def test_loops_are_named_where_there_are_two() -> None:
    both = [
        measured("burst", client, [1], loop=loop) for loop in ("asyncio", "uvloop") for client in ("raw", "spanwire")
    ]
    assert [panel.title[-9:] for panel in chart.panels(run(both))] == ["(asyncio)", " (uvloop)"]


def test_quick_run_says_that_it_means_nothing() -> None:
    picture = drawn(measured("burst", "raw", [1]), measured("burst", "spanwire", [2]), quick=True)
    assert "MEAN NOTHING" in texts(picture)[-1]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "results.json", tmp_path / "chart.svg"
    assert chart.main([str(file), str(picture)]) == 1
    assert "No such file" in capsys.readouterr().err
    file.write_text('{"schema": 1}', encoding="utf-8")
    assert chart.main([str(file), str(picture)]) == 1
    assert "holds no results" in capsys.readouterr().err
    results.write(file, run([measured("burst", "raw", [1])]))
    assert chart.main([str(file), str(picture)]) == 1
    assert "no workload in which raw and another client" in capsys.readouterr().err
    results.write(file, run([measured("burst", "raw", [1]), measured("burst", "spanwire", [2])]))
    assert chart.main([str(file), str(picture)]) == 0
    ET.parse(picture)
