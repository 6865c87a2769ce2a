"""Files of calls, and of results."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

import spanwire
from spanwire.calls import Embeddings, Reply, ToolCall
from spanwire.errors import BadRequest, ConfigurationError, JobLost
from spanwire.jobs.bulk import JSONLFile
from spanwire.jobs.bulk.rows import result_row


def file(path: Path, *lines: Any) -> Path:
    made = path / "calls.jsonl"
    made.write_bytes(b"\n".join(one if isinstance(one, bytes) else msgspec.json.encode(one) for one in lines))
    return made


def test_rows_of_batch_files_and_bodies(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = file(
        tmp_path,
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": messages},
        },
        b"",
        {"custom_id": "b", "url": "/v1/embeddings", "body": {"model": "e", "input": "t", "dimensions": 3}},
        {"input": ["x"], "stream": False},
        {"body": {"messages": messages, "temperature": 0}},
    )
    rows = list(JSONLFile(path, model="d").rows())
    assert [row.custom_id for row in rows] == ["a", "b", None, None]
    assert [(row.call.operation, row.call.model) for row in rows] == [
        ("chat", "m"),
        ("embeddings", "e"),
        ("embeddings", "d"),
        ("chat", "d"),
    ]
    assert rows[1].call.body == {"input": "t", "dimensions": 3}
    assert rows[3].call.body == {"messages": messages, "temperature": 0}
    again = JSONLFile(path, model="d")
    assert len(list(again)) == len(list(again)) == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "no JSON"),
        ([1], "not list"),
        ({"model": "m"}, "messages, or input"),
        ({"input": "a"}, "no model"),
        ({"model": "m", "messages": "hi"}, "messages must be a list"),
        ({"model": "m", "messages": [], "n": 2}, "n=2"),
        ({"url": "/v1/responses", "body": {}}, "url is '/v1/responses'"),
        ({"url": "/v1/embeddings", "body": {"messages": []}}, "messages, or input"),
        ({"custom_id": 1, "body": {}}, "custom_id"),
        ({"body": []}, "body is an object"),
        ({"model": "m", "messages": [], "headers": {}}, "headers are no field"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: Any, says: str) -> None:
    path = file(tmp_path, {"model": "e", "input": "a"}, line)
    with pytest.raises(ConfigurationError, match="line 2") as caught:
        list(JSONLFile(path))
    assert says in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        list(JSONLFile(tmp_path / "none"))


def row(*given: Any) -> Any:
    data = result_row(*given)
    assert data.endswith(b"\n")
    return msgspec.json.decode(data)


def test_results_are_rows_of_batch_output() -> None:
    usage = spanwire.Usage(input_tokens=1, output_tokens=2, total_tokens=3)
    reply = Reply(text="hi", reasoning="r", tool_calls=(ToolCall("c", "f", "{}"),), finish_reason="stop", usage=usage)
    found = row(0, "mine", "j", reply)
    assert (found["custom_id"], found["error"], found["response"]["status_code"]) == ("mine", None, 200)
    body = found["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "hi"
    assert body["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    vectors = row(1, None, "j", Embeddings([[1.0], [2.0]], model="e"))
    assert vectors["custom_id"] == "call-1"
    assert [one["embedding"] for one in vectors["response"]["body"]["data"]] == [[1.0], [2.0]]
    bad = row(2, None, "j", BadRequest("no", status=400))
    assert bad["response"]["status_code"] == 400
    assert bad["error"]["message"] == "no"
    lost = row(3, None, None, JobLost("gone"))
    assert (lost["response"], lost["error"]["code"]) == (None, "JobLost")


def test_what_windows_writes(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"model": "e", "input": "a"}\r\n\r\n{"model": "e", "input": "b"}\r\n')
    assert [row.call.body["input"] for row in JSONLFile(path).rows()] == ["a", "b"]
    assert [JSONLFile(path).line_of(index) for index in (0, 1)] == [1, 3]
    with pytest.raises(ConfigurationError, match="no call 2 any more"):
        JSONLFile(path).line_of(2)
    path.write_bytes(b'{"model": "e", "input": "a"}\n' + codecs.BOM_UTF8 + b'{"model": "e", "input": "b"}')
    with pytest.raises(ConfigurationError, match="line 2: no JSON"):
        list(JSONLFile(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name")
def test_a_pipe_is_empty_the_second_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="write it to a file first"):
        list(JSONLFile(tmp_path / "pipe"))
