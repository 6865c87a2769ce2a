"""Real servers of the Open Inference Protocol, and tritonclient beside us in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import spanwire
from spanwire.errors import BadRequest
from tests.peers import grpc_servers
from tests.peers.processes import ROOT, python_peer
from tests.support import AT_ONCE, assert_adds_up, run

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]
OLDEST = ("grpcio==1.60.0", "protobuf==4.25.0")
_SUITE_LIMIT_S = 900
PROMPT = "hello to everybody here"
WORDS = PROMPT.split()


# --- the oldest releases that we allow --------------------------------------------------------------------------------


def test_the_plugins_tests_pass_with_the_oldest_libraries() -> None:
    """They stand before the locked releases on the path. Where a loop is closed under a call, these keep its connection to
    the end of the process, as docs/grpc.md says: that test is left out."""
    python = python_peer("grpcio", *OLDEST)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.run([str(python), "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    environment = {**os.environ, "PYTHONPATH": folder}
    code = "import grpc, google.protobuf as p; print(f'grpcio=={grpc.__version__} protobuf=={p.__version__}')"
    asked = [sys.executable, "-c", code]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert found.stdout.split() == list(OLDEST)
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/plugins/grpc"]
    suite += ["-k", "not test_a_loop_that_was_closed_with_a_call_on_it"]
    done = subprocess.run(
        suite, capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=_SUITE_LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mlserver() -> Iterator[int]:
    with grpc_servers.mlserver() as port:
        yield port


@pytest.fixture(scope="module")
def kserve() -> Iterator[int]:
    with grpc_servers.kserve() as port:
        yield port


@pytest.fixture(scope="module")
def dynamo() -> Iterator[int]:
    with grpc_servers.dynamo() as port:
        yield port


def endpoint(port: int) -> spanwire.Endpoint:
    options = {"chat_template": "plain"}
    return spanwire.Endpoint(f"grpc://127.0.0.1:{port}", dialect="oip", options=options, proxy=None, retries=AT_ONCE)


def call(model: str = "echo", prompt: str = PROMPT) -> spanwire.Call:
    return spanwire.Call.chat(model, [{"role": "user", "content": prompt}], max_tokens=20)


def streamed(port: int) -> tuple[list[str], spanwire.Stream]:
    async def body() -> tuple[list[str], spanwire.Stream]:
        async with spanwire.ConnectionManager() as manager:
            for _ in range(2):
                async with manager.stream(endpoint(port), call()) as stream:
                    pieces = [chunk.text async for chunk in stream if chunk.text]
                assert_adds_up(stream.timeline)
            use = stream.timeline.connection
            assert use is not None
            assert use.reused
            return pieces, stream

    return run(body)


def whole(port: int, model: str = "echo") -> spanwire.Reply:
    async def body() -> spanwire.Reply:
        async with spanwire.ConnectionManager() as manager:
            return await manager.complete(endpoint(port), call(model))

    return run(body)


def test_mlserver_streams(mlserver: int) -> None:
    pieces, stream = streamed(mlserver)
    assert pieces == WORDS
    assert stream.reply.finish_reason is None  # it gives none
    assert stream.reply.headers["x-spanwire-prompt"] == "rendered; template=plain"
    assert stream.timeline.first_content_s is not None
    assert stream.timeline.segments["model"].duration_s > grpc_servers.WORD_GAP_S
    assert whole(mlserver).text == PROMPT


def test_kserve_answers_in_one_piece(kserve: int) -> None:
    pieces, _ = streamed(kserve)
    assert pieces == [f"echo: {PROMPT}"]
    assert whole(kserve).text == f"echo: {PROMPT}"


def test_dynamo_streams_as_triton_does(dynamo: int) -> None:
    pieces, stream = streamed(dynamo)
    assert pieces == [f"{word} " for word in WORDS]
    assert stream.reply.finish_reason == "stop"
    assert whole(dynamo).text.split() == WORDS


@pytest.mark.parametrize(("server", "end"), [("mlserver", ""), ("dynamo", "stop")])
def test_many_requests_on_one_stream(server: str, end: str, request: pytest.FixtureRequest) -> None:
    port = request.getfixturevalue(server)

    async def body() -> dict[str, str]:
        texts: dict[str, str] = {}
        stream = spanwire.Endpoint(f"grpc://127.0.0.1:{port}", dialect="oip-stream", proxy=None)
        async with spanwire.ConnectionManager() as manager:
            async with manager.session(stream, model="echo") as session:
                for id_ in ("1", "2", "3"):
                    prompt = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}
                    streaming = {"name": "streaming", "datatype": "BOOL", "shape": [1], "data": [True]}
                    await session.send({"id": id_, "inputs": [prompt, streaming] if end else [prompt]})
                await session.send_eof()
                async for event in session:
                    assert event.type == "response", event.data
                    id_ = event.data["id"]
                    texts[id_] = f"{texts.get(id_, '')} {event.text.strip()}".strip()
            assert [turn.outcome for turn in session.turns] == ["completed"] * (3 if end else 1)
        return texts

    if end:
        assert run(body) == dict.fromkeys(("1", "2", "3"), PROMPT)
    else:  # MLServer gives all of them the first one's id
        assert run(body) == {"1": " ".join([PROMPT] * 3)}


@pytest.mark.parametrize("server", ["mlserver", "kserve", "dynamo"])
def test_a_model_that_is_not_there(server: str, request: pytest.FixtureRequest) -> None:
    with pytest.raises(BadRequest) as caught:
        whole(request.getfixturevalue(server), "missing")
    assert caught.value.code == "NOT_FOUND"


_BOTH = """
import asyncio, json, queue, sys
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
import numpy
import spanwire
from spanwire_grpc.stubs import oip  # two packages "inference" in one process

port, prompt, streams = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "stream"

def texts(response):
    if response.raw_output_contents:
        raw = response.raw_output_contents[0]
        return raw[4:4 + int.from_bytes(raw[:4], "little")].decode()
    return b"".join(response.outputs[0].contents.bytes_contents).decode()

client = triton.InferenceServerClient(f"127.0.0.1:{port}")
given = triton.InferInput("text_input", [1], "BYTES")
given.set_data_from_numpy(numpy.array([prompt.encode()], dtype=object))
inputs = [given]
theirs = {"whole": texts(client.infer("echo", inputs).get_response())}
if streams:
    more = triton.InferInput("streaming", [1], "BOOL")
    more.set_data_from_numpy(numpy.array([True]))
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("echo", [given, more])
    pieces = []
    while True:
        result, error = answers.get(timeout=20)
        assert error is None, error
        response = result.get_response()
        piece = next((b"".join(o.contents.bytes_contents) for o in response.outputs if o.name == "text_output"), b"").decode()
        finish = next((b"".join(o.contents.bytes_contents) for o in response.outputs if o.name == "finish_reason"), b"")
        if piece:
            pieces.append(piece)
        if finish:
            break
    client.stop_stream()
    theirs["pieces"] = pieces
client.close()

async def ours():
    endpoint = spanwire.Endpoint(f"grpc://127.0.0.1:{port}", dialect="oip", options={"chat_template": "plain"}, proxy=None)
    call = spanwire.Call.chat("echo", [{"role": "user", "content": prompt}])
    async with spanwire.ConnectionManager() as manager:
        found = {"whole": (await manager.complete(endpoint, call)).text}
        if streams:
            async with manager.stream(endpoint, call) as stream:
                found["pieces"] = [chunk.text async for chunk in stream if chunk.text]
        return found

print(json.dumps({"theirs": theirs, "ours": asyncio.run(ours())}))
"""


@pytest.mark.parametrize(("server", "how"), [("mlserver", "unary"), ("kserve", "unary"), ("dynamo", "stream")])
def test_tritonclient_gets_the_same_answers_in_the_same_process(
    server: str, how: str, request: pytest.FixtureRequest
) -> None:
    port = request.getfixturevalue(server)
    ours = [str(ROOT), *(str(ROOT / "plugins" / name) for name in ("spanwire-sse", "spanwire-grpc"))]
    python = python_peer("tritonclient", "tritonclient[grpc]==2.73.0", *ours)
    done = subprocess.run(
        [str(python), "-c", _BOTH, str(port), PROMPT, how], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ours"] == found["theirs"]
    assert set(PROMPT.split()) <= set(found["ours"]["whole"].split())
