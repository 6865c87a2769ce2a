"""``import spanwire`` stays small: no framework, no wire library, few modules."""

from __future__ import annotations

import json
import subprocess
import sys

#: Measured: 250 to 267 by version of Python and OpenTelemetry. `openai` loads over 1,000, `litellm` 3,000.
BUDGET = 270
FORBIDDEN = {
    "aiohappyeyeballs",
    "aiohttp",
    "grpc",
    "h11",
    "httpcore",
    "httptools",
    "httpx",
    "httpx2",
    "langchain_core",
    "litellm",
    "openai",
    "rich",
    "spanwire_sse",
    "trustme",
    "typer",
    "uvloop",
    "websockets",
}


def loaded(statement: str) -> set[str]:
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


def test_importing_loads_no_framework_no_wire_library_and_few_modules() -> None:
    modules = loaded("import spanwire")
    assert not {name.split(".")[0] for name in modules} & FORBIDDEN
    assert not [
        name
        for name in modules
        if name.startswith(("opentelemetry.sdk", "spanwire.net", "spanwire.cli", "spanwire.testing"))
    ]
    assert len(modules) < BUDGET


def test_what_core_adds_to_its_dependencies_is_its_own() -> None:
    before = loaded(
        "import asyncio, pluggy, msgspec, opentelemetry.trace, opentelemetry.metrics, opentelemetry.propagate, importlib.metadata"
    )
    added = {name for name in loaded("import spanwire") - before if not name.startswith("spanwire")}
    assert len(added) < 20, sorted(added)
