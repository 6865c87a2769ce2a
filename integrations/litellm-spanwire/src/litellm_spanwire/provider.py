"""The handler that LiteLLM calls, and how it gets to know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import litellm
from litellm.llms.custom_llm import CustomLLM
from opentelemetry.context import Context

from spanwire import (
    Call,
    ConnectionManager,
    Endpoint,
    SpanwireError,
    SyncConnectionManager,
    Timeouts,
)
from spanwire.errors import ConfigurationError
from spanwire.manager import default_manager
from spanwire.sync import default_sync_manager

from .answers import Shaper, fill_embeddings, fill_reply, hidden_params
from .errors import translated
from .reports import KEY
from .settings import call_of, embeddings_of, endpoint_of, split, timeouts_of
from .streams import AsyncAnswer, SyncAnswer
from .tracing import context_of, entered

__all__ = ["PROVIDER", "SpanwireLLM", "handler", "register"]

#: What stands before the slash in a model's name.
PROVIDER = "spanwire"


class _Asked(NamedTuple):
    """A call as it was made."""

    endpoint: Endpoint
    call: Call
    timeouts: Timeouts
    found: dict[str, Any]
    context: Context


class SpanwireLLM(CustomLLM):  # type: ignore[misc]
    """LiteLLM's custom provider ``spanwire``. Users register :data:`handler` and never make one.

    Arguments of the methods are LiteLLM's. Errors are LiteLLM's exceptions, with the one of spanwire as ``__cause__``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._manager: ConnectionManager | None = None
        self._sync: SyncConnectionManager | None = None

    def use(self, manager: ConnectionManager | None) -> None:
        """Make calls on this manager; None: on the process's default one, which other integrations share."""
        self._manager = manager
        self._sync = None if manager is None else SyncConnectionManager(manager)

    @property
    def manager(self) -> ConnectionManager:
        """Makes the asynchronous calls."""
        return self._manager or default_manager()

    @property
    def sync_manager(self) -> SyncConnectionManager:
        """Makes the synchronous calls, on connections of its own thread."""
        return self._sync or default_sync_manager()

    # --- chat -------------------------------------------------------------------------------------------------------

    def completion(self, *_: Any, model: str, model_response: Any, **given: Any) -> Any:
        """A whole answer. Works on a thread whose event loop runs: it blocks that thread."""
        asked = self._asked(model, given, streamed=False)
        try:
            with entered(asked.context):
                reply = self.sync_manager.complete(asked.endpoint, asked.call, timeouts=asked.timeouts)
        except SpanwireError as error:
            raise translated(error, model, asked.endpoint.url, asked.found) from error
        return fill_reply(model_response, reply, model, asked.found)

    async def acompletion(self, *_: Any, model: str, model_response: Any, **given: Any) -> Any:
        """A whole answer."""
        asked = self._asked(model, given, streamed=False)
        try:
            with entered(asked.context):
                reply = await self.manager.complete(asked.endpoint, asked.call, timeouts=asked.timeouts)
        except SpanwireError as error:
            raise translated(error, model, asked.endpoint.url, asked.found) from error
        return fill_reply(model_response, reply, model, asked.found)

    def streaming(self, *_: Any, model: str, **given: Any) -> SyncAnswer:
        """An iterator of ``ModelResponseStream``. Returns with the answer's first event."""
        asked = self._asked(model, given, streamed=True)
        shaper = _shaper(model, asked, given)
        try:
            stream = self.sync_manager.stream(asked.endpoint, asked.call, timeouts=asked.timeouts)
        except SpanwireError as error:
            raise translated(error, model, asked.endpoint.url, asked.found) from error
        return SyncAnswer(stream, shaper, asked.found, model, asked.endpoint.url, asked.context)

    def astreaming(self, *_: Any, model: str, **given: Any) -> AsyncAnswer:
        """An asynchronous iterator of ``ModelResponseStream``; no coroutine, since LiteLLM does not await it."""
        asked = self._asked(model, given, streamed=True)
        shaper = _shaper(model, asked, given)
        try:
            stream = self.manager.stream(asked.endpoint, asked.call, timeouts=asked.timeouts)
        except SpanwireError as error:
            raise translated(error, model, asked.endpoint.url, asked.found) from error
        return AsyncAnswer(stream, shaper, asked.found, model, asked.endpoint.url, asked.context)

    # --- embeddings ---------------------------------------------------------------------------------------------------

    def embedding(self, *_: Any, model: str, input: Any, model_response: Any, **given: Any) -> Any:
        """Vectors."""
        asked = self._asked(model, given, input=input)
        try:
            with entered(asked.context):
                found = self.sync_manager.embed(asked.endpoint, asked.call, timeouts=asked.timeouts)
        except SpanwireError as error:
            raise translated(error, model, asked.endpoint.url, asked.found) from error
        return fill_embeddings(model_response, found, model, asked.found)

    async def aembedding(self, *_: Any, model: str, input: Any, model_response: Any, **given: Any) -> Any:
        """Vectors."""
        asked = self._asked(model, given, input=input)
        try:
            with entered(asked.context):
                found = await self.manager.embed(asked.endpoint, asked.call, timeouts=asked.timeouts)
        except SpanwireError as error:
            raise translated(error, model, asked.endpoint.url, asked.found) from error
        return fill_embeddings(model_response, found, model, asked.found)

    # --- inner --------------------------------------------------------------------------------------------------------

    def _asked(self, model: str, given: Mapping[str, Any], *, streamed: bool = False, input: Any = None) -> _Asked:
        found: dict[str, Any] = {}
        api_base = given.get("api_base")
        logging = given.get("logging_obj")
        details = getattr(logging, "model_call_details", None)
        details = details if isinstance(details, dict) else {}
        details[KEY] = found
        litellm_params = given.get("litellm_params") or {}
        try:
            settings, body = split(given.get("optional_params") or {}, litellm_params)
            endpoint = endpoint_of(api_base, given.get("api_key"), settings)
            timeouts = timeouts_of(given.get("timeout"), settings, endpoint, streamed=streamed)
            headers = given.get("headers")
            if input is not None:
                call = embeddings_of(model, input, body, headers)
            else:
                include = endpoint.options.get("include_usage", True) if streamed else None
                call = call_of(model, given["messages"], body, headers, user=details.get("user"), include_usage=include)
        except SpanwireError as error:
            raise translated(error, model, api_base, found) from error
        return _Asked(endpoint, call, timeouts, found, context_of(litellm_params))


def _shaper(model: str, asked: _Asked, given: Mapping[str, Any]) -> Shaper:
    hidden = hidden_params(given.get("litellm_params") or {}, given.get("api_base"), asked.found)
    return Shaper(model, hidden, logprobs=bool(asked.call.body.get("logprobs")))


#: What LiteLLM calls, one for the process; the proxy's configuration names it ``litellm_spanwire.handler``.
handler = SpanwireLLM()


def register(manager: ConnectionManager | None = None) -> SpanwireLLM:
    """Make LiteLLM know the provider ``spanwire``. May be called again; other providers are left alone.

    Args:
        manager: makes the calls; left out, what was given before, or the process's default one.

    Returns:
        The handler.

    Raises:
        ConfigurationError: somebody else has registered a provider of this name.
    """
    for item in litellm.custom_provider_map:
        if item["provider"] == PROVIDER and item["custom_handler"] is not handler:
            raise ConfigurationError(
                f"litellm.custom_provider_map has a provider {PROVIDER!r} already, of {type(item['custom_handler']).__name__}"
            )
    if manager is not None:
        handler.use(manager)
    if not any(item["provider"] == PROVIDER for item in litellm.custom_provider_map):
        litellm.custom_provider_map.append({"provider": PROVIDER, "custom_handler": handler})
    litellm.utils.custom_llm_setup()
    return handler
