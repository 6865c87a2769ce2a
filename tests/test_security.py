"""Every claim of SECURITY.md names the test that holds it, and that test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "SECURITY.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE)))


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize("name", NAMED)
def test_the_test_of_a_claim_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    assert function in functions(ROOT / path)


def test_each_part_of_the_threat_model_has_claims_that_are_tested() -> None:
    model = PAGE.partition("## Threat model")[2].partition("## Supply chain")[0]
    parts = re.split(r"^### ", model, flags=re.MULTILINE)[1:]
    titles = [part.splitlines()[0] for part in parts]
    assert {"Keys", "The receiver of webhooks", "Addresses that a server names (SSRF)", "Plugins", "Templates"} <= set(
        titles
    )
    assert [title for title, part in zip(titles, parts, strict=True) if "`tests/" not in part] == []
    assert len(NAMED) > 40
