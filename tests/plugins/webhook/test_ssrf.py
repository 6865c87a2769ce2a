"""Addresses that servers name: asked only at allowed hosts, and the key for the endpoint's own origin alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spanwire_webhook.ssrf import ResultHosts

from spanwire.errors import ProtocolError

HOSTS = ResultHosts(
    "https://queue.fal.run", ["https://*.fal.media", "https://api.replicate.com", "http://127.0.0.1:8000"]
)
KEY = {"authorization": "Key s3cret"}


@pytest.mark.parametrize(
    "url",
    [
        "https://queue.fal.run/app/requests/r-1",
        "https://QUEUE.fal.run:443/x?y=z",
        "https://queue.fal.run./x",
        "https://v3.fal.media/files/a.png",
        "https://a.b.fal.media/",
        "https://api.replicate.com/v1/predictions/p",
        "http://127.0.0.1:8000/result",
    ],
)
def test_allowed(url: str) -> None:
    assert HOSTS.check(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "http://queue.fal.run/x",  # not by https
        "https://queue.fal.run:8443/x",
        "https://fal.media/",
        "https://evilfal.media/",
        "https://queue.fal.run.evil.example/",
        "https://evil.example/queue.fal.run",
        "https://queue.fal.run@evil.example/",
        "https://evil.example#@queue.fal.run/",
        "https://evil.example\\@queue.fal.run/",
        "https://user:pass@queue.fal.run/",
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]:8000/",
        "http://2130706433:8000/",
        "http://0x7f.1:8000/",
        "http://localhost:8000/",
        "file:///etc/passwd",
        "gopher://queue.fal.run/",
        "//queue.fal.run/",
        "/relative",
        "",
        "https://",
        "https://queue.fal.run:99999/",
        "https://queue.fal.run\r\nhost: x/",
        "https://queue.fal.run /",
        "https://queue\u3002fal\u3002run/",
        "https://[::ffff:1.2.3.4].fal.media/",
    ],
)
def test_refused(url: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        HOSTS.check(url)
    assert "meta-data" not in str(caught.value)
    assert HOSTS.check("https://queue.fal.run/")


def test_a_wildcard_is_of_names_and_of_no_address() -> None:
    with pytest.raises(ProtocolError):
        ResultHosts("https://h", ["https://*.0.0.1"]).check("https://127.0.0.1/")


@given(
    st.text()
    | st.text().map(lambda text: f"https://{text}.fal.run/")
    | st.text().map(lambda text: f"https://queue.fal.run{text}")
)
def test_any_text_is_refused_or_is_at_an_allowed_host(url: str) -> None:
    try:
        HOSTS.check(url)
    except ProtocolError:
        return
    import urllib.parse

    assert urllib.parse.urlsplit(url).hostname in ("queue.fal.run", "queue.fal.run.")
