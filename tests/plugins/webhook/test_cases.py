"""Known failures of webhooks, from the receiver through the store to the job: each resolved once, whatever comes."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from spanwire_webhook.dialects import dialects
from spanwire_webhook.settings import ReceiverSettings
from spanwire_webhook.signatures import sign_baseten

from spanwire.jobs.apply import apply_deliveries, learn
from spanwire.jobs.contract import JobRow, Seen
from spanwire.jobs.ids import new_id
from spanwire.transport import Dialect

from .fakes import BASETEN_SECRET, NOW, SECRET, SETTINGS, Yard, said, signed

OLD_SECRET, NEW_SECRET = BASETEN_SECRET, "whsec_xT0fJ1xzXp5IFVvHjUuOIaVhmiJ4BIb2CJNA2pkx"


VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "signatures.json").read_text())


@pytest.fixture
def yard() -> Iterator[Yard]:
    made = Yard()
    yield made
    made.close()


def deliver(yard: Yard, path: str, body: bytes, *, id: str = "msg_1") -> int:
    return yard.post(path, signed(body, id=id), body).status


def apply(yard: Yard) -> int:
    """What a runner does; how many jobs it has brought to their end."""
    waiting = yard.sqlite.unapplied()
    return sum(
        applied.learned is not None and applied.learned.resolved
        for applied in apply_deliveries(yard.sqlite, waiting, lambda row: yard.codecs.get(row.dialect), now_s=NOW)
    )


def row(yard: Yard, job: str) -> JobRow:
    found = yard.sqlite.get(job)
    assert found is not None
    return found


def test_the_same_delivery_twice_together_late_and_out_of_order(yard: Yard) -> None:
    job = yard.open_job()
    path, body = yard.path("generic", job), b'{"id":"job_1","status":"succeeded","output":"ab"}'
    assert deliver(yard, path, body) == 204
    yard.now_s += 1
    assert deliver(yard, path, body) == 200
    assert apply(yard) == 1
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(deliver(yard, path, body))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200, 200]
    before = row(yard, job)
    assert deliver(yard, path, said("job_1", "processing"), id="msg_2") == 204
    assert deliver(yard, path, body, id="msg_3") == 204  # a second id for the same result
    assert apply(yard) == 0
    assert yard.sqlite.unapplied() == []
    after = row(yard, job)
    assert (after.state, after.resolved_by, after.resolved_s) == ("succeeded", "webhook", before.resolved_s)
    assert yard.sqlite.body(after.result) == body
    assert (yard.count("duplicate"), yard.count("stored")) == (3, 3)


def test_without_an_id_the_body_tells_one_from_another(yard: Yard) -> None:
    job = yard.open_job("runpod")
    path = yard.path("runpod", job)
    assert [yard.post(path, [], body).status for body in (said(), said(), said("p1", "processing"), b"x", b"x", b"y")] == [
        204, 200, 204, 204, 200, 204
    ]  # fmt: skip


#: The row is written before anything is sent.
ORDERS = [
    order for order in itertools.permutations(["row", "webhook", "ack"]) if order.index("row") < order.index("ack")
]


@pytest.mark.parametrize("order", ORDERS)
def test_the_result_may_come_before_the_acknowledgement_and_before_the_row(yard: Yard, order: tuple[str, ...]) -> None:
    job, body = new_id(), said("p9")
    resolved = 0
    for step in order:
        if step == "row":
            yard.sqlite.add([JobRow(id=job, dialect="generic", state="submitting", created_s=NOW, due_s=NOW + 60)])
        elif step == "webhook":
            assert deliver(yard, yard.path("generic", job), body) == 204
        else:
            learn(yard.sqlite, job, Seen("submitted", provider_id="p9"), by="ack", now_s=NOW)
        resolved += apply(yard)
    assert resolved == 1
    assert row(yard, job).state == "succeeded"


def test_an_account_wide_webhook_waits_for_the_acknowledgement(yard: Yard) -> None:
    job, body = yard.open_job("openai"), said("resp_9")
    assert deliver(yard, "/openai", body) == 204
    assert apply(yard) == 0
    learn(yard.sqlite, job, Seen("submitted", provider_id="resp_9"), by="ack", now_s=NOW)
    assert apply(yard) == 1
    assert row(yard, job).state == "succeeded"


def test_a_job_of_nobody_is_kept_answered_and_forgotten(yard: Yard) -> None:
    assert deliver(yard, yard.path("generic"), said("job_unknown")) == 204
    assert apply(yard) == 0
    assert yard.sqlite.sweep(NOW + 79 * 3600) == 0
    assert yard.sqlite.sweep(NOW + 81 * 3600) == 1


@pytest.mark.parametrize(
    "secrets", [(OLD_SECRET,), (NEW_SECRET,), (NEW_SECRET, OLD_SECRET)], ids=["old", "new", "both"]
)
def test_a_sender_that_replaces_its_secret(yard: Yard, secrets: tuple[str, ...]) -> None:
    yard.again(ReceiverSettings(secrets={"baseten": secrets}))
    body = said()
    both = f"{sign_baseten(NEW_SECRET, body)},{sign_baseten(OLD_SECRET, body)}"
    assert yard.post(yard.path("baseten"), [("X-BASETEN-SIGNATURE", both)], body).status == 204


def test_an_empty_body_has_the_provider_asked_at_once(yard: Yard) -> None:
    job = yard.open_job("runpod", poll_s=NOW + 1000)
    assert yard.post(yard.path("runpod", job), [], b"").status == 204
    assert apply(yard) == 0
    assert row(yard, job).poll_s == NOW


def test_one_that_is_too_large_has_the_provider_asked_at_once(yard: Yard) -> None:
    yard.again(ReceiverSettings(secrets=SETTINGS.secrets, body_limit_bytes=10))
    job = yard.open_job(poll_s=NOW + 1000)
    assert deliver(yard, yard.path("generic", job), said()) == 413
    apply(yard)
    assert (row(yard, job).state, row(yard, job).poll_s) == ("submitted", NOW)


def test_a_stale_one_resolves_and_says_so(yard: Yard) -> None:
    job, body = yard.open_job(), said()
    assert yard.post(yard.path("generic", job), signed(body, at_s=NOW - 400), body).status == 204
    assert apply(yard) == 1
    assert row(yard, job).flags == ("stale",)


def test_nothing_unverified_resolves_anything(yard: Yard) -> None:
    job, body = yard.open_job(), said()
    path = yard.path("generic", job)
    yard.again(ReceiverSettings(secrets={"generic": ("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",)}))
    assert deliver(yard, path, body) == 401
    assert apply(yard) == 0
    yard.again(ReceiverSettings(secrets={"generic": (SECRET,)}))
    assert yard.receiver.verify_again() == (1, 1)
    assert apply(yard) == 1
    assert row(yard, job).state == "succeeded"


def signed_by_fal(body: bytes) -> list[tuple[str, str]]:
    """With the key of the vectors."""
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(VECTORS["signing_keys"]["fal_seeds_hex"][0]))
    said = ("r-1", "u-1", str(int(NOW)))
    signature = key.sign("\n".join((*said, hashlib.sha256(body).hexdigest())).encode()).hex()
    names = ("Request-Id", "User-Id", "Timestamp", "Signature")
    return [(f"X-Fal-Webhook-{name}", value) for name, value in zip(names, (*said, signature), strict=True)]


HEADERS: dict[str, Callable[[bytes], list[tuple[str, str]]]] = {
    "standard": signed,
    "baseten": lambda body: [("x-baseten-signature", sign_baseten(BASETEN_SECRET, body))],
    "fal": signed_by_fal,
    "gemini": signed,
    "none": lambda _: [],
}


#: fal signs with keys of its own, which nobody else has: its scheme is tested with keys made for that.
RECEIVED = [dialect for dialect in dialects() if dialect.codec.scheme != "fal"]


@pytest.mark.parametrize("dialect", RECEIVED, ids=lambda dialect: dialect.name)
def test_every_dialect_of_ours_can_be_received(yard: Yard, dialect: Dialect) -> None:
    codec = dialect.codec
    secret = BASETEN_SECRET if codec.scheme == "baseten" else SECRET
    yard.codecs[dialect.name] = codec
    yard.again(ReceiverSettings(secrets={} if codec.scheme == "none" else {dialect.name: (secret,)}))
    if codec.scheme == "fal":
        yard.receiver._key_sets["fal"].replace(VECTORS["key_sets"]["fal"])
    path = f"/{dialect.name}" if codec.callback == "account" else yard.path(dialect.name)
    body = b'{"id":"p1","request_id":"p1","status":"processing","type":"response.completed","data":{"id":"p1"}}'
    headers = HEADERS[codec.scheme](body)
    new = 200 if dialect.name == "runpod" else 204  # which takes nothing else for an answer
    assert [yard.post(path, headers, body).status for _ in range(2)] == [new, 200]
    assert yard.inbox()[0].provider_id == "p1"
    assert yard.inbox()[0].flags == ()


def test_an_old_attempts_result_is_the_jobs(yard: Yard) -> None:
    job = yard.open_job(attempt=2)
    assert deliver(yard, yard.path("generic", job, attempt=1), said()) == 204
    assert apply(yard) == 1
