"""Pins: prefixes that eviction leaves alone for a bounded time.

A pin takes three steps: it takes bytes of its group's budget, it is stored as a document, and the locations that it
holds are marked in their records (`pinned_until`). The reclaimer goes by the mark: it is in the record that is compared
and set, on whatever manager it runs, so nobody evicts a pinned location for not having heard of the pin. Only eviction
respects it: whoever removes a block means it. A pin names locations, not blocks: one that a block gets later is not in
the budget, and is not held.

1. What is marked until t is named by a document whose deadline is t at least, and every document is in the budget.
   Ending a pin goes the other way round, so what is marked never exceeds the budget.
2. Every step ends by itself at the deadline, also when the manager dies before the next one. A pin that ends early says
   so in its document first: whoever finds that carries it out.
3. Whoever ends a pin sets its marks by the documents that are left, then looks at these again: a pin that another
   manager began meanwhile counted on the mark, and gets it back, some milliseconds later. If this manager dies just
   then, from whoever carries the end out.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.pages import pages
from kvcm.cache.pin_budget import PinBudgets, PinEntry
from kvcm.cache.pin_values import HeldPlace, HeldPlaces, Pin, PinRequest
from kvcm.index.answers import StorageView
from kvcm.index.uninterrupted import uninterrupted
from kvcm.model.clock import Clock
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.groups import InstanceGroup
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.store.store import Table

__all__ = ["Pin", "PinRequest", "Pins"]

_MOST_ATTEMPTS = 16
_MOST_DUE = 1024
_READ_AT_ONCE = 32
_PLACES_AT_ONCE = 4096
_CARRY_OUT_SECONDS = 5.0  # then whoever looks for due pins takes an early end over

_log = structlog.get_logger("kvcm.cache")

Find = Callable[[int], Awaitable[InstanceCache | None]]


class Pins:
    """The pins of all instances.

    Args:
        table: where they are stored.
        budgets: what they take of their groups.
        find: from the number of an instance to what is kept for it; None when it is gone for good.
        view: which storages can be read.
        clock: time source.
        new_id: makes ids that no other pin has.
    """

    def __init__(
        self,
        table: Table,
        budgets: PinBudgets,
        find: Find,
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
            StorageIOError: the store failed; what was begun is taken back now or ends at the deadline.
        """
        request.check()
        async with self._turns[group.name]:
            found = await self._readable(cache, request.keys)
            if not found:
                return None
            deadline = self._clock.now() + request.ttl_seconds
            pin = Pin(self._new_id(), cache.placement.uid, group.name, request.owner, deadline, HeldPlaces.of(found))
            try:
                return await self._begin(cache, group, pin)
            except CapacityError:
                raise  # nothing was begun
            except BaseException:
                # Nobody was told its id; ListPins would show a pin that its owner does not know.
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
            return await self._hold(cache, begun)

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

    async def forget(self, cache: InstanceCache) -> None:
        """Drop the pins of an instance that was removed, and all its blocks with it."""
        for pin_id in await self._budgets.drop_instance(cache.instance.instance_group_name, cache.placement.uid):
            await self._drop(pin_id)

    async def expire(self) -> None:
        """Drop the pins whose deadline has passed, and carry out early ends that were cut off."""
        for pin_id in await self._table.due(self._clock.now(), _MOST_DUE):
            try:
                await self._end_due(pin_id)
            except KvcmError as error:
                _log.warning("pin_not_ended", pin=pin_id, reason=str(error))
                await self._put_off(pin_id)
        await self._budgets.expire()

    async def _readable(self, cache: InstanceCache, keys: Sequence[int]) -> tuple[HeldPlace, ...]:
        """Return the serving locations of the blocks before the first that cannot be read."""
        found: list[HeldPlace] = []
        for page in pages(list(dict.fromkeys(keys)), cache.page_keys):
            for key, record in zip(page, await cache.index.get(page), strict=True):
                serving = [place for place in record.locations if _serves(place)] if record is not None else []
                if not self._can_read(serving):
                    return tuple(found)
                found += [HeldPlace(key, place.id, place.size_bytes) for place in serving]
            await asyncio.sleep(0)
        return tuple(found)

    def _can_read(self, locations: Sequence[Location]) -> bool:
        return any(self._view.rank(location.storage) is not None for location in locations)

    async def _begin(self, cache: InstanceCache, group: InstanceGroup, pin: Pin) -> Pin | None:
        await self._budgets.take(group, pin.id, PinEntry(pin.uid, pin.size_bytes, pin.deadline))
        if not await self._table.replace(pin.id, None, pin.encoded(), pin.deadline):
            raise NotReadyError("the id of the new pin is taken: pin again")
        return await self._hold(cache, pin)

    async def _hold(self, cache: InstanceCache, pin: Pin) -> Pin | None:
        """Mark what a stored pin holds, and give back what is not there any more."""
        held = pin.holding(await self._mark(cache, pin))
        if held != pin:
            return await self._shrink(cache, pin, held)
        if await self._table.get(pin.id) != pin.encoded():
            raise NotReadyError("the pin was ended while it began: pin again")
        return pin

    async def _mark(self, cache: InstanceCache, pin: Pin) -> tuple[HeldPlace, ...]:
        """Mark the records; return what is marked of the blocks before the first that cannot be read any more."""
        ids, now = _by_key(pin.places), self._clock.now()

        def mark(key: int, old: BlockRecord | None) -> BlockRecord | None:
            return _changed(old, ids[key], lambda location: max(location.pinned_until, pin.deadline), now)

        held: list[HeldPlace] = []
        is_prefix = True
        for page in pages(list(ids), cache.page_keys):
            for key, _, new, _ in await cache.index.read_modify_write(page, mark):
                places = new.locations if new is not None else ()
                marked = [place for place in places if _serves(place) and place.id in ids[key]]
                is_prefix = is_prefix and self._can_read(marked)
                if is_prefix:
                    held += [HeldPlace(key, place.id, place.size_bytes) for place in marked]
            if not is_prefix:
                break
            await asyncio.sleep(0)
        return tuple(held)

    async def _shrink(self, cache: InstanceCache, pin: Pin, held: Pin) -> Pin | None:
        """Give back what was not there any more."""
        if not held.held.keys:
            await self._end(cache, pin)
            return None
        if not await self._table.replace(pin.id, pin.encoded(), held.encoded(), held.deadline):
            raise NotReadyError("the pin was ended while it began: pin again")
        await self._settle(cache, pin)
        await self._budgets.lower(pin.group, pin.id, held.size_bytes)
        return held

    async def _end(self, cache: InstanceCache | None, pin: Pin) -> None:
        """End a pin before its time, also one whose document was not stored. Doing this twice changes nothing."""
        due = self._clock.now() + _CARRY_OUT_SECONDS
        for _ in range(_MOST_ATTEMPTS):
            document = await self._table.get(pin.id)
            if document is None:
                break
            ended = replace(Pin.decoded(pin.id, document), is_ended=True)
            if await self._table.replace(pin.id, document, ended.encoded(), due):
                break
        if cache is not None:
            await self._settle(cache, pin)
        await self._budgets.lower(pin.group, pin.id, 0)
        await self._drop(pin.id)

    async def _settle(self, cache: InstanceCache, pin: Pin) -> None:
        """Set the marks of a pin's locations by the documents that there are."""
        ids, now = _by_key(pin.places), self._clock.now()
        deadlines = await self._deadlines(pin)

        def settle(key: int, old: BlockRecord | None) -> BlockRecord | None:
            return _changed(old, ids[key], lambda location: deadlines.get((key, location.id), 0.0), now)

        for _ in range(_MOST_ATTEMPTS):
            for page in pages(list(ids), cache.page_keys):
                await cache.index.read_modify_write(page, settle)
                await asyncio.sleep(0)
            before, deadlines = deadlines, await self._deadlines(pin)
            if deadlines == before:
                return
        raise NotReadyError("other managers keep changing the pins of the same blocks: retry shortly")

    async def _deadlines(self, pin: Pin) -> dict[tuple[int, str], float]:
        """Return until when documents hold the locations of a pin, the latest each."""
        wanted = {at for page in pin.held.pages(_PLACES_AT_ONCE) for at in page}
        deadlines: dict[tuple[int, str], float] = {}
        async for other in self._all_of(pin.group, pin.uid):
            for page in other.held.pages(_PLACES_AT_ONCE):
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
            await self._drop(pin_id)
        elif pin.is_ended:
            await self._end(await self._find(pin.uid), pin)

    async def _put_off(self, pin_id: str) -> None:
        """Come back to a pin later, so that what cannot be ended now does not hide what is due behind it."""
        with suppress(StorageIOError):
            document = await self._table.get(pin_id)
            if document is not None:
                await self._table.replace(pin_id, document, document, self._clock.now() + _CARRY_OUT_SECONDS)

    async def _drop(self, pin_id: str) -> None:
        document = await self._table.get(pin_id)
        if document is not None:
            await self._table.replace(pin_id, document, None)


def _readable_pin(pin_id: str, document: bytes | None) -> Pin | None:
    try:
        return Pin.decoded(pin_id, document) if document is not None else None
    except StorageIOError as error:  # nobody can tell what it holds; it must not hold up the others
        _log.warning("pin_unreadable", pin=pin_id, reason=str(error))
        return None


def _serves(location: Location) -> bool:
    return location.status is LocationStatus.SERVING


def _by_key(places: Sequence[HeldPlace]) -> dict[int, set[str]]:
    ids: defaultdict[int, set[str]] = defaultdict(set)
    for place in places:
        ids[place.key].add(place.location_id)
    return dict(ids)


def _changed(
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
