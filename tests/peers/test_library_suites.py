"""The libraries' own tests of clients and streams, with spanwire-instrument under them: everything comes out as without.

They come from the source archives on PyPI, and run in environments of their own: twice bare, then with each injection (see
``tests/peers/suites/spanwire_injection.py``). What differs between bare runs is not compared. What fails bare has
to fail with us, too: some of their tests need files that the archives do not hold.

``python -m pytest -m peers tests/peers/test_library_suites.py -s`` prints the table.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.peers.processes import HOME, ROOT, python_peer

if sys.version_info < (3, 11, 4):
    pytest.skip("unpacking an archive safely needs Python 3.11.4", allow_module_level=True)

pytestmark = [pytest.mark.peers, pytest.mark.timeout(3600, func_only=True)]

WAYS = ("zero", "wrap", "spanwire")
_PLUGINS = ROOT / "tests" / "peers" / "suites"
_OURS = (f"{ROOT}[testing]", ROOT / "plugins" / "spanwire-sse", ROOT / "integrations" / "spanwire-instrument")
_TOOLS = ("pip", "pytest", "pytest-asyncio", "pytest-timeout", "respx", "dirty-equals", "rich", "inline-snapshot", "time-machine", "trio")  # fmt: skip
_RUN_LIMIT_S = 900.0
_DOWNLOAD_LIMIT_S = 300.0


class Suite(NamedTuple):
    """Tests of one library.

    Attributes:
        name, version: of its source archive.
        paths: what is run, below ``tests``. Not what needs their mock server, which needs a file that no archive holds.
        needs: what must be installed for them, without the tools that all of them need.
        extras: of the library.
        plugin: one of their own that has to be loaded first.
        everything: take every request for inference, since its tests know nothing of models.
        alias: run them on httpx2, by ``httpx2.alias_httpx()``.
        deliberate: differences that are meant, by injection: how the test's name begins, and what it has to complain of.
            Each is explained below.
    """

    name: str
    version: str
    paths: tuple[str, ...]
    needs: tuple[str, ...] = ()
    extras: str = ""
    plugin: str | None = None
    everything: bool = False
    alias: bool = False
    deliberate: Mapping[str, tuple[tuple[str, str], ...]] = {}

    def __str__(self) -> str:
        return f"{self.name} {self.version}{' on httpx2' if self.alias else ''}"

    def python(self) -> Path:
        wanted = f"{self.name}[{self.extras}]=={self.version}" if self.extras else f"{self.name}=={self.version}"
        return python_peer(
            f"suite-{self.name}-{self.version}{'-httpx2' if self.alias else ''}",
            wanted,
            *_TOOLS,
            *self.needs,
            *(f"--editable={one}" for one in _OURS),
        )


#: Below our transport there is a twin of the request, so that the user's own stays as it is. These compare by identity what
#: a transport below ours was given with what the exception holds.
_TWIN = ("tests/test_streaming.py::test_request_errors_are_wrapped[", "assert caught.value.request is requests[0]")
_STAINLESS = ("test_client.py", "test_streaming.py", "test_response.py")
#: On connections of our own two things are otherwise, and meant. An answer that has come whole gives its connection back
#: before it is read, so that the next request has no need to wait. An answer that comes while the upload is still going
#: on is handed over at once, and does not wait for a server that reads no more.
_ENGINE = (
    ("tests/test_timeouts.py::test_pool_timeout[asyncio]", "DID NOT RAISE PoolTimeout"),
    ("tests/test_timeouts.py::test_write_timeout[asyncio]", "DID NOT RAISE WriteTimeout"),
)

SUITES = [
    Suite(
        "openai",
        "3.57.0",
        (
            *_STAINLESS,
            *("test_legacy_response.py", "test_sse_framing.py", "test_stream_mode.py", "test_httpx2.py"),
            *("test_httpx2_decompression.py", "test_httpx_compat.py", "lib/chat"),
        ),
        needs=("azure-identity", "pillow"),
        extras="aiohttp,realtime,bedrock,vertex",
        deliberate={"wrap": (_TWIN,), "spanwire": (_TWIN,)},
    ),
    Suite(
        "openai",
        "2.54.0",
        (
            *_STAINLESS,
            *("test_legacy_response.py", "test_module_client.py", "test_httpx2.py", "test_httpx2_base.py"),
            *("test_auth.py", "lib/chat", "lib/responses", "lib/test_azure.py"),
        ),
        needs=("azure-identity", "importlib-metadata", "jsonschema", "nest-asyncio"),
        extras="aiohttp,realtime,httpx2",
    ),
    Suite(
        "anthropic",
        "2.14.0",
        (
            *_STAINLESS,
            *("test_middleware.py", "test_header_case_sensitivity.py"),
            *("lib/streaming", "lib/_parse", "lib/test_refusal_fallback_streaming.py"),
        ),
        needs=("http-snapshot[httpx]==0.1.9", "hypothesis", "importlib-metadata", "opentelemetry-sdk", "packaging"),
        extras="aiohttp,vertex,aws,bedrock,mcp,webhooks",
        plugin="tests._alias_httpx",
    ),
    Suite("groq", "1.7.0", _STAINLESS, needs=("importlib-metadata",), extras="aiohttp"),
    Suite(
        "together",
        "3.1.1",
        (*_STAINLESS, "unit/test_idempotency.py"),
        needs=("pytest-mock",),
        extras="aiohttp,realtime",
    ),
    Suite(
        "httpx",
        "0.28.1",
        ("client", "models", "test_api.py", "test_asgi.py", "test_auth.py", "test_exceptions.py", "test_timeouts.py"),
        needs=("chardet", "cryptography", "trustme", "uvicorn"),
        extras="brotli,cli,http2,socks,zstd",
        everything=True,
        deliberate={"spanwire": _ENGINE},
    ),
    Suite(  # whose own archive holds no tests
        "httpx",
        "0.28.1",
        ("client", "test_api.py", "test_asgi.py", "test_exceptions.py", "test_timeouts.py"),
        needs=("chardet", "cryptography", "httpx2==2.16.2", "trustme", "uvicorn"),
        extras="brotli,cli,http2,socks,zstd",
        everything=True,
        alias=True,
        deliberate={"spanwire": _ENGINE},
    ),
]


class Run(NamedTuple):
    """What became of each test, and how many requests went through our code in it, by kind."""

    outcomes: dict[str, str]
    details: dict[str, str]
    through: dict[str, dict[str, int]]
    logged: list[str]

    def tests(self, kind: str) -> int:
        """In which at least one request went this way."""
        return sum(1 for counts in self.through.values() if counts.get(kind))

    def requests(self, kind: str) -> int:
        return sum(counts.get(kind, 0) for counts in self.through.values())


def unpacked(suite: Suite, python: Path, folder: Path) -> Path:
    """The source archive of its release; skips if it cannot be had."""
    archives = HOME / "archives"
    archive = archives / f"{suite.name}-{suite.version}.tar.gz"
    if not archive.exists():
        command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(archives)]  # fmt: skip
        done = subprocess.run(
            [*command, f"{suite.name}=={suite.version}"],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_LIMIT_S,
            check=False,
        )
        if done.returncode != 0 or not archive.exists():
            pytest.skip(f"the source archive of {suite} cannot be had: {done.stderr.strip()[-300:]}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    home = folder / f"{suite.name}-{suite.version}"
    shutil.rmtree(home / suite.name, ignore_errors=True)  # the installed one is meant
    return home


def run(suite: Suite, way: str, python: Path, home: Path, only: Collection[str] = ()) -> Run:
    report = home / f"spanwire-{way}.json"
    report.unlink(missing_ok=True)
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.upper().endswith("_PROXY") and not key.startswith(("PYTEST_", "SPANWIRE_", "OTEL_", "OPENAI_"))
    }
    plugins = [argument for plugin in (suite.plugin, "spanwire_injection") if plugin for argument in ("-p", plugin)]
    done = subprocess.run(
        [
            *(str(python), "-m", "pytest", "-q", "--tb=short", "--timeout=120", "-p", "no:cacheprovider", *plugins),
            *("-o", "addopts=", "-o", "asyncio_default_fixture_loop_scope=session"),
            *(only or [f"tests/{path}" for path in suite.paths]),
        ],
        capture_output=True,
        text=True,
        timeout=_RUN_LIMIT_S,
        cwd=home,
        check=False,
        env={
            **inherited,
            "PYTHONPATH": str(_PLUGINS),
            "SUITE_WAY": way,
            "SUITE_REPORT": str(report),
            "SUITE_ALL": str(int(suite.everything)),
            "SUITE_ALIAS": str(int(suite.alias)),
        },
    )
    assert report.exists(), f"{suite}, {way}: {(done.stdout + done.stderr)[-3000:]}"
    return Run(**json.loads(report.read_text(encoding="utf-8")))


class Differences(NamedTuple):
    """`wrong`: by name, what became of the test and what it says to it. `meant`: how many are deliberate."""

    wrong: dict[str, str]
    meant: int


def differences(before: Run, after: Run, *, but: set[str], deliberate: tuple[tuple[str, str], ...]) -> Differences:
    wrong: dict[str, str] = {}
    meant = 0
    for nodeid in sorted(before.outcomes.keys() | after.outcomes.keys()):
        was, now = before.outcomes.get(nodeid, "absent"), after.outcomes.get(nodeid, "absent")
        if was == now or nodeid in but:
            continue
        words = after.details.get(nodeid, "").strip()
        if any(nodeid.startswith(begin) and complaint in words for begin, complaint in deliberate):
            meant += 1
        else:
            wrong[nodeid] = "\n    ".join([f"{nodeid}: {was} -> {now}", *words.splitlines()[-3:]])
    return Differences(wrong, meant)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    print(
        "\n\n| library | tests that pass | fail without us | not compared | injection | through our code | same outcome |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))


@pytest.mark.parametrize("suite", SUITES, ids=str)
def test_their_tests_come_out_as_without_us(suite: Suite, table: list[str], tmp_path: Path) -> None:
    python = suite.python()
    home = unpacked(suite, python, tmp_path)
    bare, again = (run(suite, "bare", python, home) for _ in range(2))
    every = bare.outcomes.keys() | again.outcomes.keys()
    unsure = {nodeid for nodeid in every if bare.outcomes.get(nodeid) != again.outcomes.get(nodeid)}
    outcomes = [bare.outcomes[nodeid] for nodeid in bare.outcomes if nodeid not in unsure]
    passed = outcomes.count("passed")
    failed = sum(1 for outcome in outcomes if "failed" in outcome.split(", ") or "error" in outcome)
    assert passed > 100
    assert "not collected" not in bare.outcomes.values(), bare.details
    faults: list[str] = []
    for way in WAYS:
        found = run(suite, way, python, home)
        wrong, meant = differences(bare, found, but=unsure, deliberate=suite.deliberate.get(way, ()))
        if wrong:  # some of their tests depend on how busy the machine is: once more without us, and by themselves
            third = run(suite, "bare", python, home, only=sorted(wrong.keys() & bare.outcomes.keys()))
            changed = {nodeid for nodeid in third.outcomes if third.outcomes[nodeid] != bare.outcomes[nodeid]}
            unsure |= changed
            wrong = {nodeid: words for nodeid, words in wrong.items() if nodeid not in changed}
        faults += [f"{way}: {line}" for line in wrong.values()] + [
            f"{way}, logged: {line[:1500]}" for line in found.logged
        ]
        assert found.requests("watched") > 0  # else nothing of this means anything
        seen = f"{found.requests('requests')} requests of {found.tests('requests')} tests, {found.requests('watched')} watched"
        if way == "spanwire":
            seen += f", {found.requests('engine')} on our connections"
        same = f"**{len(wrong)} differ**" if wrong else f"yes, but for {meant}" if meant else "yes"
        table.append(f"| {suite} | {passed} | {failed} | {len(unsure)} | {way} | {seen} | {same} |")
    assert not faults, "\n".join(faults)
