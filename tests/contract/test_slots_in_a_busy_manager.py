"""Slots of packed files in a manager that is written to while it evicts, and on media that fail or are slow (design.md
decision 16)."""

import asyncio
import threading
import time
from pathlib import Path
from random import Random

import pytest
from slot_world import GRACE_SECONDS, MOST_PENDING_SECONDS, SlotWorld, notes_of, slots, wait_for_slots
from storage_rig import files_below

from kvcm.storage.backend import Part, Parts
from kvcm.storage.file_reuse import SlotGiver
from kvcm.storage.file_slots import PackedFiles
from kvcm.storage.packing import slot_count
from kvcm.storage.slot_notes import beside, note_slots
from kvcm.storage.slots import FreeSlots, Pool, SlotReuse
from kvcm.storage.threads import StorageThreads

SLOTS = 32
HELD_SECONDS = 2.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_slots(monkeypatch)


@pytest.fixture
def world(tmp_path: Path) -> SlotWorld:
    return SlotWorld(tmp_path, Random(4), slot_bytes=512, slots_per_file=SLOTS)


async def test_slots_whose_metadata_is_still_going_are_not_lost(world: SlotWorld) -> None:
    """Invariant 5 as well: none of them is handed out before that."""
    uris = await world.create(SLOTS)
    await world.delete(uris[:8])
    world.clock.time += GRACE_SECONDS
    await world.roll_back(uris[8:24])
    world.clock.time += MOST_PENDING_SECONDS
    assert slots(await world.create(4)) == slots(uris[:4])
    await world.storage.forgotten(uris[8:24])
    assert slots(await world.create(4)) == slots(uris[4:8])
    world.clock.time += GRACE_SECONDS
    assert {*slots(await world.create(16))} == {*slots(uris[8:24])}
    assert world.counts.overlaps == 0


async def test_slots_whose_metadata_never_goes_are_lost_in_the_end(world: SlotWorld) -> None:
    """Also in a file that others are evicted from every few seconds: it is left to empty."""
    uris = await world.create(SLOTS)
    await world.delete(uris[:8])
    world.clock.time += GRACE_SECONDS
    await world.roll_back(uris[8:13])
    for uri in uris[13:17]:
        world.clock.time += MOST_PENDING_SECONDS
        await world.delete([uri])
    assert not {*slots(await world.create(4))} & {*slots(uris)}


async def test_two_that_write_at_once_share_a_file(world: SlotWorld) -> None:
    """What one of them has taken out is not lost to the other."""
    uris = await world.create(SLOTS)
    await world.delete(uris[:24])
    world.clock.time += GRACE_SECONDS
    both = await asyncio.gather(world.allocate(12), world.allocate(12))
    assert sorted(map(str, slots([*both[0], *both[1]]))) == sorted(map(str, slots(uris[:24])))
    assert world.counts.overlaps == 0


async def test_deletions_succeed_where_notes_cannot_be_shortened(world: SlotWorld) -> None:
    """A full medium has to empty. Here nothing can be made under the name that shorter notes get at first."""
    uris = await world.create(SLOTS)
    notes, in_the_way = notes_of(uris[0]), notes_of(uris[0], ".new")
    in_the_way.mkdir()
    for _ in range(80):
        await world.delete(uris[:8])
        world.clock.time += GRACE_SECONDS
        uris[:8] = await world.create(8)
    assert (world.counts.failures, world.counts.reused) == (0, 640)
    assert notes.stat().st_size > 4000
    in_the_way.rmdir()
    await world.delete(uris)
    assert world.counts.failures == 0
    assert files_below(world.root) == []


async def test_a_scrub_leaves_nothing_of_notes_that_a_killed_manager_was_shortening(world: SlotWorld) -> None:
    uris = await world.create(SLOTS)
    await world.delete(uris[:4])
    notes_of(uris[0], ".new").write_bytes(b"\n0.")
    found = [each async for page in world.storage.objects("cluster") for each in page.objects]
    assert [slot_count(each.name) for each in found] == [SLOTS]
    assert await world.storage.remove_objects("cluster", found) == [None]
    assert files_below(world.root) == []


async def test_while_all_threads_are_busy_only_the_first_writer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_slots(monkeypatch, HELD_SECONDS)
    free = FreeSlots(SlotReuse(GRACE_SECONDS, lambda: clock[0], lambda: 1))
    clock, path, pool = [0.0], f"{tmp_path}/1_32x0123456789abcdef.aa", Pool("inst", 512)
    for name in (path, beside(path)):
        await asyncio.to_thread(Path(name).write_bytes, b"")
    note_slots(path, range(8))
    free.deleted(path, pool, range(8))
    free.forgotten(path, range(8))
    clock[0] += GRACE_SECONDS
    threads, end = StorageThreads("busy", 1), threading.Event()
    giver = SlotGiver("s-1", PackedFiles(f"{tmp_path}/", free), threads)
    one = Parts.of([Part("tp0", 1, 512)])
    busy = asyncio.create_task(threads.run(lambda: end.wait(60)))
    await asyncio.sleep(0)
    assert await giver.give("inst", one, "a1") == {}
    began = time.monotonic()
    for _ in range(3):
        assert await giver.give("inst", one, "a2") == {}
    assert time.monotonic() - began < HELD_SECONDS
    wait_for_slots(monkeypatch)
    end.set()
    assert await busy
    until = time.monotonic() + 60
    while not await giver.give("inst", one, "a3"):
        assert time.monotonic() < until
        await asyncio.sleep(0)
    assert free.usable(path) == 7
