"""What the manager asks of a storage type."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple, Protocol, overload

__all__ = [
    "Allocation",
    "Hints",
    "ObjectPage",
    "Part",
    "Parts",
    "StorageBackend",
    "StorageSpace",
    "StoredObject",
    "is_full",
]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def is_full(error: BaseException | None) -> bool:
    """Return whether an operating system's error behind this one says that the medium takes no bytes."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


class Part(NamedTuple):
    """One spec of one block that needs a place.

    Attributes:
        spec_name: the spec.
        key: of the block.
        size_bytes: of the place.
        depth: of the block in its chain: what is deep is read and kept less often.
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


class Hints(NamedTuple):
    """What is known of parts before they are written. A storage may place them by it, or ignore it.

    Attributes:
        location_group: instance group of the blocks: what is read, kept and removed together.
        lifetime_seconds: age that the blocks will reach at most, 0 for unknown.
    """

    location_group: str = ""
    lifetime_seconds: int = 0


class Allocation(NamedTuple):
    """Parts that are placed together.

    Attributes:
        instance_id: owner of the blocks.
        location_id: ends the name of every fresh object (design.md decision 1), and is in the uri of every place that
            others had before: so no two locations ever have the same uri.
        parts: what needs a place, in the order of packing.
        hints: what is known of them.
    """

    instance_id: str
    location_id: str
    parts: Sequence[Part]
    hints: Hints = Hints()


class StorageSpace(NamedTuple):
    """Space of the medium in bytes."""

    capacity_bytes: int
    free_bytes: int


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


class ObjectPage(NamedTuple):
    """Some objects of a storage, and how many beside them could not be looked at."""

    objects: Sequence[StoredObject]
    failed: int = 0


class StorageBackend(Protocol):
    """An open storage. Deletions and queries may block the caller's task, never the event loop."""

    async def allocate(self, allocation: Allocation) -> list[str]:
        """Return one uri per part, in order. Moves no bytes; at most the metadata store is asked.

        Raises:
            StorageIOError: there is no room, or the store cannot be asked.
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
            StorageIOError: the storage cannot be used, with the reason.
        """

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        """Free the places of `uris` for good; what is already gone counts as deleted. Neighbours in a packed object
        stay.

        Returns:
            Per uri None, or the reason why it could not be deleted.
        """

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        """Free places that were allocated and never handed out, so that nobody will ever write them.

        Returns:
            As `delete`.
        """

    async def forgotten(self, uris: Sequence[str]) -> None:
        """Hear that the metadata of deleted places is gone, so that nobody deletes them again.

        Only told of places that served, by the manager that deleted them, unless it ends in between.
        """

    async def exists(self, uris: Sequence[str]) -> list[bool]:
        """Return per uri whether all its bytes are there.

        Raises:
            StorageIOError: the storage cannot be asked, so what is not found may be there nevertheless.
        """

    def objects(self, cluster_id: str) -> AsyncIterator[ObjectPage]:
        """Yield all objects of a deployment, whether anybody knows them or not, in pages.

        What is added or removed meanwhile may be missing. Of a deployment that the storage never saw there are none.

        Raises:
            StorageIOError: the storage cannot be asked.
        """

    async def remove_objects(self, cluster_id: str, objects: Sequence[StoredObject]) -> list[str | None]:
        """Remove whole objects of a deployment as they were listed.

        Returns:
            Per object None, or the reason why it is still there: one that changed since it was listed stays. What is
            gone already counts as removed.

        Raises:
            StorageIOError: the storage cannot be asked.
        """

    async def space(self) -> StorageSpace:
        """Return the space of the medium."""

    def inherit(self, previous: StorageBackend) -> None:
        """Take over what must be remembered of the storage that this one replaces under the same name."""

    def close(self) -> None:
        """Release what the storage holds open."""
