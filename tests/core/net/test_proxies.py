"""Which proxy: by setting, environment and NO_PROXY; what its URL says; which way it is used."""

import base64
from collections.abc import Mapping
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.net.proxies import DIRECT, Proxy, parse_proxy, proxy_for, route_for

P = "http://proxy:3128"
Q = "http://other:3128"


def found(endpoint: Endpoint, environment: Mapping[str, str]) -> tuple[str, str] | None:
    proxy = proxy_for(endpoint, environment)
    return None if proxy is None else (f"{proxy.scheme}://{proxy.host}:{proxy.port}", proxy.setting)


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
    assert found(Endpoint(url), environment) == expected


def test_the_setting_wins_over_the_environment() -> None:
    environment = {"http_proxy": Q, "no_proxy": "*"}
    assert found(Endpoint("http://h", proxy=P), environment) == (P, "Endpoint.proxy")
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
        got = found(Endpoint(f"http://{host}"), {"http_proxy": P, name: no_proxy})
        assert got == (None if excluded else (P, "http_proxy"))


def test_no_proxy_in_lower_case_first() -> None:
    environment = {"http_proxy": P, "no_proxy": "other.org", "NO_PROXY": "example.com"}
    assert found(Endpoint("http://example.com"), environment) == (P, "http_proxy")


@given(st.text(max_size=40), st.sampled_from(["example.com", "10.1.2.3", "[::1]:8000"]))
def test_any_no_proxy_can_be_read(no_proxy: str, host: str) -> None:
    proxy_for(Endpoint(f"http://{host}"), {"http_proxy": P, "no_proxy": no_proxy})


# --- a proxy's URL -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://p:3128", Proxy("http", "p", 3128)),
        ("http://p", Proxy("http", "p", 80)),
        ("https://p", Proxy("https", "p", 443)),
        ("HTTPS://P.Example:8443/", Proxy("https", "p.example", 8443)),
        ("p:3128", Proxy("http", "p", 3128)),
        ("p", Proxy("http", "p", 80)),
        ("10.0.0.1:8080", Proxy("http", "10.0.0.1", 8080)),
        (" http://p:3128/ ", Proxy("http", "p", 3128)),
        ("[::1]:3128", Proxy("http", "::1", 3128)),
        ("socks4://p", Proxy("socks4", "p", 1080)),
        ("socks4a://p", Proxy("socks4a", "p", 1080)),
        ("socks5://[::1]:9", Proxy("socks5", "::1", 9)),
        ("socks5h://p", Proxy("socks5h", "p", 1080)),
        ("http://user@p", Proxy("http", "p", 80, "user")),
        ("http://user:@p", Proxy("http", "p", 80, "user")),
        ("http://:secret@p", Proxy("http", "p", 80, "", "secret")),
        ("user:secret@p:1", Proxy("http", "p", 1, "user", "secret")),
        ("http://us%40er:s%2Fe%3A%23@p", Proxy("http", "p", 80, "us@er", "s/e:#")),
        ("http://a@b:c@p", Proxy("http", "p", 80, "a@b", "c")),
        ("socks4://user@p", Proxy("socks4", "p", 1080, "user")),
    ],
)
def test_a_proxys_url_is_taken_apart(url: str, expected: Proxy) -> None:
    assert parse_proxy(url, "Endpoint.proxy") == expected


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://p", "'ftp' is no kind of proxy; known are http, https, socks4, socks4a, socks5, socks5h"),
        ("http://", "names no host"),
        ("http://user:hunter2@", "names no host"),
        ("http://user:hunter2@p:0", "port 0"),
        ("http://user:hunter2@p:99999", "cannot be read"),
        ("http://user:hunter2@p:port", "cannot be read"),
        ("http://user:hunter2@[::1", "cannot be read"),
        ("http://user:hun ter2@p", "percent-encode"),
        ("http://user:hunter2\n@p", "percent-encode"),
        ("http://user:hunter2#@p", "cannot be read"),
        ("http://user:hunter2/x@p", "cannot be read"),
        ("http://user:12/hunter2@p", "@ behind its host"),
        ("http://user:12?hunter2@p", "@ behind its host"),
        ("http://us%3Aer:hunter2@p", "colon"),
        ("socks5://user:hunter2%C3%A9@p", "ASCII"),
        ("socks5://user@p", "needs a user name and a password"),
        ("socks5://:hunter2@p", "needs a user name and a password"),
        ("socks5h://user:hunter2" + "x" * 255 + "@p", "at most 255 bytes"),
        ("socks4://user:hunter2@p", "no passwords"),
        ("socks4a://us%00er@p", "NUL"),
    ],
)
def test_what_is_no_proxys_url_is_said_without_its_secrets(url: str, words: str) -> None:
    for endpoint, environment, setting in (
        (Endpoint("http://h", proxy=url), {}, "Endpoint.proxy"),
        (Endpoint("http://h"), {"HTTP_PROXY": url}, "HTTP_PROXY"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            proxy_for(endpoint, environment)
        assert str(caught.value).startswith(setting)
        assert words in str(caught.value)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert caught.value.phase == "proxy"


@given(st.text(min_size=1, max_size=40), st.sampled_from(["", "http://", "socks5://u:", "https://["]))
def test_any_setting_is_a_proxy_or_a_configuration_error(text: str, start: str) -> None:
    try:
        proxy = parse_proxy(start + text, "HTTP_PROXY")
    except ConfigurationError:
        return
    assert proxy.host
    assert 0 < proxy.port < 65536


@given(st.text(max_size=20), st.text(max_size=20))
def test_credentials_come_back_as_they_were(user: str, password: str) -> None:
    user = user.replace(":", "")
    proxy = parse_proxy(f"http://{quote(user, safe='')}:{quote(password, safe='')}@p", "http_proxy")
    assert (proxy.user or "", proxy.password or "") == (user, password)
    if proxy.user is not None:
        scheme, _, pair = proxy.headers["proxy-authorization"].partition(" ")
        assert (scheme, base64.b64decode(pair).decode()) == ("Basic", f"{user}:{password}")
    else:
        assert proxy.headers == {}


def test_a_proxy_does_not_show_its_credentials() -> None:
    proxy = parse_proxy("http://us3r:hunter2@p", "http_proxy")
    route = route_for(Endpoint("http://h", proxy="http://us3r:hunter2@p"), {})
    for shown in (repr(proxy), str(proxy), f"{proxy}", repr([proxy]), repr(proxy.__rich_repr__()), repr(route)):
        assert "us3r" not in shown
        assert "hunter2" not in shown
    assert str(proxy) == "http://p:80 (http_proxy)"
    assert str(parse_proxy("[::1]:1", "x")) == "http://[::1]:1 (x)"


# --- the way -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "proxy", "forward", "how"),
    [
        ("http://h", "http://p", True, "forward"),
        ("http://h", "https://p", True, "forward"),
        ("http://h", "socks5://p", True, "tunnel"),
        ("https://h", "http://p", True, "tunnel"),
        ("ws://h", "http://p", True, "tunnel"),
        ("grpc://h", "http://p", True, "tunnel"),
        ("http://h", "http://p", False, "tunnel"),
    ],
)
def test_only_what_can_be_forwarded_is(url: str, proxy: str, forward: bool, how: str) -> None:
    assert route_for(Endpoint(url, proxy=proxy), {}, forward=forward).how == how


def test_direct() -> None:
    for endpoint in (Endpoint("http://h", proxy=None), Endpoint("http://h"), Endpoint("http://h", uds="/s", proxy=P)):
        assert route_for(endpoint, {}, forward=True) is DIRECT
    assert DIRECT.key is None


def test_a_ways_key_is_all_but_who_named_it() -> None:
    base = route_for(Endpoint("http://h", proxy=P), {}).key
    assert route_for(Endpoint("http://h"), {"http_proxy": P}).key == base
    for other in (Q, "https://proxy:3128", "http://user@proxy:3128", "http://user:secret@proxy:3128", "http://proxy"):
        assert route_for(Endpoint("http://h", proxy=other), {}).key != base
    assert route_for(Endpoint("http://h", proxy=P), {}, forward=True).key != base
