"""What is in a wheel, that two builds of one tree are the same bytes, and what an installation weighs."""

from __future__ import annotations

import hashlib
import statistics
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ROOT, Environment, build, distribution, tree

pytestmark = [pytest.mark.install, pytest.mark.timeout(600)]

#: Imports are timed this often; the median is shown.
_TIMES = 7
_IMPORT = "import time; t = time.perf_counter_ns(); import {0}; print((time.perf_counter_ns() - t) / 1e6)"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.whl")}


def test_two_builds_are_the_same_bytes(wheels: Path, tmp_path: Path) -> None:
    """Of another folder, with other times on the files: nothing of the machine gets in."""
    copy = tree(tmp_path / "elsewhere" / "copy")
    for path in copy.rglob("*"):
        if path.is_file():
            path.touch()
    assert digests(build(copy, tmp_path / "again")) == digests(wheels)


def test_every_wheel_has_the_licence_its_types_and_nothing_else_than_its_package(wheels: Path) -> None:
    found = sorted(wheels.glob("*.whl"))
    assert len(found) == 8
    for path in found:
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            (licence,) = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
            assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
            (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
            assert "License-Expression: Apache-2.0" in wheel.read(metadata).decode()
        (package,) = {name.split("/")[0] for name in names if ".dist-info/" not in name}
        assert package == distribution(path).replace("-", "_")
        assert f"{package}/py.typed" in names
        assert not [name for name in names if "__pycache__" in name or "/tests/" in name.replace("templates", "")[:20]]


def test_what_each_weighs_and_how_long_its_import_takes(
    wheels: Path,
    environment: Callable[..., Environment],
    ours: tuple[str | Path, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A table to look at. Only what no machine changes is checked: that they are all there."""
    made = environment("uv")
    made.install("spanwire[all]", *ours)
    rows = []
    for path in sorted(wheels.glob("*.whl")):
        package = distribution(path).replace("-", "_")
        with zipfile.ZipFile(path) as wheel:
            installed = sum(info.file_size for info in wheel.infolist())
        made.code(f"import {package}")  # compiles
        times = [float(made.code(_IMPORT.format(package)).stdout) for _ in range(_TIMES)]
        rows.append((distribution(path), path.stat().st_size / 1024, installed / 1024, statistics.median(times)))
    bare = statistics.median(float(made.code(_IMPORT.format("asyncio")).stdout) for _ in range(_TIMES))
    with capsys.disabled():
        print("\n\n| distribution | wheel, KiB | installed, KiB | import, ms |\n| --- | --- | --- | --- |")
        for name, wheel_kib, installed_kib, ms in rows:
            print(f"| {name} | {wheel_kib:.0f} | {installed_kib:.0f} | {ms:.0f} |")
        print(f"| (asyncio alone) | | | {bare:.0f} |")
    assert len(rows) == 8
