"""Servers of the Open Inference Protocol that other people wrote, each with an echo for a model."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.peers.processes import HOME, free_port, python_peer, running

WORD_GAP_S = 0.02

MLSERVER_ECHO = f"""
import asyncio
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse

class Echo(MLModel):
    async def load(self):
        return True

    def _answer(self, request, words):
        return InferenceResponse(id=request.id, model_name=self.name, outputs=[StringCodec.encode_output("text_output", words)])

    async def predict(self, request):
        return self._answer(request, StringCodec.decode_input(request.inputs[0]))

    async def predict_stream(self, requests):
        async for request in requests:
            for word in StringCodec.decode_input(request.inputs[0])[0].split():
                await asyncio.sleep({WORD_GAP_S})
                yield self._answer(request, [word])
"""

KSERVE_ECHO = """
from kserve import InferOutput, InferResponse, Model, ModelServer

class Echo(Model):
    def __init__(self):
        super().__init__("echo")
        self.ready = True

    async def predict(self, payload, headers=None, response_headers=None):
        words = [w.decode() if isinstance(w, bytes) else str(w) for w in payload.inputs[0].as_numpy().ravel()]
        out = InferOutput("text_output", [len(words)], "BYTES", data=[f"echo: {w}" for w in words])
        return InferResponse(payload.id or "0", self.name, [out])

ModelServer().start([Echo()])
"""

DYNAMO_TOKENIZER = """
import json, pathlib
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + special
tok = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tok.add_special_tokens(special)
out = pathlib.Path("tok")
out.mkdir(exist_ok=True)
tok.save(str(out / "tokenizer.json"))
files = {
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1],
                              "pad_token": special[2], "model_max_length": 4096, "chat_template": "{{ messages }}"},
    "config.json": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
                    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": len(pieces),
                    "max_position_embeddings": 4096, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258},
    "generation_config.json": {"bos_token_id": 256, "eos_token_id": [257]},
}
for name, value in files.items():
    (out / name).write_text(json.dumps(value))
"""

DYNAMO_ECHO = f"""
import asyncio, time
from dynamo.llm import ModelInput, ModelType, register_model
from dynamo.runtime import DistributedRuntime, dynamo_worker

async def generate(request, context=None):
    same = {{"id": "cmpl-1", "object": "text_completion", "created": int(time.time()), "model": "echo"}}
    for word in str(request["prompt"]).split():
        await asyncio.sleep({WORD_GAP_S})
        yield {{**same, "choices": [{{"index": 0, "text": word + " ", "logprobs": None, "finish_reason": None}}]}}
    yield {{**same, "choices": [{{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}}]}}

@dynamo_worker()
async def main(runtime: DistributedRuntime):
    endpoint = runtime.endpoint("dynamo.echo.generate")
    await register_model(ModelInput.Text, ModelType.Completions, endpoint, "tok", "echo")
    print("registered", flush=True)
    await endpoint.serve_endpoint(generate)

asyncio.run(main())
"""


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextlib.contextmanager
def mlserver() -> Iterator[int]:
    """MLServer: streams, unwrapped. Yields the port of its gRPC."""
    python = python_peer("mlserver", "mlserver==1.7.1")
    folder = HOME / "mlserver" / "models"
    (folder / "echo").mkdir(parents=True, exist_ok=True)
    port = free_port()
    settings = {"host": "127.0.0.1", "http_port": free_port(), "grpc_port": port, "metrics_port": free_port()}
    (folder / "settings.json").write_text(json.dumps({**settings, "parallel_workers": 0, "gzip_enabled": False}))
    (folder / "echo/model-settings.json").write_text('{"name": "echo", "implementation": "echo_runtime.Echo"}')
    (folder / "echo/echo_runtime.py").write_text(MLSERVER_ECHO)
    command = [str(python.with_name("mlserver")), "start", "."]
    ready = lambda: listens(port)  # noqa: E731
    with running("mlserver", command, ready=ready, limit_s=90, cwd=folder, PYTHONPATH=str(folder / "echo")):
        yield port


@contextlib.contextmanager
def kserve() -> Iterator[int]:
    """KServe: one message for each answer."""
    python = python_peer("kserve", "kserve==0.21.0")
    folder = HOME / "kserve"
    (folder / "echo.py").write_text(KSERVE_ECHO)
    port = free_port()
    more = ["--http_port", str(free_port()), "--grpc_port", str(port), "--enable_docs_url", "false"]
    ready = lambda: listens(port)  # noqa: E731
    with running("kserve", [str(python), "echo.py", *more], ready=ready, limit_s=90, cwd=folder):
        yield port


@contextlib.contextmanager
def dynamo() -> Iterator[int]:
    """Dynamo's frontend and a worker: Triton's dialect."""
    python = python_peer("dynamo", "ai-dynamo==1.2.1", "transformers==5.24.0")
    folder = HOME / "dynamo"
    for name, text in (("tokenizer", DYNAMO_TOKENIZER), ("echo", DYNAMO_ECHO)):
        (folder / f"{name}.py").write_text(text)
    shutil.rmtree(folder / "kv", ignore_errors=True)  # where a worker that was killed is still registered
    env = {
        "DYN_FILE_KV": str(folder / "kv"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "DYN_LOG": "warn",
    }
    port = free_port()
    gone = (folder / "tok/generation_config.json").exists
    with running("dynamo-tokenizer", [str(python), "tokenizer.py"], ready=gone, limit_s=60, cwd=folder, **env):
        pass
    serve = ["-m", "dynamo.frontend", "--kserve-grpc-server", "--http-host", "127.0.0.1", "--http-port", str(port)]
    front = [str(python), *serve, "--grpc-metrics-port", str(free_port())]
    ready = lambda: listens(port)  # noqa: E731
    with running("dynamo-frontend", front, ready=ready, limit_s=90, cwd=folder, **env):
        registered = lambda: b"registered" in _log("dynamo-worker")  # noqa: E731
        with running("dynamo-worker", [str(python), "echo.py"], ready=registered, limit_s=90, cwd=folder, **env):
            yield port


def _log(name: str) -> bytes:
    log: Path = HOME / f"{name}.log"
    return log.read_bytes() if log.exists() else b""
