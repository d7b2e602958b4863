"""The deletion executor: when it deletes, what it deletes, and what it does when a storage fails."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
from reclaim_rig import OwnedIndex, Rig

from kvcm.index.backends.backend import Change, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import LocationStatus


async def test_bytes_go_before_metadata_and_usage() -> None:
    rig = Rig()
    uris = await rig.block(1)
    rig.storages.faults["a"].outage = OSError("down")
    await rig.executor.run_due()
    assert (await rig.left(), sum(rig.index.usage_bytes.values())) == ([1], 16)
    rig.storages.faults["a"].outage = None
    rig.clock.time += 1
    await rig.executor.run_due()
    assert (await rig.left(), sum(rig.index.usage_bytes.values())) == ([], 0)
    assert rig.storages.faults["a"].deleted == list(uris)


async def test_nothing_is_deleted_before_it_is_due() -> None:
    rig = Rig()
    for key, due in ((1, 30.0), (2, 10.0), (3, 20.0)):
        await rig.block(key, after_seconds=due)
    for seconds, left in ((9.999, [1, 2, 3]), (0.001, [1, 3]), (5, [1, 3]), (5, [1]), (100, [])):
        rig.clock.time += seconds
        await rig.executor.run_due()
        assert await rig.left() == left


async def test_what_is_due_first_is_deleted_first() -> None:
    rig = Rig()
    uris = {key: await rig.block(key, after_seconds=due) for key, due in ((0, 4), (1, 1), (2, 2), (3, 3), (4, 0))}
    rig.clock.time += 10
    await rig.executor.run_due()
    assert rig.storages.faults["a"].deleted == [uri for key in (4, 1, 2, 3, 0) for uri in uris[key]]


async def test_more_than_a_batch_goes_in_one_round() -> None:
    """As many as lie in a few batches; a round never has more of an index than that at once."""
    rig = Rig()
    for key in range(2500):
        await rig.block(key)
    assert await rig.executor.run_due() == 2500
    assert await rig.left() == []


async def test_every_index_is_looked_at() -> None:
    """The same key and location of two instances are two things."""
    rig = Rig()
    rig.owned.append(OwnedIndex("other", 2, MetaIndex(MemoryBackend(), rig.directory)))
    uris = [await rig.block(1, owned=owned) for owned in (0, 1)]
    await rig.executor.run_due()
    assert (await rig.left(0), await rig.left(1)) == ([], [])
    assert sorted(rig.storages.faults["a"].deleted) == sorted([*uris[0], *uris[1]])


async def test_bytes_stay_while_they_are_held() -> None:
    rig = Rig()
    rig.held[1] = rig.clock.time + 50
    await rig.block(1)
    await rig.block(2)
    await rig.executor.run_due()
    assert await rig.left() == [1]
    for _ in range(24):
        rig.clock.time += 2
        await rig.executor.run_due()
    assert await rig.left() == [1]
    rig.held[1] = rig.clock.time + 30
    rig.clock.time += 29
    await rig.executor.run_due()
    assert await rig.left() == [1]
    del rig.held[1]
    rig.clock.time += 1
    await rig.executor.run_due()
    assert await rig.left() == []


async def test_a_failing_storage_is_asked_again_with_growing_pauses() -> None:
    """1, 2, 4 … seconds, at most a minute; and nothing is forgotten however long it takes."""
    rig = Rig()
    storage = rig.storages.faults["a"]
    storage.outage = OSError("mount is gone")
    for key in range(10):
        await rig.block(key)
    asked_at: list[float] = []
    for _ in range(2000):
        before = storage.attempts
        await rig.executor.run_due()
        asked_at += [rig.clock.time] * (storage.attempts - before)
        rig.clock.time += 0.5
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(pauses[6:]) == {60}
    assert await rig.left() == list(range(10))
    storage.outage = None
    rig.clock.time += 60
    await rig.executor.run_due()
    assert await rig.left() == []


async def test_a_storage_that_fails_for_days_is_still_asked() -> None:
    rig = Rig()
    rig.storages.faults["a"].outage = OSError("down")
    await rig.block(1)
    for _ in range(1500):
        rig.clock.time += 61
        await rig.executor.run_due()
    assert rig.storages.faults["a"].attempts == 1500


async def test_only_what_failed_is_tried_again() -> None:
    rig = Rig()
    uris = [await rig.block(key) for key in range(4)]
    storage = rig.storages.faults["a"]
    storage.stubborn = {uris[1][0], uris[2][1]}
    await rig.executor.run_due()
    assert await rig.left() == [1, 2]
    storage.stubborn = set()
    storage.deleted.clear()
    rig.clock.time += 1
    await rig.executor.run_due()
    assert await rig.left() == []
    assert sorted(storage.deleted) == sorted([*uris[1], *uris[2]])


async def test_one_failing_storage_does_not_hold_up_another() -> None:
    rig = Rig()
    rig.storages.faults["a"].outage = OSError("down")
    await rig.block(1, "a")
    await rig.block(2, "b")
    await rig.executor.run_due()
    assert await rig.left() == [1]


async def test_a_storage_that_is_gone_loses_metadata_only() -> None:
    rig = Rig()
    await rig.block(1, "never-was")
    uris = await rig.block(2, "a")
    await rig.executor.run_due()
    assert await rig.left() == []
    assert rig.storages.faults["a"].deleted == list(uris)
    assert rig.storages.faults["b"].deleted == []


async def test_a_storage_that_is_configured_and_not_open_here_keeps_what_lies_on_it() -> None:
    """Invariant 4: the bytes are still there, on a mount that is missing now; metadata goes when they do."""
    rig = Rig()
    closed = rig.storages.faults.pop("a")
    rig.executor = rig.new_executor(is_configured=lambda storage: storage in {"a", "b"})
    uris = await rig.block(1, "a")
    await rig.block(2, "b")
    await rig.block(3, "never-was")
    await rig.executor.run_due()
    assert (await rig.left(), sum(rig.index.usage_bytes.values())) == ([1], 16)
    backlog = rig.executor.backlog("a")
    assert (backlog.waiting, backlog.failures) == (1, 1)
    rig.storages.faults["a"] = closed
    rig.clock.time += 1
    await rig.executor.run_due()
    assert await rig.left() == []
    assert closed.deleted == list(uris)


async def test_what_is_serving_stays() -> None:
    rig = Rig()
    await rig.block(1, status=LocationStatus.SERVING)
    rig.clock.time += 1000
    assert await rig.executor.run_due() == 0
    assert await rig.left() == [1]


async def test_overdue_writers_are_ended_and_their_bytes_stay_until_then() -> None:
    """Whoever knows the sessions decides: here the session turns out to be renewed."""
    rig = Rig()
    for key, due in ((1, 5.0), (2, 5.0), (3, 50.0)):
        await rig.block(key, status=LocationStatus.WRITING, after_seconds=due)
    rig.clock.time += 5
    assert await rig.executor.run_due() == 2
    assert rig.overdue == [(1, {"session": [1, 2]})]
    assert await rig.executor.run_due() == 0
    assert (await rig.left(), rig.storages.faults["a"].attempts) == ([1, 2, 3], 0)


async def test_only_the_marked_location_of_a_block_goes() -> None:
    rig = Rig()
    await rig.block(1, location_id="old")
    await rig.block(1, location_id="new", status=LocationStatus.SERVING)
    await rig.block(1, location_id="later", after_seconds=1)
    await rig.executor.run_due()
    (record,) = await rig.index.get([1])
    assert record is not None
    assert [place.id for place in record.locations] == ["new", "later"]


async def test_several_locations_of_one_block_go_together() -> None:
    rig = Rig()
    for storage in ("a", "b"):
        await rig.block(1, storage, location_id=storage)
    await rig.executor.run_due()
    assert await rig.left() == []


async def test_rounds_at_the_same_time_delete_once() -> None:
    rig = Rig()
    uris = await rig.block(1)
    await asyncio.gather(rig.executor.run_due(), rig.executor.run_due())
    assert rig.storages.faults["a"].deleted == list(uris)


async def test_two_managers_that_delete_the_same_harm_nobody() -> None:
    """The leader that lost its lease is still at it: what was written meanwhile under another location stays."""
    rig = Rig()
    other = rig.new_executor()
    await rig.block(1)
    rig.storages.faults["a"].open_gate.clear()
    rounds = [asyncio.create_task(executor.run_due()) for executor in (rig.executor, other)]
    assert await rig.turns(lambda: rig.storages.faults["a"].attempts == 2)
    await rig.block(1, location_id="again", status=LocationStatus.SERVING)
    rig.storages.faults["a"].open_gate.set()
    await asyncio.gather(*rounds)
    (record,) = await rig.index.get([1])
    assert record is not None
    assert [place.id for place in record.locations] == ["again"]


async def test_a_location_without_bytes_loses_its_metadata() -> None:
    rig = Rig()
    await rig.block(1, specs=())
    await rig.executor.run_due()
    assert await rig.left() == []


@contextmanager
def index_that_fails_once(rig: Rig) -> Iterator[None]:
    """The store refuses the first write, whatever that is."""
    write_many, failures = rig.backend.write_many, iter([StorageIOError("the store is gone for a moment")])

    async def refuse_once(changes: Sequence[Change]) -> Written:
        for error in failures:
            raise error
        return await write_many(changes)

    rig.backend.write_many = refuse_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        rig.backend.write_many = write_many  # type: ignore[method-assign]


async def test_nothing_is_forgotten_when_the_index_fails() -> None:
    """The bytes are gone and the metadata could not be removed: it must be tried again, like bytes."""
    rig = Rig()
    await rig.block(1)
    await rig.block(2, "b")
    with index_that_fails_once(rig):
        with pytest.raises(StorageIOError):
            await rig.executor.run_due()
        await rig.executor.run_due()
    assert await rig.left() == []
