"""What every index backend promises MetaIndex. A new backend joins with one line in RIGS (index_backends.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_backends import RIGS, SHARED, Rig, opened
from index_records import check_sums, listed, record, write

from kvcm.index.backends.backend import IndexBackend
from kvcm.model.locations import BlockRecord

Check = TypeVar("Check", bound=Callable[..., object])

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 1 << 32, 12345]


@pytest.fixture(params=RIGS)
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


async def test_a_write_replaces_and_removes(backend: IndexBackend) -> None:
    await write(backend, {1: record(depth=1), 2: record(depth=2), 3: record(depth=3)})
    await write(backend, {1: record(depth=10), 2: None, 4: record(depth=4)})
    assert await backend.get_many([1, 2, 3, 4]) == [record(depth=10), None, record(depth=3), record(depth=4)]
    assert backend.key_count == 3


async def test_removing_what_is_not_there_changes_nothing(backend: IndexBackend) -> None:
    await write(backend, {1: record()})
    await write(backend, {2: None})
    await write(backend, {})
    assert (backend.key_count, await listed(backend, 10)) == (1, [1])


async def test_children_are_found_without_their_parent(backend: IndexBackend) -> None:
    await write(backend, {2: record(parent=1), 3: record(parent=1), -4: record(parent=1), 5: record(parent=2)})
    assert sorted(await backend.children(1)) == [-4, 2, 3]
    assert await backend.children(2) == [5]
    assert await backend.children(5) == []


async def test_a_child_goes_with_its_record_and_moves_with_its_parent(backend: IndexBackend) -> None:
    await write(backend, {2: record(parent=1), 3: record(parent=1), 4: record(parent=1)})
    await write(backend, {3: None, 4: record(parent=9)})
    assert await backend.children(1) == [2]
    assert await backend.children(9) == [4]
    await write(backend, {2: record(parent=None), 4: None})
    assert await backend.children(1) == await backend.children(9) == []


WRITES = st.lists(
    st.dictionaries(
        st.integers(-3, 8),
        st.one_of(st.none(), st.builds(record, st.one_of(st.none(), st.integers(-3, 8)), st.integers(0, 3))),
        max_size=6,
    ),
    max_size=12,
)


async def check_history(backend: IndexBackend, writes: list[dict[int, BlockRecord | None]], page_size: int) -> None:
    expected: dict[int, BlockRecord] = {}
    for batch in writes:
        await write(backend, batch)
        for key, new in batch.items():
            expected.pop(key, None)
            expected |= {key: new} if new is not None else {}
        assert backend.key_count == len(expected)
        await check_sums(backend)
    assert sorted(await listed(backend, page_size)) == sorted(expected)
    assert await backend.get_many(range(-3, 9)) == [expected.get(key) for key in range(-3, 9)]
    for key in range(-3, 9):
        assert sorted(await backend.children(key)) == sorted(k for k, r in expected.items() if r.parent == key)
    assert sorted(await backend.random_sample(100, Random(1))) == sorted(expected)
    assert sorted(await backend.due(99.25, 100)) == sorted(expected)


def history_of(kinds: Sequence[str], examples: int) -> Callable[[Check], Check]:
    """Run a test over histories, on these kinds of backend; every history begins with a fresh one."""
    given_histories = given(writes=WRITES, page_size=st.integers(1, 7))
    quietly = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    by_kind = pytest.mark.parametrize("rig", kinds, indirect=True)
    return lambda check: by_kind(quietly(given_histories(check)))


@history_of([kind for kind in RIGS if kind not in SHARED], examples=150)
async def test_any_history_leaves_what_a_dict_would_hold(
    rig: Rig, writes: list[dict[int, BlockRecord | None]], page_size: int
) -> None:
    await check_history(rig.fresh(), writes, page_size)


@history_of(SHARED, examples=50)
async def test_any_history_leaves_in_a_server_what_a_dict_would_hold(
    rig: Rig, writes: list[dict[int, BlockRecord | None]], page_size: int
) -> None:
    await check_history(rig.fresh(), writes, page_size)


@pytest.mark.parametrize("page_size", [1, 3, 64, 1000])
async def test_a_scan_yields_every_key_once_in_pages(backend: IndexBackend, page_size: int) -> None:
    await write(backend, {key * 7 - 100: record() for key in range(200)})
    pages = [page async for page in backend.scan(page_size)]
    assert sorted(key for page in pages for key in page) == [key * 7 - 100 for key in range(200)]
    assert all(1 <= len(page) <= page_size for page in pages)


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


async def test_a_scan_does_not_yield_what_was_removed_before_its_page(backend: IndexBackend) -> None:
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
@pytest.mark.parametrize("size", [1, 16])
async def test_samples_are_fair(backend: IndexBackend, history: Callable, size: int) -> None:  # type: ignore[type-arg]
    """Chi square over 63 degrees of freedom stays below 113 in 9,999 of 10,000 fair draws; the seed is fixed."""
    await history(backend)
    random, counts = Random(2024), Counter[int]()
    for _ in range((1600 if backend.awaits else 9600) // size):
        counts.update(await backend.random_sample(size, random))
    assert set(counts) == set(range(64))
    assert chi_square(range(64), counts) < 113
