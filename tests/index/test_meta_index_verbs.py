"""MetaIndex on the memory backend, verb by verb."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_rig import CountingBackend, TableView, location, record

from kvcm.index.meta_index import Change, MetaIndex
from kvcm.model.locations import BlockRecord, LocationStatus, Place
from kvcm.model.storages import StorageType

NFS, FS = Place("nfs", StorageType.ST_NFS), Place("fs", StorageType.ST_3FS)


class Rig:
    def __init__(self, max_key_count: int = 1 << 62) -> None:
        self.view = TableView({"nfs": 3, "fs": 2})
        self.backend = CountingBackend()
        self.told: list[tuple[dict[Place, int], int]] = []
        self.index = MetaIndex(
            self.backend,
            self.view,
            max_key_count=max_key_count,
            on_usage=lambda: lambda usage, keys: self.told.append((dict(usage), keys)),
        )


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize("shard_count", [0, -1, 3, 12, 1000])
def test_shards_are_a_power_of_two(shard_count: int) -> None:
    with pytest.raises(ValueError, match=str(shard_count)):
        MetaIndex(CountingBackend(), TableView(), shard_count=shard_count)


async def test_put_stores_and_replaces(rig: Rig) -> None:
    first, second = record(location("a")), record(location("b"), depth=3)
    assert await rig.index.put({1: first, 2: first}) == [Change(1, None, first), Change(2, None, first)]
    assert await rig.index.put({2: second}) == [Change(2, first, second)]
    assert await rig.index.get([2, 3, 1]) == [second, None, first]
    assert rig.index.key_count == 2


async def test_update_replaces_only_what_is_there(rig: Rig) -> None:
    old, new = record(location("a")), record(location("b"))
    await rig.index.put({1: old})
    assert await rig.index.update({1: new, 2: new}) == [Change(1, old, new), Change(2, None, None)]
    assert await rig.index.get([1, 2]) == [new, None]


async def test_delete_removes_and_forgives(rig: Rig) -> None:
    await rig.index.put({1: record(), 2: record()})
    changes = await rig.index.delete([1, 5, 1])
    assert [(change.key, change.new) for change in changes] == [(1, None), (5, None)]
    assert await rig.index.exists([1, 2, 5]) == [False, True, False]


async def test_exists_sees_every_status(rig: Rig) -> None:
    await rig.index.put({status: record(location(status=status)) for status in LocationStatus})
    assert await rig.index.exists([*LocationStatus, 99]) == [True, True, True, False]
    readable = [answer is not None for answer in await rig.index.answers(list(LocationStatus))]
    assert readable == [status is LocationStatus.SERVING for status in LocationStatus]


async def test_modify_sees_each_key_once_and_same_means_no_change(rig: Rig) -> None:
    await rig.index.put({1: record()})
    calls: list[int] = []

    def look(key: int, old: BlockRecord | None) -> BlockRecord | None:
        calls.append(key)
        return old

    changes = await rig.index.read_modify_write([2, 1, 2, 1], look)
    assert calls == [2, 1]
    assert [change.key for change in changes] == [2, 1]
    assert changes[1].new is changes[1].old
    assert rig.told == [({NFS: 10}, 1)]


async def test_an_error_in_modify_changes_nothing(rig: Rig) -> None:
    await rig.index.put({1: record()})

    def fail(key: int, old: BlockRecord | None) -> BlockRecord | None:
        if key == 2:
            raise ZeroDivisionError
        return None

    with pytest.raises(ZeroDivisionError):
        await rig.index.read_modify_write([1, 2], fail)
    assert await rig.index.exists([1]) == [True]
    assert rig.index.free_key_count == (1 << 62) - 1


# Answers.


async def test_answers_are_in_order_with_none_for_a_miss(rig: Rig) -> None:
    await rig.index.put({1: record(location("a")), 2: record(location("b"))})
    a, b = location("a").chunk, location("b").chunk
    assert await rig.index.answers([2, 9, 1, 2]) == [b, None, a, b]
    assert await rig.index.answers([]) == []


async def test_a_prefix_ends_before_the_first_miss(rig: Rig) -> None:
    await rig.index.put({key: record(location(str(key))) for key in (1, 2, 4)})
    chunks = [location(str(key)).chunk for key in (1, 2)]
    assert await rig.index.answers([1, 2, 3, 4], stop_at_miss=True) == chunks
    assert await rig.index.answers([3, 1], stop_at_miss=True) == []
    assert await rig.index.answers([1, 2], stop_at_miss=True) == chunks


async def test_known_answers_ask_no_backend(rig: Rig) -> None:
    """The hot path: what was written or read once is answered from the search cache."""
    await rig.index.put({key: record() for key in range(5)})
    rig.backend.asked.clear()
    assert None not in await rig.index.answers(range(5), stop_at_miss=True)
    assert None not in await rig.index.answers(range(5))
    assert rig.backend.asked == []


async def test_after_a_storage_changed_records_are_asked_once(rig: Rig) -> None:
    await rig.index.put({key: record() for key in range(5)})
    rig.view.change("fs", None)
    rig.backend.asked.clear()
    await rig.index.answers([3, 4])
    await rig.index.answers([3, 4])
    assert rig.backend.asked == [[3, 4]]


async def test_a_prefix_match_asks_for_a_few_records_beyond_its_hits(rig: Rig) -> None:
    await rig.index.put({key: record() for key in range(3)})
    rig.backend.asked.clear()
    assert len(await rig.index.answers(range(100), stop_at_miss=True)) == 3
    assert rig.backend.asked == [list(range(3, 19))]


async def test_a_long_prefix_of_unknown_records_is_asked_for_in_few_calls(rig: Rig) -> None:
    """Sixteen to see whether there is anything at all, then many at once; nothing behind the first miss is returned."""
    await rig.index.put({key: record() for key in range(3000) if key != 2000})
    rig.view.change("fs", None)
    rig.backend.asked.clear()
    assert len(await rig.index.answers(range(3000), stop_at_miss=True)) == 2000
    assert [(asked[0], len(asked)) for asked in rig.backend.asked] == [(0, 16), (16, 1024), (1040, 1024)]


async def test_disabled_storages_vanish_and_come_back(rig: Rig) -> None:
    await rig.index.put({1: record(location(storage="nfs")), 2: record(location(storage="fs"))})
    rig.view.change("nfs", None)
    assert [answer is None for answer in await rig.index.answers([1, 2])] == [True, False]
    rig.view.change("nfs", 3)
    assert None not in await rig.index.answers([1, 2])


# Limits.


async def test_new_keys_beyond_the_limit_are_refused() -> None:
    rig = Rig(max_key_count=3)
    changes = await rig.index.put({key: record() for key in range(5)})
    assert [change.refused for change in changes] == [False, False, False, True, True]
    assert [change.new is None for change in changes] == [False, False, False, True, True]
    assert (rig.index.key_count, rig.index.free_key_count, rig.index.max_key_count) == (3, 0, 3)
    assert rig.index.usage_bytes[NFS] == 30


async def test_known_keys_are_never_refused() -> None:
    rig = Rig(max_key_count=2)
    await rig.index.put({1: record(), 2: record()})
    changes = await rig.index.put({1: record(location("b")), 2: record(location("b")), 3: record()})
    assert [change.refused for change in changes] == [False, False, True]
    await rig.index.delete([1])
    assert rig.index.free_key_count == 1
    assert not (await rig.index.put({3: record()}))[0].refused


# Usage.


async def test_usage_follows_every_change(rig: Rig) -> None:
    nfs, fs = location("a", size_bytes=10), location("b", "fs", StorageType.ST_3FS, size_bytes=7)
    await rig.index.put({1: record(nfs), 2: record(nfs, fs)})
    assert dict(rig.index.usage_bytes) == {NFS: 20, FS: 7}
    await rig.index.put({1: record(fs)})
    assert dict(rig.index.usage_bytes) == {NFS: 10, FS: 14}
    await rig.index.delete([1, 2])
    assert not any(rig.index.usage_bytes.values())


async def test_a_change_of_status_moves_no_usage(rig: Rig) -> None:
    await rig.index.put({1: record(location(status=LocationStatus.WRITING))})
    rig.told.clear()
    for status in (LocationStatus.SERVING, LocationStatus.DELETING):
        await rig.index.put({1: record(location(status=status))})
    assert rig.told == []
    assert rig.index.usage_bytes[NFS] == 10


# A location keeps its size and its type for life.
PLACES = st.integers(0, 5).map(
    lambda n: location(f"l{n}", "nfs", StorageType.ST_NFS if n % 2 else StorageType.ST_3FS, size_bytes=n * 3)
)
RECORDS = st.one_of(
    st.none(), st.lists(PLACES, min_size=1, max_size=4, unique_by=lambda place: place.id).map(lambda p: record(*p))
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(batches=st.lists(st.dictionaries(st.integers(0, 6), RECORDS, max_size=6), max_size=8), limit=st.integers(1, 8))
async def test_invariant_4_usage_is_the_recount(batches: list[dict[int, BlockRecord | None]], limit: int) -> None:
    rig = Rig(max_key_count=limit)
    for batch in batches:
        await rig.index.read_modify_write(batch, lambda key, _old, batch=batch: batch[key])
        recount: Counter[Place] = Counter()
        for stored in await rig.index.get(range(7)):
            for place in stored.locations if stored is not None else ():
                recount[place.place] += place.size_bytes
        told: Counter[Place] = Counter()
        for usage, _ in rig.told:
            told.update(usage)
        assert +recount == +Counter(rig.index.usage_bytes) == +told
        assert sum(keys for _, keys in rig.told) == rig.index.key_count
        assert all(keys or any(usage.values()) for usage, keys in rig.told), "no news is not told"
        assert rig.index.key_count <= limit


# Listing.


async def test_children_scan_and_samples_come_from_the_backend(rig: Rig) -> None:
    await rig.index.put({1: record(), 2: record(parent=1), 3: record(parent=1), 4: record(parent=2)})
    assert sorted(await rig.index.children(1)) == [2, 3]
    assert [sorted(page) for page in [page async for page in rig.index.scan(4)]] == [[1, 2, 3, 4]]
    assert sorted(await rig.index.random_sample(10, Random(1))) == [1, 2, 3, 4]
    assert len(await rig.index.random_sample(2, Random(1))) == 2
