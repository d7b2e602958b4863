"""Pins: prefixes that eviction leaves alone for a bounded time.

A pin takes three steps: it reserves bytes of its group's budget, it is stored as a document, and its locations are
marked in their records (`pinned_until`). The reclaimer of every manager reads the mark in the record that it compares
and sets, so it needs no knowledge of pins. Only eviction respects pins; a removal does not. A pin names locations and
not blocks: a later location of a block is neither in the budget nor pinned.

1. A mark until t belongs to a document whose deadline is at least t, and every document is in the budget. A pin ends in
   the reverse order, so marks never exceed the budget.
2. Every step expires by itself at the deadline, also when the manager dies before the next one. A pin that ends early
   has that in its document first: every manager that finds it carries it out.
3. The end of a pin sets its marks by the documents that are left, then reads these again: a pin that another manager
   began meanwhile relied on the mark, and gets it back some milliseconds later, or from the manager that takes over.
4. The budget of a group is one small document, changed by compare-and-set only: of two pins that together exceed it one
   is rejected, on any two managers. Expired entries do not count and leave with the next change, so a manager that dies
   between reserving and pinning costs budget for the life of that pin.

Rejected: the ledger's leased credits, made for thousands of reservations a second. Pins are few, and small differences
between managers would be visible to users that pin right up to a budget.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import uniform
from typing import NamedTuple

import msgspec
import structlog

from kvcm.cache.instance_cache import InstanceCache, batches
from kvcm.index.locking import uninterrupted
from kvcm.index.search_cache import StorageView
from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.groups import InstanceGroup
from kvcm.model.keys import encode_keys, mixed
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.uri import check_name
from kvcm.store.store import Table

__all__ = [
    "MAX_PIN_SECONDS",
    "Pin",
    "PinBudgets",
    "PinEntry",
    "PinRequest",
    "PinnedLocation",
    "PinnedLocations",
    "Pins",
]

# Values of pins, and how a pin is stored.

MAX_PIN_SECONDS = 30 * 86400
_PIN_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PinRequest:
    """What somebody wants to be kept.

    Attributes:
        keys: block keys of a prefix, in order.
        owner: who wants it, for people.
        ttl_seconds: for how long.
    """

    keys: Sequence[int]
    owner: str
    ttl_seconds: int

    def check(self) -> None:
        """Refuse missing fields, and those out of range.

        Raises:
            InvalidArgumentError: naming the field and the allowed values.
        """
        check_name("owner", self.owner)
        if not 1 <= self.ttl_seconds <= MAX_PIN_SECONDS:
            raise InvalidArgumentError(
                f"ttl_seconds is {self.ttl_seconds}, must be from 1 to {MAX_PIN_SECONDS} (30 days)"
            )


class PinnedLocation(NamedTuple):
    """A location that a pin holds."""

    key: int
    location_id: str
    size_bytes: int


class PinnedLocations(NamedTuple):
    """What a pin holds, in the order of the prefix. Packed, since ending one pin reads all those of its instance.

    Attributes:
        keys: of the blocks, mixed, as 64-bit numbers.
        sizes: in bytes, likewise.
        location_ids: one for each.
    """

    keys: bytes
    sizes: bytes
    location_ids: tuple[str, ...]

    @classmethod
    def of(cls, places: Sequence[PinnedLocation]) -> PinnedLocations:
        """Pack places."""
        return cls(
            array("q", (place.key for place in places)).tobytes(),
            array("q", (place.size_bytes for place in places)).tobytes(),
            tuple(place.location_id for place in places),
        )

    def batches(self, size: int) -> Iterator[list[tuple[int, str]]]:
        """Yield keys with location ids, so many at a time."""
        keys = array("q", self.keys)
        for start in range(0, len(keys), size):
            yield list(zip(keys[start : start + size], self.location_ids[start : start + size], strict=True))


class _PinDocument(msgspec.Struct, array_like=True, frozen=True):
    version: int
    uid: int
    group: str
    owner: str
    deadline: float
    is_ended: bool
    keys: bytes
    sizes: bytes
    location_ids: tuple[str, ...]


_pin_encoder = msgspec.msgpack.Encoder()
_pin_decoder = msgspec.msgpack.Decoder(_PinDocument)


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin.

    Attributes:
        id: names it; no secret.
        uid: number of the instance.
        group: the instance's group, whose budget it takes.
        owner: name of the principal that pinned.
        deadline: unix seconds.
        pinned: what it holds.
        is_ended: it ends before its deadline, and holds nothing any more.
    """

    id: str
    uid: int
    group: str
    owner: str
    deadline: float
    pinned: PinnedLocations
    is_ended: bool = False

    @property
    def pinned_locations(self) -> tuple[PinnedLocation, ...]:
        """What it holds, in the order of the prefix."""
        keys, sizes = array("q", self.pinned.keys), array("q", self.pinned.sizes)
        return tuple(map(PinnedLocation._make, zip(keys, self.pinned.location_ids, sizes, strict=True)))

    @property
    def size_bytes(self) -> int:
        """Bytes of what it holds."""
        return sum(array("q", self.pinned.sizes))

    @property
    def block_count(self) -> int:
        """Blocks that it holds."""
        return len(set(array("q", self.pinned.keys)))

    @property
    def last_key(self) -> int:
        """Last block of the prefix, 0 when it holds nothing."""
        return array("q", self.pinned.keys)[-1] if self.pinned.keys else 0

    def with_pinned(self, places: Sequence[PinnedLocation]) -> Pin:
        """Return the pin with other places."""
        return replace(self, pinned=PinnedLocations.of(places))

    def encoded(self) -> bytes:
        """Return the pin's document; its id is the document's name."""
        return _pin_encoder.encode(
            _PinDocument(
                version=_PIN_FORMAT,
                uid=self.uid,
                group=self.group,
                owner=self.owner,
                deadline=self.deadline,
                is_ended=self.is_ended,
                keys=encode_keys(array("q", self.pinned.keys)),
                sizes=self.pinned.sizes,
                location_ids=self.pinned.location_ids,
            )
        )

    @classmethod
    def decoded(cls, pin_id: str, document: bytes) -> Pin:
        """Read what `encoded` wrote.

        Raises:
            StorageIOError: it is damaged or of another release.
        """
        try:
            stored = _pin_decoder.decode(document)
        except msgspec.MsgspecError as error:
            raise StorageIOError(f"a stored pin cannot be read: {error}") from error
        if stored.version != _PIN_FORMAT:
            raise StorageIOError(f"a stored pin has format {stored.version}, this release knows {_PIN_FORMAT}")
        if not len(stored.keys) == len(stored.sizes) == 8 * len(stored.location_ids):
            raise StorageIOError("a stored pin cannot be read: it has not one size and one location id for each key")
        keys = array("q", mixed(array("q", stored.keys))).tobytes()
        held = PinnedLocations(keys, stored.sizes, stored.location_ids)
        return cls(pin_id, stored.uid, stored.group, stored.owner, stored.deadline, held, stored.is_ended)


# Budgets.

_BUDGET_FORMAT = 1
_MOST_BUDGET_ATTEMPTS = 32
_MOST_PINS = 4096  # of a group: its document is read and written with each
_MOST_DUE_BUDGETS = 1024
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


PinEntries = dict[str, PinEntry]


class _BudgetDocument(msgspec.Struct, array_like=True, frozen=True):
    version: int
    entries: PinEntries


_budget_encoder = msgspec.msgpack.Encoder()
_budget_decoder = msgspec.msgpack.Decoder(_BudgetDocument)


class PinBudgets:
    """The budgets of all groups.

    Args:
        table: one document per group.
        clock: time source.
    """

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def entries(self, group: str) -> PinEntries:
        """Return what the pins of a group take now, by pin id.

        Raises:
            StorageIOError: the store failed, or the document cannot be read.
        """
        return self._unexpired(_decode_entries(await self._table.get(group)))

    async def reserve(self, group: InstanceGroup, pin_id: str, entry: PinEntry) -> None:
        """Take bytes for a new pin.

        Raises:
            CapacityError: the group's budget does not allow them.
            NotReadyError: other managers keep changing the budget.
        """

        def add(entries: PinEntries) -> PinEntries:
            others = {each: kept for each, kept in entries.items() if each != pin_id}
            _check_budget(group, others, entry)
            return {**others, pin_id: entry}

        await self._change(group.name, add)

    async def shrink(self, group: str, pin_id: str, size_bytes: int) -> None:
        """Give back what a pin turned out not to hold; 0 gives all of it back.

        Raises:
            NotReadyError: other managers keep changing the budget.
        """

        def lower(entries: PinEntries) -> PinEntries:
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
        """Forget expired reservations."""
        now = self._clock.now()
        for group in await self._table.due(now, _MOST_DUE_BUDGETS) if self._table.due_from <= now else ():
            try:
                await self._change(group, lambda entries: entries)
            except KvcmError as error:
                _log.warning("pin_budget_not_cleared", group=group, reason=str(error))
                await self._postpone(group)

    async def _postpone(self, group: str) -> None:
        """Come back to a budget later: it must not hold up others, nor fill the log."""
        with suppress(StorageIOError):
            document = await self._table.get(group)
            if document is not None:
                await self._table.replace(group, document, document, self._clock.now() + _PUT_OFF_SECONDS)

    def _unexpired(self, entries: PinEntries) -> PinEntries:
        now = self._clock.now()
        return {pin_id: entry for pin_id, entry in entries.items() if entry.deadline > now}

    async def _change(self, group: str, change: Callable[[PinEntries], PinEntries]) -> None:
        pause = 0.0
        for _ in range(_MOST_BUDGET_ATTEMPTS):
            document = await self._table.get(group)
            entries = _decode_entries(document)
            changed = change(self._unexpired(entries))
            if changed == entries:
                return
            due = min((entry.deadline for entry in changed.values()), default=0.0)
            if await self._table.replace(group, document, _encode_entries(changed), due):
                return
            await asyncio.sleep(uniform(0, pause))  # noqa: S311 - spreads managers in time
            pause = min(_LONGEST_PAUSE_SECONDS, 2 * pause + 0.001)
        raise NotReadyError(f"other managers keep changing the pins of group {group!r}: retry shortly")


def _check_budget(group: InstanceGroup, others: PinEntries, entry: PinEntry) -> None:
    pinned = sum(other.size_bytes for other in others.values())
    if pinned + entry.size_bytes > group.pin_budget_bytes:
        raise CapacityError(
            f"pin_budget_bytes of group {group.name!r} is {group.pin_budget_bytes}, {pinned} bytes are pinned: "
            f"{entry.size_bytes} more do not fit; unpin some or let them expire"
        )
    if len(others) >= _MOST_PINS:
        raise CapacityError(f"group {group.name!r} has {_MOST_PINS} pins: unpin some or let them expire")


def _encode_entries(entries: PinEntries) -> bytes | None:
    return _budget_encoder.encode(_BudgetDocument(_BUDGET_FORMAT, entries)) if entries else None


def _decode_entries(document: bytes | None) -> PinEntries:
    if document is None:
        return {}
    try:
        stored = _budget_decoder.decode(document)
    except msgspec.MsgspecError as error:
        raise StorageIOError(f"a stored pin budget cannot be read: {error}") from error
    if stored.version != _BUDGET_FORMAT:
        raise StorageIOError(f"a stored pin budget has format {stored.version}, this release knows {_BUDGET_FORMAT}")
    return stored.entries


_MOST_PIN_ATTEMPTS = 16
_MOST_DUE_PINS = 1024
_READ_AT_ONCE = 32
_LOCATIONS_AT_ONCE = 4096
_TAKEOVER_SECONDS = 5.0  # then the search for due pins takes over an early end
_FindCache = Callable[[int], Awaitable[InstanceCache | None]]


class Pins:
    """The pins of all instances.

    Args:
        table: where they are stored.
        budgets: what they take of their groups.
        find: from the number of an instance to its cache; None when it is gone for good.
        view: which storages can be read.
        clock: time source.
        new_id: makes ids that no other pin has.
    """

    def __init__(
        self,
        table: Table,
        budgets: PinBudgets,
        find: _FindCache,
        view: StorageView,
        clock: Clock,
        new_id: Callable[[], str],
    ) -> None:
        self._table = table
        self._budgets = budgets
        self._find = find
        self._view = view
        self._clock = clock
        self._new_id = new_id
        # Managers race through the store; within one, the pins of a group take turns.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def pin(self, cache: InstanceCache, group: InstanceGroup, request: PinRequest) -> Pin | None:
        """Pin the longest prefix of the keys that can be read.

        Returns:
            What really is pinned; None when nothing can be read.

        Raises:
            InvalidArgumentError: owner or time is not allowed.
            CapacityError: the group's budget does not allow it.
            NotReadyError: other managers keep changing the same pins.
            StorageIOError: the store failed; the begun marks are removed now or ends at the deadline.
        """
        request.check()
        async with self._turns[group.name]:
            found = await self._readable(cache, request.keys)
            if not found:
                return None
            deadline = self._clock.now() + request.ttl_seconds
            pin = Pin(
                self._new_id(),
                cache.placement.uid,
                group=group.name,
                owner=request.owner,
                deadline=deadline,
                pinned=PinnedLocations.of(found),
            )
            try:
                return await self._begin(cache, group, pin)
            except CapacityError:
                raise  # nothing was begun
            except BaseException:
                # The client did not get its id; ListPins would show a pin that its owner does not know.
                with suppress(KvcmError):
                    await uninterrupted(self._end(cache, pin))
                raise

    async def restore(self, cache: InstanceCache, group: InstanceGroup, pin: Pin) -> Pin | None:
        """Begin a pin of another store again, or go on with one that was begun so and cut off.

        Args:
            cache: of the pin's instance.
            group: of that.
            pin: with the number of the instance here.

        Returns:
            What it holds now, its own locations that are left; None when it holds nothing, or has ended.

        Raises:
            CapacityError: the group's budget does not allow it.
            NotReadyError: as `pin`.
            StorageIOError: the store failed.
        """
        async with self._turns[group.name]:
            document = await self._table.get(pin.id)
            if document is None:
                return await self._begin(cache, group, pin)
            begun = Pin.decoded(pin.id, document)
            if begun.is_ended or begun.uid != pin.uid:
                return None
            return await self._pin_readable(cache, begun)

    async def unpin(self, cache: InstanceCache, pin_id: str) -> None:
        """End a pin. One that has ended already is fine.

        Raises:
            InvalidArgumentError: it is a pin of another instance.
            StorageIOError: the store failed; the pin may have ended, or end later.
        """
        document = await self._table.get(pin_id)
        if document is None:
            return
        pin = Pin.decoded(pin_id, document)
        if pin.uid != cache.placement.uid:
            raise InvalidArgumentError(f"pin_id is {pin_id!r}, a pin of another instance")
        async with self._turns[pin.group]:
            await uninterrupted(self._end(cache, pin))

    async def of_instance(self, cache: InstanceCache) -> list[Pin]:
        """Return the pins of an instance, those that end first first."""
        pins = [pin async for pin in self._all_of(cache.instance.instance_group_name, cache.placement.uid)]
        return sorted(pins, key=lambda pin: (pin.deadline, pin.id))

    async def pinned_bytes(self, group: str) -> int:
        """Return the bytes that the pins of a group hold; where they overlap each counts."""
        return sum(entry.size_bytes for entry in (await self._budgets.entries(group)).values())

    async def remove_instance(self, cache: InstanceCache) -> None:
        """Drop the pins of an instance that was removed, and all its blocks with it."""
        for pin_id in await self._budgets.drop_instance(cache.instance.instance_group_name, cache.placement.uid):
            await self._remove(pin_id)

    async def expire(self) -> None:
        """Drop the pins whose deadline has passed, and carry out early ends that were cut off."""
        now = self._clock.now()
        for pin_id in await self._table.due(now, _MOST_DUE_PINS) if self._table.due_from <= now else ():
            try:
                await self._end_due(pin_id)
            except KvcmError as error:
                _log.warning("pin_not_ended", pin=pin_id, reason=str(error))
                await self._postpone(pin_id)
        await self._budgets.expire()

    async def _readable(self, cache: InstanceCache, keys: Sequence[int]) -> tuple[PinnedLocation, ...]:
        """Return the serving locations of the blocks before the first that cannot be read."""
        found: list[PinnedLocation] = []
        for page in batches(list(dict.fromkeys(keys)), cache.batch_keys):
            for key, record in zip(page, await cache.index.get(page), strict=True):
                serving = [place for place in record.locations if _serves(place)] if record is not None else []
                if not self._can_read(serving):
                    return tuple(found)
                found += [PinnedLocation(key, place.id, place.size_bytes) for place in serving]
            await asyncio.sleep(0)
        return tuple(found)

    def _can_read(self, locations: Sequence[Location]) -> bool:
        return any(self._view.rank(location.storage) is not None for location in locations)

    async def _begin(self, cache: InstanceCache, group: InstanceGroup, pin: Pin) -> Pin | None:
        await self._budgets.reserve(group, pin.id, PinEntry(pin.uid, pin.size_bytes, pin.deadline))
        if not await self._table.replace(name=pin.id, old=None, new=pin.encoded(), due=pin.deadline):
            raise NotReadyError("the id of the new pin is taken: pin again")
        return await self._pin_readable(cache, pin)

    async def _pin_readable(self, cache: InstanceCache, pin: Pin) -> Pin | None:
        """Mark the blocks of a stored pin, and give back those that are not there any more."""
        held = pin.with_pinned(await self._mark(cache, pin))
        if held != pin:
            return await self._shrink(cache, pin, held)
        if await self._table.get(pin.id) != pin.encoded():
            raise NotReadyError("the pin was ended while it began: pin again")
        return pin

    async def _mark(self, cache: InstanceCache, pin: Pin) -> tuple[PinnedLocation, ...]:
        """Mark the records; return what is marked of the blocks before the first that cannot be read any more."""
        ids, now = _by_key(pin.pinned_locations), self._clock.now()

        def mark(key: int, old: BlockRecord | None) -> BlockRecord | None:
            return _mark_locations(old, ids[key], lambda location: max(location.pinned_until, pin.deadline), now)

        held: list[PinnedLocation] = []
        is_prefix = True
        for page in batches(list(ids), cache.batch_keys):
            for key, _, new, _ in await cache.index.read_modify_write(page, mark):
                places = new.locations if new is not None else ()
                marked = [place for place in places if _serves(place) and place.id in ids[key]]
                is_prefix = is_prefix and self._can_read(marked)
                if is_prefix:
                    held += [PinnedLocation(key, place.id, place.size_bytes) for place in marked]
            if not is_prefix:
                break
            await asyncio.sleep(0)
        return tuple(held)

    async def _shrink(self, cache: InstanceCache, pin: Pin, held: Pin) -> Pin | None:
        """Give back the blocks that were not there any more."""
        if not held.pinned.keys:
            await self._end(cache, pin)
            return None
        if not await self._table.replace(pin.id, pin.encoded(), held.encoded(), held.deadline):
            raise NotReadyError("the pin was ended while it began: pin again")
        await self._unmark(cache, pin)
        await self._budgets.shrink(pin.group, pin.id, held.size_bytes)
        return held

    async def _end(self, cache: InstanceCache | None, pin: Pin) -> None:
        """End a pin before its time, also one whose document was not stored. Doing this twice changes nothing."""
        due = self._clock.now() + _TAKEOVER_SECONDS
        for _ in range(_MOST_PIN_ATTEMPTS):
            document = await self._table.get(pin.id)
            if document is None:
                break
            ended = replace(Pin.decoded(pin.id, document), is_ended=True)
            if await self._table.replace(pin.id, document, ended.encoded(), due):
                break
        if cache is not None:
            await self._unmark(cache, pin)
        await self._budgets.shrink(pin.group, pin.id, 0)
        await self._remove(pin.id)

    async def _unmark(self, cache: InstanceCache, pin: Pin) -> None:
        """Set the marks of a pin's locations by the documents that there are."""
        ids, now = _by_key(pin.pinned_locations), self._clock.now()
        deadlines = await self._deadlines(pin)

        def settle(key: int, old: BlockRecord | None) -> BlockRecord | None:
            return _mark_locations(old, ids[key], lambda location: deadlines.get((key, location.id), 0.0), now)

        for _ in range(_MOST_PIN_ATTEMPTS):
            for page in batches(list(ids), cache.batch_keys):
                await cache.index.read_modify_write(page, settle)
                await asyncio.sleep(0)
            before, deadlines = deadlines, await self._deadlines(pin)
            if deadlines == before:
                return
        raise NotReadyError("other managers keep changing the pins of the same blocks: retry shortly")

    async def _deadlines(self, pin: Pin) -> dict[tuple[int, str], float]:
        """Return until when documents hold the locations of a pin, the latest each."""
        wanted = {at for page in pin.pinned.batches(_LOCATIONS_AT_ONCE) for at in page}
        deadlines: dict[tuple[int, str], float] = {}
        async for other in self._all_of(pin.group, pin.uid):
            for page in other.pinned.batches(_LOCATIONS_AT_ONCE):
                for at in wanted.intersection(page):
                    deadlines[at] = max(other.deadline, deadlines.get(at, 0.0))
                await asyncio.sleep(0)
        return deadlines

    async def _all_of(self, group: str, uid: int) -> AsyncIterator[Pin]:
        """Yield the pins of an instance; each is read when other requests have had their turn."""
        ids = [pin_id for pin_id, entry in (await self._budgets.entries(group)).items() if entry.uid == uid]
        for start in range(0, len(ids), _READ_AT_ONCE):
            some = ids[start : start + _READ_AT_ONCE]
            for pin_id, document in zip(some, await asyncio.gather(*map(self._table.get, some)), strict=True):
                pin = _readable_pin(pin_id, document)
                if pin is not None and not pin.is_ended:
                    yield pin
                await asyncio.sleep(0)

    async def _end_due(self, pin_id: str) -> None:
        pin = _readable_pin(pin_id, await self._table.get(pin_id))
        if pin is None or pin.deadline <= self._clock.now():
            await self._remove(pin_id)
        elif pin.is_ended:
            await self._end(await self._find(pin.uid), pin)

    async def _postpone(self, pin_id: str) -> None:
        """Retry a pin later, so that one that cannot be ended now does not hide those due behind it."""
        with suppress(StorageIOError):
            document = await self._table.get(pin_id)
            if document is not None:
                await self._table.replace(pin_id, document, document, self._clock.now() + _TAKEOVER_SECONDS)

    async def _remove(self, pin_id: str) -> None:
        document = await self._table.get(pin_id)
        if document is not None:
            await self._table.replace(pin_id, document, None)


def _readable_pin(pin_id: str, document: bytes | None) -> Pin | None:
    try:
        return Pin.decoded(pin_id, document) if document is not None else None
    except StorageIOError as error:  # its blocks are unknown; it must not block the others
        _log.warning("pin_unreadable", pin=pin_id, reason=str(error))
        return None


def _serves(location: Location) -> bool:
    return location.status is LocationStatus.SERVING


def _by_key(places: Sequence[PinnedLocation]) -> dict[int, set[str]]:
    ids: defaultdict[int, set[str]] = defaultdict(set)
    for place in places:
        ids[place.key].add(place.location_id)
    return dict(ids)


def _mark_locations(
    old: BlockRecord | None, ids: Collection[str], until: Callable[[Location], float], now: float
) -> BlockRecord | None:
    """Set the marks of those locations that serve."""

    def change(location: Location) -> Location:
        if not _serves(location) or location.id not in ids:
            return location
        mark = until(location)
        # One whose time is up waits for the end of its pin (its deadline is that end), so both move together.
        waits = location.deadline > 0 and location.deadline == location.pinned_until
        return location._replace(pinned_until=mark, deadline=max(mark, now) if waits else location.deadline)

    if old is None:
        return None
    locations = tuple(map(change, old.locations))
    return old if locations == old.locations else old._replace(locations=locations)
