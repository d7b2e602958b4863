"""Which keys share a lock, and in which batches a call takes them (invariant 8)."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.index.shards import ShardLocks, plan_sub_batches, shard_of
from kvcm.telemetry.metrics_values import Histogram

FIXED = settings(max_examples=200, deadline=None, derandomize=True)
KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60, unique=True)
SHARD_COUNTS = st.sampled_from([1, 2, 4, 16, 1024, 65536])


@FIXED
@given(keys=KEYS, shard_count=SHARD_COUNTS)
def test_every_key_has_a_shard(keys: list[int], shard_count: int) -> None:
    assert all(0 <= shard_of(key, shard_count) < shard_count for key in keys)


@pytest.mark.parametrize("step", [1, 2, 16, 1024, 1 << 20, 1 << 40, -1])
def test_regular_keys_spread_over_all_shards(step: int) -> None:
    """Keys need not be well mixed: counters, multiples and negative ones spread as well."""
    counts = Counter(shard_of(number * step, 16) for number in range(1, 1601))
    assert len(counts) == 16
    assert max(counts.values()) < 200


@FIXED
@given(keys=KEYS, shard_count=SHARD_COUNTS, batch_key_size=st.integers(1, 30))
def test_sub_batches_hold_every_key_once_by_whole_shards_ascending(
    keys: list[int], shard_count: int, batch_key_size: int
) -> None:
    batches = plan_sub_batches(keys, shard_count, batch_key_size)
    assert sorted(key for batch in batches for key in batch.keys) == sorted(keys)
    shards = [shard for batch in batches for shard in batch.shards]
    assert shards == sorted(set(shards)), "ascending within a batch and between batches, hence disjoint"
    for batch in batches:
        assert {shard_of(key, shard_count) for key in batch.keys} == set(batch.shards)
    assert all(len(batch.keys) >= batch_key_size for batch in batches[:-1])
    assert all(batch.keys for batch in batches)


@FIXED
@given(keys=KEYS, batch_key_size=st.integers(1, 30))
def test_a_batch_is_no_larger_than_it_must_be(keys: list[int], batch_key_size: int) -> None:
    """Without its last shard a batch would be below the size that was asked for."""
    for batch in plan_sub_batches(keys, 16, batch_key_size):
        without_last = [key for key in batch.keys if shard_of(key, 16) != batch.shards[-1]]
        assert len(without_last) < batch_key_size


async def test_shards_are_exclusive() -> None:
    locks, inside, most = ShardLocks(4), 0, 0

    async def enter() -> None:
        nonlocal inside, most
        async with locks.hold((1, 3)):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(enter() for _ in range(5)))
    assert most == 1


async def test_disjoint_shards_do_not_wait_for_each_other() -> None:
    locks = ShardLocks(4)
    async with locks.hold((0, 2)), locks.hold((1, 3)):
        assert True


async def test_shards_are_given_back_after_an_error() -> None:
    locks = ShardLocks(2)
    for _ in range(2):
        with pytest.raises(KeyError):
            async with locks.hold((0, 1)):
                raise KeyError


async def test_shards_are_given_back_when_a_waiting_call_is_cancelled() -> None:
    locks = ShardLocks(3)

    async def take(shards: tuple[int, ...]) -> None:
        async with locks.hold(shards):
            pass

    async with locks.hold((2,)):
        waiting = asyncio.create_task(take((0, 1, 2)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await take((0, 1))
    await take((0, 1, 2))


@pytest.mark.parametrize("shards", [(1, 0), (1, 1), (0, 2, 1)])
async def test_shards_out_of_order_are_a_defect(shards: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        async with ShardLocks(4).hold(shards):
            pass


async def test_waits_are_told() -> None:
    waits = Histogram()
    locks = ShardLocks(4, waits)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with locks.hold((0, 1)):
            entered.set()
            await leave.wait()

    async def second() -> None:
        async with locks.hold((1, 2)):
            pass

    holder = asyncio.create_task(first())
    await entered.wait()
    waiter = asyncio.create_task(second())
    await asyncio.sleep(0)
    assert waits.read().counts[-1] == 1  # the second still waits
    before = waits.read().total
    leave.set()
    await asyncio.gather(holder, waiter)
    assert waits.read().counts[-1] == 2
    assert waits.read().total > before
