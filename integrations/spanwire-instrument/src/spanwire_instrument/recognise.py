"""PURE: which HTTP requests are inference, and what they ask for. Everything else is nobody's business.

A request is taken for inference if all of it fits: a POST of JSON, to a path that ends like that of a known API, with a
body that has what this API cannot do without. A body that is not there as a whole (an upload that is streamed) is not
consumed to look into it: then the path decides alone, and the model is what the path says, or unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from spanwire.errors import ConfigurationError

__all__ = ["DEFAULT_RULES", "Recognised", "Rules", "recognise"]


class Recognised(NamedTuple):
    """What a request asks for.

    Attributes:
        operation: as in ``gen_ai.operation.name``.
        model: ``""`` if neither body nor path say it.
        streamed: the answer is asked for as a stream.
        params: parameters that stand on spans, in the names of OpenAI's chat completions.
        provider: whose schema it is, as in ``gen_ai.provider.name``: for servers whose host says nothing. ``""`` for OpenAI's,
            which everybody speaks.
    """

    operation: str
    model: str
    streamed: bool
    params: Mapping[str, Any]
    provider: str = ""


class _API(NamedTuple):
    operation: str
    #: One of these has to be in the body.
    needs: tuple[str, ...]
    #: What a request without ``stream`` gets. None: the path says it.
    streams: bool | None = False
    #: Whose schema it is, where it is not one that many speak.
    provider: str = ""


_CHAT = _API("chat", ("messages",))
_ANTHROPIC = _API("chat", ("messages",), provider="anthropic")
_EMBEDDINGS = _API("embeddings", ("input", "prompt"))
_GEMINI = ("contents",)
#: How paths end. Sources: the references of OpenAI, Azure OpenAI, Anthropic, Gemini and Vertex AI, Ollama.
_ENDINGS: Mapping[str, _API] = {
    "/chat/completions": _CHAT,
    "/completions": _API("text_completion", ("prompt",)),
    "/responses": _API("chat", ("input", "prompt", "previous_response_id", "conversation")),
    "/embeddings": _EMBEDDINGS,
    "/v1/messages": _ANTHROPIC,
    "/anthropic/messages": _ANTHROPIC,
    "/api/chat": _API("chat", ("messages",), streams=True),
    "/api/generate": _API("text_completion", ("prompt",), streams=True),
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    ":generateContent": _API("generate_content", _GEMINI, streams=None, provider="gcp.gemini"),
    ":streamGenerateContent": _API("generate_content", _GEMINI, streams=None, provider="gcp.gemini"),
    ":embedContent": _API("embeddings", ("content",), provider="gcp.gemini"),
    ":batchEmbedContents": _API("embeddings", ("requests",), provider="gcp.gemini"),
    ":rawPredict": _CHAT,
    ":streamRawPredict": _API("chat", ("messages",), streams=True),
}
#: The last, or the last two, steps of a path; or what stands behind a colon in the last one.
_END = re.compile(r"(?:/[a-z0-9]+)?/[a-z]+\Z|:[A-Za-z]+\Z")
#: A model in a path: Azure's deployments, Google's models.
_MODEL = re.compile(r"/(?:deployments|models)/([^/:]{1,200})")


class Rules(msgspec.Struct, frozen=True):
    """Which requests are looked at.

    Attributes:
        hosts: only these, if any: names, of which a leading ``*.`` stands for every name below.
        never: these never, which counts more.
        paths: further endings of paths, with their operation: ``{"/v2/generate": "text_completion"}``.

    Raises:
        ConfigurationError: a field of another type, or a path that does not begin with ``/`` or ``:``.
    """

    hosts: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    paths: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        for name in ("hosts", "never"):
            value: object = getattr(self, name)
            if not isinstance(value, (tuple, list)) or not all(isinstance(host, str) and host for host in value):
                raise ConfigurationError(f"Rules({name}=...) must be a list of host names, such as '*.example.com'")
            msgspec.structs.force_setattr(self, name, tuple(host.lower() for host in value))
        paths: object = self.paths
        if not isinstance(paths, Mapping):
            raise ConfigurationError("Rules(paths=...) must be a mapping of path endings to operations")
        for path, operation in paths.items():
            if not isinstance(path, str) or path[:1] not in ("/", ":") or len(path) < 2:
                raise ConfigurationError(
                    f"Rules(paths=...): {path!r:.60} must begin with / or :, such as '/v2/generate'"
                )
            if not isinstance(operation, str) or not operation:
                raise ConfigurationError(
                    f"Rules(paths=...): the operation of {path!r:.60} must be text, such as 'chat'"
                )

    def takes_host(self, host: str) -> bool:
        """Whether requests to this host are looked at."""
        host = host.lower()
        if self.never and any(_is_host(host, one) for one in self.never):
            return False
        return not self.hosts or any(_is_host(host, one) for one in self.hosts)

    def api(self, path: str) -> _API | None:
        """What the end of this path stands for."""
        for ending, operation in self.paths.items():
            if path.endswith(ending):
                return _API(operation, ())
        return _known_api(path)


@lru_cache(maxsize=256)
def _known_api(path: str) -> _API | None:
    end = _END.search(path)
    if end is None:
        return None
    text = end[0]
    found = _ENDINGS.get(text)
    if found is None and text[0] == "/":  # the last step alone
        found = _ENDINGS.get(text[text.rfind("/") :])
    return found


def _is_host(host: str, rule: str) -> bool:
    return host == rule or (rule.startswith("*.") and host.endswith(rule[1:]))


DEFAULT_RULES = Rules()


class _Generation(msgspec.Struct, gc=False):
    temperature: Any = None
    topP: Any = None  # noqa: N815 - Gemini's
    maxOutputTokens: Any = None  # noqa: N815
    seed: Any = None
    presencePenalty: Any = None  # noqa: N815
    frequencyPenalty: Any = None  # noqa: N815
    top_p: Any = None
    num_predict: Any = None


_ABSENT = msgspec.Raw()


class _Body(msgspec.Struct, gc=False):
    """A request, of which only what is looked at is built. What it is about stays bytes."""

    model: Any = None
    stream: Any = None
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    contents: msgspec.Raw = _ABSENT
    content: msgspec.Raw = _ABSENT
    requests: msgspec.Raw = _ABSENT
    previous_response_id: msgspec.Raw = _ABSENT
    conversation: msgspec.Raw = _ABSENT
    temperature: Any = None
    top_p: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    seed: Any = None
    generationConfig: _Generation | None = None  # noqa: N815 - Gemini's
    options: _Generation | None = None  # Ollama's


_decode = msgspec.json.Decoder(_Body).decode
_PARAMS = (
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)
_OTHER_NAMES = (
    ("temperature", "temperature"),
    ("topP", "top_p"),
    ("top_p", "top_p"),
    ("maxOutputTokens", "max_tokens"),
    ("num_predict", "max_tokens"),
    ("seed", "seed"),
    ("presencePenalty", "presence_penalty"),
    ("frequencyPenalty", "frequency_penalty"),
)
_NO_PARAMS: Mapping[str, Any] = {}


def recognise(
    method: str,
    host: str,
    path: str,
    content_type: str,
    body: bytes | None,
    rules: Rules = DEFAULT_RULES,
) -> Recognised | None:
    """What a request asks for; None if it is no inference, or cannot be told. Never raises.

    Args:
        method, host, path: of the request; the path without its query.
        content_type: of its body, ``""`` for none.
        body: None where it is not there as a whole.
        rules: which requests are looked at.
    """
    if method != "POST":
        return None
    api = rules.api(path)
    if api is None or "json" not in content_type or not rules.takes_host(host):
        return None
    if body is None:
        streamed = ":stream" in path if api.streams is None else bool(api.streams)
        return Recognised(api.operation, _model_in(path), streamed, _NO_PARAMS, api.provider)
    try:
        found = _decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if api.needs and not any(_is_there(getattr(found, name)) for name in api.needs):
        return None
    model = found.model if isinstance(found.model, str) else _model_in(path)
    if api.streams is None:
        streamed = ":stream" in path
    else:
        streamed = found.stream is True if found.stream is not None else api.streams
    return Recognised(api.operation, model, streamed and api.operation != "embeddings", _params(found), api.provider)


def _is_there(value: msgspec.Raw) -> bool:
    view = memoryview(value)  # no copy of a long prompt
    return view.nbytes > 4 or (view.nbytes > 0 and view.tobytes() != b"null")


def _model_in(path: str) -> str:
    found = _MODEL.search(path)
    return found[1] if found is not None else ""


def _params(body: _Body) -> Mapping[str, Any]:
    params = {name: value for name in _PARAMS if (value := getattr(body, name)) is not None}
    if body.max_output_tokens is not None:
        params["max_tokens"] = body.max_output_tokens
    for more in (body.generationConfig, body.options):
        if more is not None:
            for name, ours in _OTHER_NAMES:
                value = getattr(more, name)
                if value is not None:
                    params.setdefault(ours, value)
    return params
