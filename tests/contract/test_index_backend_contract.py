"""The contract of index backends with MetaIndex and the reclaimer. A new backend joins with one line in RIGS."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

import pytest
from fake_clock import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_backends import ALONE, KINDS, SHARED, Rig, opened
from index_records import check_sums, listed, place, record, recount, used, write
from thoroughness import examples

from kvcm.index.backends.backend import Access, Change, IndexBackend, SharedBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import BlockRecord, LocationStatus, StorageKey
from kvcm.model.storages import StorageType
from kvcm.reclaim.garbage import FreedSpace, OrphanChain

# ── Index backend contract ──


Check = TypeVar("Check", bound=Callable[..., object])

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 1 << 32, 12345]


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


@pytest.fixture
async def backend(rig: Rig) -> IndexBackend:
    return rig.fresh()


async def test_records_come_back_as_they_were_stored(backend: IndexBackend) -> None:
    stored = {key: record(parent=key, depth=depth, size=depth) for depth, key in enumerate(EXTREMES)}
    await write(backend, dict(stored))
    assert await backend.get_many(EXTREMES) == list(stored.values())
    assert backend.key_count == len(EXTREMES)


async def test_records_are_returned_in_the_order_of_the_keys(backend: IndexBackend) -> None:
    await write(backend, {1: record(depth=1), 2: record(depth=2)})
    assert await backend.get_many([2, 3, 1, 2]) == [record(depth=2), None, record(depth=1), record(depth=2)]
    assert await backend.get_many([]) == []


WRITES = st.lists(
    st.dictionaries(
        st.integers(-3, 8),
        st.one_of(st.none(), st.builds(record, st.one_of(st.none(), st.integers(-3, 8)), st.integers(0, 3))),
        max_size=6,
    ),
    max_size=12,
)


async def check_history(backend: IndexBackend, writes: list[dict[int, BlockRecord | None]], batch_size: int) -> None:
    expected: dict[int, BlockRecord] = {}
    for batch in writes:
        await write(backend, batch)
        for key, new in batch.items():
            expected.pop(key, None)
            expected |= {key: new} if new is not None else {}
        assert backend.key_count == len(expected)
        await check_sums(backend)
    assert sorted(await listed(backend, batch_size)) == sorted(expected)
    assert await backend.get_many(range(-3, 9)) == [expected.get(key) for key in range(-3, 9)]
    for key in range(-3, 9):
        assert sorted(await backend.children(key)) == sorted(k for k, r in expected.items() if r.parent == key)
    assert sorted(await backend.random_sample(100, Random(1))) == sorted(expected)
    assert sorted(await backend.due(99.25, 100)) == sorted(expected)


def history_of(kinds: Sequence[Any], count: int) -> Callable[[Check], Check]:
    """Run a test over histories, on these kinds of backend; every history begins with a fresh one."""
    given_histories = given(writes=WRITES, batch_size=st.integers(1, 7))
    quietly = settings(max_examples=examples(count), suppress_health_check=[HealthCheck.function_scoped_fixture])
    by_kind = pytest.mark.parametrize("rig", kinds, indirect=True)
    return lambda check: by_kind(quietly(given_histories(check)))


@history_of(ALONE, count=150)
async def test_any_history_leaves_what_a_dict_would_hold(
    rig: Rig, writes: list[dict[int, BlockRecord | None]], batch_size: int
) -> None:
    await check_history(rig.fresh(), writes, batch_size)


@history_of(SHARED, count=50)
async def test_any_history_leaves_in_a_server_what_a_dict_would_hold(
    rig: Rig, writes: list[dict[int, BlockRecord | None]], batch_size: int
) -> None:
    await check_history(rig.fresh(), writes, batch_size)


@pytest.mark.parametrize("batch_size", [1, 3, 64, 1000])
async def test_a_scan_yields_every_key_once_in_batches(backend: IndexBackend, batch_size: int) -> None:
    await write(backend, {key * 7 - 100: record() for key in range(200)})
    pages = [page async for page in backend.scan(batch_size)]
    assert sorted(key for page in pages for key in page) == [key * 7 - 100 for key in range(200)]
    assert all(1 <= len(page) <= batch_size for page in pages)


async def test_a_scan_yields_stable_keys_once_while_others_come_and_go(backend: IndexBackend) -> None:
    """A shared store may list one twice (the docstring of `scan`)."""
    stable = set(range(0, 300, 3))
    await write(backend, {key: record() for key in range(300)})
    random, seen = Random(4), Counter[int]()
    async for page in backend.scan(16):
        seen.update(page)
        churn = [key for key in random.sample(range(400), 60) if key not in stable]
        await write(backend, {key: random.choice([None, record(depth=1)]) for key in churn})
        # Stable keys change too, but never go.
        await write(backend, {key: record(depth=2) for key in random.sample(sorted(stable), 10)})
    assert stable <= set(seen)
    assert backend.is_shared or max(seen.values()) == 1


async def test_a_scan_does_not_yield_keys_removed_before_its_page(backend: IndexBackend) -> None:
    await write(backend, {key: record() for key in range(40)})
    removed: set[int] = set()
    async for page in backend.scan(10):
        assert removed.isdisjoint(page)
        removed |= set(range(40)) - set(page) - removed if not removed else set()
        await write(backend, dict.fromkeys(removed))


async def test_a_sample_is_of_distinct_resident_keys(backend: IndexBackend) -> None:
    await write(backend, {key: record() for key in range(100)})
    await write(backend, dict.fromkeys(range(0, 100, 2)))
    for count in (0, 1, 7, 49):
        sample = await backend.random_sample(count, Random(count))
        assert len(sample) == len(set(sample)) == count
        assert all(key % 2 for key in sample)
    assert sorted(await backend.random_sample(50, Random(0))) == sorted(await backend.random_sample(500, Random(0)))


def chi_square(keys: Sequence[int], counts: Counter[int]) -> float:
    expected = counts.total() / len(keys)
    return sum((counts[key] - expected) ** 2 / expected for key in keys)


async def never_touched(backend: IndexBackend) -> None:
    await write(backend, {key: record() for key in range(64)})


async def half_came_back_often(backend: IndexBackend) -> None:
    """A backend that lists a key again each time it comes back would draw these up to six times as often."""
    await never_touched(backend)
    for _ in range(5):
        await write(backend, dict.fromkeys(range(32)))
        await write(backend, {key: record() for key in range(32)})


async def most_are_gone(backend: IndexBackend) -> None:
    """Enough removals to make any backend tidy up, then some of them come back."""
    await write(backend, {key: record() for key in range(4000)})
    await write(backend, dict.fromkeys(range(32, 4000)))
    await write(backend, {key: record() for key in range(32, 64)})


@pytest.mark.parametrize("history", [never_touched, half_came_back_often, most_are_gone])
async def test_samples_are_fair(backend: IndexBackend, history: Callable) -> None:  # type: ignore[type-arg]
    """Chi square over 63 degrees of freedom stays below 150 in all but one of 10^8 fair draws. The seed does not fix
    them on Redis, where runs of one age stand in any order; blocks drawn six times as often make it 300 and more."""
    await history(backend)
    for size in (1, 16):
        random, counts = Random(2024), Counter[int]()
        for _ in range((640 if backend.awaits else 9600) // size):
            counts.update(await backend.random_sample(size, random))
        assert set(counts) == set(range(64))
        assert chi_square(range(64), counts) < 150


# ── Index backend changes ──


NFS, MOONCAKE = StorageKey("nfs", StorageType.ST_NFS), StorageKey("nfs", StorageType.ST_MOONCAKE)
SERVED = BlockRecord(None, 0, (place(),))


Managers = tuple[IndexBackend, IndexBackend]


@pytest.fixture(params=SHARED)
async def managers(request: pytest.FixtureRequest) -> AsyncIterator[Managers]:
    """The index of one instance, as two managers have it."""
    async with opened(request.param, request) as rig:
        assert rig.beside is not None
        ours = rig.fresh()
        yield ours, rig.beside(ours)


async def test_blocks_that_are_read_around_others_are_as_if_read_alone(
    managers: tuple[SharedBackend, SharedBackend],
) -> None:
    """Chains with a branch and a gap: of a shared store more blocks come than were asked for, up to a number."""
    ours, _ = managers
    chain, branch = range(1, 1001), range(1001, 1101)
    parents = {key: key - 1 or None for key in chain} | {key: key - 1 for key in branch} | {branch[0]: chain[500]}
    depths = {key: key - 1 for key in chain} | {key: 501 + at for at, key in enumerate(branch)}
    for part in (chain[:300], chain[300:], branch):
        await write(ours, {key: record(parent=parents[key], depth=depths[key]) for key in part})
    await write(ours, {chain[700]: None})
    every = [*chain, *branch, 5000]
    stored = {key: each for key, each in zip(every, await ours.get_many(every), strict=True) if each is not None}
    for asked in ([1], [500, 701, 5000], [1050], every):
        for most in (1, 64, 1 << 20):
            found = await ours.get_around(asked, most)
            assert found.items() <= stored.items()
            assert found.keys() & set(asked)
            assert len(found) <= most + 2 * 64 * 16
        assert found.keys() >= stored.keys() & set(asked)


async def test_random_records_are_all_there_are_where_more_are_asked_for(managers: Managers) -> None:
    """Of 300 blocks that were stored one by one, which no store can keep together, and 300 that were stored at once."""
    ours, theirs = managers
    for key in range(1, 301):
        await write(ours, {key: record(depth=key)})
    await write(ours, {key: record(parent=key - 1, depth=key) for key in range(301, 601)})
    await write(ours, dict.fromkeys(range(1, 601, 7)))
    kept = [key for key in range(1, 601) if key % 7 != 1]
    await ours.touch(dict.fromkeys(kept[::3], 2), 5000)
    stored = zip(await ours.get_many(kept), await ours.accesses(kept), strict=True)
    found = await theirs.random_records(1 << 13, Random(1))
    assert found == dict(zip(kept, stored, strict=True))
    for count in (1, 100):
        some = await theirs.random_records(count, Random(count))
        assert some.items() <= found.items()
        assert count <= len(some) < len(found)


async def everything(backend: IndexBackend) -> list[object]:
    """All that can be asked of keys and parents up to 9."""
    keys = range(10)
    children = [sorted(await backend.children(key)) for key in keys]
    listing = sorted(await listed(backend, 100))
    asked = [await backend.get_many(keys), await backend.accesses(keys), await backend.due(1e12, 100)]
    sums = [used(backend.usage_bytes), used(backend.deleting_bytes), backend.deleting_keys]
    return [*asked, children, listing, backend.key_count, *sums]


async def test_a_writer_that_read_an_older_record_loses_and_changes_nothing(backend: IndexBackend) -> None:
    await write(backend, {1: record(parent=5, due=10.0)})
    stale = (await backend.get_many([1]))[0]
    await write(backend, {1: record(parent=6, depth=1, due=20.0)})
    before = await everything(backend)
    for new in (record(parent=7, depth=2, size=99, due=30.0), None):
        written = await backend.write_many([Change(1, stale, new)])
        assert (list(written.lost), used(written.usage)) == ([1], {})
        assert await everything(backend) == before


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
    await write(backend, {9: SERVED})
    assert await backend.due(30.0, 10) == [5, 2, 3, 1]
    assert await backend.due(29.999, 2) == [5, 2]
    assert await backend.due(-1.0, 10) == []


async def test_nothing_is_due_before_a_backend_says_so(backend: IndexBackend) -> None:
    """The search for due records relies on it."""
    for key, due in {1: 30.0, 2: 10.0, 3: 20.0}.items():
        await write(backend, {key: record(due=due)})
        assert backend.due_from <= min(30.0, due)
        assert await backend.due(backend.due_from - 0.001, 10) == []
    await write(backend, {2: None})
    assert backend.due_from <= 20.0
    await write(backend, {1: record(due=15.0)})
    assert backend.due_from <= 15.0


async def test_nothing_is_left_after_a_drop(rig: Rig) -> None:
    backend, neighbour = rig.fresh(), rig.fresh()
    for one in (backend, neighbour):
        await write(one, {key: record(parent=key // 2) for key in range(600)})
        await write(one, {600: block(DELETING)})
    await backend.drop()
    assert await everything(backend) == await everything(rig.fresh())
    assert await backend.random_sample(10, Random(1)) == []
    assert (neighbour.key_count, used(neighbour.usage_bytes)) == (601, {NFS: 600 * 20 + 10})
    assert sorted(await listed(neighbour, 100)) == list(range(601))
    await write(backend, {1: record()})
    assert (backend.key_count, used(backend.usage_bytes)) == (1, {NFS: 20})


async def test_no_keys_cost_nothing(backend: IndexBackend) -> None:
    await backend.touch({}, 1.0)
    await backend.requeue({}, 1.0)
    assert await backend.accesses([]) == []
    assert list((await backend.write_many([])).lost) == []
    assert await backend.due(1e12, 10) == []


async def test_another_manager_sees_written_records(managers: Managers) -> None:
    ours, theirs = managers
    await write(ours, {key: record(parent=1, size=2**41) for key in range(50)})
    assert await theirs.get_many(range(50)) == [record(parent=1, size=2**41)] * 50
    assert theirs.key_count == 0
    await theirs.refresh()
    assert (theirs.key_count, used(theirs.usage_bytes)) == (50, {NFS: 50 * 2**42})
    await write(theirs, {1: None})
    await ours.refresh()
    assert (ours.key_count, used(ours.usage_bytes)) == (49, {NFS: 49 * 2**42})


async def test_another_manager_sees_deleting_records(managers: Managers) -> None:
    ours, theirs = managers
    await write(ours, {key: block(DELETING if key % 3 else SERVING) for key in range(30)})
    await theirs.refresh()
    assert (used(theirs.usage_bytes), used(theirs.deleting_bytes)) == ({NFS: 300}, {NFS: 200})
    assert (theirs.key_count, theirs.deleting_keys) == (30, 20)


async def test_of_two_managers_exactly_one_changes_a_record(managers: Managers) -> None:
    ours, theirs = managers
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


# ── Index backend order ──


WRITING, SERVING, DELETING = LocationStatus.WRITING, LocationStatus.SERVING, LocationStatus.DELETING
POOL = StorageKey("pool", StorageType.ST_NFS)
KEYS = range(6)


def block(
    status: LocationStatus = SERVING, written_at: float = 1000.0, *, deadline: float = 0.0, parent: int | None = None
) -> BlockRecord:
    """A record of one location."""
    return BlockRecord(parent, 0, (place(status=status, written_at=written_at, deadline=deadline),))


# ── sums (invariant 4) ──


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


STATES = st.none() | st.builds(
    lambda times, parent: BlockRecord(
        parent, 0, tuple(place(f"{s:d}", s, written_at=at, storage="ab"[s % 2]) for s, at in sorted(times.items()))
    ),
    st.dictionaries(st.sampled_from(LocationStatus), st.integers(1, 9).map(float), min_size=1),
    st.none() | st.sampled_from(KEYS),
)
COUNTS = st.dictionaries(st.sampled_from(KEYS), st.integers(1, 9), max_size=4)
STEPS = st.lists(
    st.tuples(st.just("write"), st.dictionaries(st.sampled_from(KEYS), STATES, max_size=5), st.just(0.0))
    | st.tuples(st.sampled_from(["touch", "count", "requeue"]), COUNTS, st.sampled_from([1.0, 2.75, 5.25, 9.5, 12.0])),
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
                readable = [each for each in new.locations if each.status is SERVING]
                self.accesses[key] = Access(int((readable or new.locations)[0].written_at), 0)
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


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_invariant_4_and_the_order_after_any_history(
    rig: Rig, steps: list[tuple[str, dict[int, BlockRecord | None] | dict[int, int], float]]
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
            model.read(verb, values, int(at))
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
    rows = backend.observe(None)
    assert (rows is None) == backend.is_shared


# ── Dead chains ──


CHAIN = [5, -1, 2**63 - 1, -(2**63), 0, 7, 12345]
NOW, DELAY = 1000.0, 2.0


class View:
    """Every storage can be read."""

    generation = 0

    def rank(self, _storage: str) -> int:
        return 0


async def statuses(index: MetaIndex, keys: list[int]) -> list[LocationStatus]:
    return [record.locations[0].status for record in await index.get(keys) if record is not None]


async def mark(index: MetaIndex, top: int) -> list[Change]:
    chain = OrphanChain(index, top, FakeClock(NOW), DELAY)
    return [change async for changes in chain.mark() for change in changes]


async def test_a_chain_is_marked_with_all_its_branches(backend: IndexBackend) -> None:
    """One block of a chain is gone; behind it there is a branch of two blocks."""
    index = MetaIndex(backend, View(), shard_count=4)
    parents = {key: (CHAIN[depth - 1] if depth else None, depth) for depth, key in enumerate(CHAIN)}
    parents |= {100: (CHAIN[2], 3), 101: (100, 4)}
    await index.put({key: BlockRecord(parent, depth, (place(),)) for key, (parent, depth) in parents.items()})
    await index.delete([CHAIN[1]])
    behind = [*CHAIN[2:], 100, 101]
    assert await OrphanChain(index, CHAIN[2], FakeClock(NOW), DELAY).count() == FreedSpace(7, 70)
    assert await statuses(index, behind) == [LocationStatus.SERVING] * 7
    assert {change.key for change in await mark(index, CHAIN[2])} == set(behind)
    records = [record for record in await index.get(behind) if record is not None]
    assert {(r.locations[0].status, r.locations[0].deadline) for r in records} == {
        (LocationStatus.DELETING, NOW + DELAY)
    }
    assert await statuses(index, CHAIN[:1]) == [LocationStatus.SERVING]
    assert await mark(index, CHAIN[2]) == []
    await index.refresh()
    assert index.usage_bytes[StorageKey("nfs", StorageType.ST_NFS)] == 80, "invariant 4: until the bytes are freed"


async def test_a_prefix_that_comes_back_stops_the_marking(backend: IndexBackend) -> None:
    """A long chain is marked in steps; a writer may come in between."""
    index = MetaIndex(backend, View(), shard_count=4)
    await index.put({key: BlockRecord(key - 1, key, (place(),)) for key in range(1, 101)})
    marked: list[int] = []
    async for changes in OrphanChain(index, 1, FakeClock(NOW), DELAY).mark():
        marked += [change.key for change in changes]
        if len(marked) == 64:
            await index.put({0: BlockRecord(None, 0, (place(status=LocationStatus.WRITING, deadline=NOW),))})
    assert sorted(marked) == list(range(37, 101))
    assert await statuses(index, list(range(1, 37))) == [LocationStatus.SERVING] * 36
