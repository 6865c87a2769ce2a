"""``spanwire receive`` and ``spanwire jobs``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
from spanwire_webhook import commands
from spanwire_webhook.embedded import EmbeddedReceiver
from spanwire_webhook.receiver import Receiver
from spanwire_webhook.settings import ReceiverSettings
from typer.testing import CliRunner, Result

from spanwire.cli.app import app
from spanwire.jobs.contract import JobRow
from spanwire.jobs.ids import new_id
from spanwire.jobs.sqlite import SQLiteStore
from spanwire.jobs.stores import open_store

from .fakes import SECRET, codecs, said, signed_now


@pytest.fixture(autouse=True)
def _dialects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_codecs", codecs)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    made = SQLiteStore(tmp_path / "jobs.db")
    yield made
    made.close()


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environ)


def url_of(store: SQLiteStore) -> str:
    return f"sqlite:///{store.path}"


def add(store: SQLiteStore, **more: Any) -> str:
    job = new_id()
    row = {
        "id": job,
        "dialect": "generic",
        "model": "m",
        "created_s": time.time(),
        "due_s": time.time() + 60,
        "input": b"s3cret",
        **more,
    }
    store.add([JobRow(**row)])
    return job


def test_what_others_named_gives_the_terminal_no_orders(store: SQLiteStore) -> None:
    job = add(store, state="submitted", model="\x1b]0;m\x07\x9b2J")
    assert "\\u001b]0;m\\u0007\\u009b2J" in run("jobs", "list", "--store", url_of(store)).output
    shown = run("jobs", "show", job, "--store", url_of(store)).output
    assert "\x9b" not in shown
    assert json.loads(shown)["model"] == "\x1b]0;m\x07\x9b2J"


def test_list_and_show(store: SQLiteStore) -> None:
    assert "no jobs" in run("jobs", "list", "--store", url_of(store)).output
    waiting = add(store, state="submitted", provider_id="p1")
    done = add(store, state="succeeded", result=store.put_body(b"\x00result\xff"), resolved_s=1.0)
    other = add(store, state="failed", group="g", resolved_s=1.0)
    listed = run("jobs", "list", "--store", url_of(store)).output
    assert waiting in listed
    assert done in listed
    assert other not in listed
    as_json = json.loads(run("jobs", "list", "--json", "--group", "g", "--store", url_of(store)).output)
    assert [row["id"] for row in as_json] == [waiting, other]
    for name in (waiting, "generic:p1"):
        shown = run("jobs", "show", name, "--store", url_of(store)).output
        assert json.loads(shown)["id"] == waiting
        assert "s3cret" not in shown
    assert run("jobs", "show", done, "--body", "--store", url_of(store)).stdout_bytes == b"\x00result\xff"
    for arguments, message in (
        ((waiting, "--body"), "has no result"),
        (("nope",), "has no job"),
        (("generic:p2",), "has no job"),
    ):
        failed = run("jobs", "show", *arguments, "--store", url_of(store))
        assert failed.exit_code == 2
        assert message in failed.output


def test_reverify_with_a_secret_that_is_right_now(store: SQLiteStore) -> None:
    job = add(store, state="submitted")
    body = said()
    receiver = Receiver(store, codecs(), ReceiverSettings(secrets={}))
    reception = receiver.begin("POST", receiver.mac.path("generic", job), signed_now(body))
    reception.feed(body)
    assert reception.finish().status == 401
    still = run("jobs", "reverify", "--store", url_of(store))
    assert (still.exit_code, still.output) == (1, "0 of 1 are right now\n")
    right = run("jobs", "reverify", "--store", url_of(store), SPANWIRE_WEBHOOK_SECRETS_GENERIC=SECRET)
    assert (right.exit_code, right.output) == (0, "1 of 1 are right now\n")
    assert store.unapplied(job=job)[0][1].body == body
    bad = run("jobs", "reverify", "--store", url_of(store), SPANWIRE_WEBHOOK_SECRETS_GENERIC="whsec_AAAA")
    assert bad.exit_code == 2
    assert "AAAA" not in bad.output


def test_check(store: SQLiteStore) -> None:
    receiver = Receiver(store, codecs())
    with EmbeddedReceiver(receiver) as served:
        right = run("jobs", "check", "--store", url_of(store), "--public-url", served.url)
        assert right.exit_code == 0
        assert right.output.startswith("all right")
        wrong = run("jobs", "check", "--store", "sqlite://", "--public-url", served.url)
        assert wrong.exit_code == 1
        assert "another instance key" in wrong.output
    none = run("jobs", "check", "--store", url_of(store))
    assert none.exit_code == 2
    assert "--public-url" in none.output


def test_without_a_store_it_is_the_one_of_programs_that_name_none(tmp_path: Path) -> None:
    path = tmp_path / "spanwire" / "jobs.db"
    missing = run("jobs", "list", XDG_STATE_HOME=str(tmp_path), SPANWIRE_STORE="")
    assert missing.exit_code == 2
    assert str(path) in missing.output
    assert not path.exists()  # a name that was mistyped makes none
    open_store(f"sqlite:///{path}").close()
    listed = run("jobs", "list", XDG_STATE_HOME=str(tmp_path), SPANWIRE_STORE="")
    assert (listed.exit_code, listed.stdout) == (0, "")


def test_a_store_that_is_none_is_one_line() -> None:
    failed = run("jobs", "list", "--store", "mysql://x")
    assert failed.exit_code == 2
    assert "not known" in failed.output


_RUN = """
import sys
from spanwire_webhook import commands
from tests.plugins.webhook.fakes import codecs
commands._codecs = codecs
sys.argv[0] = "spanwire"
from spanwire.cli import main
main()
"""


class Receiving:
    """``spanwire receive`` as a process of its own."""

    def __init__(self, store: SQLiteStore, *arguments: str, script: str = _RUN) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, "receive", "--store", url_of(store), "--port", "0", *arguments],
            env={**os.environ, "SPANWIRE_WEBHOOK_SECRETS_GENERIC": SECRET},
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + self.process.stderr.read()
        self.port = urlsplit(found.group()).port or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)

    def get(self, path: str) -> int:
        connection = self.connect()
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def ended(self) -> tuple[int, str]:
        """Its exit code, and what it has printed."""
        out, err = self.process.communicate(timeout=20)
        assert "Traceback" not in err
        return self.process.returncode, out


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_finishes_what_is_being_received(store: SQLiteStore, number: signal.Signals) -> None:
    with Receiving(store) as receiving:
        assert receiving.get("/healthz") == receiving.get("/readyz") == 200
        job, body = add(store, state="submitted"), said()
        path = Receiver(store, codecs()).mac.path("generic", job)
        begun = receiving.connect()
        begun.putrequest("POST", path)
        for name, value in {**dict(signed_now(body)), "content-length": str(len(body))}.items():
            begun.putheader(name, value)
        begun.endheaders(body[:5])
        assert receiving.get("/healthz") == 200  # and so the half is there as well
        receiving.process.send_signal(number)
        with contextlib.suppress(OSError):
            while True:  # until it listens no more
                socket.create_connection(("127.0.0.1", receiving.port), timeout=10).close()
        begun.send(body[5:])
        assert begun.getresponse().status == 204
        assert receiving.ended()[0] == 0
        assert store.unapplied(job=job)[0][1].body == body


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_it_goes_on_for_a_while_and_says_that_it_is_not_ready(store: SQLiteStore) -> None:
    with Receiving(store, "--drain", "60") as receiving:
        assert receiving.get("/readyz") == 200
        receiving.process.send_signal(signal.SIGTERM)
        while receiving.get("/readyz") != 503:
            pass
        assert receiving.get("/healthz") == 200
        job, body = add(store, state="submitted"), said()
        connection = receiving.connect()
        connection.request("POST", Receiver(store, codecs()).mac.path("generic", job), body, dict(signed_now(body)))
        assert connection.getresponse().status == 204
        connection.close()
        receiving.process.send_signal(signal.SIGTERM)  # in a hurry
        assert receiving.ended()[0] == 0


_COUNTED = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(ConsoleMetricExporter())]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_its_counters_are_metrics_where_the_process_has_a_provider(store: SQLiteStore) -> None:
    with Receiving(store, script=_COUNTED + _RUN) as receiving:
        connection = receiving.connect()
        connection.request("POST", "/generic/nobodys", b"{}")
        assert connection.getresponse().status == 404
        connection.close()
        receiving.process.send_signal(signal.SIGTERM)
        code, out = receiving.ended()
    assert code == 0
    assert '"spanwire.job.webhooks"' in out
    assert '"spanwire.job.event": "bad_path"' in out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--host", ""], "--host is empty"),  # it would listen on every address
        (["--drain", "inf"], "less than or equal to 3600"),  # it would never end
        (["--store", "postgresql://a@127.0.0.1:abc/x"], "the store cannot be opened: .*integer value"),
    ],
)
def test_options_that_would_do_what_nobody_means(arguments: list[str], match: str, store: SQLiteStore) -> None:
    command = [str(Path(sys.executable).with_name("spanwire")), "receive", "--port", "0", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "SPANWIRE_STORE": url_of(store)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert re.search(match, done.stderr)
    assert "Traceback" not in done.stderr
