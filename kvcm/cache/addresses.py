"""Addresses for blocks that are about to be written: allocated, made, and given back when nobody will write there.

A storage that hands out none right now, since it is full, cannot be used or fails, refuses (`RefusedError`). That does
not end a write, whose blocks may go to the next candidate; and it is noted, so that later writes try the others first.
Only when no candidate is left the caller is refused (`no_candidate_left`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import structlog

from kvcm.cache.pages import pages
from kvcm.cache.selection import NodeStorages
from kvcm.cache.write_plan import PlannedBlock
from kvcm.cache.write_values import WriteSession
from kvcm.index.uninterrupted import uninterrupted
from kvcm.model.chunks import encode_chunks
from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.instances import Instance
from kvcm.model.locations import Location, LocationStatus, SpecUri, decode_chunk, encode_chunk
from kvcm.storage.backend import Allocation, Hints, Part, is_full

__all__ = ["Addresses", "RefusedError", "no_candidate_left"]

_MAKE_SECONDS = 5.0  # for one page; what a storage makes later than that is left to the scrub
_DISCARD_SECONDS = 2.0  # a storage that hangs may keep some space, it must not keep writers

# A named tuple's own constructor binds its arguments in Python; from a ready tuple it takes a third of the time.
_new_part = cast("Callable[[type[Part], tuple[object, ...]], Part]", tuple.__new__)
_new_location = cast("Callable[[type[Location], tuple[object, ...]], Location]", tuple.__new__)

_log = structlog.get_logger("kvcm.cache")


class RefusedError(Exception):
    """A storage hands out no addresses right now; another one may.

    Args:
        storage: its name.
        reason: what a caller is told for whom there is no other one.
    """

    def __init__(self, storage: str, reason: KvcmError) -> None:
        super().__init__(str(reason))
        self.storage = storage
        self.reason = reason


class Addresses:
    """Asks storages for addresses.

    Args:
        storages: the open storages.
        clock: time source.
    """

    def __init__(self, storages: NodeStorages, clock: Clock) -> None:
        self._storages = storages
        self._clock = clock

    async def allocate(
        self, instance: Instance, session: WriteSession, blocks: Sequence[PlannedBlock], hints: Hints
    ) -> dict[int, Location]:
        """Return by key a writing location for every planned block, allocated in one batch per page and storage.

        All or none: nobody has to know of an attempt that failed.

        Raises:
            RefusedError: a storage hands out none.
        """
        fresh: dict[int, Location] = {}
        try:
            for page in pages(blocks):
                for storage, part in _by_storage(page).items():
                    parts = _parts(instance, part)
                    uris = await self._uris(instance, session, storage, parts, hints)
                    fresh |= _locations(session, part, parts, uris, self._clock.now())
                await asyncio.sleep(0)
        except BaseException:
            await uninterrupted(self.discard(fresh.values()))
            raise
        return fresh

    async def _uris(
        self, instance: Instance, session: WriteSession, storage: str, parts: Sequence[Part], hints: Hints
    ) -> list[str]:
        with self._refusing(storage):
            backend = self._storages.backend(storage)
            if backend is None:
                raise NotReadyError(f"storage {storage!r} was removed while the write was being started: start again")
            return await backend.allocate(Allocation(instance.instance_id, session.location_id, parts, hints))

    async def make(self, fresh: Sequence[Location]) -> None:
        """Let storages make the objects of fresh addresses that want to do that themselves.

        Raises:
            RefusedError: a storage cannot; whoever asked has to give the addresses up.
        """
        for storage in dict.fromkeys(location.storage for location in fresh):
            backend = self._storages.backend(storage)
            if backend is None or not backend.makes_objects:
                continue
            chunks = [location.chunk for location in fresh if location.storage == storage]
            for page in pages([spec.uri for chunk in chunks for spec in decode_chunk(chunk).specs]):
                with self._refusing(storage):
                    try:
                        async with asyncio.timeout(_MAKE_SECONDS):
                            await backend.make_objects(page)
                    except TimeoutError:
                        raise StorageIOError(f"storage {storage!r} does not answer: start the write again") from None

    @contextmanager
    def _refusing(self, storage: str) -> Iterator[None]:
        try:
            yield
        except (StorageIOError, NotReadyError) as error:
            self._storages.note_unwritable(storage)
            raise RefusedError(storage, CapacityError(str(error)) if is_full(error) else error) from error

    async def discard(self, unused: Iterable[Location]) -> None:
        """Free addresses that are not handed out, before others of their session are: whoever deletes a packed file has
        to know that nobody will write these slots, also if this manager dies at once."""
        by_storage: defaultdict[str, list[str]] = defaultdict(list)
        for location in unused:
            by_storage[location.storage] += [spec.uri for spec in decode_chunk(location.chunk).specs]
        for storage, uris in by_storage.items():
            await self._discard_on(storage, uris)

    async def _discard_on(self, storage: str, uris: Sequence[str]) -> None:
        backend = self._storages.backend(storage)
        try:
            async with asyncio.timeout(_DISCARD_SECONDS):
                reasons = await backend.discard(uris) if backend is not None else ()
        except TimeoutError:
            reasons = ["no answer"]
        for reason in filter(None, reasons):
            _log.warning("addresses_not_discarded", storage=storage, reason=reason)


def no_candidate_left(reasons: Sequence[KvcmError]) -> KvcmError:
    """Return what the caller is told when every candidate refused: that there is no room where that is so anywhere,
    since room is made; else that nothing can be used now; else what failed."""
    text = "; ".join(map(str, reasons))
    if any(isinstance(reason, CapacityError) for reason in reasons):
        return CapacityError(f"{text}: retry shortly, room is being made")
    if any(isinstance(reason, NotReadyError) for reason in reasons):
        return NotReadyError(text)
    return StorageIOError(text)


def _by_storage(blocks: Sequence[PlannedBlock]) -> Mapping[str, Sequence[PlannedBlock]]:
    if _are_alike(blocks):
        return {blocks[0].place.storage: blocks}
    by_storage: defaultdict[str, list[PlannedBlock]] = defaultdict(list)
    for block in blocks:
        by_storage[block.place.storage].append(block)
    return by_storage


def _are_alike(blocks: Sequence[PlannedBlock]) -> bool:
    """Return whether all blocks lack the same specs and go to the same place, as those of most writes."""
    specs, place = blocks[0].specs, blocks[0].place
    return all(block[4] is specs and block[5] is place for block in blocks)


def _parts(instance: Instance, blocks: Sequence[PlannedBlock]) -> list[Part]:
    """Return the parts of blocks, ordered by spec, then by key: a packed file holds one spec of neighbouring blocks."""
    if _are_alike(blocks):
        chain = [(block[1], block[3]) for block in blocks]
        return [_new_part(Part, (info.name, key, info.size, depth)) for info in blocks[0].specs for key, depth in chain]
    by_spec: defaultdict[str, list[Part]] = defaultdict(list)
    for block in blocks:
        for info in block.specs:
            by_spec[info.name].append(Part(info.name, block.key, info.size, block.depth))
    return [part for name in instance.spec_names for part in by_spec[name]]


def _locations(
    session: WriteSession, blocks: Sequence[PlannedBlock], parts: Sequence[Part], uris: Sequence[str], now: float
) -> dict[int, Location]:
    """Return the location of each block by its key, from the uris of all parts."""
    if not _are_alike(blocks):
        uri_of = {(part.spec_name, part.key): uri for part, uri in zip(parts, uris, strict=True)}
        return {block.key: _location(session, block, uri_of, now) for block in blocks}
    count, specs, place, size_bytes = len(blocks), blocks[0].specs, blocks[0].place, blocks[0].size_bytes
    names = tuple(info.name for info in specs)
    columns = [uris[start : start + count] for start in range(0, len(uris), count)]
    before = (session.location_id, place.storage, place.storage_type, LocationStatus.WRITING, names)
    after = (size_bytes, now, session.id, session.deadline, 0, 0.0)
    chunks = encode_chunks(place.storage_type, names, columns)
    locations = [_new_location(Location, (*before, chunk, *after)) for chunk in chunks]
    return {block[1]: location for block, location in zip(blocks, locations, strict=True)}


def _location(session: WriteSession, block: PlannedBlock, uris: dict[tuple[str, int], str], now: float) -> Location:
    specs = [SpecUri(info.name, uris[info.name, block.key]) for info in block.specs]
    return Location(
        id=session.location_id,
        storage=block.place.storage,
        storage_type=block.place.storage_type,
        status=LocationStatus.WRITING,
        spec_names=tuple(spec.name for spec in specs),
        chunk=encode_chunk(block.place.storage_type, len(specs), specs),
        size_bytes=block.size_bytes,
        written_at=now,
        session_id=session.id,
        deadline=session.deadline,
    )
