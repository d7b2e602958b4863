"""Events of the blocks that storages have: follows instances, and hands every change of theirs to sinks."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from kvcm.index.meta_index import IndexHandle
from kvcm.index.search_cache import StorageView
from kvcm.model.errors import KvcmError
from kvcm.model.instances import Instance
from kvcm.residency.stored_blocks import Blocks, StoredBlocks, StoredChange
from kvcm.telemetry import metrics as catalog
from kvcm.telemetry.events import EventLog
from kvcm.telemetry.metrics import Reading

__all__ = ["ALL_INSTANCES", "EventCounts", "LoggedStorageEvents", "OpenIndex", "StorageEventSink", "StorageEvents"]

ALL_INSTANCES: Final = "*"

_COMPONENT: Final = "storage_events"
_IDLE_SECONDS: Final = 0.2  # the registry and the state of storages are compared so often
_AGAIN_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 5.0
_COMPARE_SECONDS: Final = 600.0
_STEPS: Final = 16  # of one instance before others have a turn
_log = structlog.get_logger("kvcm.residency")


class StorageEventSink(Protocol):
    """Receives the changes of one instance or of several, each in its order."""

    def publish(self, instance: Instance, change: StoredChange) -> None:
        """Take a change; must not raise."""


class LoggedStorageEvents:
    """Publishes changes to an event log.

    Args:
        log: where they go.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._sequences: Counter[str] = Counter()  # by instance

    def publish(self, instance: Instance, change: StoredChange) -> None:
        """Take a change: one event for blocks that are gone, and one for blocks that came."""
        for event_type, blocks in (("unreadable", change.removed), ("readable", change.stored)):
            if not len(blocks.keys):
                continue
            self._sequences[instance.instance_id] += 1  # also while nobody listens, so that a gap can be seen
            if self._log.is_active:
                fields = {
                    "group": instance.instance_group_name,
                    "sequence": self._sequences[instance.instance_id],
                    "keys": blocks.keys.tolist(),
                    "event_hashes": blocks.event_hashes.tolist(),
                }
                self._log.publish(instance.instance_id, _COMPONENT, event_type, fields)


class EventCounts(NamedTuple):
    """Blocks that were published since the start, and those that are known.

    Attributes:
        stored: blocks that came to be readable.
        removed: blocks that ceased to be.
        blocks: that can be read, of the instances that are followed.
        memory_bytes: that knowing them takes.
        incomplete: instances whose blocks are being compared.
    """

    stored: int
    removed: int
    blocks: int
    memory_bytes: int
    incomplete: int


class OpenIndex(NamedTuple):
    """The index of a registered instance.

    Attributes:
        handle: the index.
        store: name of the store that it is in.
    """

    handle: IndexHandle
    store: str


@dataclass(slots=True)
class _Followed:
    """An instance that is followed.

    Attributes:
        index: of it.
        blocks: that can be read.
        failures: of reads, one after the other.
        again_at: until when the store is left alone after a failure, seconds of the monotonic clock.
        compare_at: when every block is compared in any case.
    """

    index: OpenIndex
    blocks: StoredBlocks
    failures: int = 0
    again_at: float = 0.0
    compare_at: float = math.inf


class StorageEvents:
    """Follows the instances that events are wanted of, those that are registered later as well.

    Args:
        indexes: returns the index of every registered instance; none while this manager does not answer lookups.
        generation: another number whenever these may be others.
        view: which storages can be read.
        sinks: by id of the instance; those of `ALL_INSTANCES` get the changes of every instance.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        indexes: Callable[[], Iterable[OpenIndex]],
        generation: Callable[[], object],
        view: StorageView,
        sinks: Mapping[str, Sequence[StorageEventSink]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._indexes = indexes
        self._generation = generation
        self._known_generation: object = None
        self._view = view
        self._sinks = sinks
        self._clock = clock
        self._followed: dict[str, _Followed] = {}
        self._by_uid: dict[int, _Followed] = {}
        self._changed = asyncio.Event()
        self._stored = self._removed = 0

    @property
    def is_active(self) -> bool:
        """Whether events of any instance are wanted."""
        return bool(self._sinks)

    @property
    def counts(self) -> EventCounts:
        """Blocks that were published, and those that are known."""
        all_blocks = [each.blocks for each in self._followed.values()]
        return EventCounts(
            stored=self._stored,
            removed=self._removed,
            blocks=sum(each.count for each in all_blocks),
            memory_bytes=sum(each.memory_bytes for each in all_blocks),
            incomplete=sum(not each.is_complete for each in all_blocks),
        )

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics."""
        counts = self.counts
        yield Reading(catalog.STORAGE_EVENTS, counts.stored, ("stored",))
        yield Reading(catalog.STORAGE_EVENTS, counts.removed, ("removed",))
        yield Reading(catalog.STORAGE_EVENT_BLOCKS, counts.blocks)
        yield Reading(catalog.STORAGE_EVENT_MEMORY, counts.memory_bytes)
        yield Reading(catalog.STORAGE_EVENTS_INCOMPLETE, counts.incomplete)

    def hint(self, uid: int, keys: Callable[[], Iterable[int]]) -> None:
        """Compare blocks of a registration that another manager wrote.

        Args:
            uid: of the registration.
            keys: returns their mixed keys.
        """
        if (followed := self._by_uid.get(uid)) is not None:
            followed.blocks.changed(keys())

    def compare_all(self, store: str) -> None:
        """Compare every block in a store: hints may be missing."""
        for followed in self._followed.values():
            if followed.index.store == store:
                followed.blocks.all_changed()

    def snapshot(self, instance_id: str) -> Blocks | None:
        """Return the blocks that were published of an instance, None where it is not followed."""
        followed = self._followed.get(instance_id)
        return followed.blocks.snapshot() if followed is not None else None

    async def run(self) -> None:
        """Follow for ever, until cancelled."""
        while True:
            self._changed.clear()
            self.refresh()
            if not await self.step():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_SECONDS):
                        await self._changed.wait()

    async def step(self) -> bool:
        """Compare some blocks of every instance; return whether there are more. A store that fails holds up the
        instances in it alone."""
        now, has_more = self._clock(), False
        for followed in [each for each in self._followed.values() if each.again_at <= now]:
            if now >= followed.compare_at:
                followed.compare_at = now + _COMPARE_SECONDS
                followed.blocks.all_changed()
            try:
                has_more = await self._step_of(followed) or has_more
            except KvcmError as error:
                self._note_failure(followed, str(error))
            else:
                followed.failures = 0
        return has_more

    async def _step_of(self, followed: _Followed) -> bool:
        for _ in range(_STEPS):
            if not followed.blocks.has_work:
                return False
            await followed.blocks.step()
            await asyncio.sleep(0)  # a store in this process does not suspend
        return followed.blocks.has_work

    def refresh(self) -> None:
        """Begin to follow instances that were registered, and no longer those that are gone."""
        generation = self._generation()
        if generation == self._known_generation or not self._sinks:
            return
        self._known_generation = generation
        wanted = {
            each.handle.instance_id: each
            for each in self._indexes()
            if each.handle.instance_id in self._sinks or ALL_INSTANCES in self._sinks
        }
        for name in self._followed.keys() - wanted.keys():
            self._followed[name].blocks.close()
            del self._followed[name]
        for name, index in wanted.items():
            self._follow(name, index)
        self._by_uid = {each.index.handle.uid: each for each in self._followed.values()}

    def _follow(self, name: str, index: OpenIndex) -> None:
        followed = self._followed.get(name)
        if followed is not None:
            followed.index = index
            followed.blocks.follow(index.handle.meta_index)
            return
        on_change = partial(self._publish, name)
        blocks = StoredBlocks(index.handle.meta_index, self._view, on_change, self._changed.set)
        self._followed[name] = followed = _Followed(index, blocks)
        if index.handle.meta_index.is_shared:
            followed.compare_at = self._clock() + _COMPARE_SECONDS

    def _publish(self, name: str, change: StoredChange) -> None:
        instance = self._followed[name].index.handle.instance
        self._stored += len(change.stored.keys)
        self._removed += len(change.removed.keys)
        for of in (name, ALL_INSTANCES):
            for sink in self._sinks.get(of, ()):
                sink.publish(instance, change)

    def _note_failure(self, followed: _Followed, reason: str) -> None:
        if not followed.failures:
            _log.warning("storage_events_waiting", instance=followed.index.handle.instance_id, reason=reason)
        followed.failures += 1
        pause = min(_LONGEST_PAUSE_SECONDS, _AGAIN_SECONDS * 2.0**followed.failures)
        followed.again_at = self._clock() + pause
