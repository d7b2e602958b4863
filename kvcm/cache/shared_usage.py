"""Usage of groups while several managers work on one store.

What the indexes of this manager report is gathered and sent in batches, many times a second; a reservation covers what
is not sent yet, so limits hold all the same (see `kvcm.store.redis.quota` for the protocol).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from kvcm.cache.usage import Reservation, Room
from kvcm.index.meta_index import MetaIndex, UsageListener, UsageNote
from kvcm.model.errors import KvcmError
from kvcm.model.groups import InstanceGroup
from kvcm.model.storages import StorageType
from kvcm.store.redis.quota import Counters, Demand, QuotaCounters, Report

__all__ = ["SharedLedger", "counted"]

_MOST_KEYS = 1 << 62

_log = structlog.get_logger("kvcm.cache")


@dataclass(slots=True)
class _Outbox:
    """What this manager has to report of one group. What shrank did so in `epoch` or later."""

    epoch: int = 0
    grown: Counter[str] = field(default_factory=Counter)
    shrunk: Counter[str] = field(default_factory=Counter)
    done: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.grown or self.shrunk or self.done)


class SharedLedger:
    """Counts in a store that all managers share.

    Args:
        counters: the shared counters.
        node_id: id of this manager, new with every start.
    """

    def __init__(self, counters: QuotaCounters, node_id: str) -> None:
        self._counters = counters
        self._node_id = node_id
        self._heard: dict[str, Counters] = {}
        self._outboxes: defaultdict[str, _Outbox] = defaultdict(_Outbox)
        self._sending: dict[str, Report] = {}
        self._numbers: Counter[str] = Counter()
        self._wake = asyncio.Event()

    def listener(self, group_name: str, uid: int) -> UsageListener:
        """Return the listener for the index of an instance of a group."""

        def begin() -> UsageNote:
            # Before the store is asked: what shrinks from now on happens in this epoch or a later one.
            epoch = self._epoch(group_name)

            def note(difference: Mapping[StorageType, int], keys: int) -> None:
                self._note(group_name, epoch, {**_by_field(difference), _keys_field(uid): keys})

            return note

        return begin

    def _note(self, group_name: str, epoch: int, changes: Mapping[str, int]) -> None:
        outbox = self._outboxes[group_name]
        if any(change < 0 for change in changes.values()):
            outbox.epoch = min(outbox.epoch, epoch) if outbox.shrunk else epoch
        for name, change in changes.items():
            if change:
                (outbox.grown if change > 0 else outbox.shrunk)[name] += change
        self._wake.set()

    def _epoch(self, group_name: str) -> int:
        heard = self._heard.get(group_name)
        return heard.epoch if heard is not None else 0

    def used(self, group_name: str) -> Mapping[StorageType, int]:
        """Return the bytes that a group uses, by storage type, as last heard."""
        heard = self._heard.get(group_name)
        return _by_type(heard.used) if heard is not None else {}

    async def hear(self, group_name: str) -> None:
        """Ask the store what a group uses."""
        await self.refresh(group_name)

    async def refresh(self, group_name: str) -> Counters:
        """Hear what a group uses."""
        return self._hear(group_name, await self._counters.read(group_name))

    async def room(self, group: InstanceGroup, uid: int, index: MetaIndex) -> Room:
        """Return what an instance of the group may still take right now."""
        heard = await self.refresh(group.name)
        taken = Counter(heard.used)
        taken.update(heard.reserved)
        free_keys = index.max_key_count - taken[_keys_field(uid)]
        return Room(group, _by_type(taken), max(0, free_keys))

    async def reserve(self, reservation: Reservation, index: MetaIndex) -> bool:
        """Take what was planned. False: it does not fit any more; nothing is taken then."""
        quota = reservation.group.quota
        demands = [
            Demand(_bytes_field(kind), size, -1 if (limit := quota.capacity_of(kind)) is None else max(0, limit))
            for kind, size in reservation.wanted_bytes.items()
        ]
        if index.max_key_count < _MOST_KEYS:
            demands.append(Demand(_keys_field(reservation.uid), reservation.new_keys, index.max_key_count))
        name = reservation.group.name
        fits, heard = await self._counters.reserve(
            name, reservation.owner, reservation.deadline, demands, quota.capacity, [*map(_bytes_field, StorageType)]
        )
        self._hear(name, heard)
        return fits

    def settle(self, reservation: Reservation, index: MetaIndex) -> None:
        """End a reservation, together with the report of what was stored under it."""
        self._outboxes[reservation.group.name].done.append(reservation.owner)
        self._wake.set()

    async def run(self, interval_seconds: float = 0.02) -> None:
        """Send reports as they come, until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(interval_seconds)
            self._wake.clear()
            try:
                await self.flush()
            except KvcmError as error:  # nothing is lost: the same report is sent again
                _log.warning("usage_not_reported", reason=str(error))
                self._wake.set()
                await asyncio.sleep(1)

    async def flush(self) -> None:
        """Send everything that is to be reported.

        Raises:
            StorageIOError: the store cannot be asked; what was not heard is sent again next time.
        """
        failed: KvcmError | None = None
        for group_name in sorted({*self._outboxes, *self._sending}):
            try:
                await self._flush(group_name)
            except KvcmError as error:  # its node of the cluster is away, perhaps those of the other groups are not
                failed = error
        if failed is not None:
            raise failed

    async def _flush(self, group_name: str) -> None:
        while self._next_report(group_name):
            heard = await self._counters.report(group_name, self._sending[group_name])
            self._sending.pop(group_name, None)
            self._hear(group_name, heard)

    def _next_report(self, group_name: str) -> bool:
        if group_name in self._sending:
            return True  # perhaps it was heard and the answer lost: the same number is sent again
        outbox = self._outboxes.pop(group_name, None)
        if outbox is None or outbox.is_empty:
            return False
        self._numbers[group_name] += 1
        number = self._numbers[group_name]
        self._sending[group_name] = Report(
            self._node_id, number, outbox.epoch, dict(outbox.grown), dict(outbox.shrunk), tuple(outbox.done)
        )
        return True

    def _hear(self, group_name: str, counters: Counters) -> Counters:
        self._heard[group_name] = counters
        return counters

    async def recount(self, group_name: str, indexes: Mapping[int, MetaIndex], now: float) -> bool:
        """Put the sum of the counters that change with the records in the place of what was reported.

        Args:
            group_name: the group.
            indexes: the indexes of all its instances, also of those that are being removed, by uid.
            now: unix seconds.

        Returns:
            Whether it was carried through.
        """
        begun = await self._counters.begin_recount(group_name, now)
        return await self._counters.end_recount(group_name, begun, await counted(indexes))


async def counted(indexes: Mapping[int, MetaIndex]) -> dict[str, int]:
    """Return what indexes use by field, as their stores count it."""
    fields: Counter[str] = Counter()
    for uid, index in indexes.items():
        await index.refresh()
        fields[_keys_field(uid)] += index.key_count
        for kind, size in index.usage_bytes.items():
            fields[_bytes_field(kind)] += size
    return dict(fields)


def _bytes_field(kind: StorageType) -> str:
    return f"b{int(kind)}"


def _by_field(difference: Mapping[StorageType, int]) -> dict[str, int]:
    return {_bytes_field(kind): size for kind, size in difference.items()}


def _keys_field(uid: int) -> str:
    return f"k{uid}"


def _by_type(fields: Mapping[str, int]) -> dict[StorageType, int]:
    return {StorageType(int(name[1:])): value for name, value in fields.items() if name[0] == "b" and value}
