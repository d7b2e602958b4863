"""Finish notes: an index made again from them has the finished blocks with their bytes, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from cache_rig import ManagerCore, group, instance
from fake_clock import FakeClock

from kvcm.cache.archive import Importer
from kvcm.cache.finish_notes import FinishNotes, NotesReader, Rebuilt, deployment_of
from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.quotas import UsageLedger
from kvcm.cache.write_sessions import StartedWrite, WriteRequest
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.keys import BlockMask, mixed, unmixed
from kvcm.model.locations import decode_chunk
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri
from kvcm.registry.loss_journal import LossJournal
from kvcm.registry.registry import Registry
from kvcm.registry.storages import ClosedStorages
from kvcm.storage.file import FileStorage
from kvcm.storage.finish_notes import NotesFolder
from kvcm.store.memory import MemoryStore

LEAST = 20_000
STEPS = ("store", "store", "store", "fail", "open", "remove", "remove", "write", "tidy", "restart")


class World(ManagerCore):
    """A manager with path storages below a directory."""

    def __init__(self, root: Path, keys_per_file: int, storages: Sequence[str] = ("one", "two")) -> None:
        super().__init__()
        self.root, self.names, self.keys_per_file = root, storages, keys_per_file
        self.journal = LossJournal(self.clock, self.tables)

    def new_notes(self) -> FinishNotes:
        caches = self.manager.open_caches
        made = FinishNotes(caches, self.registry, self.storages, self.journal, self.clock, least_bytes=LEAST)
        self.manager.endings.on_finished = made.note
        return made

    async def configure(self) -> World:
        self.clock.time = time.time()  # as the times of files are
        await self.journal.open()
        self.notes = self.new_notes()
        for name in self.names:
            await self.registry.storages.add(
                StorageConfig(name, NfsStorageSpec(str(self.root / name), self.keys_per_file))
            )
        await self.registry.groups.create(group(storages=self.names, delay_ms=0))
        await self.manager.register_instance(instance())
        return self

    @property
    def cache(self) -> InstanceCache:
        return self.manager.cache("i")

    async def start(self, keys: Sequence[int]) -> StartedWrite:
        started = await self.manager.start_write(self.cache, WriteRequest(mixed(keys)))
        for chunk in started.chunks:
            for spec in decode_chunk(chunk).specs:
                write(spec.uri)
        return started

    async def store(self, keys: Sequence[int], failed: int = 0) -> None:
        """Write those that are not there, of which the last ones fail."""
        started = await self.start(keys)
        if count := len(started.session.keys):
            mask = BlockMask(offset=max(0, count - failed))
            await self.manager.finish_write(self.cache, started.session.id, mask)

    async def remove(self, keys: Sequence[int]) -> None:
        await self.manager.remove(self.cache, mixed(keys), BlockMask(offset=0))
        self.clock.time += 10
        await self.executor.run_due()

    async def readable(self, keys: Iterable[int]) -> dict[int, tuple[str, ...]]:
        """Return the uris of serving blocks, by key."""
        asked = sorted(keys)
        records = await self.cache.index.get(mixed(asked))
        return {
            key: tuple(spec.uri for place in record.locations for spec in decode_chunk(place.chunk).specs)
            for key, record in zip(asked, records, strict=True)
            if record is not None and all(place.status.name == "SERVING" for place in record.locations)
        }

    def folders(self) -> list[NotesFolder]:
        return [folder for name in self.names for folder in NotesFolder.found_below(self.root / name)]


def write(uri: str) -> None:
    place = LocationUri.parse(uri)
    path = Path(place.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes((place.size % 251 + 1,)) * place.size)


def damage(path: Path, harm: str) -> None:
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(b"")


def notes_below(root: Path) -> list[Path]:
    return list(root.rglob(".kvcm-finished-*"))


def aged(paths: Iterable[Path]) -> None:
    """Let files be written some time ago."""
    for path in paths:
        os.utime(path, (time.time() - 10, time.time() - 10))


class Again:
    """An empty deployment, in which an index is made again."""

    def __init__(self) -> None:
        self.registry, self.store, self.clock = Registry(ClosedStorages()), MemoryStore(), FakeClock()
        self.backends: dict[int, MemoryBackend] = {}
        importer = Importer(self.registry, lambda placed: self.backend(placed.uid), UsageLedger(), self.store)
        self.reader = NotesReader(self.registry, importer, "cluster")

    def backend(self, uid: int) -> MemoryBackend:
        return self.backends.setdefault(uid, MemoryBackend())

    async def read(self, folders: Iterable[NotesFolder]) -> Rebuilt:
        await self.reader.read(list(folders))
        return self.reader.rebuilt

    async def blocks(self, instance_id: str = "i") -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        if instance_id not in self.registry.instances.by_id:
            return found
        backend = self.backend(self.registry.instances.placement(instance_id).uid)
        async for page in backend.scan(100):
            for key, record in zip(unmixed(page), await backend.get_many(page), strict=True):
                assert record is not None
                found[key] = tuple(s.uri for place in record.locations for s in decode_chunk(place.chunk).specs)
        return found


async def rebuilt(world: World) -> tuple[dict[int, tuple[str, ...]], Rebuilt]:
    again = Again()
    report = await again.read(world.folders())
    return await again.blocks(), report


@pytest.fixture(params=[1, 8], ids=["unpacked", "packed"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return await World(tmp_path, request.param).configure()


@pytest.mark.parametrize("seed", range(12))
async def test_an_index_made_again_is_what_it_was(world: World, seed: int) -> None:
    """Invariant: exactly the finished blocks that were not removed, where they lay, however often notes were tidied."""
    random, keys = Random(seed), range(1, 400)
    for _ in range(25):
        first = random.choice(keys)
        chosen = range(first, first + random.randrange(1, 24))
        match random.choice(STEPS):
            case "store":
                await world.store(chosen)
            case "fail":
                await world.store(chosen, failed=random.randrange(len(chosen)))
            case "open":
                await world.start(chosen)
            case "remove":
                await world.remove(chosen)
            case "write":
                await world.notes.write()
            case "tidy":
                await world.notes.tidy(is_leader=True)
            case "restart":
                await world.notes.write()
                world.notes = world.new_notes()
    await world.store([1000])
    await world.notes.write()
    there = await world.readable([*range(1, 500), 1000])
    found, report = await rebuilt(world)
    assert found == there
    assert not report.unreadable
    assert not report.left_out


async def test_what_is_noted_already_is_found_with_its_group_and_storages(world: World) -> None:
    await world.store(range(1, 30))
    await world.notes.write()
    again = Again()
    report = await again.read(world.folders())
    assert [config.global_unique_name for config in again.registry.storages.all()] == ["one", "two"]
    assert [each.name for each in again.registry.groups.all()] == ["group"]
    assert report.stored == {"i": 29}
    assert {deployment_of(folder) for folder in world.folders()} == {"cluster"}
    report = await again.read(world.folders())
    assert report.known["i"] == 29, "the known ones stay"


async def test_bytes_without_a_finish_are_never_found(world: World) -> None:
    await world.store([1])
    await world.start(range(2, 20))
    await world.store(range(30, 40), failed=10)
    await world.notes.write()
    found, _ = await rebuilt(world)
    assert found.keys() == {1}


@pytest.mark.parametrize("harm", ["gone", "cut"])
async def test_blocks_whose_bytes_are_gone_are_counted_and_left_out(world: World, harm: str) -> None:
    await world.store(range(1, 9))
    await world.notes.write()
    uris = await world.readable(range(1, 9))
    path = Path(LocationUri.parse(uris[3][0]).path)
    hit = {key for key, places in uris.items() if str(path) in {LocationUri.parse(uri).path for uri in places}}
    damage(path, harm)
    found, report = await rebuilt(world)
    assert found == {key: places for key, places in uris.items() if key not in hit}
    assert sum(report.gone.values()) == len(hit) > 0


async def test_a_block_that_was_written_again_is_found_where_it_lies_now(world: World) -> None:
    await world.store(range(1, 20))
    await world.notes.write()
    await world.remove(range(1, 20))
    await world.store(range(1, 20))
    await world.notes.write()
    found, report = await rebuilt(world)
    assert found == await world.readable(range(1, 20))
    assert sum(report.gone.values()) == 19


async def test_a_torn_end_and_a_flipped_bit_cost_what_they_hit(world: World) -> None:
    for first in range(1, 101, 10):
        await world.store(range(first, first + 10))
        await world.notes.write()
    there = await world.readable(range(1, 101))
    (path,) = notes_below(world.root)
    whole = path.read_bytes()
    for end in range(len(whole) - 200, len(whole), 40):
        path.write_bytes(whole[:end])
        found, report = await rebuilt(world)
        assert found == {key: uris for key, uris in there.items() if key <= 90}
        assert report.unreadable
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes((whole[middle] ^ 1,)) + whole[middle + 1 :])
    found, report = await rebuilt(world)
    assert found.items() <= there.items()
    assert len(found) in (90, 50, 40), "a frame of ten, or a header and all behind it"
    assert report.unreadable


async def test_files_do_not_grow_without_bound_and_lose_nothing(world: World) -> None:
    for number in range(60):
        await world.store(range(1, 20))
        await world.notes.write()
        if number < 59:
            await world.remove(range(1, 20))
        aged(notes_below(world.root))
        await world.notes.tidy(is_leader=True)
        if number % 7 == 0:
            world.notes = world.new_notes()
    sizes = sum(path.stat().st_size for path in notes_below(world.root))
    assert sizes < 4 * LEAST
    found, _ = await rebuilt(world)
    assert found == await world.readable(range(1, 20))


async def test_a_leader_leaves_what_others_write_while_it_reads(world: World) -> None:
    """A file is removed if nothing was written to it since the whole file was begun."""
    other = world.new_notes()
    await world.store(range(1, 200))
    await other.write()
    aged(notes_below(world.root))
    world.notes, (folder, *_) = world.new_notes(), world.folders()
    scan = world.cache.index.scan

    async def late(batch: int) -> AsyncIterator[list[int]]:
        async for page in scan(batch):
            yield page
        await world.store(range(300, 310))  # behind the pages that were read
        await other.write()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(world.cache.index), "scan", lambda _index, batch: late(batch))
        world.manager.endings.on_finished = other.note
        await world.notes.tidy(is_leader=True)
    assert folder.files()
    found, _ = await rebuilt(world)
    assert found == await world.readable(range(1, 400))


async def test_a_group_is_as_it_was_noted_last(world: World) -> None:
    await world.store(range(1, 9))
    await world.notes.write()
    known = world.registry.groups.get("group")
    changed = replace(known, quota=replace(known.quota, capacity=1 << 50), version=known.version + 1)
    await world.registry.groups.update(changed, known.version)
    await world.store(range(9, 20))
    await world.notes.write()
    again = Again()
    await again.read(world.folders())
    assert again.registry.groups.get("group").quota.capacity == 1 << 50


async def test_blocks_of_an_instance_before_it_was_registered_otherwise_are_left_out(world: World) -> None:
    await world.store(range(1, 9))
    await world.notes.write()
    await world.manager.remove_instance("i")
    await world.manager.purge_removed()
    await world.manager.register_instance(instance({"tp0": 77, "tp1": 10}))
    await world.store(range(20, 30))
    await world.notes.write()
    again = Again()
    report = await again.read(world.folders())
    assert (await again.blocks()).keys() == set(range(20, 30))
    assert "instance i" in report.left_out


async def test_a_link_below_a_storage_is_not_followed(world: World, tmp_path: Path) -> None:
    storage = world.storages.backend("one")
    assert isinstance(storage, FileStorage)
    inside(storage, tmp_path)
    uri = LocationUri("file", "one", f"{storage.directory}link/secret", 10)
    assert not storage.has_bytes(uri)
    assert storage.has_bytes(uri._replace(path=f"{storage.directory}plain"))


def inside(storage: FileStorage, elsewhere: Path) -> None:
    (elsewhere / "secret").write_bytes(bytes(100))
    Path(storage.directory, "plain").write_bytes(bytes(100))
    Path(storage.directory, "link").symlink_to(elsewhere)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
async def test_what_is_no_file_among_the_notes_is_passed_over(world: World, tmp_path: Path, kind: str) -> None:
    """Clients write to the storage too: a pipe must not keep a manager waiting, nor a link lead it elsewhere."""
    await world.store(range(1, 9))
    await world.notes.write()
    for number, note in enumerate(notes_below(world.root)):
        strange = note.with_name(f"{note.name.rpartition('-')[0]}-strange{number}")
        if kind == "pipe":
            os.mkfifo(strange)
        elif kind == "folder":
            strange.mkdir()
        else:
            strange.symlink_to(note)
    found, report = await rebuilt(world)
    assert found.keys() == set(range(1, 9))
    assert not report.unreadable
    assert sum(report.files.values()) == sum("strange" not in note.name for note in notes_below(world.root))
    await world.notes.tidy(is_leader=True)


async def test_a_file_that_a_leader_removed_is_begun_again(world: World) -> None:
    other = world.new_notes()
    await world.store(range(1, 5))
    await other.write()
    for folder in world.folders():
        folder.remove([file.writer for file in folder.files()])
    await world.store(range(5, 9))
    await other.write()
    found, report = await rebuilt(world)
    assert found.keys() == {5, 6, 7, 8}
    assert not report.unreadable


async def test_what_a_storage_does_not_take_is_noted_later(world: World) -> None:
    await world.store(range(1, 9))
    roots = [world.root / name for name in world.names]
    for root in roots:
        root.rename(root.with_name(f"{root.name}-away"))
    await world.notes.write()
    for root in roots:
        root.with_name(f"{root.name}-away").rename(root)
    await world.store(range(9, 12))
    await world.notes.write()
    await world.notes.tidy(is_leader=False)
    await world.store(range(12, 20))
    await world.notes.write()
    found, _ = await rebuilt(world)
    assert found.keys() == set(range(1, 20))


@pytest.mark.parametrize("is_new", [False, True])
async def test_notes_outlive_an_index_that_lost_its_blocks(world: World, tmp_path: Path, *, is_new: bool) -> None:
    """Emptied under a running manager, or begun again: what the leader writes then takes no place of older notes."""
    await world.store(range(1, 300))
    await world.notes.write()
    await world.notes.tidy(is_leader=True)
    there = await world.readable(range(1, 300))
    if is_new:
        world = await World(tmp_path, world.keys_per_file).configure()
    else:
        await world.cache.index.drop()
        world.clock.time += 3600
        world.journal.note("it was emptied", 0.0)
    for first in range(1000, 1600, 100):
        await world.store(range(first, first + 100))
        await world.notes.write()
        await world.notes.tidy(is_leader=True)
    found, _ = await rebuilt(world)
    assert found == there | await world.readable(range(1000, 1600))


async def test_an_instance_that_differs_now_is_left_out_and_named(world: World) -> None:
    await world.store(range(1, 9))
    await world.notes.write()
    again = Again()
    for name in world.names:
        await again.registry.storages.add(StorageConfig(name, NfsStorageSpec(str(world.root / name), 1)))
    await again.registry.groups.create(group(storages=world.names))
    await again.registry.instances.register(instance({"tp0": 77, "tp1": 10}))
    report = await again.read(world.folders())
    assert await again.blocks() == {}
    assert "location_spec_infos" in report.left_out["instance i"]


async def test_notes_that_name_files_elsewhere_find_nothing(world: World, tmp_path: Path) -> None:
    """Notes lie where engines can write: a path in them is no reason to go there."""
    await world.store(range(1, 9))
    await world.notes.write()
    moved = tmp_path / "elsewhere"
    (world.root / "one").rename(moved)
    folders = NotesFolder.found_below(moved)
    assert folders
    again = Again()
    report = await again.read(folders)
    assert not report.stored
    assert "storage one" in report.left_out
    storage = world.storages.backend("two")
    assert isinstance(storage, FileStorage)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(100))
    for path in (secret, Path(f"{storage.directory}../../../secret")):
        assert not storage.has_bytes(LocationUri("file", "two", str(path), 10))


async def test_blocks_on_other_types_of_storage_are_not_noted(tmp_path: Path) -> None:
    world = World(tmp_path, 1, ("one",))
    await world.journal.open()
    world.notes = world.new_notes()
    await world.registry.storages.add(StorageConfig("d", DummyStorageSpec()))
    await world.registry.groups.create(group(storages=("d",)))
    await world.manager.register_instance(instance())
    started = await world.manager.start_write(world.cache, WriteRequest(mixed([1, 2])))
    await world.manager.finish_write(world.cache, started.session.id, BlockMask(offset=2))
    await world.notes.write()
    assert not notes_below(tmp_path)
