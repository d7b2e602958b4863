"""Which blocks are evicted, in which order, and how many: against plain lists and under floods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random
from typing import Any

import index_records
import pytest
from eviction_model import MODELS, Model
from eviction_rig import BLOCK, EvictionRig, group_of
from fake_clock import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_backends import Rig, opened
from manager_rig import ManagerRig
from redis_servers import Standalone

from kvcm.index.backends.backend import Access, Change, FinishRun, Rows, UniformRun, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError
from kvcm.model.groups import EvictionPolicy, PrefixClass, StorageGuarantee
from kvcm.model.locations import BlockRecord, LocationStatus
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.reclaim.eviction_order import LiveOrder, OrderPlan
from kvcm.reclaim.needs import Limits
from kvcm.reclaim.policies import POLICIES, Policy, Summary
from kvcm.reclaim.victims import MOST_DESCENDANTS

LIMIT = 16  # blocks; above this eviction begins
LOW = 11


@pytest.fixture(params=["memory", "rocksdb", "redis"])
async def backends(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


EXACT = pytest.mark.parametrize("backends", ["memory"], indirect=True)
"""RocksDB keeps in memory what the memory backend does, so one test of both is enough."""


@dataclass(frozen=True)
class Step:
    """What happens next.

    Attributes:
        verb: a method of `Run`.
        pick: chooses a block.
        length: of a chain, or a number of reads.
    """

    verb: str
    pick: int
    length: int


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["write", "write", "write", "again", "read", "read", "remove", "wait", "delete"]),
        st.integers(0, 1 << 16),
        st.integers(1, 8),
    ),
    min_size=30,
    max_size=60,
)


class Run:
    """One workload on the real index and on the model.

    Args:
        policy: its name.
        backends: makes the index.
        low: blocks that are left after an eviction.
    """

    def __init__(self, policy: str, backends: Rig, low: int = LOW) -> None:
        self.low = low
        hysteresis = 1 - low / LIMIT
        group = group_of(policy=policy, used_size=LIMIT * BLOCK, hysteresis=hysteresis, delay_ms=700)
        self.rig = EvictionRig({"g": group})
        self.index: MetaIndex = self.rig.add(backend=backends.fresh())
        self.model = Model(policy)
        self.keys = count(1)
        self.chains: dict[int, tuple[int, ...]] = {}  # of every block ever written, from its head to it
        self.rig.reclaimer.update_orders()

    def chain(self, pick: int) -> tuple[int, ...]:
        """The chain of some block, also of one that is gone."""
        return list(self.chains.values())[pick % len(self.chains)] if self.chains else ()

    async def write(self, step: Step) -> None:
        """A new chain, or a branch of an old one, whose prefix is written again where it is missing."""
        prefix = self.chain(step.pick)[: step.pick % 7] if step.pick % 3 else ()
        await self.store((*prefix, *(next(self.keys) * 7919 % 100_003 for _ in range(step.length))))

    async def again(self, step: Step) -> None:
        await self.store(self.chain(step.pick))

    async def store(self, chain: Sequence[int]) -> None:
        await self.add(chain)
        await self.reclaim()

    async def add(self, chain: Sequence[int], start: int = 0) -> None:
        parent = chain[start - 1] if start else None
        await self.rig.write(self.index, chain[start:], start, parent)
        for depth, key in enumerate(chain[start:], start):
            self.chains.setdefault(key, tuple(chain[: depth + 1]))
            if key not in self.model.blocks:
                self.model.write(key, chain[depth - 1] if depth else None, depth, self.rig.clock.time)

    async def read(self, step: Step) -> None:
        chain = self.chain(step.pick)
        await self.rig.read(self.index, chain, step.length)
        self.model.read(reversed(chain), step.length, self.rig.clock.time)

    async def remove(self, step: Step) -> None:
        """A block, of whatever place in its chain."""
        chain = self.chain(step.pick)[-1:]
        await self.rig.remove(self.index, chain)
        for key in chain:
            self.model.remove(key)

    async def wait(self, step: Step) -> None:
        self.rig.clock.time += step.length / 8

    async def delete(self, step: Step) -> None:
        self.rig.clock.time += step.length / 8
        await self.rig.executor.run_due()

    @property
    def excess(self) -> int:
        """Blocks that have to go."""
        used = len(self.model.blocks)
        return used - self.low if used > LIMIT else 0

    async def reclaim(self) -> None:
        expected = self.model.evict(self.excess)
        assert await self.rig.settle() == expected
        assert set(await self.rig.resident(self.index)) == set(self.model.blocks)

    async def go(self, steps: Sequence[Step]) -> None:
        for step in steps:
            await getattr(self, step.verb)(step)
        await self.reclaim()


class OneByOne(Run):
    """A run that reclaims after every block."""

    async def store(self, chain: Sequence[int]) -> None:
        for start in range(len(chain)):
            await self.add(chain[: start + 1], start)
            await self.reclaim()


class Leaves(Run):
    """`leaf_lru` in batches: a block that becomes a leaf only while a batch is chosen may have to wait for the next."""

    async def reclaim(self) -> None:
        excess, order = self.excess, self.model.order
        before = set(filter(self.model.is_leaf, self.model.blocks))
        evicted = await self.rig.settle()
        assert len(evicted) == excess
        for key in evicted:
            assert self.model.is_leaf(key)
            queue = order.order()
            older = set(queue[: queue.index(key)])
            assert not older & before, f"{key} went before {older & before}, which were leaves and colder"
            self.model.remove(key, evicted=True)
        assert set(await self.rig.resident(self.index)) == set(self.model.blocks)


EXAMPLES = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("policy", sorted(MODELS.keys() - {"leaf_lru"}))
@EXACT
@EXAMPLES
@given(steps=STEPS)
async def test_victims_are_those_of_the_lists(policy: str, backends: Rig, steps: list[Step]) -> None:
    """Invariant 7 within the order of every policy, whatever is written, read, removed and deleted meanwhile."""
    await Run(policy, backends).go(steps)


@pytest.mark.parametrize("backends", ["memory", "rocksdb"], indirect=True)
@EXAMPLES
@given(steps=STEPS)
async def test_the_coldest_leaf_goes_first(backends: Rig, steps: list[Step]) -> None:
    """Invariant 7."""
    await OneByOne("leaf_lru", backends, low=LIMIT).go(steps)


@EXACT
@EXAMPLES
@given(steps=STEPS)
async def test_no_leaf_goes_before_a_colder_one(backends: Rig, steps: list[Step]) -> None:
    """Invariant 7."""
    await Leaves("leaf_lru", backends).go(steps)


@EXACT
@pytest.mark.parametrize("policy", sorted(MODELS.keys() - {"leaf_lru", "s3fifo"}))
async def test_an_eviction_of_many_batches_goes_on_in_order(policy: str, backends: Rig) -> None:
    """The victims of one batch do not disturb the order of the next."""
    run, random = Run(policy, backends), Random(policy)
    run.rig.groups["g"] = group_of(policy=policy)  # without a limit
    for _ in range(60):
        pick = random.randrange(1 << 16)
        prefix = run.chain(pick)[: pick % 7]
        await run.add((*prefix, *(next(run.keys) * 7919 % 100_003 for _ in range(pick % 9 + 1))))
        await run.read(Step("read", random.randrange(1 << 16), pick % 3 + 1))
        run.rig.clock.time += 0.4
    run.rig.groups["g"] = group_of(policy=policy, used_size=LIMIT * BLOCK, hysteresis=1 - LOW / LIMIT)
    assert run.excess > 100
    await run.reclaim()


# ── Victims over a store that managers share ──


CHAINS, CHAIN = 320, 11
SHARED = 3  # blocks at the head of a chain that ten chains share
TICKS = 24


RANKS: Mapping[str, Callable[[Access], tuple[float, ...]]] = {
    "fifo": lambda access: (access.at,),
    "leaf_lru": lambda access: (access.at,),
    "lfu": lambda access: (access.reads, access.at),
    "lfu_aging": lambda access: (access.reads, access.at),
    "lru": lambda access: (access.at,),
    "s3fifo": lambda access: (access.reads >= 2, access.at),
    "sieve": lambda access: (access.reads > 0, access.at),
    "ttl": lambda access: (access.at,),
}
"""Where blocks stand in the order of eviction. The time is that of the last read where reads move blocks, else that of
the write, or of the last second chance."""


def key_of(chain: int, depth: int) -> int:
    shared = chain // 10 * 10 if depth < SHARED else chain
    return (shared * CHAIN + depth) * 0x9E3779B97F4A7C15 % (1 << 63)


def keys_of(chain: int, length: int = CHAIN) -> list[int]:
    return [key_of(chain, depth) for depth in range(length)]


class Workload:
    """Chains that are written one after the other, then read with a skew."""

    def __init__(self, rig: EvictionRig, index: MetaIndex, random: Random) -> None:
        self.rig, self.index, self.random = rig, index, random
        self.popular = random.sample(range(CHAINS), CHAINS)  # the most popular first

    async def write(self) -> None:
        for first in range(0, CHAINS, 10):
            await self.rig.write_chains(self.index, map(keys_of, range(first, first + 10)))
            self.rig.clock.time += 1

    async def read(self, ticks: int) -> None:
        """Most reads are of a few chains; many chains are never read."""
        for _ in range(ticks):
            self.rig.clock.time += 1
            counts: dict[int, int] = {}
            for _ in range(60):
                chain = self.popular[int(CHAINS * self.random.random() ** 4)]
                for key in reversed(keys_of(chain, self.random.randint(SHARED, CHAIN))):
                    counts[key] = counts.pop(key, 0) + 1
            await self.rig.touch(self.index, counts)

    async def known(self) -> dict[int, Access]:
        """What can be evicted."""
        keys = list(await self.rig.resident(self.index))
        accesses = zip(keys, await self.index.accesses(keys), strict=True)
        return {key: access for key, access in accesses if access is not None}


def leaves_no_block_without_its_prefix(victims: Iterable[int], left: Mapping[int, BlockRecord]) -> bool:
    gone = set(victims)
    return not any(record.parent in gone for record in left.values())


def is_among_the_coldest(victims: Sequence[int], ranks: Mapping[int, tuple[float, ...]], share: float) -> float:
    """Return which part of the victims has fewer than such a share of all blocks before it."""
    limit = sorted(ranks.values())[int(share * len(ranks))]
    return sum(ranks[key] <= limit for key in victims) / len(victims)


@pytest.mark.parametrize("policy", RANKS)
@pytest.mark.parametrize("backends", ["redis", "redis-runs", "redis-runs-cluster"], indirect=True)
async def test_nearly_all_victims_are_among_the_coldest(policy: str, backends: Rig) -> None:
    """Invariant 7, and at least 95 of 100 victims among the coldest tenth; twice, with reads in between."""
    random = Random(policy)
    rig = EvictionRig({"g": group_of(policy=policy)})
    index = rig.add(backend=backends.fresh())
    workload = Workload(rig, index, random)
    await workload.write()
    await workload.read(TICKS)
    for _ in range(2):
        known = await workload.known()
        used = len(known) * BLOCK
        rig.groups["g"] = group_of(policy=policy, used_size=used - 1, hysteresis=0.06)
        victims = await rig.settle()
        left = await rig.resident(index)
        assert len(victims) == len(known) - len(left) == -(-(used - int((used - 1) * 0.94)) // BLOCK)
        assert leaves_no_block_without_its_prefix(victims, left)
        ranks = {key: RANKS[policy](each) for key, each in known.items()}
        assert is_among_the_coldest(victims, ranks, 0.1) >= 0.95
        await workload.read(2)


# ── A choice of victims lets requests run after a bounded number of blocks that were looked at ──


FOLLOWED = 20
FOLLOWERS = MOST_DESCENDANTS + 1


class CountingBackend(MemoryBackend):
    """Counts the records that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        self.read += len(keys)
        return await super().get_many(keys)


@pytest.mark.parametrize("followers", [MOST_DESCENDANTS - FOLLOWED, FOLLOWERS])
async def test_what_follows_many_candidates_is_searched_once_and_requests_run_meanwhile(followers: int) -> None:
    """Heads are named before what follows them, which is pinned, or too much: nothing goes."""
    rig, backend = EvictionRig({"g": group_of(policy="fifo")}), CountingBackend()
    index = rig.add(backend=backend)
    rig.reclaimer.update_orders()
    await rig.write(index, range(FOLLOWED))
    pinned = (rig.place(pinned_until=FOR_EVER),)
    tails = range(FOLLOWED, FOLLOWED + followers)
    await index.put(dict.fromkeys(tails, BlockRecord(FOLLOWED - 1, FOLLOWED, pinned)))
    rig.groups["g"] = group_of(policy="fifo", used_size=1)
    reads: list[int] = []

    async def requests() -> None:
        while True:
            reads.append(backend.read)
            backend.read = 0
            await asyncio.sleep(0)

    running = asyncio.create_task(requests())
    assert await rig.settle() == []
    running.cancel()
    assert max(reads) <= 2 * followers
    assert (
        sum(reads) <= 8 * followers
    )  # once per reach, the candidates themselves, and what is read again after a pause


@pytest.mark.parametrize("first", ["head", "tail"])
async def test_a_long_chain_whose_end_is_pinned_costs_no_more_per_block_than_a_short_one(first: str) -> None:
    """Whether the order names its blocks from the head on or from the tail on."""

    async def reads_per_block(blocks: int) -> float:
        rig, backend = EvictionRig({"g": group_of(policy="fifo")}), CountingBackend()
        index = rig.add(backend=backend)
        rig.reclaimer.update_orders()
        for block in range(blocks) if first == "head" else ():
            rig.clock.time += 1
            await rig.write(index, [block], block, block - 1 if block else None)
        await rig.write(index, range(blocks))
        await index.put({blocks: BlockRecord(blocks - 1, blocks, (rig.place(pinned_until=FOR_EVER),))})
        rig.groups["g"] = group_of(policy="fifo", used_size=1)
        backend.read = 0
        assert await rig.settle() == []
        return backend.read / blocks

    assert await reads_per_block(4 * MOST_DESCENDANTS) <= 8 * await reads_per_block(20)


# ── Over a shared store the order names heads of chains: tails are found in few round trips, however long ──


LONG = 3 * MOST_DESCENDANTS
PART = LONG // 6  # is written at once


class RoundTrips:
    """Counts what the reclaimer asks a store for the chains of its candidates."""

    def __init__(self, backend: Any) -> None:
        self.count = 0
        for method in "get_around", "families", "get_many":
            setattr(backend, method, partial(self._counted, getattr(backend, method)))

    async def _counted(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self.count += 1
        return await method(*arguments)


@pytest.mark.parametrize("backends", ["redis-runs", "redis-runs-cluster"], indirect=True)
@pytest.mark.parametrize("seconds", [0, 60])
async def test_the_tail_of_a_long_chain_is_found_from_its_head(seconds: float, backends: Rig) -> None:
    """Its parts were written one after the other, so that each is warmer than the part before it. Invariant 7."""
    rig, backend = EvictionRig({"g": group_of()}), backends.fresh()
    index = rig.add(backend=backend)
    rig.reclaimer.update_orders()
    chains = [range(chain * LONG + 1, (chain + 1) * LONG + 1) for chain in range(2)]
    for begin in range(0, LONG, PART):
        for chain in chains:
            await rig.write(index, chain[begin : begin + PART], begin, chain[begin - 1] if begin else None)
        rig.clock.time += seconds
    trips, evicted = RoundTrips(backend), LONG // 2
    rig.groups["g"] = group_of(used_size=(2 * LONG - evicted) * BLOCK, hysteresis=0.0)
    victims = await rig.settle()
    assert len(victims) == len(set(victims)) == evicted
    assert leaves_no_block_without_its_prefix(victims, await rig.resident(index))
    assert trips.count < LONG / 4  # level by level two for each block of both chains, with every batch


class TickingClock(FakeClock):
    """Each time that is asked for is later than the one before, as on a machine."""

    def now(self) -> float:
        self.time += 1e-5
        return super().now()


@pytest.mark.parametrize("backends", ["redis-runs"], indirect=True)
async def test_blocks_that_are_marked_together_stay_together(backends: Rig, redis_standalone: Standalone) -> None:
    """Marked, and removed when the delay is over; a run per block would cost the store ten times as much."""
    rig = EvictionRig({"g": group_of(delay_ms=1000)}, clock=TickingClock())
    index = rig.add(backend=backends.fresh())
    rig.reclaimer.update_orders()

    def runs() -> int:
        with redis_standalone.server.admin() as client:
            return sum(1 for _ in client.scan_iter("*:k{*", count=10_000))

    before = runs()
    await rig.write_chains(index, [range(chain * 256 + 1, chain * 256 + 257) for chain in range(4)])
    written = runs() - before
    rig.groups["g"] = group_of(used_size=256 * BLOCK, hysteresis=0.0, delay_ms=1000)
    assert len(await rig.settle()) == 768
    assert written <= runs() - before <= 2 * written < 64


# ── What a flood of one-time writes does to a prefix that is read every second ──


CACHE = 100  # blocks
HOT = range(1, 9)
CHAIN_LENGTH = 10
GROUPS = [f"g{number}" for number in range(8)]
SHARE = 40  # blocks of a storage per group


async def hot_blocks_after_a_flood(policy: str, backends: Rig) -> int:
    """Write eight times what fits while a prefix is read once a second; return how much of that can still be read."""
    group = group_of("g", policy=policy, capacity=CACHE * BLOCK, ratio=0.9, delay_ms=100)
    rig = ManagerRig([StorageConfig("d", DummyStorageSpec())], [group], {"g-i": BLOCK}, backends.fresh)
    keys = count(1000)
    await rig.store("g-i", HOT)
    written = 0
    while written < 8 * CACHE:
        for _ in range(2):
            written += await rig.store("g-i", [next(keys) for _ in range(CHAIN_LENGTH)])
            await rig.reclaim()
            rig.clock.time += 0.5
            await rig.executor.run_due()
        await rig.read("g-i", HOT)
        await rig.manager.accesses.drain()
    return len((await rig.manager.match(rig.manager.cache("g-i"), rig.prefix(HOT), peek=True)).keys)


FLOODS = [("memory", policy, len(HOT)) for policy in ("leaf_lru", "lfu", "lfu_aging", "lru", "s3fifo", "sieve")]


@pytest.mark.parametrize(
    ("backends", "policy", "left"),
    [*FLOODS, ("redis", "leaf_lru", len(HOT)), ("redis", "s3fifo", len(HOT)), ("memory", "fifo", 0)],
    indirect=["backends"],
)
async def test_a_hot_prefix_survives_a_flood(backends: Rig, policy: str, left: int) -> None:
    """First in, first out loses it, so the flood is one."""
    assert await hot_blocks_after_a_flood(policy, backends) == left


@pytest.mark.parametrize("backends", ["memory", "redis"], indirect=True)
@pytest.mark.parametrize("guaranteed", [0, SHARE * 3 // 4])
async def test_a_flooding_group_takes_nothing_from_its_neighbours(guaranteed: int, backends: Rig) -> None:
    """Eight groups on one storage with a capacity: by their guarantees, and by fair shares where there are none."""
    guarantees = [StorageGuarantee("d", guaranteed * BLOCK)] if guaranteed else []
    storage = StorageConfig("d", DummyStorageSpec(), capacity_bytes=len(GROUPS) * SHARE * BLOCK)
    groups = [group_of(name, delay_ms=100, guarantees=guarantees) for name in GROUPS]
    rig = ManagerRig([storage], groups, {f"{name}-i": BLOCK for name in GROUPS}, backends.fresh)
    neighbours, flooding = [f"{name}-i" for name in GROUPS[1:]], f"{GROUPS[0]}-i"
    keys = count(1)
    for neighbour in neighbours:
        for _ in range(SHARE * 3 // 4 // 5):
            assert await rig.store(neighbour, [next(keys) for _ in range(5)]) == 5
    before = {each: await resident_count(rig, each) for each in neighbours}
    rig.clock.time += 60
    written = 0
    for _ in range(3 * len(GROUPS) * SHARE // CHAIN_LENGTH // 2):
        for _ in range(2):
            written += await rig.store(flooding, [next(keys) for _ in range(CHAIN_LENGTH)])
        await rig.reclaim()
        rig.clock.time += 0.2
        await rig.executor.run_due()
    assert written > 2 * len(GROUPS) * SHARE
    for neighbour in neighbours:
        assert await resident_count(rig, neighbour) >= 0.99 * before[neighbour]


async def resident_count(rig: ManagerRig, instance_id: str) -> int:
    """Blocks that can be read."""
    records = (await rig.records(instance_id)).values()
    return sum(any(each.status is LocationStatus.SERVING for each in record.locations) for record in records)


# ── What nothing is gained by stays ──


FOR_EVER = 1e12


@pytest.mark.parametrize("policy", ["leaf_lru", "lru", "sieve"])
@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "writing"])
async def test_a_type_that_can_give_nothing_costs_no_other_type(policy: str, is_pinned: bool) -> None:
    """The blocks above the mark are pinned or in writing: no eviction elsewhere would help."""
    group = group_of(policy=policy, ratio=0.5, quotas={StorageType.ST_DUMMY: 10 * BLOCK})
    rig = EvictionRig({"g": group})
    index = rig.add()
    status = LocationStatus.SERVING if is_pinned else LocationStatus.WRITING
    full = BlockRecord(None, 0, (rig.place(status=status, pinned_until=FOR_EVER if is_pinned else 0.0),))
    other = BlockRecord(None, 0, (rig.place(storage="n", kind=StorageType.ST_NFS),))
    await index.put(dict.fromkeys(range(1, 9), full) | dict.fromkeys(range(100, 140), other))
    assert await rig.settle() == []
    assert rig.reclaimer.stats.unmet == {"type": 8 * BLOCK - 48}


async def test_the_next_group_pays_where_the_first_has_nothing_to_give() -> None:
    """Of a shared storage: the group that is furthest above its share is pinned."""
    storage = StorageConfig("d", DummyStorageSpec(), capacity_bytes=1000, used_percentage=0.87)
    rig = EvictionRig({name: group_of(name) for name in "abc"}, Limits((storage,), ()))
    for name, blocks, pinned_until in (("a", 49, FOR_EVER), ("b", 39, 0.0), ("c", 2, 0.0)):
        record = BlockRecord(None, 0, (rig.place(pinned_until=pinned_until),))
        await rig.add(name, name).put(dict.fromkeys(range(1, blocks + 1), record))
    assert len(await rig.settle()) == 5  # of 900 bytes 850 may stay
    assert [evicted.instance.instance_id for evicted in rig.evicted] == ["b"]
    assert not rig.reclaimer.stats.unmet


@pytest.mark.parametrize("name", ["ttl", "fifo", "lru", "leaf_lru"])
async def test_a_block_that_is_written_again_while_its_bytes_are_deleted_is_young(name: str) -> None:
    aged = group_of(delay_ms=60_000)
    strategy = replace(aged.cache_config.reclaim_strategy, policy=EvictionPolicy(name, 100))
    rig = EvictionRig({"g": replace(aged, cache_config=replace(aged.cache_config, reclaim_strategy=strategy))})
    index = rig.add()
    await rig.write(index, [1])
    rig.clock.time += 101
    assert await rig.settle() == [1]
    rig.clock.time += 10
    await rig.write(index, [1])
    assert await rig.settle() == []
    rig.clock.time += 101
    assert await rig.settle() == [1]


@pytest.mark.parametrize("policy", ["leaf_lru", "lru"])
async def test_blocks_that_follow_each_other_in_a_circle_hang_no_round(policy: str) -> None:
    """Writers can send such parents: a walk up a chain ends nevertheless."""
    group = group_of(policy=policy, ratio=0.5, quotas={StorageType.ST_DUMMY: 10 * BLOCK})
    rig = EvictionRig({"g": group})
    index = rig.add()
    elsewhere = (rig.place(storage="n", kind=StorageType.ST_NFS),)
    chained = {1: BlockRecord(2, 1, elsewhere), 2: BlockRecord(1, 1, elsewhere), 3: BlockRecord(1, 2, elsewhere)}
    stuck = BlockRecord(None, 0, (rig.place(pinned_until=FOR_EVER),))
    await index.put(chained | dict.fromkeys(range(10, 18), stuck))
    assert await rig.settle() == []


# ── A victim that could not be marked stays where it was in the order ──


class Refusing(MemoryBackend):
    """A store that takes nothing for a while."""

    refuses = False
    read_meanwhile = 99

    async def write_many(self, changes: Sequence[Change]) -> Written:
        self._refuse()
        return await super().write_many(changes)

    def retire(self, keys: Sequence[int], ending: FinishRun) -> Sequence[UniformRun] | None:
        self._refuse()
        return super().retire(keys, ending)

    def _refuse(self) -> None:
        if self.refuses:
            self._blocks.touch({self.read_meanwhile: 1}, 1_000_500, moves=True)
            raise StorageIOError("the disk is too slow; try again")


@pytest.mark.parametrize("together", [1, 100])
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_blocks_that_a_store_refused_to_mark_go_first_when_it_takes_them(policy: str, together: int) -> None:
    """Otherwise every refusal would make the coldest blocks the hottest, and hot ones would go in their place."""
    rig = EvictionRig({"g": group_of(policy=policy)})
    backend = Refusing()
    index = rig.add(backend=backend)
    for first in range(0, 100, together):
        await rig.write_chains(index, [[key] for key in range(first, first + together)])
        rig.clock.time += 1
    rig.groups["g"] = group_of(policy=policy, capacity=90 * BLOCK, ratio=1.0, hysteresis=0.0)
    backend.refuses = True
    for _ in range(3):
        with pytest.raises(StorageIOError):
            await rig.reclaimer.reclaim()
    backend.refuses = False
    evicted = await rig.settle()
    assert sorted(evicted) == list(range(len(evicted)))
    assert len(evicted) >= 10


async def test_a_block_that_is_read_while_it_is_marked_keeps_that_read() -> None:
    rig = EvictionRig({"g": group_of(policy="lru")})
    backend = Refusing()
    backend.read_meanwhile = 3
    index = rig.add(backend=backend)
    for key in range(20):
        await rig.write(index, [key])
        rig.clock.time += 1
    rig.groups["g"] = group_of(policy="lru", capacity=11 * BLOCK, ratio=1.0, hysteresis=0.0)
    backend.refuses = True
    with pytest.raises(StorageIOError):
        await rig.reclaimer.reclaim()
    backend.refuses = False
    evicted = await rig.settle()
    assert evicted == [key for key in range(len(evicted) + 1) if key != 3]
    assert len(evicted) >= 9


# ── The order over an index that is full already, as at a start ──


PLANS = [
    *(OrderPlan(EvictionPolicy(name)) for name in sorted(POLICIES)),
    OrderPlan(
        EvictionPolicy("lru"),
        (
            PrefixClass("deep", min_depth=40, policy=EvictionPolicy("fifo"), budget=0.5),
            PrefixClass("read", min_reads=3, priority=2, policy=EvictionPolicy("lfu")),
        ),
    ),
]


def blocks_of_any_kind(random: Random) -> dict[int, BlockRecord]:
    """Blocks with one location or two, most of them serving; many were written in the same second."""
    found, parent = dict[int, BlockRecord](), None
    for number, key in enumerate(random.sample(range(-(10**9), 10**9), 700)):
        places = []
        for each in range(random.choice([1, 1, 1, 2])):
            status = random.choice([LocationStatus.SERVING] * 5 + [LocationStatus.WRITING, LocationStatus.DELETING])
            written_at, priority = float(random.randrange(90, 95)), random.choice([0, 0, 3])
            place = index_records.place(f"{number // 40}-{each}", status, random.randrange(1, 9), written_at=written_at)
            places.append(place._replace(priority=priority))
        depth = number % 80
        found[key] = BlockRecord(parent if depth else None, depth, tuple(places))
        parent = key
    return found


def one_by_one(rows: Rows, plan: OrderPlan) -> tuple[dict[tuple[int, str], list[int]], int]:
    """Blocks in the order of their eviction by priority and policy, and the bytes of the first class, row by
    row."""
    ranked = list[tuple[Any, ...]]()
    policies = dict[tuple[int, str], Policy]()
    class_bytes = 0
    for row in filter(rows.is_resident, range(len(rows))):
        serving = [each for each in rows.locations(row) if each.status is LocationStatus.SERVING]
        at, reads = rows.access(row)
        prefix_class = plan.class_of(rows.depth(row), reads)
        settings_of, more = (prefix_class.policy, prefix_class.priority) if prefix_class else (plan.policy, 0)
        kind = rows.priority(row) + more, settings_of.name
        policy = policies.setdefault(kind, POLICIES[settings_of.name](partial(is_leaf, rows), settings_of))
        summary = Summary(serving[0].written_at, at, reads)
        ranked.append((kind, policy.rank(summary), -rows.depth(row), rows.key(row), row, summary))
        if plan.classes and prefix_class is plan.classes[0]:
            class_bytes += sum(each.size_bytes for each in serving)
    for kind, _, _, key, row, summary in sorted(ranked):
        policies[kind].restore(row, key, summary)
    return {kind: list(map(rows.key, policy.victims())) for kind, policy in policies.items()}, class_bytes


def is_leaf(rows: Rows, row: int) -> bool:
    return not any(map(rows.is_resident, rows.children(row)))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.policy.name}, {len(plan.classes)} classes")
async def test_the_order_over_a_full_index_is_that_of_its_blocks_one_by_one(plan: OrderPlan) -> None:
    random, backend = Random(3), MemoryBackend()
    blocks = blocks_of_any_kind(random)
    await index_records.write(backend, dict(blocks))
    await backend.touch({key: random.randrange(1, 5) for key in random.sample(list(blocks), 300)}, 96.0)
    await index_records.write(backend, dict.fromkeys(random.sample(list(blocks), 50)))
    order = LiveOrder.over(MetaIndex(backend, EvictionRig({}).storages), plan)
    assert order is not None
    rows = backend.observe(order)
    found = dict[tuple[int, str], list[int]]()
    for candidate in order.candidates(lambda _class: False):
        found.setdefault((candidate.priority, candidate.policy), []).append(candidate.key)
    expected, class_bytes = one_by_one(rows, plan)
    assert found == expected
    assert len(order) == sum(map(rows.is_resident, range(len(rows)))) > 450
    assert order.class_bytes("deep") == class_bytes
