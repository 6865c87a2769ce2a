"""langchain-tests' integration suites, on the loopback server. Run by tests/integrations/langchain/test_standard.py."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_spanwire import ChatSpanwire, SpanwireEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

import spanwire
from spanwire.testing import LoopbackServer, Script


class _Chat(ChatModelIntegrationTests):
    server: LoopbackServer

    @pytest.fixture(autouse=True)
    def _on(self, server: LoopbackServer) -> None:
        type(self).server = server

    @pytest.fixture
    def model(self, request: Any, server: LoopbackServer) -> BaseChatModel:
        return ChatSpanwire(model="m", endpoint=server.url, **(getattr(request, "param", None) or {}))

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSpanwire

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "m", "base_url": self.server.url}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supports_image_urls(self) -> bool:
        return True

    @property
    def supports_pdf_inputs(self) -> bool:
        return True

    @property
    def supports_audio_inputs(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_image_tool_message(self) -> bool:
        return True

    @property
    def supports_pdf_tool_message(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        kinds = ["reasoning_output", "cache_read_input"]
        return {"invoke": kinds, "stream": kinds}

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        return self._counted(spanwire.Usage(10, 20, 30, reasoning_tokens=15), stream=stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self._counted(spanwire.Usage(10, 20, 30, cached_tokens=8), stream=stream)

    def _counted(self, usage: spanwire.Usage, *, stream: bool) -> AIMessage:
        self.server.script(Script.say("counted", usage=usage), model="counted", times=1)
        model = ChatSpanwire(model="counted", endpoint=self.server.url)
        if not stream:
            return model.invoke("count")
        first, *others = model.stream("count")
        message = first.__add__(others)
        assert isinstance(message, AIMessage)
        return message


class TestChat(_Chat):
    pass


class TestChatJsonSchema(_Chat):
    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}


class TestEmbeddings(EmbeddingsIntegrationTests):
    server: LoopbackServer

    @pytest.fixture(autouse=True)
    def _on(self, server: LoopbackServer) -> None:
        type(self).server = server

    @pytest.fixture
    def model(self, server: LoopbackServer) -> Embeddings:
        return SpanwireEmbeddings(model="e", endpoint=server.url)

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return SpanwireEmbeddings
