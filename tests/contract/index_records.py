"""Records for the contract of index backends, and how MetaIndex writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvcm.index.backends.backend import Change, IndexBackend
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, StorageKey, encode_chunk
from kvcm.model.storages import StorageType

__all__ = ["check_sums", "listed", "place", "record", "recount", "used", "write"]


def place(
    location_id: str = "ab",
    status: LocationStatus = LocationStatus.SERVING,
    size: int = 10,
    kind: StorageType = StorageType.ST_NFS,
    deadline: float = 0.0,
    written_at: float = 1234.5,
    storage: str = "nfs",
) -> Location:
    """A location with every field set."""
    uri = SpecUri("tp0", f"file://{storage}/r/c/i/tp0/x.{location_id}?blkid=1&size={size}")
    chunk = encode_chunk(kind, 1, [uri], event_hash=-7)
    session = "session" if status is LocationStatus.WRITING else ""
    return Location(location_id, storage, kind, status, ("tp0",), chunk, size, written_at, session, deadline)


def record(parent: int | None = None, depth: int = 0, size: int = 10, due: float = 99.25) -> BlockRecord:
    """A record with a location that is being written until `due` and one that serves."""
    return BlockRecord(parent, depth, (place("ab", LocationStatus.WRITING, size, deadline=due), place("cd", size=size)))


async def write(backend: IndexBackend, records: Mapping[int, BlockRecord | None]) -> Mapping[StorageKey, int]:
    """Store or remove, passing the backend the previous records as MetaIndex does; return how usage changed."""
    olds = await backend.get_many(list(records))
    changes = [Change(key, old, records[key]) for key, old in zip(records, olds, strict=True)]
    written = await backend.write_many(changes)
    assert not list(written.lost)
    return written.usage


async def listed(backend: IndexBackend, batch_size: int) -> list[int]:
    """The keys of a scan."""
    return [key async for page in backend.scan(batch_size) for key in page]


def used(usage: Mapping[StorageKey, int]) -> dict[StorageKey, int]:
    """Usage without the places that hold nothing."""
    return {where: size_bytes for where, size_bytes in usage.items() if size_bytes}


async def recount(backend: IndexBackend, *, deleting: bool = False) -> dict[StorageKey, int]:
    """Return the usage that the records add up to; with `deleting`, only that of deleting locations."""
    usage: Counter[StorageKey] = Counter()
    for found in await backend.get_many(sorted(set(await listed(backend, 1000)))):
        for location in found.locations if found is not None else ():
            if not deleting or location.status is LocationStatus.DELETING:
                usage[StorageKey(location.storage, location.storage_type)] += location.size_bytes
    return used(usage)


async def check_sums(backend: IndexBackend) -> None:
    """Invariant 4: all sums are what the records say."""
    assert used(backend.usage_bytes) == await recount(backend)
    assert used(backend.deleting_bytes) == await recount(backend, deleting=True)
    found = await backend.get_many(await listed(backend, 1000))
    statuses = [{location.status for location in block.locations} for block in found if block is not None]
    assert backend.deleting_keys == statuses.count({LocationStatus.DELETING})
