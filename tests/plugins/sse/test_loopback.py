"""The loopback server's part for HTTP/1.1 and server-sent events, byte by byte: by raw sockets only."""

import asyncio
import base64
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Self

import pytest

from spanwire.calls import Usage
from spanwire.testing import LoopbackServer, Request, Script, ScriptedTool

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "say hello"}]}
STREAM: dict[str, Any] = {**CHAT, "stream": True}
#: Clocks of one process; asyncio's timers may fire one tick of its clock early.
TICK_NS = 1_000_000


class Answer:
    """One answer, taken apart by hand: no HTTP library between us and the bytes."""

    def __init__(self, head: bytes, body: bytes, chunks: list[bytes]) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.status_line = lines[0]
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
        self.body = body
        self.chunks = chunks

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events' JSON; [DONE] as it is."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        data = [part.removeprefix("data: ") for part in parts]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    @property
    def deltas(self) -> list[Any]:
        return [event["choices"][0]["delta"] for event in self.events if event != "[DONE]" and event["choices"]]


class Client:
    """One raw connection."""

    def __init__(self, server: LoopbackServer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, body: Any, path: str = "/v1/chat/completions", *headers: str, method: str = "POST") -> None:
        self.socket.sendall(request_bytes(body, path, *headers, method=method))

    def ask(self, body: Any, path: str = "/v1/chat/completions", *headers: str, method: str = "POST") -> Answer:
        self.send(body, path, *headers, method=method)
        return self.read()

    def until(self, end: bytes) -> bytes:
        """What comes up to ``end``, which must come before the connection's end."""
        while end not in self._buffer:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError(self._buffer)
            self._buffer += data
        found, self._buffer = self._buffer.split(end, 1)
        return found

    def exactly(self, length: int) -> bytes:
        while len(self._buffer) < length:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError(self._buffer)
            self._buffer += data
        found, self._buffer = self._buffer[:length], self._buffer[length:]
        return found

    def rest(self) -> bytes:
        """Everything up to the connection's end."""
        data = [self._buffer]
        while piece := self.socket.recv(65536):
            data.append(piece)
        self._buffer = b""
        return b"".join(data)

    def read(self) -> Answer:
        head = self.until(b"\r\n\r\n")
        chunks: list[bytes] = []
        lower = head.lower()
        length = re.search(rb"content-length: (\d+)", lower)
        if length is not None:
            return Answer(head, self.exactly(int(length[1])), chunks)
        if b"transfer-encoding: chunked" not in lower:
            return Answer(head, self.rest() if b"connection: close" in lower else b"", chunks)
        while size := int(self.until(b"\r\n"), 16):
            chunks.append(self.exactly(size))
            assert self.exactly(2) == b"\r\n"
        assert self.exactly(2) == b"\r\n"
        return Answer(head, b"".join(chunks), chunks)


def request_bytes(body: Any, path: str = "/v1/chat/completions", *headers: str, method: str = "POST") -> bytes:
    raw = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + raw


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as server:
        yield server
    assert server.faults == []


@pytest.fixture
def client(server: LoopbackServer) -> Iterator[Client]:
    with Client(server) as client:
        yield client


@pytest.fixture
def lenient() -> Iterator[LoopbackServer]:
    """A server whose clients may misbehave."""
    with LoopbackServer() as server:
        yield server


# --- generated answers ------------------------------------------------------------------------------------------------


def test_streams_chat_as_an_openai_compatible_server(server: LoopbackServer, client: Client) -> None:
    server.script(Script.say("Hello there"))
    answer = client.ask(STREAM)
    assert answer.status_line == "HTTP/1.1 200 OK"
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = answer.events
    assert done == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {event["model"] for event in events} == {"m"}
    assert all(isinstance(event["created"], int) for event in events)
    assert [event["choices"] for event in events] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "Hello"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": " there"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]


def test_one_event_is_one_chunk(server: LoopbackServer, client: Client) -> None:
    answer = client.ask(STREAM)
    assert len(answer.chunks) == len(answer.events)
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in answer.chunks)


def test_two_answers_have_two_ids(client: Client) -> None:
    assert client.ask(STREAM).events[0]["id"] != client.ask(STREAM).events[0]["id"]


def test_answers_chat_without_a_stream_in_one_body(server: LoopbackServer, client: Client) -> None:
    server.script(Script.say("Hello there", usage=Usage(9, 2, 11, cached_tokens=4, reasoning_tokens=1)))
    answer = client.ask(CHAT)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["object"] == "chat.completion"
    assert answer.json["model"] == "m"
    assert answer.json["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer.json["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_reasoning_and_tool_calls_come_in_pieces_or_whole(server: LoopbackServer, client: Client) -> None:
    tools = [ScriptedTool("weather", ['{"city"', ':"Oslo"}'], id="call_x"), ScriptedTool("time")]
    server.script(Script(reasoning=["Let", " me"], tool_calls=tools))
    streamed = client.ask(STREAM)
    assert streamed.deltas[1:] == [
        {"reasoning_content": "Let"},
        {"reasoning_content": " me"},
        {"tool_calls": [tool_head(0, "call_x", "weather")]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ':"Oslo"}'}}]},
        {"tool_calls": [tool_head(1, "call_1", "time")]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert streamed.events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    message = client.ask(CHAT).json["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Let me",
        "tool_calls": [
            {"id": "call_x", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
            {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }


def tool_head(index: int, id: str, name: str) -> dict[str, Any]:
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}


def test_usage_is_streamed_when_asked_for_always_or_never(server: LoopbackServer, client: Client) -> None:
    asking = {**STREAM, "stream_options": {"include_usage": True}}

    def usages(body: Any) -> list[Any]:
        return [event["usage"] for event in client.ask(body).events if "usage" in event]

    counted = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    server.script(Script.say("Hello"))
    assert usages(STREAM) == []
    assert usages(asking) == [counted]
    assert client.ask(CHAT).json["usage"] == counted
    server.script(Script(usage=Usage(1, 2, 3)))
    assert usages(STREAM) == usages(asking) == [{"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}]
    server.script(Script(usage=None))
    assert usages(asking) == []
    assert "usage" not in client.ask(CHAT).json


def test_what_a_bad_server_leaves_out_can_be_left_out(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["a"], role_chunk=False, finish_reason=None, done=False))
    answer = client.ask(STREAM)
    assert answer.deltas == [{"content": "a"}]
    assert len(answer.events) == 1


def test_embeddings_depend_on_nothing_but_the_input(server: LoopbackServer, client: Client) -> None:
    def vectors(given: Any, **more: Any) -> list[Any]:
        answer = client.ask({"model": "e", "input": given, **more}, "/v1/embeddings").json
        assert answer["object"] == "list"
        assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
        return [row["embedding"] for row in answer["data"]]

    one, two = vectors(["a", "b"])
    assert vectors("a") == [one]
    assert vectors(["b"]) == [two]
    assert one != two
    assert len(one) == 8
    assert all(-1 <= number <= 1 for number in one)
    assert len(vectors([1, 2, 3])) == 1  # token ids of one text
    assert len(vectors([[1, 2], [3]])) == 2
    assert len(vectors("a", dimensions=3)[0]) == 3
    server.script(Script(dimensions=5))
    assert len(vectors("a")[0]) == 5


def test_embeddings_packed_in_base64_are_the_same_numbers(client: Client) -> None:
    body = {"model": "e", "input": "a"}
    plain = client.ask(body, "/v1/embeddings").json
    packed = client.ask({**body, "encoding_format": "base64"}, "/v1/embeddings").json
    numbers = struct.unpack("<8f", base64.b64decode(packed["data"][0]["embedding"]))
    assert list(numbers) == plain["data"][0]["embedding"]
    assert plain["usage"] == {"prompt_tokens": 1, "total_tokens": 1}


def test_lists_its_models(server: LoopbackServer, client: Client) -> None:
    def models() -> list[str]:
        return [model["id"] for model in client.ask(None, "/v1/models", method="GET").json["data"]]

    assert models() == ["loopback"]
    server.script(Script(), model="b")
    server.script(Script(), model="a")
    assert models() == ["a", "b"]
    client.send(None, "/v1/models", method="HEAD")
    assert b"200 OK" in client.until(b"\r\n\r\n")
    assert client.ask(CHAT).status == 200


def test_paths_may_have_any_prefix_and_a_query(server: LoopbackServer, client: Client) -> None:
    path = "/openai/deployments/m/chat/completions?api-version=1"
    assert client.ask(CHAT, path).json["object"] == "chat.completion"
    assert server.requests[0].query == "api-version=1"


# --- time -------------------------------------------------------------------------------------------------------------


def waits(request: Request) -> tuple[int, int, int]:
    """Nanoseconds from arrival to headers, to content, to the end."""
    assert request.headers_ns is not None
    assert request.content_ns is not None
    assert request.ended_ns is not None
    return (
        request.headers_ns - request.arrived_ns,
        request.content_ns - request.headers_ns,
        request.ended_ns - request.content_ns,
    )


def test_a_stream_waits_in_each_phase_as_scripted(server: LoopbackServer, client: Client) -> None:
    script = Script(tokens=["a", "b", "c"], queue_s=0.03, headers_s=0.02, prefill_s=0.04, gap_s=0.02, end_s=0.03)
    server.script(script)
    client.ask(STREAM)
    queue, prefill, rest = waits(server.requests[0])
    assert queue >= 30_000_000 - TICK_NS
    assert prefill >= 60_000_000 - TICK_NS
    assert prefill + rest >= 130_000_000 - TICK_NS  # tokens follow a schedule: a late one shortens what is left


def test_a_whole_answer_comes_after_the_sum_of_the_delays(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["a", "b"], queue_s=0.02, headers_s=0.02, prefill_s=0.02, gap_s=0.02, end_s=0.02))
    client.ask(CHAT)
    assert waits(server.requests[0])[0] >= 100_000_000 - TICK_NS


def test_an_answer_without_content_waits_all_the_same(server: LoopbackServer, client: Client) -> None:
    server.script(Script(prefill_s=0.03))
    client.ask(STREAM)
    request = server.requests[0]
    assert request.content_ns is None
    assert request.headers_ns is not None
    assert request.ended_ns is not None
    assert request.ended_ns - request.headers_ns >= 30_000_000 - TICK_NS


def test_headers_and_role_come_before_the_prefill_ends(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["a"], prefill_s=60.0))
    client.send(STREAM)
    client.until(b"\r\n\r\n")
    assert b'"role":"assistant"' in client.until(b"\n\n")
    assert server.requests[0].content_ns is None


def test_the_terminal_event_and_the_end_are_one_write(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["a", "b"], gap_s=0.001))
    client.send(STREAM)
    received = [client.socket.recv(65536)]
    while b"[DONE]" not in received[-1]:
        received.append(client.socket.recv(65536))
    assert received[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_late_end_comes_after_the_terminal_event(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["a"], end_s=60.0))
    client.send(STREAM)
    client.until(b"data: [DONE]\n\n\r\n")
    assert not server.requests[0].ended


def test_writes_have_a_pace_of_their_own(server: LoopbackServer, client: Client) -> None:
    server.script(Script(writes=[b"a", b"b", b"c"], write_gap_s=0.02))
    client.ask(STREAM)
    assert waits(server.requests[0])[2] >= 40_000_000 - TICK_NS


def test_a_pace_faster_than_the_loop_can_sleep_is_kept_on_average(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["a"] * 20_000, gap_s=1e-7))
    assert len(client.ask(STREAM).events) == 20_003


# --- what the server says of its own time -----------------------------------------------------------------------------


PHASES: dict[str, Any] = {"queue_s": 0.01, "headers_s": 0.005, "prefill_s": 0.02, "gap_s": 0.01, "end_s": 0.01}
USAGE_STREAM: dict[str, Any] = {**STREAM, "stream_options": {"include_usage": True}}


def told(server: LoopbackServer, client: Client, dialect: str, ask: Any, **more: Any) -> tuple[Answer, Request]:
    server.script(Script(tokens=["a", "b", "c"], server_timing=dialect, **PHASES, **more))
    answer = client.ask(ask)
    return answer, server.requests[-1]


@pytest.mark.parametrize("body", [CHAT, STREAM])
def test_the_server_measures_each_phase(server: LoopbackServer, client: Client, body: Any) -> None:
    server.script(Script(tokens=["a", "b", "c"], **PHASES))
    client.ask(body)
    times = server.requests[0].times
    assert times.queue_s is not None
    assert times.prefill_s is not None
    assert times.decode_s is not None
    assert times.total_s is not None
    early_s = 2 * TICK_NS / 1e9  # and phases follow a schedule: a late one shortens the next
    assert times.queue_s >= 0.01 - early_s
    assert times.queue_s + times.prefill_s >= 0.035 - early_s
    assert times.queue_s + times.prefill_s + times.decode_s >= 0.055 - early_s
    assert times.total_s >= 0.065 - early_s


@pytest.mark.parametrize("body", [CHAT, USAGE_STREAM])
def test_vllm_tells_milliseconds_in_the_body_or_beside_the_usage(
    server: LoopbackServer, client: Client, body: Any
) -> None:
    answer, request = told(server, client, "vllm", body)
    said = answer.events[-2] if body is USAGE_STREAM else answer.json
    assert said["usage"]["completion_tokens"] == 3
    assert said["metrics"] == {
        "queue_time_ms": pytest.approx((request.times.queue_s or 0) * 1e3),
        "time_to_first_token_ms": pytest.approx((request.times.prefill_s or 0) * 1e3),
        "generation_time_ms": pytest.approx((request.times.decode_s or 0) * 1e3),
    }
    early_ms = 2 * TICK_NS / 1e6
    assert sum(said["metrics"].values()) >= 55 - early_ms  # a late phase shortens the next, as above


@pytest.mark.parametrize("dialect", ["vllm", "cerebras"])
def test_a_dialect_that_tells_beside_the_usage_is_silent_without_it(
    server: LoopbackServer, client: Client, dialect: str
) -> None:
    answer, _ = told(server, client, dialect, STREAM)
    assert b"queue_time" not in answer.body
    assert answer.deltas[-1] == {}


@pytest.mark.parametrize(("body", "event"), [(STREAM, -2), (USAGE_STREAM, -2)])
def test_llama_cpp_tells_in_the_last_event_there_is(
    server: LoopbackServer, client: Client, body: Any, event: int
) -> None:
    answer, request = told(server, client, "llama.cpp", body)
    assert answer.body.count(b"timings") == 1
    assert answer.events[event]["timings"] == {
        "prompt_ms": pytest.approx((request.times.prefill_s or 0) * 1e3),
        "predicted_ms": pytest.approx((request.times.decode_s or 0) * 1e3),
    }


def test_groq_tells_seconds_inside_the_usage_or_beside_the_finish_reason(
    server: LoopbackServer, client: Client
) -> None:
    whole, request = told(server, client, "groq", CHAT)
    assert whole.json["usage"]["total_tokens"] == 5
    assert whole.json["usage"]["queue_time"] == pytest.approx(request.times.queue_s)
    stream, request = told(server, client, "groq", STREAM)
    last = stream.events[-2]
    assert last["choices"][0]["finish_reason"] == "stop"
    usage = last["x_groq"]["usage"]
    assert usage["completion_time"] == pytest.approx(request.times.decode_s)
    assert usage["total_time"] == pytest.approx(usage["prompt_time"] + usage["completion_time"])


def test_a_total_is_that_at_the_moment_of_telling(server: LoopbackServer, client: Client) -> None:
    whole, request = told(server, client, "cerebras", CHAT)
    total_s = whole.json["time_info"]["total_time"]
    assert 0.065 - TICK_NS / 1e9 <= total_s <= (request.times.total_s or 0)
    stream, request = told(server, client, "cerebras", USAGE_STREAM)
    # The end of the message comes later than the event that tells.
    assert stream.events[-2]["time_info"]["total_time"] <= (request.times.total_s or 0) - 0.01 + TICK_NS / 1e9


def test_fireworks_tells_in_headers_and_in_a_stream_when_it_is_asked(server: LoopbackServer, client: Client) -> None:
    whole, request = told(server, client, "fireworks", CHAT)
    prefill = whole.headers["fireworks-prefill-duration"]
    assert float(prefill) == pytest.approx(request.times.prefill_s, abs=1e-6)
    assert b"perf_metrics" not in told(server, client, "fireworks", STREAM)[0].body
    stream, _ = told(server, client, "fireworks", {**STREAM, "perf_metrics_in_response": True})
    assert float(stream.events[-2]["perf_metrics"]["prefill-queue-duration"]) >= 0.009


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("openai", "openai-processing-ms"),
        ("envoy", "x-envoy-upstream-service-time"),
        ("server-timing", "server-timing"),
        ("tgi", "x-total-time"),
    ],
)
def test_headers_of_a_whole_answer_tell_all_and_those_of_a_stream_the_time_to_themselves(
    server: LoopbackServer, client: Client, dialect: str, name: str
) -> None:
    whole, _ = told(server, client, dialect, CHAT)
    assert int(re.findall(r"\d+", whole.headers[name])[-2 if dialect == "server-timing" else -1]) >= 63
    stream, request = told(server, client, dialect, STREAM)
    if dialect == "tgi":
        assert "x-compute-type" in stream.headers
        assert name not in stream.headers
        return
    total = float(stream.headers[name].rsplit("=", 1)[-1])
    assert 9 <= total <= ((request.headers_ns or 0) - request.arrived_ns) / 1e6
    assert "prefill" not in stream.headers[name]


def test_an_error_has_the_headers_of_a_front_end_and_not_those_of_the_model(
    server: LoopbackServer, client: Client
) -> None:
    assert "openai-processing-ms" in told(server, client, "openai", CHAT, status=400)[0].headers
    assert "x-total-time" not in told(server, client, "tgi", CHAT, status=500)[0].headers
    assert b"metrics" not in told(server, client, "vllm", CHAT, status=500)[0].body


def test_a_given_header_and_a_given_body_win(server: LoopbackServer, client: Client) -> None:
    answer, _ = told(server, client, "openai", CHAT, headers={"OpenAI-Processing-Ms": "7"})
    assert answer.headers["openai-processing-ms"] == "7"
    assert told(server, client, "vllm", CHAT, body=b"{}")[0].body == b"{}"


def test_a_stream_without_content_says_that_it_does_not_know(server: LoopbackServer, client: Client) -> None:
    server.script(Script(server_timing="vllm", queue_s=0.01))
    metrics = client.ask(USAGE_STREAM).events[-2]["metrics"]
    assert metrics["queue_time_ms"] >= 9
    assert metrics["time_to_first_token_ms"] is None
    assert metrics["generation_time_ms"] is None


# --- bytes and statuses -----------------------------------------------------------------------------------------------


def test_each_write_is_one_chunk_of_exactly_its_bytes(server: LoopbackServer, client: Client) -> None:
    writes = [b"\xef\xbb\xbfdata: {", b"}\r", b"\n\r\n", b"\x00\xff", b"data: [DONE]\n\n"]
    server.script(Script(writes=writes, content_type="text/event-stream", headers={"X-A": "b"}))
    answer = client.ask(STREAM)
    assert answer.chunks == writes
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-a"] == "b"
    assert client.ask(CHAT).chunks == writes


def test_a_body_is_sent_as_it_is_with_its_length(server: LoopbackServer, client: Client) -> None:
    server.script(Script(body=b"<html>", content_type="text/html", status=502))
    answer = client.ask(STREAM)
    assert answer.status_line == "HTTP/1.1 502 Bad Gateway"
    assert answer.headers["content-type"] == "text/html"
    assert answer.headers["content-length"] == "6"
    assert answer.body == b"<html>"


@pytest.mark.parametrize(("status", "kind"), [(429, "invalid_request_error"), (529, "server_error")])
def test_a_bad_status_has_an_error_object(server: LoopbackServer, client: Client, status: int, kind: str) -> None:
    server.script(Script(status=status, headers={"Retry-After": "1"}))
    answer = client.ask(STREAM)
    assert answer.status == status
    assert answer.headers["retry-after"] == "1"
    assert answer.json["error"]["type"] == kind
    assert answer.json["error"]["code"] == status


def test_a_status_without_a_body_has_none(server: LoopbackServer, client: Client) -> None:
    server.script(Script(status=204), times=1)
    client.send(CHAT)
    assert b"content-length" not in client.until(b"\r\n\r\n")
    assert client.ask(CHAT).status == 200


def test_a_given_header_replaces_the_server_s_own(server: LoopbackServer, client: Client) -> None:
    server.script(Script(writes=[b"ab", b"cd"], headers={"Content-Type": "x/y", "Content-Length": "3"}))
    client.send(STREAM)
    head = client.until(b"\r\n\r\n")
    assert head.lower().count(b"content-type") == 1
    assert b"transfer-encoding" not in head
    assert client.exactly(4) == b"abcd"


def test_a_stream_without_chunks_ends_with_its_connection(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["a"], chunked=False))
    answer = client.ask(STREAM)
    assert answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers
    assert answer.events[-1] == "[DONE]"


def test_http_1_0_gets_no_chunks(server: LoopbackServer, client: Client) -> None:
    client.socket.sendall(request_bytes(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
    answer = client.read()
    assert "transfer-encoding" not in answer.headers
    assert answer.events[-1] == "[DONE]"


# --- connections ------------------------------------------------------------------------------------------------------


def test_a_connection_serves_one_call_after_the_other(server: LoopbackServer, client: Client) -> None:
    for body in (STREAM, CHAT, STREAM):
        assert client.ask(body).status == 200
    assert server.connections == 1
    assert [request.connection for request in server.requests] == [1, 1, 1]


@pytest.mark.parametrize("body", [CHAT, STREAM])
def test_close_is_announced_and_done(server: LoopbackServer, client: Client, body: Any) -> None:
    server.script(Script(close=True))
    assert client.ask(body).headers["connection"] == "close"
    assert client.rest() == b""
    assert server.requests[0].ended
    assert not server.requests[0].left


def test_a_client_may_ask_for_the_close(client: Client) -> None:
    assert client.ask(CHAT, "/v1/chat/completions", "Connection: close").headers["connection"] == "close"
    assert client.rest() == b""


def test_a_request_may_come_in_single_bytes(server: LoopbackServer, client: Client) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in request_bytes(CHAT):
        client.socket.sendall(bytes([byte]))
    assert client.read().status == 200
    assert server.requests[0].body == CHAT


def test_a_large_request_is_waited_for_and_may_ask_first(server: LoopbackServer, client: Client) -> None:
    body = {**CHAT, "padding": "x" * 2_000_000}
    head, raw = request_bytes(body, "/v1/chat/completions", "Expect: 100-continue").split(b"\r\n\r\n", 1)
    client.socket.sendall(head + b"\r\n\r\n")
    assert client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
    client.socket.sendall(raw)
    assert client.read().status == 200
    assert server.requests[0].raw == raw


def test_a_client_that_reads_slowly_gets_everything(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["x" * 1000] * 20_000))  # more than the kernel buffers on both sides
    client.send(STREAM)
    server.wait_for(lambda s: s.requests and s.requests[0].content_ns)
    with Client(server) as other:  # nobody else waits for the slow one
        assert other.ask({**CHAT, "model": "other"}).status == 200
    assert not server.requests[0].ended
    assert len(client.read().events) == 20_003


def test_many_streams_at_once_share_one_pace(server: LoopbackServer) -> None:
    server.script(Script(tokens=["a"] * 20, gap_s=0.005))

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_bytes(STREAM))
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        return answer

    async def main() -> Sequence[bytes]:
        return await asyncio.gather(*(one() for _ in range(50)))

    assert [answer.count(b'"content":"a"') for answer in asyncio.run(main())] == [20] * 50
    assert server.connections == 50


# --- drops, hangs and clients that leave ------------------------------------------------------------------------------


def test_dropped_before_the_answer(server: LoopbackServer, client: Client) -> None:
    server.script(Script(drop_after="request"), times=1)
    client.send(STREAM)
    assert client.rest() == b""
    assert server.requests[0].dropped_ns is not None
    assert not server.requests[0].left
    with Client(server) as other:
        assert other.ask(STREAM).status == 200


def test_reset_before_the_answer(server: LoopbackServer, client: Client) -> None:
    server.script(Script(drop_after="request", drop_mode="reset"))
    client.send(STREAM)
    with pytest.raises(ConnectionResetError):
        client.rest()


def test_dropped_inside_a_chunk_after_so_many_events(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["a", "b", "c"], drop_after=2))
    client.send(STREAM)
    received = client.rest()
    assert received.endswith(b'\r\n40\r\ndata: {"id')
    assert b'"content":"a"' in received
    assert b'"content":"b"' not in received
    assert received.count(b"data: ") == 3


def test_dropped_after_all_writes_instead_of_the_end(server: LoopbackServer, client: Client) -> None:
    server.script(Script(writes=[b"one", b"two"], drop_after=2))
    client.send(STREAM)
    client.until(b"\r\n\r\n")
    assert client.rest() == b'3\r\none\r\n3\r\ntwo\r\n40\r\ndata: {"id'


def test_what_came_before_a_reset_can_be_read(server: LoopbackServer, client: Client) -> None:
    server.script(Script(writes=[b"one", b"two", b"three"], drop_after=2, drop_mode="reset"))
    client.send(STREAM)
    client.until(b"\r\n\r\n")
    assert client.exactly(16) == b"3\r\none\r\n3\r\ntwo\r\n"
    with pytest.raises(ConnectionResetError):
        client.rest()


@pytest.mark.parametrize("mode", ["close", "reset"])
def test_a_whole_body_is_dropped_in_its_middle(
    server: LoopbackServer, client: Client, mode: Literal["close", "reset"]
) -> None:
    server.script(Script(body=b"abcdefgh", drop_after=0, drop_mode=mode))
    client.send(CHAT)
    assert b"content-length: 8" in client.until(b"\r\n\r\n")
    if mode == "close":
        assert client.rest() == b"abcd"
    else:
        with pytest.raises(ConnectionResetError):
            client.rest()


def test_after_a_whole_body_the_connection_is_closed_without_notice(server: LoopbackServer, client: Client) -> None:
    server.script(Script(body=b"abcdefgh", drop_after=1))
    answer = client.ask(CHAT)
    assert "connection" not in answer.headers
    assert client.rest() == b""
    assert server.requests[0].ended


def test_never_answers(server: LoopbackServer) -> None:
    server.script(Script(hang_after="request"))
    with Client(server) as client:
        client.send(STREAM)
        server.wait_for(lambda s: s.requests)
    request = server.wait_for(lambda s: [r for r in s.requests if r.left])[0]
    assert request.headers_ns is None


def test_hangs_after_so_many_events(server: LoopbackServer, client: Client) -> None:
    server.script(Script(tokens=["a", "b"], hang_after=2))
    client.send(STREAM)
    client.until(b'"content":"a"')
    server.disconnect()
    assert b"data: " not in client.rest()
    assert server.requests[0].dropped_ns is not None


def test_a_whole_body_cannot_hang_after_its_end(server: LoopbackServer, client: Client) -> None:
    server.script(Script(hang_after=1))
    assert client.ask(CHAT).status == 200
    assert client.ask(CHAT).status == 200


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_leaves_in_the_middle_ends_its_answer_at_once(server: LoopbackServer, how: str) -> None:
    server.script(Script(tokens=["a"] * 10, gap_s=60.0))
    with Client(server) as client:
        client.send(STREAM)
        client.until(b'"content":"a"')
        if how == "reset":
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half":
            client.socket.shutdown(socket.SHUT_WR)
            client.rest()
    request = server.requests[0]
    server.wait_for(lambda s: request.left and s.open_connections == 0)
    assert not request.ended
    assert request.dropped_ns is None


def test_a_client_that_leaves_while_it_is_too_slow_is_noticed(server: LoopbackServer) -> None:
    server.script(Script(tokens=["x" * 1000] * 20_000))
    with Client(server) as client:
        client.send(STREAM)
        server.wait_for(lambda s: s.requests and s.requests[0].content_ns)
    server.wait_for(lambda s: s.requests[0].left and s.open_connections == 0)


def test_a_client_that_leaves_between_the_terminal_event_and_the_end_has_left(server: LoopbackServer) -> None:
    server.script(Script(tokens=["a"], end_s=60.0))
    with Client(server) as client:
        client.send(STREAM)
        client.until(b"[DONE]")
    server.wait_for(lambda s: s.requests[0].left)


def test_a_client_that_leaves_after_the_end_has_not_left(server: LoopbackServer) -> None:
    with Client(server) as client:
        client.ask(STREAM)
    server.wait_for(lambda s: s.open_connections == 0)
    assert server.requests[0].ended
    assert not server.requests[0].left


def test_a_client_that_leaves_before_its_request_is_whole_has_asked_nothing(server: LoopbackServer) -> None:
    with Client(server) as client:
        client.socket.sendall(request_bytes(CHAT)[:-5])
        server.wait_for(lambda s: s.open_connections == 1)
    server.wait_for(lambda s: s.connections == 1 and s.open_connections == 0)
    assert server.requests == []


def test_answers_that_were_left_leave_no_task() -> None:
    """Their tasks are cancelled when the clients leave, not when the server ends."""
    tasks: list[int] = []

    def count(request: Request) -> Script:
        tasks.append(len(asyncio.all_tasks()))
        return Script(hang_after="request")

    with LoopbackServer(default=count) as server:
        for _ in range(5):
            with Client(server) as client:
                client.send(STREAM)
                server.wait_for(lambda s: s.requests)
            server.wait_for(lambda s: s.requests[-1].left and s.open_connections == 0)
            server.clear()
    assert tasks == [2] * 5  # the server's own, and this answer's
    assert [thread for thread in threading.enumerate() if "loopback" in thread.name] == []


# --- a dialect that it does not know ----------------------------------------------------------------------------------


def test_bytes_of_ones_own_are_played_at_any_path(server: LoopbackServer, client: Client) -> None:
    server.script(Script(body=b'{"mine": 1}'), times=1)
    server.script(Script(writes=[b"data: 1\n\n", b"data: 2\n\n"], content_type="text/event-stream"), times=1)
    server.script(lambda request: Script(body=request.path.encode(), status=418), times=1)
    assert client.ask({"any": "thing"}, "/v1/messages").json == {"mine": 1}
    answer = client.ask([], "/generate?q=1")
    assert (answer.headers["content-type"], answer.body) == ("text/event-stream", b"data: 1\n\ndata: 2\n\n")
    answer = client.ask({}, "/teapot")
    assert (answer.status, answer.body) == (418, b"/teapot")
    assert client.ask({}, "/teapot").status == 404  # the default has none


def test_a_function_that_fails_at_such_a_path_is_a_fault(lenient: LoopbackServer) -> None:
    def fails(request: Request) -> Script:
        raise ValueError("no script")

    lenient.script(fails)
    with Client(lenient) as client:
        assert client.ask({}, "/teapot").status == 500
    assert "no script" in lenient.faults[0]


# --- what clients do wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "path", "method", "status", "words"),
    [
        (CHAT, "/v1/nothing", "POST", 404, "/v1/nothing"),
        (None, "/v1/chat/completions", "GET", 405, "takes POST"),
        ([], "/v1/chat/completions", "POST", 400, "not a JSON object"),
        ({"messages": [{}]}, "/v1/chat/completions", "POST", 400, "model"),
        ({"model": "m", "messages": []}, "/v1/chat/completions", "POST", 400, "messages"),
        ({"model": "m"}, "/v1/embeddings", "POST", 400, "input"),
        ({"model": "m", "input": "a", "dimensions": 10**9}, "/v1/embeddings", "POST", 400, "dimensions"),
    ],
)
def test_a_wrong_call_is_answered_as_a_real_server_does(
    server: LoopbackServer, client: Client, body: Any, path: str, method: str, status: int, words: str
) -> None:
    server.script(Script.say("not taken"), times=1)
    answer = client.ask(body, path, method=method)
    assert answer.status == status
    assert words in answer.json["error"]["message"]
    assert len(server.requests) == 1
    assert client.ask(CHAT).json["choices"][0]["message"]["content"] == "not taken"


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"HELLO\r\n\r\n", 400, "not HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 70_000, 431, "head is over"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", 400, "switch of protocols"),
        (
            request_bytes(CHAT, "/v1/chat/completions", "Connection: upgrade", "Upgrade: h2c"),
            400,
            "switch of protocols",
        ),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n", 400, "switch of protocols"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 70000000\r\n\r\n", 413, "body is over"),
    ],
)
def test_what_is_no_request_is_refused_and_recorded(
    lenient: LoopbackServer, data: bytes, status: int, words: str
) -> None:
    with Client(lenient) as client:
        client.socket.sendall(data)
        answer = client.read()
        assert answer.status == status
        assert words in answer.json["error"]["message"]
        assert client.rest() == b""
    assert [words in fault for fault in lenient.faults] == [True]


def test_a_body_that_does_not_say_its_length_is_bounded_too(
    lenient: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spanwire_sse.loopback._MAX_BODY_BYTES", 1000)
    with Client(lenient) as client:
        client.socket.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001)
        assert client.read().status == 413
    assert len(lenient.faults) == 1
    assert lenient.requests == []


def test_a_request_before_the_end_of_the_last_answer_is_a_fault(lenient: LoopbackServer) -> None:
    lenient.script(Script(tokens=["a"], end_s=60.0))
    with Client(lenient) as client:
        client.send(STREAM)
        client.until(b"[DONE]")
        client.send(STREAM)
        lenient.wait_for(lambda s: s.faults)
        client.rest()
    assert "before the end of the answer" in lenient.faults[0]
    assert lenient.requests[0].dropped_ns is not None


# --- other sockets ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no unix sockets here")
@pytest.mark.parametrize("mode", ["close", "reset"])
def test_serves_on_a_unix_socket_and_removes_it(tmp_path: Path, mode: Literal["close", "reset"]) -> None:
    path = tmp_path / "s.sock"
    with LoopbackServer(uds=str(path)) as server:
        assert server.url == "http://localhost/v1"
        assert server.origin == "http://localhost"
        assert server.port == 0
        assert server.endpoint().uds == str(path)
        server.script(Script(tokens=["a"]), times=1)
        server.script(Script(tokens=["a"], drop_after=1, drop_mode=mode))
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(path))
            for end in (b"0\r\n\r\n", b""):
                client.sendall(request_bytes(STREAM))
                received = b""
                while data := client.recv(65536):
                    received += data
                    if end and received.endswith(end):
                        break
                assert b'"role"' in received
    assert not path.exists()
    assert server.faults == []


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_serves_on_ipv6() -> None:
    server = LoopbackServer(host="::1")
    try:
        server.start()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with closing(server), socket.create_connection(("::1", server.port), timeout=20) as client:
        assert server.url == f"http://[::1]:{server.port}/v1"
        client.sendall(request_bytes(CHAT))
        assert client.recv(15) == b"HTTP/1.1 200 OK"
