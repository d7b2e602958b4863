"""Addresses for blocks that are about to be written: allocated, made, and given back when nobody will write there.

A storage that hands out none right now, since it is full, cannot be used or fails, refuses (`RefusedError`). That does
not end a write, whose blocks may go to the next candidate; and it is noted, so that later writes try the others first.
Only when no candidate is left the caller is refused (`no_candidate_left`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import structlog

from kvcm.cache.pages import pages
from kvcm.cache.selection import NodeStorages
from kvcm.cache.write_plan import PlannedRun, WritePlan
from kvcm.cache.write_values import WriteSession
from kvcm.index.uninterrupted import uninterrupted
from kvcm.model.chunks import encode_chunks
from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.instances import Instance, LocationSpecInfo
from kvcm.model.locations import Location, LocationStatus, uris_of
from kvcm.model.runs import BlockRun
from kvcm.storage.backend import Allocation, Hints, Parts, is_full

__all__ = ["Addresses", "PlacedRun", "RefusedError", "no_candidate_left"]

_MAKE_SECONDS = 5.0  # for one page; what a storage makes later than that is left to the scrub
_DISCARD_SECONDS = 2.0  # a storage that hangs may keep some space, it must not keep writers

_log = structlog.get_logger("kvcm.cache")


class PlacedRun(NamedTuple):
    """A run of a plan whose blocks have addresses."""

    planned: PlannedRun
    blocks: BlockRun

    def parts(self, keys: Container[int]) -> Iterator[tuple[bool, PlacedRun]]:
        """Cut the run where it goes from blocks that are among `keys` to others and back; return what of it is."""
        begin = 0
        for is_one, alike in groupby(self.blocks.keys, keys.__contains__):
            end = begin + len(list(alike))
            yield is_one, PlacedRun(self.planned.cut(begin, end), self.blocks.cut(begin, end))
            begin = end


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
        self, instance: Instance, session: WriteSession, plan: WritePlan, hints: Hints, page_keys: int
    ) -> list[list[PlacedRun]]:
        """Return the runs of a plan in pages, with a writing location for every block, allocated in one batch per page
        and storage.

        All or none: nobody has to know of an attempt that failed.

        Args:
            instance: whose blocks they are.
            session: that writes them.
            plan: what is to be written.
            hints: about how long the blocks will live.
            page_keys: most blocks of a page.

        Raises:
            RefusedError: a storage hands out none.
        """
        placed: list[list[PlacedRun]] = []
        try:
            for page in plan.pages(page_keys):
                if placed:
                    await asyncio.sleep(0)
                placed.append([])
                for storage, runs in _by_storage(page).items():
                    parts = _parts(instance, runs)
                    uris = await self._uris(instance, session, storage, parts, hints)
                    placed[-1] += _placed(session, runs, _uris_by_spec(instance, runs, uris), self._clock.now())
                placed[-1].sort(key=lambda run: run.planned.position)
        except BaseException:
            await uninterrupted(self.discard(run.blocks for page in placed for run in page))
            raise
        return placed

    async def _uris(
        self, instance: Instance, session: WriteSession, storage: str, parts: Parts, hints: Hints
    ) -> list[str]:
        with self._refusing(storage):
            backend = self._storages.backend(storage)
            if backend is None:
                raise NotReadyError(f"storage {storage!r} was removed while the write was being started: start again")
            return await backend.allocate(Allocation(instance.instance_id, session.location_id, parts, hints))

    async def make(self, runs: Sequence[BlockRun]) -> None:
        """Let storages make the objects of fresh addresses that want to do that themselves.

        Raises:
            RefusedError: a storage cannot; whoever asked has to give the addresses up.
        """
        for storage in dict.fromkeys(run.location.storage for run in runs):
            backend = self._storages.backend(storage)
            if backend is None or not backend.makes_objects:
                continue
            uris = [uri for run in runs if run.location.storage == storage for uri in _uris_in(run)]
            for page in pages(uris):
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

    async def discard(self, unused: Iterable[BlockRun]) -> None:
        """Free addresses that are not handed out, before others of their session are: whoever deletes a packed file has
        to know that nobody will write these slots, also if this manager dies at once."""
        by_storage: defaultdict[str, list[str]] = defaultdict(list)
        for run in unused:
            by_storage[run.location.storage] += _uris_in(run)
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


def _uris_in(run: BlockRun) -> list[str]:
    return [uri for chunk in run.chunks for uri in uris_of(chunk)]


def _by_storage(runs: Sequence[PlannedRun]) -> Mapping[str, Sequence[PlannedRun]]:
    by_storage: defaultdict[str, list[PlannedRun]] = defaultdict(list)
    for run in runs:
        by_storage[run.place.storage].append(run)
    return by_storage


def _with_spec(runs: Sequence[PlannedRun], name: str) -> Iterator[tuple[int, PlannedRun, LocationSpecInfo]]:
    """Yield the runs that lack a spec, with their number and what the spec is."""
    for number, run in enumerate(runs):
        for info in run.specs:
            if info.name == name:
                yield number, run, info


def _parts(instance: Instance, runs: Sequence[PlannedRun]) -> Parts:
    """Return the parts of blocks, ordered by spec, then by key: a packed file holds one spec of neighbouring blocks."""
    names: list[str] = []
    keys: list[int] = []
    sizes: list[int] = []
    depths: list[int] = []
    for name in instance.spec_names:
        for _, run, info in _with_spec(runs, name):
            count = len(run.keys)
            names += [name] * count
            keys += run.keys
            sizes += [info.size] * count
            depths += range(run.depth, run.depth + count)
    return Parts(names, keys, sizes, depths)


def _uris_by_spec(
    instance: Instance, runs: Sequence[PlannedRun], uris: Sequence[str]
) -> list[dict[str, Sequence[str]]]:
    """Return for every run the uris of its blocks by spec, from those of all parts."""
    found: list[dict[str, Sequence[str]]] = [{} for _ in runs]
    start = 0
    for name in instance.spec_names:
        for number, run, _ in _with_spec(runs, name):
            found[number][name] = uris[start : start + len(run.keys)]
            start += len(run.keys)
    return found


def _placed(
    session: WriteSession, runs: Sequence[PlannedRun], uris: Sequence[Mapping[str, Sequence[str]]], now: float
) -> Iterator[PlacedRun]:
    for run, of_run in zip(runs, uris, strict=True):
        names = tuple([info.name for info in run.specs])
        location = Location(
            id=session.location_id,
            storage=run.place.storage,
            storage_type=run.place.storage_type,
            status=LocationStatus.WRITING,
            spec_names=names,
            chunk=b"",
            size_bytes=run.size_bytes,
            written_at=now,
            session_id=session.id,
            deadline=session.deadline,
        )
        chunks = encode_chunks(run.place.storage_type, names, [of_run[name] for name in names])
        yield PlacedRun(run, BlockRun(run.keys, run.parent, run.depth, location, chunks))
