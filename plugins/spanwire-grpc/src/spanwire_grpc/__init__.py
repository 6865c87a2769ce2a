"""spanwire over gRPC: chat and embeddings on servers that speak OpenAI's JSON (SGLang), the Open Inference Protocol
(Triton, MLServer, KServe, Dynamo) or vLLM's own service; and sessions on any method of two streams.

Nothing here needs to be imported by hand: spanwire loads it for ``grpc://`` and ``grpcs://`` endpoints. A dialect of your
own registers with ``Dialect(transport="grpc", name=..., codec=...)``, where the codec is a :class:`Codec`.
"""

from __future__ import annotations

from spanwire.hookspecs import hookimpl
from spanwire.transport import Dialect, TransportSpec

from .channel import OPTIONS
from .codec import AnswerDecoder, Codec, Rpc
from .oip import OPTIONS as OIP_OPTIONS
from .oip import OpenInference
from .oip_session import OPTIONS as OIP_STREAM_OPTIONS
from .oip_session import OpenInferenceStream
from .openai_json import OPTIONS as OPENAI_JSON_OPTIONS
from .openai_json import TIMING_FIELDS, OpenAIJSON
from .raw import OPTIONS as RAW_OPTIONS
from .raw import Raw
from .transport import GRPCTransport
from .vllm import OPTIONS as VLLM_OPTIONS
from .vllm import VLLM

__all__ = [
    "VLLM",
    "AnswerDecoder",
    "Codec",
    "GRPCTransport",
    "OpenAIJSON",
    "OpenInference",
    "Rpc",
    "register_dialects",
    "register_transports",
]


@hookimpl
def register_transports() -> list[TransportSpec]:
    """``grpc``, for ``grpc`` and ``grpcs``."""
    return [
        TransportSpec(
            name="grpc",
            schemes=("grpc", "grpcs"),
            factory=GRPCTransport,
            capabilities=frozenset({"session"}),
            options=OPTIONS,
            contract=1,
        )
    ]


@hookimpl
def register_dialects() -> list[Dialect]:
    """``openai-json``: OpenAI's JSON as bytes. ``oip`` and ``vllm``: servers that take text. For sessions ``raw``, any
    method, and ``oip-stream``."""
    return [
        Dialect(
            transport="grpc",
            name="openai-json",
            codec=OpenAIJSON(),
            operations=frozenset({"chat", "embeddings"}),
            options=OPENAI_JSON_OPTIONS,
            default=True,
            timing_fields=TIMING_FIELDS,
        ),
        Dialect(
            transport="grpc",
            name="oip",
            codec=OpenInference(),
            operations=frozenset({"chat", "embeddings"}),
            options=OIP_OPTIONS,
        ),
        Dialect(transport="grpc", name="vllm", codec=VLLM(), options=VLLM_OPTIONS),
        Dialect(
            transport="grpc",
            name="raw",
            codec=Raw(),
            operations=frozenset({"session"}),
            options=RAW_OPTIONS,
            default=True,
        ),
        Dialect(
            transport="grpc",
            name="oip-stream",
            codec=OpenInferenceStream(),
            operations=frozenset({"session"}),
            options=OIP_STREAM_OPTIONS,
        ),
    ]
