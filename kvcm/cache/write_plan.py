"""What a StartWriteCache will write: pure planning, no side effects (design.md decision 17).

* A block is masked when its serving or writing locations on available storages cover every spec asked for. What serves
  on a storage that is being drained will be gone soon: where there is another storage it covers nothing.
* A key repeated in one request is masked at its later positions.
* A block that fits no limit is refused, and so is everything behind it: a suffix without its prefix is useless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvcm.cache.quotas import FreeSpace, OnDevice
from kvcm.index.search_cache import StorageView
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import LocationSpecInfo
from kvcm.model.locations import BlockRecord, LocationStatus, StorageKey
from kvcm.model.storages import StorageType
from kvcm.storage.backend import StorageBackend

__all__ = [
    "NodeStorages",
    "PlannedRun",
    "Specs",
    "Storages",
    "WritePlan",
    "WritePlanner",
    "candidates",
    "missing_specs",
    "plan_write",
]

# Which storages a group's writes may go to, best first (wire.md 5.6).


class Storages(StorageView, Protocol):
    """The open storages."""

    def is_available(self, storage: str) -> bool:
        """Return whether a storage can be written to, though its blocks may be unverified and not read."""

    def is_writable(self, storage: str) -> bool:
        """Return whether a new block can be expected to find space on a storage."""

    def is_draining(self, storage: str) -> bool:
        """Return whether a storage is being emptied, so that nothing new may go there."""

    def type_of(self, storage: str) -> StorageType | None:
        """Return the type of an open storage, None when there is none of that name."""

    def backend(self, storage: str) -> StorageBackend | None:
        """Return an open storage, enabled or not; None when there is none of that name."""


class NodeStorages(Storages, Protocol):
    """The open storages as callers see them that name no node; memory of single nodes is not among them."""

    def for_node(self, node_id: str) -> Storages:
        """Return the storages as callers on a node see them: with the memory pools of that node."""

    def path_storages(self) -> Mapping[str, OnDevice]:
        """Return the open path storages by name."""

    @property
    def everywhere(self) -> Storages:
        """The storages as operators see them: with the memory pools of all nodes."""

    def report_unwritable(self, name: str, *, is_full: bool = False) -> None:
        """Expect no space on an open storage until a probe succeeds: an allocation was rejected a moment ago, perhaps
        because it is full."""


def candidates(group: InstanceGroup, storages: Storages) -> list[StorageKey]:
    """Return the group's available storages in order of preference, without those that are being drained.

    Candidates that are not registered count as absent. A strategy that names a type puts that type first, or allows
    nothing else; within equals the group's own order holds. What takes no bytes now, full or mounted read-only, comes
    last: should all be so, then one that was emptied a moment ago is tried.
    """
    available = [
        StorageKey(name, storage_type)
        for name in group.storage_candidates
        if storages.is_available(name)
        and not storages.is_draining(name)
        and (storage_type := storages.type_of(name)) is not None
    ]
    strategy = group.cache_config.data_storage_strategy
    if strategy.is_exclusive:
        available = [candidate for candidate in available if candidate.storage_type is strategy.preferred_type]
    return sorted(
        available,
        key=lambda each: (not storages.is_writable(each.storage), each.storage_type is not strategy.preferred_type),
    )


Specs = tuple[LocationSpecInfo, ...]
"""Parts of a block."""


class PlannedRun(NamedTuple):
    """Consecutive blocks of a request that lack the same specs, which go to the same place.

    Attributes:
        position: of the first in the request.
        keys: of the blocks, each the parent of the next.
        parent: of the first, None at the head of a chain.
        depth: of the first.
        specs: what each block lacks.
        place: where it goes.
        size_bytes: of each block.
        is_fresh: whether the index has no record of them. A block with a record is a run of its own.
    """

    position: int
    keys: Sequence[int]
    parent: int | None
    depth: int
    specs: Specs
    place: StorageKey
    size_bytes: int
    is_fresh: bool

    def cut(self, begin: int, end: int) -> PlannedRun:
        """Return the run of its blocks from `begin` to before `end`."""
        if begin == 0 and end >= len(self.keys):
            return self
        parent = self.keys[begin - 1] if begin else self.parent
        return self._replace(
            position=self.position + begin, keys=self.keys[begin:end], parent=parent, depth=self.depth + begin
        )


@dataclass(slots=True)
class WritePlan:
    """The blocks to write, in request order.

    Attributes:
        runs: the blocks to write.
        rejected: number of blocks that should be written and do not fit.
        rejection: why the first of them does not fit; "" when all do.
        new_keys: blocks of the plan that the index does not know yet.
        wanted_bytes: what the blocks take, by place.
    """

    runs: list[PlannedRun] = field(default_factory=list)
    rejected: int = 0
    rejection: str = ""
    new_keys: int = 0
    wanted_bytes: Counter[StorageKey] = field(default_factory=Counter)

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the blocks."""
        return tuple([key for run in self.runs for key in run.keys])

    def batches(self, most: int) -> Iterator[list[PlannedRun]]:
        """Yield the runs in pages of at most so many blocks; a run that does not fit is cut."""
        page: list[PlannedRun] = []
        left = most
        for run in self.runs:
            begin = 0
            while begin < len(run.keys):
                page.append(run.cut(begin, begin + left))
                begin += len(page[-1].keys)
                left -= len(page[-1].keys)
                if not left:
                    yield page
                    page, left = [], most
        if page:
            yield page


def _none_draining(_storage: str) -> bool:
    return False


def missing_specs(
    record: BlockRecord | None,
    wanted: Specs,
    view: Storages,
    min_replica_count: int,
    is_leaving: Callable[[str], bool] = _none_draining,
) -> Specs:
    """Return the specs that a block still lacks: not being written, and in fewer available locations than asked for.

    Args:
        record: what the index knows of the block.
        wanted: specs that are asked for.
        view: which storages are available.
        min_replica_count: locations that are asked for.
        is_leaving: storages on which what serves does not count; what is being written there does (invariant 2).
    """
    if record is None:
        return wanted
    writing: set[str] = set()
    replicas: Counter[str] = Counter()
    for location in record.locations:
        is_readable = view.rank(location.storage) is not None
        if not is_readable and not view.is_available(location.storage):
            continue
        if location.status is LocationStatus.WRITING:
            writing.update(location.spec_names)
        elif is_readable and location.status is LocationStatus.SERVING and not is_leaving(location.storage):
            replicas.update(location.spec_names)
    return tuple(info for info in wanted if info.name not in writing and replicas[info.name] < min_replica_count)


@dataclass(slots=True)
class WritePlanner:
    """Plans one request block by block, taking space as it goes.

    Attributes:
        candidates: storages in order of preference.
        space: bytes and blocks that the group may still take; None when nothing has to be written.
        key_limit: the index's limit, for the message.
    """

    candidates: Sequence[StorageKey]
    space: FreeSpace | None
    key_limit: int
    plan: WritePlan = field(default_factory=WritePlan)

    def add(
        self, position: int, key: int, chain: tuple[int | None, int], specs: Specs, record: BlockRecord | None
    ) -> None:
        """Plan one block that lacks `specs`, or refuse it and everything after it."""
        assert self.space is not None
        if not self.plan.rejection:
            size_bytes = sum(info.size for info in specs)
            place, refusal = self._place(size_bytes, record)
            if place is not None:
                self.space.free_keys -= record is None
                self.plan.new_keys += record is None
                self.plan.wanted_bytes[place] += size_bytes
                self.space.add_planned(place, size_bytes)
                parent, depth = chain
                run = PlannedRun(
                    position=position,
                    keys=(key,),
                    parent=parent,
                    depth=depth,
                    specs=specs,
                    place=place,
                    size_bytes=size_bytes,
                    is_fresh=record is None,
                )
                self.plan.runs.append(run)
                return
            self.plan.rejection = refusal
        self.plan.rejected += 1

    def add_fresh(self, position: int, keys: Sequence[int], head: tuple[int | None, int], specs: Specs) -> None:
        """Plan blocks of which the index has no record and that lack the same specs: as `add` one after the other.

        Args:
            position: of the first.
            keys: of the blocks, each the parent of the next.
            head: parent and depth of the first.
            specs: what they lack.
        """
        assert self.space is not None
        size_bytes = sum(info.size for info in specs)
        parent, depth = head
        planned = 0
        while planned < len(keys) and not self.plan.rejection:
            place, count = self._place_of_many(size_bytes, len(keys) - planned)
            if place is None:
                self.plan.rejection = self._place(size_bytes, None)[1]
                break
            run = PlannedRun(
                position=position,
                keys=keys,
                parent=parent,
                depth=depth,
                specs=specs,
                place=place,
                size_bytes=size_bytes,
                is_fresh=True,
            )
            self.plan.runs.append(run.cut(planned, planned + count))
            self.plan.wanted_bytes[place] += count * size_bytes
            self.plan.new_keys += count
            self.space.free_keys -= count
            self.space.add_planned(place, count * size_bytes)
            planned += count
        self.plan.rejected += len(keys) - planned

    def _place_of_many(self, size_bytes: int, most: int) -> tuple[StorageKey | None, int]:
        """Return the first candidate with space for a fresh block, and for how many of them."""
        assert self.space is not None
        most = min(most, self.space.free_keys)
        for place in self.candidates if most > 0 else ():
            if count := self.space.fitting(place, size_bytes, most):
                return place, count
        return None, 0

    def _place(self, size_bytes: int, record: BlockRecord | None) -> tuple[StorageKey | None, str]:
        assert self.space is not None
        if record is None and self.space.free_keys <= 0:
            return None, f"the instance is full: it has its max_key_count of {self.key_limit} blocks"
        refusals: dict[str, None] = {}  # ordered; several candidates may be under one limit
        for place in self._preferring_type_of(record):
            refusal = self.space.limit(place, size_bytes)
            if refusal is None:
                return place, ""
            refusals[refusal] = None
        return None, "; ".join(refusals)

    def _preferring_type_of(self, record: BlockRecord | None) -> Sequence[StorageKey]:
        """Missing specs of a block go to the type that its other specs are on, where that is available."""
        types = {location.storage_type for location in record.locations} if record is not None else ()
        if not types:
            return self.candidates
        return sorted(self.candidates, key=lambda place: place.storage_type not in types)


def plan_write(
    planner: WritePlanner,
    keys: Sequence[int],
    missing: Sequence[Specs],
    records: Sequence[BlockRecord | None],
    head: tuple[int | None, int],
) -> WritePlan:
    """Plan a request.

    Args:
        planner: limits and storages.
        keys: block keys of one prefix chain, in order.
        missing: specs that each block lacks; none for a masked one.
        records: what the index knows of each block.
        head: parent and depth of the first key.
    """
    has_repeated = len(set(keys)) < len(keys)
    if has_repeated:
        missing = _once(keys, missing)
    depths: dict[int, int] = {}  # of the keys so far, where some are repeated: what follows hangs on the first position
    (parent, depth), position = head, 0
    while position < len(keys):
        specs, record = missing[position], records[position]
        if record is None and specs:
            end = _end_of_fresh(missing, records, position)
            planner.add_fresh(position, keys[position:end], (parent, depth), specs)
        else:
            end = position + 1
            depth = depths.get(keys[position], depth if record is None else record.depth)
            if specs:
                planner.add(position, keys[position], (parent, depth), specs, record)
        if has_repeated:
            depths.update(zip(keys[position:end], range(depth, depth + end - position), strict=True))
        parent, depth, position = keys[end - 1], depth + end - position, end
    return planner.plan


def _once(keys: Sequence[int], missing: Sequence[Specs]) -> list[Specs]:
    """Return what blocks lack, nothing at the later positions of a repeated key."""
    firsts = {key: position for position, key in reversed(list(enumerate(keys)))}
    return [
        specs if firsts[key] == position else ()
        for position, (key, specs) in enumerate(zip(keys, missing, strict=True))
    ]


def _end_of_fresh(missing: Sequence[Specs], records: Sequence[BlockRecord | None], position: int) -> int:
    specs, count = missing[position], len(records)
    if records.count(None) == count == missing.count(specs):  # nearly always
        return count
    for end in range(position + 1, count):
        if records[end] is not None or missing[end] is not specs:
            return end
    return count
