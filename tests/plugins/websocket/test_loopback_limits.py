"""Who is let in by the WebSocket loopback server, and how it refuses: by the plain client, and by raw sockets."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from spanwire_websocket.loopback import PART, WebSocketPart
from websockets.exceptions import ConnectionClosed, InvalidStatus

from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, Script
from tests.plugins.websocket.plain import PATIENCE_S, Plain, text_of

#: The answer of a server that is full may not come at all: how long a test looks, in seconds.
A_WHILE_S = 0.05


def serving(*scripts: Script, **options: Any) -> LoopbackServer:
    return LoopbackServer([*scripts] or [Script.say("a")], part="websocket", options=options)


@contextmanager
def refused(status: int) -> Iterator[list[Any]]:
    found: list[Any] = []
    with pytest.raises(InvalidStatus) as caught:
        yield found
    found.append(caught.value.response)
    assert caught.value.response.status_code == status


def closed(client: Plain) -> Any:
    with pytest.raises(ConnectionClosed) as caught:
        client.event()
    return caught.value.rcvd


class Upgrade:
    """An upgrade by hand: its answer can be looked at, or not come."""

    def __init__(
        self,
        server: LoopbackServer,
        path: str = "/v1/responses",
        method: str = "GET",
        client: socket.socket | None = None,
    ) -> None:
        self.socket = client or socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        self.headers: dict[str, str] = {}
        self.socket.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def answer(self, within_s: float = PATIENCE_S) -> str:
        """The status line; empty if there is none in that time."""
        self.socket.settimeout(within_s)
        try:
            status, *lines = self.socket.recv(4096).decode("latin-1").partition("\r\n\r\n")[0].split("\r\n")
        except TimeoutError:
            return ""
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return status

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- slots ------------------------------------------------------------------------------------------------------------


def test_a_full_server_lets_upgrades_wait_in_line() -> None:
    with serving(max_clients=1) as server:
        with Plain(server) as client:
            first, second = Upgrade(server), Upgrade(server)
            server.wait_for(lambda s: s.connections == 3)
            assert first.answer(A_WHILE_S) == ""
            client.turn()
        assert first.answer().startswith("HTTP/1.1 101")
        assert second.answer(A_WHILE_S) == ""
        first.close()
        assert second.answer().startswith("HTTP/1.1 101")
        second.close()


def test_who_leaves_the_line_is_passed_over() -> None:
    with serving(max_clients=1) as server:
        with Plain(server):
            first, second = Upgrade(server), Upgrade(server)
            server.wait_for(lambda s: s.connections == 3)
            first.close()
            server.wait_for(lambda s: s.open_connections == 2)
        assert second.answer().startswith("HTTP/1.1 101")
        second.close()
        server.wait_for(lambda s: s.open_connections == 0)
        with Plain(server) as client:  # the slot is free again
            client.turn()


def test_a_wait_in_line_may_end_with_503() -> None:
    with serving(max_clients=1, full_wait_s=0.01) as server:
        with Plain(server) as client:
            with refused(503):
                Plain(server)
            client.turn()
        server.wait_for(lambda s: s.open_connections == 0)
        with Plain(server) as client:
            client.turn()


@pytest.mark.parametrize("status", [503, 429, 403])
def test_a_full_server_refuses(status: int) -> None:
    with serving(max_clients=1, when_full=status, retry_after=7) as server, Plain(server):
        with refused(status) as responses:
            Plain(server)
        [response] = responses
        assert response.headers.get("Retry-After") == (None if status == 403 else "7")
        if status == 403:
            assert not response.body
        else:
            assert "error" in json.loads(response.body)


def test_a_full_server_may_say_so_in_an_event() -> None:
    with serving(max_clients=1, when_full="error") as server, Plain(server), Plain(server) as second:
        event = second.event()
        assert (event["type"], event["error"]["type"]) == ("error", "rate_limit_error")
        assert closed(second).code == 1008


@pytest.mark.parametrize("code", [1013, 1011])
def test_a_full_server_may_close_at_once(code: int) -> None:
    with serving(max_clients=1, when_full=str(code)) as server, Plain(server) as first:
        with Plain(server) as second:
            assert closed(second).code == code
        assert text_of(first.turn()) == "a"


def test_a_full_server_may_never_answer() -> None:
    with serving(max_clients=1, when_full="never") as server:
        with Plain(server):
            second = Upgrade(server)
            server.wait_for(lambda s: s.connections == 2)
        server.wait_for(lambda s: s.open_connections == 1)
        assert second.answer(A_WHILE_S) == ""  # though there is room now
        second.close()
        server.wait_for(lambda s: s.open_connections == 0)
        with Plain(server) as client:
            client.turn()


def test_a_slot_comes_back_after_a_reset() -> None:
    scripts = [Script(drop_after="request", drop_mode="reset"), Script.say("b")]
    options = {"max_clients": 1, "when_full": "503"}
    with LoopbackServer(scripts, part="websocket", options=options) as server:
        with Plain(server) as client:
            client.create()
            assert closed(client) is None
        server.wait_for(lambda s: s.open_connections == 0)
        with Plain(server) as client:
            assert text_of(client.turn()) == "b"


# --- upgrades ---------------------------------------------------------------------------------------------------------


def test_upgrades_are_scripted_one_after_the_other() -> None:
    with serving(upgrades=[503, 429, 101], retry_after="1") as server:
        for status in (503, 429):
            with refused(status) as responses:
                Plain(server)
            assert responses[0].headers["Retry-After"] == "1"
        for _ in range(2):
            with Plain(server) as client:
                client.turn()


def test_a_redirect_says_where_to_go() -> None:
    with serving(upgrades=[307, 101], location="ws://127.0.0.1:9/v1/responses") as server:
        with Upgrade(server) as upgrade:
            assert upgrade.answer().startswith("HTTP/1.1 307")
            assert upgrade.headers["location"] == "ws://127.0.0.1:9/v1/responses"
        with Upgrade(server) as upgrade:
            assert upgrade.answer().startswith("HTTP/1.1 101")


def test_a_path_without_upgrades_is_404_in_json() -> None:
    with serving() as server:
        with refused(404) as responses:
            Plain(server, "/v1/chat/completions")
        assert json.loads(responses[0].body)["error"]["code"] == "not_found_error"
        for path in ("/v1/responses", "/openai/v1/responses", "/responses/"):
            with Plain(server, path) as client:
                assert text_of(client.turn()) == "a"


def test_what_is_no_upgrade_is_refused() -> None:
    with serving() as server, Upgrade(server, method="POST") as post:
        # The library before 16 closes the connection without a word.
        assert post.answer().split()[1:2] in (["405"], ["400"], [])
        server.wait_for(lambda s: s.open_connections == 0)


def test_an_upgrade_may_take_its_time() -> None:
    with serving(upgrade_s=0.03) as server:
        upgrade = Upgrade(server)
        assert upgrade.answer(0.005) == ""
        assert upgrade.answer().startswith("HTTP/1.1 101")
        upgrade.close()


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_may_be_asked_for(status: int) -> None:
    with serving(api_key="right", unauthorized=status) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with refused(status) as responses:
                Plain(server, additional_headers=headers)
            assert bool(responses[0].body) is (status == 401)
        with Plain(server, additional_headers={"Authorization": "Bearer right"}) as client:
            client.turn()
    assert "right" not in repr(PART.configured({"api_key": "right"})._rules)


def test_a_subprotocol_may_be_asked_for() -> None:
    with serving(subprotocols=["openai-beta.responses.v1"]) as server:
        with refused(400):
            Plain(server)
        with refused(400):
            Plain(server, subprotocols=["another"])
        with Plain(server, subprotocols=["another", "openai-beta.responses.v1"]) as client:
            assert client.ws.subprotocol == "openai-beta.responses.v1"
            client.turn()


@pytest.mark.parametrize("agrees", [False, True])
def test_compression_is_offered_or_not(agrees: bool) -> None:
    with serving(compression=agrees) as server, Plain(server, compression="deflate") as client:
        assert client.ws.response is not None
        assert ("Sec-WebSocket-Extensions" in client.ws.response.headers) is agrees
        assert text_of(client.turn("x" * 10_000)) == "a"


# --- open connections -------------------------------------------------------------------------------------------------


def test_a_message_over_the_limit_closes_with_1009() -> None:
    with serving(max_size=1000) as server:
        with Plain(server) as client:
            assert text_of(client.turn("x" * 900)) == "a"
            client.create("x" * 1001)
            assert closed(client).code == 1009
        server.wait_for(lambda s: s.faults)
        assert "PayloadTooBig" in server.faults[0]


def test_pings_are_answered_or_not() -> None:
    with serving() as server, Plain(server) as client:
        assert client.ws.ping().wait(PATIENCE_S)
    with serving(answers_pings=False) as server, Plain(server) as client:
        pong = client.ws.ping()
        client.turn()  # a pong would have come before
        assert not pong.is_set()
    with serving(answers_pings=False) as server, Plain(server, ping_interval=0.02, ping_timeout=0.02) as client:
        with pytest.raises(ConnectionClosed) as caught:
            client.event()
        assert caught.value.sent is not None
        assert caught.value.sent.code == 1011


def test_the_server_may_ping_clients_that_do_not_answer() -> None:
    with serving(ping_interval_s=0.01, ping_timeout_s=0.01) as server, Upgrade(server) as silent:
        assert silent.answer().startswith("HTTP/1.1 101")
        received = b""
        while b"\x03\xf3keepalive ping timeout" not in received:  # 1011
            more = silent.socket.recv(4096)
            assert more
            received += more


def test_an_idle_connection_is_cut_unless_it_pings() -> None:
    with serving(idle_s=0.1) as server:
        with Plain(server) as client:
            client.turn()
            assert closed(client) is None  # no close frame
        with Plain(server, ping_interval=0.01) as busy:
            with pytest.raises(TimeoutError):
                busy.ws.recv(timeout=0.3)
            assert text_of(busy.turn()) == "a"


def test_a_client_that_breaks_the_protocol_is_a_fault() -> None:
    with serving() as server, Upgrade(server) as upgrade:
        assert upgrade.answer().startswith("HTTP/1.1 101")
        upgrade.socket.sendall(b"\x81\x02hi")  # not masked
        server.wait_for(lambda s: s.faults)
        assert "ProtocolError" in server.faults[0]


def test_a_client_that_says_goodbye_and_stays_has_left() -> None:
    with serving(Script(hang_after="request")) as server, Upgrade(server) as upgrade:
        assert upgrade.answer().startswith("HTTP/1.1 101")
        message = b'{"type":"response.create","model":"m"}'
        upgrade.socket.sendall(b"\x81" + bytes([0x80 | len(message)]) + bytes(4) + message)
        server.wait_for(lambda s: s.requests)
        upgrade.socket.sendall(b"\x88\x82\0\0\0\0\x03\xe8")
        server.wait_for(lambda s: s.requests[0].left)
        assert server.open_connections == 1
        server.wait_for(lambda s: s.open_connections == 0)


def test_clients_that_come_and_go_without_a_word_are_no_fault() -> None:
    with serving() as server:
        socket.create_connection(("127.0.0.1", server.port)).close()
        server.wait_for(lambda s: s.connections == 1 and s.open_connections == 0)
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"GET /v1/resp")
        server.wait_for(lambda s: s.open_connections == 1)
        half.close()
        server.wait_for(lambda s: s.open_connections == 0)
        waiting = socket.create_connection(("127.0.0.1", server.port))
        server.wait_for(lambda s: s.open_connections == 1)
    waiting.close()
    assert server.faults == []


@pytest.mark.parametrize("mode", ["close", "reset", 1012])
def test_tls_and_its_cuts(mode: Any) -> None:
    scripts = [Script.say("a"), Script.say("a b", drop_after=2, drop_mode=mode)]
    with LoopbackServer(scripts, part="websocket", tls=True) as server:
        assert server.url.startswith("wss://")
        with Plain(server, ssl=ssl.create_default_context(cafile=server.ca)) as client:
            client.turn()
            client.create()
            client.until("response.output_text.delta")
            received = closed(client)
            assert (received.code if received else None) == (mode if isinstance(mode, int) else None)
        server.wait_for(lambda s: s.open_connections == 0)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with LoopbackServer(part="websocket", uds=str(path)) as server:
        assert server.url == "ws://localhost/v1"
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(path))
        with Upgrade(server, client=client) as upgrade:
            assert upgrade.answer().startswith("HTTP/1.1 101")
    assert server.open_connections == 0
    assert not path.exists()


def test_many_clients_at_once_get_what_is_theirs() -> None:
    with LoopbackServer(part="websocket", options={"max_clients": 4}) as server:
        answers: list[str] = []

        def one(number: int) -> None:
            with Plain(server) as client:
                answers.append(text_of(client.turn(f"number {number}")))

        threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(answers) == sorted(f"You said: number {number}" for number in range(16))
        assert server.faults == []


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 1}, "no option 'clients'"),
        ({"max_clients": -1}, "max_clients"),
        ({"max_clients": True}, "max_clients"),
        ({"when_full": "502"}, "when_full"),
        ({"when_full": None}, "when_full"),
        ({"api_key": 3}, "api_key must be text"),
        ({"retry_after": 0.5}, "retry_after must be text"),
        ({"when_old": "never"}, "when_old"),
        ({"unauthorized": 404}, "unauthorized"),
        ({"upgrades": []}, "upgrades"),
        ({"upgrades": [100]}, "upgrades"),
        ({"upgrades": [307]}, "location"),
        ({"max_age_s": "1"}, "max_age_s"),
        ({"upgrade_s": float("inf")}, "upgrade_s"),
        ({"max_size": 0}, "max_size"),
        ({"subprotocols": "a"}, "subprotocols"),
        ({"idle_s": -1}, "idle_s"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LoopbackServer(part="websocket", options=options)


def test_a_part_may_be_made_by_hand() -> None:
    with LoopbackServer([Script.say("b")], part=WebSocketPart(max_turns=1)) as server, Plain(server) as client:
        assert text_of(client.turn()) == "b"
        assert client.turn()[-1]["type"] == "error"


def test_a_part_without_options_says_so() -> None:
    with pytest.raises(ConfigurationError, match="'sse' has no options: max_clients"):
        LoopbackServer(options={"max_clients": 1})
