"""What serves past the time that its writer gave: marked, readable for the group's delay, then deleted."""

import json

from reclaim_rig import Rig

from kvcm.model.locations import Location, LocationStatus


async def place(rig: Rig, key: int = 1) -> Location | None:
    (record,) = await rig.index.get([key])
    return record.locations[0] if record is not None else None


async def test_it_stays_readable_for_the_delay_and_is_deleted_then() -> None:
    """Invariant 6: whoever was given it a moment ago can still read it."""
    rig = Rig()
    rig.delay = 5.0
    uris = await rig.block(1, status=LocationStatus.SERVING, after_seconds=100)
    rig.clock.time += 99
    assert await rig.executor.run_due() == 0
    assert await rig.index.answers([1]) != [None]
    rig.clock.time += 1
    await rig.executor.run_due()
    marked = await place(rig)
    assert marked is not None
    assert (marked.status, marked.deadline) == (LocationStatus.DELETING, rig.clock.time + 5)
    assert (await rig.index.answers([1]), rig.storages.faults["a"].deleted) == ([None], [])
    rig.clock.time += 4.9
    assert await rig.executor.run_due() == 0
    rig.clock.time += 0.1
    await rig.executor.run_due()
    assert (await rig.left(), rig.storages.faults["a"].deleted) == ([], list(uris))


async def test_without_a_delay_it_goes_at_once() -> None:
    rig = Rig()
    await rig.block(1, status=LocationStatus.SERVING, after_seconds=100)
    rig.clock.time += 100
    await rig.executor.run_due()
    assert await rig.left() == []


async def test_a_pin_moves_its_time_to_the_end_of_the_pin() -> None:
    rig = Rig()
    await rig.block(1, status=LocationStatus.SERVING, after_seconds=10, pinned_seconds=30)
    rig.clock.time += 10
    await rig.executor.run_due()
    pinned = await place(rig)
    assert pinned is not None
    assert (pinned.status, pinned.deadline) == (LocationStatus.SERVING, pinned.pinned_until)
    rig.clock.time += 19.9
    assert await rig.executor.run_due() == 0
    rig.clock.time += 0.1
    await rig.executor.run_due()
    assert await rig.left() == []


async def test_a_pin_that_ended_before_changes_nothing() -> None:
    rig = Rig()
    await rig.block(1, status=LocationStatus.SERVING, after_seconds=10, pinned_seconds=9)
    rig.clock.time += 10
    await rig.executor.run_due()
    assert await rig.left() == []


async def test_only_what_expired_of_a_block_goes() -> None:
    rig = Rig()
    await rig.block(1, location_id="short", status=LocationStatus.SERVING, after_seconds=10)
    await rig.block(1, location_id="long", status=LocationStatus.SERVING, after_seconds=20)
    await rig.block(1, "b", location_id="ever", status=LocationStatus.SERVING)
    rig.clock.time += 10
    await rig.executor.run_due()
    (record,) = await rig.index.get([1])
    assert record is not None
    assert [location.id for location in record.locations] == ["long", "ever"]


async def test_a_read_lease_holds_the_bytes_of_what_expired() -> None:
    rig = Rig()
    await rig.block(1, status=LocationStatus.SERVING, after_seconds=10)
    rig.clock.time += 10
    rig.held[1] = rig.clock.time + 50
    await rig.executor.run_due()
    marked = await place(rig)
    assert (marked is not None and marked.status, await rig.index.answers([1])) == (LocationStatus.DELETING, [None])
    rig.clock.time += 51
    await rig.executor.run_due()
    assert await rig.left() == []


async def test_it_is_told_once_per_storage() -> None:
    rig = Rig()
    listener = rig.events.subscribe()
    for key in (1, -2):
        await rig.block(key, status=LocationStatus.SERVING, after_seconds=10)
    await rig.block(3, "b", status=LocationStatus.SERVING, after_seconds=10)
    await rig.block(4, "b", status=LocationStatus.SERVING, after_seconds=10, pinned_seconds=50)
    rig.clock.time += 10
    await rig.executor.run_due()
    await rig.events.close()
    events = [json.loads(line) for line in b"".join(listener.waiting()).splitlines()]
    told = {(event["type"], event["reason"], event["storage"]): event for event in events}
    assert set(told) == {("expired", "ttl", "a"), ("expired", "ttl", "b")}
    event = told["expired", "ttl", "a"]
    assert (sorted(event["keys"]), event["location_ids"], event["bytes"]) == ([-2, 1], [["l"], ["l"]], 32)
    assert (event["source"], event["component"], event["group"]) == ("i", "cache_manager", "group")
    assert told["expired", "ttl", "b"]["keys"] == [3]
