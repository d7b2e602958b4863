"""The interface of a storage type, and how parts of blocks are packed into objects of a path-like storage."""

from __future__ import annotations

import errno
import re
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from operator import add
from typing import NamedTuple, Protocol, overload

from kvcm.model.errors import StorageIOError
from kvcm.model.keys import keys_hex, mixed_key
from kvcm.model.storages import StorageSpace
from kvcm.model.uri import LocationUri, path_component

__all__ = [
    "Allocation",
    "NotHereError",
    "ObjectBatch",
    "Packed",
    "Part",
    "Parts",
    "StorageBackend",
    "StorageSpace",
    "StoredObject",
    "is_full",
    "is_unwritable",
    "object_name",
    "owner_of",
    "pack",
    "packed_uris",
    "slot_count",
]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNWRITABLE = _FULL | {errno.EROFS}


def is_full(error: BaseException | None) -> bool:
    """Return whether an operating system's error behind this one says that the medium has no space: eviction helps."""
    return _has_cause(error, _FULL)


def is_unwritable(error: BaseException | None) -> bool:
    """Return whether such an error says that the medium takes no bytes: it is full, or mounted read-only."""
    return _has_cause(error, _UNWRITABLE)


def _has_cause(error: BaseException | None, numbers: Collection[int]) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in numbers:
            return True
        error = error.__cause__
    return False


class NotHereError(StorageIOError):
    """The medium is not on this host, as its config allows: engines use it, and this manager cannot see it."""


class Part(NamedTuple):
    """One spec of one block that needs a place.

    Attributes:
        spec_name: the spec.
        key: of the block.
        size_bytes: of the place.
        depth: of the block in its chain: deep blocks are read and kept less often.
    """

    spec_name: str
    key: int
    size_bytes: int
    depth: int = 0


class Parts(Sequence[Part]):
    """Parts in columns: those of a whole write, without an object for each.

    Args:
        spec_names: of the parts.
        keys: of their blocks.
        sizes: of the places, bytes.
        depths: of the blocks in their chain.
    """

    __slots__ = ("depths", "keys", "sizes", "spec_names")

    def __init__(
        self, spec_names: Sequence[str], keys: Sequence[int], sizes: Sequence[int], depths: Sequence[int]
    ) -> None:
        self.spec_names = spec_names
        self.keys = keys
        self.sizes = sizes
        self.depths = depths

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Parts:
        """Return parts in columns."""
        if isinstance(parts, cls):
            return parts
        return cls(*zip(*parts, strict=True)) if parts else cls((), (), (), ())

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> Part: ...

    @overload
    def __getitem__(self, at: slice) -> Parts: ...

    def __getitem__(self, at: int | slice) -> Part | Parts:
        columns = self.spec_names[at], self.keys[at], self.sizes[at], self.depths[at]
        return Part(*columns) if isinstance(at, int) else Parts(*columns)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Part]:
        return map(Part, self.spec_names, self.keys, self.sizes, self.depths)

    def only(self, indexes: Sequence[int]) -> Parts:
        """Return some of them."""
        columns = (self.spec_names, self.keys, self.sizes, self.depths)
        return Parts(*([column[i] for i in indexes] for column in columns))  # type: ignore[arg-type]


class Allocation(NamedTuple):
    """Parts that are placed together.

    Attributes:
        instance_id: owner of the blocks.
        location_id: ends the name of every fresh object (design.md decision 1), and is in the uri of every place that
            others had before: so no two locations ever have the same uri.
        parts: what needs a place, in the order of packing.
    """

    instance_id: str
    location_id: str
    parts: Sequence[Part]


class StoredObject(NamedTuple):
    """Bytes that lie in a storage under one name.

    Attributes:
        name: below the directory of its deployment; the uri of every part in it ends in it (`packing.object_name`).
        size_bytes: what it takes up.
        modified_at: unix seconds of its last change, by the storage's clock.
    """

    name: str
    size_bytes: int
    modified_at: float


class ObjectBatch(NamedTuple):
    """Some objects of a storage, and how many beside them could not be looked at."""

    objects: Sequence[StoredObject]
    failed: int = 0


class StorageBackend(Protocol):
    """An open storage. Deletions and queries may block the caller's task, never the event loop."""

    async def allocate(self, allocation: Allocation) -> list[str]:
        """Return one uri per part, in order. Moves no bytes; at most the metadata store is asked.

        Raises:
            StorageIOError: the storage is full, or the store failed.
            NotReadyError: the storage cannot be used now. Nothing is allocated in either case.
        """

    @property
    def makes_objects(self) -> bool:
        """Whether fresh addresses have to be passed to `make_objects` before a writer gets them."""

    async def make_objects(self, uris: Sequence[str]) -> None:
        """Make the empty objects of fresh addresses; those that are there stay as they are.

        Raises:
            StorageIOError: one cannot be made.
        """

    async def probe(self) -> None:
        """Write a small object, read it back and delete it, as a client of the storage would.

        May take as long as the medium hangs: the caller sets the limit. What a probe that was cut off left behind is
        neither listed nor in the way of the next.

        Raises:
            NotHereError: this host cannot see it.
            StorageIOError: the storage cannot be used, with the reason.
        """

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        """Free the space of `uris` for good; missing parts count as deleted. Neighbours in a packed object stay.

        Returns:
            Per uri None, or the reason why it could not be deleted.
        """

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        """Free addresses that were allocated and never returned to a client, so that they are never written.

        Returns:
            As `delete`.
        """

    async def forgotten(self, uris: Sequence[str]) -> None:
        """Note that the metadata of deleted addresses is gone, so that they are not deleted again.

        Called for addresses that served only, by the manager that deleted them, unless it ends in between.
        """

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        """Return per uri whether all its bytes are there.

        Raises:
            StorageIOError: the storage failed, so parts that were not found may exist.
        """

    def objects(self, cluster_id: str) -> AsyncIterator[ObjectBatch]:
        """Yield all objects of a deployment, orphans included, in batches.

        Objects that are added or removed meanwhile may be missing. An unknown deployment has none.

        Raises:
            StorageIOError: the storage cannot be asked.
        """

    async def remove_objects(self, cluster_id: str, objects: Sequence[StoredObject]) -> list[str | None]:
        """Remove whole objects of a deployment as they were listed.

        Returns:
            Per object None, or the reason why it is still there: one that changed since it was listed stays. A
            missing object counts as removed.

        Raises:
            StorageIOError: the storage cannot be asked.
        """

    async def space(self) -> StorageSpace:
        """Return the space of the medium."""

    def take_over(self, previous: StorageBackend) -> None:
        """Take over the state of the storage that this one replaces under the same name."""

    def close(self) -> None:
        """Release what the storage holds open."""


# How parts become objects of a path-like storage: wire.md 8 under design.md decisions 1 and 12.

_LAST_COMPONENT = re.compile(r"([0-9a-f]{1,16})(?:_[0-9]+x[0-9a-f]{16})?\.[0-9A-Za-z]+")


class Packed(NamedTuple):
    """One object.

    Attributes:
        name: below the deployment's directory.
        size_bytes: of each of its slots.
        indexes: of the parts in the allocation, one per slot; neighbours.
    """

    name: str
    size_bytes: int
    indexes: range


def pack(allocation: Allocation, keys_per_object: int) -> Iterator[Packed]:
    """Yield one object after the other.

    Parts of equal size are cut into chunks of `keys_per_object` in their given order; where sizes differ each spec is
    cut by itself, so that every slot of an object has the same size.

    Args:
        allocation: parts ordered by spec, then by key.
        keys_per_object: parts per object; 1 and less mean that every part is an object of its own.
    """
    parts, most = Parts.of(allocation.parts), max(1, keys_per_object)
    for indexes, names in _names_by_list(allocation.instance_id, parts):
        starts = range(0, len(names), most)
        for start, name in zip(starts, _object_names(allocation.location_id, names, most), strict=True):
            begin = indexes.start + start
            yield Packed(name, parts.sizes[begin], range(begin, min(begin + most, indexes.stop)))


def packed_uris(directory: LocationUri, allocation: Allocation, keys_per_object: int) -> list[str]:
    """Return one uri per part, in objects that are packed as `pack` says.

    Args:
        directory: uri of the deployment's directory, with a slash at its end; its size does not matter.
        allocation, keys_per_object: as of `pack`.
    """
    uris: list[str] = []
    parts, most = Parts.of(allocation.parts), max(1, keys_per_object)
    for indexes, names in _names_by_list(allocation.instance_id, parts):
        objects = _object_names(allocation.location_id, names, most)
        counts = [most] * (len(names) // most) if most > 1 else []
        if most > 1 and len(names) % most:
            counts.append(len(names) % most)
        uris += directory._replace(size=parts.sizes[indexes.start]).below(objects, counts)
    return uris


def _names_by_list(instance_id: str, parts: Parts) -> Iterator[tuple[range, list[str]]]:
    """Yield the parts that are cut into objects together, and the name that each would have in an object of its own,
    without the end of that."""
    instance = path_component(instance_id)
    folders = {name: f"{instance}/{path_component(name)}/" for name in set(parts.spec_names)}
    names = list(map(add, map(folders.__getitem__, parts.spec_names), keys_hex(parts.keys)))
    for indexes in _lists(parts) if names else ():
        yield indexes, names[indexes.start : indexes.stop]


def _lists(parts: Parts) -> list[range]:
    if len(set(parts.sizes)) <= 1:
        return [range(len(parts))]
    lists, start = [], 0
    for _, names in groupby(parts.spec_names):
        lists.append(range(start, start := start + len(list(names))))
    return lists


def _object_names(location_id: str, names: Sequence[str], most: int) -> list[str]:
    """Return the names of the objects that hold so many parts each, the last one maybe fewer."""
    end = f".{location_id}"
    if most == 1:
        return [name + end for name in names]
    found = []
    for start in range(0, len(names), most):
        its = names[start : start + most]
        if len(its) == 1:
            found.append(its[0] + end)
        else:
            digest = blake2b("|".join(its).encode(), digest_size=8).hexdigest()
            found.append(f"{its[0]}_{len(its)}x{digest}{end}")
    return found


def object_name(uri: str) -> str:
    """Return the name below its deployment's directory of the object that a part lies in. Memory of a pool has one of
    its own, which begins with a slash since it contains no instance.

    Raises:
        InvalidArgumentError: the uri cannot be read.
    """
    parsed = LocationUri.parse(uri)
    if parsed.range_id is not None:
        return f"/{parsed.storage}{parsed.path}.{parsed.range_id}"
    return "/".join((parsed.key or parsed.path).split("/")[-3:])


def owner_of(name: str) -> tuple[str, int] | None:
    """Return the instance, as a path component, and the mixed key of an object's first block; None for other names."""
    instance, _, rest = name.partition("/")
    found = _LAST_COMPONENT.fullmatch(rest.rpartition("/")[2])
    if found is None:
        return None
    return instance, mixed_key(int(found[1], 16))


def slot_count(object_name: str) -> int:
    """Return how many slots an object has: its name says so, also after years and restarts."""
    count = object_name.rpartition("/")[2].partition("_")[2].partition("x")[0]
    return int(count) if count.isascii() and count.isdigit() else 1
