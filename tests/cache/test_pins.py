"""Pins: what eviction leaves alone, for how long, what that takes of a budget, and pins that are interrupted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from cache_rig import Rig, group, opened

from kvcm.cache.pins import MAX_PIN_SECONDS, Pin, PinBudgets, PinRequest, Pins
from kvcm.cache.write_sessions import Retention
from kvcm.model.errors import CapacityError, InvalidArgumentError, NotReadyError, StorageIOError
from kvcm.model.keys import NO_MASK, BlockMask
from kvcm.store.store import Revision, Table

# ── Pins ──


BLOCK = 20
BUDGETED = replace(group(delay_ms=0), pin_budget_bytes=10 * BLOCK)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A manager whose group has a budget of pins."""
    with opened(BUDGETED) as made:
        yield made


async def pin(rig: Rig, keys: list[int], ttl_seconds: int = 100, owner: str = "me") -> Pin:
    pinned = await rig.manager.pin(rig.manager.cache("i"), PinRequest(keys, owner, ttl_seconds))
    assert pinned is not None
    return pinned


async def marks(rig: Rig, keys: list[int]) -> list[float]:
    """For how many seconds each block is still pinned, 0 for not at all."""
    now = rig.clock.now()
    records = await rig.manager.cache("i").index.get(keys)
    return [
        max(0.0, *(place.pinned_until - now for place in record.locations)) if record is not None else 0.0
        for record in records
    ]


async def pinned_bytes(rig: Rig) -> int:
    return await rig.manager.pins.pinned_bytes("group")


async def stored_names(rig: Rig) -> list[str]:
    """Names of the documents of pins and budgets."""
    return [name for table in ("pins", "pinbudgets") for name in await rig.tables.table(table).all()]


async def documents(rig: Rig) -> int:
    return len(await stored_names(rig))


async def test_the_longest_readable_prefix_is_pinned(rig: Rig) -> None:
    await rig.store([1, 2, 3, 5])
    await rig.start([4])
    pinned = await pin(rig, [1, 2, 3, 4, 5])
    assert (pinned.block_count, pinned.size_bytes, pinned.last_key) == (3, 3 * BLOCK, 3)
    assert pinned.deadline == rig.clock.now() + 100
    assert await marks(rig, [1, 2, 3, 4, 5]) == [100, 100, 100, 0, 0]
    assert await pinned_bytes(rig) == 3 * BLOCK
    assert await rig.manager.pins.of_instance(rig.manager.cache("i")) == [pinned]


async def test_nothing_readable_is_no_pin() -> None:
    with opened(replace(BUDGETED, pin_budget_bytes=0)) as rig:
        await rig.store([1])
        assert await rig.manager.pin(rig.manager.cache("i"), PinRequest([9, 1], "me", 100)) is None
        rig.enable("slow", enabled=False)
        rig.enable("slow2", enabled=False)
        assert await rig.manager.pin(rig.manager.cache("i"), PinRequest([1], "me", 100)) is None
        assert await documents(rig) == 0


async def test_a_repeated_key_counts_once(rig: Rig) -> None:
    await rig.store([1, 2])
    assert (await pin(rig, [1, 1, 2, 1])).block_count == 2


async def test_the_error_names_the_budget_and_the_pinned_bytes() -> None:
    with opened(replace(BUDGETED, pin_budget_bytes=3 * BLOCK)) as rig:
        await rig.store([1, 2])
        await pin(rig, [1, 2])
        with pytest.raises(
            CapacityError, match=r"pin_budget_bytes of group 'group' is 60, 40 bytes are pinned: 40 more"
        ):
            await pin(rig, [1, 2])
        assert await pinned_bytes(rig) == 2 * BLOCK
        await pin(rig, [1])
        assert await pinned_bytes(rig) == 3 * BLOCK


async def test_a_pin_ends_at_its_deadline_without_anybody_doing_anything() -> None:
    with opened(replace(BUDGETED, pin_budget_bytes=BLOCK)) as rig:
        await rig.store([1])
        await pin(rig, [1], 10)
        rig.wait(9.5)
        assert await marks(rig, [1]) == [0.5]
        with pytest.raises(CapacityError):
            await pin(rig, [1], 10)
        rig.wait(0.5)
        assert (await marks(rig, [1]), await pinned_bytes(rig)) == ([0], 0)
        assert await rig.manager.pins.of_instance(rig.manager.cache("i")) == []
        await pin(rig, [1], 10)


async def test_expired_pins_leave_the_store(rig: Rig) -> None:
    await rig.store([1])
    await pin(rig, [1], 10)
    await pin(rig, [1], 20)
    rig.wait(10)
    await rig.manager.expire()
    assert (await documents(rig), await pinned_bytes(rig)) == (2, BLOCK)
    rig.wait(10)
    await rig.manager.expire()
    assert await documents(rig) == 0


async def test_unpinning_leaves_the_latest_of_the_other_pins(rig: Rig) -> None:
    await rig.store([1, 2, 3])
    longest, middle, short = await pin(rig, [1, 2, 3], 100), await pin(rig, [1, 2], 50), await pin(rig, [1], 10)
    assert await marks(rig, [1, 2, 3]) == [100, 100, 100]
    await rig.manager.unpin(rig.manager.cache("i"), longest.id)
    assert await marks(rig, [1, 2, 3]) == [50, 50, 0]
    assert await pinned_bytes(rig) == 3 * BLOCK
    await rig.manager.unpin(rig.manager.cache("i"), short.id)
    assert await marks(rig, [1, 2, 3]) == [50, 50, 0]
    await rig.manager.unpin(rig.manager.cache("i"), middle.id)
    assert await marks(rig, [1, 2, 3]) == [0, 0, 0]
    assert await documents(rig) == 0


async def test_unpinning_again_is_fine(rig: Rig) -> None:
    await rig.store([1])
    pinned = await pin(rig, [1])
    await rig.manager.unpin(rig.manager.cache("i"), pinned.id)
    await rig.manager.unpin(rig.manager.cache("i"), pinned.id)
    await rig.manager.unpin(rig.manager.cache("i"), "never there")


async def test_only_the_own_instance_unpins(rig: Rig) -> None:
    await rig.store([1])
    pinned = await pin(rig, [1])
    await rig.manager.register_instance(replace(rig.manager.cache("i").instance, instance_id="other"))
    with pytest.raises(InvalidArgumentError, match="another instance"):
        await rig.manager.unpin(rig.manager.cache("other"), pinned.id)
    assert await rig.manager.pins.of_instance(rig.manager.cache("other")) == []
    assert await marks(rig, [1]) == [100]


async def test_pins_are_listed_by_their_end(rig: Rig) -> None:
    await rig.store([1, 2])
    late, early = await pin(rig, [1], 100, "late"), await pin(rig, [1, 2], 10, "early")
    assert await rig.manager.pins.of_instance(rig.manager.cache("i")) == [early, late]


async def test_removal_takes_pinned_blocks_too(rig: Rig) -> None:
    await rig.store([1, 2])
    await pin(rig, [1, 2])
    assert await rig.manager.remove(rig.manager.cache("i"), [1], NO_MASK) == 1
    assert await rig.manager.trim(rig.manager.cache("i")) == 1
    await rig.executor.run_due()
    assert await rig.statuses([1, 2]) == [[], []]


async def test_a_block_whose_time_is_up_stays_until_its_pin_ends(rig: Rig) -> None:
    for key in (1, 2):
        started = await rig.start([key])
        await rig.manager.finish_write(
            rig.manager.cache("i"), started.session.id, BlockMask(offset=1), Retention(0, 10)
        )
    early, late = await pin(rig, [1], 100), await pin(rig, [2], 50)
    for _ in range(2):
        rig.wait(20)
        await rig.executor.run_due()
        assert await rig.statuses([1, 2]) == [["SERVING"], ["SERVING"]]
    longer = await pin(rig, [2], 100)
    await rig.manager.unpin(rig.manager.cache("i"), early.id)
    await rig.manager.unpin(rig.manager.cache("i"), late.id)
    await rig.executor.run_due()
    assert await rig.statuses([1, 2]) == [[], ["SERVING"]]
    rig.wait(longer.deadline - rig.clock.now())
    await rig.executor.run_due()
    assert await rig.statuses([2]) == [[]]


async def test_a_block_that_is_written_again_is_not_held_by_the_old_pin(rig: Rig) -> None:
    await rig.store([1])
    await pin(rig, [1], 50)
    await rig.manager.remove(rig.manager.cache("i"), [1], NO_MASK)
    await rig.executor.run_due()
    await rig.store([1])
    assert await marks(rig, [1]) == [0]
    newer = await pin(rig, [1], 100)
    await rig.manager.unpin(rig.manager.cache("i"), newer.id)
    assert await marks(rig, [1]) == [0]  # the older pin has no budget for these bytes


async def test_the_pins_of_a_removed_instance_give_their_budget_back() -> None:
    with opened(replace(BUDGETED, pin_budget_bytes=BLOCK)) as rig:
        await rig.store([1])
        instance = rig.manager.cache("i").instance
        await pin(rig, [1])
        await rig.manager.remove_instance("i")
        await rig.manager.purge_removed()
        assert (await pinned_bytes(rig), await documents(rig)) == (0, 0)
        await rig.manager.register_instance(instance)
        await rig.store([1])
        await pin(rig, [1])


async def test_a_budget_that_cannot_be_read_does_not_hold_up_the_removal_of_instances(rig: Rig) -> None:
    """Invariant 4: their bytes count for the group until they are deleted."""
    await rig.store([1, 2])
    await pin(rig, [1])
    table = rig.tables.table("pinbudgets")
    assert await table.replace("group", await table.get("group"), b"\xff", rig.clock.now() + 10)
    instance = rig.manager.cache("i").instance
    await rig.manager.remove_instance("i")
    await rig.manager.register_instance(replace(instance, instance_id="other"))
    await rig.manager.remove_instance("other")
    for _ in range(2):
        await rig.manager.purge_removed()
        await rig.executor.run_due()
    assert (rig.registry.instances.removals(), rig.used_bytes) == ([], 0)


@pytest.mark.parametrize(
    ("owner", "seconds", "text"),
    [
        ("", 10, "owner"),
        ("x" * 257, 10, "owner has 257 bytes"),
        ("a\nb", 10, "control characters"),
        ("me", 0, "ttl_seconds is 0, must be from 1 to 2592000"),
        ("me", -1, "ttl_seconds is -1"),
        ("me", MAX_PIN_SECONDS + 1, "ttl_seconds is 2592001"),
    ],
)
async def test_owner_and_time_are_checked(rig: Rig, owner: str, seconds: int, text: str) -> None:
    await rig.store([1])
    with pytest.raises(InvalidArgumentError, match=text):
        await pin(rig, [1], seconds, owner)
    assert await documents(rig) == 0


async def test_a_lower_budget_ends_no_pin(rig: Rig) -> None:
    await rig.store([1, 2])
    await pin(rig, [1, 2])
    await rig.registry.groups.update(replace(BUDGETED, pin_budget_bytes=BLOCK, version=1), 0)
    assert await marks(rig, [1, 2]) == [100, 100]
    with pytest.raises(CapacityError, match="is 20, 40 bytes are pinned"):
        await pin(rig, [1])


async def test_an_unpin_that_was_cut_off_is_carried_out(rig: Rig) -> None:
    """The document says that the pin ends, and the next manager that expires pins goes on."""
    await rig.store([1])
    pinned = await pin(rig, [1])
    ended = replace(pinned, is_ended=True)
    table = rig.tables.table("pins")
    assert await table.replace(pinned.id, pinned.encoded(), ended.encoded(), rig.clock.now() + 5)
    rig.wait(5)
    await rig.manager.expire()
    assert (await marks(rig, [1]), await documents(rig)) == ([0], 0)


async def test_a_pin_that_was_cut_off_before_its_document_costs_budget_until_its_deadline() -> None:
    with opened(replace(BUDGETED, pin_budget_bytes=BLOCK)) as rig:
        await rig.store([1])
        pinned = await pin(rig, [1], 10)
        assert await rig.tables.table("pins").replace(pinned.id, pinned.encoded(), None)
        with pytest.raises(CapacityError):
            await pin(rig, [1])
        rig.wait(10)
        await pin(rig, [1])


async def test_a_damaged_pin_holds_up_no_other_pin(rig: Rig) -> None:
    await rig.store([1, 2])
    damaged, good = await pin(rig, [1], 10), await pin(rig, [1, 2], 50)
    table = rig.tables.table("pins")
    assert await table.replace(damaged.id, damaged.encoded(), b"\xff", rig.clock.now() + 10)
    assert await rig.manager.pins.of_instance(rig.manager.cache("i")) == [good]
    await rig.manager.unpin(rig.manager.cache("i"), good.id)
    assert await marks(rig, [1, 2]) == [0, 0]
    rig.wait(10)
    await rig.manager.expire()
    assert await documents(rig) == 0


@pytest.mark.parametrize("document", [b"\xff", b"\x92\x02\x80"], ids=["damaged", "of another release"])
async def test_a_budget_that_cannot_be_read_refuses_pins(rig: Rig, document: bytes) -> None:
    await rig.store([1])
    assert await rig.tables.table("pinbudgets").replace("group", None, document, rig.clock.now())
    with pytest.raises(StorageIOError, match="pin budget"):
        await pin(rig, [1])
    await rig.manager.expire()  # says so in the log, and goes on
    assert await rig.tables.table("pinbudgets").due(rig.clock.now(), 9) == []


async def test_a_pin_is_stored_and_read_back(rig: Rig) -> None:
    await rig.store([-(2**63), 2**63 - 1])
    pinned = await pin(rig, [-(2**63), 2**63 - 1])
    document = await rig.tables.table("pins").get(pinned.id)
    assert document is not None
    assert Pin.decoded(pinned.id, document) == pinned
    for bad in (b"", b"\x90", document[:-1], b"\x99\x02" + document[2:]):
        with pytest.raises(StorageIOError, match="stored pin"):
            Pin.decoded(pinned.id, bad)


# ── Interrupted pins ──


KEYS = [1, 2, 3]

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

    @property
    def due_from(self) -> float:
        return self._inner.due_from

    @property
    def revision(self) -> Revision | None:
        return self._inner.revision

    async def version(self) -> int:
        return await self._inner.version()


def interrupted_pins(rig: Rig, pins: Interrupted, budgets: Table) -> Pins:
    """Pins of another manager on the same store."""

    async def find(_uid: int) -> None:
        raise AssertionError("no call expires pins here")

    return Pins(pins, PinBudgets(budgets, rig.clock), find, rig.storages, rig.clock, lambda: "mine")


async def begin(rig: Rig, number: int, hook: Hook) -> Pin | None:
    """Pin all blocks; at a call to the table of pins the hook comes between."""
    table = Interrupted(rig.tables.table("pins"), number, hook)
    pins = interrupted_pins(rig, table, rig.tables.table("pinbudgets"))
    return await pins.pin(rig.manager.cache("i"), BUDGETED, PinRequest(KEYS, "me", 100))


async def seconds_left(rig: Rig) -> list[list[float]]:
    now = rig.clock.now()
    records = await rig.manager.cache("i").index.get(KEYS)
    return [[max(0.0, place.pinned_until - now) for place in record.locations] if record else [] for record in records]


async def test_blocks_removed_between_lookup_and_mark_are_not_counted() -> None:
    with opened(BUDGETED) as rig:
        await rig.store(KEYS)
        pinned = await begin(rig, 0, lambda: rig.manager.remove(rig.manager.cache("i"), [2], NO_MASK))
        assert pinned is not None
        assert (pinned.block_count, pinned.size_bytes) == (1, BLOCK)
        assert await seconds_left(rig) == [[100], [0], [0]]
        assert await rig.manager.pins.pinned_bytes("group") == BLOCK
        assert await rig.manager.pins.of_instance(rig.manager.cache("i")) == [pinned]


async def test_a_location_that_came_after_the_lookup_is_not_pinned() -> None:
    with opened(BUDGETED) as rig:
        await rig.store(KEYS)
        pinned = await begin(rig, 0, lambda: rig.store(KEYS[:1], min_replica_count=2))
        assert pinned is not None
        assert (pinned.block_count, pinned.size_bytes) == (3, 3 * BLOCK)
        assert await seconds_left(rig) == [[100, 0], [100], [100]]
        await rig.manager.unpin(rig.manager.cache("i"), pinned.id)
        assert await seconds_left(rig) == [[0, 0], [0], [0]]


@pytest.mark.parametrize("table", ["pins", "pinbudgets"])
async def test_marked_blocks_are_in_the_budget_at_every_moment(table: str) -> None:
    """Wherever a manager dies while it ends a pin or makes it smaller."""
    moments: list[tuple[float, int]] = []

    async def note(rig: Rig) -> None:
        marked = sum(BLOCK for places in await seconds_left(rig) for left in places if left)
        moments.append((marked, await rig.manager.pins.pinned_bytes("group")))

    for number in range(12):
        with opened(BUDGETED) as rig:
            await rig.store(KEYS)
            longer = await begin(rig, 0, lambda: rig.manager.remove(rig.manager.cache("i"), [3], NO_MASK))
            assert longer is not None
            tables = {name: Interrupted(rig.tables.table(name)) for name in ("pins", "pinbudgets")}
            tables[table] = Interrupted(rig.tables.table(table), number, lambda: note(rig), late=True)
            await interrupted_pins(rig, tables["pins"], tables["pinbudgets"]).unpin(rig.manager.cache("i"), longer.id)
    assert {marked for marked, _ in moments} == {0, 2 * BLOCK}
    assert all(marked <= taken for marked, taken in moments), moments


async def test_a_pin_whose_first_block_was_removed_is_none() -> None:
    with opened(BUDGETED) as rig:
        await rig.store(KEYS)
        assert await begin(rig, 0, lambda: rig.manager.remove(rig.manager.cache("i"), [1], NO_MASK)) is None
        assert (await seconds_left(rig), await stored_names(rig)) == ([[0], [0], [0]], [])


async def test_a_pin_that_was_ended_while_it_began_is_refused() -> None:
    with opened(BUDGETED) as rig:
        await rig.store(KEYS)
        with pytest.raises(NotReadyError, match="ended while it began"):
            await begin(rig, 1, lambda: rig.manager.unpin(rig.manager.cache("i"), "mine"))
        assert (await seconds_left(rig), await stored_names(rig)) == ([[0], [0], [0]], [])


async def test_a_pin_that_begins_while_another_one_ends_keeps_its_marks() -> None:
    """It relied on the marks of the pin that ends, which was about to take them off."""
    with opened(BUDGETED) as rig:
        await rig.store(KEYS)
        longer = await begin(rig, -1, nothing)
        assert longer is not None
        begun: list[Pin | None] = []

        async def begin_another() -> None:
            begun.append(await rig.manager.pin(rig.manager.cache("i"), PinRequest(KEYS[:2], "other", 50)))

        budgets = Interrupted(rig.tables.table("pinbudgets"), 0, begin_another, late=True)  # has read the other pins
        pins = interrupted_pins(rig, Interrupted(rig.tables.table("pins")), budgets)
        await pins.unpin(rig.manager.cache("i"), longer.id)
        assert await rig.manager.pins.of_instance(rig.manager.cache("i")) == begun
        assert await seconds_left(rig) == [[50], [50], [0]]
        assert await rig.manager.pins.pinned_bytes("group") == 2 * BLOCK


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("table", ["pins", "pinbudgets"])
@pytest.mark.parametrize("ends", [False, True], ids=["pin", "unpin"])
async def test_a_failure_half_way_leaves_nothing_that_cannot_be_repeated(ends: bool, table: str, late: bool) -> None:
    """Whichever call to the store fails, done or not done: a pin that fails leaves nothing, an unpin is repeated."""
    for number in range(100):
        with opened(BUDGETED) as rig:
            await rig.store(KEYS)
            cache, pinned = rig.manager.cache("i"), await begin(rig, -1, nothing) if ends else None
            tables = {name: Interrupted(rig.tables.table(name)) for name in ("pins", "pinbudgets")}
            tables[table] = Interrupted(rig.tables.table(table), number, fails, late=late)
            pins = interrupted_pins(rig, tables["pins"], tables["pinbudgets"])
            try:
                if pinned is not None:
                    await pins.unpin(cache, pinned.id)
                else:
                    assert await pins.pin(cache, BUDGETED, PinRequest(KEYS, "me", 100)) is not None
            except StorageIOError:
                if pinned is not None:
                    await pins.unpin(cache, pinned.id)
                assert (await seconds_left(rig), await stored_names(rig)) == ([[0], [0], [0]], [])
                continue
            assert tables[table].calls <= number
            assert number >= 2
            return
    raise AssertionError("it never succeeded")
