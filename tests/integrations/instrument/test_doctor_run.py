"""``spanwire doctor`` on small agents: what it finds, the line it names, and that the program runs as without it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spanwire.testing import LoopbackServer, Script
from tests.integrations.instrument.doctoring import ASK, Doctor

PER_CALL = f"""
import os
import openai

def answer(question):
    client = openai.OpenAI(base_url=os.environ["URL"], api_key="sk-secret")
    stream = client.chat.completions.create(model="m", {ASK}, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

for number in range(6):
    print(number, answer("why"))
"""
SHARED = f"""
import os
import openai

client = openai.OpenAI(base_url=os.environ["URL"], api_key="sk-secret")
for number in range(6):
    stream = client.chat.completions.create(model="m", {ASK}, stream=True)
    print("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
"""
UNARY = f"""
import os
import openai

client = openai.OpenAI(base_url=os.environ["URL"], api_key="sk-secret")
for number in range(6):
    print(client.chat.completions.create(model="m", {ASK}).choices[0].message.content)
"""


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as server:
        yield server


@pytest.fixture
def doctor(tmp_path: Path, server: LoopbackServer) -> Doctor:
    return Doctor(tmp_path, server)


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Doctor]:
    with LoopbackServer(tls=True) as server:
        yield Doctor(tmp_path, server)


# --- findings -----------------------------------------------------------------------------------------------------------


def test_a_client_for_each_call(secure: Doctor) -> None:
    path = secure.write(PER_CALL)
    bare = secure.bare()
    assert bare[0] == 0
    found = secure.examine()
    assert (found.code, found.out, found.err) == bare
    assert (found.report["calls"], found.report["connections"]) == (6, 6)
    finding = found.finding("client_per_call")
    assert finding["severity"] == "high"
    assert finding["title"] == "openai.OpenAI is made anew for each call in answer()"
    assert finding["where"][0] == {"file": str(path), "line": secure.line("client = "), "function": "answer"}
    assert finding["evidence"][0] == "6 clients for 6 calls, and 6 connections."
    assert finding["evidence"][1].startswith("The handshake took ")
    assert finding["evidence"][2].startswith("6 SSLContexts with them, which took ")
    line = 'client = openai.OpenAI(base_url=os.environ["..."], api_key="...")'
    assert (finding["now"], finding["instead"]) == (f"{line}  # in answer()", f"{line}  # at module level")
    assert found.kinds[0] == "client_per_call"
    assert "ssl_context_per_call" not in found.kinds  # it is the same thing
    assert "stream_drops_connection" not in found.kinds  # not seen yet: each client had one call


@pytest.mark.long
def test_streams_that_lose_their_connection(secure: Doctor) -> None:
    path = secure.write(SHARED)
    bare = secure.bare()
    found = secure.examine()
    assert (found.code, found.out, found.err) == bare
    finding = found.finding("stream_drops_connection")
    assert finding["where"] == [{"file": str(path), "line": secure.line("client = "), "function": "<module>"}]
    # Where the end of the message happens to come along with the last event, the connection is kept once.
    assert re.fullmatch(r"[2-5] connections of 6 calls would not have been needed\.", finding["evidence"][0])
    assert finding["now"] == 'client = openai.OpenAI(base_url=os.environ["..."], api_key="...")'
    assert finding["instead"] == "client = openai.OpenAI(..., http_client=spanwire_instrument.httpx2_client())"
    assert "sk-secret" not in json.dumps(found.report)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('api_key="sk-secret"', 'api_key="k", http_client=spanwire_instrument.httpx2_client()'),
        ("client = ", "spanwire_instrument.instrument()\nclient = "),
    ],
)
def test_the_change_that_it_proposes_is_the_repair(doctor: Doctor, old: str, new: str) -> None:
    doctor.write("import spanwire_instrument\n" + SHARED.replace(old, new))
    found = doctor.examine()
    assert (found.report["calls"], found.report["connections"]) == (6, 1)
    assert [finding for finding in found.report["findings"] if finding["severity"] != "note"] == []


@pytest.mark.long
def test_nothing_to_fix_is_said_with_the_split_of_the_time(doctor: Doctor) -> None:
    doctor.write(UNARY)
    code, out, err = doctor.text("--", sys.executable, "agent.py")
    assert (code, out) == doctor.bare()[:2]
    assert "\nNothing to fix.\n" in err
    assert "6 calls to 127.0.0.1:" in err
    assert "\nWhere the time went (6 complete calls" in err
    assert err.count(" %") >= 3
    assert max(map(len, err.splitlines())) <= 80
    assert "\x1b" not in err


@pytest.mark.long
def test_waits_for_the_pool(doctor: Doctor, server: LoopbackServer) -> None:
    server.script(Script.say("one two three", prefill_s=0.05, gap_s=0.01), model="m")
    path = doctor.write(f"""
import asyncio, os
import httpx2, openai

client = openai.AsyncOpenAI(
    base_url=os.environ["URL"],
    api_key="k",
    http_client=httpx2.AsyncClient(limits=httpx2.Limits(max_connections=1)),
)

async def ask():
    stream = await client.chat.completions.create(model="m", {ASK}, stream=True)
    async for _ in stream:
        pass

async def main():
    await asyncio.gather(*(ask() for _ in range(6)))

asyncio.run(main())
""")
    found = doctor.examine()
    assert (found.code, found.out, found.err) == (0, "", "")
    finding = found.finding("pool_wait")
    assert finding["where"] == [{"file": str(path), "line": doctor.line("max_connections=1"), "function": "<module>"}]
    assert finding["evidence"][1] == "Up to 6 calls ran at once."
    assert finding["instead"] == "httpx2.AsyncClient(limits=httpx2.Limits(max_connections=6))"


@pytest.mark.long
def test_retries_inside_of_an_sdk(doctor: Doctor, server: LoopbackServer) -> None:
    server.script(Script(status=503, headers={"retry-after": "0"}), model="m", times=1)
    server.script(Script.say("fine"), model="m")
    path = doctor.write(UNARY)
    found = doctor.examine()
    assert (found.code, found.out, found.err) == (0, "fine\n" * 6, "")
    finding = found.finding("hidden_retries")
    assert finding["title"].startswith("openai sends requests again")
    assert finding["where"] == [{"file": str(path), "line": doctor.line("print("), "function": "<module>"}]
    assert finding["evidence"][0] == "1 request more than the program asked for, in 1 call: after 1 Overloaded."
    assert finding["instead"] == "client = openai.OpenAI(..., max_retries=0)"
    assert found.finding("failed_calls")["title"] == "1 of 7 requests failed"


@pytest.mark.long
def test_retries_of_the_program_are_its_own(doctor: Doctor, server: LoopbackServer) -> None:
    server.script(Script(status=503, headers={"retry-after": "0"}), model="m", times=2)
    server.script(Script.say("fine"), model="m")
    doctor.write(f"""
import os
import openai

client = openai.OpenAI(base_url=os.environ["URL"], api_key="k", max_retries=0)
for _ in range(8):
    try:
        print(client.chat.completions.create(model="m", {ASK}).choices[0].message.content)
    except openai.InternalServerError:
        print("again")
""")
    found = doctor.examine()
    assert found.out == "again\nagain\n" + "fine\n" * 6
    assert "hidden_retries" not in found.kinds
    assert found.finding("failed_calls")["title"] == "2 of 8 requests failed"


@pytest.mark.long
def test_streams_that_nobody_closes(doctor: Doctor, server: LoopbackServer) -> None:
    server.script(Script.say("one two three four five", gap_s=0.2), model="m")
    doctor.write(f"""
import gc, os
import openai

client = openai.OpenAI(base_url=os.environ["URL"], api_key="k")

def first():
    stream = client.chat.completions.create(model="m", {ASK}, stream=True)
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            return chunk.choices[0].delta.content

for _ in range(3):
    print(first())
    gc.collect()
""")
    found = doctor.examine()
    assert (found.code, found.out) == (0, "one\n" * 3)
    finding = found.finding("abandoned_streams")
    assert finding["where"][0]["line"] == doctor.line("stream = ")
    assert finding["instead"] == "with client.chat.completions.create(...) as stream:"
    assert found.report["enough_calls"] is False


@pytest.mark.long
def test_an_ssl_context_for_each_call(doctor: Doctor) -> None:
    doctor.write(
        UNARY.replace("\n    print", "\n    ssl.create_default_context()\n    print").replace("os", "os, ssl", 1)
    )
    finding = doctor.examine().finding("ssl_context_per_call")
    assert finding["where"][0]["line"] == doctor.line("ssl.create_default_context()")
    assert finding["evidence"][0].startswith("6 contexts for 6 calls. ")
    assert finding["now"] == "ssl.create_default_context()"


@pytest.mark.long
def test_names_that_are_looked_up_for_each_call(doctor: Doctor) -> None:
    doctor.env["URL"] = doctor.env["URL"].replace("127.0.0.1", "localhost")
    doctor.write(SHARED)
    finding = doctor.examine().finding("dns_per_call")
    assert finding["title"] == "localhost is looked up again and again"
    assert finding["evidence"][0].startswith("6 times for 6 calls, one for each new connection; ")


def test_aiohttp(doctor: Doctor) -> None:
    pytest.importorskip("aiohttp")
    doctor.write("""
import asyncio, os
import aiohttp

async def ask():
    async with aiohttp.ClientSession() as session:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        async with session.post(os.environ["URL"] + "/chat/completions", json=body) as response:
            await response.json()

async def main():
    for _ in range(6):
        await ask()

asyncio.run(main())
""")
    found = doctor.examine()
    assert (found.code, found.out, found.err) == (0, "", "")
    finding = found.finding("client_per_call")
    assert finding["title"] == "aiohttp.ClientSession is made anew for each call in ask()"
    assert finding["where"][0]["line"] == doctor.line("ClientSession()")
    assert finding["now"] == "async with aiohttp.ClientSession() as session:  # in ask()"
    assert finding["instead"] == "client = aiohttp.ClientSession()  # at module level"


def test_calls_of_spanwire_itself_are_in_it_once(doctor: Doctor) -> None:
    doctor.write("""
import os
import spanwire

with spanwire.SyncConnectionManager() as manager:
    for _ in range(6):
        call = spanwire.Call.chat("m", [{"role": "user", "content": "x"}])
        print(manager.complete(spanwire.Endpoint(os.environ["URL"]), call).text)
""")
    found = doctor.examine()
    assert found.code == 0
    assert (found.report["calls"], found.report["connections"]) == (6, 1)


@pytest.mark.long
def test_a_call_log_of_the_user_is_kept(doctor: Doctor) -> None:
    doctor.env["SPANWIRE_CALL_LOG"] = str(doctor.folder / "calls.jsonl")
    doctor.write(UNARY)
    for times in (1, 2):
        assert doctor.examine().report["calls"] == 6
        assert len((doctor.folder / "calls.jsonl").read_text("utf-8").splitlines()) == 6 * times


# --- programs of all kinds ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_program_that_crashes(doctor: Doctor) -> None:
    doctor.write(SHARED + "\nraise RuntimeError('on purpose')")
    bare = doctor.bare()
    assert bare[0] == 1
    code, out, err = doctor.text("--", sys.executable, "agent.py")
    assert (code, out) == bare[:2]
    assert err.startswith(bare[2])
    assert "exit code 1, " in err
    assert "Streams lose their connection" in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("os._exit(7)", 7, "exit code 7, "),
        ("os.kill(os.getpid(), 9)", 137, "ended by SIGKILL, "),
    ],
)
def test_a_program_that_ends_at_once(doctor: Doctor, end: str, code: int, words: str) -> None:
    doctor.write(SHARED + f"\n{end}")
    found = doctor.text("--", sys.executable, "-u", "agent.py")
    assert (found[0], found[1]) == (code, doctor.bare(sys.executable, "-u", "agent.py")[1])
    assert words in found[2]
    assert "Streams lose their connection" in found[2]


@pytest.mark.long
def test_calls_under_way_at_the_end(doctor: Doctor, server: LoopbackServer) -> None:
    server.script(Script(hang_after="request"), model="m")
    doctor.write(UNARY)
    process = doctor.start("--json", "-o", "report.json", "--", sys.executable, "agent.py")
    server.wait_for(lambda book: bool(book.requests), timeout_s=30)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    report = json.loads((doctor.folder / "report.json").read_text("utf-8"))
    assert (process.returncode, report["exit_code"], report["signal"]) == (143, 143, "SIGTERM")
    (finding,) = report["findings"]
    assert finding["title"] == "1 call was under way when the program ended"
    assert finding["where"][0]["line"] == doctor.line("print(")


@pytest.mark.long
def test_a_program_without_a_call(doctor: Doctor) -> None:
    doctor.write("import sys\nprint(sys.stdin.read().upper(), sys.argv[1:])\nsys.exit(3)")
    command = (sys.executable, "agent.py", "--", "-x", "a b")
    code, out, err = doctor.text("--", *command, stdin="some words")
    assert (code, out) == doctor.bare(*command, stdin="some words")[:2] == (3, "SOME WORDS ['--', '-x', 'a b']\n")
    assert "\nNo call to a model was seen.\n" in err


@pytest.mark.long
def test_too_few_calls_are_not_judged(doctor: Doctor) -> None:
    doctor.write(SHARED.replace("range(6)", "range(3)"))
    code, _, err = doctor.text("--", sys.executable, "agent.py")
    assert code == 0
    assert "\n3 complete calls: too few to speak of shares and percentiles." in err
    assert "Streams lose" not in err
    assert "Nothing to fix" not in err


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork")
def test_processes_that_it_starts(doctor: Doctor) -> None:
    doctor.write(UNARY.replace("range(6)", "range(2)"), "helper.py")
    doctor.write(f"""
import multiprocessing, os, subprocess, sys
import openai

def ask(number):
    client = openai.OpenAI(base_url=os.environ["URL"], api_key="k")
    client.chat.completions.create(model="m", {ASK})

if __name__ == "__main__":
    ask(0)
    subprocess.run([sys.executable, "helper.py"], check=True)
    for method in ("fork", "spawn"):
        worker = multiprocessing.get_context(method).Process(target=ask, args=(1,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
    pid = os.fork()
    if not pid:
        ask(2)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
""")
    found = doctor.examine()
    assert found.code == 0, found.err
    assert found.report["calls"] == 6
    assert found.report["processes"] >= 5
    assert found.report["unfinished_calls"] == 0


@pytest.mark.long
def test_modules_and_scripts(doctor: Doctor) -> None:
    doctor.write(UNARY, "agent/__main__.py")
    assert doctor.examine(sys.executable, "-m", "agent").report["calls"] == 6
    script = doctor.write(f"#!{sys.executable}\nimport runpy\nrunpy.run_module('agent', run_name='__main__')", "run")
    script.chmod(0o755)
    found = doctor.examine("./run")
    assert (found.report["calls"], found.report["program"]) == (6, "run")


@pytest.mark.long
def test_a_sitecustomize_of_the_environment_runs_too(doctor: Doctor) -> None:
    doctor.write("import sys\nsys.there = 'yes'", "site/sitecustomize.py")
    doctor.env["PYTHONPATH"] = str(doctor.folder / "site")
    doctor.write(
        "import sys, sitecustomize\nprint(sys.there, sitecustomize.__file__, [p for p in sys.path if 'bootstrap' in p])"
    )
    bare = doctor.bare()
    assert bare[:2] == (0, f"yes {doctor.folder / 'site' / 'sitecustomize.py'} []\n")
    found = doctor.examine()
    assert (found.code, found.out, found.err) == bare
    assert found.report["processes"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_signals_reach_the_program(doctor: Doctor, number: signal.Signals) -> None:
    doctor.write(
        SHARED
        + f"""
import signal, sys, time

def ended(number, frame):
    print("tidied up", number)
    sys.exit(9)

signal.signal({int(number)}, ended)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
    )
    process = doctor.start("--", sys.executable, "agent.py")
    assert process.stdout is not None
    with contextlib.closing(process.stdout):
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (9, f"tidied up {int(number)}\n")
    assert "exit code 9, " in err
    assert "Streams lose their connection" in err


# --- what cannot be examined --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "what to run? For example: spanwire doctor -- python agent.py"),
        (("--",), 2, "what to run?"),
        (("--", "acme-is-not-there"), 127, "spanwire doctor: there is no program 'acme-is-not-there'\n"),
        (
            ("--", "agent.py"),
            126,
            "spanwire doctor: agent.py is no program by itself: spanwire doctor -- python agent.py\n",
        ),
        (("--", sys.executable, "-S", "agent.py"), 2, "spanwire doctor: python -S leaves out site"),
        (("--", sys.executable, "-Xdev", "-uI", "agent.py"), 2, "spanwire doctor: python -I leaves out PYTHONPATH"),
        (
            ("-o", "no/such/folder", "--", sys.executable, "agent.py"),
            2,
            "the report cannot be written to no/such/folder",
        ),
        (("--nonsense", "--", sys.executable, "agent.py"), 2, "No such option"),
    ],
)
def test_refused_before_anything_runs(doctor: Doctor, arguments: tuple[str, ...], code: int, words: str) -> None:
    doctor.write("print('it runs')")
    found = doctor.text(*arguments)
    assert found[:2] == (code, "")
    assert words in found[2]


@pytest.mark.long
def test_options_of_the_program_are_not_those_of_python(doctor: Doctor) -> None:
    doctor.write("import sys\nprint(sys.argv[1:])")
    assert doctor.text("--", sys.executable, "-W", "ignore", "agent.py", "-S")[:2] == (0, "['-S']\n")


@pytest.mark.long
def test_a_python_without_it(doctor: Doctor, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    doctor.write("print('it runs')")
    install = f"{python} -m pip install 'spanwire[instrument]'"
    assert doctor.text("--", python, "agent.py") == (
        2,
        "",
        f"spanwire doctor: {python} has no spanwire-instrument: {install}\n",
    )
    code, out, err = doctor.text("--", "sh", "-c", f"{python} agent.py")  # seen only when it runs
    assert (code, out) == (0, "it runs\n")
    assert "The program could not be watched." in err
    assert "it has no spanwire-instrument" in " ".join(err.split())


def test_a_program_that_is_no_python(doctor: Doctor) -> None:
    code, out, err = doctor.text("--", "sh", "-c", "echo hello; exit 4")
    assert (code, out) == (4, "hello\n")
    assert "No Python reported from inside it." in err


def test_help_fits_80_columns(doctor: Doctor) -> None:
    code, out, _ = doctor.text("--help")
    assert code == 0
    assert "    spanwire doctor -- python -m my_agent\n" in out
    assert max(map(len, out.splitlines())) <= 80
