"""What a URL of a store in Redis says, and what is wrong with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from spanwire_webhook.stores.redis import RedisAddress, open_store, read_url

from spanwire.errors import ConfigurationError


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://", RedisAddress()),
        ("valkey://h", RedisAddress(host="h")),
        ("redis://h:1/3?prefix=a.b&keep_s=60", RedisAddress(host="h", port=1, db=3, prefix="a.b", keep_s=60.0)),
        ("redis://[::1]:7", RedisAddress(host="::1", port=7)),
        ("redis://me:a%40b%2F@h/", RedisAddress(host="h", username="me", password="a@b/")),
        ("valkeys://:x@h?wait=no&db=2", RedisAddress(host="h", password="x", tls=True, wait=False, db=2)),
        ("rediss://h?cacert=" + __file__, RedisAddress(host="h", tls=True, cacert=__file__)),
        ("redis+unix:///run/a%20b.sock?db=1", RedisAddress(path="/run/a b.sock", db=1)),
        ("redis+unix://u:p@/s", RedisAddress(path="/s", username="u", password="p")),
    ],
)
def test_urls(url: str, says: RedisAddress) -> None:
    """Each part."""
    assert read_url(url) == says


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("memcached://h", "memcached"),
        ("redis://:hunter2@h:port", "percent-encoded"),
        ("redis://:hunter2#4@h", "%23"),
        ("redis://:hunter2@h/jobs", "number of a database"),
        ("redis://:hunter2@h/²", "number of a database"),
        ("redis://:hunter2@h?prefix={x}", "prefix"),
        ("redis://:hunter2@h?prefix=", "prefix"),
        ("redis://:hunter2@h?keep_s=0", "keep_s"),
        ("redis://:hunter2@h?keep_s=nan", "keep_s"),
        ("redis://:hunter2@h?wait=1", "wait"),
        ("redis://:hunter2@h?retries=1", "retries"),
        ("redis://:hunter2@h?cacert=" + __file__, "TLS"),
        ("rediss://:hunter2@h?cacert=/no/such/file", "not a file"),
        ("redis+unix://:hunter2@host/s", "three slashes"),
        ("redis+unix://", "three slashes"),
    ],
)
def test_wrong_urls(url: str, names: str) -> None:
    """What is wrong is named, and the password never is."""
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert names in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_password_is_not_shown() -> None:
    """By whatever prints an address."""
    address = read_url("rediss://me:hunter2@h:1/2")
    assert "hunter2" not in f"{address!r} {address} {address.place}"
    assert address.place == "rediss://h:1/2?prefix=spanwire"


def test_without_the_client_library_its_install_line_is_named(tmp_path: Path) -> None:
    """And nothing is imported before a store is opened."""
    code = (
        "import sys\n"
        "from spanwire.errors import ConfigurationError\n"
        "from spanwire_webhook.stores.redis import open_store\n"
        "assert 'redis' not in sys.modules\n"
        "sys.modules['redis'] = None\n"
        "try:\n    open_store('redis://h')\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "pip install 'spanwire-webhook[redis]'" in done.stdout
