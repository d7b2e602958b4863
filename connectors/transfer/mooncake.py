"""Mover of `mooncake` storages: objects in the memory of other hosts, moved by batch calls of the Mooncake client.

The client copies between segments and memory that was registered with it. Memory of the engine that is registered up
front (`register`) moves without a copy; anything else goes through a staging memory of a fixed size, which is
registered once, and over tcp also what lies in several pieces.

An object is written once: a put of a name that exists answers 0 and writes nothing, also while the first writer is
still at it. So a put that this mover did not see succeed is verified before a later try counts as stored.

An engine lends no memory to the store by default, since the objects in it are lost with the engine: let processes that
live longer own the segments (`mooncake_client`). With `segment_bytes` this process owns one too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

from kvcm.connectors.transfer.memory import (
    MemorySpan,
    RegisteredMemory,
    StagingMemory,
    gather_bytes,
    scatter_bytes,
    span_of,
    writable_views,
)
from kvcm.connectors.transfer.mover import Direction, Failure, TransferItem, TransferResult, moved, not_moved
from kvcm.model.errors import InvalidArgumentError, KvcmError, StorageIOError
from kvcm.model.mooncake import MooncakeClient, MooncakeCode, explain, open_client
from kvcm.model.storages import MooncakeStorageSpec, StorageConfig

__all__ = ["Call", "ItemPlan", "MooncakeMover", "MooncakeSettings"]

# ---- plans: the client's calls for a batch of items, and the results by its answers ----

# The client queues some 2000 transfers to one peer. More of them fail, and were seen to break the connection for later
# ones too.
_PIECES_PER_CALL = 512
_LOST = {MooncakeCode.MISSING, MooncakeCode.NOT_READY, MooncakeCode.INVALID}


class ItemPlan(NamedTuple):
    """An item with its memory, in as few pieces as there can be.

    Attributes:
        position: of the item among the results.
        key: name of the object.
        size_bytes: to move.
        views: the item's memory.
        spans: the same as the client wants it.
        start: as in the item.
    """

    position: int
    key: str
    size_bytes: int
    views: list[memoryview]
    spans: list[MemorySpan]
    start: int | None


Call = Callable[[MooncakeClient, Direction, Sequence[ItemPlan]], list[int]]
"""Moves objects; returns the client's answers in the order of the plans: a load's bytes, or what is below 0."""


def _call_whole(client: MooncakeClient, direction: Direction, plans: Sequence[ItemPlan]) -> list[int]:
    """Move whole objects that lie in one piece each, which is the fastest way."""
    keys = [plan.key for plan in plans]
    addresses = [plan.spans[0].address for plan in plans]
    sizes = [plan.size_bytes for plan in plans]
    if direction is Direction.LOAD:
        return client.batch_get_into(keys, addresses, sizes)
    return client.batch_put_from(keys, addresses, sizes)


def _call_pieces(client: MooncakeClient, direction: Direction, plans: Sequence[ItemPlan]) -> list[int]:
    """Move whole objects from or to several pieces of memory each."""
    keys = [plan.key for plan in plans]
    addresses = [[span.address for span in plan.spans] for plan in plans]
    sizes = [[span.size_bytes for span in plan.spans] for plan in plans]
    if direction is Direction.LOAD:
        return client.batch_get_into_multi_buffers(keys, addresses, sizes)
    return client.batch_put_from_multi_buffers(keys, addresses, sizes)


def _call_ranges(client: MooncakeClient, _: Direction, plans: Sequence[ItemPlan]) -> list[int]:
    """Load parts of objects; where an object ends before, the store says that the size does not fit."""
    keys = list(dict.fromkeys(plan.key for plan in plans))
    codes = dict(zip(keys, client.batch_get_session_start(keys), strict=True))
    there = [plan for plan in plans if codes[plan.key] == MooncakeCode.OK]
    try:
        counts = iter(_ranges_of(client, there) if there else ())
        return [next(counts) if codes[plan.key] == MooncakeCode.OK else codes[plan.key] for plan in plans]
    finally:
        client.batch_get_session_end(keys)


def _ranges_of(client: MooncakeClient, plans: Sequence[ItemPlan]) -> list[int]:
    addresses = [[span.address for span in plan.spans] for plan in plans]
    sizes = [[span.size_bytes for span in plan.spans] for plan in plans]
    starts = [
        list(accumulate(lengths[:-1], initial=plan.start or 0)) for plan, lengths in zip(plans, sizes, strict=True)
    ]
    return client.batch_get_into_multi_buffer_ranges([plan.key for plan in plans], addresses, sizes, starts)


def _plan_of(position: int, item: TransferItem, direction: Direction) -> ItemPlan:
    """Return what to ask for an item; `position` is its place among the results.

    Raises:
        InvalidArgumentError: uri, memory and range do not fit each other, or memory to load into is read-only.
        TypeError: memory is not contiguous.
    """
    uri = item.uri
    if uri.scheme != "mooncake" or not uri.key:
        raise InvalidArgumentError(f"uri {str(uri)!r} is not mooncake://<storage>/?key=<name>&size=<bytes>")
    views = writable_views(item, direction)
    spans = [span_of(views[0])] if len(views) == 1 else _joined([span_of(view) for view in views])
    return ItemPlan(position, key=uri.key, size_bytes=item.size_bytes, views=views, spans=spans, start=item.start)


def _joined(spans: Sequence[MemorySpan]) -> list[MemorySpan]:
    """Make one of spans that follow each other in memory."""
    joined = [spans[0]]
    for span in spans[1:]:
        last = joined[-1]
        if last.end == span.address:
            joined[-1] = MemorySpan(last.address, last.size_bytes + span.size_bytes)
        else:
            joined.append(span)
    return joined


def _split_by_pieces(plans: Sequence[ItemPlan]) -> Iterator[list[ItemPlan]]:
    """Yield the plans in order, in groups of few enough pieces for one call."""
    group: list[ItemPlan] = []
    count = 0
    for plan in plans:
        if group and count + len(plan.spans) > _PIECES_PER_CALL:
            yield group
            group, count = [], 0
        group.append(plan)
        count += len(plan.spans)
    if group:
        yield group


def _load_result(plan: ItemPlan, code: int) -> TransferResult:
    """Return the result of a load."""
    if code == plan.size_bytes:
        return moved(code)
    if code >= 0:
        return not_moved(Failure.LOST, f"{plan.key} has {code} bytes, must have {plan.size_bytes}", code)
    return not_moved(Failure.LOST if code in _LOST else Failure.ERROR, f"{plan.key}: {explain(code)}")


def _save_result(plan: ItemPlan, code: int, absent: set[str]) -> TransferResult:
    """Return the result of a save; `absent` has the names that are not there afterwards."""
    if code < 0:
        return not_moved(
            Failure.REFUSED if code == MooncakeCode.INVALID else Failure.ERROR, f"{plan.key}: {explain(code)}"
        )
    if plan.key in absent:
        return not_moved(Failure.ERROR, f"{plan.key}: an earlier try to store it has not ended")
    return moved(plan.size_bytes)


_MAX_UNCONFIRMED = 1 << 16
_LATE = not_moved(Failure.CANCELLED, "the deadline passed before the item was begun")


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """Settings of an engine's client of a store.

    Attributes:
        local_hostname: name of this host for the other clients; "" for that of the storage, which all hosts share.
        segment_bytes: memory lent to the store; gone with this process.
        buffer_bytes: memory of the client's own.
        staging_bytes: memory that items go through whose own is not registered; a quarter of it is the largest such
            item.
    """

    local_hostname: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = 16 << 20
    staging_bytes: int = 64 << 20


class MooncakeMover:
    """Moves items of `mooncake://` uris of one storage, in the calling thread.

    The client is opened by the first item, and again by a later one where that failed.

    Args:
        spec: of the storage.
        settings: of this engine.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        most_threads: a call keeps the network busy by itself: several at once were slower.
        group_bytes: of a call; smaller ones were slower.
    """

    def __init__(
        self,
        spec: MooncakeStorageSpec,
        settings: MooncakeSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_threads = 1
        self.group_bytes = 32 << 20
        self._spec = spec
        self._settings = settings or MooncakeSettings()
        self._clock = clock
        self._opening = threading.Lock()  # while a client is opened, which takes long
        self._lock = threading.Lock()
        self._client: MooncakeClient | None = None
        self._users = 0
        self._is_closed = False
        self._memory = RegisteredMemory()
        self._staging = StagingMemory(self._settings.staging_bytes)
        self._turn = threading.Lock()  # one caller of the client at a time, also past an engine
        self._unsure: dict[str, None] = {}  # names whose put started and was not seen to succeed, oldest first

    @classmethod
    def for_storages(cls, storages: Sequence[StorageConfig], settings: MooncakeSettings | None = None) -> MooncakeMover:
        """Return the mover of the one Mooncake storage among those given."""
        [spec] = [storage.spec for storage in storages if isinstance(storage.spec, MooncakeStorageSpec)]
        return cls(spec, settings)

    def register(self, memory: memoryview) -> None:
        """Let items in this memory move without a copy, until the mover is closed. It must outlive the mover.

        Raises:
            InvalidArgumentError: it is not contiguous or overlaps registered memory; the client rejects it.
        """
        span = span_of(memory)
        with self._opening:
            self._memory.add(span)
            if self._client is not None and self._client.register_buffer(*span) != MooncakeCode.OK:
                self._memory.remove(span)
                raise InvalidArgumentError(f"mooncake cannot register {span.size_bytes} bytes of memory")

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Read each item's object into its buffers."""
        return self._transfer(Direction.LOAD, items, deadline_seconds)

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Write each item's buffers to its object."""
        return self._transfer(Direction.SAVE, items, deadline_seconds)

    def close(self) -> None:
        """Close the client; one that a call hangs in is left to that call, for it would end the process."""
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
            if client is not None and not self._users:
                client.close()

    def _transfer(
        self, direction: Direction, items: Sequence[TransferItem], deadline_seconds: float
    ) -> list[TransferResult]:
        deadline = self._clock() + deadline_seconds
        results: dict[int, TransferResult] = {}
        plans: list[ItemPlan] = []
        for position, item in enumerate(items):
            try:
                plans.append(_plan_of(position, item, direction))
            except (InvalidArgumentError, TypeError, ValueError) as error:
                results[position] = not_moved(Failure.REFUSED, str(error))
        if plans:
            results |= self._with_client(direction, plans, deadline)
        return [results[position] for position in range(len(items))]

    def _with_client(
        self, direction: Direction, plans: Sequence[ItemPlan], deadline: float
    ) -> dict[int, TransferResult]:
        try:
            with self._used_client() as client:
                return self._move(client, direction, plans, deadline)
        except KvcmError as error:
            return {plan.position: not_moved(Failure.ERROR, str(error)) for plan in plans}

    @contextmanager
    def _used_client(self) -> Iterator[MooncakeClient]:
        client = self._open()
        try:
            yield client
        finally:
            with self._lock:
                self._users -= 1

    def _open(self) -> MooncakeClient:
        """Return the client, and count its user."""
        with self._opening:
            client = self._client
            if client is None:
                if self._is_closed:
                    raise InvalidArgumentError("the mover is closed")
                client = self._opened_client()
            with self._lock:
                if self._is_closed:
                    raise InvalidArgumentError("the mover is closed")
                self._client = client
                self._users += 1
            return client

    def _opened_client(self) -> MooncakeClient:
        settings = self._settings
        client = open_client(
            self._spec,
            segment_bytes=settings.segment_bytes,
            buffer_bytes=settings.buffer_bytes,
            local_hostname=settings.local_hostname,
        )
        for span in (*self._memory.spans, self._staging.span):
            code = client.register_buffer(*span)
            if code != MooncakeCode.OK:
                raise StorageIOError(f"mooncake cannot register {span.size_bytes} bytes of memory: {explain(code)}")
        return client

    def _move(
        self, client: MooncakeClient, direction: Direction, plans: Sequence[ItemPlan], deadline: float
    ) -> dict[int, TransferResult]:
        """Move registered memory in place, other memory through the staging memory."""
        direct = [plan for plan in plans if self._goes_directly(plan)]
        results = self._call(client, direction, direct, deadline)
        waiting = [plan for plan in plans if plan.position not in results]
        for batch in self._staging.batches(waiting, lambda plan: plan.size_bytes):
            with self._staging.slot(lambda: deadline - self._clock()) as slot:
                results |= self._move_staged(client, direction=direction, plans=batch, slot=slot, deadline=deadline)
        too_large = f"more than {self._staging.slot_bytes} bytes of memory that is not registered: register it"
        return {plan.position: not_moved(Failure.REFUSED, too_large) for plan in waiting} | results

    def _move_staged(
        self,
        client: MooncakeClient,
        direction: Direction,
        plans: Sequence[ItemPlan],
        slot: memoryview | None,
        deadline: float,
    ) -> dict[int, TransferResult]:
        if slot is None:
            return {plan.position: _LATE for plan in plans}
        places = _cut(slot, plans)
        staged = [
            ItemPlan(
                plan.position,
                key=plan.key,
                size_bytes=plan.size_bytes,
                views=[place],
                spans=[span_of(place)],
                start=plan.start,
            )
            for plan, place in zip(plans, places, strict=True)
        ]
        if direction is Direction.SAVE:
            for plan, place in zip(plans, places, strict=True):
                gather_bytes(plan.views, place)
        results = self._call(client, direction, staged, deadline)
        if direction is Direction.LOAD:
            for plan, place in zip(plans, places, strict=True):
                if results[plan.position].ok:
                    scatter_bytes(place, plan.views)
        return results

    def _call(
        self, client: MooncakeClient, direction: Direction, plans: Sequence[ItemPlan], deadline: float
    ) -> dict[int, TransferResult]:
        """Move plans by one call for those in one piece, which is the fastest one, and others for the others."""
        whole = [plan for plan in plans if plan.start is None and len(plan.spans) == 1]
        pieces = [plan for plan in plans if plan.start is None and len(plan.spans) > 1]
        ranges = [plan for plan in plans if plan.start is not None]
        results: dict[int, TransferResult] = {}
        for kind, call in ((whole, _call_whole), (pieces, _call_pieces), (ranges, _call_ranges)):
            for group in _split_by_pieces(kind):
                results |= self._call_in_turn(client, direction, group, call, deadline)
        return results

    def _call_in_turn(
        self, client: MooncakeClient, direction: Direction, plans: Sequence[ItemPlan], call: Call, deadline: float
    ) -> dict[int, TransferResult]:
        if not self._turn.acquire(timeout=max(0.0, deadline - self._clock())):
            return {plan.position: _LATE for plan in plans}
        try:
            if self._clock() >= deadline:
                return {plan.position: _LATE for plan in plans}
            if direction is Direction.SAVE:
                return self._save(client, plans, call)
            codes = call(client, direction, plans)
            return {plan.position: _load_result(plan, code) for plan, code in zip(plans, codes, strict=True)}
        finally:
            self._turn.release()

    def _goes_directly(self, plan: ItemPlan) -> bool:
        """Whether to move from and to where the bytes lie.

        Over tcp every piece is a message of its own, and many small ones take longer than one copy of all.
        """
        if len(plan.spans) == 1:
            return self._memory.contains(plan.spans[0])
        is_gathered_by_hardware = self._spec.protocol == "rdma"
        is_worth_it = is_gathered_by_hardware or plan.size_bytes > self._staging.slot_bytes
        return is_worth_it and all(map(self._memory.contains, plan.spans))

    def _save(self, client: MooncakeClient, plans: Sequence[ItemPlan], call: Call) -> dict[int, TransferResult]:
        again = self._start_puts([plan.key for plan in plans])
        codes = call(client, Direction.SAVE, plans)
        there = client.batch_is_exist(again) if again else []
        absent = {key for key, found in zip(again, there, strict=True) if found != 1}
        results = {plan.position: _save_result(plan, code, absent) for plan, code in zip(plans, codes, strict=True)}
        with self._lock:
            for plan in plans:
                if results[plan.position].ok:
                    self._unsure.pop(plan.key, None)
        return results

    def _start_puts(self, keys: Sequence[str]) -> list[str]:
        """Record the names that are put now, and return those whose earlier put was not seen to succeed."""
        with self._lock:
            again = [key for key in keys if key in self._unsure]
            self._unsure |= dict.fromkeys(keys)
            for key in list(islice(self._unsure, max(0, len(self._unsure) - _MAX_UNCONFIRMED))):
                del self._unsure[key]
        return again


def _cut(slot: memoryview, plans: Sequence[ItemPlan]) -> list[memoryview]:
    places, start = [], 0
    for plan in plans:
        places.append(slot[start : start + plan.size_bytes])
        start += plan.size_bytes
    return places
