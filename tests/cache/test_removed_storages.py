"""Removing a storage: its blocks are missing at once, and forgotten soon; their bytes stay where they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from drain_world import BLOCK_BYTES, CLUSTER, DrainWorld, files_below

from kvcm.cache.drains import TAKE_BACK_SECONDS
from kvcm.cache.pins import PinRequest
from kvcm.cache.sessions import WriteRequest
from kvcm.model.errors import NotReadyError
from kvcm.model.locations import LocationStatus
from kvcm.model.storages import StorageType
from kvcm.storage.backend import Allocation
from kvcm.storage.dummy import DummyStorage

KEYS = list(range(6))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[DrainWorld]:
    """A manager with six blocks on the first of two storages."""
    world = DrainWorld(tmp_path)
    await world.begin()
    await world.write(KEYS)
    yield world
    world.close()


async def purge(world: DrainWorld) -> None:
    """Let everything pass that a removal takes."""
    await world.pass_time(TAKE_BACK_SECONDS)
    for _ in range(6):
        await world.pass_time(2.0)


async def test_usage_returns_and_the_bytes_stay(world: DrainWorld, tmp_path: Path) -> None:
    await world.drains.remove("a")
    assert await world.hits(KEYS) == []
    assert world.used_bytes("a") == len(KEYS) * BLOCK_BYTES
    await purge(world)
    assert (world.used_bytes("a"), await world.records()) == (0, {})  # invariant 4
    assert len(files_below(tmp_path / "a")) == len(KEYS)
    assert world.registry.storages.drains() == []


async def test_a_removal_goes_on_after_a_restart(world: DrainWorld) -> None:
    await world.drains.remove("a")
    world.close()
    await world.restart()
    (found,) = await world.drains.look(is_leader=True)
    assert (found.drain.is_removal, found.left_bytes, found.is_begun) == (True, len(KEYS) * BLOCK_BYTES, False)
    await purge(world)
    assert await world.records() == {}


async def test_added_again_soon_as_it_was_it_has_all_its_blocks(world: DrainWorld) -> None:
    await world.drains.remove("a")
    await world.pass_time(TAKE_BACK_SECONDS - 0.1)
    await world.registry.storages.add(world.config("a"))
    await purge(world)
    assert await world.hits(KEYS) == KEYS
    assert world.registry.storages.drains() == []


async def test_added_again_late_it_has_what_is_left(world: DrainWorld) -> None:
    await world.drains.remove("a")
    await world.pass_time(TAKE_BACK_SECONDS)  # marked, and the delay is not over
    await world.registry.storages.add(world.config("a"))
    assert await world.hits(KEYS) == []
    assert await world.write([20]) == ["a"]
    await purge(world)
    assert (await world.hits([20]), world.used_bytes("a")) == ([20], BLOCK_BYTES)


async def test_the_name_is_not_given_to_another_medium_while_blocks_are_left(world: DrainWorld, tmp_path: Path) -> None:
    await world.drains.remove("a")
    for seconds in (0.0, TAKE_BACK_SECONDS):
        await world.pass_time(seconds)
        with pytest.raises(NotReadyError, match=r"'a' is being forgotten.*with the medium that it had"):
            await world.registry.storages.add(world.config("a", "2"))
    assert not (tmp_path / "a" / "2" / CLUSTER).exists()  # refused before anything is made
    await purge(world)
    await world.registry.storages.add(world.config("a", "2"))
    assert await world.write(KEYS) == ["a"] * len(KEYS)
    assert len(files_below(tmp_path / "a" / "2")) == len(KEYS)


async def test_the_name_of_a_storage_without_blocks_is_free_at_once(world: DrainWorld) -> None:
    await world.drains.remove("b")
    assert world.registry.storages.drains() == []
    await world.registry.storages.add(world.config("b", "2"))


async def test_what_is_pinned_goes_too(world: DrainWorld) -> None:
    assert await world.manager.pin("i", PinRequest(KEYS, "somebody", 3600)) is not None
    await world.drains.remove("a")
    await purge(world)
    assert await world.records() == {}


async def test_a_write_that_ends_after_the_removal_does_not_come_back_invariant_3(world: DrainWorld) -> None:
    early, late = await world.start([10]), await world.start([11])
    await world.drains.remove("a")
    await world.finish(early)  # before it is marked
    await world.pass_time(TAKE_BACK_SECONDS)
    await world.finish(late)
    await purge(world)
    assert (await world.records(), world.used_bytes("a")) == ({}, 0)


async def test_the_name_is_not_free_while_a_writer_may_still_come(world: DrainWorld) -> None:
    started = await world.manager.start_write("i", WriteRequest([10], timeout_seconds=600))
    await world.drains.remove("a")
    await purge(world)
    assert world.used_bytes("a") == BLOCK_BYTES
    with pytest.raises(NotReadyError, match="is being forgotten"):
        await world.registry.storages.add(world.config("a", "2"))
    await world.finish(started)
    await purge(world)
    await world.registry.storages.add(world.config("a", "2"))


class Gated(DummyStorage):
    """Hands out addresses when it is told to."""

    def __init__(self, name: str, gate: asyncio.Event) -> None:
        super().__init__(name, "/r/", 1)
        self._gate = gate

    async def allocate(self, allocation: Allocation) -> list[str]:
        await self._gate.wait()
        return await super().allocate(allocation)


@pytest.mark.parametrize("medium", ["", "1", "2"])
async def test_a_write_that_began_before_a_removal_gets_no_addresses(tmp_path: Path, medium: str) -> None:
    gate = asyncio.Event()
    openers = {StorageType.ST_NFS: lambda config, _cluster: Gated(config.global_unique_name, gate)}
    world = DrainWorld(tmp_path, ["a"], openers=openers)
    await world.begin()
    writing = asyncio.create_task(world.start([1]))
    for _ in range(20):
        await asyncio.sleep(0)
    await world.drains.remove("a")
    if medium:
        await world.registry.storages.add(world.config("a", medium))
    gate.set()
    with pytest.raises(NotReadyError, match="'a' was removed or changed while the write was being started"):
        await writing
    assert await world.places("a", LocationStatus.WRITING, LocationStatus.SERVING) == []
    world.close()


async def test_a_removal_ends_a_drain(world: DrainWorld) -> None:
    await world.drains.drain("a")
    await world.drains.remove("a")
    assert [each.is_removal for each in world.registry.storages.drains()] == [True]
    await world.registry.storages.add(world.config("a"))
    assert await world.write([20]) == ["a"]
