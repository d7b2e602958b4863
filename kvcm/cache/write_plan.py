"""What a StartWriteCache will write: pure planning, no side effects (design.md decision 17).

* A block is masked when its serving or writing locations on available storages cover every spec asked for. What serves
  on a storage that is being drained will be gone soon: where there is another storage it covers nothing.
* A key repeated in one request is masked at its later positions.
* A block that fits no limit is refused, and so is everything behind it: a suffix without its prefix is useless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcm.cache.usage import Room
from kvcm.index.answers import StorageView
from kvcm.model.instances import LocationSpecInfo
from kvcm.model.locations import BlockRecord, LocationStatus, Place

__all__ = ["PlannedBlock", "WritePlan", "missing_specs", "plan_write"]

Specs = tuple[LocationSpecInfo, ...]


class PlannedBlock(NamedTuple):
    """A block to be written: the specs it lacks and the place they go to."""

    position: int
    key: int
    parent: int | None
    depth: int
    specs: Specs
    place: Place
    size_bytes: int


@dataclass(slots=True)
class WritePlan:
    """The blocks to write, in request order.

    Attributes:
        blocks: what is to be written.
        refused: number of blocks that should be written and do not fit.
        refusal: why the first of them does not fit; "" when all do.
        new_keys: blocks of the plan that the index does not know yet.
    """

    blocks: list[PlannedBlock] = field(default_factory=list)
    refused: int = 0
    refusal: str = ""
    new_keys: int = 0


def _none_leaves(_storage: str) -> bool:
    return False


def missing_specs(
    record: BlockRecord | None,
    wanted: Specs,
    view: StorageView,
    min_replica_count: int,
    is_leaving: Callable[[str], bool] = _none_leaves,
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
        if view.rank(location.storage) is None:
            continue
        if location.status is LocationStatus.WRITING:
            writing.update(location.spec_names)
        elif location.status is LocationStatus.SERVING and not is_leaving(location.storage):
            replicas.update(location.spec_names)
    return tuple(info for info in wanted if info.name not in writing and replicas[info.name] < min_replica_count)


@dataclass(slots=True)
class Planner:
    """Plans one request block by block, taking room as it goes.

    Attributes:
        candidates: storages in order of preference.
        room: what the group may still take; None when nothing has to be written.
        key_limit: the index's limit, for the message.
    """

    candidates: Sequence[Place]
    room: Room | None
    key_limit: int
    plan: WritePlan = field(default_factory=WritePlan)

    def add(
        self, position: int, key: int, chain: tuple[int | None, int], specs: Specs, record: BlockRecord | None
    ) -> None:
        """Plan one block that lacks `specs`, or refuse it and everything after it."""
        assert self.room is not None
        if not self.plan.refusal:
            size_bytes = sum(info.size for info in specs)
            place, refusal = self._place(size_bytes, record)
            if place is not None:
                self.room.free_keys -= record is None
                self.plan.new_keys += record is None
                self.room.take(place, size_bytes)
                self.plan.blocks.append(PlannedBlock(position, key, *chain, specs, place, size_bytes))
                return
            self.plan.refusal = refusal
        self.plan.refused += 1

    def _place(self, size_bytes: int, record: BlockRecord | None) -> tuple[Place | None, str]:
        assert self.room is not None
        if record is None and self.room.free_keys <= 0:
            return None, f"the instance is full: it has its max_key_count of {self.key_limit} blocks"
        refusals: dict[str, None] = {}  # ordered; several candidates may be under one limit
        for place in self._preferring_type_of(record):
            refusal = self.room.limit(place, size_bytes)
            if refusal is None:
                return place, ""
            refusals[refusal] = None
        return None, "; ".join(refusals)

    def _preferring_type_of(self, record: BlockRecord | None) -> Sequence[Place]:
        """Missing specs of a block go to the type that its other specs are on, where that is available."""
        types = {location.storage_type for location in record.locations} if record is not None else ()
        if not types:
            return self.candidates
        return sorted(self.candidates, key=lambda place: place.storage_type not in types)


def plan_write(
    planner: Planner,
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
    parent, depth = head
    depths: dict[int, int] = {}
    for position, (key, specs, record) in enumerate(zip(keys, missing, records, strict=True)):
        if key in depths:
            depth = depths[key]  # a repeated key: masked, and what follows it hangs on its first position
        else:
            depth = depths[key] = record.depth if record is not None else depth
            if specs:
                planner.add(position, key, (parent, depth), specs, record)
        parent, depth = key, depth + 1
    return planner.plan
