"""Which proxy: by setting, environment and NO_PROXY."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.endpoint import Endpoint
from spanwire.net.proxies import proxy_for

P = "http://proxy:3128"
Q = "http://other:3128"


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("http://h", {}, None),
        ("http://h", {"http_proxy": P}, (P, "http_proxy")),
        ("http://h", {"HTTP_PROXY": P}, (P, "HTTP_PROXY")),
        ("http://h", {"https_proxy": P}, None),
        ("https://h", {"http_proxy": P}, None),
        ("https://h", {"https_proxy": P}, (P, "https_proxy")),
        ("https://h", {"HTTPS_PROXY": P}, (P, "HTTPS_PROXY")),
        ("ws://h", {"http_proxy": P}, (P, "http_proxy")),
        ("wss://h", {"https_proxy": P}, (P, "https_proxy")),
        ("grpc://h", {"http_proxy": P}, (P, "http_proxy")),
        ("grpcs://h", {"https_proxy": P}, (P, "https_proxy")),
        # lower case first, then ALL_PROXY
        ("http://h", {"HTTP_PROXY": Q, "http_proxy": P}, (P, "http_proxy")),
        ("https://h", {"HTTPS_PROXY": Q, "https_proxy": P}, (P, "https_proxy")),
        ("http://h", {"all_proxy": P}, (P, "all_proxy")),
        ("https://h", {"ALL_PROXY": P}, (P, "ALL_PROXY")),
        ("http://h", {"ALL_PROXY": Q, "all_proxy": P}, (P, "all_proxy")),
        ("http://h", {"all_proxy": Q, "HTTP_PROXY": P}, (P, "HTTP_PROXY")),
        ("http://h", {"http_proxy": "", "HTTP_PROXY": ""}, None),
        # in a CGI process HTTP_PROXY is a client's header
        ("http://h", {"HTTP_PROXY": P, "REQUEST_METHOD": "GET"}, None),
        ("http://h", {"http_proxy": P, "REQUEST_METHOD": "GET"}, (P, "http_proxy")),
        ("http://h", {"HTTP_PROXY": Q, "ALL_PROXY": P, "REQUEST_METHOD": "GET"}, (P, "ALL_PROXY")),
        ("https://h", {"HTTPS_PROXY": P, "REQUEST_METHOD": "GET"}, (P, "HTTPS_PROXY")),
        # a scheme that nobody has rules for
        ("queue://h", {"http_proxy": P, "all_proxy": P}, None),
    ],
)
def test_which_variable(url: str, environment: dict[str, str], expected: tuple[str, str] | None) -> None:
    assert proxy_for(Endpoint(url), environment) == expected


def test_the_setting_wins_over_the_environment() -> None:
    environment = {"http_proxy": Q, "no_proxy": "*"}
    assert proxy_for(Endpoint("http://h", proxy=P), environment) == (P, "Endpoint.proxy")
    assert proxy_for(Endpoint("http://h", proxy=None), {"http_proxy": P}) is None


def test_a_unix_socket_needs_no_proxy() -> None:
    assert proxy_for(Endpoint("http://h", uds="/s"), {"http_proxy": P}) is None
    assert proxy_for(Endpoint("http://h", uds="/s", proxy=P), {}) is None


@pytest.mark.parametrize(
    ("host", "no_proxy", "excluded"),
    [
        ("example.com", "", False),
        ("example.com", "example.com", True),
        ("example.com", "EXAMPLE.com", True),
        ("EXAMPLE.com", "example.com", True),
        ("api.example.com", "example.com", True),
        ("a.b.example.com", "example.com", True),
        ("api.example.com", ".example.com", True),
        ("example.com", ".example.com", True),
        ("api.example.com", "*.example.com", True),
        ("badexample.com", "example.com", False),
        ("example.com.evil.org", "example.com", False),
        ("example.com", "api.example.com", False),
        ("example.com", "com", True),
        ("example.com", "other.org, example.com ,third.org", True),
        ("example.com", "other.org example.com", True),
        ("example.com", ",,", False),
        ("example.com", ".", False),
        ("example.com", "*", True),
        ("example.com", "other.org,*", True),
        ("10.1.2.3", "*", True),
        ("localhost", "localhost", True),
        # ports
        ("example.com:8000", "example.com:8000", True),
        ("example.com:8000", "example.com:8001", False),
        ("example.com:8000", "example.com", True),
        ("api.example.com:8000", "example.com:8000", True),
        ("example.com", "example.com:80", True),
        ("example.com", "example.com:443", False),
        ("10.1.2.3:8000", "10.1.2.3:8000", True),
        ("10.1.2.3:8000", "10.1.2.3:8001", False),
        # addresses and networks
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.4", False),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "10.1.2.99/24", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("10.1.2.3", "2.3", False),
        ("10.1.2.3", "10.0.0.0/8:80", True),
        ("10.1.2.3", "10.0.0.0/99", False),
        ("[::1]", "::1", True),
        ("[::1]", "[::1]", True),
        ("[::1]:8000", "[::1]:8000", True),
        ("[::1]:8000", "[::1]:8001", False),
        ("[::1]", "0:0:0:0:0:0:0:1", True),
        ("[2001:db8::5]", "2001:db8::/32", True),
        ("[2001:db9::5]", "2001:db8::/32", False),
        ("[::1]", "127.0.0.1", False),
        ("10.1.2.3", "nonsense,::/0,10.1.2.3", True),
        ("10.1.2.3", "::/0", False),
    ],
)
def test_no_proxy(host: str, no_proxy: str, excluded: bool) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        found = proxy_for(Endpoint(f"http://{host}"), {"http_proxy": P, name: no_proxy})
        assert found == (None if excluded else (P, "http_proxy"))


def test_no_proxy_in_lower_case_first() -> None:
    environment = {"http_proxy": P, "no_proxy": "other.org", "NO_PROXY": "example.com"}
    assert proxy_for(Endpoint("http://example.com"), environment) == (P, "http_proxy")


@given(st.text(max_size=40), st.sampled_from(["example.com", "10.1.2.3", "[::1]:8000"]))
def test_any_no_proxy_can_be_read(no_proxy: str, host: str) -> None:
    proxy_for(Endpoint(f"http://{host}"), {"http_proxy": P, "no_proxy": no_proxy})
