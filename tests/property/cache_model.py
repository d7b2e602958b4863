"""What a CacheManager must answer, in plain dicts and lists: written from design.md and wire.md, not from the code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_world import DecodedChunk
from fake_clock import FakeClock

from kvcm.cache.prefix_match import MatchMode, MatchQuery
from kvcm.cache.write_sessions import REPEAT_SECONDS, FinishedWrite, WriteRequest
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError, NotReadyError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.keys import BlockMask
from kvcm.model.locations import LocationStatus
from kvcm.model.storages import StorageType

# ── Model parts ──


WRITING, SERVING, DELETING = LocationStatus.WRITING, LocationStatus.SERVING, LocationStatus.DELETING


@dataclass
class Place:
    """One location of a block.

    Attributes:
        session: that writes it; kept for good by what never served, since its writer may come back.
        deadline: of the session while writing, of the bytes while deleting, else 0.
    """

    id: str
    storage: str
    kind: StorageType
    uris: dict[str, str]
    size: int
    written_at: float
    session: str
    deadline: float
    status: LocationStatus = WRITING

    def serve(self) -> None:
        """End the write: its session has no more part in the location."""
        self.status, self.session, self.deadline = SERVING, "", 0.0

    def fail(self, now: float) -> None:
        """Delete it at once, since no reader ever got it."""
        if self.status is not DELETING or self.deadline > now:
            self.status, self.deadline = DELETING, now


@dataclass
class Block:
    parent: int | None
    depth: int
    places: list[Place] = field(default_factory=list)


@dataclass
class Cabinet:
    """A configured storage."""

    kind: StorageType
    rank: int
    enabled: bool = True


@dataclass
class Session:
    id: str
    instance_id: str
    epoch: int
    deadline: float
    place_id: str
    keys: list[int]


@dataclass
class Finished:
    session: Session
    flags: list[bool]
    reported: FinishedWrite
    until: float


@dataclass
class Lease:
    id: str
    instance_id: str
    epoch: int
    deadline: float
    pins: set[tuple[str, int, str]]


@dataclass
class Wanted:
    """A block that a start has to hand out addresses for."""

    key: int
    parent: int | None
    depth: int
    specs: list[tuple[str, int]]
    storage: str
    kind: StorageType

    @property
    def size(self) -> int:
        return sum(size for _, size in self.specs)


@dataclass
class Plan:
    """What a start must answer."""

    flags: list[bool]
    blocks: list[Wanted] = field(default_factory=list)
    refused: int = 0
    seconds: int = 0


# ── Cache model ──


Refusal = type[KvcmError]
HELD_RECHECK_SECONDS = 1.0


class CacheModel:
    def __init__(
        self, clock: FakeClock, group: InstanceGroup, instances: Sequence[Instance], shelves: dict[str, Cabinet]
    ) -> None:
        self._clock = clock
        self.group = group
        self.instances = {each.instance_id: each for each in instances}
        self.epochs = dict.fromkeys(self.instances, 0)
        self.shelves = shelves
        self.blocks: dict[tuple[str, int, int], Block] = {}
        self.sessions: dict[str, Session] = {}
        self.finished: dict[str, Finished] = {}
        self.leases: dict[str, Lease] = {}

    # Lookups.

    def block(self, instance_id: str, key: int) -> Block | None:
        return self.blocks.get((instance_id, self.epochs[instance_id], key))

    def resident(self, instance_id: str, epoch: int | None = None) -> dict[int, Block]:
        """Blocks of an instance as it is registered now, or as it was registered once."""
        at = (instance_id, self.epochs[instance_id] if epoch is None else epoch)
        return {key: block for (owner, epoch, key), block in self.blocks.items() if (owner, epoch) == at}

    def usage(self) -> Counter[tuple[str, StorageType]]:
        """Invariant 4: the sizes of all locations by storage and type, those of removed instances included."""
        used: Counter[tuple[str, StorageType]] = Counter()
        for block in self.blocks.values():
            for place in block.places:
                used[place.storage, place.kind] += place.size
        return used

    def rank(self, storage: str) -> int | None:
        cabinet = self.shelves.get(storage)
        return cabinet.rank if cabinet is not None and cabinet.enabled else None

    def candidates(self) -> list[str]:
        """Wire.md 5.6: storages for writes, the preferred kind first or alone."""
        strategy = self.group.cache_config.data_storage_strategy
        usable = [name for name in self.group.storage_candidates if self.rank(name) is not None]
        if strategy.name.startswith("CPS_ALWAYS"):
            return [name for name in usable if self.shelves[name].kind is strategy.preferred_type]
        return sorted(usable, key=lambda name: self.shelves[name].kind is not strategy.preferred_type)

    # Write sessions.

    def start(self, instance_id: str, request: WriteRequest) -> Plan | Refusal:
        self.expire()
        if request.parent_key in request.keys:
            return InvalidArgumentError
        instance = self.instances[instance_id]
        sizes = {info.name: info.size for info in instance.location_spec_infos}
        groups = {each.name: each.spec_names for each in instance.location_spec_groups}
        if request.spec_groups:
            if len(request.spec_groups) != len(request.keys) or not set(request.spec_groups) <= set(groups):
                return InvalidArgumentError
            names = [[name for name in sizes if name in groups[group]] for group in request.spec_groups]
        else:
            names = [list(sizes)] * len(request.keys)
        lacking = [
            [(name, sizes[name]) for name in wanted if self._lacks(instance_id, key, name, request.replicas)]
            for key, wanted in zip(request.keys, names, strict=True)
        ]
        if any(lacking) and not self.candidates():
            return NotReadyError
        plan = self._plan(instance_id, request, lacking)
        return CapacityError if plan.refused and not plan.blocks else plan

    def _lacks(self, instance_id: str, key: int, spec: str, replicas: int) -> bool:
        block = self.block(instance_id, key)
        holding = [
            place.status
            for place in (block.places if block is not None else ())
            if spec in place.uris and self.rank(place.storage) is not None
        ]
        return WRITING not in holding and holding.count(SERVING) < replicas

    def _plan(self, instance_id: str, request: WriteRequest, lacking: list[list[tuple[str, int]]]) -> Plan:
        plan = Plan([True] * len(request.keys))
        parent, depth = request.parent_key, 0
        head = self.block(instance_id, parent) if parent is not None else None
        if head is not None:
            depth = head.depth + 1
        used, new_keys = self.usage(), len(self.resident(instance_id))
        depths: dict[int, int] = {}
        for position, (key, specs) in enumerate(zip(request.keys, lacking, strict=True)):
            block = self.block(instance_id, key)
            repeated = key in request.keys[:position]
            if repeated:
                depth = depths[key]  # what follows a repeated key hangs on its first position
            else:
                depth = depths[key] = block.depth if block is not None else depth
            if specs and not repeated:
                storage = self._place_for(block, sum(size for _, size in specs), used, new_keys)
                if plan.refused or storage is None:
                    plan.refused += 1
                else:
                    kind = self.shelves[storage].kind
                    plan.blocks.append(Wanted(key, parent, depth, specs, storage, kind))
                    plan.flags[position] = False
                    used[storage, kind] += plan.blocks[-1].size
                    new_keys += block is None
            parent, depth = key, depth + 1
        seconds = min(request.timeout_seconds, 3600) if request.timeout_seconds > 0 else 30
        plan.seconds = seconds if plan.blocks else min(seconds, 10)
        return plan

    def _place_for(
        self, block: Block | None, size: int, used: Counter[tuple[str, StorageType]], keys: int
    ) -> str | None:
        limit = self.group.cache_config.meta_indexer_config.max_key_count
        if block is None and limit and keys >= limit:
            return None
        kinds = {place.kind for place in block.places} if block is not None else set()
        order = sorted(self.candidates(), key=lambda name: bool(kinds) and self.shelves[name].kind not in kinds)
        for name in order:
            kind = self.shelves[name].kind
            quota = self.group.quota.capacity_of(kind)
            on_type = sum(taken for (_, each), taken in used.items() if each is kind)
            if used.total() + size <= self.group.quota.capacity and (quota is None or on_type + size <= quota):
                return name
        return None

    def started(self, instance_id: str, plan: Plan, session_id: str, place_id: str, uris: list[dict[str, str]]) -> None:
        """Take over what only the manager can know: ids and addresses."""
        now, epoch = self._clock.now(), self.epochs[instance_id]
        deadline = now + plan.seconds
        keys = [wanted.key for wanted in plan.blocks]
        self.sessions[session_id] = Session(session_id, instance_id, epoch, deadline, place_id, keys)
        for wanted, addresses in zip(plan.blocks, uris, strict=True):
            place = Place(place_id, wanted.storage, wanted.kind, addresses, wanted.size, now, session_id, deadline)
            at = (instance_id, epoch, wanted.key)
            self.blocks.setdefault(at, Block(wanted.parent, wanted.depth)).places.append(place)

    def finish(self, instance_id: str, session_id: str, success: BlockMask) -> FinishedWrite | Refusal:
        self.expire()
        before = self.finished.get(session_id)
        session = before.session if before is not None else self.sessions.get(session_id)
        if session is None or not self._is_of(session, instance_id):
            return InvalidArgumentError
        count = len(session.keys)
        if success.offset is not None:
            flags = [i < success.offset for i in range(count)] if 0 <= success.offset <= count else None
        else:
            flags = list(success.flags or ())
        if flags is None or len(flags) != count:
            return InvalidArgumentError
        if before is None:
            before = Finished(session, flags, self._end(session, flags), self._clock.now() + REPEAT_SECONDS)
            self.finished[session_id] = before
        is_same = before.flags == flags and self._clock.now() < before.until
        return before.reported if is_same else InvalidArgumentError

    def _is_of(self, session: Session, instance_id: str) -> bool:
        return (session.instance_id, session.epoch) == (instance_id, self.epochs[instance_id])

    def _end(self, session: Session, flags: list[bool]) -> FinishedWrite:
        del self.sessions[session.id]
        served = 0
        for key, success in zip(session.keys, flags, strict=True):
            block = self.blocks.get((session.instance_id, session.epoch, key))
            for place in block.places if block is not None else ():
                if place.session == session.id and place.status is WRITING and success:
                    place.serve()
                    served += 1
                elif place.session == session.id:
                    place.fail(self._clock.now())
        return FinishedWrite(served, len(flags) - sum(flags), sum(flags) - served)

    def renew(self, instance_id: str, session_id: str, timeout: int) -> float | Refusal:
        self.expire()
        session = self.sessions.get(session_id)
        if session is None or not self._is_of(session, instance_id):
            return InvalidArgumentError
        session.deadline = self._clock.now() + (min(timeout, 3600) if timeout > 0 else 30)
        for block in self.blocks.values():
            for place in block.places:
                if place.session == session_id:
                    place.deadline = max(place.deadline, session.deadline)
        return session.deadline

    def expire(self) -> None:
        for session in list(self.sessions.values()):
            if session.deadline <= self._clock.now():
                self._end(session, [False] * len(session.keys))

    # Removal and deletion.

    def remove(self, instance_id: str, keys: Sequence[int], which: Callable[[Place], bool] = lambda _: True) -> int:
        now = self._clock.now()
        delay = self.group.cache_config.reclaim_strategy.delay_before_delete_ms / 1000
        removed = 0
        for key in dict.fromkeys(keys):
            block = self.block(instance_id, key)
            for place in block.places if block is not None else ():
                if place.status is not DELETING and which(place):
                    place.deadline = max(now, place.deadline) if place.status is WRITING else now + delay
                    place.status = DELETING
                    removed += 1
        return removed

    def forget_all(self, instance_id: str) -> int:
        doomed = list(self.resident(instance_id))
        for key in doomed:
            del self.blocks[instance_id, self.epochs[instance_id], key]
        return len(doomed)

    def remove_instance(self, instance_id: str) -> None:
        """No client can end its sessions any more; its blocks are removed, a later registration starts empty."""
        self.remove(instance_id, list(self.resident(instance_id)))
        self.epochs[instance_id] += 1

    def delete_due(self) -> None:
        """Writers whose time is up are ended before anything is deleted."""
        now = self._clock.now()
        overdue = {
            place.session
            for block in self.blocks.values()
            for place in block.places
            if place.status is WRITING and place.deadline <= now
        }
        for session in [self.sessions[session_id] for session_id in overdue]:
            self._end(session, [False] * len(session.keys))
        for at, block in list(self.blocks.items()):
            owner, _, key = at
            due = [place for place in block.places if place.status is DELETING and place.deadline <= now]
            for place in due:
                if self.held_until((owner, key, place.id)) > now:
                    place.deadline = now + HELD_RECHECK_SECONDS
                else:
                    block.places.remove(place)
            if not block.places:
                del self.blocks[at]

    # Reads.

    def answer(self, instance_id: str, key: int) -> DecodedChunk | None:
        """Invariant 1 and decision 14."""
        block = self.block(instance_id, key)
        serving = [place for place in (block.places if block is not None else ()) if place.status is SERVING]
        ranked = [(rank, place) for place in serving if (rank := self.rank(place.storage)) is not None]
        if not ranked:
            return None
        uris: dict[str, str] = {}
        for rank in sorted({rank for rank, _ in ranked}):
            for place in [place for at, place in ranked if at == rank]:
                uris |= {name: uri for name, uri in place.uris.items() if name not in uris}
        best = min(rank for rank, _ in ranked)
        kind = next(place.kind for rank, place in ranked if rank == best)
        return kind, len(uris), tuple(uris.items())

    def match(self, instance_id: str, query: MatchQuery) -> tuple[list[DecodedChunk], list[int]] | Refusal:
        if all(self.rank(name) is None for name in self.group.storage_candidates):
            return NotReadyError  # reads do not care where writes go
        masked = masked_positions(query.mask, len(query.keys))
        found = [None if off else self.answer(instance_id, key) for key, off in zip(query.keys, masked, strict=True)]
        names = [info.name for info in self.instances[instance_id].location_spec_infos]
        miss = (0, len(names), tuple((name, "") for name in names))
        if query.mode is MatchMode.BATCH_GET:
            hits = [key for key, answer in zip(query.keys, found, strict=True) if answer is not None]
            return self._only(query, [answer or miss for answer in found]), hits
        if query.mode is MatchMode.REVERSE_ROLL_SW_MATCH:
            if not 1 <= query.window <= len(found):
                return InvalidArgumentError
            starts = range(len(found) - query.window + 1)
            fits = [start for start in starts if None not in found[start : start + query.window]]
            inside = range(fits[-1], fits[-1] + query.window) if fits else range(0)
            chunks = [found[i] or miss if i in inside else miss for i in range(len(found))]
            return self._only(query, chunks), [query.keys[i] for i in inside]
        kept = [i for i, off in enumerate(masked) if not off]
        length = next((n for n, i in enumerate(kept) if found[i] is None), len(kept))
        if query.mode is MatchMode.PREFIX_MATCH_WITH_MAMBA:
            length = self._mamba_length(instance_id, [found[i] or miss for i in kept[:length]])
        prefix = [found[i] or miss for i in kept[:length]]
        return self._only(query, prefix), [query.keys[i] for i in kept[:length]]

    def _mamba_length(self, instance_id: str, answers: list[DecodedChunk]) -> int:
        instance = self.instances[instance_id]
        names, linear = set(instance.spec_names), set(instance.linear_spec_names)
        best = 0 if linear else len(answers)
        for length in range(1, len(answers) + 1):
            present = [{name for name, _ in specs} for _, _, specs in answers[:length]]
            if linear and all(names - linear <= each for each in present) and linear <= present[-1]:
                best = length
        return best

    @staticmethod
    def _only(query: MatchQuery, chunks: list[DecodedChunk]) -> list[DecodedChunk]:
        if not query.spec_names:
            return chunks
        return [(kind, n, tuple(s for s in specs if s[0] in query.spec_names)) for kind, n, specs in chunks]

    # Read leases.

    def lease(self, instance_id: str, lease_id: str, keys: Sequence[int], seconds: float) -> None:
        pins = {
            (instance_id, key, place.id)
            for key in keys
            for place in getattr(self.block(instance_id, key), "places", ())
            if place.status is SERVING
        }
        epoch = self.epochs[instance_id]
        self.leases[lease_id] = Lease(lease_id, instance_id, epoch, self._clock.now() + seconds, pins)

    def open_lease(self, instance_id: str, lease_id: str) -> Lease | None:
        lease = self.leases.get(lease_id)
        if lease is None or lease.deadline <= self._clock.now():
            return None
        return lease if (lease.instance_id, lease.epoch) == (instance_id, self.epochs[instance_id]) else None

    def held_until(self, pin: tuple[str, int, str]) -> float:
        now = self._clock.now()
        return max(
            (each.deadline for each in self.leases.values() if pin in each.pins and each.deadline > now), default=0
        )


def masked_positions(mask: BlockMask, count: int) -> list[bool]:
    """Wire.md 5.1, position by position."""
    if mask.offset is not None:
        return [mask.offset < 0 or i < mask.offset for i in range(count)]
    flags = list(mask.flags or ())
    return [i < len(flags) and bool(flags[i]) for i in range(count)]
