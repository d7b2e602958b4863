"""Any workload, any limits, every backend: hard limits hold always, and no more is evicted than the marks ask for.

Marks are worked out here once more, from the records alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import pytest
from eviction_rig import group_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_backends import Rig, opened
from manager_rig import ManagerRig

from kvcm.model.groups import DEFAULT_HYSTERESIS, GlobalQuota
from kvcm.model.keys import NO_MASK
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.reclaim.reclaimer import EvictionRecord

GROUPS = {"g": ("g-a", "g-b"), "h": ("h-a",)}
SIZES = {"g-a": 10, "g-b": 16, "h-a": 10}
STORAGES = ("slow", "pool")
Records = dict[str, dict[int, BlockRecord]]  # by instance and key

POLICIES = ("fifo", "leaf_lru", "lfu", "lfu_aging", "lru", "s3fifo", "sieve", "ttl")

EXAMPLES = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["memory", "rocksdb", "redis", "redis-runs", "redis-runs-cluster"])
async def backends(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


@dataclass(frozen=True)
class Bounds:
    """Limits of a deployment; 0 is none.

    Attributes:
        capacity: of group g.
        on_slow: of group g on the type of storage `slow`.
        slow: of storage `slow`, for both groups.
        quota: of both groups together.
        keys: blocks of an instance of group g.
        ratio: the mark of group g and of the others.
        hysteresis: of group g.
    """

    capacity: int
    on_slow: int
    slow: int
    quota: int
    keys: int
    ratio: float
    hysteresis: float | None
    policy: str
    delay_ms: int


BOUNDS = st.builds(
    Bounds,
    st.sampled_from([300, 450, 1 << 40]),
    st.sampled_from([0, 0, 120, 200]),
    st.sampled_from([0, 0, 150, 260]),
    st.sampled_from([0, 0, 350]),
    st.sampled_from([0, 0, 16]),
    st.sampled_from([0.5, 0.75, 0.9, 1.0]),
    st.sampled_from([None, 0.0, 0.1, 0.4]),
    st.sampled_from(POLICIES),
    st.sampled_from([0, 100, 1000]),
)


@dataclass(frozen=True)
class Step:
    """The next step: a verb of `Run`, its instance, its chain and their length."""

    verb: str
    instance_id: str
    pick: int
    length: int


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["write", "write", "write", "write", "read", "remove", "wait", "settle"]),
        st.sampled_from(list(SIZES)),
        st.integers(0, 1 << 16),
        st.integers(1, 9),
    ),
    min_size=15,
    max_size=35,
)


Locations = Mapping[str, Mapping[int, Sequence[Location]]]
"""By instance and key."""


class Level(NamedTuple):
    """A limit with its mark, and what counts for it.

    Attributes:
        instances: whose blocks.
        storages: where.
        capacity: the hard limit.
        ratio: of it, above which an eviction begins.
        hysteresis: how far below that it goes.
        counts_blocks: whether blocks are counted instead of bytes.
    """

    instances: tuple[str, ...]
    storages: tuple[str, ...]
    capacity: int
    ratio: float
    hysteresis: float | None = None
    counts_blocks: bool = False

    def sizes(self, locations: Locations, instances: Iterable[str]) -> list[int]:
        return [
            sum(each.size_bytes for each in of_block if each.storage in self.storages)
            for instance_id in instances
            for of_block in locations[instance_id].values()
        ]

    def count(self, locations: Locations) -> int:
        """What counts of some locations."""
        sizes = self.sizes(locations, self.instances)
        return sum(size > 0 for size in sizes) if self.counts_blocks else sum(sizes)

    def high(self) -> int:
        """Usage that leaves too few bytes for the largest block of its groups is above the mark as well."""
        largest = max(SIZES[one] for one in self.instances)
        return min(int(self.capacity * self.ratio + 1e-6), self.capacity - (1 if self.counts_blocks else largest))

    def low(self) -> int:
        """What an eviction leaves at most."""
        below = DEFAULT_HYSTERESIS if self.hysteresis is None else self.hysteresis
        return min(self.high(), int(self.capacity * max(0.0, self.ratio - below) + 1e-6))


class Run:
    """A workload under some bounds."""

    def __init__(self, bounds: Bounds, backends: Rig) -> None:
        self.bounds = bounds
        quota = GlobalQuota("q", bounds.quota, bounds.ratio)
        shared: dict[str, Any] = {"storages": STORAGES, "global_quota": "q" if bounds.quota else ""}
        groups = [
            group_of(
                "g",
                policy=bounds.policy,
                capacity=bounds.capacity,
                ratio=bounds.ratio,
                hysteresis=bounds.hysteresis,
                quotas={StorageType.ST_DUMMY: bounds.on_slow} if bounds.on_slow else {},
                max_key_count=bounds.keys,
                delay_ms=bounds.delay_ms,
                **shared,
            ),
            group_of("h", policy="lru", ratio=bounds.ratio, delay_ms=bounds.delay_ms, **shared),
        ]
        slow = StorageConfig("slow", DummyStorageSpec(), capacity_bytes=bounds.slow, used_percentage=bounds.ratio)
        pool = StorageConfig("pool", TairMemPoolStorageSpec(domain="d"))
        quotas = [quota] if bounds.quota else []
        self.rig = ManagerRig([slow, pool], groups, SIZES, backends.fresh, quotas)
        self.levels = list(self._levels())
        self.keys = count(1)
        self.chains: dict[str, list[tuple[int, ...]]] = {instance_id: [] for instance_id in SIZES}

    def _levels(self) -> Iterator[Level]:
        bounds, everybody, g = self.bounds, tuple(SIZES), GROUPS["g"]
        yield Level(g, STORAGES, bounds.capacity, bounds.ratio, bounds.hysteresis)
        if bounds.on_slow:
            yield Level(g, ("slow",), bounds.on_slow, bounds.ratio, bounds.hysteresis)
        if bounds.slow:
            yield Level(everybody, ("slow",), bounds.slow, bounds.ratio)
        if bounds.quota:
            yield Level(everybody, STORAGES, bounds.quota, bounds.ratio)
        if bounds.keys:
            for one in g:
                yield Level((one,), STORAGES, bounds.keys, bounds.ratio, bounds.hysteresis, counts_blocks=True)

    async def write(self, step: Step) -> None:
        """A new chain, or one that goes on or branches off from another, whose prefix is written where it is gone."""
        known = self.chains[step.instance_id]
        prefix = known[step.pick % len(known)][: step.pick % 11] if known and step.pick % 3 else ()
        chain = (*prefix, *(next(self.keys) for _ in range(step.length)))
        known.append(chain)
        await self.rig.store(step.instance_id, chain)
        if step.pick % 5:
            await self.settle(step)

    async def read(self, step: Step) -> None:
        known = self.chains[step.instance_id]
        if known:
            await self.rig.read(step.instance_id, known[step.pick % len(known)])
            await self.rig.manager.accesses.drain()

    async def remove(self, step: Step) -> None:
        known = self.chains[step.instance_id]
        if known:
            chain = known[step.pick % len(known)]
            await self.rig.manager.remove(
                self.rig.manager.cache(step.instance_id), chain[step.pick % len(chain) :][:2], NO_MASK
            )

    async def wait(self, step: Step) -> None:
        self.rig.clock.time += step.length / 4
        await self.rig.executor.run_due()

    async def settle(self, _step: Step) -> None:
        before = await self.records()
        crossed = [each for each in self.levels if each.count(alive(before)) > each.high()]
        seen = len(self.rig.evicted)
        await self.rig.reclaim()
        after = await self.records()
        reported = self.rig.evicted[seen:]
        assert gone(before, after) == Counter(
            (each.instance.instance_id, key) for each in reported for key in each.keys
        )
        if not crossed:
            assert not reported, "evicted though no mark was crossed"
            return
        assert all(each.count(alive(after)) <= each.low() for each in crossed), "a level above its mark stays above it"
        self.check_each_was_needed(crossed, before, after)
        self.check_that_the_last_was_needed(crossed, reported, after)

    def check_each_was_needed(self, crossed: Sequence[Level], before: Records, after: Records) -> None:
        """Each evicted block helps, or follows one that helps, and no block has lost its prefix (invariant 7)."""
        empty: Locations = {instance_id: {} for instance_id in SIZES}
        for instance_id, key in gone(before, after):
            chain: dict[int, Sequence[Location]] = {}
            at: int | None = key
            while at is not None and at in before[instance_id]:
                chain[at] = before[instance_id][at].locations
                at = before[instance_id][at].parent
            chains = {**empty, instance_id: chain}
            assert any(each.count(chains) for each in crossed), f"{key} of {instance_id} was evicted for nothing"
        for instance_id, key in gone(before, after):
            for child, record in after[instance_id].items():
                assert record.parent != key or not alive(after)[instance_id].get(child), f"{child} lost its prefix"

    def check_that_the_last_was_needed(
        self, crossed: Sequence[Level], reported: Sequence[EvictionRecord], after: Records
    ) -> None:
        """Without the last block of some instance, some level would still be above its low end."""
        last = {each.instance.instance_id: each for each in reported}
        for instance_id, evicted in last.items():
            *_, change = evicted.changes
            assert change.old is not None
            spared = alive(after) | {instance_id: alive(after)[instance_id] | {change.key: change.old.locations}}
            if any(each.count(spared) > each.low() for each in crossed):
                return
        raise AssertionError(f"more was evicted than {crossed} ask for")

    async def records(self) -> Records:
        return {instance_id: await self.rig.records(instance_id) for instance_id in SIZES}

    async def check_limits(self) -> None:
        """Hard limits count blocks in deletion, too (invariant 4)."""
        records = await self.records()
        used = {one: {key: record.locations for key, record in of.items()} for one, of in records.items()}
        for each in self.levels:
            assert each.count(used) <= each.capacity

    async def go(self, steps: Sequence[Step]) -> None:
        for step in steps:
            await getattr(self, step.verb)(step)
            await self.check_limits()
        await self.settle(steps[0])
        assert await self.rig.reclaimer.reclaim() == 0, "a second look evicts nothing"


def alive(records: Records) -> dict[str, dict[int, Sequence[Location]]]:
    """Return the locations that are not in deletion."""
    return {
        instance_id: {
            key: [each for each in record.locations if each.status is not LocationStatus.DELETING]
            for key, record in of.items()
        }
        for instance_id, of in records.items()
    }


def gone(before: Records, after: Records) -> Counter[tuple[str, int]]:
    """Blocks that could be read before and cannot any more."""
    there, left = alive(before), alive(after)
    return Counter(
        (instance_id, key)
        for instance_id, of in there.items()
        for key, locations in of.items()
        if locations and not left[instance_id].get(key)
    )


@EXAMPLES
@given(bounds=BOUNDS, steps=STEPS)
async def test_limits_hold_and_no_more_is_evicted_than_needed(backends: Rig, bounds: Bounds, steps: list[Step]) -> None:
    """Invariants 4 and 7."""
    await Run(bounds, backends).go(steps)


@pytest.mark.parametrize("backends", ["memory", "redis", "redis-runs"], indirect=True)
@EXAMPLES
@given(policy=st.sampled_from(POLICIES), steps=STEPS)
async def test_the_delay_before_deletions_changes_nothing(backends: Rig, policy: str, steps: list[Step]) -> None:
    """If blocks in deletion cause no refusal of a write, the same blocks go in the same order."""
    orders = []
    for delay_ms in (0, 100, 1000):
        bounds = Bounds(1 << 40, 0, 0, 0, 0, 0.0, None, policy, delay_ms)
        run = Run(bounds, backends)
        for name in ("g", "h"):
            group = group_of(name, policy=policy, used_size=220, hysteresis=0.2, delay_ms=delay_ms, storages=STORAGES)
            await run.rig.registry.groups.update(replace(group, version=1), current_version=0)
        run.levels = []
        for step in steps:
            if step.verb == "settle":
                await run.rig.reclaim()
            else:
                await getattr(run, step.verb)(replace(step, pick=step.pick // 5 * 5))
        await run.rig.reclaim()
        orders.append([key for evicted in run.rig.evicted for key in evicted.keys])
    assert orders[0] == orders[1] == orders[2]
