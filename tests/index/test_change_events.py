"""Changes of an index as events: what was marked or forgotten, per storage, and nothing else."""

import json
from typing import Any

from kvcm.index.backends.backend import Change
from kvcm.index.change_events import ChangeEvents
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.locations import BlockRecord, Location, LocationStatus, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.telemetry.events import EventLog

INSTANCE = Instance("", "group", "inst", 16, (LocationSpecInfo("kv", 8),), ModelDeployment())
SERVING, DELETING, WRITING = LocationStatus.SERVING, LocationStatus.DELETING, LocationStatus.WRITING


def record(*places: tuple[str, str, LocationStatus]) -> BlockRecord:
    chunk = encode_chunk(StorageType.ST_DUMMY, 0, [])
    return BlockRecord(
        None,
        0,
        tuple(
            Location(location_id, storage, StorageType.ST_DUMMY, status, (), chunk, 8, 0.0)
            for location_id, storage, status in places
        ),
    )


CHANGES = [
    Change(1, record(("x", "a", SERVING), ("y", "b", SERVING)), record(("x", "a", DELETING), ("y", "b", DELETING))),
    Change(2, record(("x", "a", SERVING), ("z", "a", DELETING)), record(("x", "a", DELETING), ("z", "a", DELETING))),
    Change(3, record(("x", "a", WRITING)), record(("x", "a", SERVING))),
    Change(4, None, None),
]


async def told(log: EventLog, *, tell: Any) -> list[dict[str, Any]]:
    listener = log.subscribe()
    tell(ChangeEvents(log))
    await log.close()
    return [json.loads(line) for line in b"".join(listener.waiting()).splitlines()]


async def test_there_is_one_event_per_storage_with_what_was_marked() -> None:
    first, second = await told(EventLog(), tell=lambda events: events.removed(INSTANCE, CHANGES, "RemoveCache"))
    assert (first["storage"], first["keys"], first["location_ids"], first["bytes"]) == ("a", [1, 2], [["x"], ["x"]], 16)
    assert (second["storage"], second["keys"], second["location_ids"], second["bytes"]) == ("b", [1], [["y"]], 8)
    assert {(each["source"], each["group"], each["reason"]) for each in (first, second)} == {
        ("inst", "group", "RemoveCache")
    }


async def test_what_is_forgotten_is_removed_unless_it_was_told_before() -> None:
    changes = [Change(1, record(("x", "a", SERVING), ("z", "a", DELETING)), None)]
    (event,) = await told(EventLog(), tell=lambda events: events.removed(INSTANCE, changes, "TrimCache"))
    assert (event["keys"], event["location_ids"]) == ([1], [["x"]])


async def test_an_eviction_is_also_told_as_the_original_does() -> None:
    *evicted, submitted = await told(
        EventLog(), tell=lambda events: events.evicted(INSTANCE, iter(CHANGES), "group", "leaf_lru", 1.5)
    )
    assert [(each["type"], each["storage"], each["policy"]) for each in evicted] == [
        ("evicted", "a", "leaf_lru"),
        ("evicted", "b", "leaf_lru"),
    ]
    assert (submitted["component"], submitted["type"]) == ("cache_reclaimer", "CacheReclaimSubmit")
    assert (submitted["block_keys"], submitted["location_ids"], submitted["delay_us"]) == (
        [1, 2],
        [["x", "y"], ["x"]],
        1_500_000,
    )


async def test_nothing_is_told_when_nothing_was_marked() -> None:
    unchanged = CHANGES[2:]
    assert await told(EventLog(), tell=lambda events: events.evicted(INSTANCE, unchanged, "group", "lru", 0.0)) == []
