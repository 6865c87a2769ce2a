"""Message classes from a serialized ``FileDescriptorProto``, each file in a pool of its own."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

__all__ = ["classes"]


def classes(file_hex: str) -> dict[str, Any]:
    """The classes of a file's top-level messages, by their names."""
    file = descriptor_pb2.FileDescriptorProto.FromString(bytes.fromhex(file_hex))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name)
    return {name: message_factory.GetMessageClass(kind) for name, kind in found.message_types_by_name.items()}
