"""The corpus, and its neighbours, through LangChain: the same answers and the same errors, in LangChain's terms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk

from spanwire import errors
from spanwire.testing import LoopbackServer, Script
from tests.cases.play import AB, DONE, END, ROLE, choice, cut_up, data, delta, nothing_left, tool
from tests.cases.test_stream_end import COMPLETE, POINTS
from tests.cases.test_tool_deltas import DELTAS
from tests.cases.test_usage import STREAMS as USAGES
from tests.cases.test_wire import EXPECTED, KINDS, script
from tests.integrations.langchain.asking import STREAMS, WAYS, Seen, ask, model_on
from tests.support import AT_ONCE

way_of = pytest.mark.parametrize("way", WAYS)
stream_of = pytest.mark.parametrize("way", STREAMS)


def play(way: str, answer: Script, **fields: Any) -> Seen:
    with LoopbackServer([answer]) as server, nothing_left(server):
        with model_on(server, endpoint=server.endpoint(retries=AT_ONCE), **fields) as model:
            return ask(way, model)


def check_once(seen: Seen) -> None:
    """What describes the whole answer is on one chunk, the last; the chunks before it are content."""
    if seen.error is not None or not seen.chunks:
        return
    *others, last = [chunk for chunk in seen.chunks if isinstance(chunk, AIMessageChunk)]
    assert len(others) + 1 == len(seen.chunks)
    assert last.chunk_position == "last"
    assert not last.content
    for chunk in others:
        assert chunk.content or chunk.tool_call_chunks or chunk.additional_kwargs
        assert not chunk.response_metadata
        assert chunk.usage_metadata is None
    assert len({chunk.id for chunk in seen.chunks}) == 1


def check_tools(seen: Seen, expected: list[tuple[str, str, str]]) -> None:
    message = seen.message
    found: list[tuple[Any, Any, Any]] = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    found += [(call["id"], call["name"], call["args"]) for call in message.invalid_tool_calls]
    assert found == [(*names, _arguments(text)) for *names, text in expected]


def _arguments(text: str) -> Any:
    try:
        parsed = json.loads(text) if text else {}
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text


@way_of
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_answer_is_read_for_what_it_is(name: str, way: str) -> None:
    expected = EXPECTED[name]
    seen = play(way, script(name, "whole"))
    error = expected["error"]
    if error is None:
        assert seen.error is None
    else:
        kinds = error["kind"] if isinstance(error["kind"], list) else [error["kind"]]
        assert isinstance(seen.error, tuple(KINDS[kind] for kind in kinds))
        assert error.get("message", "") in str(seen.error)
    if way in STREAMS:
        assert "".join(str(chunk.content) for chunk in seen.chunks) == expected["text"]
    elif error is None:
        assert seen.message.content == expected["text"]
    if error is not None:
        return
    check_once(seen)
    check_tools(seen, [(call["id"], call["name"], call["arguments"]) for call in expected["tool_calls"]])
    usage = seen.message.usage_metadata
    assert (None if usage is None else dict(usage)) == expected["usage"]
    assert seen.message.response_metadata.get("finish_reason") == expected["finish_reason"]
    assert seen.timeline["outcome"] == expected["outcome"]


@stream_of
@pytest.mark.parametrize(
    "name", sorted(DELTAS.keys() - {"arguments that are no JSON"})
)  # LangChain's own: test_answers.py
def test_odd_but_clear_tool_calls(name: str, way: str) -> None:
    lists, calls = DELTAS[name]
    events = [tool(*entries) for entries in lists]
    seen = play(way, cut_up(Script(writes=[ROLE, *events, delta("tool_calls"), DONE]), "bytes"))
    assert seen.error is None
    check_once(seen)
    check_tools(seen, calls)
    assert seen.message.response_metadata["finish_reason"] == "tool_calls"


@stream_of
@pytest.mark.parametrize("name", USAGES)
def test_usage_once_or_none(name: str, way: str) -> None:
    writes, found = USAGES[name]
    seen = play(way, Script(writes=writes))
    check_once(seen)
    assert seen.message.content == "ab"
    usage = seen.message.usage_metadata
    if found is None or found.count(None) > 1:
        assert usage is None
    else:
        used, made, total = found
        assert usage is not None
        assert usage["input_tokens"] == used
        assert usage["output_tokens"] == (made if made is not None else (total or 0) - (used or 0))
        assert usage["total_tokens"] == total


@stream_of
@pytest.mark.parametrize("name", POINTS)
def test_an_answer_that_ends_too_early_is_an_error(name: str, way: str) -> None:
    events, want = POINTS[name]
    seen = play(way, Script(writes=events or [b": \n\n"]))
    assert isinstance(seen.error, errors.Truncated)
    assert "".join(str(chunk.content) for chunk in seen.chunks) == want.text
    assert not any(chunk.response_metadata.get("spanwire") for chunk in seen.chunks)
    assert seen.error.timeline is not None


@stream_of
@pytest.mark.parametrize("name", COMPLETE)
def test_a_complete_answer(name: str, way: str) -> None:
    events, want = COMPLETE[name]
    seen = play(way, Script(writes=events))
    assert seen.error is None
    check_once(seen)
    assert seen.message.content == want.text
    assert seen.message.response_metadata.get("finish_reason") == want.finish


#: C34: nulls, and what is not in the schema. Events, and what is kept of them: metadata, and additional_kwargs.
FILTER = {"hate": {"filtered": False, "severity": "safe"}}
ODD: dict[str, tuple[list[bytes], dict[str, Any], dict[str, Any]]] = {
    "delta null": ([AB, data({"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]}), DONE], {}, {}),
    "nulls first": ([delta(role=None, content=None), AB, END], {}, {}),
    "no delta": (
        [AB, data({"choices": [{"index": 0, "content_filter_results": FILTER}]}), END],
        {"content_filter_results": FILTER},
        {},
    ),
    "unknown at the top": ([data({**choice(content="ab"), "x_new": {"a": [1]}}), END], {"x_new": {"a": [1]}}, {}),
    "unknown at the top, after events without": (
        [delta(content="a"), data({**choice(content="b"), "x_new": 1}), END],
        {"x_new": 1},
        {},
    ),
    "unknown in the delta": ([delta(content="ab", x_new=5), END], {}, {"x_new": 5}),
    "pieces of text in the delta": (
        [delta(content="a", x_new="p"), delta(content="b", x_new="q"), END],
        {},
        {"x_new": "pq"},
    ),
    "pieces of a list in the delta": ([delta(content="a", x=[1]), delta(content="b", x=[2]), END], {}, {"x": [1, 2]}),
    "the same in each event": (
        [data({**choice(content=piece), "system_fingerprint": "fp", "service_tier": "default"}) for piece in "ab"]
        + [END],
        {"system_fingerprint": "fp", "service_tier": "default"},
        {},
    ),
    "on the finish": (
        [AB, data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": 7}]}), DONE],
        {"stop_reason": 7},
        {},
    ),
    "other choices": (
        [data({"choices": [{"index": 1, "delta": {"content": "no", "x": 1}, "y": 2}]}), AB, END],
        {},
        {},
    ),
    "names of ours": ([data({**choice(content="ab"), "spanwire": "x", "model_name": "y"}), END], {}, {}),
}
OURS = {"finish_reason", "id", "model_name", "model_provider", "spanwire", "token_usage"}


@stream_of
@pytest.mark.parametrize("name", ODD)
def test_what_is_not_in_the_schema_is_kept_once(name: str, way: str) -> None:
    writes, metadata, kept = ODD[name]
    seen = play(way, Script(writes=writes))
    check_once(seen)
    assert seen.message.content == "ab"
    assert isinstance(seen.timeline, dict)
    assert {key: value for key, value in seen.message.response_metadata.items() if key not in OURS} == metadata
    assert seen.message.additional_kwargs == kept


@pytest.mark.parametrize("way", ["ainvoke", "invoke"])
def test_what_is_not_in_the_schema_of_a_whole_answer(way: str) -> None:
    body = {
        "id": "c1",
        "model": "m",
        "x_new": 1,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "content_filter_results": FILTER,
                "message": {"role": "assistant", "content": "ab", "x_old": ["y"], "audio": None},
            }
        ],
    }
    message = play(way, Script(body=json.dumps(body).encode())).message
    kept = {key: value for key, value in message.response_metadata.items() if key not in OURS}
    assert kept == {"x_new": 1, "content_filter_results": FILTER}
    assert message.additional_kwargs == {"x_old": ["y"]}
