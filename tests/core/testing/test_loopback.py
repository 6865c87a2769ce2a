"""What the server does whatever the wire; spoken to over the SSE part, by http.client."""

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from spanwire.endpoint import TLS
from spanwire.errors import ConfigurationError, PluginError
from spanwire.testing import Answer, LoopbackPart, LoopbackServer, Request, Script, echo
from spanwire.testing import loopback as loopback_module


class Client:
    """One connection, kept alive."""

    def __init__(self, server: LoopbackServer) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)

    def post(self, path: str = "/v1/chat/completions", *, text: str = "hi", model: str = "m") -> tuple[int, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        self._connection.request("POST", path, json.dumps(body), {"X-Test": "1", "x-test": "2"})
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def say(self, text: str = "hi", *, model: str = "m") -> str:
        _, answer = self.post(text=text, model=model)
        content = answer["choices"][0]["message"]["content"]
        assert isinstance(content, str)
        return content

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as server:
        yield server
    assert server.faults == []


@pytest.fixture
def client(server: LoopbackServer) -> Iterator[Client]:
    with closing(Client(server)) as client:
        yield client


def test_answers_with_a_sentence_made_of_the_last_user_message(client: Client) -> None:
    assert client.say("  What is\nup? ") == "You said: What is up?"
    assert client.say(" ".join("abcdefghijklmnop")) == "You said: a b c d e f g h i j k l…"
    assert client.say("") == "Hello from the loopback server."


def test_answers_the_input_of_a_request_that_has_no_messages() -> None:
    def said(**body: Any) -> str:
        raw = json.dumps(body).encode()
        request = Request(method="POST", path="/", query="", headers={}, raw=raw, connection=1)
        return "".join(echo(request).tokens)

    assert said(input="What is up?") == "You said: What is up?"
    assert said(input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]) == "You said: hi"
    assert said(input=3) == "Hello from the loopback server."


def test_a_script_stays_until_the_next_one_that_was_queued(server: LoopbackServer, client: Client) -> None:
    server.script(Script.say("one"))
    server.script(Script.say("two"))
    assert [client.say() for _ in range(3)] == ["one", "two", "two"]


def test_a_script_with_times_serves_so_many_calls(server: LoopbackServer, client: Client) -> None:
    server.script(Script.say("one"), times=2)
    server.script(Script.say("two"), times=1)
    assert [client.say() for _ in range(4)] == ["one", "one", "two", "You said: hi"]


def test_a_model_has_a_queue_of_its_own_before_that_for_all(server: LoopbackServer, client: Client) -> None:
    server.script(Script.say("for all"))
    server.script(Script.say("for a"), model="a", times=1)
    assert [client.say(model=model) for model in ("b", "a", "a")] == ["for all", "for a", "for all"]


def test_scripts_can_be_given_at_once() -> None:
    scripts: dict[str, Answer | list[Answer]] = {"a": Script.say("for a"), "b": [Script.say("one"), Script.say("two")]}
    with LoopbackServer(scripts) as server, closing(Client(server)) as client:
        assert [client.say(model=model) for model in "abb"] == ["for a", "one", "two"]
    with LoopbackServer([Script.say("one")]) as server, closing(Client(server)) as client:
        assert client.say() == "one"


def test_a_function_makes_the_script_for_the_request() -> None:
    def answer(request: Request) -> Script:
        return Script.say(f"{request.path} {request.model}")

    with LoopbackServer(default=answer) as server, closing(Client(server)) as client:
        assert client.say() == "/v1/chat/completions m"


def test_a_function_that_fails_is_an_answer_and_a_fault() -> None:
    def answer(request: Request) -> Script:
        raise ValueError("out of words")

    with LoopbackServer(default=answer) as server, closing(Client(server)) as client:
        status, body = client.post()
        assert status == 500
        assert "out of words" in body["error"]["message"]
        server.script(lambda request: None)  # type: ignore[arg-type, return-value]
        assert client.post()[0] == 500
        assert [("out of words" in fault, "must return a Script" in fault) for fault in server.faults] == [
            (True, False),
            (False, True),
        ]


def test_records_what_arrived(server: LoopbackServer, client: Client) -> None:
    client.post("/v1/chat/completions?a=b")
    (request,) = server.requests
    assert (request.method, request.path, request.query) == ("POST", "/v1/chat/completions", "a=b")
    assert request.headers["x-test"] == "1, 2"
    assert request.body == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert json.loads(request.raw) == request.body
    assert request.connection == 1
    assert request.ended
    assert not request.left
    assert request.headers_ns is not None
    assert request.content_ns is not None
    assert request.ended_ns is not None
    assert request.arrived_ns <= request.headers_ns <= request.content_ns <= request.ended_ns


def test_records_do_not_show_what_was_said(server: LoopbackServer, client: Client) -> None:
    client.say("a secret")
    assert "secret" not in repr(server.requests)
    assert "secret" not in repr(server)


def test_counts_connections(server: LoopbackServer, client: Client) -> None:
    client.say()
    client.say()
    assert (server.connections, server.open_connections) == (1, 1)
    with closing(Client(server)) as other:
        other.say()
        assert (server.connections, server.open_connections) == (2, 2)
        assert server.requests[-1].connection == 2
    server.wait_for(lambda s: s.open_connections == 1)
    assert server.connections == 2


def test_keeps_the_newest_requests_and_counts_the_others() -> None:
    with LoopbackServer(keep=2) as server, closing(Client(server)) as client:
        for text in "abc":
            client.say(text)
        assert [request.body["messages"][0]["content"] for request in server.requests] == ["b", "c"]
        assert server.forgotten == 1
        server.clear()
        assert server.requests == []
        assert server.forgotten == 0
        assert server.connections == 1


def test_wait_for_returns_what_the_predicate_gave(server: LoopbackServer) -> None:
    with closing(Client(server)) as client:
        thread = threading.Thread(target=client.say)
        thread.start()
        assert server.wait_for(lambda s: s.requests)[0].model == "m"
        thread.join()


def test_wait_for_gives_up_and_says_what_it_saw(server: LoopbackServer) -> None:
    with pytest.raises(TimeoutError, match="connections=0"):
        server.wait_for(lambda s: s.requests, timeout_s=0.01)


def test_can_be_waited_for_in_a_coroutine(server: LoopbackServer) -> None:
    async def main() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.to_thread(server.wait_for, lambda s: s.open_connections == 1)
        writer.close()
        await writer.wait_closed()
        await asyncio.to_thread(server.wait_for, lambda s: s.open_connections == 0)

    asyncio.run(main())


def test_close_leaves_no_thread_no_listener_and_no_connection() -> None:
    with LoopbackServer([Script(hang_after="request")]) as server:
        port = server.port
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as idle,
            socket.create_connection(("127.0.0.1", port), timeout=20) as busy,
        ):
            busy.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 46\r\n\r\n"
                b'{"model": "m", "messages": [{"role": "user"}]}'
            )
            server.wait_for(lambda s: s.requests and s.open_connections == 2)
            server.close()
            assert idle.recv(1) == b""
            assert busy.recv(1) == b""
    assert [thread.name for thread in threading.enumerate() if "loopback" in thread.name] == []
    assert server.open_connections == 0
    assert server.requests[0].dropped_ns is not None
    assert not server.requests[0].left
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_close_is_idempotent_and_fine_on_a_server_that_never_started() -> None:
    server = LoopbackServer()
    server.close()
    server.start()
    server.close()
    server.close()
    server.disconnect()
    assert server.requests == []


def test_starts_once() -> None:
    with LoopbackServer() as server, pytest.raises(RuntimeError, match="started before"):
        server.start()


def test_has_no_url_before_it_is_started() -> None:
    server = LoopbackServer()
    for name in ("url", "origin", "port"):
        with pytest.raises(RuntimeError, match="not started"):
            getattr(server, name)
    assert "not started" in repr(server)


def test_an_address_that_is_taken_is_an_error_and_leaves_nothing(server: LoopbackServer) -> None:
    second = LoopbackServer(port=server.port)
    with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
        second.start()
    assert [t.name for t in threading.enumerate()].count("spanwire-loopback") == 1


def test_disconnect_closes_idle_connections_and_goes_on_listening(server: LoopbackServer, client: Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as idle:
        server.wait_for(lambda s: s.open_connections == 1)
        server.disconnect()
        assert idle.recv(1) == b""
    server.wait_for(lambda s: s.open_connections == 0)
    assert client.say() == "You said: hi"


def test_disconnect_can_reset(server: LoopbackServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as idle:
        server.wait_for(lambda s: s.open_connections == 1)
        server.disconnect(reset=True)
        with pytest.raises(ConnectionResetError):
            idle.recv(1)


def test_endpoint_has_what_a_client_needs(server: LoopbackServer) -> None:
    endpoint = server.endpoint(api_key="k")
    assert endpoint.url == server.url == f"http://127.0.0.1:{server.port}/v1"
    assert server.origin == f"http://127.0.0.1:{server.port}"
    assert endpoint.api_key == "k"
    assert endpoint.tls == TLS()
    assert server.ca is None
    assert server.ca_pem is None


def test_a_url_never_names_the_address_that_means_any() -> None:
    with LoopbackServer(host="0.0.0.0") as server:
        assert server.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scripts": Script()}, r"\[ \]"),
        ({"scripts": ["hello"]}, "is a Script"),
        ({"options": {"loud": True}}, "'sse' has no options: loud"),
        ({"part": "carrier-pigeon"}, "carrier-pigeon.*installed: .*sse"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LoopbackServer(**arguments)


@pytest.mark.parametrize("times", [0, -1, True, 1.5])
def test_times_is_a_number_from_one(times: Any) -> None:
    with pytest.raises(ConfigurationError, match="times"):
        LoopbackServer().script(Script(), times=times)


@pytest.mark.parametrize(
    ("value", "words"), [("no_such_module:PART", "cannot be loaded"), ("json:dumps", "LoopbackPart asks for")]
)
def test_a_broken_part_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    point = EntryPoint(name="odd", value=value, group="spanwire.loopback")
    monkeypatch.setattr(loopback_module, "entry_points", lambda group: [point] if group == point.group else [])
    with pytest.raises(PluginError, match=f"'odd'.*{words}"):
        LoopbackServer(part="odd")


def test_takes_a_part_that_no_distribution_names() -> None:
    part = loopback_module.load_part("sse")
    assert isinstance(part, LoopbackPart)
    with LoopbackServer(part=part) as server, closing(Client(server)) as client:
        assert client.say() == "You said: hi"


def test_importing_it_needs_no_pytest_no_trustme_and_no_wire_library() -> None:
    code = (
        "import sys, spanwire.testing; "
        "print({'pytest', 'trustme', 'httptools', 'spanwire_sse', 'typer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
