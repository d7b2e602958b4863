"""A deletion executor over a real index and dummy storages, whose deletions can be made to fail or hang."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_clock import FakeClock

from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import IndexHandle, MetaIndex
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.locations import BlockRecord, DeletionItem, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.storage.backend import Allocation, Part, StorageBackend
from kvcm.storage.directory import StorageDirectory
from kvcm.telemetry.events import EventLog


@dataclass
class Faulty:
    """A real storage whose deletions fail or hang as a test sets them.

    Attributes:
        inner: the storage.
        deleted: uris in the order in which deletions reached the storage.
        attempts: deletions that reached the storage; each releases `calls`.
        outage: raised by every deletion while set.
        stubborn: uris that cannot be deleted.
        under_way: uris that are being deleted.
        twice: uris whose deletion was begun while it was under way.
        open_gate: while unset, deletions hang.
        forgotten_uris: uris that the executor reported as gone from the metadata.
    """

    inner: StorageBackend
    deleted: list[str] = field(default_factory=list)
    attempts: int = 0
    calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    outage: Exception | None = None
    stubborn: set[str] = field(default_factory=set)
    under_way: set[str] = field(default_factory=set)
    twice: set[str] = field(default_factory=set)
    open_gate: asyncio.Event = field(default_factory=asyncio.Event)
    forgotten_uris: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open_gate.set()

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        self.attempts += 1
        self.calls.release()
        self.twice |= self.under_way.intersection(uris)
        self.under_way.update(uris)
        try:
            await self.open_gate.wait()
            if self.outage is not None:
                raise self.outage
        finally:
            self.under_way.difference_update(uris)
        self.deleted.extend(uri for uri in uris if uri not in self.stubborn)
        results = await self.inner.delete([uri for uri in uris if uri not in self.stubborn])
        assert set(results) <= {None}
        return ["stuck" if uri in self.stubborn else None for uri in uris]

    async def discard(self, uris: Sequence[str]) -> list[str | None]:
        return await self.delete(uris)

    async def forgotten(self, uris: Sequence[str]) -> None:
        self.forgotten_uris += uris
        await self.inner.forgotten(uris)


class FaultyDirectory:
    """Finds the open storages of a real directory, each behind its faults."""

    def __init__(self, directory: StorageDirectory, names: Sequence[str]) -> None:
        self._directory = directory
        self.faults: dict[str, Faulty] = {}
        for name in names:
            inner = directory.backend(name)
            assert inner is not None
            self.faults[name] = Faulty(inner)

    def backend(self, storage: str) -> Faulty | None:
        return self.faults.get(storage)


def owned_index(instance_id: str, uid: int, meta_index: MetaIndex) -> IndexHandle:
    """An index of an instance of two specs."""
    specs = (LocationSpecInfo("tp0", 8), LocationSpecInfo("tp1", 8))
    return IndexHandle(Instance("group", "group", instance_id, 16, specs, ModelDeployment()), uid, meta_index)


class Rig:
    """Blocks that are marked as deleting, the executor that deletes them, and its callbacks.

    Attributes:
        held: until when the bytes of a block must stay, by key.
        delay: seconds for which what expired stays readable.
        events: the events that the executor logs.
        overdue: the sessions that the executor asked to end: (uid, blocks by session) each.
    """

    def __init__(self, names: Sequence[str] = ("a", "b"), backend: Any = None) -> None:
        self.clock = FakeClock()
        self.directory = StorageDirectory("cluster")
        for name in names:
            self.directory.open(StorageConfig(name, DummyStorageSpec()))
        self.storages = FaultyDirectory(self.directory, names)
        self.held: dict[int, float] = {}
        self.delay = 0.0
        self.events = EventLog(now=self.clock.now)
        self.overdue: list[tuple[int, Mapping[str, Sequence[int]]]] = []
        self.executor = self.new_executor()
        self.backend: Any = backend if backend is not None else MemoryBackend()
        self.index = MetaIndex(self.backend, self.directory)
        self.owned = [owned_index("i", 1, self.index)]

    def new_executor(self, is_configured: Callable[[str], bool] = lambda _storage: False) -> DeletionExecutor:
        executor = DeletionExecutor(
            self.storages,  # type: ignore[arg-type]
            self.clock,
            events=self.events,
            is_configured=is_configured,
        )
        executor.serve(self)
        return executor

    def delay_seconds(self, instance: Instance) -> float:
        return self.delay

    def indexes(self) -> Iterator[IndexHandle]:
        yield from self.owned

    async def abort_overdue_writers(self, uid: int, overdue: Mapping[str, Sequence[int]]) -> None:
        """Their sessions are renewed by a minute, as if a client had just asked for that."""
        self.overdue.append((uid, overdue))

        def renew(_key: int, old: BlockRecord | None) -> BlockRecord | None:
            return old and old._replace(
                locations=tuple(
                    place._replace(deadline=self.clock.now() + 60) if place.session_id in overdue else place
                    for place in old.locations
                )
            )

        (index,) = [each.meta_index for each in self.owned if each.uid == uid]
        await index.read_modify_write([key for keys in overdue.values() for key in keys], renew)

    async def run_due(self, after: float = 0.0) -> int:
        """Run the deletions that are due some seconds from now."""
        self.clock.time += after
        return await self.executor.run_due()

    async def pinned_until(self, items: Sequence[DeletionItem]) -> list[float]:
        return [self.held.get(item.key, 0.0) for item in items]

    async def block(
        self,
        key: int,
        storage: str = "a",
        status: LocationStatus = LocationStatus.DELETING,
        location_id: str = "l",
        *,
        after_seconds: float = 0.0,
        pinned_seconds: float = 0.0,
        specs: Sequence[str] = ("tp0", "tp1"),
        owned: int = 0,
    ) -> tuple[str, ...]:
        """Add a location to a block and return its uris; one that is serving has no deadline without seconds."""
        place, uris = await self._place(
            key, storage, status, location_id, after_seconds=after_seconds, pinned_seconds=pinned_seconds, specs=specs
        )

        def add(_key: int, old: BlockRecord | None) -> BlockRecord:
            return BlockRecord(None, 0, (*(old.locations if old is not None else ()), place))

        await self.owned[owned].meta_index.read_modify_write([key], add)
        return uris

    async def chain(self, keys: Sequence[int]) -> list[tuple[str, ...]]:
        """Mark blocks as deleting that follow one another and were written together; return the uris of each."""
        places = [await self._place(key, "a", LocationStatus.DELETING, "l", specs=("tp0", "tp1")) for key in keys]
        chained = zip(keys, (None, *keys), places, strict=False)
        await self.index.put(
            {key: BlockRecord(parent, at, (place,)) for at, (key, parent, (place, _)) in enumerate(chained)}
        )
        return [uris for _, uris in places]

    async def _place(
        self,
        key: int,
        storage: str,
        status: LocationStatus,
        location_id: str,
        *,
        specs: Sequence[str],
        after_seconds: float = 0.0,
        pinned_seconds: float = 0.0,
    ) -> tuple[Location, tuple[str, ...]]:
        backend = self.directory.backend(storage)
        parts = [Part(name, key, 8) for name in specs]
        uris = (
            await backend.allocate(Allocation("i", location_id, parts))
            if backend is not None
            else [f"file://{storage}/{key}/{n}?size=8" for n in range(len(parts))]
        )
        spec_uris = [SpecUri(part.spec_name, uri) for part, uri in zip(parts, uris, strict=True)]
        chunk = encode_chunk(StorageType.ST_DUMMY, len(parts), spec_uris)
        place = Location(
            location_id,
            storage,
            StorageType.ST_DUMMY,
            status,
            tuple(specs),
            chunk,
            8 * len(parts),
            0.0,
            session_id="session" if status is LocationStatus.WRITING else "",
            deadline=self.clock.now() + after_seconds if after_seconds or status is not LocationStatus.SERVING else 0.0,
            pinned_until=self.clock.now() + pinned_seconds,
        )
        return place, tuple(uris)

    async def left(self, owned: int = 0) -> list[int]:
        return sorted([key async for page in self.owned[owned].meta_index.scan() for key in page])

    async def turns(self, enough: Callable[[], bool], most: int = 200) -> bool:
        """Let the loop turn until something holds; return whether it ever did."""
        for _ in range(most):
            if enough():
                return True
            await asyncio.sleep(0)
        return enough()
