from __future__ import annotations

import subprocess
import sys

from spanwire_grpc.stubs import oip, openai_json, vllm

_BESIDE_ANOTHER = """
from google.protobuf import descriptor_pb2, descriptor_pool
other = descriptor_pb2.FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
for name in ("ServerLiveRequest", "ModelInferRequest", "InferParameter"):
    other.message_type.add(name=name)
before = {before!r}
if before:
    descriptor_pool.Default().Add(other)
from spanwire_grpc.stubs import oip
if not before:
    descriptor_pool.Default().Add(other)
descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")
print(oip.ModelInferRequest(model_name="m").SerializeToString().hex())
"""


def test_another_copy_of_the_package_may_be_loaded_before_or_after() -> None:
    for before in (True, False):
        code = _BESIDE_ANOTHER.replace("{before!r}", repr(before))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip() == "0a016d"


def test_field_numbers_are_the_protocols() -> None:
    def numbers(message: object) -> dict[str, int]:
        return {field.name: field.number for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]

    assert numbers(oip.ModelInferRequest) == {
        "model_name": 1,
        "model_version": 2,
        "id": 3,
        "parameters": 4,
        "inputs": 5,
        "outputs": 6,
        "raw_input_contents": 7,
    }
    assert numbers(oip.ModelStreamInferResponse) == {"error_message": 1, "infer_response": 2}
    assert numbers(oip.InferTensorContents)["bytes_contents"] == 8
    assert numbers(vllm.SequenceOutput) == {"index": 1, "text": 2, "num_tokens": 3, "finish_info": 8}
    assert numbers(openai_json.OpenAIStreamChunk) == {"json_chunk": 1, "finished": 2}
