"""Calls of MetaIndex that are cancelled while the store is at work, as when a client hangs up."""

import asyncio
from collections import Counter
from random import Random

from cache_world import dummy
from hypothesis import given, settings
from hypothesis import strategies as st
from suspending_backend import SuspendingBackend, check_lock_order, spy_on_locks
from thoroughness import examples

from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.storage.directory import StorageDirectory

SHARDS = 4
KEYS = list(range(12))
FIXED = settings(max_examples=examples(150), deadline=None, derandomize=True)
CALLS = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from(KEYS), min_size=1, max_size=8), st.integers(0, 12)),
    min_size=1,
    max_size=8,
)
"""(add or remove, keys, after how many turns of the loop the call is cancelled)"""


def serving(key: int) -> BlockRecord:
    chunk = encode_chunk(StorageType.ST_DUMMY, 1, [SpecUri("kv", f"dummy://a/{key}?size=10")])
    place = Location("l", "a", StorageType.ST_DUMMY, LocationStatus.SERVING, ("kv",), chunk, 10, 0.0)
    return BlockRecord(None, 0, (place,))


class Rig:
    def __init__(self, seed: int) -> None:
        view = StorageDirectory("cluster")
        view.open(dummy("a"))
        self.backend = SuspendingBackend(Random(seed))
        self.index = MetaIndex(self.backend, view, shard_count=SHARDS, batch_key_size=2)
        self.locks = spy_on_locks(self.index, SHARDS)

    async def run(self, calls: list[tuple[bool, list[int], int]]) -> None:
        tasks = [asyncio.create_task(self.change(add, keys)) for add, keys, _ in calls]
        for turn in range(13):
            for task, (_, _, cancelled_at) in zip(tasks, calls, strict=True):
                if turn == cancelled_at:
                    task.cancel()
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError | None) for outcome in outcomes), outcomes
        for task in tasks:
            check_lock_order(self.locks.log.of(task))

    async def change(self, add: bool, keys: list[int]) -> None:
        await self.index.read_modify_write(keys, lambda key, old: (old or serving(key)) if add else None)

    async def records(self) -> list[BlockRecord | None]:
        return await self.backend.inner.get_many(KEYS)


@FIXED
@given(seed=st.integers(0, 1 << 32), calls=CALLS)
async def test_invariant_8_cancelled_calls_leave_nothing_locked(
    seed: int, calls: list[tuple[bool, list[int], int]]
) -> None:
    rig = Rig(seed)
    await rig.run(calls)
    assert rig.locks.held == []
    changes = await rig.index.put({key: serving(key) for key in KEYS})
    assert [change.new for change in changes] == [serving(key) for key in KEYS]


@FIXED
@given(seed=st.integers(0, 1 << 32), calls=CALLS)
async def test_invariant_4_usage_is_the_recount_after_cancelled_calls(
    seed: int, calls: list[tuple[bool, list[int], int]]
) -> None:
    rig = Rig(seed)
    await rig.run(calls)
    recount = Counter(found.place for record in await rig.records() if record for found in record.locations)
    assert +Counter(rig.index.usage_bytes) == Counter({where: 10 * count for where, count in recount.items()})


@FIXED
@given(seed=st.integers(0, 1 << 32), calls=CALLS)
async def test_invariant_1_no_answer_is_stale_after_cancelled_calls(
    seed: int, calls: list[tuple[bool, list[int], int]]
) -> None:
    rig = Rig(seed)
    await rig.index.put({key: serving(key) for key in KEYS})
    await rig.run(calls)
    assert await rig.index.answers(KEYS) == [record and record.locations[0].chunk for record in await rig.records()]
