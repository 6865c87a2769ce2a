"""The Open Inference Protocol, as each of its servers speaks it."""

from __future__ import annotations

from typing import Any

import pytest
from spanwire_grpc.loopback import GRPCPart

import spanwire
from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.support import AT_ONCE, hello, read, run

SERVERS = ("triton", "mlserver", "kserve", "dynamo")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PLAIN = {"chat_template": "plain"}
HELLO = "Hello from the loopback server."


def serving(*scripts: Any, server: str = "triton", **more: Any) -> LoopbackServer:
    return LoopbackServer([*scripts], part=GRPCPart(oip=server, **more))


def ask(server: LoopbackServer, call: spanwire.Call | None = None, **more: Any) -> tuple[list[str], spanwire.Reply]:
    """The pieces of a stream, and its reply."""
    settings = {"dialect": "oip", "options": PLAIN, "retries": AT_ONCE, **more}

    async def body() -> tuple[list[str], spanwire.Reply]:
        async with spanwire.ConnectionManager() as manager:
            asked = call or spanwire.Call.chat("m", [{"role": "user", "content": "Say hello"}])
            async with manager.stream(server.endpoint(**settings), asked) as stream:
                pieces = [chunk.text async for chunk in stream if chunk.text]
            return pieces, stream.reply

    return run(body)


@pytest.mark.parametrize("kind", SERVERS)
def test_which_server_it_is_is_asked_once_for_each_connection(kind: str) -> None:
    with serving(hello(), server=kind) as server:

        async def body() -> None:
            async with spanwire.ConnectionManager() as manager:
                endpoint = server.endpoint(dialect="oip", options=PLAIN)
                for _ in range(3):
                    async with manager.stream(
                        endpoint, spanwire.Call.chat("m", [{"role": "user", "content": "x"}])
                    ) as s:
                        assert await read(s) == HELLO
                    assert (
                        await manager.complete(endpoint, spanwire.Call.chat("m", [{"role": "user", "content": "x"}]))
                    ).text == HELLO

        run(body)
        assert len(server.requests) == 6
        assert server.faults == []


def test_triton_ends_by_its_final_response_and_counts_its_tokens() -> None:
    with serving(hello()) as server:
        pieces, reply = ask(server)
    assert "".join(pieces) == HELLO
    assert reply.finish_reason == "stop"
    assert reply.usage == spanwire.Usage(2, 5, 7)
    assert reply.id
    assert reply.model == "m"


def test_the_prompt_is_rendered_by_the_models_template_and_the_reply_says_so() -> None:
    with serving(server="mlserver", chat_template=TEMPLATE) as server:
        _, reply = ask(server, options={})
        assert server.requests[0].body["prompt"] == "<user>Say hello"
    assert reply.headers["x-spanwire-prompt"] == "rendered; template=model"


@pytest.mark.parametrize("kind", SERVERS)
def test_parameters_go_where_the_server_looks_for_them(kind: str) -> None:
    call = spanwire.Call.chat(
        "m", [{"role": "user", "content": "x"}], max_completion_tokens=9, temperature=0.5, stop=["a"], best=True
    )
    with serving(hello(), server=kind) as server:
        ask(server, call)
        body = server.requests[0].body
    if kind == "triton":
        import json

        body = {**body, **json.loads(body["sampling_parameters"])}
        assert body["stop"] == ["a"]
        assert body["stream"] is True
    else:
        assert body["stop"] == '["a"]'
    assert body["max_tokens"] == 9
    assert body["temperature"] == 0.5
    assert body["best"] is True
    assert ("streaming" in body) == (kind == "dynamo")


@pytest.mark.parametrize("kind", ["mlserver", "kserve", "dynamo"])
def test_embeddings(kind: str) -> None:
    with serving(Script(dimensions=4), server=kind) as server:

        async def body() -> spanwire.Embeddings:
            async with spanwire.ConnectionManager() as manager:
                call = spanwire.Call.embeddings("embed", ["a", "b", "a"])
                return await manager.embed(server.endpoint(dialect="oip"), call)

        found = run(body)
    assert [len(vector) for vector in found.vectors] == [4, 4, 4]
    assert found.vectors[0] == found.vectors[2] != found.vectors[1]


def test_the_two_dialects_of_one_path_are_not_mixed_up() -> None:
    """Read as Triton's, an answer of MLServer's is an error message that is the model's name."""
    with serving(hello(), server="mlserver") as server:
        with pytest.raises(errors.ServerError, match="m"):
            ask(server, options={**PLAIN, "oip_server": "triton"})
        assert "".join(ask(server)[0]) == HELLO


def test_an_error_in_a_stream_of_tritons() -> None:
    with serving(Script(status=500)) as server, pytest.raises(errors.ServerError, match="the script says 500"):
        ask(server)


def test_a_model_that_is_not_there() -> None:
    call = spanwire.Call.chat("missing", [{"role": "user", "content": "x"}])
    with serving() as server, pytest.raises(errors.BadRequest, match="not found") as caught:
        ask(server, call)
    assert caught.value.code == "NOT_FOUND"


def test_a_full_server_is_tried_again() -> None:
    with serving(Script(status=503), hello(), server="mlserver") as server:
        assert "".join(ask(server)[0]) == HELLO
        assert len(server.requests) == 2


def test_tensors_of_other_names() -> None:
    with serving(hello(), server="kserve") as server:
        with pytest.raises(errors.ProtocolError, match=r"text_output \(BYTES\)"):
            ask(server, options={**PLAIN, "text_output": "other"})
        pieces, _ = ask(server, options={**PLAIN, "text_output": "text_output", "text_input": "prompt"})
    assert pieces == [HELLO]


def test_a_server_that_nobody_knows() -> None:
    with serving(hello(), server="homegrown") as server:
        with pytest.raises(errors.ConfigurationError, match="oip_server"):
            ask(server)
        assert ask(server, options={**PLAIN, "oip_server": "kserve"})[0] == [HELLO]


def test_tools_are_refused_before_anything_is_sent() -> None:
    call = spanwire.Call.chat("m", [{"role": "user", "content": "x"}], tools=[{"type": "function"}])
    with serving() as server:
        with pytest.raises(errors.ConfigurationError, match="tools"):
            ask(server, call)
        assert server.requests == []
