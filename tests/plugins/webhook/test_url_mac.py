"""Addresses of callbacks, and the ids in them."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_webhook.url_mac import URLMac, new_instance_key, parse_instance_key

from spanwire.errors import ConfigurationError

KEY = "eb29ac9c2719c9cbb6b20157a6368055c81de582655ef5f5c62d25b9e8abfc1d"
JOB = "0197d0c0-1234-7abc-8def-0123456789ab"
MAC = URLMac([parse_instance_key(KEY)])


def test_the_worked_vector() -> None:
    assert MAC.path("runpod", JOB, 1) == f"/runpod/{JOB}.1.92gTxJbIqdXKiat1EfWZq8"
    assert (
        MAC.url("https://h.example/x/", "runpod", JOB) == f"https://h.example/x/runpod/{JOB}.1.92gTxJbIqdXKiat1EfWZq8"
    )


@pytest.mark.parametrize("before", ["", "/hooks", "/a/b/c", "//"])
@pytest.mark.parametrize("after", ["", "/", "?x=1", "/?x=/y"])
def test_whatever_stands_around_it_does_not_matter(before: str, after: str) -> None:
    found = MAC.read(before + MAC.path("cog", JOB, 7) + after)
    assert (found.reason, found.provider, found.job, found.attempt) == ("ok", "cog", JOB, 7)


@given(st.integers(0, 70), st.characters())
def test_any_changed_character_is_noticed(at: int, to: str) -> None:
    path = MAC.path("baseten", JOB, 12)
    assert len(path) == 71
    changed = path[:at] + to + path[at + 1 :]
    assert MAC.read(changed).ok == (changed == path)


@given(st.text())
def test_no_path_raises(path: str) -> None:
    assert not MAC.read(path).ok


@pytest.mark.parametrize(
    ("provider", "job", "attempt"),
    [
        ("Run", JOB, 1),
        ("a/b", JOB, 1),
        ("a", JOB.upper(), 1),
        ("a", "x", 1),
        ("a", JOB, 0),
        ("a", str(uuid.UUID(int=4)), 1),
    ],
)
def test_what_no_address_can_say(provider: str, job: str, attempt: int) -> None:
    with pytest.raises(ConfigurationError):
        MAC.path(provider, job, attempt)


def test_keys() -> None:
    assert len(parse_instance_key(new_instance_key())) == 32
    for bad in ("", "zz", "abcd"):
        with pytest.raises(ConfigurationError):
            parse_instance_key(bad)
    with pytest.raises(ConfigurationError):
        URLMac([])
    with pytest.raises(ConfigurationError):
        URLMac([b"short"])
    assert KEY not in repr(MAC)
    assert repr(parse_instance_key(KEY)) not in repr(MAC)
