"""How many bytes the pins of a group hold, exact for any number of managers.

One small document per group: the pins by id, each with its bytes and deadline. It changes by compare-and-set only, so
of two pins that together exceed the budget one is refused, wherever they are asked for. What is past its deadline does
not count and leaves with the next change: a manager that dies between taking budget and pinning costs budget for the
life of that pin, and nobody has to clean up after it.

Rejected: the ledger's leased credits, made for thousands of reservations a second; pins are few, and small differences
between managers would be visible to whoever pins right up to a budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import uniform
from typing import NamedTuple

import msgspec
import structlog

from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.groups import InstanceGroup
from kvcm.store.store import Table

__all__ = ["PinBudgets", "PinEntry"]

_FORMAT = 1
_MOST_ATTEMPTS = 32
_MOST_PINS = 4096  # of a group: its document is read and written with each
_MOST_DUE = 1024
_LONGEST_PAUSE_SECONDS = 0.05
_PUT_OFF_SECONDS = 60.0

_log = structlog.get_logger("kvcm.cache")


class PinEntry(NamedTuple):
    """What one pin takes of a group's budget.

    Attributes:
        uid: number of the instance.
        size_bytes: bytes it holds.
        deadline: unix seconds; from then on it takes nothing.
    """

    uid: int
    size_bytes: int
    deadline: float


Entries = dict[str, PinEntry]


class _Document(msgspec.Struct, array_like=True, frozen=True):
    version: int
    entries: Entries


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Document)


class PinBudgets:
    """The budgets of all groups.

    Args:
        table: one document per group.
        clock: time source.
    """

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def entries(self, group: str) -> Entries:
        """Return what the pins of a group take now, by pin id.

        Raises:
            StorageIOError: the store failed, or the document cannot be read.
        """
        return self._alive(_decoded(await self._table.get(group)))

    async def take(self, group: InstanceGroup, pin_id: str, entry: PinEntry) -> None:
        """Take bytes for a new pin.

        Raises:
            CapacityError: the group's budget does not allow them.
            NotReadyError: other managers keep changing the budget.
        """

        def add(entries: Entries) -> Entries:
            others = {each: kept for each, kept in entries.items() if each != pin_id}
            _check_room(group, others, entry)
            return {**others, pin_id: entry}

        await self._change(group.name, add)

    async def lower(self, group: str, pin_id: str, size_bytes: int) -> None:
        """Give back what a pin turned out not to hold; 0 gives all of it back.

        Raises:
            NotReadyError: other managers keep changing the budget.
        """

        def lower(entries: Entries) -> Entries:
            if pin_id not in entries:
                return entries
            if size_bytes:
                return {**entries, pin_id: entries[pin_id]._replace(size_bytes=size_bytes)}
            return {each: entry for each, entry in entries.items() if each != pin_id}

        await self._change(group, lower)

    async def drop_instance(self, group: str, uid: int) -> list[str]:
        """Give back what the pins of an instance take; return their ids."""
        ids = [pin_id for pin_id, entry in (await self.entries(group)).items() if entry.uid == uid]
        if ids:
            await self._change(group, lambda entries: {each: kept for each, kept in entries.items() if kept.uid != uid})
        return ids

    async def expire(self) -> None:
        """Forget what is past its deadline."""
        for group in await self._table.due(self._clock.now(), _MOST_DUE):
            try:
                await self._change(group, lambda entries: entries)
            except KvcmError as error:
                _log.warning("pin_budget_not_cleared", group=group, reason=str(error))
                await self._put_off(group)

    async def _put_off(self, group: str) -> None:
        """Come back to a budget later: it must not hold up others, nor fill the log."""
        with suppress(StorageIOError):
            document = await self._table.get(group)
            if document is not None:
                await self._table.replace(group, document, document, self._clock.now() + _PUT_OFF_SECONDS)

    def _alive(self, entries: Entries) -> Entries:
        now = self._clock.now()
        return {pin_id: entry for pin_id, entry in entries.items() if entry.deadline > now}

    async def _change(self, group: str, change: Callable[[Entries], Entries]) -> None:
        pause = 0.0
        for _ in range(_MOST_ATTEMPTS):
            document = await self._table.get(group)
            entries = _decoded(document)
            changed = change(self._alive(entries))
            if changed == entries:
                return
            due = min((entry.deadline for entry in changed.values()), default=0.0)
            if await self._table.replace(group, document, _encoded(changed), due):
                return
            await asyncio.sleep(uniform(0, pause))  # noqa: S311 - spreads managers in time
            pause = min(_LONGEST_PAUSE_SECONDS, 2 * pause + 0.001)
        raise NotReadyError(f"other managers keep changing the pins of group {group!r}: retry shortly")


def _check_room(group: InstanceGroup, others: Entries, entry: PinEntry) -> None:
    pinned = sum(other.size_bytes for other in others.values())
    if pinned + entry.size_bytes > group.pin_budget_bytes:
        raise CapacityError(
            f"pin_budget_bytes of group {group.name!r} is {group.pin_budget_bytes}, {pinned} bytes are pinned: "
            f"{entry.size_bytes} more do not fit; unpin some or let them expire"
        )
    if len(others) >= _MOST_PINS:
        raise CapacityError(f"group {group.name!r} has {_MOST_PINS} pins: unpin some or let them expire")


def _encoded(entries: Entries) -> bytes | None:
    return _encoder.encode(_Document(_FORMAT, entries)) if entries else None


def _decoded(document: bytes | None) -> Entries:
    if document is None:
        return {}
    try:
        stored = _decoder.decode(document)
    except msgspec.MsgspecError as error:
        raise StorageIOError(f"a stored pin budget cannot be read: {error}") from error
    if stored.version != _FORMAT:
        raise StorageIOError(f"a stored pin budget has format {stored.version}, this release knows {_FORMAT}")
    return stored.entries
