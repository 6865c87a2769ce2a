"""langchain-tests' unit suites. Run by tests/integrations/langchain/test_standard.py in a process of its own."""

from __future__ import annotations

from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_spanwire import ChatSpanwire, SpanwireEmbeddings
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests

_URL = "http://127.0.0.1:1/v1"
_FROM_ENV = {"SPANWIRE_API_KEY": "from-env"}


class TestChatUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatSpanwire

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "m", "base_url": _URL}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return _FROM_ENV, {"model": "m", "base_url": _URL}, {"api_key": "from-env"}


class TestEmbeddingsUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return SpanwireEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": "e", "base_url": _URL}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return _FROM_ENV, {"model": "e", "base_url": _URL}, {"api_key": "from-env"}
