"""Wakes of the reclaimer: a write that crosses a mark, another manager; and the cache of usage."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import pytest
from at_once import now
from hypothesis import example, given
from hypothesis import strategies as st
from levels_rig import BLOCK, LEVELS_POOL, Levels, group, instance, levels
from record_by_record import RecordByRecord

from kvcm.index.backends.backend import Change
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import IndexHandle
from kvcm.model.errors import StorageIOError
from kvcm.model.groups import GlobalQuota, InstanceGroup, StorageGuarantee
from kvcm.model.keys import NO_MASK
from kvcm.model.locations import StorageKey
from kvcm.model.storages import StorageType
from kvcm.reclaim.needs import InstanceUsage, Limits, Reason, UsageReader, WatermarkCheck, needs
from kvcm.reclaim.reclaimer import WakeBroadcast
from kvcm.store.memory import MemoryTable

A = StorageKey("a", StorageType.ST_DUMMY)
NAMES = ("x", "y", "z")


@dataclass
class Books:
    """Bytes of groups on storage `a`.

    Attributes:
        asked: number of calls of each method.
    """

    on_a: Mapping[str, int]
    asked: Counter[str] = field(default_factory=Counter)

    def group_bytes(self, group_name: str) -> Mapping[StorageKey, int]:
        self.asked["group_bytes"] += 1
        return {A: self.on_a[group_name]}

    def bytes_on_storage(self, storage: str) -> Mapping[str, int]:
        self.asked["bytes_on_storage"] += 1
        return self.on_a if storage == "a" else {}

    def bytes_by_group(self) -> Mapping[str, int]:
        self.asked["bytes_by_group"] += 1
        return self.on_a


def big(name: str, guaranteed: int = 0, quota: str = "", types: dict[StorageType, int] | None = None) -> InstanceGroup:
    """A group whose own marks are far away."""
    kept = (StorageGuarantee("a", guaranteed),) if guaranteed else ()
    return group(name, blocks=1000, quota=quota, types=types, storages=("a", "b"), storage_guarantees=kept)


@given(
    used=st.lists(st.integers(0, 60), min_size=3, max_size=3),
    guaranteed=st.lists(st.sampled_from([0, 0, 20, 45, 95]), min_size=3, max_size=3),
    grown=st.integers(1, 30),
)
@example(used=[30, 0, 0], guaranteed=[0, 45, 0], grown=20)
@example(used=[0, 14, 45], guaranteed=[45, 20, 45], grown=30)
def test_a_write_wakes_only_where_there_is_something_to_evict(
    used: list[int], guaranteed: list[int], grown: int
) -> None:
    """A storage of 100 bytes, marked at 90: a woken reclaimer finds something to evict, and a write that leaves
    something to evict wakes it."""
    groups = [big(name, size) for name, size in zip(NAMES, guaranteed, strict=True)]
    instances = [instance(name, name, {"kv": 1}) for name in NAMES]
    with levels(groups, instances) as rig:
        now(rig.limit_storage("a", 100, 0.9))
        limits = Limits(rig.registry.storages.all(), [], groups)

        def is_above(on_a: Mapping[str, int]) -> bool:
            return WatermarkCheck(rig.registry, Books(on_a), lambda _: []).is_above_watermark(groups[0])

        def has_needs(on_a: Mapping[str, int]) -> bool:
            held = [
                InstanceUsage(uid, each, configured, {A: on_a[each.instance_id]}, 1, 1 << 62)
                for uid, (each, configured) in enumerate(zip(instances, groups, strict=True))
                if on_a[each.instance_id]
            ]
            return any(need.reason is Reason.STORAGE for need in needs(held, limits))

        before = dict(zip(NAMES, used, strict=True))
        after = {**before, "x": before["x"] + grown}
        if is_above(after):
            assert has_needs(after)
        elif has_needs(after):
            assert has_needs(before)


@pytest.mark.parametrize("level", ["storage", "global"])
async def test_a_shared_mark_leaves_space_for_the_largest_block_of_all_its_groups(level: str) -> None:
    """Else the group of the large blocks is refused before anything is evicted for it."""
    small, large = big("small", quota="q"), big("large", quota="q")
    with levels([small, large], [instance("s", "small"), instance("l", "large", {"kv": 4 * BLOCK})]) as rig:
        if level == "storage":
            await rig.limit_storage("a", 10 * BLOCK, 1.0)
        else:
            await rig.registry.quotas.set(GlobalQuota("q", 10 * BLOCK, 1.0))
        await rig.write_each(range(6), "s")
        assert rig.pressed == []
        await rig.write([6], "s")
        assert rig.pressed


async def test_what_follows_from_the_settings_follows_their_changes() -> None:
    with levels([big("x", quota="q"), big("y")], [instance("i", "x")]) as rig:
        books = Books({"x": 50, "y": 45})
        pressure = WatermarkCheck(rig.registry, books, lambda _: [])
        x = big("x", quota="q")
        assert not pressure.is_above_watermark(x)
        await rig.limit_storage("a", 100, 0.9)
        assert pressure.is_above_watermark(x)
        await rig.limit_storage("a", 200, 0.9)
        assert not pressure.is_above_watermark(x)
        await rig.registry.quotas.set(GlobalQuota("q", 55))
        assert pressure.is_above_watermark(x)


async def test_a_write_asks_once_for_each_limit_however_many_groups_there_are() -> None:
    groups = [big(f"g{number}", quota="q") for number in range(50)]
    with levels(groups, [instance("i", "g0")]) as rig:
        for name in ("a", "b", LEVELS_POOL):
            await rig.limit_storage(name, 10_000)
        await rig.registry.quotas.set(GlobalQuota("q", 10_000))
        books = Books({each.name: 10 for each in groups})
        assert not WatermarkCheck(rig.registry, books, lambda _: []).is_above_watermark(groups[0])
        assert books.asked == {"group_bytes": 1, "bytes_on_storage": 2, "bytes_by_group": 1}


async def test_a_mark_reserves_no_guaranteed_bytes_that_a_quota_forbids() -> None:
    """Hard limit and mark mean the same by a guarantee: the least of it, the group's quota, and that on the type."""
    a, b = big("x", 60, types={StorageType.ST_DUMMY: 10}), big("y")
    with levels([a, b], [instance("i", "x", {"kv": 1}), instance("j", "y", {"kv": 1})]) as rig:
        await rig.limit_storage("a", 100, 0.9)
        await rig.write(range(8), "i")
        await rig.write(range(45), "j")
        assert rig.pressed == []
        assert await rig.reclaim() == 0


# ── How managers of one store wake the reclaimer of the one that leads ──


class Outage(MemoryTable):
    """A table that fails so many times."""

    failures = 0

    def _ask(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageIOError("the store is away")

    async def get(self, key: str) -> bytes | None:
        self._ask()
        return await super().get(key)

    async def replace(self, key: str, expected: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        self._ask()
        return await super().replace(key, expected, new, due)


@dataclass
class Node:
    """A manager: whether it leads, and how often its reclaimer was woken."""

    table: Outage
    leads: bool = False
    woken: int = 0
    full: list[str] = field(default_factory=list)
    wakes: WakeBroadcast = field(init=False)

    def __post_init__(self) -> None:
        self.wakes = WakeBroadcast(self.table, self._wake, lambda: self.leads, self.full.append)

    def _wake(self) -> None:
        self.woken += 1


async def nodes() -> list[Node]:
    """Managers of one store; the first one leads, and has seen every wake up to now."""
    table = Outage()
    found = [Node(table) for _ in range(3)]
    found[0].leads = True
    await found[0].wakes.exchange()
    found[0].woken = 0
    return found


@pytest.mark.parametrize(
    ("steps", "woken"),
    [
        ("a!", (1, 0, 0)),
        ("b! b c a b c a b c a", (1, 0, 0)),  # the leader receives another manager's write once
        ("b! b a c! c a b! b a b! b a", (4, 0, 0)),  # and every later one again
        ("b! c! b c a", (1, 0, 0)),
        ("-a b! b +c c", (0, 0, 1)),  # the next leader receives the requests from the time without a leader
        ("-a b! b a +a a", (1, 0, 0)),
    ],
)
async def test_the_leader_is_woken_by_writes_at_any_manager(steps: str, woken: tuple[int, ...]) -> None:
    """A step: `b!` is a write at b, `b` an exchange of b; `-a` ends the lead of a, `+a` begins it."""
    named = dict(zip("abc", await nodes(), strict=True))
    for step in steps.split():
        node = named[step.strip("!+-")]
        if step.endswith("!"):
            node.wakes.request("g")
        elif step[0] in "+-":
            node.leads = step[0] == "+"
        else:
            await node.wakes.exchange()
    assert tuple(each.woken for each in named.values()) == woken


async def test_a_store_that_fails_loses_no_wake() -> None:
    leader, other, _ = await nodes()
    leader.table.failures = 2
    other.wakes.request()
    for _ in range(2):
        with pytest.raises(StorageIOError):
            await other.wakes.exchange()
    await other.wakes.exchange()
    await leader.wakes.exchange()
    assert leader.woken == 1


async def test_the_leader_learns_which_storages_other_managers_found_full() -> None:
    """A pool may refuse an allocation of one manager, and have space for the probes of another."""
    leader, one, other = await nodes()
    one.wakes.request_eviction("p")
    other.wakes.request_eviction("p")
    other.wakes.request_eviction("q")
    for node in (one, other):
        await node.wakes.exchange()
    await leader.wakes.exchange()
    assert (sorted(leader.full), leader.woken) == (["p", "q"], 1)
    await leader.wakes.exchange()
    one.wakes.request_eviction("p")
    await one.wakes.exchange()
    await leader.wakes.exchange()
    assert leader.full[2:] == ["p"]


async def turns(enough: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Let the loop run until something holds; return whether it did."""
    async with asyncio.timeout(seconds):
        while not enough():  # noqa: ASYNC110 - the condition sends no signal
            await asyncio.sleep(0.001)
    return True


@asynccontextmanager
async def reclaiming(rig: Levels, is_leader: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
    """The reclaimer's loop, inside the block."""
    running = asyncio.create_task(rig.reclaimer.run(is_leader))
    try:
        yield
    finally:
        running.cancel()


async def test_a_woken_reclaimer_runs_one_round_and_waits_again() -> None:
    with levels(group(), instance()) as rig:
        async with reclaiming(rig):
            await turns(lambda: rig.reclaimer.stats.round_count == 1)
            await rig.write_each(range(9))
            assert await rig.left(range(9)) == list(range(9))
            for _ in range(5):
                rig.reclaimer.wake()
            await turns(lambda: bool(rig.order()))
            assert rig.reclaimer.stats.round_count == 2


async def test_a_wake_during_a_round_is_not_lost() -> None:
    """A round may miss the blocks that are written while it is under way."""
    with levels(group(), instance()) as rig:
        rig.reclaimer = rig.new_reclaimer(lambda evicted: (rig.evicted.append(evicted), rig.reclaimer.wake())[0])
        await rig.write_each(range(9))
        async with reclaiming(rig):
            await turns(lambda: rig.reclaimer.stats.round_count == 2)


async def test_only_the_leader_runs_rounds() -> None:
    with levels(group(), instance()) as rig:
        leads: list[bool] = []
        async with reclaiming(rig, lambda: bool(leads)):
            rig.reclaimer.wake()
            await asyncio.sleep(0)
            assert rig.reclaimer.stats.round_count == 0
            leads.append(True)
            rig.reclaimer.wake()
            await turns(lambda: rig.reclaimer.stats.round_count == 1)


async def test_the_next_round_follows_a_step_limit_without_a_wake() -> None:
    with levels(group(blocks=100, mark=0.5, hysteresis=0.0, reclaim={"reclaim_step_size": 200}), instance()) as rig:
        await rig.write_each(range(90))
        async with reclaiming(rig):
            await turns(lambda: len(rig.order()) == 40)
            assert rig.reclaimer.stats.round_count >= 2


# ── The remembered usage of an index equals its current usage ──


STEPS = 300
KEYS = range(12)


class SharedMemory(RecordByRecord, MemoryBackend):
    """Records that other managers change, too."""

    is_shared = True


def of_groups(rig: Levels) -> list[tuple[IndexHandle, InstanceGroup]]:
    return [(each, rig.registry.groups.get(each.instance.instance_group_name)) for each in rig.manager.indexes()]


async def change(rig: Levels, generator: Random) -> None:
    """Do one thing of those that change what instances hold."""
    to, keys = generator.choice("ij"), generator.sample(KEYS, 3)
    steps: list[Callable[[], Awaitable[object]]] = [
        lambda: rig.write(keys, to),
        lambda: rig.manager.remove(rig.manager.cache(to), keys, NO_MASK),
        lambda: rig.read(keys, to),
        rig.reclaim,
        rig.delete,
        lambda: rig.manager.trim_meta(rig.manager.cache(to)),
        lambda: rig.update(group(blocks=generator.randint(20, 40), max_keys=generator.randint(20, 40))),
    ]
    await generator.choice(steps)()


async def test_remembered_usage_is_current_usage() -> None:
    generator, known = Random(1), UsageReader()
    with levels(group(blocks=40), [instance("i"), instance("j")]) as rig:
        held: set[tuple[int, ...]] = set()
        for _ in range(STEPS):
            await change(rig, generator)
            found = known.of(of_groups(rig))
            assert found == [InstanceUsage.of(*each) for each in of_groups(rig)]
            held.add(tuple(sum(each.remaining.values()) for each in found))
        assert len(held) > STEPS // 10


async def test_an_unchanged_index_is_not_read_again() -> None:
    known = UsageReader()
    with levels(group(blocks=40), [instance("i"), instance("j")]) as rig:
        await rig.write([1, 2], "i")
        i, j = known.of(of_groups(rig))
        await rig.write([1], "j")
        later_i, later_j = known.of(of_groups(rig))
        assert later_i is i
        assert later_j is not j


async def test_another_registration_of_an_id_holds_nothing_yet() -> None:
    known = UsageReader()
    with levels() as rig:
        await rig.write([1])
        known.of(of_groups(rig))
        await rig.manager.remove_instance("i")
        await rig.delete()
        await rig.manager.purge_removed()
        await rig.manager.register_instance(instance())
        assert [each.keys for each in known.of(of_groups(rig))] == [0]


@pytest.mark.parametrize("is_asked_before", [False, True])
async def test_of_what_others_change_nothing_is_remembered(is_asked_before: bool) -> None:
    class SharedLevels(Levels):
        new_backend = staticmethod(lambda _placement: backend)

    backend, known = SharedMemory(), UsageReader()
    rig = SharedLevels([group(blocks=40)], [instance()])
    try:
        await rig.write([1, 2])
        if is_asked_before:
            known.of(of_groups(rig))
        records = await backend.get_many([1])
        await MemoryBackend.write_many(backend, [Change(1, records[0], None)])  # by another manager
        assert [each.keys for each in known.of(of_groups(rig))] == [1]
    finally:
        rig.storages.close_all()
