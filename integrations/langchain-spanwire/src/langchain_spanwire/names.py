"""What becomes of arguments that are no fields: the nearest field is named, and for ChatOpenAI's own the replacement."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel

from spanwire.errors import ConfigurationError

__all__ = ["REPLACED", "check_names", "known_names"]

_CONNECTIONS = (
    "connections are spanwire's: share them by manager=spanwire.ConnectionManager(), and set TLS, a proxy or a unix "
    "socket on endpoint=spanwire.Endpoint(url, tls=..., proxy=..., uds=...)"
)
_RESPONSES = (
    "it belongs to the Responses API, which is a dialect: dialect=..., where one is installed; not to chat completions"
)
_INTERNAL = "ChatOpenAI's own clients; there are none here. " + _CONNECTIONS

#: Fields of ChatOpenAI and OpenAIEmbeddings (langchain-openai 1.7) that we refuse, and what takes their place.
REPLACED: Mapping[str, str] = {
    "openai_api_key": "use api_key",
    "openai_api_base": "use endpoint, or base_url",
    "openai_organization": 'use default_headers={"OpenAI-Organization": ...}',
    "organization": 'use default_headers={"OpenAI-Organization": ...}',
    "openai_proxy": "use endpoint=spanwire.Endpoint(url, proxy=...); HTTP_PROXY and the like are read by themselves",
    "request_timeout": "use timeout, in seconds or as spanwire.Timeouts(...)",
    "stream_chunk_timeout": "use timeout=spanwire.Timeouts(idle_s=...)",
    "http_client": _CONNECTIONS,
    "http_async_client": _CONNECTIONS,
    "http_socket_options": _CONNECTIONS,
    "client": _INTERNAL,
    "async_client": _INTERNAL,
    "root_client": _INTERNAL,
    "root_async_client": _INTERNAL,
    "n": "a reply holds one answer; use model.batch([prompt] * n), one call for each",
    "use_responses_api": _RESPONSES,
    "use_previous_response_id": _RESPONSES,
    "reasoning": "use reasoning_effort, or extra_body={...} for what else the server takes",
    "include": _RESPONSES,
    "truncation": _RESPONSES,
    "context_management": _RESPONSES,
    "store": "use extra_body={'store': ...}",
    "prompt_cache_options": "use extra_body={'prompt_cache_options': ...}",
    "disabled_params": "nothing is sent that was not given; leave the parameter out",
    "tiktoken_model_name": "use custom_get_token_ids, a function from text to token ids",
    # of OpenAIEmbeddings
    "deployment": "use model, and the deployment in the endpoint's URL",
    "openai_api_version": 'use default_query={"api-version": ...}',
    "api_version": 'use default_query={"api-version": ...}',
    "openai_api_type": "there is only one; leave it out",
    "embedding_ctx_length": "texts are sent as they are: split what is too long before, and leave it out",
    "check_embedding_ctx_length": "texts are sent as they are: split what is too long before, and leave it out",
    "tiktoken_enabled": "texts are sent as they are; leave it out",
    "allowed_special": "texts are sent as they are; leave it out",
    "disallowed_special": "texts are sent as they are; leave it out",
    "skip_empty": "an empty text has no vector; take it out before",
    "show_progress_bar": "there is none; leave it out",
    "headers": "use default_headers",
    "retry_min_seconds": "use endpoint=spanwire.Endpoint(url, retries=spanwire.Retries(base_s=...))",
    "retry_max_seconds": "use endpoint=spanwire.Endpoint(url, retries=spanwire.Retries(max_wait_s=...))",
}


def known_names(model: type[BaseModel]) -> set[str]:
    """The names of a model's fields, and their other names."""
    names = set()
    for name, field in model.model_fields.items():
        names.add(name)
        names.update(alias for alias in (field.alias, field.validation_alias) if isinstance(alias, str))
        if isinstance(field.validation_alias, AliasChoices):
            names.update(choice for choice in field.validation_alias.choices if isinstance(choice, str))
    return names


def check_names(owner: str, given: Iterable[str], known: set[str]) -> None:
    """Raises ConfigurationError for the first name that is not known, with what to write instead."""
    for name in given:
        if name in known:
            continue
        if name in REPLACED:
            raise ConfigurationError(f"{owner}({name}=...) is not supported: {REPLACED[name]}")
        near = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"did you mean {near[0]}=?" if near else "what only the server knows goes into extra_body={...}"
        raise ConfigurationError(f"{owner} has no field {name!r:.60}; {hint}")


def mapping_of(value: Any) -> dict[str, Any] | None:
    """What a before-validator was given, if it is keyword arguments."""
    return dict(value) if isinstance(value, Mapping) else None
