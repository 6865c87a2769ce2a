"""spanwire beside OpenTelemetry's, OpenLLMetry's and OpenInference's instrumentations, the real ones, all at once.

A span that stands for a model's call says so: ``gen_ai.operation.name`` = chat, or ``openinference.span.kind`` = LLM. Each
tool makes its own; spanwire adds none where it sees one, and tells that one where the time went.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.timeout(300)  # the first test waits for all the calls: 25 s


class Seen(NamedTuple):
    """One call's spans."""

    spans: list[dict[str, Any]]
    sent: list[str]
    log: list[str]

    @property
    def ours(self) -> dict[str, Any]:
        """spanwire's span for the call."""
        (span,) = [span for span in self.spans if span["scope"] == "spanwire" and span["kind"] == "CLIENT"]
        return span

    @property
    def model_calls(self) -> list[dict[str, Any]]:
        return [
            span
            for span in self.spans
            if span["attributes"].get("gen_ai.operation.name") == "chat"
            or span["attributes"].get("openinference.span.kind") == "LLM"
        ]

    def parent(self, span: dict[str, Any]) -> dict[str, Any] | None:
        return next((other for other in self.spans if other["id"] == span["parent"]), None)

    @property
    def trace(self) -> str:
        (application,) = [span for span in self.spans if span["name"] == "application"]
        return str(application["trace"])


def seen(played: dict[str, Any], subject: str, tools: str, way: str) -> Seen:
    return Seen(**played[subject][tools][way])


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("tools", ["genai-openai", "openllmetry-openai", "openinference-openai", "all"])
def test_below_an_sdk(played: dict[str, Any], tools: str, way: str) -> None:
    found = seen(played, "openai", tools, way)
    check(found, 1 if tools != "all" else 3)


@pytest.mark.parametrize("way", ["ainvoke", "astream", "invoke", "stream", "chain"])
@pytest.mark.parametrize("tools", ["genai-langchain", "openllmetry-langchain", "openinference-langchain", "all"])
def test_below_langchain(played: dict[str, Any], tools: str, way: str) -> None:
    found = seen(played, "langchain", tools, way)
    check(found, 1 if tools != "all" else 3)


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("tools", ["openinference-litellm", "openinference-litellm callback", "all"])
def test_below_litellm(played: dict[str, Any], tools: str, way: str) -> None:
    # LiteLLM's own callback says of the application's span that it is an `acompletion`.
    check(seen(played, "litellm", tools, way), 1)


@pytest.mark.parametrize("way", ["whole", "stream", "sync whole", "sync stream", "aiohttp whole", "aiohttp stream"])
@pytest.mark.parametrize("tools", ["genai-openai", "openllmetry-openai", "openinference-openai", "all"])
def test_below_an_sdk_without_a_line_of_code(played: dict[str, Any], tools: str, way: str) -> None:
    found = seen(played, "zero", tools, way)
    # A request that has its trace keeps it.
    by = "openai.chat" if tools in ("openllmetry-openai", "all") else "spanwire.attempt"
    if tools == "all" and way.startswith("aiohttp"):  # but for OpenTelemetry's aiohttp instrumentation, below ours
        by = "POST"
        (sender,) = [span for span in found.spans if span["name"] == by]
        assert found.parent(sender) == found.ours
    check(found, 1 if tools != "all" else 3, by)


@pytest.mark.parametrize("way", ["whole", "stream", "sync whole", "sync stream", "aiohttp whole", "aiohttp stream"])
def test_without_a_line_of_code_and_nothing_outside_it_is_the_call(played: dict[str, Any], way: str) -> None:
    found = seen(played, "zero", "httpx", way)
    assert found.model_calls == [found.ours]
    assert found.ours["name"] == "chat m"
    assert [header.split("-")[1:3] for header in found.sent] == [[found.trace, found.ours["id"]]]


def check(found: Seen, theirs: int, sent_by: str = "spanwire.attempt") -> None:
    assert len(found.model_calls) == theirs
    ours = found.ours
    assert ours["name"] == "spanwire.attempt"
    outer = found.parent(ours)
    assert outer in found.model_calls
    # Told of once, on the innermost.
    assert [span for span in found.model_calls if "spanwire.outcome" in span["attributes"]] == [outer]
    assert outer is not None
    assert outer["attributes"]["spanwire.outcome"] == "completed"
    assert "spanwire.segment.client.duration" in outer["attributes"]
    # And the server is asked for by ours.
    (sender,) = [span for span in found.spans if span["name"] == sent_by]
    assert [header.split("-")[1:3] for header in found.sent] == [[found.trace, sender["id"]]]
    assert not [line for line in found.log if "spanwire" in line]


@pytest.mark.parametrize("way", ["whole", "stream"])
def test_beside_litellms_own_callback(played: dict[str, Any], way: str) -> None:
    """Which tells of the call when it has ended, on the application's span: that one is not ours to write on."""
    found = seen(played, "litellm", "callback", way)
    assert found.model_calls == []
    ours = found.ours
    assert ours["name"] == "spanwire.attempt"
    parent = found.parent(ours)
    assert parent is not None
    assert parent["name"] == "application"
    assert "spanwire.outcome" not in parent["attributes"]
    assert "spanwire.outcome" in ours["attributes"]


def test_with_nothing_outside_it_is_the_call(played: dict[str, Any]) -> None:
    found = seen(played, "bare", "all", "stream")
    assert found.model_calls == [found.ours]
    assert found.ours["name"] == "chat m"
    assert [header.split("-")[1:3] for header in found.sent] == [[found.trace, found.ours["id"]]]
    assert found.log == []


@pytest.mark.parametrize("tools", ["httpx", "all"])
@pytest.mark.parametrize("way", ["async", "async stream", "sync"])
def test_the_spans_of_a_client_that_the_user_brings_are_below_ours(
    played: dict[str, Any], tools: str, way: str
) -> None:
    found = seen(played, "httpx", tools, way)
    assert found.model_calls == [found.ours]
    (http,) = [span for span in found.spans if span["scope"] == "opentelemetry.instrumentation.httpx"]
    assert found.parent(http) == found.ours
    assert [header.split("-")[1:3] for header in found.sent] == [[found.trace, http["id"]]]
    assert found.log == []
