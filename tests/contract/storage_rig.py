"""The storages that pass the contract, and what clients and the contract know of their addresses."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from kvcm.model.storages import (
    DummyStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageSpec,
    StorageType,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, Part, StorageBackend
from kvcm.storage.directory import StorageDirectory


class Kind(NamedTuple):
    """A type of storage and how many parts go into one object."""

    storage_type: StorageType
    keys_per_object: int
    makes_objects: bool = False

    @property
    def scheme(self) -> str:
        return self.storage_type.scheme

    def config(self, root: Path, name: str = "s-1") -> StorageConfig:
        return StorageConfig(name, self._spec(root))

    def _spec(self, root: Path) -> StorageSpec:
        if self.storage_type is StorageType.ST_NFS:
            return NfsStorageSpec(str(root), self.keys_per_object)
        if self.storage_type is StorageType.ST_DUMMY:
            return DummyStorageSpec(str(root), self.keys_per_object)
        threefs = (str(root.parent), root.name, self.keys_per_object, self.makes_objects)
        if self.storage_type is StorageType.ST_3FS:
            return ThreeFSStorageSpec("", *threefs)
        assert self.storage_type is StorageType.ST_VCNS_3FS, f"no spec of {self.storage_type.name} is made here"
        return VcnsThreeFSStorageSpec("", *threefs, "host", 1, "redis://meta")

    def open(self, root: Path, cluster_id: str = "cluster") -> StorageBackend:
        """Configure and open it."""
        return StorageDirectory(cluster_id).prepare(self.config(root), is_new=True)

    def reopen(self, root: Path, cluster_id: str = "cluster") -> StorageBackend:
        """Open a storage that is configured already, as a restarted manager does."""
        return StorageDirectory(cluster_id).prepare(self.config(root), is_new=False)


FILE_1, FILE_8 = Kind(StorageType.ST_NFS, 1), Kind(StorageType.ST_NFS, 8)
PATH_KINDS = {
    "file-1": FILE_1,
    "file-8": FILE_8,
    "hf3fs-1": Kind(StorageType.ST_3FS, 1),
    "hf3fs-8": Kind(StorageType.ST_3FS, 8, makes_objects=True),
    "vcns-8": Kind(StorageType.ST_VCNS_3FS, 8),
}
KINDS = PATH_KINDS | {"dummy-1": Kind(StorageType.ST_DUMMY, 1), "dummy-8": Kind(StorageType.ST_DUMMY, 8)}


def allocation(
    specs: dict[str, int], keys: Sequence[int], location_id: str = "00000000000a", instance_id: str = "inst"
) -> Allocation:
    """Parts in the order that wire.md 8 packs them: all keys of the first spec, then all of the next."""
    return Allocation(instance_id, location_id, [Part(name, key, size) for name, size in specs.items() for key in keys])


def addresses(uris: Sequence[str]) -> list[LocationUri]:
    return [LocationUri.parse(uri) for uri in uris]


def content(uri: str) -> bytes:
    size = LocationUri.parse(uri).size
    return (blake2b(uri.encode()).digest() * (size // 64 + 1))[:size]


def write(uri: str) -> None:
    """Write a part as an engine does."""
    place = LocationUri.parse(uri)
    path = Path(place.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(place.offset)
        file.write(content(uri))


def read(uri: str) -> bytes:
    place = LocationUri.parse(uri)
    return Path(place.path).read_bytes()[place.offset : place.offset + place.size]


def is_intact(uri: str) -> bool:
    """Whether the bytes that belong there are there; a file that is missing is not intact."""
    return Path(LocationUri.parse(uri).path).exists() and read(uri) == content(uri)


def fill_objects(uris: Sequence[str], size: int) -> None:
    """Give the file behind every uri so many bytes; storages without files need none."""
    for place in addresses(uris):
        if place.scheme != "dummy":
            Path(place.path).parent.mkdir(parents=True, exist_ok=True)
            Path(place.path).write_bytes(b"x" * size)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@dataclass
class Written:
    """Parts that lie in a storage, with their bytes."""

    backend: StorageBackend
    uris: list[str]

    @classmethod
    async def into(cls, backend: StorageBackend, what: Allocation) -> "Written":
        uris = await backend.allocate(what)
        for uri in uris:
            write(uri)
        return cls(backend, uris)

    def path(self, index: int) -> Path:
        return Path(LocationUri.parse(self.uris[index]).path)

    def assert_intact(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            assert read(self.uris[index]) == content(self.uris[index]), self.uris[index]


def can_punch_holes(folder: Path) -> bool:
    """Whether the file system gives the blocks of a hole back, found out by doing it."""
    probe = folder / "probe"
    probe.write_bytes(b"x" * (1 << 17))
    before = probe.stat().st_blocks
    descriptor = os.open(probe, os.O_WRONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        keep_size_and_punch_hole = 0x01 | 0x02
        result = libc.fallocate(descriptor, keep_size_and_punch_hole, ctypes.c_int64(0), ctypes.c_int64(1 << 16))
    finally:
        os.close(descriptor)
    after = probe.stat().st_blocks
    probe.unlink()
    return result == 0 and after < before
