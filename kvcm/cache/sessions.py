"""Write sessions: the lease between StartWriteCache and FinishWriteCache.

Invariants held here:

* 2: two writers never hold a writing location of the same block and spec: the location is added in the same
  read-modify-write that checks for another one.
* 3: a session ends exactly once (finished, aborted or expired): whoever takes it out of the table ends it, and after
  that each of its locations is serving or on its way out. Everything that can be refused is checked before it is taken.

The session is stored before its blocks (design.md decision 3): whatever happens in between, its end rolls the blocks
back. A finish turns to serving only what is still writing for this very session, so it never revives a removed block.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.pages import pages
from kvcm.cache.removal import Remover, rolled_back
from kvcm.cache.selection import Storages, candidates
from kvcm.cache.usage import UsageLedger
from kvcm.cache.write_plan import PlannedBlock, Planner, WritePlan, missing_specs, plan_write
from kvcm.cache.write_values import FinishedWrite, OpenSessions, StartedWrite, WriteRequest, WriteSession
from kvcm.index.meta_index import Change
from kvcm.index.uninterrupted import uninterrupted
from kvcm.model.clock import Clock
from kvcm.model.deletion import DeletionItem
from kvcm.model.errors import CapacityError, InvalidArgumentError, NotReadyError
from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.masks import BlockMask
from kvcm.model.storages import StorageType
from kvcm.storage.backend import Allocation, Part

__all__ = ["FinishedWrite", "StartedWrite", "WriteRequest", "WriteSession", "WriteSessions"]

_DEFAULT_TIMEOUT_SECONDS = 30
_MAX_TIMEOUT_SECONDS = 3600
_EMPTY_SESSION_SECONDS = 10
_MAX_SESSIONS = 100_000


class WriteSessions:
    """The open write sessions of all instances.

    Args:
        storages: the open storages.
        usage: bytes in use.
        remover: gets rid of what is not published.
        clock: time source.
        new_id: makes a random id of so many hex digits.
    """

    def __init__(
        self, storages: Storages, usage: UsageLedger, remover: Remover, clock: Clock, new_id: Callable[[int], str]
    ) -> None:
        self._storages = storages
        self._usage = usage
        self._remover = remover
        self._clock = clock
        self._new_id = new_id
        self._sessions = OpenSessions()

    @property
    def open_count(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def held_until(self, item: DeletionItem) -> float:
        """Return the unix time until which the writer of a location may still write its bytes, 0 when it is done."""
        return self._sessions.deadline_of_writer(item.location_id)

    async def start(self, cache: InstanceCache, group: InstanceGroup, request: WriteRequest) -> StartedWrite:
        """Open a session and hand out addresses for the blocks that have to be written.

        Raises:
            InvalidArgumentError: the spec groups do not fit.
            NotReadyError: blocks have to be written and no storage of the group is available.
            CapacityError: not even the first block that has to be written fits.
        """
        await self.expire()
        if len(self._sessions) >= _MAX_SESSIONS:
            raise CapacityError(f"{_MAX_SESSIONS} write sessions are open: finish some or let them expire")
        plan = await self._plan(cache, group, request)
        if plan.refusal and not plan.blocks:
            raise CapacityError(plan.refusal)
        session = self._open(cache, request, plan)
        wanted: Counter[StorageType] = Counter()
        for block in plan.blocks:
            wanted[block.candidate.storage_type] += block.size_bytes
        locations: dict[int, Location] = {}
        lost: set[int] = set()
        try:
            with self._usage.reserve(group.name, wanted), cache.index.reserve_keys(plan.new_keys):
                for page in pages(plan.blocks):
                    locations |= self._allocate(session, page)
                    lost |= await self._add(session, request, page, locations)
                    await asyncio.sleep(0)
        finally:
            # It expired, or its instance was removed, while the store was busy: blocks that came later have no owner.
            ended = self._sessions.get(session.id) is None
            if ended:
                await uninterrupted(self._end(session, [False] * len(session.keys)))
        if ended:
            raise NotReadyError("the write session ended before its blocks were stored: start the write again")
        return self._started(session, request, plan, locations, lost)

    async def _plan(self, cache: InstanceCache, group: InstanceGroup, request: WriteRequest) -> WritePlan:
        keys = request.keys
        wanted = cache.specs_per_key(request.spec_groups, len(keys))
        head = await self._head(cache, request.parent_key)
        records = await cache.index.get(keys)
        missing = [
            missing_specs(record, specs, self._storages, request.replicas)
            for record, specs in zip(records, wanted, strict=True)
        ]
        usable = candidates(group, self._storages)
        if not usable and any(missing):
            raise NotReadyError(f"no storage of group {group.name!r} is available: {list(group.storage_candidates)}")
        # Nothing is awaited from here until the room is reserved: writes that overlap never exceed a limit together.
        planner = Planner(usable, self._usage.room(group), cache.index.free_key_count, cache.index.max_key_count)
        return plan_write(planner, keys, missing, records, head)

    async def _head(self, cache: InstanceCache, parent_key: int | None) -> tuple[int | None, int]:
        if parent_key is None:
            return None, 0
        (parent,) = await cache.index.get([parent_key])
        return parent_key, parent.depth + 1 if parent is not None else 0

    def _open(self, cache: InstanceCache, request: WriteRequest, plan: WritePlan) -> WriteSession:
        seconds = _timeout_seconds(request.timeout_seconds)
        if not plan.blocks:
            seconds = min(seconds, _EMPTY_SESSION_SECONDS)
        keys = tuple(block.key for block in plan.blocks)
        session = WriteSession(self._new_id(32), cache, self._clock.now() + seconds, self._new_id(12), keys)
        self._sessions.put(session)
        return session

    def _allocate(self, session: WriteSession, blocks: Sequence[PlannedBlock]) -> dict[int, Location]:
        """Return a writing location with addresses for every planned block, allocated in one batch per storage."""
        by_storage: defaultdict[str, list[PlannedBlock]] = defaultdict(list)
        for block in blocks:
            by_storage[block.candidate.storage].append(block)
        uris = {storage: self._uris(session, storage, part) for storage, part in by_storage.items()}
        now = self._clock.now()
        return {block.key: _location(session, block, uris[block.candidate.storage], now) for block in blocks}

    def _uris(self, session: WriteSession, storage: str, blocks: Sequence[PlannedBlock]) -> dict[tuple[str, int], str]:
        instance = session.cache.instance
        # Ordered by spec, then by key: a chunk of a packed file holds one spec of neighbouring blocks.
        by_spec: defaultdict[str, list[Part]] = defaultdict(list)
        for block in blocks:
            for info in block.specs:
                by_spec[info.name].append(Part(info.name, block.key, info.size))
        parts = [part for name in instance.spec_names for part in by_spec[name]]
        backend = self._storages.backend(storage)
        if backend is None:
            raise NotReadyError(f"storage {storage!r} was removed while the write was being started: start it again")
        uris = backend.allocate(Allocation(instance.instance_id, session.location_id, parts))
        return {(part.spec_name, part.key): uri for part, uri in zip(parts, uris, strict=True)}

    async def _add(
        self,
        session: WriteSession,
        request: WriteRequest,
        blocks: Sequence[PlannedBlock],
        locations: dict[int, Location],
    ) -> set[int]:
        """Add the locations to the records; return the blocks that another writer began in the meantime."""
        planned = {block.key: block for block in blocks}

        def add_location(key: int, old: BlockRecord | None) -> BlockRecord | None:
            block = planned[key]
            if old is None:
                return BlockRecord(block.parent, block.depth, (locations[key],))
            if missing_specs(old, block.specs, self._storages, request.replicas) != block.specs:
                return old
            return old._replace(locations=(*old.locations, locations[key]))

        changes = await session.cache.index.read_modify_write(planned, add_location, reserved=True)
        return {change.key for change in changes if change.new is change.old}

    def _started(
        self,
        session: WriteSession,
        request: WriteRequest,
        plan: WritePlan,
        locations: dict[int, Location],
        lost: set[int],
    ) -> StartedWrite:
        if lost:
            session = replace(session, keys=tuple(key for key in session.keys if key not in lost))
            self._sessions.put(session)
            unused = [Remover.item(session.cache, key, locations[key]) for key in lost]
            self._remover.delete_now(session.cache, unused)
        won = [block for block in plan.blocks if block.key not in lost]
        flags = [True] * len(request.keys)
        for block in won:
            flags[block.position] = False
        chunks = [locations[block.key].chunk for block in won]
        return StartedWrite(session, BlockMask.of(flags), chunks, plan.refused, plan.refusal)

    async def finish(self, cache: InstanceCache, session_id: str, success: BlockMask) -> FinishedWrite:
        """End a session: successful blocks become serving, the others are dropped.

        Args:
            cache: the instance of the caller, which must be the session's.
            session_id: the session.
            success: masked positions succeeded; positions index the locations that the start returned.

        Raises:
            InvalidArgumentError: no such session is open for the instance, or the mask does not fit it; the session
                stays open then.
        """
        await self.expire()
        session = self._find(cache, session_id)
        flags = _success_flags(success, len(session.keys))
        self._sessions.take(session_id)
        try:
            return await self._end(session, flags)
        except BaseException:
            self._sessions.put(
                session
            )  # the store failed, or the client hung up: another finish or the deadline ends it
            raise

    async def renew(self, cache: InstanceCache, session_id: str, timeout_seconds: int) -> WriteSession:
        """Move a session's deadline to so many seconds from now.

        Raises:
            InvalidArgumentError: no such session is open for the instance.
        """
        await self.expire()
        session = self._find(cache, session_id)
        session = replace(session, deadline=self._clock.now() + _timeout_seconds(timeout_seconds))
        self._sessions.put(session)
        await cache.index.read_modify_write(session.keys, _renewer(session))
        return session

    async def expire(self, most: int | None = None) -> int:
        """Roll back sessions whose deadline has passed, at most so many, and return how many those were."""
        due = self._sessions.pop_due(self._clock.now(), most)
        ended = 0
        try:
            for session in due:
                await self._end(session, [False] * len(session.keys))
                ended += 1
        finally:
            for session in due[ended:]:
                self._sessions.put(session)  # the store failed, or the caller is gone: the next call goes on
        return ended

    def forget_instance(self, cache: InstanceCache) -> None:
        """End the sessions of an instance that is being removed together with all its blocks."""
        for session in self._sessions.of(cache):
            self._sessions.take(session.id)

    def _find(self, cache: InstanceCache, session_id: str) -> WriteSession:
        session = self._sessions.get(session_id)
        if session is None or session.cache is not cache:
            raise InvalidArgumentError("write_session_id is unknown, finished or expired: start the write again")
        return session

    async def _end(self, session: WriteSession, success: Sequence[bool]) -> FinishedWrite:
        succeeded = {key for key, ok in zip(session.keys, success, strict=True) if ok}

        def settle(key: int, old: BlockRecord | None) -> BlockRecord | None:
            return _settled(old, session, to_serving=key in succeeded)

        def delete_dropped(changes: Sequence[Change]) -> None:
            self._remover.delete_now(session.cache, rolled_back(session.cache, changes))

        served = 0
        for page in pages(session.keys):
            changes = await session.cache.index.read_modify_write(page, settle, delete_dropped)
            served += sum(change.key in succeeded and _serves(change.new, session) for change in changes)
            await asyncio.sleep(0)
        return FinishedWrite(served, len(session.keys) - len(succeeded), len(succeeded) - served)


def _serves(record: BlockRecord | None, session: WriteSession) -> bool:
    """Whether the session's location serves now; it may have since a first finish that was cut off."""
    return record is not None and any(
        location.id == session.location_id and location.status is LocationStatus.SERVING
        for location in record.locations
    )


def _timeout_seconds(requested: int) -> int:
    return min(requested, _MAX_TIMEOUT_SECONDS) if requested > 0 else _DEFAULT_TIMEOUT_SECONDS


def _location(session: WriteSession, block: PlannedBlock, uris: dict[tuple[str, int], str], now: float) -> Location:
    specs = [SpecUri(info.name, uris[info.name, block.key]) for info in block.specs]
    return Location(
        id=session.location_id,
        storage=block.candidate.storage,
        storage_type=block.candidate.storage_type,
        status=LocationStatus.WRITING,
        spec_names=tuple(spec.name for spec in specs),
        chunk=encode_chunk(block.candidate.storage_type, len(specs), specs),
        size_bytes=block.size_bytes,
        written_at=now,
        session_id=session.id,
        deadline=session.deadline,
    )


def _success_flags(success: BlockMask, count: int) -> Sequence[bool]:
    if success.offset is not None:
        if not 0 <= success.offset <= count:
            raise InvalidArgumentError(f"success_blocks.offset is {success.offset}, must be from 0 to {count}")
        return [position < success.offset for position in range(count)]
    flags = success.flags or ()
    if len(flags) != count:
        raise InvalidArgumentError(
            f"success_blocks has {len(flags)} entries, must have one per location that the start returned: {count}"
        )
    return flags


def _settled(old: BlockRecord | None, session: WriteSession, *, to_serving: bool) -> BlockRecord | None:
    if old is None:
        return None
    status = LocationStatus.SERVING if to_serving else LocationStatus.DELETING
    locations = tuple(
        location._replace(status=status, session_id="", deadline=0.0)
        if location.session_id == session.id and location.status is LocationStatus.WRITING
        else location
        for location in old.locations
    )
    return old if locations == old.locations else old._replace(locations=locations)


def _renewer(session: WriteSession) -> Callable[[int, BlockRecord | None], BlockRecord | None]:
    def renew(_key: int, old: BlockRecord | None) -> BlockRecord | None:
        if old is None:
            return None
        return old._replace(
            locations=tuple(
                location._replace(deadline=session.deadline) if location.session_id == session.id else location
                for location in old.locations
            )
        )

    return renew
