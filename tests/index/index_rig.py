"""Records, views and a counting backend for the tests of the index."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import StorageType


@dataclass
class TableView:
    """Storages as a table of speed ranks; None is unavailable."""

    ranks: dict[str, int | None] = field(default_factory=dict)
    generation: int = 0

    def rank(self, storage: str) -> int | None:
        return self.ranks.get(storage)

    def change(self, storage: str, rank: int | None) -> None:
        self.ranks[storage] = rank
        self.generation += 1


class CountingBackend(MemoryBackend):
    """The memory backend, with a record of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        self.asked.append(list(keys))
        return await super().get_many(keys)

    def answers(
        self, keys: Sequence[int], compose: Callable[[BlockRecord], bytes | None], *, stop_at_miss: bool
    ) -> list[bytes | None]:
        self.asked.append(list(keys))
        return super().answers(keys, compose, stop_at_miss=stop_at_miss)


def location(
    location_id: str = "l",
    storage: str = "nfs",
    storage_type: StorageType = StorageType.ST_NFS,
    status: LocationStatus = LocationStatus.SERVING,
    specs: Sequence[str] = ("kv",),
    size_bytes: int = 10,
) -> Location:
    uris = [SpecUri(name, f"file://{storage}/{location_id}/{name}?size={size_bytes}") for name in specs]
    chunk = encode_chunk(storage_type, len(uris), uris)
    return Location(location_id, storage, storage_type, status, tuple(specs), chunk, size_bytes, 0.0)


def record(*locations: Location, parent: int | None = None, depth: int = 0) -> BlockRecord:
    return BlockRecord(parent, depth, locations or (location(),))
