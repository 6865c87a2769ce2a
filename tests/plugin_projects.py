"""Plugins that lie in a folder, and are not installed: what they import, and how a process finds them all the same."""

from __future__ import annotations

import ast
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PUBLIC", "foreign_imports", "on_path"]

#: What somebody else's plugin may import of us.
PUBLIC = frozenset(
    {
        "spanwire",
        "spanwire.errors",
        "spanwire.hookspecs",
        "spanwire.net.dial",
        "spanwire.net.sockets",
        "spanwire.testing",
        "spanwire.timeline",
        "spanwire.transport",
        "spanwire.wire",
    }
)


def foreign_imports(root: Path) -> list[str]:
    """Imports of ours in a project's files that are not public: of another module, or of a name with an underscore."""
    return [f"{file.relative_to(root)}: {what}" for file in sorted(root.rglob("*.py")) for what in _imports(file)]


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in found:
            ours = module == "spanwire" or module.startswith(("spanwire.", "spanwire_sse"))
            if ours and (module not in PUBLIC or name.startswith("_")):
                yield f"{module} {name}".strip()


def on_path(root: Path, folder: Path) -> dict[str, str]:
    """The environment of a process that finds the project as if it were installed, and no plugin of pytest's."""
    data = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / "installed" / f"{data['name'].replace('-', '_')}-{data['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {data['name']}\nVersion: {data['version']}\n")
    lines = []
    for group, entries in data["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(root / "src"), str(info.parent)])
    return {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
