"""A deletion executor over a real index and dummy storages, whose deletions can be made to fail or hang."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.deletion import DeletionItem
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.storage.backend import Allocation, Part, StorageBackend
from kvcm.storage.directory import StorageDirectory


@dataclass
class FakeClock:
    time: float = 5000.0

    def now(self) -> float:
        return self.time


@dataclass
class Faulty:
    """A real storage whose deletions go wrong as told.

    Attributes:
        inner: the storage.
        deleted: uris in the order in which deletions reached the storage.
        outage: raised by every deletion while set.
        stubborn: uris that cannot be deleted.
        open_gate: while unset, deletions hang.
    """

    inner: StorageBackend
    deleted: list[str] = field(default_factory=list)
    attempts: int = 0
    outage: Exception | None = None
    stubborn: set[str] = field(default_factory=set)
    open_gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.open_gate.set()

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        self.attempts += 1
        await self.open_gate.wait()
        if self.outage is not None:
            raise self.outage
        self.deleted.extend(uri for uri in uris if uri not in self.stubborn)
        results = await self.inner.delete([uri for uri in uris if uri not in self.stubborn])
        assert set(results) <= {None}
        return ["stuck" if uri in self.stubborn else None for uri in uris]


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


class Rig:
    """Blocks that are marked as deleting, and the executor that deletes them."""

    def __init__(self, names: Sequence[str] = ("a", "b")) -> None:
        self.clock = FakeClock()
        self.directory = StorageDirectory("cluster")
        for name in names:
            self.directory.open(StorageConfig(name, DummyStorageSpec()))
        self.storages = FaultyDirectory(self.directory, names)
        self.held: dict[int, float] = {}
        self.executor = DeletionExecutor(self.storages, self.clock)  # type: ignore[arg-type]
        self.executor.hold_while(lambda item: self.held.get(item.key, 0.0))
        self.backend = MemoryBackend()
        self.index = MetaIndex(self.backend, self.directory)

    async def block(
        self, key: int, storage: str = "a", status: LocationStatus = LocationStatus.DELETING, location_id: str = "l"
    ) -> DeletionItem:
        """Add a location to a block and return what it takes to delete it."""
        backend = self.directory.backend(storage)
        parts = [Part("tp0", key, 8), Part("tp1", key, 8)]
        uris = (
            backend.allocate(Allocation("i", location_id, parts))
            if backend is not None
            else [f"file://{storage}/{key}/{n}?size=8" for n in range(2)]
        )
        specs = [SpecUri(part.spec_name, uri) for part, uri in zip(parts, uris, strict=True)]
        chunk = encode_chunk(StorageType.ST_DUMMY, 2, specs)
        place = Location(location_id, storage, StorageType.ST_DUMMY, status, ("tp0", "tp1"), chunk, 16, 0.0)

        def add(_key: int, old: BlockRecord | None) -> BlockRecord:
            return BlockRecord(None, 0, (*(old.locations if old is not None else ()), place))

        await self.index.read_modify_write([key], add)
        return DeletionItem("i", key, location_id, storage, tuple(uris))

    async def left(self) -> list[int]:
        return sorted([key async for page in self.index.scan() for key in page])

    async def turns(self, enough: Callable[[], bool], most: int = 200) -> bool:
        """Let the loop turn until something holds; return whether it ever did."""
        for _ in range(most):
            if enough():
                return True
            await asyncio.sleep(0)
        return enough()
