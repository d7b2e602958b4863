"""Write sessions: the lease between StartWriteCache and FinishWriteCache.

Invariants held here:

* 2: two writers never hold a writing location of the same block and spec: the location is added in the same
  compare-and-set that checks for another one.
* 3: a session ends exactly once. See `endings`.

A session is a document of the store, so any manager can finish what another one started. It is stored before its
blocks (design.md decision 3): whatever happens in between, its end rolls the blocks back, and a block that came too
late for that carries session and deadline itself, so it is found and repaired from its record alone.

Addresses come before both, all or none, so nothing has to be undone when a storage refuses them: the write is planned
anew without that storage, in the same call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from kvcm.cache.addresses import Addresses, PlacedRun, RefusedError, no_candidate_left
from kvcm.cache.endings import SessionEndings, timeout_seconds
from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.limits import Limits
from kvcm.cache.pages import give_way, pages
from kvcm.cache.selection import NodeStorages, candidates
from kvcm.cache.usage import Ledger, Reservation
from kvcm.cache.write_plan import Planner, Specs, WritePlan, missing_specs, plan_write
from kvcm.cache.write_values import FinishedWrite, StartedWrite, WriteRequest, WriteSession
from kvcm.index.uninterrupted import uninterrupted
from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError, NotReadyError
from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import BlockRecord
from kvcm.model.masks import BlockMask
from kvcm.model.principals import errand
from kvcm.storage.backend import Hints, StorageBackend
from kvcm.telemetry.stages import staged

__all__ = ["FinishedWrite", "StartedWrite", "WriteRequest", "WriteSession", "WriteSessions"]

_EMPTY_SESSION_SECONDS = 10
_MAX_SESSIONS = 100_000
_MOST_PLANS = 8
_RESERVATION_SECONDS = 10.0  # then the room is given to others, should this manager have died
_STORE_SECONDS = 4.0  # more than one page takes the store, or it fails


class _Placed(NamedTuple):
    """A plan whose blocks have addresses.

    Attributes:
        plan: the blocks.
        reservation: of the room that they take; None when nothing has to be written.
        opened: what was open of their storages before the first was asked for addresses.
        pages: the runs with their addresses.
    """

    plan: WritePlan
    reservation: Reservation | None
    opened: Mapping[str, StorageBackend | None]
    pages: Sequence[Sequence[PlacedRun]]


class WriteSessions:
    """Starts write sessions.

    Args:
        endings: stores and ends them.
        storages: the open storages.
        usage: keeps count of what the groups use.
        clock: time source.
        new_id: makes a random id of so many hex digits.
        limits_of: looks up the hard limits of a group.
        crossed: whether a group is above one of its soft marks.
        on_pressure: told of a group whose write was refused for want of room, wholly or partly, or by a storage of
            several, or left it above a soft mark.
    """

    def __init__(
        self,
        endings: SessionEndings,
        storages: NodeStorages,
        usage: Ledger,
        clock: Clock,
        new_id: Callable[[int], str],
        limits_of: Callable[[InstanceGroup], Limits] = Limits,
        crossed: Callable[[InstanceGroup], bool] = lambda _group: False,
        on_pressure: Callable[[str], None] = lambda _group_name: None,
    ) -> None:
        self._endings = endings
        self._storages = storages
        self._addresses = Addresses(storages, clock)
        self._usage = usage
        self._clock = clock
        self._new_id = new_id
        self._limits_of = limits_of
        self._crossed = crossed
        self._on_pressure = on_pressure

    async def start(self, cache: InstanceCache, group: InstanceGroup, request: WriteRequest) -> StartedWrite:
        """Open a session and hand out addresses for the blocks that have to be written.

        Raises:
            InvalidArgumentError: the spec groups do not fit, or a block would follow itself.
            NotReadyError: blocks have to be written and no storage of the group is available, or other managers are
                faster.
            CapacityError: not even the first block that has to be written fits, or no storage has room after all.
            StorageIOError: the store failed, or every storage; what was begun is rolled back now or at the session's
                deadline.
        """
        if request.parent_key is not None and request.parent_key in request.keys:
            # Such a chain has no end: nothing of it could ever be evicted.
            raise InvalidArgumentError(f"parent_block_key is {request.parent_key}, must not be one of block_keys")
        if self._endings.open_count >= _MAX_SESSIONS:
            raise CapacityError(f"{_MAX_SESSIONS} write sessions are open: finish some or let them expire")
        refusals: dict[str, KvcmError] = {}
        while (started := await self._try(cache, group, request, refusals)) is None:
            pass  # with the next candidate; there is one less each time
        if started.refusal:
            self._refused(group)
        return started

    async def _try(
        self, cache: InstanceCache, group: InstanceGroup, request: WriteRequest, refusals: dict[str, KvcmError]
    ) -> StartedWrite | None:
        """Start the write without the storages that refused it so far; None when one more of them does."""
        plan, reservation = await self._reserved_plan(cache, group, request, refusals)
        session = self._new_session(cache, request, plan, reservation)
        opened = self._opened(reservation)
        try:
            await give_way(len(request.keys), cache.page_keys)
            placed = await self._allocate(cache, group, session, plan, reservation)
            return await self._begin(cache, session, request, _Placed(plan, reservation, opened, placed))
        except RefusedError as refused:
            refusals[refused.storage] = refused.reason
            if isinstance(refused.reason, CapacityError):
                self._on_pressure(group.name)  # room is to be made there, whoever takes these blocks
            return None
        finally:
            if reservation is not None:
                self._usage.settle(reservation, cache.index)
                self.look_at_marks(group)

    @staged("allocate")
    async def _allocate(
        self,
        cache: InstanceCache,
        group: InstanceGroup,
        session: WriteSession,
        plan: WritePlan,
        reservation: Reservation | None,
    ) -> list[list[PlacedRun]]:
        hints = Hints(group.name, group.policy_of(cache.instance.instance_id).ttl_seconds)
        try:
            return await self._addresses.allocate(cache.instance, session, plan, hints, cache.page_keys)
        except RefusedError:
            if reservation is not None:
                await self._usage.release(reservation, cache.index)  # the next candidate may need that room
            raise

    def look_at_marks(self, group: InstanceGroup) -> None:
        """Tell whoever evicts if a group is above a mark, now that something was begun or can be evicted."""
        if self._crossed(group):
            self._on_pressure(group.name)

    def _refused(self, group: InstanceGroup) -> None:
        self._usage.refusals[group.name] += 1
        self._on_pressure(group.name)

    @staged("plan")
    async def _reserved_plan(
        self, cache: InstanceCache, group: InstanceGroup, request: WriteRequest, refusals: Mapping[str, KvcmError]
    ) -> tuple[WritePlan, Reservation | None]:
        """Plan, and reserve what is planned; again where another manager took the room in between."""
        for _ in range(_MOST_PLANS):
            limits = self._limits_of(group)
            plan = await self._plan(cache, limits, request, refusals)
            if plan.refusal and not plan.runs:
                self._refused(group)
                raise CapacityError("; ".join([plan.refusal, *map(str, refusals.values())]))
            if not plan.runs:
                return plan, None
            wanted = plan.wanted_bytes
            deadline = self._clock.now() + _RESERVATION_SECONDS
            reservation = Reservation(self._new_id(32), limits, cache.placement.uid, wanted, plan.new_keys, deadline)
            if await self._usage.reserve(reservation, cache.index):
                return plan, reservation
        self._refused(group)
        raise NotReadyError(f"other managers keep taking the last room of group {group.name!r}: retry shortly")

    async def _plan(
        self, cache: InstanceCache, limits: Limits, request: WriteRequest, refusals: Mapping[str, KvcmError]
    ) -> WritePlan:
        keys, group = request.keys, limits.group
        wanted = cache.specs_per_key(request.spec_groups, len(keys))
        head = await self._head(cache, request.parent_key)
        records = await self._records(cache, keys)
        view = self._storages.for_node(request.node_id)
        usable = [place for place in candidates(group, view) if place.storage not in refusals]
        # What is on a storage that is drained is written anew, where there is another one to write it to.
        is_leaving = (self._storages.is_draining,) if usable else ()
        missing = await _each(
            lambda record, specs: missing_specs(record, specs, view, request.replicas, *is_leaving),
            *(records, wanted, cache.page_keys),
        )
        if not usable and any(missing):
            raise self._no_candidate(group, refusals)
        cache.index.limit_keys(limits.max_key_count)  # as configured now
        # While no other manager works on the store, nothing suspends from here until the room is reserved.
        room = await self._usage.room(limits, cache.placement.uid, cache.index) if any(missing) else None
        return plan_write(Planner(usable, room, cache.index.max_key_count), keys, missing, records, head)

    def _no_candidate(self, group: InstanceGroup, refusals: Mapping[str, KvcmError]) -> KvcmError:
        if refusals:
            error = no_candidate_left(list(refusals.values()))
            if isinstance(error, CapacityError):
                self._refused(group)
            return error
        message = f"no storage of group {group.name!r} is available: {list(group.storage_candidates)}"
        draining = [name for name in group.storage_candidates if self._storages.is_draining(name)]
        return NotReadyError(f"{message}, of which {draining} are being drained" if draining else message)

    async def _records(self, cache: InstanceCache, keys: Sequence[int]) -> list[BlockRecord | None]:
        """Read the records, after ending writers whose time is up: their blocks can be written again."""
        records = await self._get(cache, keys)
        if not any(records):
            return records
        overdue = self._endings.overdue(zip(keys, records, strict=True))
        if not overdue:
            return records
        await self._endings.end_writers(cache, overdue)
        return await self._get(cache, keys)

    async def _get(self, cache: InstanceCache, keys: Sequence[int]) -> list[BlockRecord | None]:
        if cache.index.is_shared:  # its store suspends by itself, and is asked in few calls
            return await cache.index.get(keys)
        records: list[BlockRecord | None] = []
        for page in pages(keys, cache.page_keys):
            records += await cache.index.get(page)
            if len(page) < len(keys):
                await asyncio.sleep(0)
        return records

    async def _head(self, cache: InstanceCache, parent_key: int | None) -> tuple[int | None, int]:
        if parent_key is None:
            return None, 0
        (parent,) = await cache.index.get([parent_key])
        return parent_key, parent.depth + 1 if parent is not None else 0

    def _new_session(
        self, cache: InstanceCache, request: WriteRequest, plan: WritePlan, reservation: Reservation | None
    ) -> WriteSession:
        seconds = timeout_seconds(request.timeout_seconds)
        if not plan.runs:
            seconds = min(seconds, _EMPTY_SESSION_SECONDS)
        session_id = reservation.owner if reservation is not None else self._new_id(32)
        deadline, starter = self._clock.now() + seconds, errand.get().principal.name
        return WriteSession(session_id, cache.placement.uid, deadline, self._new_id(12), plan.keys, starter=starter)

    async def _begin(
        self, cache: InstanceCache, session: WriteSession, request: WriteRequest, placed: _Placed
    ) -> StartedWrite:
        """Store the session and its blocks, or nothing of them."""
        try:
            lost = await self._store(cache, session, request, placed)
            return await self._answer(cache, session, request, placed, lost)
        except BaseException:
            # Nobody was told the session's id: not even the client could end it.
            with suppress(KvcmError):
                await uninterrupted(self._endings.abort(cache, session))
            raise

    @staged("store")
    async def _store(
        self, cache: InstanceCache, session: WriteSession, request: WriteRequest, placed: _Placed
    ) -> set[int]:
        """Store the session, then its blocks; return those that another writer began in the meantime."""
        lost: set[int] = set()
        stored = 0
        try:
            await self._endings.open(session)
            await give_way(len(request.keys), cache.page_keys)
            for page in placed.pages:
                self._check_in_time(placed.reservation)
                lost |= await self._add(cache, session, request, page)
                stored += 1
                await give_way(len(request.keys), cache.page_keys)
        except BaseException:
            unstored = [run.blocks for page in placed.pages[stored:] for run in page]
            await uninterrupted(self._addresses.discard(unstored))
            raise
        return lost

    def _check_in_time(self, reservation: Reservation | None) -> None:
        if reservation is not None and self._clock.now() >= reservation.deadline - _STORE_SECONDS:
            raise NotReadyError("the store took too long for the write to begin: start it again")

    async def _answer(
        self, cache: InstanceCache, session: WriteSession, request: WriteRequest, placed: _Placed, lost: set[int]
    ) -> StartedWrite:
        plan, opened = placed.plan, placed.opened
        session = await self._without(session, placed, lost)
        self._check_same(opened)
        if not await self._endings.is_open(session):
            # It expired while the store was busy: blocks that came later have no owner.
            raise NotReadyError("the write session ended before its blocks were stored: start the write again")
        won, _ = _parted(placed, lost)
        flags = [True] * len(request.keys)
        for (position, keys, *_), _blocks in won:
            flags[position : position + len(keys)] = [False] * len(keys)
        await self._addresses.make([blocks for _, blocks in won])
        chunks = [chunk for _, blocks in won for chunk in blocks.chunks]
        return StartedWrite(session, BlockMask.of(flags), chunks, plan.refused, plan.refusal)

    async def _without(self, session: WriteSession, placed: _Placed, lost: set[int]) -> WriteSession:
        """Take the blocks that another writer began in the meantime out of the session."""
        if not lost:
            return session
        await self._addresses.discard(run.blocks for run in _parted(placed, lost)[1])
        kept = replace(session, keys=tuple(key for key in session.keys if key not in lost))
        await self._endings.change(session, kept)
        return kept

    def _opened(self, reservation: Reservation | None) -> dict[str, StorageBackend | None]:
        """Return what is open of the storages that a write goes to."""
        places = reservation.wanted_bytes if reservation is not None else ()
        return {place.storage: self._storages.backend(place.storage) for place in places}

    def _check_same(self, opened: Mapping[str, StorageBackend | None]) -> None:
        """Refuse addresses on a storage that was removed meanwhile: its name may be that of another medium by now."""
        for storage, backend in opened.items():
            if self._storages.backend(storage) is not backend:
                raise NotReadyError(
                    f"storage {storage!r} was removed or changed while the write was being started: start it again"
                )

    async def _add(
        self, cache: InstanceCache, session: WriteSession, request: WriteRequest, page: Sequence[PlacedRun]
    ) -> set[int]:
        """Add the locations to the records; return the blocks that another writer began in the meantime."""
        rest = [run for run in page if not (run.planned.is_fresh and cache.index.begin(run.blocks))]
        planned = {
            key: (run.planned.specs, record)
            for run in rest
            for key, record in zip(run.blocks.keys, run.blocks.records(), strict=True)
        }
        is_leaving, view = self._storages.is_draining, self._storages.for_node(request.node_id)

        def add_location(key: int, old: BlockRecord | None) -> BlockRecord | None:
            specs, fresh = planned[key]
            if old is None:
                return fresh
            if any(location.id == session.location_id for location in old.locations):
                return old  # the store answered too late and we asked again: it is there already
            if missing_specs(old, specs, view, request.replicas, is_leaving) != specs:
                return old
            return old._replace(locations=(*old.locations, *fresh.locations))

        if not planned:
            return set()
        changes = await cache.index.read_modify_write(planned, add_location, reserved=True)
        return {key for key, _, record, _ in changes if not _holds(record, session.location_id)}


async def _each(
    lacks: Callable[[BlockRecord, Specs], Specs],
    records: Sequence[BlockRecord | None],
    wanted: Sequence[Specs],
    page_keys: int,
) -> Sequence[Specs]:
    """Return what each block lacks of what is wanted; what is wanted where there is no record."""
    if not any(records):
        return wanted
    missing: list[Specs] = []
    for page in pages(list(zip(records, wanted, strict=True)), page_keys):
        missing += [specs if record is None else lacks(record, specs) for record, specs in page]
        if len(page) < len(records):
            await asyncio.sleep(0)
    return missing


def _parted(placed: _Placed, lost: Collection[int]) -> tuple[list[PlacedRun], list[PlacedRun]]:
    """Return what a write begins, and what it lost to others, in the order of the request."""
    runs = [run for page in placed.pages for run in page]
    if not lost:
        return runs, []
    parts = [part for run in runs for part in run.parts(lost)]
    return [run for is_lost, run in parts if not is_lost], [run for is_lost, run in parts if is_lost]


def _holds(record: BlockRecord | None, location_id: str) -> bool:
    for location in record[2] if record is not None else ():  # noqa: SIM110 - a generator would take twice the time
        if location[0] == location_id:
            return True
    return False
