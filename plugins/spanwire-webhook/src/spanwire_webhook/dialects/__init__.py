"""Schemas of jobs, one for each provider: PURE codecs, see :class:`spanwire.jobs.contract.JobCodec`."""

from __future__ import annotations

from spanwire.transport import Dialect

from . import baseten, fal, gemini, openai_batch, replicate, runpod
from .baseten import BasetenJobs
from .fal import FalJobs
from .gemini import GeminiJobs
from .generic import GenericJobs
from .openai import OpenAIJobs
from .replicate import CogJobs, ReplicateJobs
from .runpod import RunPodJobs

__all__ = [
    "BasetenJobs",
    "CogJobs",
    "FalJobs",
    "GeminiJobs",
    "GenericJobs",
    "OpenAIJobs",
    "ReplicateJobs",
    "RunPodJobs",
    "dialects",
]

_BOTH = frozenset({"chat", "embeddings"})


def dialects(*, transport: str = "webhook") -> list[Dialect]:
    """All of them, for ``register_dialects``; ``generic`` is the default."""
    return [
        Dialect(transport, "generic", GenericJobs(), _BOTH, default=True),
        Dialect(transport, "baseten", BasetenJobs(), _BOTH, baseten.OPTIONS),
        Dialect(transport, "replicate", ReplicateJobs(), _BOTH, replicate.OPTIONS),
        Dialect(transport, "cog", CogJobs(), _BOTH, replicate.OPTIONS),
        Dialect(transport, "openai", OpenAIJobs(), _BOTH | {"batch"}, openai_batch.OPTIONS),
        Dialect(transport, "fal", FalJobs(), _BOTH, fal.OPTIONS),
        Dialect(transport, "gemini", GeminiJobs(), _BOTH | {"batch"}, gemini.OPTIONS),
        Dialect(transport, "runpod", RunPodJobs(), _BOTH, runpod.OPTIONS),
    ]
