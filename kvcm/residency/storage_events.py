"""Events of the blocks that storages have: follows instances, and hands every change of theirs to sinks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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

__all__ = ["ALL_INSTANCES", "EventCounts", "LoggedStorageEvents", "StorageEventSink", "StorageEvents"]

ALL_INSTANCES: Final = "*"

_COMPONENT: Final = "storage_events"
_IDLE_SECONDS: Final = 0.2  # the registry and the state of storages are compared so often
_AGAIN_SECONDS: Final = 0.5
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


class _Followed(NamedTuple):
    uid: int
    instance: Instance
    blocks: StoredBlocks


class StorageEvents:
    """Follows the instances that events are wanted of, those that are registered later as well.

    Args:
        handles: returns the index of every registered instance.
        view: which storages can be read.
        sinks: by id of the instance; those of `ALL_INSTANCES` get the changes of every instance.
    """

    def __init__(
        self,
        handles: Callable[[], Iterable[IndexHandle]],
        view: StorageView,
        sinks: Mapping[str, Sequence[StorageEventSink]],
    ) -> None:
        self._handles = handles
        self._view = view
        self._sinks = sinks
        self._followed: dict[str, _Followed] = {}
        self._changed = asyncio.Event()
        self._stored = self._removed = 0
        self._failure = ""

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

    def hint(self, uid: int, keys: Iterable[int]) -> None:
        """Compare blocks of a registration that another manager wrote, by mixed keys."""
        for followed in self._followed.values():
            if followed.uid == uid:
                followed.blocks.changed(keys)

    def compare_all(self) -> None:
        """Compare every block: hints may be missing."""
        for followed in self._followed.values():
            followed.blocks.all_changed()

    def snapshot(self, instance_id: str) -> Blocks | None:
        """Return the blocks that were published of an instance, None where it is not followed."""
        followed = self._followed.get(instance_id)
        return followed.blocks.snapshot() if followed is not None else None

    def is_complete(self, instance_id: str) -> bool:
        """Whether all blocks of an instance were compared since the start, or since hints were missing last."""
        followed = self._followed.get(instance_id)
        return followed is not None and followed.blocks.is_complete

    async def run(self) -> None:
        """Follow for ever, until cancelled."""
        while True:
            self._changed.clear()
            self.refresh()
            try:
                has_more = await self.step()
            except KvcmError as error:
                self._note_failure(str(error))
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            self._note_failure("")
            if not has_more:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_SECONDS):
                        await self._changed.wait()

    async def step(self) -> bool:
        """Compare some blocks of every instance; return whether there are more.

        Raises:
            KvcmError: the store cannot be asked.
        """
        has_more = False
        for followed in list(self._followed.values()):
            for _ in range(_STEPS):
                if not await followed.blocks.step():
                    break
                await asyncio.sleep(0)  # a store in this process does not suspend
            else:
                has_more = True
        return has_more

    def refresh(self) -> None:
        """Begin to follow what was registered, and no longer those that are gone."""
        wanted = {
            handle.instance_id: handle
            for handle in (self._handles() if self._sinks else ())
            if handle.instance_id in self._sinks or ALL_INSTANCES in self._sinks
        }
        for name in self._followed.keys() - wanted.keys():
            self._followed.pop(name).blocks.close()
        for name, handle in wanted.items():
            followed = self._followed.get(name)
            if followed is None:
                on_change = partial(self._publish, handle.instance)
                blocks = StoredBlocks(handle.meta_index, self._view, on_change, self._changed.set)
            else:
                (blocks := followed.blocks).follow(handle.meta_index)
            self._followed[name] = _Followed(handle.uid, handle.instance, blocks)

    def _publish(self, instance: Instance, change: StoredChange) -> None:
        self._stored += len(change.stored.keys)
        self._removed += len(change.removed.keys)
        for name in (instance.instance_id, ALL_INSTANCES):
            for sink in self._sinks.get(name, ()):
                sink.publish(instance, change)

    def _note_failure(self, reason: str) -> None:
        if reason and not self._failure:
            _log.warning("storage_events_waiting", reason=reason)
        self._failure = reason
