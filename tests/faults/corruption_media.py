"""Storages of every type whose bytes a test can change without a call of the manager or an engine."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from kvcm.connectors.transfer.pool_segment import open_segment, segment_path
from kvcm.model.uri import LocationUri
from kvcm.protocol import admin_service_pb2

NODE = "node-a"
POOL_BYTES = 64 << 20

_VCNS = MappingProxyType({"remote_host": "host", "remote_port": 1, "meta_storage_uri": "redis://meta"})
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class PathSpec(NamedTuple):
    """A type of storage that is a directory.

    Attributes:
        field: of the storage's message.
        keys_per_file: parts in a file.
        makes_files: whether the manager makes them.
        more: other fields of the spec.
    """

    field: str
    keys_per_file: int
    makes_files: bool = False
    more: Mapping[str, Any] = _NOTHING


PATH_SPECS = {
    "file-1": PathSpec("nfs", 1),
    "file-8": PathSpec("nfs", 8),
    "hf3fs-8": PathSpec("threefs", 8, makes_files=True),
    "vcns-8": PathSpec("vcnsthreefs", 8, more=_VCNS),
}


class Medium(ABC):
    """A storage and the way past it."""

    @abstractmethod
    def config(self, name: str) -> admin_service_pb2.StorageConfig:
        """Return what the storage is added with."""

    @abstractmethod
    def peek(self, uri: LocationUri) -> bytes:
        """Return the bytes of a part as they lie there."""

    @abstractmethod
    def poke(self, uri: LocationUri, data: bytes, start: int = 0) -> None:
        """Change bytes of a part from `start` on."""

    def flip(self, uri: LocationUri, byte: int, mask: int = 1) -> None:
        """Change bits of one byte of a part."""
        self.poke(uri, bytes([self.peek(uri)[byte] ^ mask]), byte)


class PathMedium(Medium):
    """Files.

    Args:
        spec: of the storage.
        root: directory as manager and engines see it.
        behind: the same directory beside their mount; None where there is none between.
    """

    def __init__(self, spec: PathSpec, root: Path, behind: Path | None = None) -> None:
        self.spec = spec
        self._root = root
        self._behind = behind or root

    def config(self, name: str) -> admin_service_pb2.StorageConfig:
        spec = {"key_count_per_file": self.spec.keys_per_file, **self.spec.more}
        if self.spec.field == "nfs":
            spec["root_path"] = f"{self._root}/"
        else:
            spec |= {"mountpoint": str(self._root.parent), "root_dir": self._root.name}
            spec["touch_file_when_create"] = self.spec.makes_files
        fields: dict[str, Any] = {"global_unique_name": name, self.spec.field: spec}
        return admin_service_pb2.StorageConfig(**fields)

    def file(self, uri: LocationUri) -> Path:
        """Return the file of a part, beside the mount."""
        return self._behind / Path(uri.path).relative_to(self._root)

    def peek(self, uri: LocationUri) -> bytes:
        return self.file(uri).read_bytes()[uri.offset : uri.offset + uri.size]

    def poke(self, uri: LocationUri, data: bytes, start: int = 0) -> None:
        descriptor = os.open(self.file(uri), os.O_WRONLY)
        try:
            assert os.pwrite(descriptor, data, uri.offset + start) == len(data)
        finally:
            os.close(descriptor)


class PoolMedium(Medium):
    """Memory of this node.

    Args:
        directory: of the segment.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def config(self, name: str) -> admin_service_pb2.StorageConfig:
        spec = {"node_id": NODE, "capacity_bytes": POOL_BYTES}
        return admin_service_pb2.StorageConfig(global_unique_name=name, tair_mem_pool=spec)

    def path(self, storage: str) -> Path:
        """Return the file of the memory."""
        return segment_path(self._directory, "", storage)

    def peek(self, uri: LocationUri) -> bytes:
        return self._bytes_of(uri).tobytes()

    def poke(self, uri: LocationUri, data: bytes, start: int = 0) -> None:
        self._bytes_of(uri)[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def _bytes_of(self, uri: LocationUri) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Map the memory as any process of the node can."""
        segment = open_segment(self.path(uri.storage), POOL_BYTES)
        assert segment is not None
        return segment.data[uri.offset : uri.offset + uri.size]
