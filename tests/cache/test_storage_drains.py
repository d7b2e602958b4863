"""Draining a storage: no new blocks, everything that lies on it goes, the rest stays; with cancels and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from cache_rig import instance
from drain_world import BLOCK_BYTES, CLUSTER, DrainWorld, files_below

from kvcm.cache.archive import ArchiveReader, ArchiveWriter, Document, Head
from kvcm.cache.drains import DrainProgress, StorageDrains
from kvcm.cache.export import Exporter
from kvcm.cache.pins import PinRequest
from kvcm.cache.removal import Remover
from kvcm.cache.sessions import WriteRequest
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.errors import InvalidArgumentError, NotReadyError
from kvcm.model.instances import Instance
from kvcm.model.locations import Location, LocationStatus, decode_chunk, encode_chunk
from kvcm.model.storages import StorageConfig
from kvcm.registry.codec import decode_document

SERVING = LocationStatus.SERVING
KEYS = list(range(6))

Open = Callable[..., Awaitable[DrainWorld]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens worlds, which are closed after the test."""
    worlds: list[DrainWorld] = []

    async def open_world(*names: str, registered: Instance | None = None) -> DrainWorld:
        world = DrainWorld(tmp_path, names or ("a", "b"), registered=registered)
        worlds.append(world)
        await world.begin()
        return world

    yield open_world
    for world in worlds:
        world.close()


async def progress(world: DrainWorld) -> DrainProgress:
    (only,) = await world.drains.look(is_leader=True)
    return only


def paced(world: DrainWorld, **pace: Any) -> StorageDrains:
    """The drains of a world that is alone, at a pace of the test's own."""
    remover = Remover(world.clock, world.registry.groups.find)
    return StorageDrains(world.registry, world.manager.open_caches, remover, world.clock, is_shared=False, **pace)


async def finish_drain(world: DrainWorld) -> None:
    """Let the laps and deletions of a drain pass."""
    for _ in range(6):
        await world.pass_time(2.0)


async def test_a_drained_storage_is_emptied_down_to_its_last_file_and_the_others_keep_theirs(
    opened: Open, tmp_path: Path
) -> None:
    world = await opened()
    await world.write(KEYS)
    await world.drains.drain("a")
    assert await world.write([10, 11]) == ["b", "b"]
    assert await world.hits([*KEYS, 10, 11]) == [*KEYS, 10, 11]  # read until they are evicted
    await world.drains.go_on()
    assert await world.hits([*KEYS, 10, 11]) == [10, 11]
    assert len(files_below(tmp_path / "a")) == len(KEYS)  # invariant 6: the delay is not over
    assert (await progress(world)).left_bytes == world.used_bytes("a") == len(KEYS) * BLOCK_BYTES
    assert not (await progress(world)).is_done
    await finish_drain(world)
    found = await progress(world)
    assert (found.is_done, found.left_bytes, world.used_bytes("a")) == (True, 0, 0)
    assert files_below(tmp_path / "a") == []
    assert len(files_below(tmp_path / "b")) == 2
    assert await world.hits([10, 11]) == [10, 11]


async def test_a_drained_storage_takes_no_write_although_it_is_the_only_one(opened: Open) -> None:
    world = await opened("a")
    await world.write(KEYS)
    await world.drains.drain("a")
    with pytest.raises(NotReadyError, match=r"no storage of group 'group' is available: \['a'\].*being drained"):
        await world.start([*KEYS, 10])
    started = await world.start(KEYS)  # they can be read, and there is nowhere else to write them to
    assert started.chunks == []


async def test_what_serves_on_a_drained_storage_is_written_anew_elsewhere(opened: Open) -> None:
    world = await opened()
    await world.write(KEYS)
    await world.drains.drain("a")
    assert await world.write(KEYS) == ["b"] * len(KEYS)
    await finish_drain(world)
    assert await world.hits(KEYS) == KEYS


async def test_what_is_being_written_on_a_drained_storage_has_no_second_writer_invariant_2(opened: Open) -> None:
    world = await opened()
    started = await world.start(KEYS)
    await world.drains.drain("a")
    assert (await world.start(KEYS)).chunks == []
    await world.drains.go_on()
    found = await progress(world)
    assert (found.writing, found.is_done) == (len(KEYS), False)
    await world.finish(started)
    assert await world.hits(KEYS) == KEYS  # left to its end, and found by a later lap
    await finish_drain(world)
    assert await world.hits(KEYS) == []
    assert (await progress(world)).is_done


async def test_a_replica_that_is_being_written_is_left_to_its_writer(opened: Open) -> None:
    world = await opened("a")
    await world.write([0])
    await world.manager.start_write("i", WriteRequest([0], min_replica_count=2))
    await world.drains.drain("a")
    await world.drains.go_on()
    assert [place.status.name for place in await world.places("a")] == ["DELETING", "WRITING"]


async def test_what_is_pinned_waits_for_the_end_of_its_pin(opened: Open) -> None:
    world = await opened()
    await world.write(KEYS)
    pin = await world.manager.pin("i", PinRequest([0, 1], "somebody", 3600))
    assert pin is not None
    await world.drains.drain("a")
    await finish_drain(world)
    assert await world.hits(KEYS) == [0, 1]
    found = await progress(world)
    assert (found.pinned, found.left_bytes, found.is_done) == (2, 2 * BLOCK_BYTES, False)
    await world.manager.unpin("i", pin.id)
    for _ in range(8):
        await world.pass_time(30.0)
    assert (await progress(world)).is_done


async def test_a_cancelled_drain_leaves_what_is_left(opened: Open) -> None:
    world = await opened()
    await world.write(KEYS)
    pin = await world.manager.pin("i", PinRequest([0], "somebody", 5))
    assert pin is not None
    await world.drains.drain("a")
    await world.drains.go_on()
    await world.drains.cancel("a")
    await world.drains.cancel("a")
    assert await world.drains.look(is_leader=True) == []
    for _ in range(4):
        await world.pass_time(30.0)
    assert await world.hits(KEYS) == [0]
    assert await world.write([20]) == ["a"]


async def test_a_drain_goes_on_after_a_restart_whatever_was_configured_meanwhile(opened: Open) -> None:
    world = await opened()
    await world.write(KEYS)
    storages = world.registry.storages
    await world.drains.drain("a")
    await storages.set_enabled("a", enabled=False)
    await storages.update(replace(world.config("a"), capacity_bytes=1 << 30))
    await storages.update(world.config("a", "2"))
    await storages.set_enabled("a", enabled=True)
    since = storages.drains()
    world.clock.time += 1.0
    await world.drains.drain("a")  # asked for again: the first one counts
    world.close()
    await world.restart()
    assert world.registry.storages.drains() == since
    assert await world.write([10]) == ["b"]
    await finish_drain(world)
    assert (await progress(world)).is_done


async def test_an_export_says_nothing_of_a_drain(opened: Open) -> None:
    world = await opened("a")
    await world.drains.drain("a")
    file = BytesIO()
    await Exporter(world.registry, lambda _: MemoryBackend(), ArchiveWriter(file, Head("1", CLUSTER, "", 0.0))).run()
    file.seek(0)
    frames = [each for each in ArchiveReader(file, "file").frames() if isinstance(each, Document)]
    storages = [decode_document(StorageConfig, each.document) for each in frames if each.kind == "storage"]
    assert storages == [world.config("a")]


async def test_a_storage_that_nobody_knows_is_neither_drained_nor_cancelled(opened: Open) -> None:
    world = await opened()
    for call in (world.drains.drain, world.drains.cancel, world.drains.remove):
        with pytest.raises(InvalidArgumentError, match="storage 'x' does not exist"):
            await call("x")


async def test_parts_elsewhere_go_with_those_without_which_they_are_worth_nothing(opened: Open) -> None:
    specs = {"tp0": BLOCK_BYTES, "tp1": BLOCK_BYTES}
    world = await opened(registered=instance(specs))
    await _split(world)
    assert [place.spec_names for place in await world.places("b")] == [("tp1",)]
    await world.drains.drain("a")
    await world.drains.go_on()
    assert await world.places("b", SERVING) == []


async def test_parts_that_can_be_read_alone_stay(opened: Open) -> None:
    specs = {"tp0": BLOCK_BYTES, "tp1": BLOCK_BYTES}
    world = await opened(registered=instance(specs, {"one": ("tp1",)}))
    await _split(world)
    await world.drains.drain("a")
    await finish_drain(world)
    assert [place.spec_names for place in await world.places("b", SERVING)] == [("tp1",)]
    assert await world.hits([0]) == [0]


async def _split(world: DrainWorld) -> None:
    """Put `tp0` of block 0 on storage a, and `tp1` on b."""
    await world.write([0])
    index = world.manager.cache("i").index
    await world.registry.storages.set_enabled("a", enabled=False)
    await world.write([0])
    await world.registry.storages.set_enabled("a", enabled=True)
    (record,) = await index.get([0])
    assert record is not None
    halves = tuple(_only(each, name) for each, name in zip(record.locations, ("tp0", "tp1"), strict=True))
    await index.put({0: record._replace(locations=halves)})


def _only(place: Location, name: str) -> Location:
    decoded = decode_chunk(place.chunk)
    specs = [spec for spec in decoded.specs if spec.name == name]
    chunk = encode_chunk(decoded.storage_type, 1, specs)
    return place._replace(chunk=chunk, spec_names=(name,), size_bytes=BLOCK_BYTES)


async def test_a_lap_is_slow_enough_for_requests_and_ends_with_the_leadership(opened: Open) -> None:
    world = await opened()
    await world.write(range(600))
    pauses: list[float] = []
    turns = 0

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def give_way() -> None:
        nonlocal turns
        turns += 1

    drains = paced(world, give_way=give_way, pause=pause)
    await drains.drain("a")
    answers = iter([True, True, False])
    await drains.go_on(lambda: next(answers))
    assert len(await world.places("a", SERVING)) == 600 - 512
    await drains.go_on()
    assert (sum(pauses), turns) == (pytest.approx((512 + 600) / 20_000), 5)
    assert await world.places("a", SERVING) == []


async def test_laps_that_find_nothing_to_mark_become_rare(opened: Open) -> None:
    world = await opened()
    await world.write(KEYS)
    assert await world.manager.pin("i", PinRequest(KEYS, "somebody", 3600)) is not None
    await world.drains.drain("a")
    laps = 0

    async def count(_seconds: float) -> None:
        nonlocal laps
        laps += 1
        await asyncio.sleep(0)

    drains = paced(world, pause=count)
    for _ in range(300):
        world.clock.time += 1.0
        await drains.go_on()
    assert 10 <= laps <= 20
