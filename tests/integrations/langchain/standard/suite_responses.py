"""langchain-tests' chat suites over the Responses dialect, on HTTP or WebSocket (STANDARD_PART). Run by tests/integrations/langchain/test_standard.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_spanwire import ChatSpanwire

import spanwire
from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, Script
from tests.integrations.langchain.responses_server import answer_responses
from tests.integrations.langchain.standard.suite_integration import _Chat


@pytest.fixture(scope="module")
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer([answer_responses], part=os.environ.get("STANDARD_PART", "sse")) as server:
        yield server
        assert server.faults == []


class TestResponses(_Chat):
    @property
    def endpoint(self) -> spanwire.Endpoint:
        return self.server.endpoint(dialect="responses")

    @pytest.fixture
    def model(self, request: Any, server: LoopbackServer) -> BaseChatModel:
        return ChatSpanwire(model="m", endpoint=self.endpoint, **(getattr(request, "param", None) or {}))

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "m", "endpoint": self.endpoint}

    @property
    def supports_audio_inputs(self) -> bool:
        return False  # an input of chat completions that Responses does not have

    @pytest.mark.xfail(reason="Responses has no stop sequences", strict=True, raises=ConfigurationError)
    def test_stop_sequence(self, model: BaseChatModel) -> None:
        super().test_stop_sequence(model)

    def _counted(self, usage: spanwire.Usage, *, stream: bool) -> AIMessage:
        self.server.script(Script.say("counted", usage=usage), model="counted", times=1)
        model = ChatSpanwire(model="counted", endpoint=self.endpoint)
        if not stream:
            return model.invoke("count")
        first, *others = model.stream("count")
        message = first.__add__(others)
        assert isinstance(message, AIMessage)
        return message


class TestResponsesJsonSchema(TestResponses):
    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}
