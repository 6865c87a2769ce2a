"""What an endpoint makes of a channel."""

from __future__ import annotations

from typing import Any

import pytest
import trustme
from spanwire_grpc.channel import settings_of
from spanwire_grpc.transport import GRPCTransport

import spanwire
from spanwire.errors import ConfigurationError


def endpoint(url: str = "grpc://h:1", **more: Any) -> spanwire.Endpoint:
    return spanwire.Endpoint(url, **{"proxy": None, **more})


def options(**more: Any) -> dict[str, int | str]:
    return dict(settings_of(endpoint(**more)).options)


def test_retries_are_ours_and_connections_are_not_shared_behind_our_back() -> None:
    found = options()
    assert found["grpc.enable_retries"] == 0
    assert found["grpc.use_local_subchannel_pool"] == 1
    assert "grpc.keepalive_time_ms" not in found
    assert str(found["grpc.primary_user_agent"]).startswith("spanwire/")


def test_the_limit_on_events_is_the_librarys_limit_on_messages() -> None:
    limits = spanwire.Limits(max_event_bytes=7 * 1024 * 1024)
    assert options(limits=limits)["grpc.max_receive_message_length"] == 7 * 1024 * 1024
    assert options(limits=spanwire.Limits(max_event_bytes=2**40))["grpc.max_receive_message_length"] == 2**31 - 1
    transport = GRPCTransport()
    assert transport.key(endpoint(limits=limits)) != transport.key(endpoint())


@pytest.mark.parametrize(
    ("more", "target"),
    [
        ({}, "dns:///h:1"),
        ({"url": "grpc://h"}, "dns:///h:80"),
        ({"url": "grpcs://h"}, "dns:///h:443"),
        ({"url": "grpc://[::1]:5"}, "dns:///[::1]:5"),
        ({"uds": "/tmp/x.sock"}, "unix:/tmp/x.sock"),
        (
            {"options": {"target": "ipv4:10.0.0.1:1,10.0.0.2:1", "load_balancing": "round_robin"}},
            "ipv4:10.0.0.1:1,10.0.0.2:1",
        ),
    ],
)
def test_where_it_leads(more: dict[str, Any], target: str) -> None:
    assert settings_of(endpoint(**more)).target == target


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"url": "grpc://h:1/v1"}, "knows no paths"),
        ({"options": {"max_streams": 0}}, "max_streams"),
        ({"options": {"max_request_bytes": 2**31}}, "max_request_bytes"),
        ({"options": {"keepalive_s": 0.1}}, "keepalive_s"),
        ({"options": {"load_balancing": "best"}}, "load_balancing"),
        ({"options": {"target": 3}}, "target"),
        ({"options": {"server_name": "x"}}, "write grpcs://"),
        ({"options": {"channel_options": [("grpc.enable_retries", 1)]}}, "Endpoint.retries"),
        ({"options": {"channel_options": "grpc.x"}}, "channel_options"),
        ({"options": {"channel_options": [("grpc.x", None)]}}, "channel_options"),
        ({"options": {"channel_options": [1]}}, "channel_options"),
        ({"uds": "/x", "options": {"target": "dns:///h"}}, "exclude each other"),
        ({"url": "grpcs://h:1", "tls": spanwire.TLS(verify=False)}, "unverified"),
        ({"url": "grpcs://h:1", "tls": spanwire.TLS(ca="/no/such/file")}, "TLS|tls"),
        ({"proxy": "socks5://p:1"}, "HTTP proxies alone"),
        ({"proxy": "https://user:secret@p:1"}, "HTTP proxies alone"),
    ],
)
def test_what_cannot_work_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        GRPCTransport().key(endpoint(**more))
    assert "secret" not in str(caught.value)


def test_the_proxy_is_ours_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options()["grpc.enable_http_proxy"] == 0
    monkeypatch.setenv("http_proxy", "http://user:se%40cret@p:3128")
    monkeypatch.setenv("no_proxy", "other")
    settings = settings_of(endpoint(proxy="env"))
    assert dict(settings.options)["grpc.http_proxy"] == "http://user:se%40cret@p:3128"
    assert "cret" not in repr(settings)
    monkeypatch.setenv("no_proxy", "h")
    assert dict(settings_of(endpoint(proxy="env")).options)["grpc.enable_http_proxy"] == 0


def test_what_the_handshake_sends_is_in_the_key(tmp_path: Any) -> None:
    key = GRPCTransport().key
    assert key(endpoint()) == key(endpoint(api_key="k", headers={"a": "b"}, timeouts=spanwire.Timeouts(total_s=1)))
    assert key(endpoint(options={"target": "dns:///other:1"})) != key(endpoint())
    authority = trustme.CA()
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    one = key(endpoint("grpcs://h:1", tls=spanwire.TLS(ca=str(file))))
    trustme.CA().cert_pem.write_to_path(str(file))  # renewed under its name
    assert key(endpoint("grpcs://h:1", tls=spanwire.TLS(ca=str(file)))) != one


def test_keepalive_is_off_until_it_is_asked_for() -> None:
    found = options(options={"keepalive_s": 30})
    assert found["grpc.keepalive_time_ms"] == 30_000
    assert "grpc.keepalive_permit_without_calls" not in found


def test_further_options_come_last() -> None:
    pairs = settings_of(
        endpoint(options={"channel_options": [("grpc.dns_min_time_between_resolutions_ms", 5)]})
    ).options
    assert pairs[-1] == ("grpc.dns_min_time_between_resolutions_ms", 5)
