"""PURE: what LiteLLM hands to a provider, as an endpoint, a call and time limits. No I/O, and no LiteLLM.

Everything that is about the connection stands under one name, ``spanwire``, in ``litellm_params`` or as a keyword: other
unknown names are the server's (``top_k``, ``guided_json``, ...), and go into the request as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec

from spanwire import TLS, Call, Endpoint, Limits, Retries, Timeouts
from spanwire.errors import ConfigurationError

__all__ = ["SETTINGS", "call_of", "embeddings_of", "endpoint_of", "split", "timeouts_of"]

_NESTED: Mapping[str, type[msgspec.Struct]] = {"tls": TLS, "timeouts": Timeouts, "limits": Limits, "retries": Retries}
#: Names that ``spanwire={...}`` may hold: the fields of ``Endpoint`` but its URL. LiteLLM has an ``api_key`` of its own,
#: which has to be text; here it may be a function.
SETTINGS = tuple(name for name in Endpoint.__struct_fields__ if name != "url")
#: May also stand beside ``api_base``, as people write them first.
_BESIDE = ("transport", "dialect")
#: LiteLLM's own, which it leaves among the parameters.
_NOT_THE_SERVERS = frozenset({"stream", "max_retries", "extra_body", "spanwire", *_BESIDE})
#: LiteLLM retries and falls back by itself: two loops around each other would multiply the attempts.
_ONCE = Retries(max_attempts=1)
_KEPT = 256

_endpoints: dict[Hashable, Endpoint] = {}


def split(
    optional_params: Mapping[str, Any], litellm_params: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of a call: settings of the endpoint, and what goes into the request.

    Raises:
        ConfigurationError: ``spanwire`` is no mapping, or came from a client of LiteLLM's proxy: where the proxy's
            calls go, through which socket and how the server is verified is for its configuration alone to say.
    """
    request = litellm_params.get("proxy_server_request")
    sent = request.get("body") if isinstance(request, Mapping) else None
    for name in ("spanwire", *_BESIDE):
        if isinstance(sent, Mapping) and name in sent:
            raise ConfigurationError(
                f"{name!r} is set in the proxy's configuration (litellm_params), not by its clients"
            )
    found = optional_params.get("spanwire")
    if found is not None and not isinstance(found, Mapping):
        raise ConfigurationError(
            f"spanwire=... must be a mapping such as {{'limits': {{'max_concurrent': 8}}}}, not {type(found).__name__}"
        )
    settings = dict(found or {})
    for name in _BESIDE:
        if optional_params.get(name) is not None:
            settings.setdefault(name, optional_params[name])
    body = {name: value for name, value in optional_params.items() if name not in _NOT_THE_SERVERS}
    extra = optional_params.get("extra_body")
    if extra is not None:
        if not isinstance(extra, Mapping):
            raise ConfigurationError(f"extra_body must be a mapping, not {type(extra).__name__}")
        body.update(extra)
    return settings, body


def endpoint_of(api_base: str | None, api_key: Any, settings: Mapping[str, Any]) -> Endpoint:
    """The endpoint; the same object for the same settings, since it keeps what was prepared for it.

    Raises:
        ConfigurationError: no ``api_base``, an unknown setting, or one that ``Endpoint`` refuses.
    """
    if not api_base:
        raise ConfigurationError(
            "spanwire needs api_base=..., the server's base URL, such as 'http://127.0.0.1:8000/v1'"
        )
    key: Hashable = None
    try:
        key = (api_base, api_key, _frozen(settings))
        known = _endpoints.get(key)
    except TypeError:  # something in the options has no hash
        known = None
    if known is not None:
        return known
    unknown = [str(name) for name in settings if name not in SETTINGS]
    if unknown:
        raise ConfigurationError(
            f"spanwire={{...}} does not know {', '.join(sorted(unknown))}; it knows {', '.join(SETTINGS)}"
        )
    fields: dict[str, Any] = {"retries": _ONCE}
    for name, value in settings.items():
        fields[name] = _nested(name, _NESTED[name], value) if name in _NESTED else value
    if "proxy" in fields and fields["proxy"] in ("", False):  # YAML has no other word for none at all
        fields["proxy"] = None
    fields.setdefault("api_key", api_key or None)
    endpoint = Endpoint(api_base, **fields)
    if key is not None:
        if len(_endpoints) >= _KEPT:
            _endpoints.clear()
        _endpoints[key] = endpoint
    return endpoint


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return ("mapping", *sorted((name, _frozen(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("list", *map(_frozen, value))
    hash(value)
    return (type(value).__name__, value)


def _nested(name: str, kind: type[msgspec.Struct], value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"spanwire={{'{name}': ...}} must be a mapping, not {type(value).__name__}")
    known = kind.__struct_fields__
    unknown = [str(field) for field in value if field not in known]
    if unknown:
        raise ConfigurationError(
            f"spanwire={{'{name}': ...}} does not know {', '.join(sorted(unknown))}; it knows {', '.join(known)}"
        )
    return kind(**{field: tuple(item) if isinstance(item, list) else item for field, item in value.items()})


def timeouts_of(timeout: Any, settings: Mapping[str, Any], endpoint: Endpoint, *, streamed: bool) -> Timeouts:
    """LiteLLM's ``timeout``, which is always there (600 s if nobody gave one), as limits of ours.

    Of a stream it is the longest wait for the first content and between two bytes; a whole answer has to be there within
    it. What ``spanwire={"timeouts": ...}`` names, wins.
    """
    read = getattr(timeout, "read", timeout)  # httpx.Timeout has four of them
    connect = getattr(timeout, "connect", timeout)
    own = settings.get("timeouts")
    if isinstance(own, Timeouts):
        return own
    named = {name: getattr(endpoint.timeouts, name) for name in own} if own else {}
    limits: dict[str, Any] = {}
    if _is_limit(connect):
        limits["connect_s"] = min(float(connect), 10.0)  # as long as a connection ever gets, by our default
    if streamed:
        limits["first_content_s"] = limits["idle_s"] = float(read) if _is_limit(read) else None
    else:
        limits["first_content_s"] = limits["idle_s"] = None
        limits["total_s"] = float(read) if _is_limit(read) else None
    return Timeouts(**{**limits, **named})


def _is_limit(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def call_of(
    model: str,
    messages: Sequence[Any],
    body: Mapping[str, Any],
    headers: Mapping[str, Any] | None,
    *,
    user: Any = None,
    include_usage: bool | None = None,
) -> Call:
    """A chat call. ``include_usage``: whether a stream is asked for its usage; None for whole answers.

    Raises:
        ConfigurationError: as ``Call.chat``.
    """
    checked = Call.chat(model, messages, headers=_texts(headers), n=body.get("n"))
    # `extra_body` may hold any name, also those of `Call.chat`'s own arguments.
    merged = {**checked.body, **{name: value for name, value in body.items() if value is not None}}
    if user is not None:  # LiteLLM takes it out of what a custom provider gets
        merged.setdefault("user", user)
    if include_usage is False:
        merged.pop("stream_options", None)
    elif include_usage and isinstance(merged.get("stream_options"), Mapping):
        merged["stream_options"] = {"include_usage": True, **merged["stream_options"]}
    return msgspec.structs.replace(checked, model=merged.pop("model", model), body=merged)


def embeddings_of(model: str, input: Any, body: Mapping[str, Any], headers: Mapping[str, Any] | None) -> Call:
    """An embeddings call.

    Raises:
        ConfigurationError: as ``Call.embeddings``.
    """
    checked = Call.embeddings(model, input, headers=_texts(headers))
    merged = {**checked.body, **{name: value for name, value in body.items() if value is not None}}
    return msgspec.structs.replace(checked, model=merged.pop("model", model), body=merged)


def _texts(headers: Mapping[str, Any] | None) -> dict[str, str] | None:
    return {str(name): str(value) for name, value in headers.items() if value is not None} if headers else None
