"""spanwire's errors, which are LangChain's model errors as well: code that catches either goes on to work.

Each class here has the name of its base in :mod:`spanwire.errors`, and nothing of its own but LangChain's base beside it
and ``is_retryable``, which agents' retry middleware asks for. They are made where langchain-core has such errors (1.6 and
newer, `ModelError`); elsewhere spanwire's own are raised.
"""

from __future__ import annotations

from typing import Any

from langchain_core import exceptions

from spanwire import errors

__all__ = ["as_model_error"]

#: A class of spanwire's, LangChain's name for it, and a status that tells more, or None. The first that fits is taken.
_TERMS: tuple[tuple[type[errors.SpanwireError], str, int | None], ...] = (
    (errors.AuthenticationFailed, "ModelPermissionDeniedError", 403),
    (errors.AuthenticationFailed, "ModelAuthenticationError", None),
    (errors.RateLimited, "ModelRateLimitError", None),
    (errors.BadRequest, "ModelNotFoundError", 404),
    (errors.BadRequest, "ModelInvalidRequestError", None),
    (errors.Overloaded, "ModelAPIError", None),
    (errors.ServerError, "ModelAPIError", None),
    (errors.CallTimeout, "ModelTimeoutError", None),
    (errors.ConnectionFailed, "ModelConnectionError", None),
    (errors.Truncated, "ModelConnectionError", None),
    (errors.MessageTooBig, "ModelError", None),
    (errors.ProtocolError, "ModelError", None),
    (errors.QueueFull, "ModelError", None),
    (errors.QueueTimeout, "ModelError", None),
    (errors.NoSlot, "ModelError", None),
)
#: How servers say that a prompt is longer than the model's context. Source: OpenAI's code; the words of vLLM, SGLang,
#: llama.cpp, OpenAI's newer models and TGI.
_TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_TOO_LONG_WORDS = (
    "maximum context length",
    "exceeds the context window",
    "exceeds the available context size",
    "longer than the model's context length",
    "must be <= `max_input_tokens`",
)

_made: dict[tuple[type[errors.SpanwireError], str], type[errors.SpanwireError]] = {}


def as_model_error(error: errors.SpanwireError) -> None:
    """Make the error one of LangChain's too, in place: traceback, cause and fields stay what they are."""
    terms = _terms(error)
    if terms is not None:
        error.__class__ = _class(type(error), terms)


def _terms(error: errors.SpanwireError) -> str | None:
    if not hasattr(exceptions, "ModelError") or type(error).__module__ != errors.__name__:
        return None
    if isinstance(error, errors.ServerError):
        words = error.message.lower()
        if error.code in _TOO_LONG_CODES or any(told in words for told in _TOO_LONG_WORDS):
            return "ContextOverflowError"
    for cls, name, status in _TERMS:
        if type(error) is cls and (status is None or getattr(error, "status", None) == status):
            return name
    return None  # a mistake of the caller's own: no model is to blame


def _class(ours: type[errors.SpanwireError], name: str) -> type[errors.SpanwireError]:
    found = _made.get((ours, name))
    if found is None:
        theirs = getattr(exceptions, name, None) or exceptions.ModelError
        body: dict[str, Any] = {
            "__module__": __name__,
            "__doc__": f"{ours.__doc__}",
            "is_retryable": property(lambda self: self.retryable),
            "__reduce__": _reduce,
        }
        found = _made[ours, name] = type(ours.__name__, (ours, theirs), body)
    return found


def _reduce(self: errors.SpanwireError) -> tuple[Any, ...]:
    """Pickled by their two bases: the class is made where it is needed."""
    ours, theirs = type(self).__bases__
    return (_restored, (ours, theirs.__name__, self.message, dict(self.__dict__)))


def _restored(
    ours: type[errors.SpanwireError], name: str, message: str, fields: dict[str, Any]
) -> errors.SpanwireError:
    cls = _class(ours, name) if hasattr(exceptions, "ModelError") else ours
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error
