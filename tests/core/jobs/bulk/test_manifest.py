"""Ids that follow from the calls."""

from __future__ import annotations

import re
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spanwire
from spanwire.errors import ConfigurationError
from spanwire.jobs.bulk.manifest import MOST_SHARDS, Manifest, encoded, job_id, unlike_any

A = spanwire.Call.embeddings("e", ["a"])
B = spanwire.Call.embeddings("e", ["b"])


def digest(*calls: spanwire.Call, **more: str) -> bytes:
    named = {"group": "g", "origin": "http://h:1/", "dialect": "d", "rules": "r", **more}
    manifest = Manifest(**named)
    for call in calls:
        manifest.add(encoded(call))
    return manifest.digest()


def test_whatever_differs_makes_another_manifest() -> None:
    same = digest(A, B)
    assert same == digest(A, B)
    others = [digest(B, A), digest(A), digest(A, B, B), digest()]
    others += [digest(A, B, **{name: "x"}) for name in ("group", "origin", "dialect", "rules")]
    assert len({same, *others}) == len(others) + 1
    assert unlike_any() != unlike_any()


def test_the_order_of_fields_says_nothing() -> None:
    one = spanwire.Call("chat", "m", {"messages": [], "top_p": 1, "temperature": 0})
    two = spanwire.Call("chat", "m", {"temperature": 0, "top_p": 1, "messages": []})
    assert encoded(one) == encoded(two)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="JSON"):
        encoded(spanwire.Call("chat", "m", {"messages": object()}))


@settings(max_examples=50, deadline=None)
@given(
    st.binary(min_size=32, max_size=32),
    st.integers(0, MOST_SHARDS - 2),
    st.integers(0, 5),
    st.sampled_from(["", "/0", "/1", "/1/0"]),
)
def test_ids_are_uuids_of_version_8_that_grow(manifest: bytes, number: int, round: int, half: str) -> None:
    job = job_id(manifest, f"{number}{half}", round)
    found = uuid.UUID(job)
    assert str(found) == job
    assert (found.version, found.variant) == (8, uuid.RFC_4122)
    assert job == job_id(manifest, f"{number}{half}", round)
    assert job < job_id(manifest, f"{number + 1}", 0)
    assert job != job_id(manifest, f"{number}{half}", round + 1)
    assert job != job_id(manifest, f"{number}{half}/0", round)
    assert job != job_id(
        bytes(32 - len(manifest[:31])) + manifest[1:] if manifest[0] else b"\1" + manifest[1:], f"{number}{half}", round
    )
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", job)


def test_too_many_shards_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="several parts"):
        job_id(bytes(32), str(MOST_SHARDS), 0)
