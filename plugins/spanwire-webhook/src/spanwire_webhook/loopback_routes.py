"""PURE: which schema, and what in it, a request to the job server asks for."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from spanwire.testing.loopback import Request

from . import loopback_shapes
from .loopback_fal import Fal
from .loopback_gemini import Gemini, GeminiBatch
from .loopback_shapes import Route, Shape

__all__ = ["SHAPES", "route"]

_FAL, _GEMINI, _GEMINI_BATCH = Fal(), Gemini(), GeminiBatch()
SHAPES: Mapping[str, Shape] = {
    **loopback_shapes.SHAPES,
    **{shape.name: shape for shape in (_FAL, _GEMINI, _GEMINI_BATCH)},
}
_BATCHES = frozenset({"batchGenerateContent", "asyncBatchEmbedContent"})


def route(request: Request) -> Route | None:
    """By the path's last segments, whatever stands before them; None for what is not known."""
    return _of_gemini(request) or _of_fal(request) or loopback_shapes.route(request.method, request.path)


def _of_gemini(request: Request) -> Route | None:
    method, parts = request.method, request.path.strip("/").split("/")
    last = unquote(parts[-1])
    before = parts[-2] if len(parts) > 1 else ""
    name, colon, verb = last.rpartition(":")
    if method == "POST" and before == "models" and colon and verb in _BATCHES:
        return Route("submit", _GEMINI_BATCH, name)
    if before == "batches" and last.startswith("batch_"):
        return None  # OpenAI's
    if before == "batches" and colon and method == "POST" and verb == "cancel":
        return Route("cancel", _GEMINI_BATCH, name)
    if before == "batches" and method == "GET":
        return Route("status", _GEMINI_BATCH, last)
    if method == "POST" and last == "interactions":
        return Route("submit", _GEMINI, None)
    if method == "GET" and before == "interactions":
        return Route("status", _GEMINI, last)
    if method == "POST" and last == "cancel" and parts[-3:-2] == ["interactions"]:
        return Route("cancel", _GEMINI, before)
    return None


def _of_fal(request: Request) -> Route | None:
    """An app's path may be any: it is known by fal's own owner, or by the callback in the query."""
    method, parts = request.method, request.path.strip("/").split("/")
    if "requests" in parts[2:]:
        at = parts.index("requests", 2)
        more = parts[at + 1 :]
        if method == "GET" and len(more) == 2 and more[1] == "status":
            return Route("status", _FAL, more[0])
        if method == "PUT" and len(more) == 2 and more[1] == "cancel":
            return Route("cancel", _FAL, more[0])
        if method == "GET" and len(more) == 1:
            return Route("result", _FAL, more[0])
    if method == "POST" and len(parts) > 1 and ("fal-ai" in parts[:-1] or "fal_webhook=" in request.query):
        return Route("submit", _FAL, None)
    return None
