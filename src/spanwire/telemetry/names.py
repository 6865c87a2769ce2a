"""PURE: the one table of names, boundaries and labels, by both tables of the GenAI conventions.

``v1.41`` is what every instrumentation emits today; ``genai`` is semantic-conventions-genai, which has no release yet.
``SPANWIRE_SEMCONV=genai`` switches. ``OTEL_SEMCONV_STABILITY_OPT_IN`` has no value for that step: its
``gen_ai_latest_experimental`` asks to leave v1.36, which never was emitted here, so both settings of it give v1.41.
"""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = [
    "CALL_BUCKETS",
    "DEFAULT_METRICS",
    "DETAILS",
    "METRICS",
    "PARAMETERS",
    "PARAMETER_NAMES",
    "PART_BUCKETS",
    "PROVIDERS",
    "TOKEN_BUCKETS",
    "Names",
    "names",
]


class Names(NamedTuple):
    """Names that the two tables do not share. ``None``: the other table's way is taken."""

    duration: str
    #: Of what is no inference, such as embeddings.
    other_duration: str
    first_chunk: str
    #: One histogram with an attribute for the kind of token, or
    tokens: str | None
    #: counters, named by this and the attribute of the span that has the same number.
    token_counters: str | None


_TABLES = {
    "v1.41": Names(
        duration="gen_ai.client.operation.duration",
        other_duration="gen_ai.client.operation.duration",
        first_chunk="gen_ai.client.operation.time_to_first_chunk",
        tokens="gen_ai.client.token.usage",
        token_counters=None,
    ),
    "genai": Names(
        duration="gen_ai.client.inference.duration",
        other_duration="gen_ai.client.operation.duration",
        first_chunk="gen_ai.client.inference.time_to_first_chunk",
        tokens=None,
        token_counters="gen_ai.client.inference.usage.",  # noqa: S106 - no password
    ),
}


def names() -> Names:
    """The table in force: SPANWIRE_SEMCONV = ``genai``, else ``v1.41``."""
    return _TABLES["genai" if os.environ.get("SPANWIRE_SEMCONV", "").strip() == "genai" else "v1.41"]


#: Histogram boundaries in seconds. Source: GenAI conventions v1.41 for whole calls; for handshakes and segments our own:
#: from a loopback connect (1 ms) to a connect limit (10 s).
CALL_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
PART_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: Tokens. Source: GenAI conventions v1.41.
TOKEN_BUCKETS = tuple(float(4**power) for power in range(14))
#: ``gen_ai.provider.name`` by host suffix. Source: GenAI conventions v1.41, the attribute's well-known values. The
#: conventions ask for ``openai`` where an OpenAI-compatible server cannot be told apart.
PROVIDERS = (
    ("openai.azure.com", "azure.ai.openai"),
    ("services.ai.azure.com", "azure.ai.inference"),
    ("api.anthropic.com", "anthropic"),
    ("api.groq.com", "groq"),
    ("api.mistral.ai", "mistral_ai"),
    ("api.deepseek.com", "deepseek"),
    ("api.perplexity.ai", "perplexity"),
    ("api.x.ai", "x_ai"),
    ("api.cohere.com", "cohere"),
    ("generativelanguage.googleapis.com", "gcp.gemini"),
    ("aiplatform.googleapis.com", "gcp.vertex_ai"),
    ("amazonaws.com", "aws.bedrock"),
)
#: Request parameters that have an attribute. Source: GenAI conventions v1.41.
PARAMETERS = (
    ("temperature", "gen_ai.request.temperature"),
    ("top_p", "gen_ai.request.top_p"),
    ("max_tokens", "gen_ai.request.max_tokens"),
    ("max_completion_tokens", "gen_ai.request.max_tokens"),
    ("frequency_penalty", "gen_ai.request.frequency_penalty"),
    ("presence_penalty", "gen_ai.request.presence_penalty"),
    ("seed", "gen_ai.request.seed"),
)
PARAMETER_NAMES = frozenset(parameter for parameter, _ in PARAMETERS)
#: What a caller can switch on and off.
METRICS = frozenset({"duration", "first_content", "first_chunk", "connections", "tokens", "segments"})
DEFAULT_METRICS = frozenset({"duration", "first_content", "connections"})
#: When a call's segments are spans of their own.
DETAILS = ("auto", "full", "flat")
