"""C13: usage once, or None; unknown is left out, and never zeros. Events without choices are neither chunk nor error."""

from __future__ import annotations

from typing import Any

import pytest

from spanwire.testing import LoopbackServer, Script
from tests.cases.play import AB, DONE, END, ROLE, STOP, WAYS, Want, ask, choice, data, nothing_left, play, whole
from tests.support import AT_ONCE

way_of = pytest.mark.parametrize("way", WAYS)


def usage(prompt: Any = 3, completion: Any = 2, total: Any = 5, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total, **more}


def alone(found: Any, **more: Any) -> bytes:
    return data({"choices": [], "usage": found, **more})


def on(event: dict[str, Any], found: Any) -> bytes:
    return data({**event, "usage": found})


A, B = choice(content="a"), choice(content="b")
FINISH = choice("stop")
FULL = (3, 2, 5)

STREAMS: dict[str, tuple[list[bytes], tuple[int | None, int | None, int | None] | None]] = {
    # the sample's own
    "(a) filter results first": ([data({"choices": [], "prompt_filter_results": []}), AB, END], None),
    "(b) after the finish": ([AB, STOP, alone(usage()), DONE], FULL),
    "(c) choices null": ([data({"choices": None}), AB, data({"choices": None}), END], None),
    "(d) none sent": ([AB, END], None),
    # events without choices, anywhere
    "no choices at all": ([data({}), AB, data({"id": "c1"}), STOP, data({"object": "x"}), DONE], None),
    "choices of another type": (
        [data({"choices": {}}), data({"choices": "x"}), AB, data({"choices": [None]}), END],
        None,
    ),
    "choices null with usage": ([AB, STOP, data({"choices": None, "usage": usage()}), DONE], FULL),
    "usage without choices": ([AB, STOP, data({"usage": usage()}), DONE], FULL),
    # places
    "on the finish": ([AB, on(FINISH, usage()), DONE], FULL),
    "on the last content": ([on(A, None), on(B, usage()), END], FULL),
    "on the first content": ([on(A, usage()), data(B), END], FULL),
    "on the role": ([on(choice(role="assistant", content=""), usage()), AB, END], FULL),
    "on the only event": ([on(choice("stop", content="ab"), usage()), DONE], FULL),
    "before the finish, alone": ([AB, alone(usage()), STOP, DONE], FULL),
    "alone, and no finish": ([AB, alone(usage()), DONE], FULL),
    "alone, and no [DONE]": ([AB, STOP, alone(usage())], FULL),
    "after [DONE]": ([AB, STOP, DONE, alone(usage())], None),
    # more than once: it goes out once, and it is the last word
    "twice the same": ([AB, on(FINISH, usage()), alone(usage()), DONE], FULL),
    "alone twice": ([AB, STOP, alone(usage()), alone(usage()), DONE], FULL),
    "a running count": ([on(A, usage(3, 1, 4)), on(B, usage()), on(FINISH, usage()), alone(usage()), DONE], FULL),
    "a running count, no last one": ([on(A, usage(3, 1, 4)), on(B, usage()), END], FULL),
    "a count of the prompt first": ([alone(usage(3, 0, 3)), AB, STOP, alone(usage()), DONE], FULL),
    "a count of the prompt first, the rest on the finish": (
        [alone(usage(3, 0, 3)), AB, on(FINISH, usage()), DONE],
        FULL,
    ),
    "zeros first": ([alone(usage(0, 0, 0)), on(A, usage(0, 0, 0)), data(B), on(FINISH, usage()), DONE], FULL),
    "alone between the content": ([data(A), alone(usage(3, 1, 4)), data(B), STOP, alone(usage()), DONE], FULL),
    # nulls, and what is no number
    "null everywhere": ([on(A, None), on(B, None), on(FINISH, None), alone(None), DONE], None),
    "null until the last": ([on(A, None), on(B, None), on(FINISH, None), alone(usage()), DONE], FULL),
    "an empty object": ([AB, on(FINISH, {}), alone({}), DONE], None),
    "an empty object, then a full one": ([AB, on(FINISH, {}), alone(usage()), DONE], FULL),
    "all of it null": ([AB, STOP, alone(usage(None, None, None)), DONE], None),
    "null, then a full one": ([AB, on(FINISH, usage(None, None, None)), alone(usage()), DONE], FULL),
    "half of it": ([AB, STOP, alone({"prompt_tokens": 3}), DONE], (3, None, None)),
    "a null in it": ([AB, STOP, alone(usage(3, None, None)), DONE], (3, None, None)),
    "whole floats": ([AB, STOP, alone(usage(3.0, 2.0, 5.0)), DONE], FULL),
    "a broken float": ([AB, STOP, alone(usage(3, 2.5, 5)), DONE], (3, None, 5)),
    "negative": ([AB, STOP, alone(usage(3, -1, 5)), DONE], (3, None, 5)),
    "true": ([AB, STOP, alone(usage(3, True, 5)), DONE], (3, None, 5)),
    "a list": ([AB, STOP, alone([3, 2, 5]), DONE], None),
    "text": ([AB, STOP, alone("5 tokens"), DONE], None),
    "a number": ([AB, STOP, alone(5), DONE], None),
    "zeros that the server means": ([AB, STOP, alone(usage(0, 0, 0)), DONE], (0, 0, 0)),
    "names of the newer schema": (
        [AB, STOP, alone({"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}), DONE],
        FULL,
    ),
    "unknown keys": ([AB, STOP, alone(usage(prompt_tokens_details=None, queue_time=0.1, cost={"x": 1})), DONE], FULL),
}


@way_of
@pytest.mark.parametrize("name", STREAMS)
def test_usage_once_or_none(name: str, way: str) -> None:
    writes, found = STREAMS[name]
    finish = None if name == "alone, and no finish" else "stop"
    play(way, Script(writes=writes), Want("ab", usage=found, finish=finish))


@way_of
def test_numbers_as_text_are_no_invention(way: str) -> None:
    """Either what the text says, or nothing; never zeros, never an error."""
    with LoopbackServer() as server, nothing_left(server):
        server.script(Script(writes=[AB, STOP, alone(usage("3", "2", "5")), DONE]), model="m")
        seen = ask(way, server.endpoint(retries=AT_ONCE))
    assert seen.got.text == "ab"
    found = seen.got.usage
    assert found is None or (found.input_tokens, found.output_tokens, found.total_tokens) == FULL


@way_of
def test_usage_of_an_attempt_that_failed_is_not_that_of_the_call(way: str) -> None:
    """The first attempt ends without content, after its usage; the second one is the answer."""
    with LoopbackServer() as server, nothing_left(server):
        server.script(Script(writes=[ROLE, alone(usage(9, 0, 9))]), model="m", times=1)
        server.script(Script(writes=[ROLE, AB, STOP, alone(usage()), DONE]), model="m")
        seen = ask(way, server.endpoint(retries=AT_ONCE))
        assert len(server.requests) == 2
    assert seen.got.usage is not None
    assert seen.got.usage.input_tokens == 3
    assert sum(chunk.usage is not None for chunk in seen.chunks) == (1 if seen.chunks else 0)


WHOLE: dict[str, tuple[Any, tuple[int | None, int | None, int | None] | None]] = {
    "given": (usage(), FULL),
    "none": (None, None),
    "empty": ({}, None),
    "nulls": (usage(None, None, None), None),
    "floats": (usage(3.0, 2.0, 5.0), FULL),
    "a list": ([1], None),
}


@way_of
@pytest.mark.parametrize("name", WHOLE)
def test_usage_of_a_whole_answer(name: str, way: str) -> None:
    sent, found = WHOLE[name]
    play(way, Script(body=whole(usage=sent, content="ab")), Want("ab", usage=found))
    play(way, Script(body=whole(None, usage=sent, content="ab")), Want("ab", usage=found, finish=None))


@way_of
def test_usage_is_asked_for_of_streams_alone(way: str) -> None:
    with LoopbackServer() as server, nothing_left(server):
        seen = ask(way, server.endpoint())
        asked = server.requests[0].body.get("stream_options")
    assert asked == ({"include_usage": True} if way.endswith("stream") else None)
    assert seen.got.usage is not None
