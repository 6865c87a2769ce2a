"""Every example, and every Python block of the README and the docs, runs as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: What pages show as an address of the reader's own server.
SERVER = re.compile(r'"http://127\.0\.0\.1:8000/v1"')


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name: str) -> None:
    done = run((ROOT / "examples" / name).read_text("utf-8"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_examples_are_listed() -> None:
    table = (ROOT / "examples" / "README.md").read_text("utf-8")
    assert re.findall(r"`(\d\d_\w+\.py)`", table) == EXAMPLES


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_the_page_runs(page: str) -> None:
    """A block that uses the reader's own server gets the loopback server in its place."""
    for block in BLOCK.findall((ROOT / page).read_text("utf-8")):
        code = block
        if SERVER.search(code):
            start = "from spanwire.testing import LoopbackServer\n_server = LoopbackServer().start()\n"
            code = start + SERVER.sub("_server.url", code)
        done = run(code)
        assert (done.returncode, done.stderr) == (0, ""), block
