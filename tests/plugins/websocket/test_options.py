"""``Endpoint(options={...})`` of the transport."""

from __future__ import annotations

from typing import Any

import pytest
from spanwire_websocket.options import NAMES, Options, options_of
from spanwire_websocket.socket import Keepalive

import spanwire
from spanwire import errors


def options(**given: Any) -> Options:
    return options_of(spanwire.Endpoint("ws://h/v1", proxy=None, options=given))


def test_the_defaults() -> None:
    found = options()
    assert found == Options(Keepalive(20.0, 20.0), (), False, 3300.0, True, 16 * 1024 * 1024)
    assert found.max_age_s < 60 * 60, "servers close after 60 minutes"


def test_all_of_them() -> None:
    found = options(
        ping_interval_s=5,
        ping_timeout_s=None,
        subprotocols=["a", "b"],
        compression=True,
        max_age_s=10,
        continue_conversations=False,
        buffer_bytes=1,
    )
    assert found == Options(Keepalive(5.0, None), ("a", "b"), True, 10.0, False, 1)
    assert options(ping_interval_s=None).keepalive == Keepalive(None, 20.0)
    assert len(NAMES) == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ping_interval_s", value) for value in (0, -1, "5", True, float("nan"), float("inf"))),
        *(("ping_timeout_s", value) for value in (0, -1, "5", False)),
        *(
            ("subprotocols", value)
            for value in ("a", [""], [1], {"a"}, None, ["a b"], ["a,b"], ["a\r\nx: y"], ["a", "a"], ["ä"])
        ),
        *(("compression", value) for value in (1, "yes", None)),
        *(("max_age_s", value) for value in (0, None, "x", float("nan"), 10**400)),
        *(("continue_conversations", value) for value in (0, None)),
        *(("buffer_bytes", value) for value in (0, 1.5, True, None)),
    ],
    ids=str,
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        options(**{name: value})
    assert name in str(caught.value)
    assert len(str(caught.value)) < 200


def test_an_unknown_name_is_refused() -> None:
    import asyncio

    async def body() -> None:
        async with spanwire.ConnectionManager(telemetry=None) as manager:
            endpoint = spanwire.Endpoint("ws://127.0.0.1:1/v1", proxy=None, options={"pings": 1})
            with pytest.raises(errors.ConfigurationError) as caught:
                await manager.complete(endpoint, spanwire.Call.chat("m", [{"role": "user", "content": "x"}]))
            assert "pings" in str(caught.value)

    asyncio.run(body())
