"""The chat model: LangChain's calls become spanwire's, and their answers LangChain's messages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import AliasChoices, ConfigDict, Field, PrivateAttr

import spanwire
from spanwire.errors import ConfigurationError, SpanwireError
from spanwire.telemetry.outer import inside

from .answers import Pieces, chat_result
from .connected import Connected, timeouts_of
from .errors import as_model_error
from .messages import openai_messages
from .outer import noted, span_of
from .structured import Tools, parsed_by, response_format_of, tool_choice_of, tools_of

__all__ = ["ChatSpanwire"]

#: Fields that go into the request under their own names.
_PARAMETERS = (
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "reasoning_effort",
    "verbosity",
    "service_tier",
)
#: Two names for one limit: one that is given for a call replaces the model's, whichever name that has.
_TWINS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}


class _Ask(NamedTuple):
    """One call, ready to be made."""

    endpoint: spanwire.Endpoint
    call: spanwire.Call
    timeouts: spanwire.Timeouts | None
    logprobs: bool


class ChatSpanwire(Connected, BaseChatModel):
    """A chat model on any server that spanwire reaches.

    ::

        model = ChatSpanwire(model="my-model", endpoint="http://127.0.0.1:8000/v1", temperature=0)
        model.invoke("Say hello")
        async for chunk in model.astream("Say hello"):
            ...

    Where the time of a call went is in ``response_metadata["spanwire"]``: of the message, or of the last chunk of a
    stream (``spanwire.Timeline.to_dict()``). Errors are those of :mod:`spanwire.errors`, and LangChain's model errors too.

    Raises:
        ConfigurationError: an argument that is no field (the message names the nearest one, and for those of
            ChatOpenAI what to use instead), or a bad address, key or header.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True, protected_namespaces=())

    model_name: str = Field(alias="model", min_length=1)
    """The model's name as the server knows it."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Longest answer, sent as ``max_tokens``."""
    max_completion_tokens: int | None = None
    """The same under the name that OpenAI's reasoning models want."""
    stop: str | list[str] | None = Field(default=None, validation_alias=AliasChoices("stop", "stop_sequences"))
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    """Log probabilities, in ``response_metadata["logprobs"]``."""
    top_logprobs: int | None = None
    logit_bias: dict[int, int] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    service_tier: str | None = None

    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of every request."""
    extra_body: Mapping[str, Any] | None = Field(default=None, repr=False)
    """The same, and the last word over everything else."""

    streaming: bool = False
    """True: also ``invoke`` streams; False, if it is given: nothing does."""
    stream_usage: bool = True
    """Ask streamed answers for their usage. False for servers that refuse ``stream_options``."""
    include_response_headers: bool = False
    """Keep the answer's headers in ``response_metadata["headers"]``."""
    send_reasoning: bool = False
    """Send the model's earlier reasoning back with its answers, as ``reasoning_content``: some models want it between
    tool calls, others refuse it."""

    _silent: tuple[spanwire.Endpoint, spanwire.Endpoint] | None = PrivateAttr(default=None)

    # --- what LangChain asks about ----------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "chat-spanwire"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        endpoint = self.endpoint_now()
        known: dict[str, Any] = {
            "model_name": self.model_name,
            "endpoint": f"{endpoint.origin.scheme}://{endpoint.address}{endpoint.path}",
        }
        if self.extra_body:  # LangChain's caches tell models apart by this
            known["extra_body"] = dict(self.extra_body)
        return {**known, **self._parameters()}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        given = {**self._parameters(), **kwargs}
        model = given.get("model")
        params = LangSmithParams(
            ls_provider="spanwire",
            ls_model_name=model if isinstance(model, str) else self.model_name,
            ls_model_type="chat",
        )
        if isinstance(given.get("temperature"), (int, float)):
            params["ls_temperature"] = given["temperature"]
        limit = next((kwargs[name] for name in _TWINS if isinstance(kwargs.get(name), int)), None)
        limit = limit or given.get("max_tokens") or given.get("max_completion_tokens")
        if isinstance(limit, int):
            params["ls_max_tokens"] = limit
        words = stop if stop is not None else given.get("stop")
        if words:
            params["ls_stop"] = [words] if isinstance(words, str) else list(words)
        return params

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        total: dict[str, Any] = {}
        model = None
        for output in llm_outputs:
            if output is None:  # streamed
                continue
            model = output.get("model_name") or model
            _add_up(total, output.get("token_usage") or {})
        return {"token_usage": total, "model_name": model or self.model_name}

    # --- the call ---------------------------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in _PARAMETERS:
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        if self.stop:
            found["stop"] = self.stop
        found.update(self.model_kwargs)
        return found

    def _ask(self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Any]) -> _Ask:
        """The call for LangChain's arguments.

        ``given`` are parameters of the request, besides: ``model``, ``timeout``, ``extra_headers``, ``extra_body``,
        ``stream_usage``, and ``stream``, which says what LangChain has acted upon already.
        """
        given.pop("stream", None)
        body = self._parameters()
        endpoint = self.endpoint_now()
        model = self.model_name
        timeouts = headers = None
        extra = self.extra_body
        if not given.pop("stream_usage", self.stream_usage):
            endpoint = self._without_usage(endpoint)
        if given:
            timeouts = timeouts_of(given.pop("timeout", None), "invoke")
            headers = given.pop("extra_headers", None)
            more = given.pop("extra_body", None)
            if more:
                extra = {**(extra or {}), **more}
            for name, twin in _TWINS.items():
                if given.get(name) is not None:
                    body.pop(twin, None)
            if given.get("tools"):
                given["tools"] = [
                    tool if isinstance(tool, dict) and "type" in tool else convert_to_openai_tool(tool)
                    for tool in given["tools"]
                ]
            if given.get("response_format") is not None:
                given["response_format"] = response_format_of(given["response_format"])
            body.update(given)
        if stop is not None:
            body["stop"] = stop or None
        if extra:
            body.update(extra)
        model = body.pop("model", None) or model
        if "messages" in body or "headers" in body:
            raise ConfigurationError(
                "messages and headers are no parameters of a request: messages are what the model is invoked with, headers "
                "are default_headers, or extra_headers for one call"
            )
        call = spanwire.Call.chat(
            model, openai_messages(messages, send_reasoning=self.send_reasoning), headers=headers, **body
        )
        return _Ask(endpoint, call, timeouts, bool(body.get("logprobs")))

    def _without_usage(self, endpoint: spanwire.Endpoint) -> spanwire.Endpoint:
        known = self._silent
        if known is None or known[0] is not endpoint:
            options = {**endpoint.options, "include_usage": False}
            known = self._silent = (endpoint, msgspec.structs.replace(endpoint, options=options))
        return known[1]

    def _pieces(self, ask: _Ask) -> Pieces:
        return Pieces(blocks=self.output_version == "v1", logprobs=ask.logprobs, headers=self.include_response_headers)

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, noted(config), **kwargs)

    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, noted(config), **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ask = self._ask(messages, stop, kwargs)
        try:
            with inside(span_of(run_manager)):
                reply = self.sync_manager().complete(ask.endpoint, ask.call, timeouts=ask.timeouts)
        except SpanwireError as error:
            as_model_error(error)
            raise
        return chat_result(reply, logprobs=ask.logprobs, headers=self.include_response_headers)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ask = self._ask(messages, stop, kwargs)
        try:
            with inside(span_of(run_manager)):
                reply = await self.async_manager().complete(ask.endpoint, ask.call, timeouts=ask.timeouts)
        except SpanwireError as error:
            as_model_error(error)
            raise
        return chat_result(reply, logprobs=ask.logprobs, headers=self.include_response_headers)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        ask = self._ask(messages, stop, kwargs)
        pieces = self._pieces(ask)
        # LangChain never closes this generator: whoever leaves early lets go of it, and the block ends the call.
        try:
            with contextlib.ExitStack() as stack:
                stream = self.sync_manager().stream(ask.endpoint, ask.call, timeouts=ask.timeouts)
                with inside(span_of(run_manager)):  # the call begins here
                    stack.enter_context(stream)
                for chunk in stream:
                    found = pieces.next(chunk)
                    if found is not None:
                        yield found
        except SpanwireError as error:
            as_model_error(error)
            raise
        yield pieces.last(stream.reply)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        ask = self._ask(messages, stop, kwargs)
        pieces = self._pieces(ask)
        try:
            async with contextlib.AsyncExitStack() as stack:
                stream = self.async_manager().stream(ask.endpoint, ask.call, timeouts=ask.timeouts)
                with inside(span_of(run_manager)):  # the call begins here
                    await stack.enter_async_context(stream)
                async for chunk in stream:
                    found = pieces.next(chunk)
                    if found is not None:
                        yield found
        except SpanwireError as error:
            as_model_error(error)
            raise
        yield pieces.last(stream.reply)

    # --- tools and forms --------------------------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Tools,
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools that it may call.

        Args:
            tools: functions, LangChain's tools, Pydantic classes, or mappings in OpenAI's shape.
            tool_choice: a tool's name, ``"auto"``, ``"none"``, ``"required"`` (also ``"any"`` and True), or a mapping.
            strict: have the server hold arguments against their schemas; None leaves it to the server.
            parallel_tool_calls: whether one answer may call several; None leaves it to the server.
            response_format: the form of an answer that calls none: a class, a JSON schema, or OpenAI's mapping.
            kwargs: bound to the calls as they are.

        Raises:
            ConfigurationError: a ``tool_choice`` that is none of these.
        """
        made = tools_of(tools, strict=strict)
        choice = tool_choice_of(tool_choice, made)
        if choice is not None:
            kwargs["tool_choice"] = choice
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        if response_format is not None:
            kwargs["response_format"] = response_format_of(response_format, strict=strict)
        return super().bind(tools=made, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "function_calling",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model with answers in the form of ``schema``.

        Args:
            schema: a Pydantic class (then answers are its instances), a TypedDict, or a JSON schema (then mappings).
                ``json_mode`` goes without.
            method: ``function_calling``: as the arguments of a tool; ``json_schema``: by ``response_format`` with the
                schema; ``json_mode``: JSON of any form, which the prompt has to describe.
            include_raw: answers are ``{"raw": message, "parsed": ..., "parsing_error": ...}``.
            strict: have the server hold the answer against the schema; not for ``json_mode``.
            kwargs: bound to the calls as they are.

        Raises:
            ConfigurationError: no schema, an unknown method, or ``strict`` with ``json_mode``.
            ModelRefusalError: when it is called, and the model refuses (OutputParserException before
                langchain-core 1.7.5).
        """
        if method not in ("function_calling", "json_mode", "json_schema"):
            raise ConfigurationError(
                f"with_structured_output(method={method!r:.40}): it can be function_calling, json_schema or json_mode"
            )
        if schema is None and method != "json_mode":
            raise ConfigurationError(f"with_structured_output(method={method!r}) needs a schema")
        told: dict[str, Any] = {"method": method}
        if method == "json_mode":
            if strict is not None:
                raise ConfigurationError("with_structured_output(strict=...) says nothing with method='json_mode'")
            made = super().bind(
                response_format={"type": "json_object"},
                ls_structured_output_format={"kwargs": told, "schema": schema},
                **kwargs,
            )
            return parsed_by(made, schema, method=method, include_raw=include_raw)
        told["strict"] = strict
        if method == "json_schema":
            form = response_format_of(schema, strict=strict)
            shown = {
                "type": "function",
                "function": {**form["json_schema"], "parameters": form["json_schema"]["schema"]},
            }
            bound = super().bind(
                response_format=form, ls_structured_output_format={"kwargs": told, "schema": shown}, **kwargs
            )
            return parsed_by(bound, schema, method=method, include_raw=include_raw)
        kwargs.setdefault("parallel_tool_calls", False)
        tool = self.bind_tools(
            [schema],
            tool_choice=convert_to_openai_tool(schema)["function"]["name"],
            strict=strict,
            ls_structured_output_format={"kwargs": told, "schema": schema},
            **kwargs,
        )
        return parsed_by(tool, schema, method=method, include_raw=include_raw)


def _add_up(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping):
            _add_up(total.setdefault(name, {}), value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            total[name] = total.get(name, 0) + value
