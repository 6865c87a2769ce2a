from __future__ import annotations

from typing import Any

import pytest
from spanwire_webhook.dialects import GeminiJobs

import spanwire
from spanwire import errors
from spanwire.jobs.contract import BatchCodec
from tests.plugins.webhook.dialects.shapes import CALL, CALLBACK, answer, encode, endpoint, row, sent

CODEC = GeminiJobs()
URL = "https://generativelanguage.googleapis.com/v1beta"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def body_of(*messages: dict[str, Any], **parameters: Any) -> Any:
    call = spanwire.Call.chat("models/gemini-3.5-flash", list(messages), **parameters)
    return sent(CODEC.submit(call, endpoint(URL), row(), None))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def interaction(*steps: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    return {"id": "v1_x", "model": "gemini-3.5-flash", "status": status, "steps": list(steps), **more}


def said(text: str) -> dict[str, Any]:
    return {"type": "model_output", "content": [{"type": "text", "text": text}]}


def reply(value: dict[str, Any]) -> spanwire.Reply:
    found = CODEC.reply("chat", encode(value))
    assert isinstance(found, spanwire.Reply)
    return found


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_a_call_is_an_interaction_in_the_background() -> None:
    known = row(trace={"traceparent": "00-1-2-01"}, attempt=2)
    request = CODEC.submit(CALL, endpoint(URL), known, CALLBACK)
    assert (request.method, request.target) == ("POST", "/v1beta/interactions")
    assert request.headers["api-revision"] == "2026-05-20"
    assert sent(request) == {
        "model": "the-model",
        "input": [{"type": "user_input", "content": [{"type": "text", "text": "Hi"}]}],
        "system_instruction": "Be short.",
        "generation_config": {"max_output_tokens": 5},
        "background": True,
        "store": True,
        "webhook_config": {
            "uris": [CALLBACK],
            "user_metadata": {"spanwire_job": f"{known.id}.2", "traceparent": "00-1-2-01"},
        },
    }
    assert CODEC.credentials("K") == {"x-goog-api-key": "K"}
    static = CODEC.submit(CALL, endpoint(URL, options={"webhooks": "static"}), known, CALLBACK)
    assert "webhook_config" not in sent(static)
    with pytest.raises(errors.ConfigurationError, match="webhooks"):
        CODEC.submit(CALL, endpoint(URL, options={"webhooks": "both"}), known, CALLBACK)


def test_a_conversation_with_tools_and_media() -> None:
    found = body_of(
        {"role": "system", "content": "One."},
        {"role": "developer", "content": [{"type": "text", "text": "Two."}]},
        user(
            [
                {"type": "text", "text": "Look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD", "detail": "low"}},
                {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}},
                {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
                {"type": "file", "file": {"file_data": "data:application/pdf;base64,QUJD"}},
            ]
        ),
        {
            "role": "assistant",
            "content": "Let me see",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        tools=[TOOL, {"type": "google_search"}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop="END",
        reasoning_effort="low",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        previous_interaction_id="v1_before",
        n=1,
        frequency_penalty=0.0,
    )
    assert found["system_instruction"] == "One.\n\nTwo."
    assert found["input"] == [
        {
            "type": "user_input",
            "content": [
                {"type": "text", "text": "Look"},
                {"type": "image", "data": "QUJD", "mime_type": "image/png", "resolution": "low"},
                {"type": "image", "uri": "https://example.com/x.png"},
                {"type": "audio", "data": "QUJD", "mime_type": "audio/wav"},
                {"type": "document", "data": "QUJD", "mime_type": "application/pdf"},
            ],
        },
        {"type": "model_output", "content": [{"type": "text", "text": "Let me see"}]},
        {"type": "function_call", "id": "c1", "name": "f", "arguments": {"a": 1}},
        {"type": "function_result", "call_id": "c1", "name": "f", "result": "42"},
    ]
    assert found["tools"] == [{"type": "function", **TOOL["function"]}, {"type": "google_search"}]  # type: ignore[dict-item]
    assert found["generation_config"] == {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop_sequences": ["END"],
        "thinking_level": "low",
        "tool_choice": {"allowed_tools": {"mode": "any", "tools": ["f"]}},
    }
    assert found["response_format"] == {"type": "text", "mime_type": "application/json", "schema": {"type": "object"}}
    assert (found["model"], found["previous_interaction_id"]) == ("gemini-3.5-flash", "v1_before")


@pytest.mark.parametrize(
    ("messages", "parameters", "words"),
    [
        ([user("x")], {"logprobs": True}, "logprobs"),
        ([user("x")], {"presence_penalty": 0.5}, "presence_penalty"),
        ([user("x")], {"parallel_tool_calls": False}, "parallel_tool_calls"),
        ([user("x")], {"store": False}, "store"),
        ([user("x")], {"odd": 1}, "odd"),
        ([user("x")], {"max_tokens": 1, "max_completion_tokens": 2}, "differ"),
        ([user("x")], {"temperature": 1, "generation_config": {"temperature": 2}}, "temperature"),
        ([user("x")], {"reasoning_effort": "none"}, "reasoning_effort"),
        ([user("x")], {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        ([user("x")], {"tool_choice": "perhaps"}, "tool_choice"),
        ([user("x")], {"response_format": {"type": "grammar"}}, "response_format"),
        ([user("x"), {"role": "system", "content": "late"}], {}, r"messages\[1\]"),
        ([{"role": "function", "name": "f", "content": "x"}], {}, "function"),
        ([{"role": "tool", "content": "x"}], {}, "tool_call_id"),
        ([user([{"type": "video_url", "video_url": {"url": "u"}}])], {}, "video_url"),
        ([user([{"type": "image_url", "image_url": {"url": "data:image/png,plain"}}])], {}, "base64"),
        ([{"role": "user", "content": "x", "cache_control": {}}], {}, "cache_control"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[1]"}}]}],
            {},
            "JSON object",
        ),
    ],
)
def test_what_cannot_be_said_is_named(messages: list[Any], parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=words) as caught:
        body_of(*messages, **parameters)
    assert caught.value.endpoint == "generativelanguage.googleapis.com:443"


# --- what comes -------------------------------------------------------------------------------------------------------


def test_a_reply() -> None:
    found = reply(
        interaction(
            {"type": "user_input", "content": [{"type": "text", "text": "not this"}]},
            {"type": "thought", "signature": "s", "summary": [{"type": "text", "text": "Hm. "}]},
            {"type": "google_search_call", "arguments": {}},
            said("Hel"),
            said("lo"),
            usage={
                "total_input_tokens": 3,
                "total_output_tokens": 2,
                "total_thought_tokens": 9,
                "total_cached_tokens": 1,
                "total_tokens": 14,
            },
        )
    )
    assert (found.text, found.reasoning, found.finish_reason) == ("Hello", "Hm. ", "stop")
    assert found.usage == spanwire.Usage(3, 2, 14, 1, 9)
    assert (found.id, found.model) == ("v1_x", "gemini-3.5-flash")


def test_calls_of_functions_are_a_result() -> None:
    value = interaction(
        {"type": "function_call", "id": "c1", "name": "f", "arguments": {"é": [1]}}, status="requires_action"
    )
    seen = CODEC.told(answer(value))
    assert (seen.state, seen.body is not None) == ("succeeded", True)
    found = reply(value)
    assert found.finish_reason == "tool_calls"
    assert found.tool_calls == (spanwire.ToolCall("c1", "f", '{"é":[1]}'),)


@pytest.mark.parametrize("status", ["incomplete", "budget_exceeded", "requires_continuation"])
def test_an_answer_that_was_cut_says_so(status: str) -> None:
    value = interaction(said("Hel"), status=status)
    assert CODEC.told(answer(value)).state == "succeeded"
    assert (reply(value).text, reply(value).finish_reason) == ("Hel", "length")


def test_outputs_of_the_revision_before() -> None:
    value = {"id": "v1_x", "status": "completed", "outputs": [{"type": "text", "text": "Hello"}]}
    assert reply(value).text == "Hello"


def test_a_status_has_the_times_of_one_clock() -> None:
    times = {"created": "2026-11-30T12:00:00Z", "updated": "2026-11-30T12:00:07.5Z"}
    told = CODEC.told(answer(interaction(said("x"), **times)))
    assert told.times.total_s == 7.5
    working = CODEC.told(answer(interaction(status="in_progress", **times)))
    assert (working.state, working.times.total_s) == ("running", None)
    assert CODEC.told(answer(interaction(status="a_new_one"))).state is None
    assert CODEC.told(answer(b"", 404)).state == "lost"


@pytest.mark.parametrize(
    ("code", "kind", "again"),
    [
        ("INVALID_ARGUMENT", errors.BadRequest, False),
        ("types.googleapis.com/RESOURCE_EXHAUSTED", errors.RateLimited, True),
        ("8", errors.RateLimited, True),
        ("unheard_of", errors.ServerError, False),
    ],
)
def test_a_failure_is_what_its_code_means(code: str, kind: type[errors.ServerError], again: bool) -> None:
    seen = CODEC.told(answer(interaction(status="failed", errors=[{"code": code, "message": "no"}])))
    assert (seen.state, seen.code, seen.message) == ("failed", code, "no")
    error = CODEC.failure(row(state="failed", code=seen.code, message=seen.message))
    assert type(error) is kind
    assert error.retryable == again


@pytest.mark.parametrize(
    ("kind", "id", "state", "fetch"),
    [
        ("interaction.completed", "v1_x", "succeeded", True),
        ("interaction.requires_action", "v1_x", "succeeded", True),
        ("interaction.failed", "v1_x", "failed", True),
        ("interaction.cancelled", "v1_x", "cancelled", False),
        ("batch.succeeded", "batches/b1", "succeeded", True),
        ("batch.expired", "b1", "expired", False),
        ("interaction.invented", "v1_x", None, False),
    ],
)
def test_webhooks_are_thin(kind: str, id: str, state: str | None, fetch: bool) -> None:
    event = {"type": kind, "version": "v1", "timestamp": "2026-11-30T12:00:00Z", "data": {"id": id}, "aud": "x"}
    seen = CODEC.webhook({"webhook-id": "m1"}, encode(event))
    assert (seen.state, seen.fetch, seen.body) == (state, fetch, None)
    assert seen.provider_id == id.removeprefix("batches/")
    assert CODEC.dedupe({"webhook-id": "m1"}, encode(event)) == "m1"
    with pytest.raises(ValueError, match="type"):
        CODEC.webhook({}, b'{"iss":"x"}')


def test_where_to_ask() -> None:
    for operation, targets in (
        ("chat", ["/v1beta/interactions/b1", "/v1beta/interactions/b1/cancel"]),
        ("embeddings", ["/v1beta/batches/b1", "/v1beta/batches/b1:cancel"]),
        ("batch", ["/v1beta/batches/b1", "/v1beta/batches/b1:cancel"]),
    ):
        known = row(provider_id="b1", operation=operation)
        requests = [CODEC.status(known, endpoint(URL)), CODEC.cancel(known, endpoint(URL))]
        assert [request and request.target for request in requests] == targets
        assert [request and request.method for request in requests] == ["GET", "POST"]


# --- batches ----------------------------------------------------------------------------------------------------------


def operation(answers: list[dict[str, Any]], name: str = "inlinedResponses", **more: Any) -> dict[str, Any]:
    metadata = {"state": "BATCH_STATE_SUCCEEDED", "createTime": "2026-11-30T12:00:00Z", "model": "models/e"}
    return {"name": "batches/b1", "metadata": metadata, "done": True, "response": {name: {"inlinedResponses": answers}}}


def content(text: str) -> dict[str, Any]:
    parts = [{"text": "Hm", "thought": True}, {"text": text}]
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 2, "totalTokenCount": 5, "thoughtsTokenCount": 2}
    return {"candidates": [{"content": {"parts": parts}, "finishReason": "STOP"}], "usageMetadata": usage}


def test_a_batch_of_chat_calls() -> None:
    assert isinstance(CODEC, BatchCodec)
    messages = [
        {"role": "system", "content": "Be short."},
        user(
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}]
        ),
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    one = spanwire.Call.chat("g", messages, tools=[TOOL], max_tokens=5, response_format={"type": "json_object"})
    call = spanwire.Call.batch({"a/0": one, "b": spanwire.Call.chat("g", [user("b")])})
    request = CODEC.submit(call, endpoint(URL), row(), CALLBACK)
    assert request.target == "/v1beta/models/g%3AbatchGenerateContent"
    batch = sent(request)["batch"]
    assert batch["webhookConfig"]["uris"] == [CALLBACK]
    first, second = batch["inputConfig"]["requests"]["requests"]
    assert first == {
        "metadata": {"key": "c:a/0"},
        "request": {
            "systemInstruction": {"parts": [{"text": "Be short."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": "QQ=="}}]},
                {"role": "model", "parts": [{"functionCall": {"id": "c", "name": "f", "args": {}}}]},
                {
                    "role": "user",
                    "parts": [{"functionResponse": {"id": "c", "name": "f", "response": {"result": "42"}}}],
                },
            ],
            "tools": [
                {
                    "functionDeclarations": [
                        {"name": "f", "description": "d", "parametersJsonSchema": {"type": "object"}}
                    ]
                }
            ],
            "generationConfig": {"maxOutputTokens": 5, "responseMimeType": "application/json"},
        },
    }
    assert second["request"] == {"contents": [{"role": "user", "parts": [{"text": "b"}]}]}
    done = operation(
        [
            {"metadata": {"key": "c:b"}, "error": {"code": 8, "message": "too much"}},
            {"metadata": {"key": "c:a/0"}, "response": content("Hello")},
        ]
    )
    seen = CODEC.told(answer(done))
    assert (seen.state, seen.provider_id) == ("succeeded", "b1")
    assert seen.body is not None
    items = CODEC.replies(seen.body).items
    found, error = items["a/0"], items["b"]
    assert isinstance(found, spanwire.Reply)
    assert (found.text, found.reasoning, found.finish_reason) == ("Hello", "Hm", "stop")
    assert found.usage == spanwire.Usage(1, 2, 5, None, 2)
    assert isinstance(error, errors.RateLimited)


def test_what_cannot_be_read_of_a_batch_is_an_error_of_its_call_alone() -> None:
    good = {"response": {"candidates": [{"content": {"parts": [{"text": "hi"}]}, "finishReason": "STOP"}]}}
    bad = {"error": {"code": 8, "message": "later"}}
    rows: list[Any] = [
        {"metadata": {"key": "c:a"}, **good},
        {"metadata": {"key": "c:b"}, "response": 7},
        {"metadata": {"key": "c:a"}, **bad},
        {"metadata": {"key": "c:c"}, **bad},
        {"metadata": {"key": "c:c"}, **good},
        dict(good),
    ]
    items = CODEC.replies(encode(operation(rows))).items
    assert set(items) == {"a", "b", "c"}
    assert isinstance(items["b"], errors.ProtocolError)
    assert all(isinstance(items[name], spanwire.Reply) for name in "ac")
    vector = {"response": {"embedding": {"values": [1]}}}
    texts = [{"metadata": {"key": key}, **vector} for key in ("e0:a", "e2:a", "e0:b")]
    items = CODEC.replies(encode(operation(texts, "inlinedEmbedContentResponses"))).items
    assert isinstance(items["a"], errors.ProtocolError)
    assert isinstance(items["b"], spanwire.Embeddings)
    with pytest.raises(errors.ProtocolError, match="no keys of ours"):
        CODEC.replies(encode(operation([dict(good)])))


def test_texts_are_embedded_as_a_batch_and_come_back_in_order() -> None:
    call = spanwire.Call.embeddings("e", ["x", "y"], dimensions=2)
    request = CODEC.submit(call, endpoint(URL), row(), None)
    assert request.target == "/v1beta/models/e%3AasyncBatchEmbedContent"
    requests = sent(request)["batch"]["inputConfig"]["requests"]["requests"]
    assert requests[1] == {
        "metadata": {"key": "e1:"},
        "request": {"model": "models/e", "content": {"parts": [{"text": "y"}]}, "outputDimensionality": 2},
    }
    vectors = [{"metadata": {"key": f"e{n}:"}, "response": {"embedding": {"values": [n, 1]}}} for n in (1, 0)]
    body = encode(operation(vectors, "inlinedEmbedContentResponses"))
    found = CODEC.reply("embeddings", body)
    assert isinstance(found, spanwire.Embeddings)
    assert (found.vectors, found.model) == ([[0.0, 1.0], [1.0, 1.0]], "e")
    vectors[0] = {"metadata": {"key": "e1:"}, "error": {"message": "too long"}}
    with pytest.raises(errors.ServerError, match="too long"):
        CODEC.reply("embeddings", encode(operation(vectors, "inlinedEmbedContentResponses")))
    many = spanwire.Call.batch({"one": call, "two": spanwire.Call.embeddings("e", "z")})
    keys = [
        one["metadata"]["key"]
        for one in sent(CODEC.submit(many, endpoint(URL), row(), None))["batch"]["inputConfig"]["requests"]["requests"]
    ]
    assert keys == ["e0:one", "e1:one", "e0:two"]
    answers = [{"metadata": {"key": key}, "response": {"embedding": {"values": [1]}}} for key in keys]
    items = CODEC.replies(encode(operation(answers, "inlinedEmbedContentResponses"))).items
    assert {name: len(item.vectors) for name, item in items.items()} == {"one": 2, "two": 1}  # type: ignore[union-attr]
    # One text of three has no result, another has two: the vectors after it are not moved to its place.
    for numbers in ((0, 2), (0, 1, 1), (1, 1)):
        some = [{"metadata": {"key": f"e{n}:"}, "response": {"embedding": {"values": [n]}}} for n in numbers]
        with pytest.raises(errors.ProtocolError, match=r"of text|of one text"):
            CODEC.reply("embeddings", encode(operation(some, "inlinedEmbedContentResponses")))
    with pytest.raises(errors.ConfigurationError, match="token ids"):
        CODEC.submit(spanwire.Call.embeddings("e", [1, 2]), endpoint(URL), row(), None)


@pytest.mark.parametrize(
    ("state", "more", "found"),
    [
        ("BATCH_STATE_PENDING", {}, "queued"),
        ("BATCH_STATE_RUNNING", {}, "running"),
        ("JOB_STATE_CANCELLED", {"done": True}, "cancelled"),
        ("BATCH_STATE_EXPIRED", {"done": True}, "expired"),
        ("BATCH_STATE_FAILED", {"done": True, "error": {"code": 3, "message": "bad"}}, "failed"),
        ("BATCH_STATE_NEW", {"done": True, "error": {"code": 3, "message": "bad"}}, "failed"),
        ("BATCH_STATE_NEW", {}, None),
        ("BATCH_STATE_SUCCEEDED", {"done": True}, "lost"),
    ],
)
def test_states_of_a_batch(state: str, more: dict[str, Any], found: str | None) -> None:
    seen = CODEC.told(answer({"name": "batches/b1", "metadata": {"state": state}, **more}))
    assert seen.state == found
    if found == "failed":
        assert (seen.code, seen.message) == ("3", "bad")
