"""Blocks whose prefix is gone, on every kind of index (invariant 7)."""

from collections.abc import AsyncIterator

import pytest
from index_backends import RIGS, opened
from index_records import place

from kvcm.index.backends.backend import IndexBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import BlockRecord, LocationStatus, Place
from kvcm.model.storages import StorageType
from kvcm.reclaim.dead_chains import Chain, Freed, orphans

CHAIN = [5, -1, 2**63 - 1, -(2**63), 0, 7, 12345]
NOW, DELAY = 1000.0, 2.0


class View:
    """Every storage can be read."""

    generation = 0

    def rank(self, _storage: str) -> int:
        return 0


class StandingClock:
    def now(self) -> float:
        return NOW


@pytest.fixture(params=RIGS)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[IndexBackend]:
    async with opened(request.param, request) as made:
        yield made.fresh()


@pytest.fixture
async def index(backend: IndexBackend) -> MetaIndex:
    """A chain with a branch of two blocks behind its third one."""
    made = MetaIndex(backend, View(), shard_count=4)
    parents = {key: (CHAIN[depth - 1] if depth else None, depth) for depth, key in enumerate(CHAIN)}
    parents |= {100: (CHAIN[2], 3), 101: (100, 4)}
    await made.put({key: BlockRecord(parent, depth, (place(),)) for key, (parent, depth) in parents.items()})
    return made


async def statuses(index: MetaIndex, keys: list[int]) -> list[LocationStatus]:
    return [record.locations[0].status for record in await index.get(keys) if record is not None]


async def mark(index: MetaIndex, top: int) -> list[int]:
    chain = Chain(index, top, StandingClock(), DELAY)
    return [change.key async for changes in chain.mark() for change in changes]


async def test_only_blocks_behind_a_gap_are_orphans(index: MetaIndex) -> None:
    assert await orphans(index, [*CHAIN, 100, 101, 999]) == dict.fromkeys([*CHAIN, 100, 101], False)
    await index.delete([CHAIN[2]])
    found = await orphans(index, [*CHAIN, 100, 101])
    assert {key for key, is_orphan in found.items() if is_orphan} == {CHAIN[3], 100}
    assert await orphans(index, [CHAIN[3]]) == {CHAIN[3]: True}, "its parent is looked up, too"


@pytest.mark.parametrize("is_there", [LocationStatus.SERVING, LocationStatus.WRITING, LocationStatus.DELETING])
async def test_a_parent_counts_while_it_serves_or_is_written(index: MetaIndex, is_there: LocationStatus) -> None:
    await index.put({CHAIN[2]: BlockRecord(CHAIN[1], 2, (place(status=is_there, deadline=NOW),))})
    found = await orphans(index, [CHAIN[3], CHAIN[2]])
    assert found[CHAIN[3]] is (is_there is LocationStatus.DELETING)
    assert (CHAIN[2] in found) is (is_there is LocationStatus.SERVING), "only blocks that serve can be garbage"


async def test_a_chain_is_marked_with_all_its_branches(index: MetaIndex) -> None:
    await index.delete([CHAIN[1]])
    behind = [*CHAIN[2:], 100, 101]
    assert await Chain(index, CHAIN[2], StandingClock(), DELAY).count() == Freed(7, 70)
    assert await statuses(index, behind) == [LocationStatus.SERVING] * 7
    assert set(await mark(index, CHAIN[2])) == set(behind)
    records = [record for record in await index.get(behind) if record is not None]
    assert {(r.locations[0].status, r.locations[0].deadline) for r in records} == {
        (LocationStatus.DELETING, NOW + DELAY)
    }
    assert await statuses(index, CHAIN[:1]) == [LocationStatus.SERVING]
    assert await mark(index, CHAIN[2]) == []
    await index.refresh()
    assert index.usage_bytes[Place("nfs", StorageType.ST_NFS)] == 80, "invariant 4: until the bytes are freed"


async def test_a_pinned_block_and_what_is_before_it_stay(index: MetaIndex) -> None:
    await index.delete([CHAIN[1]])
    await index.put({CHAIN[5]: BlockRecord(CHAIN[4], 5, (place()._replace(pinned_until=NOW + 1),))})
    assert await Chain(index, CHAIN[2], StandingClock(), DELAY).count() == Freed(3, 30)
    assert set(await mark(index, CHAIN[2])) == {CHAIN[6], 100, 101}
    await index.put({CHAIN[5]: BlockRecord(CHAIN[4], 5, (place()._replace(pinned_until=NOW),))})
    assert set(await mark(index, CHAIN[2])) == set(CHAIN[2:6])


async def test_a_chain_whose_prefix_is_there_is_left_alone(index: MetaIndex) -> None:
    assert await Chain(index, CHAIN[2], StandingClock(), DELAY).count() == Freed(0, 0)
    assert await mark(index, CHAIN[2]) == []
    assert await mark(index, 999) == []


async def test_a_prefix_that_comes_back_stops_the_marking(backend: IndexBackend) -> None:
    """A long chain is marked in steps; a writer may come in between."""
    index = MetaIndex(backend, View(), shard_count=4)
    await index.put({key: BlockRecord(key - 1, key, (place(),)) for key in range(1, 101)})
    marked: list[int] = []
    async for changes in Chain(index, 1, StandingClock(), DELAY).mark():
        marked += [change.key for change in changes]
        if len(marked) == 64:
            await index.put({0: BlockRecord(None, 0, (place(status=LocationStatus.WRITING, deadline=NOW),))})
    assert sorted(marked) == list(range(37, 101))
    assert await statuses(index, list(range(1, 37))) == [LocationStatus.SERVING] * 36
