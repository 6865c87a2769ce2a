"""Endpoints: what they accept, what they refuse and how they say so, what they show, what they share."""

import copy
import pickle
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.endpoint import (
    TLS,
    Endpoint,
    Limits,
    Origin,
    Retries,
    Timeouts,
    check_headers,
    hide_secrets,
    without_secrets,
)
from spanwire.errors import ConfigurationError, ConnectionFailed, server_error

URL = "http://127.0.0.1:8000/v1"


# --- URLs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "origin", "path", "address"),
    [
        (URL, ("http", "127.0.0.1", 8000), "/v1", "127.0.0.1:8000"),
        ("http://h", ("http", "h", 80), "", "h:80"),
        ("https://h/", ("https", "h", 443), "", "h:443"),
        ("ws://h/a", ("ws", "h", 80), "/a", "h:80"),
        ("wss://h", ("wss", "h", 443), "", "h:443"),
        ("grpc://h", ("grpc", "h", 80), "", "h:80"),
        ("grpcs://h", ("grpcs", "h", 443), "", "h:443"),
        ("HTTPS://Example.COM:8443/V1/", ("https", "example.com", 8443), "/V1", "example.com:8443"),
        ("http://[::1]:80/v1", ("http", "::1", 80), "/v1", "[::1]:80"),
        ("queue://broker/topic", ("queue", "broker", 0), "/topic", "broker"),
    ],
)
def test_urls_are_taken_apart(url: str, origin: tuple[str, str, int], path: str, address: str) -> None:
    endpoint = Endpoint(url)
    assert endpoint.origin == Origin(*origin)
    assert endpoint.path == path
    assert endpoint.address == address


@pytest.mark.parametrize(
    ("scheme", "secure"),
    [("http", False), ("ws", False), ("grpc", False), ("https", True), ("wss", True), ("grpcs", True)],
)
def test_secure_schemes(scheme: str, secure: bool) -> None:
    assert Endpoint(f"{scheme}://h").secure is secure


def test_the_query_of_the_url_moves_to_query_and_the_argument_wins() -> None:
    endpoint = Endpoint("http://h/v1?a=1&b=&c=x%20y", query={"a": "2", "d": "3"})
    assert endpoint.query == {"a": "2", "b": "", "c": "x y", "d": "3"}
    assert "?" not in endpoint.url


def test_a_unix_socket_is_the_address() -> None:
    assert Endpoint("http://h/v1", uds="/run/s.sock").address == "unix:/run/s.sock"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:8000",
        "127.0.0.1:8000/v1",
        "/v1",
        "http://",
        "http:///v1",
        "http://:80/v1",
        "http://h:port/v1",
        "http://h:99999/v1",
        "http://h/a b",
        "http://h/a\n",
        "http://h\x00/",
        "http://[::1/v1",
        "http://h/v1#part",
        None,
        b"http://h",
        7,
    ],
)
def test_bad_urls_are_refused_and_the_field_is_named(url: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Endpoint\.url"):
        Endpoint(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@h/v1",
        "http://hunter2@h/v1",
        "http://h/v1?key=hunter2#x",
        "user:hunter2@h/v1",
        "//user:hunter2@h/v1",
        "http://user:hunter2@/v1",
        "http://user:hunter2@h\u2100st/v1",
        "http://user:hunter2@h:port/v1",
        "http://h /v1?key=hunter2",
        "h?key=hunter2",
    ],
)
def test_refusals_of_urls_do_not_show_passwords_and_queries(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Endpoint\.url") as caught:
        Endpoint(url)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)


# --- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a b", "a:", "a\r\nb", "ä", "a\n", 5])
def test_bad_header_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Endpoint\.headers"):
        Endpoint(URL, headers={name: "value"})


@pytest.mark.parametrize("value", ["hunter2\r\nx: y", "hunter2\n", "hunter2\0", "hunter2\r"])
def test_header_values_cannot_smuggle_and_are_not_shown(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Endpoint\.headers.*x-key") as caught:
        Endpoint(URL, headers={"x-key": value})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"Endpoint\.api_key") as caught:
        Endpoint(URL, api_key=value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("value", [None, 5, b"x"])
def test_header_values_have_to_be_text(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"where.*x-key"):
        check_headers({"x-key": value}, "where")


@pytest.mark.parametrize("api_key", [5, b"key", ["key"]])
def test_a_key_is_text_or_a_function(api_key: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Endpoint\.api_key"):
        Endpoint(URL, api_key=api_key)


def test_a_key_may_be_a_function() -> None:
    assert callable(Endpoint(URL, api_key=lambda: "key").api_key)


@pytest.mark.parametrize("field", ["tls", "timeouts", "limits", "retries"])
@pytest.mark.parametrize("value", [None, 5, {}, "x"])
def test_fields_with_a_struct_of_their_own_name_it(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Endpoint\.{field} must be spanwire\."):
        Endpoint(URL, **{field: value})


@pytest.mark.parametrize("field", ["proxy", "uds", "transport", "dialect"])
@pytest.mark.parametrize("value", ["", 5, b"x", ["x"]])
def test_fields_of_text_have_to_be_text(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Endpoint\.{field}"):
        Endpoint(URL, **{field: value})
    nothing: dict[str, Any] = {field: None}
    assert getattr(Endpoint(URL, **nothing), field) is None


@pytest.mark.parametrize("field", ["headers", "query", "options"])
@pytest.mark.parametrize("value", [None, 5, "x", ["x"]])
def test_mappings_have_to_be_mappings(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Endpoint\.{field}"):
        Endpoint("http://h/v1?a=b", **{field: value})


@pytest.mark.parametrize("field", ["max_concurrent", "max_queue", "max_event_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "5"])
def test_limits_that_count_are_whole_numbers(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Limits\({field}="):
        Limits(**{field: value})


def test_limits_that_count_have_a_least_number() -> None:
    assert Limits(max_concurrent=1, max_queue=0, max_event_bytes=1).max_queue == 0
    with pytest.raises(ConfigurationError, match="max_concurrent"):
        Limits(max_concurrent=0)
    with pytest.raises(ConfigurationError, match="max_event_bytes"):
        Limits(max_event_bytes=0)


def test_an_event_limit_of_none_is_refused_or_means_no_limit() -> None:
    from spanwire.wire.sse import EventStreamParser

    try:
        limit: Any = Limits(max_event_bytes=None).max_event_bytes  # type: ignore[arg-type]
    except ConfigurationError as error:
        assert "max_event_bytes" in str(error)  # noqa: PT017 (both are fine)
        return
    events: list[bytes] = []
    EventStreamParser(lambda _, data: events.append(data), max_event_bytes=limit).feed(b"data: x\n\n")
    assert events == [b"x"]


SECONDS: list[tuple[Callable[..., object], str, bool]] = [
    (Limits, "queue_timeout_s", True),
    (Limits, "max_connection_age_s", False),
    (Limits, "max_idle_s", False),
    (Timeouts, "connect_s", False),
    (Timeouts, "first_content_s", False),
    (Timeouts, "idle_s", False),
    (Timeouts, "total_s", False),
    (Retries, "base_s", True),
    (Retries, "max_wait_s", True),
]


@pytest.mark.parametrize(("owner", "field", "zero_is_fine"), SECONDS)
def test_seconds_are_numbers_that_are_not_negative(
    owner: Callable[..., object], field: str, zero_is_fine: bool
) -> None:
    for bad in (-1, -0.001, float("nan"), True, "5", [5]):
        with pytest.raises(ConfigurationError, match=field):
            owner(**{field: bad})
    for good in (0.001, 5, 5.5):
        assert getattr(owner(**{field: good}), field) == good
    if zero_is_fine:
        assert getattr(owner(**{field: 0}), field) == 0
    else:
        with pytest.raises(ConfigurationError, match=field):
            owner(**{field: 0})


@pytest.mark.parametrize(("owner", "field", "_zero"), [row for row in SECONDS if row[0] is not Retries])
def test_none_means_no_limit(owner: Callable[..., object], field: str, _zero: bool) -> None:
    assert getattr(owner(**{field: None}), field) is None


@pytest.mark.parametrize("field", ["base_s", "max_wait_s", "max_attempts"])
def test_retries_have_no_none(field: str) -> None:
    nothing: dict[str, Any] = {field: None}
    with pytest.raises(ConfigurationError, match=field):
        Retries(**nothing)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_attempts_count_the_first_one_too(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_attempts"):
        Retries(max_attempts=value)


def test_the_defaults_are_those_of_the_design() -> None:
    endpoint = Endpoint(URL)
    assert (endpoint.api_key, endpoint.headers, endpoint.query, endpoint.options) == (None, {}, {}, {})
    assert (endpoint.proxy, endpoint.uds, endpoint.transport, endpoint.dialect) == ("env", None, None, None)
    assert endpoint.timeouts == Timeouts(connect_s=10, first_content_s=600, idle_s=120, total_s=None)
    assert endpoint.retries == Retries(max_attempts=3, base_s=0.5, max_wait_s=8)
    assert endpoint.limits.max_event_bytes == 64 * 1024 * 1024
    assert endpoint.limits.max_concurrent is None
    assert endpoint.limits.max_queue is None
    assert endpoint.limits.queue_timeout_s is None


# --- identity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"api_key": "k"},
        {"headers": {"a": "b"}},
        {"query": {"a": "b"}},
        {"timeouts": Timeouts(connect_s=1)},
        {"limits": Limits(max_concurrent=1)},
        {"retries": Retries(max_attempts=1)},
        {"url": "http://127.0.0.1:8000/v2"},
        {"url": "HTTP://127.0.0.1:8000/v1/"},
        {"options": {"a": 1}},
    ],
    ids=str,
)
def test_policy_is_no_part_of_a_connections_identity(change: dict[str, Any]) -> None:
    assert Endpoint(**{"url": URL, **change}).connection_key() == Endpoint(URL).connection_key()
    assert hash(Endpoint(**{"url": URL, **change}).connection_key()) == hash(Endpoint(URL).connection_key())


@pytest.mark.parametrize(
    "change",
    [
        {"url": "http://127.0.0.1:8001/v1"},
        {"url": "http://127.0.0.2:8000/v1"},
        {"url": "https://127.0.0.1:8000/v1"},
        {"tls": TLS(verify=False)},
        {"tls": TLS(ca="/ca.pem")},
        {"tls": TLS(cert=("a", "b"))},
        {"proxy": None},
        {"proxy": "http://proxy:3128"},
        {"uds": "/run/s.sock"},
        {"options": {"http_client": object()}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_connection_depends_on_is_its_identity(change: dict[str, Any]) -> None:
    assert Endpoint(**{"url": URL, **change}).connection_key() != Endpoint(URL).connection_key()


# --- secrets, copies ---------------------------------------------------------------------------------------------------


def secret_endpoint() -> Endpoint:
    return Endpoint(
        "https://h:1/v1?sig=hunter2",
        api_key="hunter2",
        headers={"x-key": "hunter2"},
        query={"token": "hunter2"},
        proxy="http://user:hunter2@proxy:3128",
        options={"secret": "hunter2"},
    )


def test_repr_names_what_is_set_and_shows_no_value() -> None:
    endpoint = secret_endpoint()
    for shown in (repr(endpoint), str(endpoint), f"{endpoint}", repr([endpoint])):
        assert "hunter2" not in shown
    for part in ("https://h:1/v1", "api_key=<set>", "x-key", "sig", "token"):
        assert part in repr(endpoint)


def test_rich_shows_no_value_either() -> None:
    """Rich, and with it typer's tracebacks, asks ``__rich_repr__`` before ``repr``; msgspec gives every struct one."""
    pretty = pytest.importorskip("rich.pretty")
    assert "hunter2" not in pretty.pretty_repr(secret_endpoint())


def token() -> str:
    return "k"


def test_a_pickled_endpoint_asks_the_same_function_for_its_key() -> None:
    assert pickle.loads(pickle.dumps(Endpoint(URL, api_key=token))).api_key is token


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"api_key": lambda: "hunter2"},
            r"Endpoint\.api_key cannot be pickled, it is a function: define the function at",
        ),
        ({"options": {"http_client": open}}, None),
        (
            {"options": {"http_client": threading.Lock()}},
            r"Endpoint\.options\['http_client'\] cannot be pickled, it is a",
        ),
    ],
)
def test_what_cannot_be_pickled_is_named(fields: dict[str, Any], words: str | None) -> None:
    endpoint = Endpoint(URL, **fields)
    if words is None:
        assert pickle.loads(pickle.dumps(endpoint)) == endpoint
    else:
        with pytest.raises(ConfigurationError, match=words) as caught:
            pickle.dumps(endpoint)
        assert "hunter2" not in str(caught.value)


def test_deep_copies_share_what_is_not_theirs() -> None:
    """A client is somebody's connections, a function that gives a key may hold a lock."""
    client, key = object(), lambda: "k"
    endpoint = Endpoint(URL, api_key=key, headers={"x": "y"}, options={"http_client": client})
    twin = copy.deepcopy(endpoint)
    assert twin == endpoint
    assert twin.options["http_client"] is client
    assert twin.api_key is key
    assert twin.connection_key() == endpoint.connection_key()
    assert twin.options is not endpoint.options
    assert twin.headers is not endpoint.headers


@pytest.mark.parametrize("copier", [lambda it: pickle.loads(pickle.dumps(it)), copy.copy, copy.deepcopy])
def test_endpoints_can_be_pickled_and_copied(copier: Callable[[Endpoint], Endpoint]) -> None:
    endpoint = Endpoint(
        "http://h:1/v1/?a=b",
        api_key="k",
        headers={"x": "y"},
        tls=TLS(verify=False, cert=("c", "k")),
        timeouts=Timeouts(total_s=3),
        limits=Limits(max_concurrent=2),
        retries=Retries(max_attempts=1),
        uds="/s",
    )
    assert endpoint.address == "unix:/s"  # fills caches
    key = endpoint.connection_key()
    twin = copier(endpoint)
    assert twin == endpoint
    assert twin.connection_key() == key
    assert (twin.origin, twin.path, twin.address, twin.query) == (
        endpoint.origin,
        endpoint.path,
        endpoint.address,
        {"a": "b"},
    )


@given(st.text(max_size=40))
def test_any_text_is_a_good_url_or_refused_by_name(url: str) -> None:
    try:
        endpoint = Endpoint(url)
    except ConfigurationError as error:
        assert "Endpoint.url" in str(error)  # noqa: PT017 (both are fine)
    else:
        assert endpoint.origin.host
        assert endpoint.origin.scheme
        assert not endpoint.path.endswith("/")


@given(st.from_regex(r"https?://[a-z]{1,5}(:[0-9]{1,4})?(/[a-zA-Z0-9]{0,3}){0,3}(\?[a-z]=[a-z])?", fullmatch=True))
def test_an_endpoint_of_an_endpoints_url_is_the_same(url: str) -> None:
    first = Endpoint(url)
    second = Endpoint(first.url, query=first.query)
    assert second == first
    assert second.connection_key() == first.connection_key()


@pytest.mark.parametrize("value", [None, "", 0, 1, "/etc/ca.pem"])
def test_nothing_but_false_turns_verification_off(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"TLS\(verify=\.\.\.\) must be True or False"):
        TLS(verify=value)


@pytest.mark.parametrize(
    "given",
    [
        {"ca": Path("/etc/ca.pem")},
        {"ca": b"-----BEGIN"},
        {"ca": ""},
        {"cert": ["a", "b"]},
        {"cert": ("a", "b", "c")},
        {"cert": ("a", 1)},
        {"cert": ""},
        {"cert": Path("a")},
    ],
    ids=repr,
)
def test_tls_files_of_a_wrong_type_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"TLS\({next(iter(given))}=\.\.\.\)"):
        TLS(**given)


def test_a_setting_of_a_wrong_type_is_not_shown() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Endpoint("http://h/v1", proxy={"https": "http://u:s3cret@p:1"})  # type: ignore[arg-type]
    assert "s3cret" not in str(caught.value)
    assert "a dict" in str(caught.value)


def test_a_servers_words_are_shown_without_what_is_secret() -> None:
    endpoint = Endpoint(
        "http://h/v1?api_key=q%2Fs3cret&api-version=2025-01-01",
        headers={"Authorization": "Bearer h-s3cret", "x-team": "blue-team", "x-token": "a"},
    )
    said = "GET /v1?api_key=q%2Fs3cret&api-version=2025-01-01 q/s3cret Bearer h-s3cret (h-s3cret) k-s3cret c-s3cret blue-team a"
    assert without_secrets(said, endpoint, "k-s3cret", {"Cookie": "c-s3cret"}) == (
        "GET /v1?api_key=***&api-version=2025-01-01 *** *** (***) *** *** blue-team a"
    )
    assert without_secrets("a word", endpoint, None, {}) == "a word"


class Mute(Exception):
    """Of somebody else's."""

    def __str__(self) -> str:
        raise ValueError("sk-secret")


@pytest.mark.parametrize("cause", [OSError("sk-secret"), KeyError("sk-secret"), OSError("\x1b[2J"), Mute()])
def test_a_traceback_ends_before_a_cause_that_repeats_what_is_secret(cause: Exception) -> None:
    endpoint = Endpoint("http://h/v1")
    between, error = TimeoutError("too slow"), ConnectionFailed("broken: sk-secret", endpoint="h:80")
    between.__context__, error.__cause__ = cause, between
    hide_secrets(error, endpoint, "sk-secret", {})
    shown = "".join(traceback.format_exception(error))
    assert "sk-secret" not in shown + repr(error.args)
    assert "\x1b" not in shown
    assert "too slow" in shown
    assert f"a {type(cause).__name__}" in shown


def test_other_causes_stay() -> None:
    error = ConnectionFailed("broken", endpoint="h:80")
    error.__cause__ = cause = OSError("reset")
    hide_secrets(error, Endpoint("http://h/v1"), "sk-secret", {})
    assert error.__cause__ is cause
    cause.__context__ = error  # a ring, as frames can make one
    hide_secrets(error, Endpoint("http://h/v1"), "sk-secret", {})


def test_a_servers_code_and_headers_are_shown_without_what_is_secret() -> None:
    error = server_error("no", status=401, code="bad sk-secret", headers={"www-authenticate": "Bearer sk-secret"})
    hide_secrets(error, Endpoint("http://h/v1"), "sk-secret", {})
    assert (error.code, error.headers) == ("bad ***", {"www-authenticate": "Bearer ***"})
