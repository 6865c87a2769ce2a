"""Write the gRPC plugin's message classes anew from its .proto files: ``make grpc-stubs``.

protoc's own Python output registers every message in the one pool of the process, where two copies of a package meet:
whoever has tritonclient or kserve loaded could not load ours. What is written here is the same descriptor, in a pool of
its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1] / "plugins" / "spanwire-grpc"
STUBS = ROOT / "src" / "spanwire_grpc" / "stubs"

TEMPLATE = '''"""Messages of ``proto/{name}.proto``. Written by ``make grpc-stubs``; change that file, and not this one."""

from __future__ import annotations

from typing import Any

from .pool import classes

_FILE = (
{rows}
)

_classes = classes(_FILE)
{names}
'''


def main() -> None:
    """Every file of ``proto/`` becomes a module of ``stubs/``."""
    for proto in sorted((ROOT / "proto").glob("*.proto")):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "descriptor")
            command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{proto.parent}", f"--descriptor_set_out={out}"]
            subprocess.run([*command, str(proto)], check=True)
            found = out.read_bytes()
        (STUBS / f"{proto.stem}.py").write_text(module(proto.stem, found), encoding="utf-8")


def module(name: str, descriptor_set: bytes) -> str:
    """The module of one file, formatted as ruff would."""
    from google.protobuf import descriptor_pb2  # type: ignore[import-untyped]

    (file,) = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set).file
    raw = file.SerializeToString()
    rows = "\n".join(f'    "{raw[at : at + 50].hex()}"' for at in range(0, len(raw), 50))
    names = "\n".join(f'{message.name}: Any = _classes["{message.name}"]' for message in file.message_type)
    return TEMPLATE.format(name=name, rows=rows, names=names)


if __name__ == "__main__":
    main()
