"""Pressure of full media: how many bytes may remain on a storage that is full below every quota.

A storage is full when its medium says so (`kvcm.storage.health`): then its blocks leave until there is space again, in
steps. Each observation of the medium, a probe or a write that was refused, allows one step. A step brings free space up
to its goal, counting marked and not yet deleted blocks as free. The first takes a tenth of all at most, and
a quarter those that follow one that helped.

Where the medium does not say how much is free, or has plenty and refuses nevertheless (a quota of the file system, a
pool that is fragmented, files that cannot be made), a step is a fiftieth, and the next follows when it is deleted. So
it is where another manager found the medium full.

Eviction need not help: other files take the space, a snapshot keeps it, or deletions do not give it back. When free
space and new blocks did not make up half of what was deleted, three times in a row, a step is taken once a minute
only: the cache gives way, and is not emptied for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from kvcm.model.clock import Clock
from kvcm.model.storages import StorageConfig
from kvcm.registry.registry import Registry
from kvcm.storage.backend import StorageSpace
from kvcm.storage.free_margin import FreeMargins
from kvcm.storage.health import StorageHealth

__all__ = ["HeldBytes", "LargestBlocks", "MediaPressure"]

_MOST_PART: Final = 10  # of all: the largest step
_PROVEN_PART: Final = 4  # after one that helped
_STEP_PART: Final = 50  # where the medium does not say how much is missing
_FUTILE_STEPS: Final = 3
_FUTILE_SECONDS: Final = 60.0
_LATE_SECONDS: Final = 10.0
"""Marked bytes should be deleted by then."""
_log = structlog.get_logger("kvcm.reclaim")


class HeldBytes(NamedTuple):
    """What lies on a storage.

    Attributes:
        remaining: bytes that stay, of all groups.
        deleting: bytes that are marked and not yet deleted.
    """

    remaining: int = 0
    deleting: int = 0


@dataclass(slots=True)
class _Step:
    """The last step on one storage.

    Attributes:
        taken_at: unix seconds of the last one that took something; of the first observation, before that.
        observation: of the storage's health, which allowed it.
        space: of the medium, as the last observation had it.
        limit: bytes that may remain.
        free_bytes: then, None where not known.
        size: what it took.
        held: bytes that were there then, marked ones included.
        futile: how many in a row did not help.
        has_helped: whether the last did.
    """

    taken_at: float
    observation: int = -1
    space: StorageSpace | None = None
    limit: int = 0
    free_bytes: int | None = None
    size: int = 0
    held: int = 0
    futile: int = 0
    has_helped: bool = False


@dataclass(slots=True)
class MediaPressure:
    """Limits what may remain on storages that are full.

    Args:
        health: returns how an open storage is, None when there is none of that name.
        margins: what of the medium of each storage is to stay free.
        largest_block: returns the bytes of the largest block that may go to a storage.
        clock: time source.
    """

    health: Callable[[str], StorageHealth | None]
    margins: FreeMargins
    largest_block: Callable[[str], int]
    clock: Clock
    _steps: dict[str, _Step] = field(default_factory=dict)

    def full(self, storages: Iterable[StorageConfig]) -> list[str]:
        """Return which of these are full. One whose watermark is off keeps its blocks, as its operator wants."""
        names = (each.global_unique_name for each in storages if each.used_percentage <= 1)
        return [name for name in names if (health := self.health(name)) is not None and health.is_full]

    def limits(self, full: Iterable[str], held: Mapping[str, HeldBytes]) -> Mapping[str, int]:
        """Return by full storage the bytes that may remain there.

        Args:
            full: from `full`.
            held: what lies on each storage now.
        """
        self._steps = {name: self._steps.get(name) or _Step(self.clock.now()) for name in full}
        for name, step in self._steps.items():
            health = self.health(name)
            if health is not None and step.observation != health.observations:
                step.observation = health.observations
                self._take(name, step, health.space, held.get(name, HeldBytes()))
        return {name: step.limit for name, step in self._steps.items()}

    def _take(self, name: str, step: _Step, space: StorageSpace | None, held: HeldBytes) -> None:
        if space is step.space:  # a write was refused since: how much is missing by now nobody knows
            space = None
        elif space is not None:
            step.space = space
        free = space.free_bytes if space is not None and space.free_bytes >= 0 else None
        # Of blocks whose writes failed there may be no bytes; and what is not deleted by now may never be.
        is_late = self.clock.now() >= step.taken_at + _LATE_SECONDS
        unwritten = sum(self.margins.failed_bytes(name, _LATE_SECONDS))
        held = held._replace(deleting=0 if is_late else max(0, held.deleting - unwritten))
        self._judge(name, step, free, held)
        most = held.remaining // (_PROVEN_PART if step.has_helped else _MOST_PART)
        size = min(self._missing(name, space, free, held), max(2 * self.largest_block(name), most), held.remaining)
        now = self.clock.now()
        is_waiting = step.futile >= _FUTILE_STEPS and now < step.taken_at + _FUTILE_SECONDS
        if size <= 0 or is_waiting:
            step.limit = held.remaining
            return
        step.limit = held.remaining - size
        step.taken_at, step.free_bytes, step.size, step.held = now, free, size, sum(held)

    def _missing(self, name: str, space: StorageSpace | None, free: int | None, held: HeldBytes) -> int:
        """Return the bytes that should leave next, 0 for none."""
        missing = 0
        if space is not None and free is not None:
            missing = self.margins.of(name, space).goal - free - held.deleting
        if missing <= 0:  # it is full for another reason
            missing = 0 if held.deleting else max(self.largest_block(name), held.remaining // _STEP_PART)
        return missing

    def _judge(self, name: str, step: _Step, free: int | None, held: HeldBytes) -> None:
        """Count the last step as futile when its bytes are deleted and neither free nor used by new blocks."""
        if not step.size or held.deleting:
            return  # nothing can be said yet
        deleted = step.held - sum(held)
        gained = free - step.free_bytes if free is not None and step.free_bytes is not None else 0
        written = max(0, step.size - deleted)
        step.has_helped = gained + written >= step.size // 2
        # New blocks in the place of the old ones are some help, whatever others and metadata took beside them.
        step.futile = 0 if max(0, gained) + written >= step.size // 2 else step.futile + 1
        step.size = 0
        if step.futile == _FUTILE_STEPS:
            _log.warning("eviction_frees_nothing", storage=name, deleted_bytes=deleted, gained_bytes=gained)


class LargestBlocks:
    """The largest block that may go to each storage, by what is registered.

    Args:
        registry: groups and instances.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._generation = -1
        self._bytes: dict[str, int] = {}

    def of(self, storage: str) -> int:
        """Return the bytes of the largest block, 0 where none may go there."""
        if self._generation != self._registry.generation:
            self._generation = self._registry.generation
            self._read()
        return self._bytes.get(storage, 0)

    def _read(self) -> None:
        by_group: dict[str, int] = {}
        for instance in self._registry.instances.all():
            name = instance.instance_group_name
            by_group[name] = max(by_group.get(name, 0), instance.block_bytes)
        self._bytes = {}
        for group in self._registry.groups.all():
            for storage in group.storage_candidates:
                self._bytes[storage] = max(self._bytes.get(storage, 0), by_group.get(group.name, 0))
