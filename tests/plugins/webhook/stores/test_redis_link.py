"""Commands to a Valkey that is restarted, loses answers, moves keys, is not durable, or refuses us."""

from __future__ import annotations

import logging
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import redis
from spanwire_webhook.stores import redis_listener
from spanwire_webhook.stores.redis import open_store, read_url
from spanwire_webhook.stores.redis_link import Link
from spanwire_webhook.stores.redis_lua import OUTSIDE

from spanwire.errors import ConfigurationError, JobError
from spanwire.jobs.contract import Delivery, JobRow
from spanwire.testing.tls import ThrowAwayCA
from tests.plugins.webhook.stores.relay import Relay, relay
from tests.plugins.webhook.stores.valkey import Valkey, valkey

LARGE = bytes(range(256)) * 40


def _row(number: int = 1, **more: object) -> JobRow:
    return msgspec.structs.replace(JobRow(id=f"job-{number}", dialect="d", input=b"call"), **more)


@pytest.fixture
def lossy(shared_valkey: Valkey) -> Iterator[Relay]:
    with relay(shared_valkey.port) as one:
        yield one


@pytest.fixture(scope="module")
def own_valkey() -> Iterator[Valkey]:
    """Whose settings are changed."""
    with valkey() as server:
        yield server


# --- answers that are lost ----------------------------------------------------------------------------------------------


def _url(one: Relay, shared: Valkey) -> str:
    return shared.url().replace(f":{shared.port}/", f":{one.port}/")


def test_what_was_done_and_not_answered_is_not_done_twice(shared_valkey: Valkey, lossy: Relay) -> None:
    """Each write is sent, its answer is lost, it is sent again: its caller gets the right answer, and it is there once."""
    store = open_store(_url(lossy, shared_valkey))

    def losing(times: int = 1, about: bytes = b"EVALSHA") -> None:
        lossy.lose, lossy.about = times, about

    store.add([_row(9)])  # from here on the scripts are there
    losing(2)
    store.add([_row(1), _row(2, input=LARGE)])
    with pytest.raises(JobError, match="already"):
        store.add([_row(3), _row(1)])
    losing()
    assert store.swap(_row(1, state="submitted"), was=("created", 1))
    losing()
    assert not store.swap(_row(1, state="running"), was=("created", 1))
    losing()
    assert store.receive([Delivery(endpoint="d/h", dedupe="a", job="job-1", body=LARGE)]) == [True]
    assert store.receive([Delivery(endpoint="d/h", dedupe="a", job="job-1")]) == [False]
    ((number, found),) = store.unapplied()
    assert found.body == LARGE
    losing()
    store.applied([number])
    losing(about=b"SET")
    reference = store.put_body(LARGE)
    losing()
    ended = _row(1, state="succeeded", result=reference, resolved_s=5.0, revision=1)
    assert store.swap(ended, was=("submitted", 1))
    assert lossy.lost == 8
    assert store.unapplied() == []
    assert store.open_jobs() == 2
    assert store.body(reference) == LARGE
    assert store.get("job-2") == _row(2, input=LARGE)
    with shared_valkey.client() as client:  # a body that was sent twice does not go after an hour
        keys = client.keys(store._link.key("b:*"))
        assert len(keys) == 2
        assert [client.ttl(key) for key in keys] == [-1, -1]
    store.close()


def test_a_swap_is_known_after_others_have_gone_on(shared_valkey: Valkey, lossy: Relay) -> None:
    """Done, its answer lost; before it is sent again another process has changed the row further: it had won all the same."""
    store, other = open_store(_url(lossy, shared_valkey)), None
    store.add([_row()])
    script, calls = store._link._once, 0
    prefix = store._address.prefix

    def once(commands: object) -> list[object]:
        nonlocal other, calls
        answers = script(commands)  # type: ignore[arg-type]
        if "EVALSHA" in str(commands) and not calls:
            calls += 1
            other = open_store(shared_valkey.url(prefix))
            assert other.swap(_row(state="running", revision=1), was=("submitting", 1))
            raise redis.ConnectionError("lost")
        return answers

    store._link._once = once  # type: ignore[method-assign]
    assert store.swap(_row(state="submitting"), was=("created", 1))
    assert calls == 1
    assert other is not None
    row = other.get("job-1")
    assert row is not None
    assert row.state == "running"
    for one in (store, other):
        one.close()


def test_scripts_that_the_server_has_forgotten_are_sent_again(shared_valkey: Valkey) -> None:
    """Nobody notices."""
    store = open_store(shared_valkey.url())
    store.add([_row(1)])
    with shared_valkey.client() as client:
        client.script_flush()
    store.add([_row(2)])
    assert store.open_jobs() == 2
    store.close()


# --- restarts -----------------------------------------------------------------------------------------------------------


def test_nothing_is_lost_when_the_server_is_killed(own_valkey: Valkey) -> None:
    """With append-only on: what was written is there, and what was asked meanwhile is answered once the server is back."""
    store = open_store(own_valkey.url())
    rows = [_row(number, group="g", due_s=float(number + 1)) for number in range(20)]
    store.add(rows)
    reference = store.put_body(LARGE)
    ended = _row(0, group="g", state="succeeded", resolved_s=2.0, result=reference)
    assert store.swap(ended, was=("created", 1))
    came = [Delivery(endpoint="d/h", dedupe=str(number), job=f"job-{number}", body=LARGE) for number in range(20)]
    assert store.receive(came) == [True] * 20
    own_valkey.kill()
    own_valkey.start()
    assert store.receive([*came, Delivery(endpoint="d/h", dedupe="new")]) == [*[False] * 20, True]
    assert store.completed("g") == [msgspec.structs.replace(ended, revision=1)]
    assert store.body(reference) == LARGE
    assert [row.id for row in store.due(100.0)] == [row.id for row in rows[1:]]
    assert [found for _, found in store.unapplied()] == came
    store.close()


def test_nothing_is_lost_when_the_server_is_killed_in_the_middle(own_valkey: Valkey) -> None:
    """Four threads take jobs through their life while it is killed and restarted three times: each step is answered right, once."""
    url = own_valkey.url()
    go_on, steps = threading.Event(), [0] * 4

    def live(who: int) -> list[str]:
        store = open_store(url)
        done: list[str] = []
        while not go_on.is_set():
            name = f"{who}-{len(done)}"
            row = JobRow(id=name, group="g", dialect="d", input=LARGE, due_s=1.0)
            store.add([row])
            assert store.receive([Delivery(endpoint="d", dedupe=name, job=name, body=LARGE)] * 2) == [True, False]
            row = msgspec.structs.replace(row, state="submitted", provider_id=name)
            assert store.swap(row, was=("created", 1))
            ended = msgspec.structs.replace(
                row,
                state="succeeded",
                input=b"",
                resolved_s=1.0,
                result=store.put_body(name.encode() * 2000),
                revision=1,
            )
            assert store.swap(ended, was=("submitted", 1))
            assert not store.swap(row, was=("created", 1))
            done.append(name)
            steps[who] += 1
        store.close()
        return done

    with ThreadPoolExecutor(4) as threads:
        lives = [threads.submit(live, who) for who in range(4)]
        for kill in range(3):
            before = list(steps)
            while not all(now > was for now, was in zip(steps, before, strict=True)):
                assert not any(one.done() for one in lives)
                time.sleep(0.001)
            own_valkey.kill()
            own_valkey.start()
            if kill == 2:
                go_on.set()
        names = {name for one in lives for name in one.result()}
    store = open_store(url)
    rows = store.completed("g")
    assert {row.id for row in rows} == names
    for row in rows:
        assert store.body(row.result) == row.id.encode() * 2000
    assert {delivery.job for _, delivery in store.unapplied(limit=10_000)} == names
    assert store.open_jobs() == 0
    assert store.due(10.0) == []
    store.close()


def test_without_append_only_the_store_is_made_again(caplog: pytest.LogCaptureFixture, own_valkey: Valkey) -> None:
    """Everything is gone, which is said; callback URLs stay right; and it goes on."""
    store, other = (open_store(own_valkey.url("emptied")) for _ in range(2))
    store.add([_row()])
    key = store.instance_key()
    with own_valkey.client() as client:
        client.flushall()
    with caplog.at_level(logging.WARNING, "spanwire.jobs"):
        store.add([_row()])
        other.receive([Delivery(endpoint="d/h", dedupe="a", job="job-1")])
    assert "is empty" in caplog.text
    assert len(other.unapplied()) == 1
    again = open_store(own_valkey.url("emptied"))
    assert again.instance_key() == store.instance_key() == other.instance_key() == key
    for one in (store, other, again):
        one.close()


def test_a_server_that_is_gone_is_an_error_that_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who has it may try again; when it is not there at first, too."""
    monkeypatch.setattr("spanwire_webhook.stores.redis_link._TRY_S", 0.05)
    server = Valkey(tmp_path)
    store = open_store(server.url())
    server.stop()
    for call in (lambda: store.get("x"), lambda: store.add([_row()]), lambda: open_store(server.url())):
        with pytest.raises(JobError) as caught:
            call()
        assert caught.value.retryable
    store.close()


def test_a_listener_that_is_closed_while_it_connects_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has taken its connection, and does not say yet which one it is."""
    monkeypatch.setattr(redis_listener, "_LOOK_S", 0.01)
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    asked = threading.Event()

    class Slow(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while text := self.request.recv(65536):
                if b"\r\nID\r\n" in text:
                    asked.set()
                else:
                    self.request.sendall((b"*0" if b"XREVRANGE" in text else b"+OK") + b"\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Slow) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        link = Link(read_url(f"redis://127.0.0.1:{server.server_address[1]}/0"), 1, lambda: None)
        listener = redis_listener.Listener(link)
        assert listener.add(lambda: None)
        assert asked.wait(20)
        listener.close()
        link.close()
        server.shutdown()
        serving.join()
    assert failed == []
    assert not any(thread.name == "spanwire store listener" for thread in threading.enumerate())


# --- durability ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "options", "says", "waits"),
    [
        ({}, {}, None, False),
        ({"appendonly": "no"}, {}, "append-only is off", False),
        ({"appendfsync": "everysec"}, {}, "each write waits", True),
        ({"appendfsync": "everysec"}, {"wait": "no"}, "up to a second of jobs", False),
        ({"appendfsync": "no"}, {}, "half minute", False),
        ({"maxmemory-policy": "allkeys-lru"}, {}, "allkeys-lru", False),
    ],
)
def test_what_may_be_lost_is_said(
    caplog: pytest.LogCaptureFixture,
    own_valkey: Valkey,
    settings: dict[str, str],
    options: dict[str, str],
    says: str | None,
    waits: bool,
) -> None:
    """In one line, when the store is opened."""
    with own_valkey.client() as client:
        usual = {name: client.config_get(name)[name] for name in settings}
        for name, value in settings.items():
            client.config_set(name, value)
        try:
            with caplog.at_level(logging.WARNING, "spanwire.jobs"):
                store = open_store(own_valkey.url(**options))
            assert store._link.waits is waits
            assert store.receive([Delivery(endpoint="d/h", dedupe="a")]) == [True]
            store.close()
        finally:
            for name, value in usual.items():
                client.config_set(name, value)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (says is not None)
    assert all(says in line for line in lines if says)


@pytest.mark.parametrize(("refused", "waits"), [("-config", True), ("-config -info -waitaof", False)])
def test_a_server_that_does_not_say_is_waited_for(
    caplog: pytest.LogCaptureFixture, own_valkey: Valkey, refused: str, waits: bool
) -> None:
    """As managed services refuse CONFIG. Where nothing can be waited for either, that is said."""
    with own_valkey.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "app", "reset", "on", ">hunter2", "~*", "&*", "+@all", *refused.split()
        )
    url = own_valkey.url().replace("://", "://app:hunter2@")
    with caplog.at_level(logging.WARNING, "spanwire.jobs"):
        store = open_store(url)
    assert store._link.waits is waits
    assert ("CONFIG GET is refused" in caplog.text) is not waits
    assert store.receive([Delivery(endpoint="d/h", dedupe=refused)]) == [True]
    store.close()
    assert "hunter2" not in caplog.text + repr(store)


def test_append_only_is_switched_off(caplog: pytest.LogCaptureFixture, own_valkey: Valkey) -> None:
    """While we wait for it: that is said once, and it goes on."""
    with own_valkey.client() as client:
        client.config_set("appendfsync", "everysec")
        try:
            store = open_store(own_valkey.url())
            client.config_set("appendonly", "no")
            caplog.clear()
            with caplog.at_level(logging.WARNING, "spanwire.jobs"):
                store.add([_row(1), _row(2)])
                store.add([_row(3)])
        finally:
            client.config_set("appendonly", "yes")
            client.config_set("appendfsync", "always")
    assert len(caplog.records) == 1
    assert "switched off" in caplog.text
    assert store.open_jobs() == 3
    store.close()


def test_a_write_that_is_not_on_the_disk_in_time_is_an_error(
    monkeypatch: pytest.MonkeyPatch, own_valkey: Valkey
) -> None:
    """The sender of a webhook is told to come again; it is then known, and waited for as well."""
    monkeypatch.setattr("spanwire_webhook.stores.redis_link._DISK_MS", 1)
    store = open_store(own_valkey.url())
    delivery = Delivery(endpoint="d/h", dedupe="a")
    with own_valkey.client() as client:
        try:
            client.config_set("appendfsync", "no")  # which never says that it is on the disk
            store._link.waits = True
            for _ in range(2):
                with pytest.raises(JobError, match="on the disk") as caught:
                    store.receive([delivery])
                assert caught.value.retryable
        finally:
            client.config_set("appendfsync", "always")
    assert store.receive([delivery]) == [False]
    store.close()


# --- who refuses us -----------------------------------------------------------------------------------------------------


def test_a_wrong_password_is_a_wrong_configuration(own_valkey: Valkey) -> None:
    """And is not shown."""
    with own_valkey.client() as client:
        client.execute_command("ACL", "SETUSER", "who", "reset", "on", ">right", "~*", "+@all")
    with pytest.raises(ConfigurationError, match="refuses us") as caught:
        open_store(own_valkey.url().replace("://", "://who:hunter2@"))
    assert "hunter2" not in str(caught.value)


def test_over_tls(shared_valkey: Valkey, tmp_path: Path) -> None:
    """With its authority named; nobody else's server is believed."""
    authority = ThrowAwayCA()
    (tmp_path / "ca.pem").write_text(authority.pem)
    context = authority.server_context("127.0.0.1")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with relay(shared_valkey.port, context) as one:
        url = f"valkeys://127.0.0.1:{one.port}?prefix=tls"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(JobError, match="certificate"):
            patch.setattr("spanwire_webhook.stores.redis_link._TRY_S", 0.0)
            open_store(url)
        store = open_store(f"{url}&cacert={tmp_path}/ca.pem")
        store.add([_row(input=LARGE)])
        assert store.get("job-1") == _row(input=LARGE)
        store.close()


def test_over_a_unix_socket(shared_valkey: Valkey) -> None:
    """By its path."""
    store = open_store(f"redis+unix://{shared_valkey.socket}?prefix=unix")
    store.add([_row()])
    assert store.open_jobs() == 1
    assert str(shared_valkey.socket) in repr(store)
    store.close()


def test_a_full_server_says_so(own_valkey: Valkey) -> None:
    """Nothing is written in part, and what is there can be read."""
    store = open_store(own_valkey.url())
    store.add([_row(1)])
    with own_valkey.client() as client:
        client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(JobError, match="full") as caught:
                store.add([_row(2), _row(3)])
        finally:
            client.config_set("maxmemory", "0")
    assert caught.value.retryable
    assert store.get("job-1") == _row(1)
    assert store.open_jobs() == 1
    store.close()


def test_a_body_for_which_there_was_no_room_is_not_taken_as_received(shared_valkey: Valkey) -> None:
    """A full server refuses the large body, and takes the small script after it. Its sender is not told that all is well."""
    store = open_store(shared_valkey.url())
    store.add([_row(1, state="submitted", input=b"")])
    came = Delivery(endpoint="d/h", dedupe="large", job="job-1", body=LARGE)
    with pytest.MonkeyPatch.context() as refused:
        refused.setattr(store, "_kept", lambda body, commands: OUTSIDE + b"refused here")
        for write in (
            lambda: store.receive([came]),
            lambda: store.add([_row(2, input=LARGE)]),
            lambda: store.swap(_row(1, state="running", input=LARGE), was=("submitted", 1)),
            lambda: store.swap(_row(1, state="succeeded", result=OUTSIDE + b"refused here"), was=("submitted", 1)),
        ):
            with pytest.raises(JobError, match="body") as caught:
                write()
            assert caught.value.retryable
    assert store.get("job-2") is None
    assert store.get("job-1") == _row(1, state="submitted", input=b"")
    assert store.receive([came]) == [True]
    assert [one.body for _, one in store.unapplied()] == [LARGE]
    store.close()


def test_a_primary_that_has_become_a_replica_is_left() -> None:
    """It goes on answering on the connections that we have; the name leads to another one, as a relay's port does here."""
    with valkey() as old, valkey() as new, relay(old.port) as name:
        store = open_store(old.url("p").replace(f":{old.port}/", f":{name.port}/"))
        store.add([_row(1, state="submitted")])
        with old.client() as old_client, new.client() as new_client:
            new_client.replicaof("127.0.0.1", old.port)
            while new_client.exists("{p}:j:job-1") == 0:
                time.sleep(0.01)
            new_client.replicaof("NO", "ONE")
            old_client.replicaof("127.0.0.1", new.port)
        name.to(new.port)
        assert store.swap(_row(1, state="running"), was=("submitted", 1))
        store.close()


# --- a cluster ----------------------------------------------------------------------------------------------------------


def test_keys_that_are_on_another_node_are_found() -> None:
    """A cluster of two; the URL names the one that has none of our keys."""
    with valkey(**{"cluster-enabled": "yes"}) as first, valkey(**{"cluster-enabled": "yes"}) as second:
        with first.client() as one, second.client() as two:
            two.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            two.execute_command("CLUSTER", "SET-CONFIG-EPOCH", 2)
            one.execute_command("CLUSTER", "MEET", "127.0.0.1", second.port, second.bus)
            while one.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                time.sleep(0.05)
        store = open_store(first.url())
        woken = threading.Event()
        stop = store.subscribe(woken.set)
        store.add([_row(1), _row(2)])
        assert woken.wait(30)
        stop()
        store.receive([Delivery(endpoint="d/h", dedupe="a", job="job-1", body=LARGE)])
        assert store.open_jobs() == 2
        assert len(store.unapplied()) == 1
        store.close()
