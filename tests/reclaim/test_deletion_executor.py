"""The deletion executor: when it deletes, what it deletes, and what it does when a storage fails."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest
from reclaim_rig import Rig

from kvcm.index.backends.backend import Change
from kvcm.model.errors import StorageIOError
from kvcm.model.locations import LocationStatus
from kvcm.model.storages import StorageType


async def test_bytes_go_before_metadata_and_usage() -> None:
    rig = Rig()
    item = await rig.block(1)
    rig.storages.faults["a"].outage = OSError("down")
    rig.executor.submit(rig.index, [item], rig.clock.time)
    await rig.executor.run_due()
    assert (await rig.left(), rig.index.usage_bytes[StorageType.ST_DUMMY]) == ([1], 16)
    rig.storages.faults["a"].outage = None
    rig.clock.time += 1
    await rig.executor.run_due()
    assert (await rig.left(), rig.index.usage_bytes[StorageType.ST_DUMMY]) == ([], 0)
    assert rig.storages.faults["a"].deleted == list(item.uris)


async def test_nothing_is_deleted_before_it_is_due() -> None:
    rig = Rig()
    for key, due in ((1, 30.0), (2, 10.0), (3, 20.0)):
        rig.executor.submit(rig.index, [await rig.block(key)], rig.clock.time + due)
    assert rig.executor.waiting_count == 3
    for seconds, left in ((9.999, [1, 2, 3]), (0.001, [1, 3]), (5, [1, 3]), (5, [1]), (100, [])):
        rig.clock.time += seconds
        await rig.executor.run_due()
        assert await rig.left() == left
    assert rig.executor.waiting_count == 0


async def test_what_is_due_first_is_deleted_first() -> None:
    rig = Rig()
    items = {key: await rig.block(key) for key in range(5)}
    for key, due in ((0, 3), (1, 1), (2, 2), (3, 1), (4, 0)):
        rig.executor.submit(rig.index, [items[key]], rig.clock.time + due)
    rig.clock.time += 10
    await rig.executor.run_due()
    assert rig.storages.faults["a"].deleted == [uri for key in (4, 1, 3, 2, 0) for uri in items[key].uris]


async def test_bytes_stay_while_they_are_held() -> None:
    rig = Rig()
    rig.held[1] = rig.clock.time + 50
    rig.executor.submit(rig.index, [await rig.block(1), await rig.block(2)], rig.clock.time)
    await rig.executor.run_due()
    assert (await rig.left(), rig.executor.waiting_count) == ([1], 1)
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
    rig.executor.submit(rig.index, [await rig.block(key) for key in range(10)], rig.clock.time)
    asked_at: list[float] = []
    for _ in range(2000):
        before = storage.attempts
        await rig.executor.run_due()
        asked_at += [rig.clock.time] * (storage.attempts - before)
        rig.clock.time += 0.5
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(pauses[6:]) == {60}
    assert (rig.executor.waiting_count, await rig.left()) == (10, list(range(10)))
    storage.outage = None
    rig.clock.time += 60
    await rig.executor.run_due()
    assert (rig.executor.waiting_count, await rig.left()) == (0, [])


async def test_a_storage_that_fails_for_days_is_still_asked() -> None:
    rig = Rig()
    rig.storages.faults["a"].outage = OSError("down")
    rig.executor.submit(rig.index, [await rig.block(1)], rig.clock.time)
    for _ in range(1500):
        rig.clock.time += 61
        await rig.executor.run_due()
    assert rig.storages.faults["a"].attempts == 1500


async def test_only_what_failed_is_tried_again() -> None:
    rig = Rig()
    items = [await rig.block(key) for key in range(4)]
    storage = rig.storages.faults["a"]
    storage.stubborn = {items[1].uris[0], items[2].uris[1]}
    rig.executor.submit(rig.index, items, rig.clock.time)
    await rig.executor.run_due()
    assert (await rig.left(), rig.executor.waiting_count) == ([1, 2], 2)
    storage.stubborn = set()
    storage.deleted.clear()
    rig.clock.time += 1
    await rig.executor.run_due()
    assert await rig.left() == []
    assert sorted(storage.deleted) == sorted([*items[1].uris, *items[2].uris])


async def test_one_failing_storage_does_not_hold_up_another() -> None:
    rig = Rig()
    rig.storages.faults["a"].outage = OSError("down")
    items = [await rig.block(1, "a"), await rig.block(2, "b")]
    rig.executor.submit(rig.index, items, rig.clock.time)
    await rig.executor.run_due()
    assert await rig.left() == [1]


async def test_a_storage_that_is_gone_loses_metadata_only() -> None:
    rig = Rig()
    items = [await rig.block(1, "never-was"), await rig.block(2, "a")]
    rig.executor.submit(rig.index, items, rig.clock.time)
    await rig.executor.run_due()
    assert await rig.left() == []
    assert rig.storages.faults["a"].deleted == list(items[1].uris)
    assert rig.storages.faults["b"].deleted == []


@pytest.mark.parametrize("status", [LocationStatus.SERVING, LocationStatus.WRITING])
async def test_metadata_that_is_not_marked_deleting_stays(status: LocationStatus) -> None:
    rig = Rig()
    item = await rig.block(1, status=status)
    rig.executor.submit(rig.index, [item], rig.clock.time)
    await rig.executor.run_due()
    assert await rig.left() == [1]


async def test_only_the_marked_location_of_a_block_goes() -> None:
    rig = Rig()
    old = await rig.block(1, location_id="old")
    await rig.block(1, location_id="new", status=LocationStatus.SERVING)
    await rig.block(1, location_id="later")
    rig.executor.submit(rig.index, [old], rig.clock.time)
    await rig.executor.run_due()
    (record,) = await rig.index.get([1])
    assert record is not None
    assert [place.id for place in record.locations] == ["new", "later"]


async def test_several_locations_of_one_block_go_together() -> None:
    rig = Rig()
    items = [await rig.block(1, storage, location_id=storage) for storage in ("a", "b")]
    rig.executor.submit(rig.index, items, rig.clock.time)
    await rig.executor.run_due()
    assert await rig.left() == []


async def test_deleting_twice_harms_nobody() -> None:
    rig = Rig()
    item = await rig.block(1)
    for _ in range(2):
        rig.executor.submit(rig.index, [item, item], rig.clock.time)
    await rig.executor.run_due()
    again = await rig.block(1, location_id="again", status=LocationStatus.SERVING)
    rig.executor.submit(rig.index, [item], rig.clock.time)
    await rig.executor.run_due()
    (record,) = await rig.index.get([1])
    assert record is not None
    assert [place.id for place in record.locations] == [again.location_id]


async def test_an_item_without_bytes_loses_its_metadata() -> None:
    rig = Rig()
    item = (await rig.block(1))._replace(uris=())
    rig.executor.submit(rig.index, [item], rig.clock.time)
    await rig.executor.run_due()
    assert await rig.left() == []


@contextmanager
def index_that_fails_once(rig: Rig) -> Iterator[None]:
    """The store refuses the first write, whatever that is."""
    write_many, failures = rig.backend.write_many, iter([StorageIOError("the store is gone for a moment")])

    async def refuse_once(changes: list[Change]) -> None:
        for error in failures:
            raise error
        await write_many(changes)

    rig.backend.write_many = refuse_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        rig.backend.write_many = write_many  # type: ignore[method-assign]


async def test_nothing_is_forgotten_when_the_index_fails() -> None:
    """The bytes are gone and the metadata could not be removed: it must be tried again, like bytes."""
    rig = Rig()
    rig.executor.submit(rig.index, [await rig.block(1), await rig.block(2, "b")], rig.clock.time)
    with index_that_fails_once(rig):
        with suppress(StorageIOError):
            await rig.executor.run_due()
        for _ in range(5):
            rig.clock.time += 60
            await rig.executor.run_due()
    assert await rig.left() == []
