from __future__ import annotations

import pytest
from spanwire_grpc.metadata import QUERY, fixed, incoming, merged

import spanwire
from spanwire.errors import ConfigurationError


def endpoint(**more: object) -> spanwire.Endpoint:
    return spanwire.Endpoint("grpc://h:1", **more)  # type: ignore[arg-type]


def test_the_calls_own_headers_win_and_names_are_lower_case() -> None:
    where = endpoint(headers={"X-A": "1", "X-B": "2"}, query={"t": "a b"})
    same = fixed(where, {"authorization": "Bearer k"})
    assert dict(merged(same, {"x-b": "3"}, where)) == {
        "authorization": "Bearer k",
        "x-a": "1",
        "x-b": "3",
        QUERY: "t=a+b",
    }


def test_names_that_end_in_bin_carry_bytes() -> None:
    where = endpoint()
    assert merged({}, {"x-bin": "é"}, where) == (("x-bin", "é".encode()),)
    assert incoming((("x-bin", b"\x01\x02"), ("a", "1"), ("a", "2"))) == {"x-bin": "AQI=", "a": "1, 2"}
    assert incoming(None) == {}


@pytest.mark.parametrize("name", ["te", "Content-Type", "grpc-timeout", "user-agent", "host"])
def test_what_grpc_writes_by_itself_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="written by gRPC"):
        fixed(endpoint(headers={name: "secret"}), {})


def test_what_metadata_cannot_carry_is_refused_without_its_value() -> None:
    for headers in ({"x!y": "secret"}, {"x-a": "sécret"}):
        with pytest.raises(ConfigurationError) as caught:
            merged({}, headers, endpoint())
        assert "secret" not in str(caught.value)
        assert "sécret" not in str(caught.value)
