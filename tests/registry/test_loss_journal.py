"""Losses of a store: noticed by the time that it has, with their window, and known to later managers."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from fake_clock import FakeClock
from redis_servers import Standalone

from kvcm.components import open_metadata
from kvcm.config import Settings
from kvcm.registry.loss_journal import LossJournal
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.store import RedisStore
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.rocks import RocksStore

START, LOST = "1970-01-01T00:16:40+00:00", "1970-01-01T00:17:10+00:00"


class World:
    """A server, and the journals of managers of one deployment."""

    def __init__(self, server: Standalone) -> None:
        self.server, self.name, self.clock = server, f"t{uuid4().hex[:12]}", FakeClock(1_000.0)
        self.store = RedisStore(RedisClient.of(parse_redis_uri(server.uri(self.name))))

    async def journal(self) -> LossJournal:
        made = LossJournal(self.clock, self.store)
        await made.load()
        await made.beat()
        return made

    async def beat(self, *journals: LossJournal, seconds: float = 1.0) -> None:
        self.clock.time += seconds
        for each in journals:
            await each.beat()

    def dump(self) -> dict[bytes, bytes]:
        with self.server.server.admin() as admin:
            return {key: admin.dump(key) for key in admin.keys(f"{self.name}:*")}

    def put_back(self, dumped: dict[bytes, bytes]) -> None:
        with self.server.server.admin() as admin:
            admin.delete(*admin.keys(f"{self.name}:*"))
            for key, value in dumped.items():
                admin.restore(key, 0, value)


@pytest.fixture
async def world(redis_standalone: Standalone) -> AsyncIterator[World]:
    made = World(redis_standalone)
    yield made
    await made.store.close()


async def test_a_store_that_went_back_is_noticed_with_the_time_that_it_has(world: World) -> None:
    """Also where nothing but blocks is lost: nothing of the registry says so."""
    journals = [await world.journal(), await world.journal()]
    await world.beat(*journals, seconds=0.5)
    dumped = world.dump()
    for _ in range(29):
        await world.beat(*journals)
    assert [each.losses for each in journals] == [0, 0]
    world.put_back(dumped)
    await world.beat(journals[0])
    assert journals[0].losses == 1
    await world.beat(journals[1])
    assert [each.losses for each in journals] == [1, 1], "the second manager finds a new time, and the first one's loss"
    assert journals[1].last_loss == journals[0].last_loss
    assert START in journals[0].last_loss
    assert LOST in journals[0].last_loss


async def test_a_manager_that_starts_later_knows_of_a_loss(world: World) -> None:
    journal = await world.journal()
    dumped = world.dump()
    await world.beat(journal, seconds=30)
    world.put_back(dumped)
    await world.beat(journal)
    journal.note_evicted(7)
    await world.beat(journal, seconds=0.5)
    later = await world.journal()
    assert (later.losses, later.last_loss, later.lost_at) == (journal.losses, journal.last_loss, journal.lost_at)
    assert later.evicted_keys == 7


async def test_blocks_that_a_verification_misses_do_not_hide_the_loss_before(world: World) -> None:
    journal, other = await world.journal(), await world.journal()
    dumped = world.dump()
    await world.beat(journal, seconds=30)
    world.put_back(dumped)
    await world.beat(journal)
    world.clock.time += 1
    await other.note_blocks("s", 4)
    await world.beat(journal)
    assert journal.losses == other.losses == 2
    assert journal.last_loss == other.last_loss
    assert "4 blocks on storage 's' have no bytes" in journal.last_loss
    assert journal.missing_blocks == other.missing_blocks == 4
    assert f"between {START} and" in journal.last_loss


async def test_no_more_than_eight_losses_are_kept_in_words(world: World) -> None:
    journal = await world.journal()
    for number in range(20):
        world.clock.time += 100
        await journal.note_blocks("s", number)
    assert journal.losses == 20
    assert journal.missing_blocks == sum(range(20))
    assert [text.split()[0] for text in journal.last_loss.split("; before that: ")] == [*map(str, range(19, 11, -1))]


async def test_what_a_verification_finds_bit_by_bit_is_one_loss(world: World) -> None:
    journal = await world.journal()
    for _ in range(20):
        world.clock.time += 1
        await journal.note_blocks("s", 2)
    assert (journal.losses, journal.missing_blocks) == (1, 40)
    assert journal.last_loss == "40 blocks on storage 's' have no bytes of theirs any more"


@pytest.mark.parametrize(("lag", "losses"), [(0.0, 0), (20.0, 1)])
async def test_a_server_that_lacks_the_newest_time_is_a_loss(world: World, lag: float, losses: int) -> None:
    """A replica that lagged is looked at before it answers anything else."""
    journal = await world.journal()
    documents = await world.store.table("deletions").get("alive")
    await world.beat(journal, seconds=lag)

    async def read(_part: str, _names: Sequence[str]) -> Sequence[bytes | None]:
        return [documents if lag else await world.store.table("deletions").get("alive")]

    assert await journal.compare(read) == pytest.approx(1_000.0)
    assert journal.losses == losses


async def test_clocks_that_differ_are_no_loss(world: World) -> None:
    fast, slow = FakeClock(2_000.0), FakeClock(1_000.0)
    journals = [LossJournal(clock, world.store) for clock in (fast, slow)]
    for _ in range(5):
        await world.beat(*journals)
        fast.time, slow.time = fast.time + 1, slow.time + 1
    assert [each.losses for each in journals] == [0, 0]


# ── What happens while no manager runs ──


class Host:
    """A data directory, with a RocksDB in it; every `run` is one manager's life."""

    def __init__(self, directory: Path) -> None:
        self.data, self.clock = directory / "metadata", FakeClock(1_000.0)
        self.beside = directory / "metadata.times"

    async def run(self, seconds: float = 30.0, changes: int = 1) -> LossJournal:
        store = RocksStore(self.data, "always", self.clock)
        journal = LossJournal(self.clock, store, self.beside, lambda: store.log.appended)
        await journal.open()
        for number in range(changes):
            await store.table("t").replace(f"{self.clock.time} {number}", None, b"document")
            self.clock.time += seconds / changes
            await journal.beat()
        await store.close()
        return journal


@pytest.mark.parametrize("changes", [1, 40])
async def test_an_older_copy_of_a_directory_is_noticed_by_the_next_start(tmp_path: Path, changes: int) -> None:
    host = Host(tmp_path)
    assert (await host.run()).losses == 0
    shutil.copytree(host.data, tmp_path / "copy")
    for _ in range(3):
        assert (await host.run(10.0, changes)).losses == 0, "a start alone loses nothing"
    shutil.rmtree(host.data)
    shutil.copytree(tmp_path / "copy", host.data)
    journal = await host.run()
    assert journal.losses == 1
    assert "1970-01-01T00:17:10+00:00 and 1970-01-01T00:17:40+00:00" in journal.last_loss
    assert (await host.run()).losses == 1, "it is noted once"


async def test_a_directory_that_is_gone_is_noticed_and_a_first_start_is_none(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert (await host.run()).losses == 0
    shutil.rmtree(host.data)
    assert (await host.run()).losses == 1


TORN = {
    "empty": b"",
    "no json": b"{",
    "another type": b"[1, 2]",
    "no text": b'{"deployment":"\xff"}',
    "deep": b'{"x":' + b"[" * 100_000,
}


@pytest.mark.parametrize("damage", ["gone", *TORN])
async def test_without_the_times_of_the_host_a_start_goes_on(tmp_path: Path, damage: str) -> None:
    host = Host(tmp_path)
    await host.run()
    host.beside.unlink()
    if damage != "gone":
        host.beside.write_bytes(TORN[damage])
    assert (await host.run()).losses == 0
    assert b"times" in host.beside.read_bytes()


async def test_an_idle_manager_writes_no_time_into_a_store_of_its_own(tmp_path: Path) -> None:
    clock, store = FakeClock(1_000.0), RocksStore(tmp_path / "metadata", "always", FakeClock(1_000.0))
    journal = LossJournal(clock, store, tmp_path / "times", lambda: store.log.appended)
    await journal.open()
    before = store.log.appended
    for _ in range(5):
        clock.time += 1
        await journal.beat()
    assert store.log.appended == before
    await store.close()


async def test_a_shared_store_that_was_put_back_while_no_manager_ran_is_noticed(world: World, tmp_path: Path) -> None:
    async def started() -> LossJournal:
        journal = LossJournal(world.clock, world.store, tmp_path / "times")
        await journal.open("deployment", 900.0)
        return journal

    await world.beat(await started(), seconds=0.0)
    dumped = world.dump()
    await world.beat(await started(), seconds=30.0)
    assert (await started()).losses == 0
    world.put_back(dumped)
    journal = await started()
    assert journal.losses == 1
    assert START in journal.last_loss


@pytest.mark.parametrize(("made_at", "losses"), [(990.0, 0), (1_010.0, 1)])
async def test_a_deployment_begun_after_the_last_time_took_the_place_of_another(
    world: World, tmp_path: Path, made_at: float, losses: int
) -> None:
    """An older one is another store that the operator has named."""
    journal = LossJournal(world.clock, world.store, tmp_path / "times")
    await journal.open("deployment", 900.0)
    world.clock.time += 20
    journal = LossJournal(world.clock, world.store, tmp_path / "times")
    await journal.open("another", made_at)
    assert journal.losses == losses


async def test_times_of_one_server_say_nothing_of_another(world: World, tmp_path: Path) -> None:
    """Another database, or another name on the same server, is another store: that it is new is no loss."""
    ports = Settings(data_dir=str(tmp_path))
    for uri in (world.server.uri(world.name), world.server.uri(f"{world.name}x"), world.server.uri(world.name)):
        metadata = await open_metadata(replace(ports, registry_storage_uri=uri), world.clock, "node")
        assert metadata.journal is not None
        await metadata.journal.beat()
        assert metadata.journal.losses == 0
        await metadata.store.close()
        world.clock.time += 10
    assert len(names_of(tmp_path)) == 2


def names_of(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("redis-*.times")}
