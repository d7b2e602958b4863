"""Drains that end while a lap is under way, storages that hang when they are removed, and blocks nobody can count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from drain_world import BLOCK_BYTES, DrainWorld

from kvcm.cache.drains import TAKE_BACK_SECONDS, StorageDrains
from kvcm.cache.removal import Remover
from kvcm.model.errors import NotReadyError
from kvcm.model.locations import LocationStatus
from kvcm.model.masks import BlockMask
from kvcm.model.storages import StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.directory import OPENERS
from kvcm.storage.mempool import PoolOpener
from kvcm.storage.pool_state import PoolReport
from kvcm.store.memory import MemoryTable

SERVING, DELETING = LocationStatus.SERVING, LocationStatus.DELETING
MIB = 1 << 20
BLOCKS = 600
PAGE = 256  # blocks that a lap looks at together


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[DrainWorld]:
    """A manager with blocks on the first of two storages."""
    world = DrainWorld(tmp_path)
    await world.begin()
    await world.write(range(BLOCKS))
    yield world
    world.close()


async def _nothing() -> None:
    await asyncio.sleep(0)


def drains_that(world: DrainWorld, end: Callable[[], Awaitable[None]], when: str) -> StorageDrains:
    """Drains during whose first page, or right after it, something happens."""
    is_over = False

    async def once() -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            await end()

    async def pause(_seconds: float) -> None:
        await (once if when == "after a page" else _nothing)()

    remover = Remover(world.clock, world.registry.groups.find)
    give_way = once if when == "during a page" else _nothing
    return StorageDrains(
        *(world.registry, world.manager.open_caches, remover, world.clock),
        **{"is_shared": False, "give_way": give_way, "pause": pause},
    )


# ── ends during a lap ──


@pytest.mark.parametrize(("when", "marked"), [("during a page", 0), ("after a page", PAGE)])
async def test_a_drain_that_is_cancelled_marks_nothing_more(world: DrainWorld, when: str, marked: int) -> None:
    drains = drains_that(world, lambda: world.drains.cancel("a"), when)
    await drains.drain("a")
    await drains.go_on()
    assert len(await world.places("a", DELETING)) == marked
    assert len(await world.hits(range(BLOCKS))) == BLOCKS - marked
    await drains.drain("a")  # another one takes all
    world.clock.time += 1.0
    await drains.go_on()
    assert await world.places("a", SERVING) == []


@pytest.mark.parametrize(("when", "marked"), [("during a page", 0), ("after a page", PAGE)])
async def test_a_storage_that_comes_back_during_a_lap_has_what_is_left(
    world: DrainWorld, when: str, marked: int
) -> None:
    drains = drains_that(world, lambda: world.registry.storages.add(world.config("a")), when)
    await drains.remove("a")
    world.clock.time += TAKE_BACK_SECONDS
    await drains.go_on()
    world.clock.time += 5.0
    await world.executor.run_due()
    assert len(await world.hits(range(BLOCKS))) == BLOCKS - marked
    assert world.used_bytes("a") == (BLOCKS - marked) * BLOCK_BYTES  # invariant 4


# ── a removed storage that hangs ──


async def test_the_removal_of_a_storage_that_hangs_comes_to_its_end(world: DrainWorld) -> None:
    backend = world.storages.backend("a")
    assert backend is not None
    hanging = asyncio.Event()

    async def hang(uris: Sequence[str]) -> list[str | None]:
        hanging.set()
        await asyncio.Event().wait()
        return [None for _ in uris]

    backend.delete = hang  # type: ignore[method-assign]
    await world.manager.remove("i", range(BLOCKS), BlockMask(offset=0))
    world.clock.time += 2.0
    deleting = asyncio.create_task(world.executor.run(0.0))
    await hanging.wait()
    await world.drains.remove("a")
    for _ in range(2000):
        if not world.registry.storages.drains():
            break
        world.clock.time += 1.0
        await world.drains.go_on()
        await asyncio.sleep(0)
    deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)
    assert (world.registry.storages.drains(), await world.records(), world.used_bytes("a")) == ([], {}, 0)
    await world.registry.storages.add(world.config("a", "2"))


# ── instances whose documents cannot be read ──


@pytest.mark.parametrize("is_empty", [True, False])
async def test_no_storage_is_forgotten_while_an_instance_cannot_be_read(world: DrainWorld, is_empty: bool) -> None:
    name = "b" if is_empty else "a"
    table = world._store.table("registry")
    assert await table.replace("instance/old", None, b"garbage")
    await world.registry.refresh()
    await world.drains.remove(name)
    await world.pass_time(TAKE_BACK_SECONDS)
    for _ in range(6):
        await world.pass_time(2.0)
    (found,) = await world.drains.look(is_leader=True)
    assert (found.left_bytes, found.is_done, found.unreadable) == (0, False, ["old"])
    assert not (await world.drains.look(is_leader=False))[0].is_done
    with pytest.raises(NotReadyError, match="is being forgotten"):
        await world.registry.storages.add(world.config(name, "2"))
    assert await table.replace("instance/old", b"garbage", None)
    await world.registry.refresh()
    await world.pass_time(2.0)
    assert world.registry.storages.drains() == []


# ── memory pools ──


def pool(node_id: str) -> StorageConfig:
    return StorageConfig("p", TairMemPoolStorageSpec(node_id=node_id, capacity_bytes=4 * MIB))


async def test_of_a_pool_that_is_forgotten_the_store_keeps_nothing(tmp_path: Path) -> None:
    """Else one of that name would count as there before its host told of it, with memory that nobody frees."""
    table = MemoryTable()
    world: DrainWorld
    opener = PoolOpener(table, _Clock(lambda: world.clock.now()), Random(0), is_shared=False)
    world = DrainWorld(tmp_path, openers={**OPENERS, StorageType.ST_TAIRMEMPOOL: opener})
    await world.begin()
    await world.registry.storages.add(pool("n"))
    await world.storages.pools()["p"].report(PoolReport("n", 7, 4 * MIB))
    await world.storages.pools()["p"].allocate(Allocation("i", "l", [Part("kv", key, 4096) for key in range(300)]))
    await table.replace("pool", None, b"of another pool")
    world.clock.time += 1.0
    await world.drains.remove("p")
    assert world.registry.storages.drains() == []
    assert await table.all() == {"pool": b"of another pool"}
    await world.registry.storages.add(pool("m"))
    again = world.storages.pools()["p"]
    assert "no host agent has told" in (await again.refresh()).why_not_usable("m", world.clock.now())
    assert ((await again.space()).free_bytes, again.taken_bytes) == (4 * MIB, 0)
    world.close()


class _Clock:
    """A clock that is set later."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
