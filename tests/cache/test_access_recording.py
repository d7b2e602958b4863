"""Which blocks were read, how often and when: written down in batches, for eviction alone (decision 18)."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import pytest
from cache_rig import TableView, instance, location, opened
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.access import AccessRecorder
from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.observer import CacheObserver
from kvcm.cache.pages import PAGE_KEYS
from kvcm.index.backends.backend import Access
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.groups import EvictionPolicy
from kvcm.model.instances import Instance, Placement
from kvcm.model.locations import BlockRecord


class CountingBackend(MemoryBackend):
    """The memory backend, keeping what it is told of reads."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[dict[int, int]] = []
        self.moved: list[bool] = []

    async def touch(self, counts: Mapping[int, int], at: float, *, moves: bool = True) -> None:
        self.touched.append(dict(counts))
        self.moved.append(moves)
        await super().touch(counts, at, moves=moves)


def new_cache(uid: int) -> tuple[InstanceCache, CountingBackend]:
    backend = CountingBackend()
    return InstanceCache(instance(), Placement(uid, 16), MetaIndex(backend, TableView())), backend


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    reads=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 9), max_size=6), st.booleans()), max_size=20)
)
async def test_counts_are_merged_per_instance_and_none_is_lost(reads: list[tuple[int, list[int], bool]]) -> None:
    """And they come in the order of the last reads, of which those of a request run from its tail to its head."""
    recorder = AccessRecorder(FakeClock())
    caches = [new_cache(uid) for uid in range(2)]
    expected: list[Counter[int]] = [Counter(), Counter()]
    order: list[list[int]] = [[], []]
    for which, keys, drained in reads:
        recorder.record(caches[which][0], keys)
        expected[which].update(keys)
        order[which] += keys[::-1]
        if drained:
            await recorder.drain()
            assert recorder.waiting_count == 0
            for reads_in_order, (_, backend) in zip(order, caches, strict=True):
                if reads_in_order:
                    assert list(backend.touched[-1]) == list(dict.fromkeys(reads_in_order[::-1]))[::-1]
                reads_in_order.clear()
    assert recorder.waiting_count <= sum(map(Counter.total, expected))
    await recorder.drain()
    for counts, (_, backend) in zip(expected, caches, strict=True):
        told: Counter[int] = Counter()
        for page in backend.touched:
            told.update(page)
        assert told == counts
    assert recorder.dropped == 0


async def test_many_reads_are_drained_in_pages() -> None:
    recorder, (cache, backend) = AccessRecorder(FakeClock()), new_cache(1)
    for _ in range(2):
        recorder.record(cache, range(2 * PAGE_KEYS + 10))
    await recorder.drain()
    assert [key for page in backend.touched for key in page] == [*range(2 * PAGE_KEYS + 10)][::-1]
    assert {count for page in backend.touched for count in page.values()} == {2}


@pytest.mark.parametrize(("is_shared", "most"), [(False, 256), (True, PAGE_KEYS)])
async def test_a_drain_gives_way(is_shared: bool, most: int) -> None:
    """Small requests and large ones: no more than about a slice of keys is worked on without a pause."""
    recorder, (cache, backend) = AccessRecorder(FakeClock()), new_cache(1)
    backend.is_shared = is_shared
    for keys in (*(range(n, n + 10) for n in range(100)), range(1000, 3000)):
        recorder.record(cache, keys)
    pauses, drain = 0, asyncio.create_task(recorder.drain())
    while not drain.done():
        pauses += 1
        await asyncio.sleep(0)
    assert max(map(len, backend.touched)) == most
    assert pauses >= 3000 / 300 + len(backend.touched)


@pytest.mark.parametrize(
    ("policy", "moves"),
    [
        (EvictionPolicy("lru"), True),
        (EvictionPolicy("sieve"), False),
        (EvictionPolicy("ttl"), False),
        (EvictionPolicy("ttl", 5, ttl_sliding=True), True),
    ],
)
async def test_reads_move_blocks_only_where_the_policy_orders_by_reads(policy: EvictionPolicy, moves: bool) -> None:
    cache, backend = new_cache(1)
    recorder = AccessRecorder(FakeClock(), lambda asked: policy if asked is cache else EvictionPolicy())
    recorder.record(cache, [1])
    await recorder.drain()
    assert backend.moved == [moves]


async def test_the_policy_is_that_of_the_group_at_the_time_of_the_drain() -> None:
    with opened() as rig:
        await rig.store([1, 2])
        index = rig.manager.cache("i").index
        (written, _) = await index.accesses([1, 2])
        assert written is not None
        groups = rig.manager._registry.groups
        group = groups.get("group")
        strategy = replace(group.cache_config.reclaim_strategy, policy=EvictionPolicy("fifo"))
        config = replace(group.cache_config, reclaim_strategy=strategy)
        await groups.update(replace(group, cache_config=config, version=group.version + 1), group.version)
        rig.wait(60)
        await rig.manager.match("i", MatchQuery(MatchMode.PREFIX_MATCH, [1, 2]))
        await rig.manager.accesses.drain()
        assert await index.accesses([1, 2]) == [Access(written.at, 1)] * 2


async def test_what_waits_is_bounded_and_the_newest_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcm.cache.access._MOST_KEYS", 10)
    recorder, (cache, backend) = AccessRecorder(FakeClock()), new_cache(1)
    for keys in ([1] * 6, [2] * 5, [3] * 4):
        recorder.record(cache, keys)
    assert (recorder.waiting_count, recorder.dropped) == (10, 5)
    await recorder.drain()
    assert backend.touched == [{1: 6, 3: 4}]
    recorder.record(cache, [2] * 10)
    assert (recorder.waiting_count, recorder.dropped) == (10, 5)


@pytest.mark.parametrize(("peek", "reads"), [(False, [1, 1, 0]), (True, [0, 0, 0])])
async def test_a_match_counts_what_it_hit_unless_it_only_peeks(peek: bool, reads: Sequence[int]) -> None:
    with opened() as rig:
        await rig.store([1, 2, 3])
        index = rig.manager.cache("i").index
        before = await index.accesses([1, 2, 3])
        rig.wait(60)
        await rig.manager.match("i", MatchQuery(MatchMode.PREFIX_MATCH, [1, 2, 99]), peek=peek)
        await rig.manager.accesses.drain()
        at = int(rig.clock.now())
        expected = [Access(at, 1) if count else old for count, old in zip(reads, before, strict=True)]
        assert await index.accesses([1, 2, 3]) == expected


async def test_reads_of_blocks_that_are_gone_leave_no_trace() -> None:
    recorder, (cache, _) = AccessRecorder(FakeClock()), new_cache(1)
    await cache.index.put({1: BlockRecord(None, 0, (location("a"),))})
    recorder.record(cache, [1, 2])
    await cache.index.delete([1])
    await recorder.drain()
    assert await cache.index.accesses([1, 2]) == [None, None]
    assert cache.index.key_count == 0


class Revisits:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def revisited(self, _instance: Instance, seconds: float) -> None:
        self.seconds.append(seconds)


async def test_times_between_reads_are_told_of_some_blocks() -> None:
    clock, told = FakeClock(), Revisits()
    recorder = AccessRecorder(clock)
    recorder.observer = cast("CacheObserver", told)
    cache, _ = new_cache(0)
    await cache.index.put({key: BlockRecord(None, 0, (location("a"),)) for key in range(640)})
    for _ in range(3):  # nothing is told of the first read
        recorder.record(cache, range(640))
        await recorder.drain()
        clock.time += 7
    assert set(told.seconds) == {7.0}
    assert 2 <= len(told.seconds) / 2 <= 30  # about one in 64
