"""Many requests and their answers on one ModelStreamInfer: sessions of the dialect ``oip-stream``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from spanwire_grpc.loopback import GRPCPart
from spanwire_grpc.loops import bind_loop
from spanwire_grpc.oip_session import OpenInferenceStream
from spanwire_grpc.stubs import oip

import spanwire
from spanwire import errors
from spanwire.manager import ConnectionManager
from spanwire.testing import LoopbackServer, Script
from spanwire.transport import Turn
from tests.core.telemetry.heard import Heard
from tests.support import assert_adds_up, hello, run

HELLO = "Hello from the loopback server."


def serving(*scripts: Any, server: str = "triton", **more: Any) -> LoopbackServer:
    return LoopbackServer([*scripts], part=GRPCPart(oip=server, **more))


def ask(prompt: str, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [prompt]}], **more}


async def answer(session: spanwire.Session) -> list[spanwire.SessionEvent]:
    """Events to the end of an answer."""
    events = []
    async for event in session:
        events.append(event)
        parameters = event.data.get("parameters", {})
        outputs = {output["name"]: output["data"] for output in event.data.get("outputs", ())}
        if parameters.get("triton_final_response") or outputs.get("finish_reason", [""])[0] or event.type == "error":
            break
    return events


@pytest.mark.parametrize("kind", ["triton", "dynamo"])
def test_requests_are_answered_on_one_stream_and_each_is_a_turn(kind: str, heard: Heard) -> None:
    with serving(hello(prefill_s=0.02, gap_s=0.005), server=kind) as server:

        async def main() -> list[spanwire.Timeline]:
            endpoint = server.endpoint(dialect="oip-stream")
            async with ConnectionManager(telemetry=heard.telemetry()) as manager:
                async with manager.session(endpoint, model="m") as session:
                    for number in range(3):
                        await session.send(ask("Say hello", id=f"r{number}"))
                        events = await answer(session)
                        assert "".join(event.text for event in events) == HELLO
                        assert {event.data["id"] for event in events} == {f"r{number}"}
                        assert {event.type for event in events} == {"response"}
                        assert events[0].data["model_name"] == "m"
                    return session.turns

        turns = run(main)
        assert len(server.requests) == 3
        assert server.connections == 1
        assert server.faults == []
    assert [turn.outcome for turn in turns] == ["completed"] * 3
    for turn in turns:
        assert_adds_up(turn)
        segments = turn.segments
        assert segments["model"].parts["prefill"].duration_s > 0.015
        assert segments["model"].parts["decode"].duration_s > 0.01
    spans = [span for span in heard.spans() if span.name == "chat m"]
    assert len(spans) == 3
    attributes: dict[str, Any] = dict(spans[0].attributes or {})
    assert attributes["rpc.method"] == "inference.GRPCInferenceService/ModelStreamInfer"
    if kind == "triton":
        assert attributes["gen_ai.usage.output_tokens"] > 0
        assert attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_mlserver_answers_with_other_messages_and_says_no_end() -> None:
    with serving(hello(), server="mlserver") as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(server.endpoint(dialect="oip-stream"), model="m") as session:
                    await session.send(ask("a"))
                    await session.send(ask("b"))
                    await session.send_eof()
                    events = [event async for event in session]
                assert "".join(event.text for event in events) == HELLO * 2
                assert {event.data["id"] for event in events} == {"spanwire-1"}
                assert [turn.outcome for turn in session.turns] == ["completed"]

        run(main)


def test_which_server_it_is_can_be_said() -> None:
    with serving(hello(), server="mlserver") as server:

        async def main() -> None:
            endpoint = server.endpoint(dialect="oip-stream", options={"oip_server": "mlserver"})
            async with ConnectionManager() as manager, manager.session(endpoint, model="m") as session:
                await session.send(ask("a"))
                assert (await anext(session)).text == "Hello"
            wrong = server.endpoint(dialect="oip-stream", options={"oip_server": "other"})
            async with ConnectionManager() as manager:
                with pytest.raises(errors.ConfigurationError, match="oip_server"):
                    async with manager.session(wrong):
                        pass

        run(main)


def test_a_request_that_fails_ends_its_turn_and_not_the_session() -> None:
    with serving(Script(status=500), hello()) as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(server.endpoint(dialect="oip-stream"), model="m") as session:
                    await session.send(ask("a"))
                    (event,) = await answer(session)
                    assert (event.type, event.data) == (
                        "error",
                        {"error": "the script says 500", "id": "spanwire-1"},
                    )
                    await session.send(ask("b"))
                    assert "".join(event.text for event in await answer(session)) == HELLO
                first, second = session.turns
                assert (first.outcome, second.outcome) == ("error", "completed")
                assert "ServerError" in str(first.to_dict())

        run(main)


def test_answers_that_come_at_the_same_time_are_told_apart_by_their_ids() -> None:
    async def handler(requests: AsyncIterator[bytes], context: Any) -> None:
        asked = [oip.ModelInferRequest.FromString(await anext(aiter(requests))) for _ in range(3)]
        assert all(request.parameters["triton_enable_empty_final_response"].bool_param for request in asked)
        for piece in ("a", "b", ""):
            for request in reversed(asked):
                response = oip.ModelInferResponse(model_name="m", id=request.id)
                if piece:
                    output = response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
                    output.contents.bytes_contents.append((piece + request.id).encode())
                response.parameters["triton_final_response"].bool_param = not piece
                await context.write(oip.ModelStreamInferResponse(infer_response=response).SerializeToString())

    async def main() -> None:
        bind_loop()
        server = grpc.aio.server()
        methods = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(handler)}
        service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        endpoint = spanwire.Endpoint(
            f"grpc://127.0.0.1:{port}", proxy=None, dialect="oip-stream", options={"oip_server": "triton"}
        )
        async with ConnectionManager() as manager:
            async with manager.session(endpoint, model="m") as session:
                for id_ in "123":
                    await session.send(ask("x", id=id_))
                await session.send_eof()
                texts = [event.text async for event in session]
            assert texts == ["a3", "a2", "a1", "b3", "b2", "b1", "", "", ""]
            assert [turn.outcome for turn in session.turns] == ["completed"] * 3
        await server.stop(None)
        await server.wait_for_termination(5)

    run(main)


@pytest.mark.parametrize(("script", "outcome"), [(hello(hang_after=2), "closed_by_caller"), (None, "error")])
def test_turns_that_the_sessions_end_cuts_off_have_its_outcome(script: Script | None, outcome: str) -> None:
    with serving(script or hello(drop_after=2)) as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(server.endpoint(dialect="oip-stream"), model="m") as session:
                    await session.send(ask("a"))
                    await anext(session)
                    await anext(session)
                    if script is None:
                        with pytest.raises(errors.ConnectionFailed):
                            await anext(session)
                assert [turn.outcome for turn in session.turns] == [outcome]

        run(main)


def test_a_server_that_is_none_of_them_is_told() -> None:
    with serving(server="other") as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(server.endpoint(dialect="oip-stream"), model="m") as session:
                    with pytest.raises(errors.ConfigurationError, match="oip_server"):
                        await anext(session)

        run(main)


def test_json_text_and_protobuf_are_requests_too() -> None:
    with serving(hello()) as server:

        async def main() -> None:
            async with ConnectionManager() as manager:
                async with manager.session(server.endpoint(dialect="oip-stream"), model="m") as session:
                    request = oip.ModelInferRequest(id="p")
                    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
                        b"x"
                    )
                    json = '{"id":"j","inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":["x"]}]}'
                    for message, id_ in ((request.SerializeToString(), "p"), (json, "j")):
                        await session.send(message)
                        assert {event.data["id"] for event in await answer(session)} == {id_}
                    for wrong in (b"\xff", "{", "[]", {"inputs": 1}):
                        with pytest.raises(errors.ConfigurationError):
                            await session.send(wrong)

        run(main)


def test_an_error_of_no_request_ends_a_turn_only_where_there_is_one() -> None:
    turns: list[Turn] = []
    schema = OpenInferenceStream().schema(spanwire.Endpoint("grpc://h:1"), "m", turns.append, 5)
    failed = oip.ModelStreamInferResponse(error_message="no").SerializeToString()
    for id_ in ("a", "b"):
        schema.sent(schema.encode(ask("x", id=id_)), 10)
    assert schema.event(failed, 20).data == {"error": "no", "id": ""}
    assert turns == []
    schema.ended(30, None)
    assert [turn.outcome for turn in turns] == ["closed_by_caller"] * 2


def test_an_id_that_is_used_twice_is_answered_in_order() -> None:
    turns: list[Turn] = []
    schema = OpenInferenceStream().schema(spanwire.Endpoint("grpc://h:1"), "m", turns.append, 5)
    for at_ns in (10, 20):
        schema.sent(schema.encode(ask("x", id="a")), at_ns)
    response = oip.ModelInferResponse(id="a")
    response.parameters["triton_final_response"].bool_param = True
    final = oip.ModelStreamInferResponse(infer_response=response).SerializeToString()
    schema.event(final, 30)
    assert [(turn.begin_ns, turn.end_ns) for turn in turns] == [(10, 30)]
    schema.event(final, 40)
    assert [(turn.begin_ns, turn.end_ns) for turn in turns] == [(10, 30), (20, 40)]
    schema.event(final, 50)  # nobody asked
    schema.ended(60, errors.Truncated("x"))
    assert len(turns) == 2


def test_what_comes_that_is_no_message_ends_the_session() -> None:
    async def handler(requests: AsyncIterator[bytes], context: Any) -> None:
        await context.write(b"\xff\xff")
        await asyncio.sleep(60)

    async def main() -> None:
        bind_loop()
        server = grpc.aio.server()
        methods = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(handler)}
        service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        endpoint = spanwire.Endpoint(f"grpc://127.0.0.1:{port}", proxy=None, dialect="oip-stream")
        async with ConnectionManager() as manager:
            async with manager.session(endpoint, model="m") as session:
                with pytest.raises(errors.ProtocolError, match="not of this protocol"):
                    await anext(session)
        await server.stop(None)
        await server.wait_for_termination(5)

    run(main)
