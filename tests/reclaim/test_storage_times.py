"""The times of a store beside the blocks: a data directory that is put back whole is noticed by its storages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_clock import FakeClock

from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.reclaim.storage_times import StorageTimes
from kvcm.registry.loss_journal import LossJournal
from kvcm.storage.directory import StorageDirectory
from kvcm.store.rocks import RocksStore


class Host:
    """A data directory, and path storages elsewhere."""

    def __init__(self, directory: Path) -> None:
        self.data, self.clock = directory / "data", FakeClock(1_000.0)
        self.roots = [directory / "one", directory / "two"]
        for root in self.roots:
            root.mkdir()

    async def run(self, seconds: float = 30.0) -> LossJournal:
        """One manager's life, in which it changes something."""
        self.clock.time += 1
        store = RocksStore(self.data / "metadata", "always", self.clock)
        journal = LossJournal(self.clock, store, self.data / "metadata.times", lambda: store.log.appended)
        await journal.open()
        storages = StorageDirectory("cluster")
        for number, root in enumerate(self.roots):
            storages.open(StorageConfig(f"s{number}", NfsStorageSpec(str(root), 1 + 7 * number)))
        times = StorageTimes(storages, journal)
        await times.keep(is_leader=True)
        for _ in range(2):
            self.clock.time += seconds / 2
            await store.table("t").replace(f"{self.clock.time}", None, b"document")
            await journal.beat()
            await times.keep(is_leader=True)
        await store.close()
        for each in storages.path_storages().values():
            each.close()
        return journal

    def files(self) -> list[Path]:
        return sorted(path for root in self.roots for path in root.rglob(".kvcm-times-*"))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


async def test_a_data_directory_that_is_put_back_whole_is_a_loss_with_its_window(host: Host, tmp_path: Path) -> None:
    assert (await host.run()).losses == 0
    shutil.copytree(host.data, tmp_path / "copy")
    for _ in range(2):
        assert (await host.run()).losses == 0
    shutil.rmtree(host.data)
    shutil.copytree(tmp_path / "copy", host.data)
    journal = await host.run()
    assert journal.losses == 1
    assert "is older than storage" in journal.last_loss
    assert "between 1970-01-01T00:17:11+00:00 and" in journal.last_loss
    assert (await host.run()).losses == 1, "it is noted once"


async def test_a_storage_of_another_deployment_says_nothing(host: Host) -> None:
    await host.run()
    shutil.rmtree(host.data)
    host.clock.time -= 20
    assert (await host.run()).losses == 0


@pytest.mark.parametrize("damage", ["gone", "no json", "older"])
async def test_a_storage_without_times_or_with_older_ones_is_no_loss(host: Host, damage: str) -> None:
    await host.run()
    older = [path.read_bytes() for path in host.files()]
    await host.run()
    for path, content in zip(host.files(), older, strict=True):
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(b"{" if damage == "no json" else content)
    assert (await host.run()).losses == 0
    assert len(host.files()) == 2


async def test_a_storage_that_is_away_is_left_to_later(host: Host) -> None:
    store = RocksStore(host.data, "always", host.clock)
    journal = LossJournal(host.clock, store)
    await journal.open()
    storages = StorageDirectory("cluster")
    for number, root in enumerate(host.roots):
        storages.open(StorageConfig(f"s{number}", NfsStorageSpec(str(root))))
    times = StorageTimes(storages, journal)
    shutil.move(host.roots[1], away := host.roots[1].with_name("away"))
    await times.keep(is_leader=True)
    assert [path.name for path in host.files()] == [".kvcm-times-s0"]
    shutil.move(away, host.roots[1])
    await times.keep(is_leader=True)
    assert [path.name for path in host.files()] == [".kvcm-times-s0", ".kvcm-times-s1"]
    await store.close()


async def test_an_idle_manager_gives_the_medium_nothing_to_do(host: Host) -> None:
    store = RocksStore(host.data, "always", host.clock)
    journal = LossJournal(host.clock, store)
    await journal.open()
    storages = StorageDirectory("cluster")
    storages.open(StorageConfig("s0", NfsStorageSpec(str(host.roots[0]))))
    times = StorageTimes(storages, journal)
    await times.keep(is_leader=True)
    (file,) = host.files()
    before = file.stat().st_ino
    for _ in range(3):
        await times.keep(is_leader=True)
    assert file.stat().st_ino == before, "it was not replaced"
    await store.close()
