"""Over a shared store blocks that lie together are chosen, marked and deleted together: the same ones as one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import pytest
from eviction_rig import BLOCK, EvictionRig, group_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from index_backends import Rig, opened
from reclaim_rig import Rig as DeletionRig
from thoroughness import examples

from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import LocationStatus

FOR_EVER = 1e12


@pytest.fixture(params=["redis-runs", "redis-runs-cluster"])
async def backends(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


class Tree:
    """Blocks in a real index, and what a plain dict says of them.

    Attributes:
        parents: of the blocks that can be read.
        read_at: of these, in whole seconds.
        reads: of these.
    """

    def __init__(self, backends: Rig, policy: str) -> None:
        self.rig = EvictionRig({"g": group_of(policy=policy)})
        self.policy = policy
        self.backend = backends.fresh()
        self.index: MetaIndex = self.rig.add(backend=self.backend)
        self.rig.reclaimer.update_orders()
        self.keys = count(1)
        self.parents: dict[int, int | None] = {}
        self.read_at: dict[int, int] = {}
        self.reads: Counter[int] = Counter()
        self.pinned: set[int] = set()

    def chain(self, key: int | None) -> list[int]:
        """The blocks from the head of a chain to one."""
        chain: list[int] = []
        while key is not None:
            chain.append(key)
            key = self.parents[key]
        return chain[::-1]

    def pick(self, number: int) -> int | None:
        blocks = [*self.parents, None]
        return blocks[number % len(blocks)]

    async def write(self, behind: int | None, length: int) -> list[int]:
        """Blocks of one write behind another one."""
        prefix = self.chain(behind)
        keys = [next(self.keys) * 0x9E3779B97F4A7C15 % (1 << 63) for _ in range(length)]
        await self.rig.write(self.index, keys, len(prefix), behind)
        self.parents |= zip(keys, [behind, *keys], strict=False)
        self.read_at |= dict.fromkeys(keys, int(self.rig.clock.time))
        return keys

    async def read(self, key: int | None) -> None:
        chain = self.chain(key)
        await self.rig.read(self.index, chain)
        self.read_at |= dict.fromkeys(chain, int(self.rig.clock.time))
        self.reads.update(chain)

    def ranks(self) -> dict[int, tuple[int, int]]:
        """Smaller ones go first."""
        counts_reads = self.policy == "lfu"
        return {key: (self.reads[key] if counts_reads else 0, at) for key, at in self.read_at.items()}

    async def pin(self, keys: Sequence[int]) -> None:
        """Another writer's pin takes these blocks out of their runs."""
        records = await self.index.get(keys)
        pinned = {
            key: record._replace(locations=tuple(each._replace(pinned_until=FOR_EVER) for each in record.locations))
            for key, record in zip(keys, records, strict=True)
            if record is not None
        }
        await self.index.put(pinned)
        self.pinned |= pinned.keys()

    def is_leaf(self, key: int) -> bool:
        return key not in set(self.parents.values())

    def held(self) -> set[int]:
        """Blocks that cannot go: pinned ones, and those before them."""
        return {key for pinned in self.pinned for key in self.chain(pinned)}

    async def evict(self, blocks: int) -> list[int]:
        """Evict so many blocks, and forget them."""
        self.rig.groups["g"] = group_of(
            policy=self.policy, used_size=(len(self.parents) - blocks) * BLOCK, hysteresis=0.0
        )
        victims = await self.rig.settle()
        self.rig.groups["g"] = group_of(policy=self.policy)
        for key in victims:
            del self.parents[key], self.read_at[key], self.reads[key]
        gone = set(victims)
        assert not gone & set(self.parents.values()), "no block lost its prefix (invariant 7)"
        assert set(await self.rig.resident(self.index)) == set(self.parents)
        return victims


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1 << 16), st.integers(1, 150)),
        st.tuples(st.sampled_from(["read", "wait"]), st.integers(0, 1 << 16), st.just(0)),
        st.tuples(st.just("pin"), st.integers(0, 1 << 16), st.integers(1, 3)),
        st.tuples(st.just("evict"), st.integers(0, 1 << 16), st.integers(1, 200)),
    ),
    min_size=6,
    max_size=16,
)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, policy=st.sampled_from(["lru", "leaf_lru", "lfu"]))
@example(
    steps=[("write", 0, 100), ("wait", 0, 0), ("write", 20, 100), ("read", 150, 0), ("evict", 0, 90), ("evict", 0, 60)],
    policy="leaf_lru",
)
@example(  # seven chains whose ends were written later than all heads
    steps=[
        *(("write", 64 * chain, 64) for chain in range(7)),
        *(("write", 64 * chain + 63, 64) for chain in range(7)),
        ("evict", 0, 200),
    ],
    policy="leaf_lru",
)
async def test_as_many_go_as_have_to_and_the_coldest_ends_of_chains_first(
    backends: Rig, steps: list[tuple[str, int, int]], policy: str
) -> None:
    """Invariant 7, whatever branches, is read in part, or is pinned."""
    tree = Tree(backends, policy)
    for verb, number, size in steps:
        tree.rig.clock.time += 1
        key = tree.pick(number)
        match verb:
            case "write":
                await tree.write(key, size)
            case "read":
                await tree.read(key)
            case "pin":
                await tree.pin(tree.chain(key)[-size:])
            case "wait":
                tree.rig.clock.time += number % 20
            case "evict":
                await check_eviction(tree, size)


async def check_eviction(tree: Tree, blocks: int) -> None:
    rank, held, wanted = tree.ranks(), tree.held(), min(blocks, len(tree.parents) - 1)
    if wanted <= 0:
        return
    ends, free = {key for key in tree.parents if tree.is_leaf(key)}, len(tree.parents) - len(held)
    victims = await tree.evict(wanted)
    assert len(victims) == min(wanted, free), "no more and no less than the need asks for"
    assert not held & set(victims)
    # Of ends of chains that were there from the start, none that is colder than a victim is left.
    left = min((rank[key] for key in (ends - held) & set(tree.parents)), default=(1 << 60, 0))
    assert max((rank[key] for key in victims), default=(0, 0)) <= left
    await tree.rig.executor.run_due()


async def test_of_a_branch_within_a_run_goes_what_is_behind_it(backends: Rig) -> None:
    tree = Tree(backends, "leaf_lru")
    trunk = await tree.write(None, 64)
    tree.rig.clock.time += 10
    branch = await tree.write(trunk[40], 30)
    await tree.pin(branch)
    assert set(await tree.evict(40)) == set(trunk[41:])


async def test_a_block_with_many_followers_stays_until_they_are_gone(backends: Rig) -> None:
    tree = Tree(backends, "leaf_lru")
    trunk = await tree.write(None, 10)
    tree.rig.clock.time += 10
    branches = [await tree.write(trunk[-1], 2) for _ in range(40)]
    assert trunk[-1] not in await tree.evict(70)
    assert len(await tree.evict(19)) == 19
    assert set(tree.parents) == set(trunk[:1]), branches


async def test_two_runs_that_follow_each_other_stay(backends: Rig) -> None:
    """Writers can make two blocks each other's parents; others go."""
    tree = Tree(backends, "leaf_lru")
    first, second = range(1, 65), range(101, 165)
    await tree.rig.write(tree.index, first, 64, second[-1])
    await tree.rig.write(tree.index, second, 0, first[-1])
    tree.rig.clock.time += 10
    keys = await tree.write(None, 30)
    tree.rig.groups["g"] = group_of(used_size=(128 + 10) * BLOCK, hysteresis=0.0)
    assert set(await tree.rig.settle()) == set(keys[10:])


async def test_what_another_manager_changes_between_choice_and_mark_stays(backends: Rig) -> None:
    """The compare-and-set of a run decides block by block."""
    tree = Tree(backends, "leaf_lru")
    keys = await tree.write(None, 128)
    inner: Any = tree.backend
    change_runs, pinned = inner.change_runs, keys[70:75]

    async def after_another_manager(changes: Any) -> Any:
        inner.change_runs = change_runs
        await tree.pin(pinned)
        return await change_runs(changes)

    inner.change_runs = after_another_manager
    tree.rig.groups["g"] = group_of(used_size=1, hysteresis=0.0)
    first = await tree.rig.reclaimer.reclaim()
    left = set(await tree.rig.resident(tree.index))
    assert set(pinned) <= left
    assert first == 128 - len(left)
    assert sum(len(each.keys) for each in tree.rig.evicted) == first
    used = tree.index.usage_bytes
    await tree.index.refresh()
    assert tree.index.usage_bytes == used, "sums are those of the blocks (invariant 4)"


async def test_where_another_manager_changed_all_that_was_chosen_the_round_goes_on(backends: Rig) -> None:
    tree = Tree(backends, "leaf_lru")
    keys = await tree.write(None, 128)
    inner: Any = tree.backend
    change_runs = inner.change_runs

    async def after_another_manager(changes: Any) -> Any:
        inner.change_runs = change_runs
        records = zip(keys, await tree.index.get(keys), strict=True)
        again = {key: each._replace(locations=(each.locations[0]._replace(written_at=1.0),)) for key, each in records}
        await tree.index.put(again)
        return await change_runs(changes)

    inner.change_runs = after_another_manager
    tree.rig.groups["g"] = group_of(used_size=100 * BLOCK, hysteresis=0.0)
    assert await tree.rig.reclaimer.reclaim() == 28


async def test_what_was_marked_is_reported_where_the_store_of_another_instance_fails(backends: Rig) -> None:
    rig = EvictionRig({"g": group_of()})
    indexes = [rig.add(name, backend=backends.fresh()) for name in ("i", "j")]
    for first, index in enumerate(indexes):
        await rig.write(index, range(1000 * first + 1, 1000 * first + 65))
        rig.clock.time += 1

    async def fail(_changes: Any) -> Any:
        raise StorageIOError("the store is away")

    indexes[1]._backend.change_runs = fail  # type: ignore[attr-defined]
    rig.groups["g"] = group_of(used_size=28 * BLOCK, hysteresis=0.0)
    rig.reclaimer.update_orders()
    with pytest.raises(StorageIOError):
        await rig.reclaimer.reclaim()
    gone = 64 - len(await rig.resident(indexes[0]))
    assert gone > 0
    assert rig.reclaimer.stats.submitted_blocks == gone == sum(len(each.keys) for each in rig.evicted)


async def test_an_eviction_is_reported_with_the_changes_of_its_blocks(backends: Rig) -> None:
    tree = Tree(backends, "lru")
    keys = await tree.write(None, 100)
    assert set(await tree.evict(30)) == set(keys[70:])
    (evicted,) = [each for each in tree.rig.evicted if each.keys]
    assert (evicted.policy, evicted.locations, evicted.size_bytes) == ("lru", 30, 30 * BLOCK)
    changes = list(evicted.changes)
    assert [change.key for change in changes] == list(evicted.keys)
    assert {each.status for change in changes if change.old for each in change.old.locations} == {
        LocationStatus.SERVING
    }
    assert {each.status for change in changes if change.new for each in change.new.locations} == {
        LocationStatus.DELETING
    }
    assert {each.chunk for change in changes if change.new for each in change.new.locations} != {b""}


async def test_of_a_run_goes_what_was_deleted_and_nothing_that_failed_or_is_held(backends: Rig) -> None:
    rig = DeletionRig(backend=backends.fresh())
    uris = dict(zip(keys := list(range(1, 101)), await rig.chain(keys), strict=True))
    storage = rig.storages.faults["a"]
    storage.stubborn = {uris[20][0], uris[21][1]}
    rig.held = dict.fromkeys(range(50, 60), rig.clock.time + 30)
    await rig.run_due()
    assert await rig.left() == [20, 21, *range(50, 60)]
    assert rig.executor.deleted.blocks == rig.executor.deleted.locations == 88
    assert sorted(storage.forgotten_uris) == sorted(
        uri for key in {*keys} - {20, 21, *range(50, 60)} for uri in uris[key]
    )
    storage.stubborn = set()
    await rig.run_due(after=40)
    assert await rig.left() == []
    assert storage.twice == set()
