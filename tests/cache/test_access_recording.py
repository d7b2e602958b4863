"""Which blocks were read, how often and when: written down in batches, for eviction alone (decision 18)."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from cache_rig import FakeClock, TableView, instance, location, opened
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.cache.access import AccessRecorder
from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.match import MatchMode, MatchQuery
from kvcm.cache.pages import PAGE_KEYS
from kvcm.index.backends.backend import Access
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.instances import Placement
from kvcm.model.locations import BlockRecord


class CountingBackend(MemoryBackend):
    """The memory backend, keeping what it is told of reads."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: list[dict[int, int]] = []

    async def touch(self, counts: Mapping[int, int], at: float) -> None:
        self.touched.append(dict(counts))
        await super().touch(counts, at)


def new_cache(uid: int) -> tuple[InstanceCache, CountingBackend]:
    backend = CountingBackend()
    return InstanceCache(instance(), Placement(uid, 16), MetaIndex(backend, TableView())), backend


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    reads=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 9), max_size=6), st.booleans()), max_size=20)
)
async def test_counts_are_merged_per_instance_and_none_is_lost(reads: list[tuple[int, list[int], bool]]) -> None:
    recorder = AccessRecorder(FakeClock())
    caches = [new_cache(uid) for uid in range(2)]
    expected: list[Counter[int]] = [Counter(), Counter()]
    for which, keys, drained in reads:
        recorder.record(caches[which][0], keys)
        expected[which].update(keys)
        if drained:
            await recorder.drain()
            assert recorder.waiting_count == 0
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
    assert [len(page) for page in backend.touched] == [PAGE_KEYS, PAGE_KEYS, 10]
    assert {count for page in backend.touched for count in page.values()} == {2}


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
