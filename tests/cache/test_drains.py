"""Drains and removals of storages, ended at any moment, against a plain model."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cache_rig import instance
from drain_world import BLOCK_BYTES, CLUSTER, DrainWorld, file_of, files_below, storage_of
from fake_clock import FakeClock
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from thoroughness import is_thorough

from kvcm.cache.archive import ArchiveReader, ArchiveWriter, Document, Exporter, Head
from kvcm.cache.drains import CANCEL_SECONDS, DrainProgress, StorageDrains
from kvcm.cache.pins import PinRequest
from kvcm.cache.removal import Remover
from kvcm.cache.write_sessions import StartedWrite, WriteRequest
from kvcm.index.backends.memory import MemoryBackend
from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError, NotReadyError
from kvcm.model.instances import Instance
from kvcm.model.keys import BlockMask
from kvcm.model.locations import Location, LocationStatus, decode_chunk, encode_chunk
from kvcm.model.storages import StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.registry.document_cache import decode_document
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.directory import OPENERS
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.mempool import PoolOpener, PoolReport
from kvcm.store.memory import MemoryTable

# ── Storage drains ──


SERVING, DELETING = LocationStatus.SERVING, LocationStatus.DELETING
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


@pytest.fixture
async def world(opened: Open) -> DrainWorld:
    """A manager with six blocks on the first of two storages."""
    made = await opened()
    await made.write(KEYS)
    return made


async def progress(world: DrainWorld) -> DrainProgress:
    (only,) = await world.drains.progress(is_leader=True)
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
    world: DrainWorld, tmp_path: Path
) -> None:
    await world.drains.drain("a")
    assert await world.write([10, 11]) == ["b", "b"]
    assert await world.hits([*KEYS, 10, 11]) == [*KEYS, 10, 11]  # read until they are evicted
    await world.drains.resume()
    assert await world.hits([*KEYS, 10, 11]) == [10, 11]
    assert len(files_below(tmp_path / "a")) == len(KEYS)  # invariant 6: the delay is not over
    assert (await progress(world)).remaining_bytes == world.used_bytes("a") == len(KEYS) * BLOCK_BYTES
    assert not (await progress(world)).is_done
    await finish_drain(world)
    found = await progress(world)
    assert (found.is_done, found.remaining_bytes, world.used_bytes("a")) == (True, 0, 0)
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


async def test_what_serves_on_a_drained_storage_is_written_again_elsewhere(world: DrainWorld) -> None:
    await world.drains.drain("a")
    assert await world.write(KEYS) == ["b"] * len(KEYS)
    await finish_drain(world)
    assert await world.hits(KEYS) == KEYS


async def test_a_write_in_flight_on_a_drained_storage_has_no_second_writer_invariant_2(opened: Open) -> None:
    world = await opened()
    started = await world.start(KEYS)
    await world.drains.drain("a")
    assert (await world.start(KEYS)).chunks == []
    await world.drains.resume()
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
    await world.manager.start_write(world.manager.cache("i"), WriteRequest([0], min_replica_count=2))
    await world.drains.drain("a")
    await world.drains.resume()
    assert [place.status.name for place in await world.places("a")] == ["DELETING", "WRITING"]


async def test_a_pinned_block_waits_for_the_end_of_its_pin(world: DrainWorld) -> None:
    pin = await world.manager.pin(world.manager.cache("i"), PinRequest([0, 1], "somebody", 3600))
    assert pin is not None
    await world.drains.drain("a")
    await finish_drain(world)
    assert await world.hits(KEYS) == [0, 1]
    found = await progress(world)
    assert (found.pinned, found.remaining_bytes, found.is_done) == (2, 2 * BLOCK_BYTES, False)
    await world.manager.unpin(world.manager.cache("i"), pin.id)
    for _ in range(8):
        await world.pass_time(30.0)
    assert (await progress(world)).is_done


async def test_a_drain_goes_on_after_a_restart_whatever_was_configured_meanwhile(world: DrainWorld) -> None:
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


async def test_an_unknown_storage_is_neither_drained_nor_cancelled_nor_removed(world: DrainWorld) -> None:
    for call in (world.drains.drain, world.drains.cancel, world.drains.remove):
        with pytest.raises(InvalidArgumentError, match="storage 'x' does not exist"):
            await call("x")


@pytest.mark.parametrize(("groups", "left"), [({}, []), ({"one": ("tp1",)}, [("tp1",)])])
async def test_parts_elsewhere_stay_where_they_can_be_read_alone(
    opened: Open, groups: dict[str, tuple[str, ...]], left: list[tuple[str, ...]]
) -> None:
    world = await opened(registered=instance({"tp0": BLOCK_BYTES, "tp1": BLOCK_BYTES}, groups))
    await _split(world)
    assert [place.spec_names for place in await world.places("b")] == [("tp1",)]
    await world.drains.drain("a")
    await finish_drain(world)
    assert [place.spec_names for place in await world.places("b", SERVING)] == left
    assert await world.hits([0]) == [0][: len(left)]


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
    await drains.resume(lambda: next(answers))
    assert len(await world.places("a", SERVING)) == 600 - 512
    await drains.resume()
    assert (sum(pauses), turns) == (pytest.approx((512 + 600) / 20_000), 5)
    assert await world.places("a", SERVING) == []


async def test_laps_that_find_nothing_to_mark_become_rare(world: DrainWorld) -> None:
    assert await world.manager.pin(world.manager.cache("i"), PinRequest(KEYS, "somebody", 3600)) is not None
    await world.drains.drain("a")
    laps = 0

    async def count(_seconds: float) -> None:
        nonlocal laps
        laps += 1
        await asyncio.sleep(0)

    drains = paced(world, pause=count)
    for _ in range(300):
        world.clock.time += 1.0
        await drains.resume()
    assert 10 <= laps <= 20


# ── Ended drains ──


MIB = 1 << 20
BLOCKS = 600
PAGE = 256  # blocks that a lap looks at together


@pytest.fixture
async def full_world(opened: Open) -> DrainWorld:
    """A manager with many blocks on the first of two storages."""
    made = await opened()
    await made.write(range(BLOCKS))
    return made


def drains_that(full_world: DrainWorld, end: Callable[[], Awaitable[None]], when: str) -> StorageDrains:
    """Drains during whose first page, or right after it, something happens."""
    is_over = False

    async def once() -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            await end()

    async def give_way() -> None:
        await (once() if when == "during a page" else asyncio.sleep(0))

    async def pause(_seconds: float) -> None:
        await (once() if when == "after a page" else asyncio.sleep(0))

    return paced(full_world, give_way=give_way, pause=pause)


# ── ends during a lap ──


@pytest.mark.parametrize(("when", "marked"), [("during a page", 0), ("after a page", PAGE)])
async def test_a_drain_that_is_cancelled_marks_nothing_more(full_world: DrainWorld, when: str, marked: int) -> None:
    drains = drains_that(full_world, lambda: full_world.drains.cancel("a"), when)
    await drains.drain("a")
    await drains.resume()
    assert len(await full_world.places("a", DELETING)) == marked
    assert len(await full_world.hits(range(BLOCKS))) == BLOCKS - marked
    await drains.drain("a")  # another one takes all
    full_world.clock.time += 1.0
    await drains.resume()
    assert await full_world.places("a", SERVING) == []


@pytest.mark.parametrize(("when", "marked"), [("during a page", 0), ("after a page", PAGE)])
async def test_a_storage_that_comes_back_during_a_lap_keeps_the_unmarked_blocks(
    full_world: DrainWorld, when: str, marked: int
) -> None:
    drains = drains_that(full_world, lambda: full_world.registry.storages.add(full_world.config("a")), when)
    await drains.remove("a")
    full_world.clock.time += CANCEL_SECONDS
    await drains.resume()
    full_world.clock.time += 5.0
    await full_world.executor.run_due()
    assert len(await full_world.hits(range(BLOCKS))) == BLOCKS - marked
    assert full_world.used_bytes("a") == (BLOCKS - marked) * BLOCK_BYTES  # invariant 4


# ── a removed storage that hangs ──


async def test_the_removal_of_a_storage_that_hangs_comes_to_its_end(full_world: DrainWorld) -> None:
    backend = full_world.storages.backend("a")
    assert backend is not None
    hanging = asyncio.Event()

    async def hang(uris: Sequence[str]) -> list[str | None]:
        hanging.set()
        await asyncio.Event().wait()
        return [None for _ in uris]

    backend.delete = hang  # type: ignore[method-assign]
    await full_world.manager.remove(full_world.manager.cache("i"), range(BLOCKS), BlockMask(offset=0))
    full_world.clock.time += 2.0
    deleting = asyncio.create_task(full_world.executor.run(0.0))
    await hanging.wait()
    await full_world.drains.remove("a")
    for _ in range(2000):
        if not full_world.registry.storages.drains():
            break
        full_world.clock.time += 1.0
        await full_world.drains.resume()
        await asyncio.sleep(0)
    deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)
    assert (full_world.registry.storages.drains(), await full_world.records(), full_world.used_bytes("a")) == (
        [],
        {},
        0,
    )
    await full_world.registry.storages.add(full_world.config("a", "2"))


# ── instances whose documents cannot be read ──


@pytest.mark.parametrize("is_empty", [True, False])
async def test_no_storage_is_forgotten_while_an_instance_cannot_be_read(full_world: DrainWorld, is_empty: bool) -> None:
    name = "b" if is_empty else "a"
    table = full_world._store.table("registry")
    assert await table.replace("instance/old", None, b"garbage")
    await full_world.registry.refresh()
    await full_world.drains.remove(name)
    await purge(full_world)
    (found,) = await full_world.drains.progress(is_leader=True)
    assert (found.remaining_bytes, found.is_done, found.unreadable) == (0, False, ["old"])
    assert not (await full_world.drains.progress(is_leader=False))[0].is_done
    with pytest.raises(NotReadyError, match="is being forgotten"):
        await full_world.registry.storages.add(full_world.config(name, "2"))
    assert await table.replace("instance/old", b"garbage", None)
    await full_world.registry.refresh()
    await full_world.pass_time(2.0)
    assert full_world.registry.storages.drains() == []


# ── memory pools ──


def pool(node_id: str) -> StorageConfig:
    return StorageConfig("p", TairMemPoolStorageSpec(node_id=node_id, capacity_bytes=4 * MIB))


async def test_of_a_pool_that_is_forgotten_the_store_keeps_nothing(tmp_path: Path) -> None:
    """Else one of that name would count as there before its host reports it, with memory that is never freed."""
    table = MemoryTable()
    clock = FakeClock()
    opener = PoolOpener(table, clock, Random(0), is_shared=False)
    full_world = DrainWorld(tmp_path, openers={**OPENERS, StorageType.ST_TAIRMEMPOOL: opener}, clock=clock)
    await full_world.begin()
    await full_world.registry.storages.add(pool("n"))
    await full_world.storages.pools()["p"].report(PoolReport("n", 7, 4 * MIB))
    await full_world.storages.pools()["p"].allocate(Allocation("i", "l", [Part("kv", key, 4096) for key in range(300)]))
    await table.replace("pool", None, b"of another pool")
    full_world.clock.time += 1.0
    await full_world.drains.remove("p")
    assert full_world.registry.storages.drains() == []
    assert await table.all() == {"pool": b"of another pool"}
    await full_world.registry.storages.add(pool("m"))
    again = full_world.storages.pools()["p"]
    assert "no host agent has reported" in (await again.refresh()).why_not_usable("m", full_world.clock.now())
    assert ((await again.space()).free_bytes, again.allocated_bytes) == (4 * MIB, 0)
    full_world.close()


# ── Removed storages ──


async def purge(world: DrainWorld) -> None:
    """Let everything pass that a removal takes."""
    await world.pass_time(CANCEL_SECONDS)
    await finish_drain(world)


async def test_usage_returns_and_the_bytes_stay(world: DrainWorld, tmp_path: Path) -> None:
    await world.drains.remove("a")
    assert await world.hits(KEYS) == []
    found = await progress(world)
    assert (found.drain.is_removal, found.has_started) == (True, False)
    assert found.remaining_bytes == world.used_bytes("a") == len(KEYS) * BLOCK_BYTES
    await purge(world)
    assert (world.used_bytes("a"), await world.records()) == (0, {})  # invariant 4
    assert len(files_below(tmp_path / "a")) == len(KEYS)
    assert world.registry.storages.drains() == []


async def test_the_name_is_not_given_to_another_medium_while_blocks_are_left(world: DrainWorld, tmp_path: Path) -> None:
    await world.drains.remove("a")
    for seconds in (0.0, CANCEL_SECONDS):
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


async def test_pinned_blocks_go_too(world: DrainWorld) -> None:
    assert await world.manager.pin(world.manager.cache("i"), PinRequest(KEYS, "somebody", 3600)) is not None
    await world.drains.remove("a")
    await purge(world)
    assert await world.records() == {}


async def test_the_name_is_not_free_while_a_writer_may_still_come(world: DrainWorld) -> None:
    started = await world.manager.start_write(world.manager.cache("i"), WriteRequest([10], timeout_seconds=600))
    await world.drains.remove("a")
    await purge(world)
    assert world.used_bytes("a") == BLOCK_BYTES
    with pytest.raises(NotReadyError, match="is being forgotten"):
        await world.registry.storages.add(world.config("a", "2"))
    await world.finish(started)
    await purge(world)
    await world.registry.storages.add(world.config("a", "2"))


class Gated(DummyStorage):
    """Hands out addresses once the test opens the gate."""

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


# ── Storage drains machine ──


NAMES = ("a", "b", "c")
STORAGES = st.sampled_from(NAMES)
MACHINE_KEYS = st.integers(0, 8)
FIRSTS = st.tuples(MACHINE_KEYS, st.integers(1, 4)).map(lambda piece: list(range(piece[0], sum(piece))))


class Drains(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.world = DrainWorld(Path(self.directory.name), NAMES)
        self.open: list[StartedWrite] = []
        self.media = dict.fromkeys(NAMES, "1")  # of the configured storages
        self.draining: set[str] = set()
        self.removed: dict[str, tuple[float, str]] = {}  # when, and the medium
        self.safe: dict[tuple[int, str], str] = {}  # blocks that must stay: key and address, by storage
        self.pinned: dict[str, float] = {}  # addresses
        self.runner.run(self.world.begin())

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.come_to_rest())
            self.world.close()
            self.runner.close()
            self.directory.cleanup()

    @property
    def is_writable(self) -> set[str]:
        return set(self.media) - self.draining

    @rule(keys=FIRSTS, finishes=st.booleans())
    def write(self, keys: list[int], finishes: bool) -> None:
        self.runner.run(self.do_write(keys, finishes))

    async def do_write(self, keys: list[int], finishes: bool) -> None:
        try:
            started = await self.world.start(keys)
        except NotReadyError:
            assert not self.is_writable
            return
        assert {storage_of(chunk) for chunk in started.chunks} <= self.is_writable
        self.open.append(started)
        if finishes:
            await self.do_finish(len(self.open) - 1)

    @rule(pick=st.integers(0, 30))
    def finish(self, pick: int) -> None:
        if self.open:
            self.runner.run(self.do_finish(pick % len(self.open)))

    async def do_finish(self, number: int) -> None:
        started = self.open.pop(number)
        try:
            await self.world.finish(started)
        except InvalidArgumentError:  # it has expired
            return
        for key, chunk in zip(started.session.keys, started.chunks, strict=True):
            if storage_of(chunk) in self.media:
                self.safe[key, decode_chunk(chunk).specs[0].uri] = storage_of(chunk)
        self.safe = {place: name for place, name in self.safe.items() if place in await self.serving()}

    async def serving(self) -> set[tuple[int, str]]:
        records = await self.world.records()
        return {
            (key, spec.uri)
            for key, record in records.items()
            for place in record.locations
            if place.status is LocationStatus.SERVING
            for spec in decode_chunk(place.chunk).specs
        }

    @rule(keys=FIRSTS, seconds=st.sampled_from([5, 60]))
    def pin(self, keys: list[int], seconds: int) -> None:
        pin = (
            self.runner.run(
                self.world.manager.pin(self.world.manager.cache("i"), PinRequest(keys, "somebody", seconds))
            )
            if self.media
            else None
        )
        if pin is not None:
            held = set(pin.pinned.location_ids)
            for key, uri in self.runner.run(self.serving()):
                if key in keys[: pin.block_count] and uri.partition("?")[0].rpartition(".")[2] in held:
                    self.pinned[uri] = max(pin.deadline, self.pinned.get(uri, 0.0))

    @rule(name=STORAGES)
    def drain(self, name: str) -> None:
        if name in self.media:
            self.runner.run(self.world.drains.drain(name))
            self.draining.add(name)

    @rule(name=STORAGES)
    def cancel(self, name: str) -> None:
        if name in self.media:
            self.runner.run(self.world.drains.cancel(name))
            self.draining.discard(name)

    @rule(name=STORAGES)
    def remove(self, name: str) -> None:
        if name not in self.media:
            with pytest.raises(InvalidArgumentError):
                self.runner.run(self.world.drains.remove(name))
            return
        self.runner.run(self.world.drains.remove(name))
        self.removed[name] = self.world.clock.now(), self.media.pop(name)
        self.draining.discard(name)

    @rule(name=STORAGES, medium=st.sampled_from(["1", "1", "2"]))
    def add(self, name: str, medium: str) -> None:
        self.runner.run(self.do_add(name, medium))

    async def do_add(self, name: str, medium: str) -> None:
        try:
            await self.world.registry.storages.add(self.world.config(name, medium))
        except DuplicateEntityError:
            assert name in self.media
        except NotReadyError:  # only for another medium, and only while the old one is listed
            assert self.removed[name][1] != medium
            assert name in {each.name for each in self.world.registry.storages.drains()}
        else:
            assert name not in self.media
            self.media[name] = medium
            del self.removed[name]

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0, 11.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        due = self.world.clock.now() + seconds - CANCEL_SECONDS
        gone = self.draining | {name for name, (since, _) in self.removed.items() if since <= due}
        self.safe = {place: name for place, name in self.safe.items() if name not in gone}
        self.runner.run(self.world.pass_time(seconds))

    @rule()
    def restart(self) -> None:
        self.world.close()
        self.runner.run(self.world.restart())

    @invariant()
    def every_block_outside_drains_and_removals_is_there(self) -> None:
        self.runner.run(self.check())

    async def check(self) -> None:
        records = await self.world.records()
        places = [place for record in records.values() for place in record.locations]
        recount: Counter[str] = Counter()
        for place in places:
            recount[place.storage] += place.size_bytes
        assert {name: self.world.used_bytes(name) for name in NAMES} == {name: recount[name] for name in NAMES}
        serving = await self.serving()
        assert set(self.safe) <= serving
        readable = {key for (key, _), name in self.safe.items() if name in self.media}
        if self.media:
            assert readable <= set(await self.world.hits(sorted(records)))
        now, uris = self.world.clock.now(), {uri for _, uri in serving}
        for uri, until in self.pinned.items():
            assert until <= now or uri in uris or self._was_removed(uri)
        for place in places:
            if place.storage in self.media:
                for spec in decode_chunk(place.chunk).specs:
                    assert f"/{place.storage}/{self.media[place.storage]}/" in str(file_of(spec.uri))

    def _was_removed(self, uri: str) -> bool:
        """The removal of a storage includes its pinned blocks."""
        self.ever_removed = getattr(self, "ever_removed", set()) | set(self.removed)
        return uri.partition("://")[2].partition("/")[0] in self.ever_removed

    async def come_to_rest(self) -> None:
        for _ in range(8):
            await self.world.pass_time(61.0)
        await self.world.pass_time(2.0)
        left = {each.drain.name: each for each in await self.world.drains.progress(is_leader=True)}
        assert set(left) == self.draining
        for name in self.draining:
            assert (left[name].is_done, left[name].remaining_bytes) == (True, 0)
            assert files_below(Path(self.directory.name) / name / self.media[name]) == []
        for name in {*self.draining, *self.removed}:
            assert await self.world.places(name) == []
            assert self.world.used_bytes(name) == 0
        for (_, uri), name in self.safe.items():
            if name in self.is_writable:
                assert file_of(uri).stat().st_size == BLOCK_BYTES


class TestDrains(Drains.TestCase):
    settings = settings(
        max_examples=120 if is_thorough() else 15,
        stateful_step_count=20,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )
