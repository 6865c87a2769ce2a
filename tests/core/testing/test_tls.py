import http.client
import json
import socket
import ssl
import sys
from pathlib import Path

import pytest

from spanwire.endpoint import TLS
from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, Script

BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "q"}]})


def connect(server: LoopbackServer) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cadata=server.ca_pem)
    return http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)


def ask(connection: http.client.HTTPSConnection) -> bytes:
    connection.request("POST", "/v1/chat/completions", BODY)
    return connection.getresponse().read()


def test_a_client_that_trusts_the_ca_is_answered_and_keeps_its_connection() -> None:
    with LoopbackServer(tls=True) as server:
        connection = connect(server)
        assert ask(connection).endswith(b"data: [DONE]\n\n")
        assert ask(connection).endswith(b"data: [DONE]\n\n")
        connection.close()
        assert server.connections == 1
        assert server.url == f"https://127.0.0.1:{server.port}/v1"
        assert server.endpoint().tls == TLS(ca=server.ca_pem)
        server.wait_for(lambda s: s.open_connections == 0)
    assert server.faults == []


def test_nobody_else_trusts_it_and_that_is_no_fault_of_the_server() -> None:
    with LoopbackServer(tls=True) as server:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20)
        with pytest.raises(ssl.SSLCertVerificationError):
            connection.connect()
        assert server.connections == 0
    assert server.faults == []


def test_the_certificate_is_for_the_names_of_this_machine() -> None:
    with LoopbackServer(tls=True) as server:
        for name in ("localhost", "127.0.0.1", "::1"):
            context = ssl.create_default_context(cadata=server.ca_pem)
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain,
                context.wrap_socket(plain, server_hostname=name) as secured,
            ):
                assert secured.version() is not None


def test_the_file_of_the_ca_is_there_while_the_server_is() -> None:
    with LoopbackServer(tls=True) as server:
        assert server.ca is not None
        file = Path(server.ca)
        assert file.read_text(encoding="ascii") == server.ca_pem
    assert not file.parent.exists()


def test_an_answer_larger_than_all_buffers_comes_whole() -> None:
    text = "x" * 1000
    with LoopbackServer([Script(tokens=[text] * 5000)], tls=True) as server:
        connection = connect(server)
        assert ask(connection).count(text.encode()) == 5000
        connection.close()


@pytest.mark.parametrize("mode", ["close", "reset"])
def test_a_drop_lets_what_was_sent_before_arrive(mode: str) -> None:
    script = Script(writes=[b"data: 1\n\n", b"data: 2\n\n"], drop_after=1, drop_mode=mode)  # type: ignore[arg-type]
    with LoopbackServer([script], tls=True) as server:
        connection = connect(server)
        connection.request("POST", "/v1/chat/completions", BODY)
        response = connection.getresponse()
        assert response.read(9) == b"data: 1\n\n"
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError, ssl.SSLEOFError)):
            response.read()
        connection.close()
        assert server.requests[0].dropped_ns is not None


def test_a_client_that_never_shakes_hands_does_not_hold_up_the_end() -> None:
    with LoopbackServer(tls=True) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as silent:
            connection = connect(server)  # the server has accepted the first one when it answers the second
            ask(connection)
            server.close()
            assert silent.recv(1) == b""
            connection.close()
        assert server.connections == 1


def test_without_trustme_the_error_is_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'spanwire\[testing\]'"):
        LoopbackServer(tls=True)
