"""Probes of open storages: real directories that go away and come back, media that hang, storages that change."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from fake_clock import FakeClock
from structlog.testing import capture_logs

from kvcm.model.errors import StorageIOError
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig, StorageType
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.health import HealthState, StorageHealth
from kvcm.storage.prober import Prober
from kvcm.storage.threads import StorageThreads

UP, DEGRADED, DOWN = HealthState.SH_UP, HealthState.SH_DEGRADED, HealthState.SH_DOWN
INTERVAL, TIMEOUT = 5.0, 5.0
PATIENCE_SECONDS = 30.0


class FaultyStorage(DummyStorage):
    """A medium whose threads hang until `gate` is open, and that fails with `error` where there is one."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "/", 1)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.probes = self.answers = self.under_way = self.most_under_way = 0
        self._threads = StorageThreads(f"storage-{name}", 8)

    async def probe(self) -> None:
        self.probes += 1
        try:
            await self._threads.run(self._use)
        finally:
            self.answers += 1

    def _use(self) -> None:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            assert self.gate.wait(60)
            if self.error is not None:
                raise self.error
        finally:
            self.under_way -= 1


class Site:
    """A prober over real storages, with time injected."""

    def __init__(self, interval_seconds: float = INTERVAL) -> None:
        self.clock = FakeClock()
        self.storages = StorageDirectory("cluster", openers={**OPENERS, StorageType.ST_DUMMY: self._open_faulty})
        self.prober = Prober(self.storages, self.clock, interval_seconds, TIMEOUT)
        self.faulty: dict[str, FaultyStorage] = {}

    def _open_faulty(self, config: StorageConfig, _cluster_id: str) -> FaultyStorage:
        storage = self.faulty[config.global_unique_name] = FaultyStorage(config.global_unique_name)
        return storage

    def open_faulty(self, name: str = "s", *, enabled: bool = True) -> FaultyStorage:
        self.storages.open(StorageConfig(name, DummyStorageSpec(), is_available=enabled))
        return self.faulty[name]

    def open_files(self, root: Path) -> None:
        self.storages.open(StorageConfig("s", NfsStorageSpec(str(root))))

    def health(self, name: str = "s") -> StorageHealth:
        health = self.storages.health(name)
        assert health is not None
        return health

    async def probed(self, name: str = "s", *, after_seconds: float = 0.0) -> StorageHealth:
        """Return the health of a storage after one more probe of it, which is due after some time."""
        self.clock.time += after_seconds
        before = self.health(name)
        self.prober.look()
        await until(lambda: self.health(name) is not before)
        return self.health(name)

    async def looks(self, seconds: float, name: str = "s") -> list[HealthState]:
        """Look eight times a second, and return how a storage is after each second."""
        found = []
        for _ in range(round(seconds)):
            for _ in range(8):
                self.clock.time += 0.125
                self.prober.look()
                await asyncio.sleep(0)
                await until(self._nothing_but_hangs)
            found.append(self.health(name).state)
        return found

    def _nothing_but_hangs(self) -> bool:
        return all(each.answers == each.probes or not each.gate.is_set() for each in self.faulty.values())


async def until(holds: Callable[[], object]) -> None:
    """Return when a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)


@asynccontextmanager
async def probing(interval_seconds: float = INTERVAL) -> AsyncIterator[Site]:
    site = Site(interval_seconds)
    try:
        yield site
    finally:
        for storage in site.faulty.values():
            storage.gate.set()
        site.prober.stop()
        site.storages.close_all()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with probing() as prepared:
        yield prepared


async def test_a_directory_that_goes_away_is_down_within_three_probes_and_up_two_after_it_is_back(
    site: Site, tmp_path: Path
) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    site.open_files(root)
    assert (await site.probed()).state is UP
    root.rename(elsewhere)
    healths = [await site.probed(after_seconds=INTERVAL)]
    healths += [await site.probed(after_seconds=1.0) for _ in range(2)]
    assert [health.state for health in healths] == [DEGRADED, DEGRADED, DOWN]
    assert "s" in healths[-1].reason
    assert site.storages.rank("s") is None
    assert not root.exists(), "a probe made the directory of a mount that is away"
    elsewhere.rename(root)
    healths = [await site.probed(after_seconds=1.0) for _ in range(2)]
    assert [health.state for health in healths] == [DOWN, UP]
    assert site.storages.rank("s") is not None


async def test_a_good_storage_tells_the_space_of_its_medium_and_what_the_probe_took(site: Site, tmp_path: Path) -> None:
    site.open_files(tmp_path)
    health = await site.probed()
    status = os.statvfs(tmp_path)
    assert health.space is not None
    assert health.space.capacity_bytes == status.f_blocks * status.f_frsize
    assert 0 <= health.space.free_bytes <= health.space.capacity_bytes
    assert health.since == site.clock.now()


async def test_what_hangs_is_down_after_the_timeout_and_two_more_seconds_and_holds_up_nothing(site: Site) -> None:
    """At most one probe of it is under way, whatever the time, and the others are probed as ever."""
    hanging, other = site.open_faulty("s"), site.open_faulty("other")
    await site.probed()
    hanging.gate.clear()
    await site.looks(INTERVAL)  # the one that hangs begins
    assert (
        await site.looks(TIMEOUT + 3) == [UP] * 4 + [DEGRADED] * 2 + [DOWN] * 2
    )  # by then no answer for 5, 6, 7 seconds
    assert (hanging.most_under_way, hanging.probes) == (1, 2)
    assert site.health().reason == "no answer for 8.0 s"
    before = other.probes
    await site.probed("other", after_seconds=INTERVAL)
    assert (other.probes, site.health("other").state) == (before + 1, UP)


async def test_an_answer_that_comes_too_late_counts_for_nothing_and_the_next_probe_begins_at_once(site: Site) -> None:
    hanging = site.open_faulty()
    await site.probed()
    hanging.gate.clear()
    await site.looks(INTERVAL + TIMEOUT + 3)
    assert site.health().state is DOWN
    hanging.gate.set()
    await until(lambda: not hanging.under_way)
    failed = site.health().failed_probes
    await until(lambda: site.prober.look() or hanging.probes == 3)  # no time passes
    await until(lambda: site.health().answers == 1)
    assert (site.health().state, site.health().failed_probes) == (DOWN, failed)
    assert (await site.probed(after_seconds=1.0)).state is UP


async def test_a_full_medium_is_degraded_and_goes_on_being_read(site: Site) -> None:
    full = site.open_faulty()
    await site.probed()
    full.error = StorageIOError("storage s: no room for a probe")
    full.error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    for _ in range(5):
        health = await site.probed(after_seconds=INTERVAL)
    assert (health.state, health.reason) == (DEGRADED, "storage s: no room for a probe")
    assert site.storages.rank("s") is not None


async def test_what_a_write_found_out_holds_until_a_probe_is_answered(site: Site) -> None:
    """A probe that fails tells nothing of writes."""
    storage = site.open_faulty()
    await site.probed()
    site.storages.note_unwritable("s")
    storage.error = StorageIOError("it is gone")
    for _ in range(2):
        await site.probed(after_seconds=INTERVAL)
        assert not site.storages.takes_writes("s")
    storage.error = None
    await site.probed(after_seconds=INTERVAL)
    assert site.storages.takes_writes("s")


async def test_whatever_a_storage_raises_is_a_failure_of_that_storage(site: Site) -> None:
    broken = site.open_faulty()
    await site.probed()
    broken.error = ZeroDivisionError("by zero")
    health = await site.probed(after_seconds=INTERVAL)
    assert (health.state, health.reason) == (DEGRADED, "ZeroDivisionError: by zero")


async def test_probes_are_rare_while_all_is_well_and_every_second_while_it_is_not(site: Site) -> None:
    storage = site.open_faulty()
    await site.probed()
    site.clock.time += INTERVAL - 0.01
    site.prober.look()
    await asyncio.sleep(0)
    assert storage.probes == 1
    storage.error = StorageIOError("it is gone")
    for after_seconds, state in ((0.01, DEGRADED), (1.0, DEGRADED), (1.0, DOWN)):
        assert (await site.probed(after_seconds=after_seconds)).state is state
    storage.error = None
    for state in (DOWN, UP):
        assert (await site.probed(after_seconds=1.0)).state is state


async def test_a_disabled_storage_is_probed_and_shown_and_not_used(site: Site) -> None:
    storage = site.open_faulty(enabled=False)
    storage.error = StorageIOError("it is gone")
    for _ in range(3):
        await site.probed(after_seconds=1.0)
    assert site.health().state is DOWN
    site.storages.set_enabled("s", enabled=True)
    assert site.storages.rank("s") is None
    storage.error = None
    for _ in range(2):
        await site.probed(after_seconds=1.0)
    assert site.storages.rank("s") is not None


async def test_a_replacement_is_probed_while_the_probe_of_the_old_one_hangs(site: Site) -> None:
    """What the old one answers in the end is not said of the new one."""
    old = site.open_faulty()
    old.gate.clear()
    await site.looks(TIMEOUT + 3)
    assert site.health().state is DOWN
    new = site.open_faulty()
    assert site.health().state is UP
    assert (await site.probed()).state is UP
    known = site.health()
    old.error = StorageIOError("it is gone")
    old.gate.set()
    await until(lambda: not old.under_way)
    assert (new.probes, site.health()) == (1, known)


async def test_what_is_heard_of_a_storage_that_was_replaced_a_moment_ago_is_not_said_of_the_new_one(site: Site) -> None:
    old = site.open_faulty()
    old.gate.clear()
    old.error = StorageIOError("it is gone")
    site.prober.look()
    await until(lambda: old.under_way)
    site.open_faulty()
    old.gate.set()
    await until(lambda: old.answers)
    assert site.health() == StorageHealth()


async def test_a_storage_that_is_closed_while_its_probe_hangs_is_forgotten(site: Site) -> None:
    storage = site.open_faulty()
    storage.gate.clear()
    await site.looks(1.0)
    site.storages.close("s")
    site.prober.look()
    storage.gate.set()
    await until(lambda: not storage.under_way)
    site.prober.look()
    assert (site.storages.health("s"), site.storages.rank("s")) == (None, None)


async def test_every_change_of_state_is_logged_once(site: Site) -> None:
    storage = site.open_faulty()
    with capture_logs() as logs:
        await site.probed()
        storage.error = StorageIOError("it is gone")
        for _ in range(5):
            await site.probed(after_seconds=INTERVAL)
        storage.error = None
        for _ in range(4):
            await site.probed(after_seconds=INTERVAL)
    found = [(log["storage"], log["state"], log["reason"]) for log in logs if log["event"] == "storage_health"]
    assert found == [("s", "degraded", "it is gone"), ("s", "down", "it is gone"), ("s", "up", "")]


async def test_the_duty_probes_by_itself_and_leaves_nothing_behind() -> None:
    async with probing(interval_seconds=0.001) as site:
        storage, hanging = site.open_faulty(), site.open_faulty("hanging")
        hanging.gate.clear()
        duty = asyncio.create_task(site.prober.run())
        while storage.probes < 3:
            site.clock.time += 1.0
            await asyncio.sleep(0)
        duty.cancel()
        with suppress(asyncio.CancelledError):
            await duty
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_another_pace_holds_at_once_also_for_what_is_due_much_later() -> None:
    async with probing(interval_seconds=3600.0) as site:
        storage = site.open_faulty()
        await site.probed()
        site.prober.set_times(2.0, TIMEOUT)
        site.clock.time += 1.9
        site.prober.look()
        assert storage.probes == 1
        await site.probed(after_seconds=0.2)
        assert storage.probes == 2
        site.prober.set_times(100.0, 3.0)
        await site.probed(after_seconds=2.0)  # was due before that
        site.clock.time += 99.0
        site.prober.look()
        assert storage.probes == 3
        storage.gate.clear()
        site.clock.time += 1.0
        site.prober.look()
        await until(lambda: storage.under_way)
        assert "no answer for 3.0 s" in (await site.probed(after_seconds=3.0)).reason
        storage.gate.set()
