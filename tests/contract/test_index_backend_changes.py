"""What every index backend promises about changes: compare-and-set, due times, accesses, removal of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest
from index_backends import RIGS, SHARED, Rig, opened
from index_records import listed, place, record, recount, used, write

from kvcm.index.backends.backend import Access, Change, IndexBackend
from kvcm.model.locations import BlockRecord, LocationStatus, Place
from kvcm.model.storages import StorageType

NFS, MOONCAKE = Place("nfs", StorageType.ST_NFS), Place("nfs", StorageType.ST_MOONCAKE)
SERVING = BlockRecord(None, 0, (place(),))


@pytest.fixture(params=RIGS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


@pytest.fixture
async def backend(rig: Rig) -> IndexBackend:
    return rig.fresh()


@pytest.fixture(params=SHARED)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


async def everything(backend: IndexBackend) -> list[object]:
    """All that can be asked of keys and parents up to 9."""
    keys = range(10)
    children = [sorted(await backend.children(key)) for key in keys]
    listing = sorted(await listed(backend, 100))
    asked = [await backend.get_many(keys), await backend.accesses(keys), await backend.due(1e12, 100)]
    return [*asked, children, listing, backend.key_count, used(backend.usage_bytes)]


async def test_who_read_an_older_record_loses_and_changes_nothing(backend: IndexBackend) -> None:
    await write(backend, {1: record(parent=5, due=10.0)})
    stale = (await backend.get_many([1]))[0]
    await write(backend, {1: record(parent=6, depth=1, due=20.0)})
    before = await everything(backend)
    for new in (record(parent=7, depth=2, size=99, due=30.0), None):
        written = await backend.write_many([Change(1, stale, new)])
        assert (list(written.lost), used(written.usage)) == ([1], {})
        assert await everything(backend) == before


async def test_winners_of_a_call_change_beside_losers(backend: IndexBackend) -> None:
    await write(backend, {key: record(depth=1) for key in range(8)})
    olds = await backend.get_many(range(8))
    await write(backend, {key: record(depth=2) for key in (1, 4, 6)})
    changes = [Change(key, old, record(parent=9, depth=3)) for key, old in enumerate(olds)]
    written = await backend.write_many(changes)
    assert sorted(written.lost) == [1, 4, 6]
    depths = [found and found.depth for found in await backend.get_many(range(8))]
    assert depths == [3, 2, 3, 3, 2, 3, 2, 3]
    assert sorted(await backend.children(9)) == [0, 2, 3, 5, 7]


async def test_usage_of_a_call_is_that_of_its_winners(backend: IndexBackend) -> None:
    """Invariant 4: whatever loses or wins, the counters are what the records say."""
    await write(backend, {1: BlockRecord(None, 0, (place(size=100),)), 2: BlockRecord(None, 0, (place(size=7),))})
    one, two = await backend.get_many([1, 2])
    await write(
        backend, {1: BlockRecord(None, 1, (place(size=100), place("x", size=50, kind=StorageType.ST_MOONCAKE)))}
    )
    written = await backend.write_many(
        [
            Change(1, one, None),
            Change(
                2, two, BlockRecord(None, 0, (place("y", size=9), place("z", size=4, kind=StorageType.ST_MOONCAKE)))
            ),
            Change(3, None, BlockRecord(None, 0, (place(size=1),))),
        ]
    )
    assert list(written.lost) == [1]
    assert used(written.usage) == {NFS: 9 - 7 + 1, MOONCAKE: 4}
    assert used(backend.usage_bytes) == await recount(backend) == {NFS: 100 + 9 + 1, MOONCAKE: 50 + 4}


async def test_a_removal_gives_its_bytes_back(backend: IndexBackend) -> None:
    await write(backend, {1: record(size=2**40), 2: record(size=3)})
    assert used(await write(backend, {1: None})) == {NFS: -(2**41)}
    assert used(backend.usage_bytes) == {NFS: 6}


async def test_absence_is_compared_too(backend: IndexBackend) -> None:
    await write(backend, {1: record(depth=1), 2: record(depth=1)})
    gone = (await backend.get_many([2]))[0]
    await write(backend, {2: None})
    changes = [Change(1, None, record(depth=5)), Change(2, gone, record(depth=5)), Change(3, None, None)]
    assert sorted((await backend.write_many(changes)).lost) == [1, 2]
    assert await backend.get_many([1, 2, 3]) == [record(depth=1), None, None]
    assert (backend.key_count, await listed(backend, 10)) == (1, [1])


async def test_due_blocks_come_earliest_first(backend: IndexBackend) -> None:
    await write(backend, {key: record(due=due) for key, due in {1: 30.0, 2: 10.5, 3: 20.0, 4: 40.0, 5: 0.0}.items()})
    await write(backend, {9: SERVING})
    assert await backend.due(30.0, 10) == [5, 2, 3, 1]
    assert await backend.due(29.999, 2) == [5, 2]
    assert await backend.due(-1.0, 10) == []


async def test_a_due_time_moves_and_goes_with_its_location(backend: IndexBackend) -> None:
    await write(backend, {key: record(due=10.0) for key in (1, 2, 3, 4)})
    deleting = BlockRecord(None, 0, (place(), place("d", LocationStatus.DELETING, deadline=7.0)))
    await write(backend, {1: record(due=20.0), 2: SERVING, 3: None, 4: deleting})
    assert await backend.due(19.0, 10) == [4]
    assert await backend.due(20.0, 10) == [4, 1]
    await write(backend, {2: record(due=5.0), 3: record(due=6.0)})
    assert await backend.due(20.0, 10) == [2, 3, 4, 1]


async def test_nothing_is_due_before_a_backend_says_so(backend: IndexBackend) -> None:
    """Who looks for what is due goes by that."""
    for key, due in {1: 30.0, 2: 10.0, 3: 20.0}.items():
        await write(backend, {key: record(due=due)})
        assert backend.due_from <= min(30.0, due)
        assert await backend.due(backend.due_from - 0.001, 10) == []
    await write(backend, {2: None})
    assert backend.due_from <= 20.0
    await write(backend, {1: record(due=15.0)})
    assert backend.due_from <= 15.0


async def test_reads_are_counted_per_block(backend: IndexBackend) -> None:
    await write(backend, {1: SERVING, 2: SERVING, 3: SERVING})
    assert await backend.accesses([3, 1, 8]) == [Access(1234, 0), Access(1234, 0), None]
    await backend.touch({1: 2, 2: 1, 8: 5}, 2000.75)
    await backend.touch({1: 40}, 3000.0)
    assert await backend.accesses([1, 2, 3, 8]) == [Access(3000, 42), Access(2000, 1), Access(1234, 0), None]
    assert await backend.get_many([8]) == [None]
    assert backend.key_count == 3


async def test_a_change_keeps_accesses_and_a_removal_forgets_them(backend: IndexBackend) -> None:
    await write(backend, {1: SERVING, 2: SERVING})
    await backend.touch({1: 7, 2: 7}, 5000.0)
    await write(backend, {1: BlockRecord(None, 1, (place(written_at=9000.0),)), 2: None})
    assert await backend.accesses([1, 2]) == [Access(5000, 7), None]
    await write(backend, {2: BlockRecord(None, 0, (place(written_at=6000.0),))})
    assert await backend.accesses([2]) == [Access(6000, 0)]


async def test_nothing_is_left_after_a_drop(rig: Rig) -> None:
    backend, neighbour = rig.fresh(), rig.fresh()
    for one in (backend, neighbour):
        await write(one, {key: record(parent=key // 2) for key in range(600)})
    await backend.drop()
    assert await everything(backend) == await everything(rig.fresh())
    assert await backend.random_sample(10, Random(1)) == []
    assert (neighbour.key_count, used(neighbour.usage_bytes)) == (600, {NFS: 600 * 20})
    assert sorted(await listed(neighbour, 100)) == list(range(600))
    await write(backend, {1: record()})
    assert (backend.key_count, used(backend.usage_bytes)) == (1, {NFS: 20})


async def test_no_keys_cost_nothing(backend: IndexBackend) -> None:
    await backend.touch({}, 1.0)
    assert await backend.accesses([]) == []
    assert list((await backend.write_many([])).lost) == []
    assert await backend.due(1e12, 10) == []


async def test_another_manager_hears_what_was_written(shared: Rig) -> None:
    assert shared.beside is not None
    ours = shared.fresh()
    theirs = shared.beside(ours)
    await write(ours, {key: record(parent=1, size=2**41) for key in range(50)})
    assert await theirs.get_many(range(50)) == [record(parent=1, size=2**41)] * 50
    assert theirs.key_count == 0
    await theirs.refresh()
    assert (theirs.key_count, used(theirs.usage_bytes)) == (50, {NFS: 50 * 2**42})
    await write(theirs, {1: None})
    await ours.refresh()
    assert (ours.key_count, used(ours.usage_bytes)) == (49, {NFS: 49 * 2**42})


async def test_of_two_managers_exactly_one_changes_a_record(shared: Rig) -> None:
    assert shared.beside is not None
    ours = shared.fresh()
    theirs = shared.beside(ours)
    keys = range(100)
    for round_number in range(10):
        olds = await ours.get_many(keys)
        news = [record(depth=2 * round_number + side, size=side + 1) for side in (0, 1)]
        forward = [Change(key, old, news[0]) for key, old in zip(keys, olds, strict=True)]
        backward = [Change(key, old, news[1]) for key, old in zip(keys, olds, strict=True)][::-1]
        outcomes = await asyncio.gather(ours.write_many(forward), theirs.write_many(backward))
        lost = [set(outcome.lost) for outcome in outcomes]
        assert lost[0] | lost[1] == set(keys)
        assert lost[0].isdisjoint(lost[1])
        assert await theirs.get_many(keys) == [news[1 if key in lost[0] else 0] for key in keys]
    await ours.refresh()
    assert used(ours.usage_bytes) == await recount(theirs)


async def test_no_update_is_lost_between_managers(shared: Rig) -> None:
    """Each adds 1 to the depth of every block, again and again, reading anew whatever it lost."""
    assert shared.beside is not None
    ours = shared.fresh()
    theirs = shared.beside(ours)
    keys, additions = list(range(20)), 10
    await write(ours, {key: record(depth=0) for key in keys})

    async def add_one(backend: IndexBackend) -> None:
        left = keys
        while left:
            found = await backend.get_many(left)
            changes = [
                Change(k, old, old._replace(depth=old.depth + 1)) for k, old in zip(left, found, strict=True) if old
            ]
            left = list((await backend.write_many(changes)).lost)

    async def add(backend: IndexBackend) -> None:
        for _ in range(additions):
            await add_one(backend)

    await asyncio.gather(add(ours), add(theirs), add(ours))
    assert await ours.get_many(keys) == [record(depth=3 * additions)] * len(keys)
