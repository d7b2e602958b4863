"""Pins that something comes between: blocks removed, the pin ended by somebody else, a store that fails half way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import pytest
from cache_rig import Rig, group, opened

from kvcm.cache.pin_budget import PinBudgets
from kvcm.cache.pins import Pin, PinRequest, Pins
from kvcm.model.errors import NotReadyError, StorageIOError
from kvcm.model.masks import NO_MASK
from kvcm.store.store import Table

BLOCK = 20
KEYS = [1, 2, 3]
GROUP = replace(group(delay_ms=0), pin_budget_bytes=10 * BLOCK)

Hook = Callable[[], Awaitable[object]]


async def nothing() -> None:
    return None


async def fails() -> None:
    raise StorageIOError("the store is away")


class Interrupted:
    """A table at one of whose calls something happens, before or after it takes effect."""

    def __init__(self, inner: Table, number: int = -1, hook: Hook = nothing, *, late: bool = False) -> None:
        self._inner = inner
        self._number = number
        self._hook = hook
        self._late = late
        self.calls = 0

    async def _happens(self, *, late: bool) -> None:
        if late is self._late and self.calls == self._number:
            self.calls += 1  # what happens may call, too
            await self._hook()
        elif late:
            self.calls += 1

    async def get(self, name: str) -> bytes | None:
        await self._happens(late=False)
        document = await self._inner.get(name)
        await self._happens(late=True)
        return document

    async def all(self) -> Mapping[str, bytes]:
        return await self._inner.all()

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        await self._happens(late=False)
        replaced = await self._inner.replace(name, old, new, due)
        await self._happens(late=True)
        return replaced

    async def due(self, now: float, most: int) -> list[str]:
        return await self._inner.due(now, most)

    async def version(self) -> int:
        return await self._inner.version()


def interrupted_pins(rig: Rig, pins: Interrupted, budgets: Table) -> Pins:
    """Pins of another manager on the same store."""

    async def find(_uid: int) -> None:
        raise AssertionError("nobody looks for what is due")

    return Pins(pins, PinBudgets(budgets, rig.clock), find, rig.storages, rig.clock, lambda: "mine")


async def begin(rig: Rig, number: int, hook: Hook) -> Pin | None:
    """Pin all blocks; at a call to the table of pins the hook comes between."""
    table = Interrupted(rig.tables.table("pins"), number, hook)
    pins = interrupted_pins(rig, table, rig.tables.table("pinbudgets"))
    return await pins.pin(rig.manager.cache("i"), GROUP, PinRequest(KEYS, "me", 100))


async def marks(rig: Rig) -> list[list[float]]:
    now = rig.clock.now()
    records = await rig.manager.cache("i").index.get(KEYS)
    return [[max(0.0, place.pinned_until - now) for place in record.locations] if record else [] for record in records]


async def documents(rig: Rig) -> list[str]:
    return [name for table in ("pins", "pinbudgets") for name in await rig.tables.table(table).all()]


async def test_blocks_removed_between_look_and_mark_are_not_counted() -> None:
    with opened(GROUP) as rig:
        await rig.store(KEYS)
        pinned = await begin(rig, 0, lambda: rig.manager.remove("i", [2], NO_MASK))
        assert pinned is not None
        assert (pinned.block_count, pinned.size_bytes) == (1, BLOCK)
        assert await marks(rig) == [[100], [0], [0]]
        assert await rig.manager.pins.pinned_bytes("group") == BLOCK
        assert await rig.manager.pins.of_instance(rig.manager.cache("i")) == [pinned]


async def test_a_location_that_came_after_the_look_is_not_pinned() -> None:
    with opened(GROUP) as rig:
        await rig.store(KEYS)
        pinned = await begin(rig, 0, lambda: rig.store(KEYS[:1], min_replica_count=2))
        assert pinned is not None
        assert (pinned.block_count, pinned.size_bytes) == (3, 3 * BLOCK)
        assert await marks(rig) == [[100, 0], [100], [100]]
        await rig.manager.unpin("i", pinned.id)
        assert await marks(rig) == [[0, 0], [0], [0]]


@pytest.mark.parametrize("table", ["pins", "pinbudgets"])
async def test_what_is_marked_is_in_the_budget_at_every_moment(table: str) -> None:
    """Wherever a manager dies while it ends a pin or makes it smaller."""
    moments: list[tuple[float, int]] = []

    async def note(rig: Rig) -> None:
        marked = sum(BLOCK for places in await marks(rig) for left in places if left)
        moments.append((marked, await rig.manager.pins.pinned_bytes("group")))

    for number in range(12):
        with opened(GROUP) as rig:
            await rig.store(KEYS)
            longer = await begin(rig, 0, lambda: rig.manager.remove("i", [3], NO_MASK))
            assert longer is not None
            tables = {name: Interrupted(rig.tables.table(name)) for name in ("pins", "pinbudgets")}
            tables[table] = Interrupted(rig.tables.table(table), number, lambda: note(rig), late=True)
            await interrupted_pins(rig, tables["pins"], tables["pinbudgets"]).unpin(rig.manager.cache("i"), longer.id)
    assert {marked for marked, _ in moments} == {0, 2 * BLOCK}
    assert all(marked <= taken for marked, taken in moments), moments


async def test_a_pin_whose_first_block_was_removed_is_none() -> None:
    with opened(GROUP) as rig:
        await rig.store(KEYS)
        assert await begin(rig, 0, lambda: rig.manager.remove("i", [1], NO_MASK)) is None
        assert (await marks(rig), await documents(rig)) == ([[0], [0], [0]], [])


async def test_a_pin_that_was_ended_while_it_began_is_refused() -> None:
    with opened(GROUP) as rig:
        await rig.store(KEYS)
        with pytest.raises(NotReadyError, match="ended while it began"):
            await begin(rig, 1, lambda: rig.manager.unpin("i", "mine"))
        assert (await marks(rig), await documents(rig)) == ([[0], [0], [0]], [])


async def test_a_pin_that_begins_while_another_one_ends_keeps_its_marks() -> None:
    """It relied on the marks of the pin that ends, which was about to take them off."""
    with opened(GROUP) as rig:
        await rig.store(KEYS)
        longer = await begin(rig, -1, nothing)
        assert longer is not None
        begun: list[Pin | None] = []

        async def begin_another() -> None:
            begun.append(await rig.manager.pin("i", PinRequest(KEYS[:2], "other", 50)))

        budgets = Interrupted(rig.tables.table("pinbudgets"), 0, begin_another, late=True)  # has read what is left
        pins = interrupted_pins(rig, Interrupted(rig.tables.table("pins")), budgets)
        await pins.unpin(rig.manager.cache("i"), longer.id)
        assert await rig.manager.pins.of_instance(rig.manager.cache("i")) == begun
        assert await marks(rig) == [[50], [50], [0]]
        assert await rig.manager.pins.pinned_bytes("group") == 2 * BLOCK


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("table", ["pins", "pinbudgets"])
async def test_a_pin_that_fails_half_way_leaves_nothing(table: str, late: bool) -> None:
    """Whichever call to the store fails, done or not done."""
    for number in range(100):
        with opened(GROUP) as rig:
            await rig.store(KEYS)
            tables = {name: Interrupted(rig.tables.table(name)) for name in ("pins", "pinbudgets")}
            tables[table] = Interrupted(rig.tables.table(table), number, fails, late=late)
            pins = interrupted_pins(rig, tables["pins"], tables["pinbudgets"])
            try:
                pinned = await pins.pin(rig.manager.cache("i"), GROUP, PinRequest(KEYS, "me", 100))
            except StorageIOError:
                assert (await marks(rig), await documents(rig)) == ([[0], [0], [0]], [])
                continue
            assert pinned is not None
            assert tables[table].calls <= number
            assert number >= 2
            return
    raise AssertionError("it never succeeded")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("table", ["pins", "pinbudgets"])
async def test_an_unpin_that_fails_half_way_can_be_repeated(table: str, late: bool) -> None:
    for number in range(100):
        with opened(GROUP) as rig:
            await rig.store(KEYS)
            pinned = await begin(rig, -1, nothing)
            assert pinned is not None
            tables = {name: Interrupted(rig.tables.table(name)) for name in ("pins", "pinbudgets")}
            tables[table] = Interrupted(rig.tables.table(table), number, fails, late=late)
            pins = interrupted_pins(rig, tables["pins"], tables["pinbudgets"])
            try:
                await pins.unpin(rig.manager.cache("i"), pinned.id)
            except StorageIOError:
                await pins.unpin(rig.manager.cache("i"), pinned.id)
                assert (await marks(rig), await documents(rig)) == ([[0], [0], [0]], [])
                continue
            assert tables[table].calls <= number
            assert number >= 2
            return
    raise AssertionError("it never succeeded")
