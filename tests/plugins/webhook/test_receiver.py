"""The receiver: what is believed, what is stored, and what is answered."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_webhook import receiver as receiver_module
from spanwire_webhook.committer import Committer
from spanwire_webhook.keys import KeySet
from spanwire_webhook.receiver import SELF_CHECK, Reception
from spanwire_webhook.settings import ReceiverSettings
from spanwire_webhook.signatures import sign_baseten
from spanwire_webhook.url_mac import URLMac

from spanwire.jobs.contract import Delivery
from spanwire.jobs.ids import new_id
from tests.support import run

from .fakes import BASETEN_SECRET, NOW, SECRET, SETTINGS, FakeCodec, Yard, said, signed

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "signatures.json").read_text())
OTHER_SECRET = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="


@pytest.fixture
def yard() -> Iterator[Yard]:
    made = Yard()
    yield made
    made.close()


def with_settings(**more: Any) -> Yard:
    return Yard(ReceiverSettings(**{"secrets": SETTINGS.secrets, **more}))


# --- addresses --------------------------------------------------------------------------------------------------------


def test_new_is_204_and_again_is_200(yard: Yard) -> None:
    job, body = yard.open_job(), said()
    path = yard.path("generic", job)
    assert yard.post(path, signed(body), body).status == 204
    assert yard.post(path, signed(body, at_s=NOW + 5), body).status == 200  # signed anew, the same id
    (delivery,) = yard.inbox()
    assert delivery == Delivery(
        endpoint=f"generic/{job}.1",
        dedupe="msg_1",
        job=job,
        attempt=1,
        provider_id="p1",
        received_s=NOW,
        headers=dict(signed(body)),
        body=body,
    )
    assert (yard.count("stored"), yard.count("duplicate"), yard.count("received")) == (1, 1, 2)


@pytest.mark.parametrize("before", ["", "/mounted/here"])
@pytest.mark.parametrize("after", ["", "/"])
def test_both_spellings_of_an_address_are_served(yard: Yard, before: str, after: str) -> None:
    body = said()
    assert yard.post(before + yard.path("generic") + after, signed(body), body).status == 204


@pytest.mark.parametrize("path", ["/", "/generic", "/generic/x", "/wp-login.php", "/openai/x", "/none", ""])
def test_what_is_no_address_of_ours_is_404_before_the_body_is_read(yard: Yard, path: str) -> None:
    reception = yard.begin(path, signed(b""))
    assert reception.answer is not None
    assert (reception.answer.status, reception.reads) == (404, False)
    assert yard.count("bad_path") == 1


def test_a_wrong_mac_is_404_and_another_instance_key_of_ours_is_not(yard: Yard) -> None:
    path = yard.path("generic")
    assert yard.begin(path[:-1] + ("A" if path[-1] != "A" else "B")).answer is not None
    assert yard.count("bad_mac") == 1
    other = ReceiverSettings(instance_keys=(b"k" * 32,), secrets=SETTINGS.secrets)
    yard.again(other)
    assert yard.begin(path).reads  # the store's own key is good beside it
    assert yard.begin(yard.path("generic")).reads


def test_only_post_is_allowed_and_only_on_our_addresses(yard: Yard) -> None:
    for method in ("GET", "HEAD", "PUT", "OPTIONS"):
        answer = yard.begin(yard.path("generic"), method=method).answer
        assert answer is not None
        assert (answer.status, dict(answer.headers)[b"allow"]) == (405, b"POST")
    answer = yard.begin("/", method="GET").answer
    assert answer is not None
    assert answer.status == 404


def test_an_account_has_one_address_for_all_its_jobs_which_only_a_signature_opens(yard: Yard) -> None:
    body = said("resp_1")
    assert yard.post("/openai", signed(body), body).status == 204
    assert yard.post("/hooks/openai/", signed(body), body).status == 200
    (delivery,) = yard.inbox()
    assert (delivery.endpoint, delivery.job, delivery.provider_id) == ("openai", None, "resp_1")
    assert yard.post("/openai", signed(body, secret=OTHER_SECRET), body).status == 401
    assert yard.quarantine() == []  # anybody can write there: nothing is kept
    yard.again(ReceiverSettings())
    assert yard.post("/openai", signed(body), body).status == 404
    yard.again(ReceiverSettings(unsigned=frozenset({"openai"})))
    assert yard.post("/openai", signed(body), body).status == 404


def test_geminis_address_for_all_jobs_is_opened_by_the_secret_and_never_by_a_token(yard: Yard) -> None:
    """Anybody can have Google make out a token to an address, for a job of his own."""
    row = next(row for row in VECTORS["vectors"] if row["id"] == "gemini-ok")
    token, body = [tuple(pair) for pair in row["headers"]], said("v1_x")
    assert yard.post("/gemini", token, b"{}").status == 404  # there is no secret
    settings = ReceiverSettings(secrets={"gemini": (SECRET,)}, audience=(row["audience"],))
    yard.again(settings)
    yard.receiver._key_sets["gemini"].replace(VECTORS["key_sets"]["gemini"])
    yard.now_s = row["now"]
    assert yard.post("/gemini", token, b"{}").body == b"wrong_audience"
    assert yard.post(yard.path("gemini"), token, b"{}").status == 204
    assert yard.post("/gemini", signed(body, at_s=row["now"]), body).status == 204
    assert yard.post(yard.path("gemini"), signed(body, id="m9", at_s=row["now"]), body).status == 204
    assert not yard.begin("/gemini", signed(body, secret=OTHER_SECRET, at_s=row["now"])).wants_keys()
    assert [delivery.provider_id for delivery in yard.inbox() if delivery.job is None] == ["v1_x"]


@pytest.mark.parametrize("older", [False, True])
def test_a_token_is_for_the_address_by_whichever_key_made_it(older: bool) -> None:
    keys = (b"1" * 32, b"2" * 32)
    yard = with_settings(instance_keys=keys, public_url="https://hooks.example/x")
    try:
        reception = yard.begin(URLMac(keys[older:]).path("gemini", new_id()), [])
        assert reception._audience()[older].startswith("https://hooks.example/x/gemini/")
        assert reception._where.ok
        assert (
            URLMac(keys[older:]).url("https://hooks.example/x", "gemini", reception._where.job) in reception._audience()
        )
    finally:
        yard.close()


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("Bearer the newer token of cog's", 204),
        ("bearer  the older token of cog's", 204),
        ("Bearer somebody else's token", 401),
        ("Basic the newer token of cog's", 401),
        ("the newer token of cog's", 401),
        (None, 401),
    ],
)
def test_cogs_token_is_asked_for_besides_the_address(given: str | None, status: int) -> None:
    tokens = ("the newer token of cog's", "the older token of cog's")
    yard, body = with_settings(secrets={"cog": tokens}), said()
    try:
        headers = [] if given is None else [("Authorization", given)]
        assert yard.post(yard.path("cog"), headers, body).status == status
        assert len(yard.quarantine()) == (status == 401)
        assert yard.post("/cog", headers, body).status == 404
        assert "older" not in repr(yard.quarantine() + yard.inbox())  # no token is kept
        assert "somebody" not in repr(yard.quarantine())
        yard.again(ReceiverSettings(secrets={"cog": ("somebody else's token",)}))
        right = given == "Bearer somebody else's token"
        assert yard.receiver.verify_again() == (right, status == 401)
        yard.again(ReceiverSettings())
        assert yard.post(yard.path("cog"), [], body).status == 204  # no token, no question
    finally:
        yard.close()


# --- probes -----------------------------------------------------------------------------------------------------------


def probed(yard: Yard, path: str, method: str = "GET") -> tuple[int, bytes]:
    answer = yard.begin(path, method=method).finish()
    return answer.status, answer.body


def test_probes_say_whether_it_lives_and_whether_the_store_can_be_written(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spanwire_webhook.receiver._READY_S", -1.0)
    for path in ("/healthz", "/hooks/healthz/", "/readyz", "/hooks/readyz?x=1"):
        assert probed(yard, path) == (200, b"ok\n")
        assert probed(yard, path, "HEAD")[0] == 200
        assert probed(yard, path, "POST")[0] == 404
    yard.store.down = True
    assert probed(yard, "/readyz") == (503, b"the store cannot be written\n")
    assert probed(yard, "/healthz")[0] == 200
    yard.store.down = False
    assert probed(yard, "/readyz")[0] == 200
    yard.receiver.draining = True
    assert probed(yard, "/readyz") == (503, b"draining\n")
    assert probed(yard, "/healthz")[0] == 200
    body = said()
    assert yard.post(yard.path("generic"), signed(body), body).status == 204  # what comes is taken to the end
    assert yard.count("received") == 5  # probes, other than those by POST, are no webhooks
    assert yard.sqlite.unapplied() == yard.sqlite.quarantined() == []


def test_the_store_is_not_asked_for_every_probe(yard: Yard) -> None:
    for _ in range(5):
        assert probed(yard, "/readyz")[0] == 200
    assert len(yard.store.batches) == 1


def test_what_becomes_of_webhooks_is_told_with_the_dialect(yard: Yard) -> None:
    told: list[tuple[str, str]] = []
    yard.receiver.tell = lambda event, dialect: told.append((event, dialect))
    body = said("resp_1")
    path = yard.path("generic")
    for headers in (signed(body), signed(body), signed(body, secret=OTHER_SECRET)):
        yard.post(path, headers, body)
    yard.post("/openai", signed(body), body)
    yard.post("/someones-guess", [], body)
    assert told == [
        ("received", "generic"),
        ("stored", "generic"),
        ("received", "generic"),
        ("duplicate", "generic"),
        ("received", "generic"),
        ("bad_signature", "generic"),
        ("quarantined", "generic"),
        ("received", "openai"),
        ("stored", "openai"),
        ("orphan", "openai"),
        ("received", ""),
        ("bad_path", ""),
    ]
    yard.receiver.tell = lambda event, dialect: 1 / 0  # type: ignore[assignment]
    assert yard.post(path, signed(body, id="m7"), body).status == 204


# --- signatures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [row for row in VECTORS["vectors"] if row["scheme"] != "url_mac"], ids=lambda row: row["id"]
)
def test_every_row_of_signatures_in_strict_mode(row: dict[str, Any]) -> None:
    dialect = {"standard_webhooks": "generic", "standard_webhooks_v1a": "generic", "gemini_jwt": "gemini"}.get(
        row["scheme"], row["scheme"]
    )
    secrets = (*row.get("secrets", ()), *row.get("public_keys", ()))
    yard = with_settings(
        secrets={dialect: secrets} if secrets else {},
        strict=True,
        audience=(row.get("audience", ""),),
        keys_urls={"fal": "", "gemini": ""},
    )
    if "key_set" in row:
        yard.receiver._key_sets[dialect].replace(VECTORS["key_sets"][row["key_set"]])
    yard.now_s = row["now"]
    answer = yard.post(
        yard.path(dialect), [tuple(pair) for pair in row["headers"]], base64.b64decode(row["body_base64"])
    )
    yard.close()
    assert answer.status == row["http_status"]
    if answer.status == 401:
        assert answer.body.decode() == row["reason"]


def test_a_wrong_signature_is_401_kept_aside_and_believed_once_the_secret_is_right(yard: Yard) -> None:
    job, body = yard.open_job("baseten"), said()
    path = yard.path("baseten", job)
    headers = [("X-BASETEN-SIGNATURE", sign_baseten(OTHER_SECRET, body)), ("X-BASETEN-REQUEST-ID", "p1")]
    assert yard.post(path, headers, body).status == 401
    assert yard.post(path, headers, body).status == 401  # again: kept once
    (kept,) = yard.quarantine()
    assert (kept.verified, kept.flags, kept.body, kept.job) == (False, ("unverified",), body, job)
    assert yard.inbox() == []
    assert yard.sqlite.unapplied() == []
    assert yard.receiver.verify_again() == (0, 1)
    yard.again(ReceiverSettings(secrets={"baseten": (BASETEN_SECRET, OTHER_SECRET)}))
    yard.now_s += 100_000
    assert yard.receiver.verify_again() == (1, 1)
    assert yard.quarantine() == []
    ((_, waiting),) = yard.sqlite.unapplied(job=job)
    assert (waiting.verified, waiting.body, waiting.provider_id, waiting.dedupe) == (True, body, "p1", "p1:succeeded")
    assert yard.post(path, headers, body).status == 200  # and the same one, come again, is known


def test_a_signature_that_was_in_time_when_it_came_is_in_time_later(yard: Yard) -> None:
    job, body = yard.open_job(), said()
    assert yard.post(yard.path("generic", job), signed(body, secret=OTHER_SECRET), body).status == 401
    yard.now_s += 86_400
    yard.again(ReceiverSettings(secrets={"generic": (OTHER_SECRET,)}, strict=True))
    assert yard.receiver.verify_again() == (1, 1)
    assert yard.sqlite.unapplied(job=job)[0][1].flags == ()


def test_an_unverified_one_does_not_stand_in_the_way_of_the_real_one(yard: Yard) -> None:
    body = said()
    path = yard.path("generic")
    assert yard.post(path, signed(body, secret=OTHER_SECRET), body).status == 401
    assert yard.post(path, signed(body), body).status == 204


def test_without_a_secret_nothing_is_believed_unless_it_is_said_so() -> None:
    yard, body = with_settings(secrets={}), said()
    try:
        answer = yard.post(yard.path("baseten"), [], body)
        assert (answer.status, answer.body) == (401, b"unknown_key")
        yard.again(ReceiverSettings(unsigned=frozenset({"baseten"})))
        assert yard.post(yard.path("baseten"), [], body).status == 204
        assert yard.receiver.verify_again() == (1, 1)
    finally:
        yard.close()


def test_servers_that_cannot_sign_are_believed_by_the_address(yard: Yard) -> None:
    body = said()
    assert yard.post(yard.path("runpod"), [("Content-Type", "application/json")], body).status == 204
    (delivery,) = yard.inbox()
    assert (delivery.dedupe, delivery.verified) == ("p1:succeeded", True)


def test_a_dialect_that_is_not_installed_here_is_kept_aside(yard: Yard) -> None:
    assert yard.post(yard.path("brand-new"), [], b"{}").status == 401
    assert yard.quarantine()[0].endpoint.startswith("brand-new/")
    assert yard.receiver.verify_again() == (0, 1)


def test_quarantine_has_a_quota() -> None:
    yard = with_settings(quarantine_bytes=20_000)
    try:
        path = yard.path("generic")
        assert [yard.post(path, signed(b"x", secret=OTHER_SECRET), bytes([n]) * 8000).status for n in range(4)] == [
            401
        ] * 4
        assert len(yard.quarantine()) == 2
        for _ in range(5):  # the same again takes no more room
            yard.post(path, signed(b"x", secret=OTHER_SECRET), bytes([1]) * 10)
        assert len(yard.quarantine()) == 3
        yard.post(path, signed(b"x", secret=OTHER_SECRET), bytes([1]) * 2000)
        assert len(yard.quarantine()) == 3  # no room is left
        yard.again(yard.settings)  # and a new process knows what is there
        yard.post(path, signed(b"x", secret=OTHER_SECRET), bytes([9]) * 2000)
        assert len(yard.quarantine()) == 3
        assert yard.count("bad_signature") == 1
    finally:
        yard.close()


def test_the_quota_is_of_headers_too() -> None:
    yard = with_settings(quarantine_bytes=100_000)
    try:
        path = yard.path("generic")
        for n in range(9):
            headers = [*signed(b"x", secret=OTHER_SECRET), ("x-fal-more", "h" * 30_000)]
            assert yard.post(path, headers, bytes([n])).status == 401
        assert len(yard.quarantine()) == 3
    finally:
        yard.close()


def test_what_a_store_that_is_down_does_not_take_is_not_in_the_quota() -> None:
    yard = with_settings(quarantine_bytes=20_000)
    try:
        path = yard.path("generic")
        yard.store.down = True
        for n in range(5):
            assert yard.post(path, signed(b"x", secret=OTHER_SECRET), bytes([n]) * 8000).status in (401, 503)
        yard.store.down = False
        yard.post(path, signed(b"x", secret=OTHER_SECRET), bytes([9]) * 8000)
        assert len(yard.quarantine()) == 1
    finally:
        yard.close()


@pytest.mark.parametrize("dialect", ["generic", "openai"])
def test_stale_is_taken_and_flagged_if_the_job_is_known(yard: Yard, dialect: str) -> None:
    job, body = yard.open_job(dialect, provider_id="resp_1"), said("resp_1")
    path = yard.path("generic", job) if dialect == "generic" else "/openai"
    assert yard.post(path, signed(body, at_s=NOW - 400), body).status == 204
    assert yard.inbox()[0].flags == ("stale",)
    assert yard.count("stale") == 1
    assert yard.post(path, signed(body, at_s=NOW - 400), body).status == 200
    other = yard.path("generic") if dialect == "generic" else "/openai"
    unknown = said("resp_2")
    assert yard.post(other, signed(unknown, id="m2", at_s=NOW - 400), unknown).status == 401
    assert yard.post(path, signed(body, id="m3", at_s=NOW + 400), body).body == b"too_new"
    yard.again(ReceiverSettings(secrets=SETTINGS.secrets, strict=True))
    assert yard.post(path, signed(body, id="m4", at_s=NOW - 400), body).body == b"too_old"


def test_a_late_one_that_strictness_refused_is_taken_when_strictness_goes(yard: Yard) -> None:
    job, body = yard.open_job(), said()
    yard.again(ReceiverSettings(secrets=SETTINGS.secrets, strict=True))
    assert yard.post(yard.path("generic", job), signed(body, at_s=NOW - 400), body).status == 401
    assert yard.quarantine()[0].flags == ("stale", "unverified")
    assert yard.receiver.verify_again() == (0, 1)
    yard.again(SETTINGS)
    assert yard.receiver.verify_again() == (1, 1)
    assert yard.inbox()[-1].flags == ("stale",)


def test_a_token_is_the_event_and_the_body_is_not(yard: Yard) -> None:
    row = next(row for row in VECTORS["vectors"] if row["id"] == "gemini-body-differs")
    yard.again(ReceiverSettings(audience=(row["audience"],)))
    yard.receiver._key_sets["gemini"].replace(VECTORS["key_sets"]["gemini"])
    yard.now_s = row["now"]
    body = base64.b64decode(row["body_base64"])
    assert yard.post(yard.path("gemini"), [tuple(pair) for pair in row["headers"]], body).status == 204
    (delivery,) = yard.inbox()
    assert delivery.body != body
    assert json.loads(delivery.body)["type"] == "batch.succeeded"


def test_public_keys_are_loaded_when_one_is_unknown(yard: Yard) -> None:
    row = next(row for row in VECTORS["vectors"] if row["id"] == "fal-ok")
    loads: list[str] = []

    def load() -> bytes:
        loads.append("fal")
        return json.dumps(VECTORS["key_sets"]["fal"]).encode()

    keys = KeySet(load=load)
    yard.receiver._key_sets["fal"] = keys
    yard.receiver._verifiers["fal"]._keys = keys  # type: ignore[union-attr]
    yard.now_s = row["now"]
    reception = yard.begin(yard.path("fal"), [tuple(pair) for pair in row["headers"]])
    reception.feed(base64.b64decode(row["body_base64"]))
    assert reception.wants_keys()
    reception.reload_keys()
    assert not reception.wants_keys()
    assert reception.finish().status == 204
    assert loads == ["fal"]
    assert not yard.begin(yard.path("generic"), signed(b"")).wants_keys()


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b'{"a":1e3}', b'{"a":"\\u00e9"}', b'{"a":"x\\/y"}', b'{"a":12345678901234567890.5}', b'{"a":1,"a":2}']
)
def test_raw_bytes_are_what_is_kept(yard: Yard, body: bytes) -> None:
    assert yard.post(yard.path("generic"), signed(body), body, piece=1).status == 204
    assert yard.inbox()[0].body == body


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe{", b"[1]", b"[" * 100_000, b'{"id":1'])
@pytest.mark.parametrize("dialect", ["generic", "runpod"])
def test_what_cannot_be_read_is_stored_and_flagged(yard: Yard, dialect: str, body: bytes) -> None:
    job = yard.open_job(dialect)
    assert yard.post(yard.path(dialect, job), signed(body), body).status == 204
    (delivery,) = yard.inbox()
    assert (delivery.flags, delivery.body, delivery.job) == (("unparsed",), body, job)
    assert yard.count("unparsed") == 1
    assert yard.post(yard.path(dialect, job), signed(body), body).status == 200


def test_a_schema_that_breaks_is_no_reason_to_lose_anything(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: Any) -> Any:
        raise KeyError("their mistake")

    monkeypatch.setattr(FakeCodec, "webhook", breaks)
    monkeypatch.setattr(FakeCodec, "dedupe", breaks)
    body = said()
    assert yard.post(yard.path("generic"), signed(body), body).status == 204
    assert yard.inbox()[0].dedupe.startswith("sha256:")
    assert "cannot read a webhook" in caplog.text


@pytest.mark.parametrize("id", ['"\\ud800"', '"a\\u0000b"', "7", "[1]", "{}", "null"])
def test_an_id_that_no_store_can_hold_does_not_get_into_one(yard: Yard, id: str) -> None:
    body = b'{"id":%s,"status":"succeeded"}' % id.encode()
    assert yard.post(yard.path("runpod", yard.open_job("runpod")), [], body).status == 204
    ((_, delivery),) = yard.sqlite.unapplied()
    assert (delivery.provider_id, delivery.body) == (None, body)
    assert delivery.dedupe.isprintable()


def test_a_body_is_not_in_memory_while_it_arrives(yard: Yard) -> None:
    piece = b"x" * 65_536
    reception = yard.begin(yard.path("generic"), signed(b""))
    tracemalloc.start()
    for _ in range(500):
        reception.feed(piece)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reception.size == 500 * 65_536
    assert peak < 4 * 1024 * 1024
    reception.abandon()


def test_a_long_key_is_cut_to_its_hash(yard: Yard) -> None:
    body = said()
    assert yard.post(yard.path("generic"), signed(body, id="m" * 5000), body).status == 204
    assert len(yard.inbox()[0].dedupe) < 100


@pytest.mark.parametrize("declared", [True, False])
def test_too_large_is_413_and_a_word_to_the_poller(declared: bool) -> None:
    yard = with_settings(body_limit_bytes=1000, body_limits={"runpod": 2000})
    try:
        job, body = yard.open_job(), b"x" * 1001
        headers = [*signed(body), *([("Content-Length", "1001")] if declared else [])]
        reception = yard.begin(yard.path("generic", job), headers)
        assert reception.reads != declared
        reception.feed(body)
        assert not reception.reads
        assert reception.finish().status == 413
        (delivery,) = yard.inbox()
        assert (delivery.body, delivery.job) == (b"", job)
        assert "too_large" in delivery.flags
        assert yard.sqlite.unapplied(job=job)
        assert yard.post(yard.path("generic", job), headers, body).status == 413
        assert len(yard.inbox()) == 1
        assert yard.post(yard.path("generic"), signed(b"x" * 1000), b"x" * 1000).status == 204
        assert yard.post(yard.path("runpod"), [], b"x" * 2000).status == 204
        assert yard.post("/openai", headers, body).status == 413
        assert yard.count("too_large") == 3
    finally:
        yard.close()


@pytest.mark.parametrize("length", ["9" * 400, "-1", "x", "²"])
def test_a_length_of_any_kind_raises_nothing(yard: Yard, length: str) -> None:
    yard.post(yard.path("generic"), [("content-length", length)], b"")


def test_a_large_body_goes_through_a_file() -> None:
    yard = with_settings(spool_bytes=1000)
    try:
        body = said(text="x" * 300_000)
        reception = yard.begin(yard.path("generic"), signed(body))
        for start in range(0, len(body), 999):
            reception.feed(body[start : start + 999])
        spool = reception._body
        assert not isinstance(spool, bytearray)
        assert spool is not None
        assert reception.finish().status == 204
        assert spool.closed
        assert yard.inbox()[0].body == body
        body = said(text="y" * 5000)
        reception = yard.begin(yard.path("generic"), signed(body))
        reception.feed(body)
        spool = cast(Any, reception._body)
        assert reception.give_up("disconnected").status == 408
        assert spool.closed
        assert len(yard.inbox()) == 1
        assert yard.count("disconnected") == 1
    finally:
        yard.close()


@pytest.mark.parametrize(
    ("encoding", "encoded"),
    [
        ("gzip", gzip.compress(said(), mtime=0)),
        ("X-GZIP", gzip.compress(said(), mtime=0)),
        ("gzip", gzip.compress(said()[:5], mtime=0) + gzip.compress(said()[5:], mtime=0)),
        ("deflate", zlib.compress(said())),
        ("identity", said()),
    ],
)
def test_an_encoded_body_is_verified_as_it_came_and_kept_decoded(yard: Yard, encoding: str, encoded: bytes) -> None:
    job = yard.open_job()
    assert yard.post(yard.path("generic", job), signed(encoded, content_encoding=encoding), encoded).status == 204
    (delivery,) = yard.inbox()
    assert (delivery.body, delivery.flags) == (said(), ())
    assert "content-encoding" not in delivery.headers


def test_a_bomb_is_413_and_not_unpacked() -> None:
    yard = with_settings(body_limit_bytes=100_000)
    try:
        bomb = gzip.compress(b"\0" * 50_000_000)
        assert len(bomb) < 100_000
        path, headers = yard.path("generic"), signed(bomb, content_encoding="gzip")
        tracemalloc.start()
        assert yard.post(path, headers, bomb).status == 413
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2_000_000
        assert yard.inbox()[0].body == b""
        many = gzip.compress(b"") * 3000
        assert yard.post(yard.path("generic"), signed(many, content_encoding="gzip"), many).status == 204
        assert yard.inbox()[1].flags == ("undecoded", "unparsed")
    finally:
        yard.close()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("br", said()), ("gzip, gzip", said()), ("gzip", said()), ("gzip", gzip.compress(said(), mtime=0)[:-9])],
)
def test_what_cannot_be_decoded_is_kept_as_it_came(yard: Yard, encoding: str, body: bytes) -> None:
    assert yard.post(yard.path("generic"), signed(body, content_encoding=encoding), body).status == 204
    (delivery,) = yard.inbox()
    assert (delivery.body, delivery.flags) == (body, ("undecoded", "unparsed"))
    assert delivery.headers["content-encoding"] == encoding


def test_an_encoded_one_that_was_kept_aside_is_decoded_when_it_is_believed(yard: Yard) -> None:
    job, encoded = yard.open_job(), gzip.compress(said(), mtime=0)
    headers = signed(encoded, secret=OTHER_SECRET, content_encoding="gzip")
    assert yard.post(yard.path("generic", job), headers, encoded).status == 401
    assert yard.quarantine()[0].body == encoded
    yard.again(ReceiverSettings(secrets={"generic": (OTHER_SECRET,)}))
    assert yard.receiver.verify_again() == (1, 1)
    assert [delivery.body for _, delivery in yard.sqlite.unapplied(job=job)] == [said()]


# --- headers ----------------------------------------------------------------------------------------------------------


def test_a_trace_is_kept_for_a_link_and_credentials_are_not(yard: Yard) -> None:
    body = said()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = [
        *signed(body),
        ("Traceparent", trace),
        ("Authorization", "Bearer s3cret"),
        ("Cookie", "a=b"),
        ("X-Other", "1"),
    ]
    assert yard.post(yard.path("generic"), headers, body).status == 204
    kept = yard.inbox()[0].headers
    assert kept.keys() == {"webhook-id", "webhook-timestamp", "webhook-signature", "traceparent"}
    assert kept["traceparent"] == trace


def test_a_hundred_thousand_headers_are_refused(yard: Yard) -> None:
    answer = yard.begin(yard.path("generic"), [("a", "b")] * 100_000).answer
    assert answer is not None
    assert answer.status == 431


def test_large_headers_are_not_all_kept(yard: Yard) -> None:
    body = said()
    headers = [*signed(body), *((f"webhook-{n}", "x" * 8000) for n in range(20))]
    assert yard.post(yard.path("generic"), headers, body).status == 204
    assert sum(map(len, yard.inbox()[0].headers.values())) < 33_000


# --- the store --------------------------------------------------------------------------------------------------------


def test_503_while_the_store_is_down_and_only_then(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    body, path = said(), yard.path("generic")
    yard.store.down = True
    answer = yard.post(path, signed(body), body)
    assert (answer.status, dict(answer.headers)[b"retry-after"]) == (503, b"5")
    assert yard.count("store_down") == 1
    assert "disk is full" in caplog.text
    assert SECRET not in caplog.text
    yard.store.down = False
    assert yard.post(path, signed(body), body).status == 204


def test_one_that_a_store_cannot_take_does_not_harm_the_others(yard: Yard) -> None:
    class Picky:
        def receive(self, deliveries: list[Delivery]) -> list[bool]:
            if any(delivery.dedupe == "bad" for delivery in deliveries):
                raise ValueError("this one")
            return [True] * len(deliveries)

    receptions: list[Reception] = []
    for key in ("a", "bad", "c"):
        receptions.append(yard.begin(yard.path("generic"), signed(b"{}", id=key)))
        receptions[-1].feed(b"{}")
    yard.receiver.store = cast(Any, Picky())
    yard.receiver.commit(receptions)
    assert [cast(Any, reception.answer).status for reception in receptions] == [204, 503, 204]


def test_a_store_that_was_waited_for_in_vain_is_not_waited_for_again(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each of hundreds: their senders would be gone, and so would be who stops the receiver."""
    monkeypatch.setattr(receiver_module, "_DOWN_S", -1.0)  # however short the wait was
    receptions: list[Reception] = []
    for key in ("a", "b", "c"):
        receptions.append(yard.begin(yard.path("generic"), signed(b"{}", id=key)))
        receptions[-1].feed(b"{}")
    yard.store.down = True
    yard.receiver.commit(receptions)
    assert yard.store.batches == [3]
    assert [cast(Any, reception.answer).status for reception in receptions] == [503, 503, 503]
    assert yard.count("store_down") == 3


def test_whoever_waits_is_told_after_it_is_durable_and_only_of_what_is_new_and_right() -> None:
    told: list[str] = []
    yard = Yard(stored=lambda deliveries: told.extend(delivery.dedupe for delivery in deliveries))
    try:
        body, path = said(), yard.path("generic")
        yard.post(path, signed(body), body)
        yard.post(path, signed(body), body)
        yard.post(path, signed(body, id="x", secret=OTHER_SECRET), body)
        assert told == ["msg_1"]
        yard.receiver._stored = lambda _: 1 / 0  # type: ignore[assignment]
        assert yard.post(path, signed(body, id="msg_2"), body).status == 204
    finally:
        yard.close()


def test_what_comes_together_is_one_commit_and_each_gets_its_own_answer(yard: Yard) -> None:
    committer = Committer(yard.receiver)
    path = yard.path("generic")
    gate, first = threading.Event(), threading.Event()
    receive = yard.store.receive

    def gated(deliveries: Any) -> list[bool]:
        first.set()
        gate.wait()
        return receive(deliveries)

    yard.store.receive = gated  # type: ignore[method-assign]

    def begin(id: str) -> Reception:
        reception = yard.begin(path, signed(b"{}", id=id))
        reception.feed(b"{}")
        return reception

    async def main() -> list[int]:
        tasks = [asyncio.create_task(committer.finished(begin("m0")))]
        await asyncio.to_thread(first.wait)
        gone = asyncio.create_task(committer.finished(begin("gone")))
        tasks += [asyncio.create_task(committer.finished(begin(f"m{n % 50}"))) for n in range(1, 101)]
        await asyncio.sleep(0)
        gone.cancel()
        gate.set()
        return [answer.status for answer in await asyncio.gather(*tasks)]

    assert run(main) == [204] * 50 + [200] * 51
    assert yard.store.batches == [1, 101]
    assert any(delivery.dedupe == "gone" for delivery in yard.inbox())
    committer.close()
    assert committer.finish(begin("again")).status == 204  # it starts anew
    committer.close()


def test_large_bodies_are_not_all_in_one_commit(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanwire_webhook.committer._MOST_BYTES", 100)
    committer = Committer(yard.receiver)
    gate, first = threading.Event(), threading.Event()
    receive = yard.store.receive

    def gated(deliveries: Any) -> list[bool]:
        first.set()
        gate.wait()
        return receive(deliveries)

    yard.store.receive = gated  # type: ignore[method-assign]

    async def main() -> None:
        tasks = []
        for n in range(5):
            reception = yard.begin(yard.path("runpod"))
            reception.feed(b"x" * 60)
            tasks.append(asyncio.create_task(committer.finished(reception)))
            await asyncio.sleep(0)
            if n == 0:
                await asyncio.to_thread(first.wait)
        gate.set()
        await asyncio.gather(*tasks)

    run(main)
    assert yard.store.batches == [1, 2, 2]
    committer.close()


def test_a_loop_that_is_closed_meanwhile_is_nobodys_trouble(yard: Yard) -> None:
    committer = Committer(yard.receiver)
    gate = threading.Event()
    receive = yard.store.receive
    yard.store.receive = lambda deliveries: (gate.wait() and receive(deliveries)) or []  # type: ignore[method-assign]

    async def main() -> None:
        reception = yard.begin(yard.path("generic"), signed(b"{}"))
        reception.feed(b"{}")
        task = asyncio.create_task(committer.finished(reception))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    gate.set()
    committer.close()
    assert len(yard.inbox()) == 1


def test_the_thread_goes_when_there_is_nothing_to_do(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanwire_webhook.committer._IDLE_S", 0.01)
    committer = Committer(yard.receiver)
    reception = yard.begin(yard.path("generic"), signed(b"{}"))
    reception.feed(b"{}")
    assert committer.finish(reception).status == 204
    for thread in threading.enumerate():
        if thread.name == "spanwire-webhook":
            thread.join()
    assert committer._thread is None


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_the_self_check_says_what_arrived_and_stores_nothing(yard: Yard) -> None:
    job = new_id()
    answer = yard.post(yard.path(SELF_CHECK, job), [], b"abc")
    echo = json.loads(answer.body)
    assert (answer.status, echo["id"], echo["bytes"], echo["time"]) == (200, job, 3, NOW)
    assert echo["sha256"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert yard.post(yard.path(SELF_CHECK), [], b"x" * 70_000).status == 413
    assert (yard.inbox(), yard.quarantine()) == ([], [])


def test_settings_show_no_secret_anywhere() -> None:
    settings = ReceiverSettings(secrets={"baseten": (BASETEN_SECRET,)}, instance_keys=(b"k" * 32,))
    shown = f"{settings!r} {settings} {settings.__rich_repr__()}"
    assert BASETEN_SECRET not in shown
    assert "kkkk" not in shown
    assert "'baseten': 1" in shown


def test_settings_from_the_environment() -> None:
    environ = {
        "SPANWIRE_WEBHOOK_SECRETS_BASETEN": f"{BASETEN_SECRET}, {SECRET}",
        "SPANWIRE_WEBHOOK_SECRETS_OPENAI": "",
        "SPANWIRE_WEBHOOK_KEYS": "ab" * 32,
        "SPANWIRE_WEBHOOK_PUBLIC_URL": "https://h.example/x",
        "OTHER": "1",
    }
    settings = ReceiverSettings.from_environment(environ, strict=True)
    assert settings.secrets == {"baseten": (BASETEN_SECRET, SECRET)}
    more: dict[str, Any] = {"secrets": {"generic": SECRET}, "unsigned": ["cog"]}  # as people write them
    both = ReceiverSettings.from_environment(environ, **more)
    assert both.secrets == {"baseten": (BASETEN_SECRET, SECRET), "generic": (SECRET,)}
    assert both.unsigned == {"cog"}
    assert settings.instance_keys == (b"\xab" * 32,)
    assert (settings.public_url, settings.strict) == ("https://h.example/x", True)


@pytest.mark.parametrize(
    "url", ["ftp://h", "https://", "https://h/x?q=1", "https://u:p@h/", "h.example", "https://h/#x"]
)
def test_a_public_url_that_is_none_is_refused(url: str) -> None:
    from spanwire.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="public URL"):
        ReceiverSettings(public_url=url)


@pytest.fixture(scope="module")
def shared() -> Iterator[Yard]:
    made = Yard()
    yield made
    made.close()


@given(
    st.sampled_from(["POST", "GET", "x"]),
    st.sampled_from(["generic", "baseten", "runpod", "gemini", "fal", "brand-new"]) | st.text(max_size=20),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["content-length", "content-encoding", "webhook-id", "webhook-signature", "webhook-timestamp", "x"]
            ),
            st.text(max_size=20),
        ),
        max_size=5,
    ),
    st.binary(max_size=50),
)
def test_no_request_raises_and_every_one_is_answered(
    shared: Yard, method: str, dialect: str, headers: list[tuple[str, str]], body: bytes
) -> None:
    try:
        path = shared.path(dialect)
    except Exception:  # noqa: BLE001 - no dialect's name
        path = f"/{dialect}"
    reception = shared.receiver.begin(method, path, headers)
    if reception.reads:
        reception.feed(body)
    assert reception.finish().status in (200, 204, 401, 404, 405, 413)
