"""What a reply says about the call that made it: the timeline, and which of LiteLLM's fields nobody has measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanwire import Timeline

__all__ = ["KEY", "fill", "report"]

#: In ``_hidden_params`` of replies and chunks, in the keyword arguments of callbacks, and on errors.
KEY = "spanwire"


def fill(found: dict[str, Any], timeline: Timeline | None, **made_up: str | None) -> None:
    """Put the ended call into a report that was handed out before."""
    if timeline is not None:
        found.update(timeline.to_dict())
    found.update({name: word for name, word in made_up.items() if word is not None})


def report(source: Any) -> dict[str, Any] | None:
    """The report of a reply, a chunk, a stream, or an error of LiteLLM's; None if it is of another provider.

    That is ``Timeline.to_dict()``, and besides ``"usage_source": "estimated"`` where the server has counted no tokens and
    LiteLLM has, ``"usage_source": "incomplete"`` where it gave only one of the two counts, and ``"finish_reason": "assumed"``
    where it gave none and LiteLLM says ``stop``. Empty until the call has ended.
    """
    for _ in range(4):  # a stream's errors wrap the one that was raised
        hidden = getattr(source, "_hidden_params", None)
        details = getattr(getattr(source, "logging_obj", None), "model_call_details", None)
        for found in (_in(hidden), _in(details), getattr(source, KEY, None)):
            if isinstance(found, dict):
                return found
        source = getattr(source, "original_exception", None)
    return None


def _in(mapping: Any) -> Any:
    return mapping.get(KEY) if isinstance(mapping, Mapping) else None
