"""Metadata without bytes: storages are asked for the bytes of what serves, and what lost some is given up."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import KvcmError, StorageIOError
from kvcm.model.instances import Instance
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk
from kvcm.reclaim.custody import StorageFinder
from kvcm.storage.backend import StorageBackend

__all__ = ["Lost", "locations_without_bytes", "without_lost"]

_ASK_SECONDS: Final = 30.0  # a storage that hangs must not keep the caller


class Lost(NamedTuple):
    """Locations of a block that miss bytes, by id."""

    key: int
    location_ids: frozenset[str]


class _Part(NamedTuple):
    key: int
    location_id: str
    uri: str


async def locations_without_bytes(index: MetaIndex, keys: Sequence[int], storages: StorageFinder) -> list[Lost]:
    """Ask the storages of some blocks for their bytes. Of a storage that is not open nothing is known.

    Raises:
        StorageIOError: a storage cannot be asked.
    """
    parts: defaultdict[str, list[_Part]] = defaultdict(list)
    for key, record in zip(keys, await index.get(keys), strict=True):
        for location in record.locations if record is not None else ():
            if location.status is LocationStatus.SERVING:
                uris = (spec.uri for spec in decode_chunk(location.chunk).specs if spec.uri)
                parts[location.storage] += [_Part(key, location.id, uri) for uri in uris]
    lost: defaultdict[int, set[str]] = defaultdict(set)
    for storage, asked in parts.items():
        backend = storages.backend(storage)
        if backend is not None:
            there = await _ask(storage, backend, [part.uri for part in asked])
            for part, exists in zip(asked, there, strict=True):
                if not exists:
                    lost[part.key].add(part.location_id)
    return [Lost(key, frozenset(ids)) for key, ids in lost.items()]


def without_lost(
    old: BlockRecord | None, lost_ids: Collection[str], instance: Instance, due: float
) -> BlockRecord | None:
    """Return the record with what lost its bytes marked as deleting, and with it what is worth nothing alone.

    What is still being written is its writer's, and may complete the block. A pin does not bring bytes back.
    """
    if old is None:
        return None
    serving = {each.id for each in old.locations if each.status is LocationStatus.SERVING}
    going = serving & set(lost_ids)
    left = [e for e in old.locations if e.status is not LocationStatus.DELETING and e.id not in going]
    if not going:
        return old
    if not instance.is_readable_with({name for each in left for name in each.spec_names}):
        going = serving

    def mark(location: Location) -> Location:
        if location.id not in going or location.status is not LocationStatus.SERVING:
            return location
        return location._replace(status=LocationStatus.DELETING, deadline=due)

    return old._replace(locations=tuple(map(mark, old.locations)))


async def _ask(storage: str, backend: StorageBackend, uris: Sequence[str]) -> list[bool]:
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            return await backend.exists(uris)
    except TimeoutError:
        raise StorageIOError(f"storage {storage!r} did not answer within {_ASK_SECONDS:g} s: try again") from None
    except KvcmError:
        raise
    except Exception as error:  # whatever it raises, it did not say that the bytes are missing
        raise StorageIOError(f"storage {storage!r} cannot be asked: {error}") from error
