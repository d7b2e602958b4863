"""Late loads from a slot that belongs to another block by now: with checksums a miss, never the other block's bytes.

Slots are those of the real allocator, with its clock injected; bytes move through the transfer engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from slot_world import GRACE_SECONDS, SlotWorld, content, wait_for_slots

from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri

BLOCKS = 16  # those of one file
DEADLINE_SECONDS = 20.0

Checksums = dict[str, int]


class Engine:
    """Saves parts as their uris say, and loads them.

    Args:
        world: the slots and the files of the storage.
    """

    def __init__(self, world: SlotWorld) -> None:
        spec = NfsStorageSpec(str(world.root), world.slots_per_file)
        self.transfers = TransferEngine.for_storages([StorageConfig("s-1", spec)], 2, checksums=True)
        self.checksums: Checksums = {}

    def save(self, uris: Sequence[str]) -> None:
        places = list(map(LocationUri.parse, uris))
        items = [
            TransferItem(place, [memoryview(content(uri, place.size))]) for uri, place in zip(uris, places, strict=True)
        ]
        for uri, result in zip(uris, self.transfers.save(items, DEADLINE_SECONDS), strict=True):
            assert result.ok, result
            self.checksums[uri] = result.checksum

    def load(self, uris: Sequence[str], *, checksums: bool = True) -> list[tuple[Failure | None, bytes]]:
        """Return failures and what lies in the buffers; with checksums bytes that count are those of the uri."""
        places = list(map(LocationUri.parse, uris))
        items = [
            TransferItem(place, [memoryview(bytearray(place.size))], checksum=self.checksums[uri] * checksums)
            for uri, place in zip(uris, places, strict=True)
        ]
        results = self.transfers.load(items, DEADLINE_SECONDS)
        found = [(result.failure, bytes(item.buffers[0])) for item, result in zip(items, results, strict=True)]
        if checksums:
            for uri, (failure, data) in zip(uris, found, strict=True):
                assert failure is not None or data == content(uri, len(data)), uri
        return found

    def failures(self, uris: Sequence[str]) -> list[Failure | None]:
        return [failure for failure, _ in self.load(uris)]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_slots(monkeypatch)


@pytest.fixture
def world(tmp_path: Path) -> SlotWorld:
    return SlotWorld(tmp_path / "root", Random(1))


@pytest.fixture
def engine(world: SlotWorld) -> Iterator[Engine]:
    engine = Engine(world)
    yield engine
    engine.transfers.close()


async def handed_on(world: SlotWorld, engine: Engine) -> tuple[list[str], list[str], list[str]]:
    """Save a file of blocks, delete some and save others in their slots; return those that stayed, the deleted ones
    and the others."""
    before = await world.allocate(BLOCKS)
    engine.save(before)
    gone = before[3:9]
    await world.storage.delete(gone)
    await world.storage.forgotten(gone)
    world.clock.time += GRACE_SECONDS + 1
    for uri in gone:
        del world.live[LocationUri.parse(uri).path, LocationUri.parse(uri).blkid or 0]
    after = await world.allocate(len(gone))
    assert {slot(uri) for uri in after} == {slot(uri) for uri in gone}, "the slots were handed out again"
    engine.save(after)
    return [uri for uri in before if uri not in gone], gone, after


def slot(uri: str) -> tuple[str, int | None]:
    place = LocationUri.parse(uri)
    return place.path, place.blkid


async def test_a_writer_back_after_the_grace_costs_only_the_new_block(world: SlotWorld, engine: Engine) -> None:
    stayed, gone, after = await handed_on(world, engine)
    engine.save(gone[:2])
    spoilt = {slot(uri) for uri in gone[:2]}
    assert engine.failures(after) == [Failure.CORRUPT if slot(uri) in spoilt else None for uri in after]
    assert engine.failures(stayed) == [None] * len(stayed)


async def test_readers_by_old_and_by_new_answers_while_slots_change_hands(world: SlotWorld, engine: Engine) -> None:
    """Random histories: a load of any uri returns its own bytes or a miss; live uris always load."""
    known: list[str] = []
    for _ in range(25):
        world.clock.time += GRACE_SECONDS + 1
        fresh = await world.allocate(world.random.randint(1, BLOCKS))
        engine.save(fresh)
        known += fresh
        live = list(world.live.values())
        assert engine.failures(live) == [None] * len(live)
        engine.load(world.random.choices(known, k=BLOCKS))
        await world.delete(world.chosen(world.random.randint(1, BLOCKS)))
    assert world.counts.reused > BLOCKS
    stale = [uri for uri in known if uri not in world.live.values()]
    assert None not in engine.failures(stale)


@pytest.mark.parametrize("seed", range(4))
async def test_damaged_notes_cost_blocks_at_worst(tmp_path: Path, seed: int) -> None:
    """The notes beside packed files lose bytes, get others, or go: no slot is handed out twice, nothing is served that
    is not the reader's, and deletions go on."""
    world = SlotWorld(tmp_path / "root", Random(seed))
    engine = Engine(world)
    known: list[str] = []
    for _ in range(40):
        world.clock.time += GRACE_SECONDS + 1
        fresh = await world.allocate(world.random.randint(1, BLOCKS))
        engine.save(fresh)
        known += fresh
        damage_notes(world)
        engine.load(world.random.choices(known, k=BLOCKS))
        gone = world.chosen(world.random.randint(1, BLOCKS))
        assert await world.storage.delete(gone) == [None] * len(gone)
        await world.storage.forgotten(gone)
        for uri in gone:
            world._drop((LocationUri.parse(uri).path, LocationUri.parse(uri).blkid or 0))
    assert world.counts.overlaps == 0
    assert world.counts.reused > 0
    engine.load(known)
    engine.transfers.close()


def damage_notes(world: SlotWorld) -> None:
    """Change one byte of some notes, cut some, and remove some."""
    for path in world.root.rglob("*.deleted"):
        data = bytearray(path.read_bytes())
        what = world.random.randrange(8)
        if what == 0:
            path.unlink()
        elif what == 1:
            path.write_bytes(data[: world.random.randrange(len(data) + 1)])
        elif what == 2 and data:
            data[world.random.randrange(len(data))] = world.random.choice(b"0123456789.+\n\x00")
            path.write_bytes(data)
