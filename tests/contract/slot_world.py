"""Random histories of packed files against a plain model: which slot is whose, and what lies in it.

The storage, its files and the file system are real; the clock is not, so that a test can end the grace of a deleted
slot at once.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from kvcm.model.uri import LocationUri
from kvcm.storage import file_slots
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.file import FileStorage
from kvcm.storage.file_slots import SlotReuse, notes_path

if TYPE_CHECKING:  # benchmarks do without
    import pytest

GRACE_SECONDS = 600.0
MOST_PENDING_SECONDS = 30.0

Slot = tuple[str, int]


def slots(uris: Sequence[str]) -> list[tuple[str, int | None]]:
    """Return file and slot of each part."""
    return [(place.path, place.blkid) for place in map(LocationUri.parse, uris)]


def notes_of(uri: str, suffix: str = "") -> Path:
    """Return the notes file, which records the owners of the slots of a part's file."""
    return Path(notes_path(LocationUri.parse(uri).path) + suffix)


def wait_for_slots(patch: "pytest.MonkeyPatch", seconds: float = 60.0) -> None:
    """Have writers wait so long for free slots. The default says that a busy machine is no medium that hangs."""
    patch.setattr(file_slots, "_WORK_SECONDS", seconds)
    patch.setattr(file_slots, "_WAIT_SECONDS", seconds)


class HandClock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@dataclass(slots=True)
class Counts:
    """What happened.

    Attributes:
        operations: parts that were created, deleted, or rolled back.
        created: parts that were created.
        reused: those of them that lie in a slot which another location had before.
        overlaps: places that were handed out while they had an owner.
        wrong_reads: parts whose bytes were not those that were written, or that counted as gone.
        failures: deletions that failed.
        peak_live_bytes: the most that was alive at a time.
        peak_space_bytes: the most that the files took up in all measurements.
    """

    operations: int = 0
    created: int = 0
    reused: int = 0
    overlaps: int = 0
    wrong_reads: int = 0
    failures: int = 0
    peak_live_bytes: int = 0
    peak_space_bytes: int = 0

    @property
    def space_ratio(self) -> float:
        return self.peak_space_bytes / self.peak_live_bytes


@dataclass
class SlotWorld:
    """A packed storage and the model of it.

    Args:
        root: directory of the storage.
        random: source of all chance.
        slot_bytes: of a part.
        slots_per_file: parts in a file.
        specs: names; all have parts of one size.
    """

    root: Path
    random: Random
    slot_bytes: int = 4096
    slots_per_file: int = 16
    specs: Sequence[str] = ("tp0",)
    clock: HandClock = field(default_factory=HandClock)
    counts: Counts = field(default_factory=Counts)
    leads: bool = True

    def __post_init__(self) -> None:
        (self.root / "cluster").mkdir(parents=True, exist_ok=True)
        self.live: dict[Slot, str] = {}
        self._order: list[Slot] = []  # of the live ones, to choose from
        self._at: dict[Slot, int] = {}
        self.stale: list[str] = []
        self._keys = 0
        self.storage = self.opened()

    def opened(self, term: Callable[[], int | None] | None = None) -> FileStorage:
        """The storage as a manager opens it that remembers nothing."""
        reuse = SlotReuse(GRACE_SECONDS, self.clock.now, term or (lambda: 1 if self.leads else None))
        return FileStorage("s-1", "file", str(self.root), "cluster", self.slots_per_file, reuse=reuse)

    async def allocate(self, count: int, instance_id: str = "inst") -> list[str]:
        """Allocate places for so many blocks, and check that no live block has them (invariant 5)."""
        keys = range(self._keys, self._keys + count)
        self._keys += count
        parts = [Part(spec, key, self.slot_bytes) for spec in self.specs for key in keys]
        uris = await self.storage.allocate(Allocation(instance_id, f"{self._keys:012x}", parts))
        assert len(set(uris)) == len(uris)
        for uri in uris:
            place = _place(uri)
            self.counts.overlaps += _slot(place) in self.live
            self.counts.reused += place.location_id is not None
            self._add(_slot(place), uri)
        self.counts.operations += len(uris)
        self.counts.created += len(uris)
        self.counts.peak_live_bytes = max(self.counts.peak_live_bytes, len(self.live) * self.slot_bytes)
        return uris

    async def create(self, count: int, instance_id: str = "inst") -> list[str]:
        """Write so many blocks."""
        uris = await self.allocate(count, instance_id)
        self.write(uris)
        return uris

    def write(self, uris: Sequence[str]) -> None:
        """Write parts as engines do."""
        for uri in uris:
            place = _place(uri)
            descriptor = _opened(place.path)
            try:
                os.pwrite(descriptor, content(uri, place.size), place.offset)
            finally:
                os.close(descriptor)

    async def delete(self, uris: Sequence[str], *, served: bool = True) -> None:
        """Delete parts as the executor does, after a look at their bytes."""
        self.check(uris)
        await self.roll_back(uris)
        if served:
            await self.storage.forgotten(uris)

    async def evict(self, uris: Sequence[str], count: int) -> list[str]:
        """Delete parts, and write so many blocks before their metadata is gone."""
        self.check(uris)
        await self.roll_back(uris)
        self.clock.time += self.random.uniform(0, MOST_PENDING_SECONDS)
        written = await self.create(count)
        await self.storage.forgotten(uris)
        return written

    async def roll_back(self, uris: Sequence[str]) -> None:
        """Delete parts whose writer may come back."""
        self.counts.failures += sum(reason is not None for reason in await self.storage.delete(uris))
        self.counts.operations += len(uris)
        for uri in uris:
            self._drop(_slot(_place(uri)))
        self.stale = [*self.stale[-64:], *uris[-8:]]

    async def delete_stale(self) -> None:
        """Delete parts again that are long gone, as a late client does."""
        if self.stale:
            some = self.random.choices(self.stale, k=8)
            self.counts.failures += sum(reason is not None for reason in await self.storage.delete(some))

    def check(self, uris: Sequence[str]) -> None:
        """Look at the bytes of live parts."""
        for uri in uris:
            self.counts.wrong_reads += stored(uri) != content(uri, self.slot_bytes)

    async def check_all(self) -> None:
        """Look at the bytes of all live parts, and at what the storage says of them and of those that are gone."""
        uris = list(self.live.values())
        self.check(uris)
        self.counts.wrong_reads += (await self.storage.exists(uris)).count(False)
        assert not any(await self.storage.exists(self.stale)), "a part that was deleted is said to be there"

    def chosen(self, count: int) -> list[str]:
        """Return so many live parts."""
        picked = {self.random.choice(self._order) for _ in range(min(count, len(self._order)))}
        return [self.live[slot] for slot in sorted(picked)]

    def measure_space(self, *, by_blocks: bool = True) -> int:
        """Return the bytes that all files take up, those with notes too: blocks, or where a file system has no holes
        their length."""
        found = sum(each.st_blocks * 512 if by_blocks else each.st_size for each in _files(str(self.root)))
        self.counts.peak_space_bytes = max(self.counts.peak_space_bytes, found)
        return found

    def _add(self, slot: Slot, uri: str) -> None:
        if slot not in self.live:
            self._at[slot] = len(self._order)
            self._order.append(slot)
        self.live[slot] = uri

    def _drop(self, slot: Slot) -> None:
        del self.live[slot]
        at, last = self._at.pop(slot), self._order.pop()
        if last != slot:
            self._order[at] = last
            self._at[last] = at


async def live_through(world: SlotWorld, operations: int, most_live: int, *, by_blocks: bool = True) -> None:
    """Create and delete blocks at random, scattered or a write at a time, until so many operations are done. When a
    write does not fit, every other one comes between a deletion and the end of its metadata, as in a manager that
    evicts while clients write.

    Args:
        world: where.
        operations: parts that are created or deleted.
        most_live: parts that are alive at a time, at most; after a while it goes down to the half of it and up again.
        by_blocks: whether space is counted in blocks.
    """
    random, writes, steps = world.random, list[list[str]](), 0
    goal = most_live
    while world.counts.operations < operations:
        steps += 1
        world.clock.time += GRACE_SECONDS + 1
        count = random.randint(1, 3 * world.slots_per_file)
        if len(world.live) + count * len(world.specs) <= goal:
            writes.append(await world.create(count))
        else:
            victims = _victims(world, writes, count)
            space = min((goal - len(world.live) + len(victims)) // len(world.specs), count)
            if space > 0 and random.random() < 0.5:
                writes.append(await world.evict(victims, space))
            else:
                await world.delete(victims)
        if random.random() < 0.004:
            await world.roll_back(await world.allocate(random.randint(1, 8)))
        if random.random() < 0.02:
            await world.delete_stale()
        if steps % 50 == 0:
            world.measure_space(by_blocks=by_blocks)
        if steps % 500 == 0:
            writes = [left for each in writes if (left := _still_live(world, each))]
            goal = random.choice([most_live, most_live, most_live // 2])
    world.measure_space(by_blocks=by_blocks)
    await world.check_all()


def _victims(world: SlotWorld, writes: list[list[str]], count: int) -> list[str]:
    """Return the live parts of a write, or so many parts from anywhere."""
    if not writes or world.random.random() >= 0.5:
        return world.chosen(count)
    at = world.random.randrange(len(writes))
    writes[at], writes[-1] = writes[-1], writes[at]
    return _still_live(world, writes.pop())


def content(uri: str, size: int) -> bytes:
    """Bytes of a part: no two places, nor two owners of one, have the same."""
    head = struct.pack("<q", hash(uri))
    return head * (size // len(head))


def stored(uri: str) -> bytes:
    """Read a part; nothing where its file is gone."""
    place = _place(uri)
    try:
        descriptor = os.open(place.path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(descriptor, place.size, place.offset)
    finally:
        os.close(descriptor)


@lru_cache(1 << 16)
def _place(uri: str) -> LocationUri:
    return LocationUri.parse(uri)


def _opened(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)


def _slot(place: LocationUri) -> Slot:
    assert place.blkid is not None
    return place.path, place.blkid


def _still_live(world: SlotWorld, uris: Sequence[str]) -> list[str]:
    return [uri for uri in uris if world.live.get(_slot(_place(uri))) == uri]


def _files(folder: str) -> Iterator[os.stat_result]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            else:
                yield entry.stat(follow_symlinks=False)
