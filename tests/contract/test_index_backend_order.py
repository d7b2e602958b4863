"""What every index backend promises whoever evicts: sums of bytes, who is coldest, whose children there are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_backends import RIGS, SHARED, Rig, opened
from index_records import check_sums, place, record, used, write

from kvcm.index.backends.backend import Access, IndexBackend
from kvcm.model.locations import BlockRecord, LocationStatus, Place
from kvcm.model.storages import StorageType

WRITING, SERVING, DELETING = LocationStatus.WRITING, LocationStatus.SERVING, LocationStatus.DELETING
NFS, POOL = Place("nfs", StorageType.ST_NFS), Place("pool", StorageType.ST_NFS)
KEYS = range(6)


@pytest.fixture(params=RIGS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


@pytest.fixture
async def backend(rig: Rig) -> IndexBackend:
    return rig.fresh()


def block(
    status: LocationStatus = SERVING, written_at: float = 1000.0, *, deadline: float = 0.0, parent: int | None = None
) -> BlockRecord:
    """A record of one location."""
    return BlockRecord(parent, 0, (place(status=status, written_at=written_at, deadline=deadline),))


async def coldest(backend: IndexBackend, count: int = 100) -> list[tuple[int, int, int]]:
    """Key, seconds and reads of the coldest."""
    return [(key, *access) for key, access in await backend.coldest(count)]


# ── sums (invariant 4) ──


async def test_storages_of_one_type_are_counted_apart(backend: IndexBackend) -> None:
    await write(backend, {1: BlockRecord(None, 0, (place(size=7), place("x", size=2**40, storage="pool")))})
    assert used(backend.usage_bytes) == {NFS: 7, POOL: 2**40}
    assert used(await write(backend, {1: BlockRecord(None, 0, (place(size=7),))})) == {POOL: -(2**40)}
    assert used(backend.usage_bytes) == {NFS: 7}


async def test_bytes_that_are_being_deleted_are_used_until_they_are_gone(backend: IndexBackend) -> None:
    serving = place(size=7), place("x", size=5, storage="pool")
    both = tuple(each._replace(status=DELETING) for each in serving)
    await write(backend, {1: BlockRecord(None, 0, serving), 2: block()})
    assert used(backend.deleting_bytes) == {}
    assert used(await write(backend, {1: BlockRecord(None, 0, both)})) == {}
    assert (used(backend.usage_bytes), used(backend.deleting_bytes)) == ({NFS: 17, POOL: 5}, {NFS: 7, POOL: 5})
    assert used(await write(backend, {1: BlockRecord(None, 0, both[:1])})) == {POOL: -5}
    assert used(backend.deleting_bytes) == {NFS: 7}
    await write(backend, {1: None})
    assert (used(backend.usage_bytes), used(backend.deleting_bytes)) == ({NFS: 10}, {})
    await write(backend, {2: block(DELETING)})
    await backend.drop()
    assert (used(backend.usage_bytes), used(backend.deleting_bytes), backend.deleting_keys) == ({}, {}, 0)


@pytest.mark.parametrize("shared", SHARED)
async def test_another_manager_hears_what_is_being_deleted(shared: str, request: pytest.FixtureRequest) -> None:
    async with opened(shared, request) as rig:
        assert rig.beside is not None
        ours = rig.fresh()
        theirs = rig.beside(ours)
        await write(ours, {key: block(DELETING if key % 3 else SERVING) for key in range(30)})
        await theirs.refresh()
        assert (used(theirs.usage_bytes), used(theirs.deleting_bytes)) == ({NFS: 300}, {NFS: 200})
        assert (theirs.key_count, theirs.deleting_keys) == (30, 20)


# ── due (a writer's time to live) ──


async def test_a_serving_block_is_due_only_if_it_has_a_deadline(backend: IndexBackend) -> None:
    await write(backend, {1: block(deadline=30.0), 2: block(), 3: block(deadline=10.0)})
    assert await backend.due(1e12, 10) == [3, 1]
    await write(backend, {1: block(), 2: block(deadline=5.0), 3: None})
    assert await backend.due(1e12, 10) == [2]


# ── order ──


async def test_the_coldest_come_first_and_only_what_can_be_evicted(backend: IndexBackend) -> None:
    await write(backend, {key: block(written_at=1000.0 + key) for key in range(200)})
    await write(backend, {key: block(WRITING, 1.0) for key in range(200, 210)})
    await write(backend, {key: block(DELETING, 1000.0 + key) for key in range(10)})
    await backend.touch(dict.fromkeys(range(10, 20), 1), 5000.0)
    expected = [*range(20, 200)]
    for count in (1, 7, 64, 180):
        assert [key for key, _ in await backend.coldest(count)] == expected[:count]
    found = await backend.coldest(1000)
    assert [key for key, _ in found[:180]] == expected
    assert sorted(found[180:]) == [(key, Access(5000, 1)) for key in range(10, 20)]
    assert await backend.coldest(0) == []


async def test_the_order_goes_on_at_an_offset(backend: IndexBackend) -> None:
    """A shared store keeps to the offset only about; so much about that pages find nearly all."""
    keys = Random(3).sample(range(10_000), 400)
    await write(backend, {key: block(written_at=1000.0 + key) for key in keys})
    pages = [[key for key, _ in await backend.coldest(50, offset)] for offset in range(0, 400, 50)]
    assert pages[0] == sorted(keys)[:50]
    assert all(page == sorted(page) for page in pages)
    found = {key for page in pages for key in page}
    assert found <= set(keys)
    assert len(found) >= (200 if backend.is_shared else 400)
    assert await backend.coldest(50, 2000) == []


async def test_one_shard_may_hold_all_of_the_coldest(rig: Rig) -> None:
    """Exact without an offset, however keys are spread: these were chosen to lie in one lock shard of four."""
    backend = rig.fresh()
    crowded = [key for key in range(2000) if (key * 0x9E3779B97F4A7C15 % 2**64) >> 62 == 2][:300]
    others = [key for key in range(2000, 3000) if key not in crowded]
    await write(backend, {key: block(written_at=1000.0 + key) for key in crowded})
    await write(backend, {key: block(written_at=9000.0) for key in others})
    assert [key for key, _ in await backend.coldest(250)] == crowded[:250]


async def test_a_block_gets_its_time_when_it_can_be_read_first(backend: IndexBackend) -> None:
    """And what it was before it was deleted and written anew counts no more."""
    await write(backend, {1: block(WRITING, 1000.0)})
    assert await coldest(backend) == []
    await write(backend, {1: block(SERVING, 1000.0)})
    assert await coldest(backend) == [(1, 1000, 0)]
    await backend.touch({1: 5}, 2000.0)
    await write(backend, {1: block(DELETING, 1000.0)})
    assert await coldest(backend) == []
    assert await backend.accesses([1]) == [Access(2000, 5)]
    old, new = place("old", DELETING, written_at=1000.0), place("new", WRITING, written_at=3000.0)
    await write(backend, {1: BlockRecord(None, 0, (old, new))})
    assert await backend.accesses([1]) == [Access(2000, 5)]
    await write(backend, {1: BlockRecord(None, 0, (old, new._replace(status=SERVING)))})
    assert await coldest(backend) == [(1, 3000, 0)]


async def test_a_second_location_leaves_the_access_as_it_is(backend: IndexBackend) -> None:
    await write(backend, {1: block(written_at=1000.0)})
    await backend.touch({1: 5}, 2000.0)
    more = place("more", written_at=3000.0)
    await write(backend, {1: BlockRecord(None, 0, (more, *block().locations))})
    assert await coldest(backend) == [(1, 2000, 5)]


async def test_reads_that_do_not_move_only_count(backend: IndexBackend) -> None:
    await write(backend, {key: block(written_at=1000.0 + key) for key in (1, 2)})
    await backend.touch({1: 3, 9: 1}, 5000.0, moves=False)
    assert await coldest(backend) == [(1, 1001, 3), (2, 1002, 0)]
    await backend.touch({1: 2}, 5000.0)
    assert await coldest(backend) == [(2, 1002, 0), (1, 5000, 5)]


async def test_reads_of_what_cannot_be_evicted_are_counted_and_no_more(backend: IndexBackend) -> None:
    await write(backend, {1: block(WRITING, 1000.0), 2: block(DELETING, 1000.0)})
    await backend.touch({1: 3, 2: 4}, 5000.0)
    assert await backend.accesses([1, 2]) == [Access(5000, 3), Access(5000, 4)]
    assert await coldest(backend) == []


async def test_a_second_chance_sets_time_and_reads(backend: IndexBackend) -> None:
    await write(backend, {1: block(), 2: block(), 3: block(DELETING)})
    await backend.touch({1: 9, 2: 9, 3: 9}, 5000.0)
    await backend.requeue({1: 4, 3: 1, 8: 1}, 4000.75)
    assert await backend.accesses([1, 2, 3, 8]) == [Access(4000, 4), Access(5000, 9), Access(5000, 9), None]
    assert await coldest(backend) == [(1, 4000, 4), (2, 5000, 9)]
    await backend.requeue({}, 1.0)


STATES = st.none() | st.builds(
    lambda statuses, at, parent: BlockRecord(
        parent,
        0,
        tuple(place(f"{status:d}", status, written_at=at, storage="ab"[status % 2]) for status in sorted(statuses)),
    ),
    st.sets(st.sampled_from(LocationStatus), min_size=1),
    st.integers(1, 9).map(float),
    st.none() | st.sampled_from(KEYS),
)
COUNTS = st.dictionaries(st.sampled_from(KEYS), st.integers(1, 9), max_size=4)
STEPS = st.lists(
    st.tuples(st.just("write"), st.dictionaries(st.sampled_from(KEYS), STATES, max_size=5), st.just(0))
    | st.tuples(st.sampled_from(["touch", "count", "requeue"]), COUNTS, st.integers(1, 12)),
    max_size=12,
)


class OrderModel:
    """Records and accesses as the contract says."""

    def __init__(self) -> None:
        self.records: dict[int, BlockRecord] = {}
        self.accesses: dict[int, Access] = {}

    def write(self, states: Mapping[int, BlockRecord | None]) -> None:
        for key, new in states.items():
            if new is None:
                self.records.pop(key, None)
                self.accesses.pop(key, None)
                continue
            if key not in self.records or (is_resident(new) and not is_resident(self.records[key])):
                self.accesses[key] = Access(int(new.locations[0].written_at), 0)  # the same for all of a record
            self.records[key] = new

    def read(self, verb: str, counts: Mapping[int, int], at: int) -> None:
        for key in counts.keys() & self.records.keys():
            before = self.accesses[key]
            if verb == "requeue":
                after = Access(at, counts[key]) if is_resident(self.records[key]) else before
            else:
                after = Access(max(before.at, at) if verb == "touch" else before.at, before.reads + counts[key])
            self.accesses[key] = after

    def resident(self) -> dict[int, Access]:
        return {key: self.accesses[key] for key, found in self.records.items() if is_resident(found)}


def is_resident(found: BlockRecord) -> bool:
    return any(location.status is SERVING for location in found.locations)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_invariant_4_and_the_order_after_any_history(
    rig: Rig, steps: list[tuple[str, dict[int, BlockRecord | None] | dict[int, int], int]]
) -> None:
    backend, model = rig.fresh(), OrderModel()
    for verb, values, at in steps:
        if verb == "write":
            await write(backend, values)
            model.write(values)
        else:
            await (
                backend.requeue(values, at) if verb == "requeue" else backend.touch(values, at, moves=verb != "count")
            )
            model.read(verb, values, at)
        await check_sums(backend)
    assert await backend.accesses(KEYS) == [model.accesses.get(key) for key in KEYS]
    found = await backend.coldest(100)
    assert dict(found) == model.resident()
    assert [access.at for _, access in found] == sorted(access.at for access in model.resident().values())
    families = [sorted(key for key, made in model.records.items() if made.parent == parent) for parent in KEYS]
    assert list(map(sorted, await backend.families(KEYS))) == families


# ── families ──


async def test_families_of_many_parents_come_in_their_order(backend: IndexBackend) -> None:
    parents = [*range(600), -1, 2**63 - 1, -(2**63)]
    children = {1000 + 2 * n + side: parent for n, parent in enumerate(parents) for side in (0, 1) if n % 5}
    await write(backend, {key: record(parent=parent) for key, parent in children.items()})
    asked = Random(5).sample(parents, len(parents))
    expected = [sorted(key for key, parent in children.items() if parent == one) for one in asked]
    assert list(map(sorted, await backend.families(asked))) == expected
    assert await backend.families([]) == []


# ── rows ──


async def test_only_what_lies_in_this_process_can_be_followed(rig: Rig) -> None:
    backend = rig.fresh()
    rows = backend.follow(None)
    assert (rows is None) == backend.is_shared
