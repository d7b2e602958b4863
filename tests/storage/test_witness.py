"""The witness of a packed storage: it and the store say which of them was put back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_clock import FakeClock

from kvcm.model.errors import StorageIOError
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.file import FileStorage
from kvcm.storage.file_slots import SlotReuse
from kvcm.store.memory import MemoryStore
from kvcm.store.numbers import DeletionNumbers, encode_witness
from kvcm.store.store import PART

SLOT_BYTES = 512


@dataclass
class Rig:
    """A storage with two parts a file, and a store."""

    root: Path
    clock: FakeClock
    store: MemoryStore = field(default_factory=MemoryStore)

    def __post_init__(self) -> None:
        (self.root / "c").mkdir(parents=True)
        self.numbers = DeletionNumbers(self.store)
        reuse = SlotReuse(now=self.clock.now, numbers=self.numbers)
        self.storage = FileStorage("s", "file", str(self.root), "c", 2, reuse=reuse)
        self.witness = self.root / "c" / ".kvcm-witness-s"

    async def written(self, location: str) -> list[str]:
        """Write the two parts of a file."""
        parts = [Part("kv", key, SLOT_BYTES) for key in range(2)]
        uris = await self.storage.allocate(Allocation("i", location, parts))
        write(Path(LocationUri.parse(uris[0]).path))
        return uris

    async def are_apart(self) -> bool:
        return await self.numbers.are_apart("s", self.storage.read_witness)

    async def copied(self) -> bytes | None:
        return await self.store.table(PART).get("s")

    async def put_back(self, document: bytes | None) -> None:
        table = self.store.table(PART)
        await table.replace("s", await table.get("s"), document)


def write(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * 2 * SLOT_BYTES)


@pytest.fixture
def rig(tmp_path: Path, clock: FakeClock) -> Rig:
    return Rig(tmp_path, clock)


async def test_files_of_one_part_need_no_witness(rig: Rig) -> None:
    rig.storage = FileStorage("s", "file", str(rig.root), "c", 1, reuse=SlotReuse(numbers=rig.numbers))
    assert await rig.storage.delete(await rig.written("1")) == [None, None]
    assert not rig.witness.exists()


async def test_a_store_that_is_put_back_lacks_a_number_and_deletes_nothing(rig: Rig) -> None:
    uris, copy = await rig.written("1"), await rig.copied()
    await rig.storage.delete(uris[:1])
    assert not await rig.are_apart()
    await rig.put_back(copy)
    assert await rig.are_apart()
    with pytest.raises(StorageIOError, match="not of the same time"):
        await rig.storage.delete(uris[1:])
    assert await rig.storage.exists(uris) == [False, True]
    await rig.storage.advance_witness(rig.numbers)
    assert not await rig.are_apart()
    assert await rig.storage.delete(uris[1:]) == [None]


async def test_a_history_that_was_left_never_fits_again(rig: Rig) -> None:
    left = [await rig.copied()]
    for location in "123":
        rig.clock.time += 1
        await rig.storage.delete((await rig.written(location))[:1])
        left.append(await rig.copied())
    await rig.put_back(left[1])
    await rig.storage.advance_witness(rig.numbers)
    for document in left:
        assert not await rig.are_apart()
        now = await rig.copied()
        await rig.put_back(document)
        assert await rig.are_apart()
        await rig.put_back(now)


@pytest.mark.parametrize("damage", ["older", "gone", "cut off"])
async def test_a_storage_that_is_put_back_has_an_older_witness(rig: Rig, damage: str) -> None:
    uris = await rig.written("1")
    await rig.storage.delete(uris[:1])
    older = rig.witness.read_bytes()
    await rig.storage.delete((await rig.written("2"))[:1])
    if damage == "gone":
        rig.witness.unlink()
    else:
        rig.witness.write_bytes(older if damage == "older" else older[:-1])
    assert await rig.are_apart()


async def test_a_process_that_dies_between_store_and_witness_leaves_no_doubt(rig: Rig) -> None:
    uris = await rig.written("1")
    for before in ({}, {PART: 7}):
        if before:
            rig.witness.write_bytes(encode_witness(before))
            await rig.storage.advance_witness(rig.numbers)
        witnessed = await rig.storage.read_witness()
        assert await rig.numbers.advance("s", 1, witnessed or {})
        assert not await rig.are_apart()
    assert await rig.storage.delete(uris[:1]) == [None]


async def test_a_slot_that_was_handed_out_needs_its_note(rig: Rig) -> None:
    """Notes that were put back say nothing of the later owner."""
    uris = await rig.written("1")
    later = str(LocationUri.parse(uris[0])._replace(location_id="2"))
    assert await rig.storage.exists([later]) == [True]
    assert await rig.storage.verify([*uris, later], is_written=True) == [True, True, False]
