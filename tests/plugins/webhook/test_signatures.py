"""Signatures: every row of signatures.json, other people's verifiers where they are right, and inputs of any kind."""

from __future__ import annotations

import base64
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
import standardwebhooks.webhooks as library
from hypothesis import given
from hypothesis import strategies as st
from spanwire_webhook.keys import KeySet
from spanwire_webhook.signatures import (
    Baseten,
    Bearer,
    Fal,
    Gemini,
    GeminiJWT,
    StandardWebhooks,
    Verdict,
    Verifier,
    sign_baseten,
    sign_standard,
    verifier_for,
)
from spanwire_webhook.url_mac import URLMac, parse_instance_key

from spanwire.errors import ConfigurationError

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "signatures.json").read_text())
ROWS: list[dict[str, Any]] = VECTORS["vectors"]
SIGNED = [row for row in ROWS if row["scheme"] != "url_mac"]
SECRET = "whsec_IjCW3yJpnCExt6cBFFiTOw5YeOrObR2GBC/eP8BvzP0="
NOW = 1796040000
BODY = b'{"object":"event","id":"evt_1","type":"response.completed","created_at":1796039990,"data":{"id":"resp_1"}}'


def verifier_of(row: dict[str, Any]) -> Verifier:
    match row["scheme"]:
        case "standard_webhooks" | "standard_webhooks_v1a":
            return StandardWebhooks([*row.get("secrets", ()), *row.get("public_keys", ())])
        case "baseten":
            return Baseten(row["secrets"])
        case "fal":
            return Fal(KeySet(VECTORS["key_sets"][row["key_set"]]))
        case "gemini_jwt":
            return GeminiJWT(KeySet(VECTORS["key_sets"][row["key_set"]]))
    raise AssertionError(row["scheme"])


def judge(
    verifier: Verifier, headers: Any, body: bytes, *, now: float = NOW, audience: str = "", piece: int = 7
) -> Verdict:
    check = verifier.begin([tuple(pair) for pair in headers], audience=[audience])
    for start in range(0, len(body), piece):
        check.feed(body[start : start + piece])
    return check.verdict(now)


def headers(signature: str, *, id: str = "msg_1", timestamp: object = NOW) -> list[tuple[str, str]]:
    return [("webhook-id", id), ("webhook-timestamp", str(timestamp)), ("webhook-signature", signature)]


def test_the_file_has_all_its_rows() -> None:
    assert len(ROWS) == 87
    assert {row["reason"] for row in ROWS} == set(VECTORS["reasons"])


@pytest.mark.parametrize("row", SIGNED, ids=lambda row: row["id"])
@pytest.mark.parametrize("piece", [1, 7, 1_000_000])
def test_every_row(row: dict[str, Any], piece: int) -> None:
    body = base64.b64decode(row["body_base64"])
    verdict = judge(
        verifier_of(row), row["headers"], body, now=row["now"], audience=row.get("audience", ""), piece=piece
    )
    assert (verdict.reason, verdict.ok, verdict.signature_ok) == (row["reason"], row["valid"], row["signature_ok"])
    if verdict.signature_ok and row["scheme"] != "gemini_jwt":
        assert verdict.timestamp == row["timestamp"]


@pytest.mark.parametrize("row", [row for row in ROWS if row["scheme"] == "url_mac"], ids=lambda row: row["id"])
def test_every_row_of_addresses(row: dict[str, Any]) -> None:
    found = URLMac([parse_instance_key(key) for key in row["secrets"]]).read(row["path"])
    assert (found.reason, found.ok) == (row["reason"], row["valid"])


@pytest.mark.parametrize("row", VECTORS["secret_parsing"], ids=lambda row: row["why"])
def test_secrets(row: dict[str, Any]) -> None:
    secret = row["secret"]
    if not row["ok"]:
        with pytest.raises(ConfigurationError) as caught:
            StandardWebhooks([secret])
        encoded = secret.removeprefix("whsec_")
        assert not encoded or encoded not in str(caught.value)
        return
    import hashlib
    import hmac

    key = bytes.fromhex(row["key_hex"])
    if row["scheme"] == "baseten":
        digest = hmac.new(key, BODY, hashlib.sha256).hexdigest()
        assert judge(Baseten([secret]), [("X-Baseten-Signature", f"v1={digest}")], BODY).ok
    else:
        mac = base64.b64encode(hmac.new(key, b"msg_1.%d." % NOW + BODY, hashlib.sha256).digest()).decode()
        assert judge(StandardWebhooks([secret]), headers(f"v1,{mac}"), BODY).ok


@pytest.mark.parametrize(
    ("secret", "hint"),
    [
        (f"v1,{SECRET}", "belongs to signatures"),
        ("whpk_AAAAAAAAAAAAAAAAAAAAAAAA", "Ed25519 has 32"),
        ("whpk_", "fewer than 16"),
        ("whsec_é", "not base64"),
    ],
)
def test_secrets_that_are_none_say_so(secret: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        StandardWebhooks([secret])


def test_no_secret_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one"):
        StandardWebhooks([])
    with pytest.raises(ConfigurationError, match="at least one"):
        Baseten([])
    with pytest.raises(ConfigurationError, match="can be guessed"):
        Baseten(["short"])


def test_worked_vectors_are_what_we_sign() -> None:
    assert (
        sign_standard(SECRET, "msg_2b7e0c4f91", 1796039996, BODY) == "v1,p3XMCI8PQ5jtNdoE0BdKF3+uSU1V3nkmqpDlEHRqfy8="
    )
    body = (
        b'{"request_id":"9f1c","model_id":"m1","deployment_id":"d1","type":"async_request_completed",'
        b'"time":"2026-11-30T12:00:00.000000Z","data":{"text":"caf\\u00e9"},"errors":[]}'
    )
    digest = "2715e14e87e2542e03720a69b20c9ed5dcb0793e48a6881978cd313d9ea7b83a"
    assert sign_baseten("whsec_Wxk4Bbd1t4Vtldwt1czDSZvQDHouq1uTdAZFG023", body) == f"v1={digest}"


# C28, as far as it is not a row: (a) in all three receivers, and the entries that are skipped.
NEW = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="


@pytest.mark.parametrize("secrets", [[SECRET], [NEW], [NEW, SECRET]])
def test_rotation_on_either_side(secrets: list[str]) -> None:
    both = f"{sign_standard(NEW, 'msg_1', NOW, BODY)} {sign_standard(SECRET, 'msg_1', NOW, BODY)}"
    assert judge(StandardWebhooks(secrets), headers(both), BODY).ok


@pytest.mark.parametrize("before", ["v1a,AAAA ", "garbage ", "v1,*** ", "v1, ", ", ", "  "])
def test_entries_that_cannot_be_read_are_skipped(before: str) -> None:
    good = sign_standard(SECRET, "msg_1", NOW, BODY)
    assert judge(StandardWebhooks([SECRET]), headers(before + good), BODY).ok
    assert judge(StandardWebhooks([SECRET]), headers("v1,***"), BODY).reason == "no_usable_signature"


@pytest.mark.parametrize(
    "body", [b'{"a":1e3}', b'{"a":"\\u00e9"}', b'{"a":"x\\/y"}', b'{"a":12345678901234567890.5}', b'{"a":1,"a":2}']
)
def test_raw_bytes_verify_and_no_other_spelling_does(body: bytes) -> None:
    signature = headers(sign_standard(SECRET, "msg_1", NOW, body))
    assert judge(StandardWebhooks([SECRET]), signature, body).ok
    again = json.dumps(json.loads(body)).encode()
    assert judge(StandardWebhooks([SECRET]), signature, again).reason == "mismatch"


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_two_lines_of_one_header_are_refused(name: str) -> None:
    lines = headers(sign_standard(SECRET, "msg_1", NOW, BODY))
    extra = [(name.title(), value) for other, value in lines if other == name]
    assert judge(StandardWebhooks([SECRET]), lines + extra, BODY).reason == "duplicate_header"


def test_a_key_that_was_missing_is_found_after_the_set_is_loaded_again() -> None:
    row = next(row for row in ROWS if row["id"] == "gemini-ok")
    keys = KeySet(load=lambda: json.dumps(VECTORS["key_sets"]["gemini"]).encode())
    check = GeminiJWT(keys).begin([tuple(pair) for pair in row["headers"]], audience=[row["audience"]])
    assert check.verdict(row["now"]).reason == "unknown_key"
    assert keys.reload()
    verdict = check.verdict(row["now"])
    assert verdict.ok
    assert verdict.payload is not None
    assert json.loads(verdict.payload)["type"] == "batch.succeeded"


def test_a_token_without_an_end_or_with_demands_is_refused() -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    key = rsa.generate_private_key(65537, 2048)
    numbers = key.public_key().public_numbers()

    def b64(raw: bytes) -> str:
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    document = {"keys": [{"kty": "RSA", "kid": "k", "n": b64(numbers.n.to_bytes(256, "big")), "e": "AQAB"}]}

    def token(head: dict[str, Any], claims: bytes) -> str:
        signed = f"{b64(json.dumps(head).encode())}.{b64(claims)}"
        return f"{signed}.{b64(key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def reason(head: dict[str, Any], claims: bytes) -> str:
        verifier = GeminiJWT(KeySet(document))
        return judge(verifier, [("Webhook-Signature", token(head, claims))], b"", audience="me").reason

    good = {"alg": "RS256", "kid": "k"}
    assert reason(good, b'{"aud":"me","exp":%d}' % NOW) == "ok"
    assert reason(good, b'{"aud":"me","exp":%d}' % (NOW - 300)) == "ok"
    assert reason(good, b'{"aud":"me","exp":%d}' % (NOW - 301)) == "too_old"
    assert reason(good, b'{"aud":"me"}') == "malformed_timestamp"
    assert reason(good, b'{"aud":"me","exp":"never"}') == "malformed_timestamp"
    assert reason(good, b'{"aud":[],"exp":%d}' % NOW) == "wrong_audience"
    assert reason(good, b'{"exp":1%s}' % (b"0" * 300)) == "wrong_audience"
    assert reason({**good, "crit": ["exp"]}, b'{"aud":"me","exp":%d}' % NOW) == "no_usable_signature"


def test_schemes_by_name() -> None:
    keys = {"fal": KeySet(), "gemini": KeySet()}
    assert isinstance(verifier_for("standard", [SECRET], {}), StandardWebhooks)
    assert isinstance(verifier_for("baseten", [SECRET], {}), Baseten)
    assert isinstance(verifier_for("fal", [], keys), Fal)
    assert isinstance(verifier_for("gemini", [], keys), Gemini)
    assert isinstance(verifier_for("gemini", [SECRET], {}), Gemini)
    assert isinstance(verifier_for("bearer", [SECRET], {}), Bearer)
    assert verifier_for("bearer", [], {}) is None
    assert [verifier_for(name, [], {}) for name in ("none", "standard", "baseten", "fal", "gemini")] == [None] * 5
    with pytest.raises(ConfigurationError, match="rot13"):
        verifier_for("rot13", [], {})


# --- other people's verifiers -----------------------------------------------------------------------------------------

#: Where they are wrong: facts that the rows' `why` tells.
OPENAI_IS_WRONG = {
    "std-non-utf8-body", "std-underscore-timestamp", "std-plus-timestamp", "std-bare-base64", "std-non-ascii",
    "std-no-signature", "std-no-id", "std-duplicate-timestamp", "std-long-timestamp",
}  # fmt: skip
STANDARD_IS_WRONG = {
    "std-malformed-part-skipped", "std-double-space", "std-non-utf8-body", "std-float-timestamp-floor",
    "std-bare-base64", "std-unpadded", "std-non-ascii", "std-duplicate-timestamp",
}  # fmt: skip


def comparable(wrong: set[str]) -> list[Any]:
    return [
        pytest.param(row, id=row["id"])
        for row in ROWS
        if row["scheme"] == "standard_webhooks" and row["id"] not in wrong and len(row["secrets"]) == 1
    ]


@pytest.mark.parametrize("row", comparable(OPENAI_IS_WRONG))
def test_openai_agrees_where_it_is_right(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    monkeypatch.setattr("time.time", lambda: row["now"])
    client = openai.OpenAI(api_key="k", webhook_secret=row["secrets"][0])
    try:
        client.webhooks.verify_signature(base64.b64decode(row["body_base64"]), dict(row["headers"]))
        accepted = True
    except (openai.InvalidWebhookSignatureError, ValueError):
        accepted = False
    finally:
        client.close()
    assert accepted == row["valid"]


@pytest.mark.parametrize("row", comparable(STANDARD_IS_WRONG))
def test_standardwebhooks_agrees_where_it_is_right(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:

    class Then(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Then:
            return cls.fromtimestamp(row["now"], tz)

    monkeypatch.setattr(library, "datetime", Then)
    try:
        verifier = library.Webhook(row["secrets"][0])
        verifier.verify(base64.b64decode(row["body_base64"]), dict(row["headers"]), json_parse=False)
        accepted = True
    except library.WebhookVerificationError:
        accepted = False
    assert accepted == row["valid"]


# --- any input --------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from([
    "webhook-id", "Webhook-Timestamp", "webhook-signature", "X-BASETEN-SIGNATURE", "x-baseten-request-id",
    "X-Fal-Webhook-Request-Id", "X-Fal-Webhook-User-Id", "X-Fal-Webhook-Timestamp", "X-Fal-Webhook-Signature", "other",
])  # fmt: skip
VALUES = st.one_of(
    st.text(max_size=40),
    st.binary(max_size=40),
    st.just(str(NOW)),
    st.binary(min_size=32, max_size=32).map(lambda raw: f"v1,{base64.b64encode(raw).decode()}"),
    st.binary(min_size=64, max_size=64).map(lambda raw: f"v1a,{base64.b64encode(raw).decode()}"),
    st.binary(min_size=32, max_size=32).map(lambda raw: f"v1={raw.hex()}"),
    st.binary(min_size=64, max_size=64).map(bytes.hex),
    st.lists(st.binary(max_size=60), min_size=1, max_size=4).map(
        lambda parts: ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)
    ),
    st.sampled_from(["[" * 9000, base64.urlsafe_b64encode(b"[" * 9000).decode().rstrip("=") + ".e30.AAAA"]),
)
VERIFIERS: list[Verifier] = [
    StandardWebhooks([SECRET, "whpk_KreB6GtNlmGXQ3vfVcLH4bDTgGK/utdmyFgGy0dIwtY="]),
    Baseten([SECRET]),
    Fal(KeySet(VECTORS["key_sets"]["fal"])),
    GeminiJWT(KeySet(VECTORS["key_sets"]["gemini"])),
]


@given(st.lists(st.tuples(NAMES, VALUES), max_size=8), st.binary(max_size=100), st.floats() | st.integers())
def test_no_input_raises_and_none_is_believed(lines: list[tuple[str, Any]], body: bytes, now: float) -> None:
    for verifier in VERIFIERS:
        verdict = judge(verifier, lines, body, now=now)
        assert not verdict.signature_ok
        assert verdict.reason in VECTORS["reasons"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["keys", "kty", "crv", "x", "n", "e", "kid", "alg", "use"]), inner)
        ),
    )
)
def test_no_key_set_raises(document: Any) -> None:
    keys = KeySet(json.dumps({"keys": document}).encode())
    assert keys.ed25519 == []
    assert keys.rs256 == {}


@given(st.binary(max_size=200), st.integers(0, 199), st.integers(0, 255))
def test_any_changed_byte_is_noticed(body: bytes, at: int, to: int) -> None:
    signature = headers(sign_standard(SECRET, "msg_1", NOW, body))
    changed = bytearray(body)
    if at < len(body):
        changed[at] = to
    assert judge(StandardWebhooks([SECRET]), signature, bytes(changed)).ok == (bytes(changed) == body)
