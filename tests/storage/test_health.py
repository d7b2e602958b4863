"""Probes of open storages, and the health that follows from a row of them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from fake_clock import FakeClock
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvcm.model.errors import StorageIOError
from kvcm.model.storages import DummyStorageSpec, NfsStorageSpec, StorageConfig, StorageSpace, StorageType
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.health import HealthRules, HealthState, Probe, ProbeOutcome, StorageHealth
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
        self.prober.start_due()
        await until(lambda: self.health(name) is not before)
        return self.health(name)

    async def states_after(self, seconds: float, name: str = "s") -> list[HealthState]:
        """Start due probes eight times a second, and return the state of a storage after each second."""
        found = []
        for _ in range(round(seconds)):
            for _ in range(8):
                self.clock.time += 0.125
                self.prober.start_due()
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


async def test_a_directory_is_down_after_three_failures_and_up_after_two_successes(site: Site, tmp_path: Path) -> None:
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


async def test_a_good_storage_reports_its_mediums_space_and_what_the_probe_took(site: Site, tmp_path: Path) -> None:
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
    await site.states_after(INTERVAL)  # the one that hangs begins
    assert (
        await site.states_after(TIMEOUT + 3) == [UP] * 4 + [DEGRADED] * 2 + [DOWN] * 2
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
    await site.states_after(INTERVAL + TIMEOUT + 3)
    assert site.health().state is DOWN
    hanging.gate.set()
    await until(lambda: not hanging.under_way)
    failed = site.health().failed_probes
    await until(lambda: site.prober.start_due() or hanging.probes == 3)  # no time passes
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
    """A failed probe says nothing about writes."""
    storage = site.open_faulty()
    await site.probed()
    site.storages.report_unwritable("s")
    storage.error = StorageIOError("it is gone")
    for _ in range(2):
        await site.probed(after_seconds=INTERVAL)
        assert not site.storages.is_writable("s")
    storage.error = None
    await site.probed(after_seconds=INTERVAL)
    assert site.storages.is_writable("s")


async def test_whatever_a_storage_raises_is_a_failure_of_that_storage(site: Site) -> None:
    broken = site.open_faulty()
    await site.probed()
    broken.error = ZeroDivisionError("by zero")
    health = await site.probed(after_seconds=INTERVAL)
    assert (health.state, health.reason) == (DEGRADED, "ZeroDivisionError: by zero")


async def test_a_disabled_storage_is_probed(site: Site) -> None:
    storage = site.open_faulty(enabled=False)
    storage.error = StorageIOError("it is gone")
    for _ in range(3):
        await site.probed(after_seconds=1.0)
    assert site.health().state is DOWN


async def test_a_replacement_is_probed_while_the_probe_of_the_old_one_hangs(site: Site) -> None:
    """What the old one answers in the end is not said of the new one."""
    old = site.open_faulty()
    old.gate.clear()
    await site.states_after(TIMEOUT + 3)
    assert site.health().state is DOWN
    new = site.open_faulty()
    assert site.health().state is UP
    assert (await site.probed()).state is UP
    known = site.health()
    old.error = StorageIOError("it is gone")
    old.gate.set()
    await until(lambda: not old.under_way)
    assert (new.probes, site.health()) == (1, known)


async def test_a_storage_that_is_closed_while_its_probe_hangs_is_forgotten(site: Site) -> None:
    storage = site.open_faulty()
    storage.gate.clear()
    await site.states_after(1.0)
    site.storages.close("s")
    site.prober.start_due()
    storage.gate.set()
    await until(lambda: not storage.under_way)
    site.prober.start_due()
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


async def test_another_pace_holds_at_once_also_for_probes_that_are_due_much_later() -> None:
    async with probing(interval_seconds=3600.0) as site:
        storage = site.open_faulty()
        await site.probed()
        site.prober.set_times(2.0, TIMEOUT)
        site.clock.time += 1.9
        site.prober.start_due()
        assert storage.probes == 1
        await site.probed(after_seconds=0.2)
        assert storage.probes == 2
        site.prober.set_times(100.0, 3.0)
        await site.probed(after_seconds=2.0)  # was due before that
        site.clock.time += 99.0
        site.prober.start_due()
        assert storage.probes == 3
        storage.gate.clear()
        site.clock.time += 1.0
        site.prober.start_due()
        await until(lambda: storage.under_way)
        assert "no answer for 3.0 s" in (await site.probed(after_seconds=3.0)).reason
        storage.gate.set()


# ── Probes of many storages that were opened at the same time ──


COUNT = 200
PASS_SECONDS = 0.1


class CountedStorage(DummyStorage):
    """A storage that records when it is probed."""

    def __init__(self, name: str, clock: FakeClock, error: Exception | None) -> None:
        super().__init__(name, "/", 1)
        self.probed_at: list[float] = []
        self._clock, self._error = clock, error

    async def probe(self) -> None:
        self.probed_at.append(self._clock.now())
        if self._error is not None:
            raise self._error


async def probe_all(seconds: float, interval_seconds: float, error: Exception | None = None) -> list[list[float]]:
    """Open many storages, look for some time, and return when each of them was probed, from the beginning."""
    clock, opened = FakeClock(), []

    def open_counted(config: StorageConfig, _cluster_id: str) -> CountedStorage:
        opened.append(CountedStorage(config.global_unique_name, clock, error))
        return opened[-1]

    storages = StorageDirectory("cluster", openers={**OPENERS, StorageType.ST_DUMMY: open_counted})
    for number in range(COUNT):
        storages.open(StorageConfig(f"s{number}", DummyStorageSpec()))
    prober, begin = Prober(storages, clock, interval_seconds, 5.0), clock.now()
    try:
        for _ in range(round(seconds / PASS_SECONDS)):
            prober.start_due()
            for _ in range(3):
                await asyncio.sleep(0)  # a probe of these waits for nothing
            clock.time += PASS_SECONDS
    finally:
        prober.stop()
        storages.close_all()
    return [[at - begin for at in each.probed_at] for each in opened]


async def test_a_pass_starts_only_part_of_the_probes() -> None:
    times = await probe_all(20.0, 5.0)
    at_once = Counter(round(at / PASS_SECONDS) for each in times for at in each)
    assert max(at_once.values()) <= COUNT // 5
    assert len({each[-1] for each in times}) > 1, "each goes on at a time of its own"


@pytest.mark.parametrize(("error", "period"), [(None, 5.0), (OSError("gone"), 1.0)], ids=["up", "down"])
async def test_every_one_is_probed_as_often_as_if_it_were_alone(error: Exception | None, period: float) -> None:
    for each in await probe_all(30.0, 5.0, error):
        assert each[0] <= 1.0
        pauses = [later - earlier for earlier, later in pairwise(each)]
        assert max(pauses) <= period + 2 * PASS_SECONDS
        assert len(each) >= 30 / (period + 2 * PASS_SECONDS) - 1


async def test_short_intervals_are_kept() -> None:
    for each in await probe_all(5.0, PASS_SECONDS):
        assert len(each) >= 5.0 / PASS_SECONDS / 2


# ── Health of a storage: a row of probes decides ──


# One letter per probe: good, slow, unwritable, failed, late.
PROBES = {
    "g": Probe(ProbeOutcome.ANSWERED, 0.1, space=StorageSpace(100, 40)),
    "s": Probe(ProbeOutcome.ANSWERED, 3.0, space=StorageSpace(100, 39)),
    "u": Probe(ProbeOutcome.UNWRITABLE, 0.1, "no space left"),
    "f": Probe(ProbeOutcome.FAILED, 0.1, "it is gone"),
    "l": Probe(ProbeOutcome.LATE, 5.0, "no answer"),
}
HISTORIES = st.text("gsufl", max_size=30) | st.text("gf", max_size=30)
RULES = st.builds(HealthRules, down_after=st.integers(2, 5), up_after=st.integers(2, 4))


def states(history: Iterable[str], rules: HealthRules) -> list[StorageHealth]:
    """The health before the first probe and after each, one a second."""
    healths = [StorageHealth()]
    for second, letter in enumerate(history, start=1):
        healths.append(healths[-1].after(PROBES[letter], float(second), rules))
    return healths


def expected(history: str, rules: HealthRules) -> HealthState:
    """The rules once more, as patterns over the whole history."""
    down, up = rules.down_after, rules.up_after
    if re.search(f"[fl]{{{down}}}(?!.*[gsu]{{{up}}})", history):
        return DOWN
    return UP if re.fullmatch(f"g*|.*g{{{up}}}", history) else DEGRADED


@given(HISTORIES, RULES)
@example("fff" + "g", HealthRules())
@example("fff" + "ggf", HealthRules())
@example("fff" + "ss", HealthRules())
def test_the_state_follows_from_the_history(history: str, rules: HealthRules) -> None:
    assert states(history, rules)[-1].state is expected(history, rules)


@given(st.text("gsufl", min_size=1, max_size=30), RULES)
def test_since_when_and_why_go_with_the_state(history: str, rules: HealthRules) -> None:
    healths = states(history, rules)
    for second, (before, after) in enumerate(pairwise(healths), start=1):
        changed = after.state is not before.state or second == 1
        assert after.since == (second if changed else before.since)
        assert (after.reason == "") is (after.state is UP)
    assert healths[-1].failed_probes == sum(letter in "ufl" for letter in history)
    assert healths[-1].probe_seconds == PROBES[history[-1]].seconds
    spaces = [PROBES[letter].space for letter in history if letter in "gs"]
    assert healths[-1].space == (spaces[-1] if spaces else None)


@given(HISTORIES, RULES)
def test_whether_it_takes_bytes_is_what_the_last_answer_said(history: str, rules: HealthRules) -> None:
    answers = [letter for letter in history if letter in "gsu"]
    assert states(history, rules)[-1].is_unwritable is (answers[-1:] == ["u"])


def test_the_reason_is_the_last_thing_that_was_wrong() -> None:
    reasons = [health.reason for health in states("fflggsgg", HealthRules())]
    slow = "slow: it took 3.0 s to answer"
    assert reasons == ["", "it is gone", "it is gone", "no answer", "no answer", "", slow, slow, ""]


# In the directory.

DUMMY = StorageConfig("d", DummyStorageSpec())
IS_DOWN = StorageHealth(DOWN, "it is gone")


@pytest.fixture
def directory() -> StorageDirectory:
    opened = StorageDirectory("cluster")
    opened.open(DUMMY)
    return opened


def test_a_storage_that_is_down_is_open_and_not_available(directory: StorageDirectory) -> None:
    """Deletions go on trying it."""
    rank = directory.rank("d")
    directory.set_health("d", IS_DOWN)
    assert (directory.rank("d"), directory.backend("d") is not None, directory.health("d")) == (None, True, IS_DOWN)
    directory.set_health("d", StorageHealth(DEGRADED, "slow"))
    assert directory.rank("d") == rank is not None


def test_only_a_change_of_availability_is_a_new_generation(directory: StorageDirectory) -> None:
    """Every new generation empties the search caches."""
    generations = [directory.generation]
    for health in (StorageHealth(DEGRADED, "slow"), StorageHealth(UP), IS_DOWN, IS_DOWN, StorageHealth(UP)):
        directory.set_health("d", health)
        generations.append(directory.generation)
    first = generations[0]
    assert generations == [first, first, first, first + 1, first + 1, first + 2]


def test_a_storage_is_available_again_only_when_it_is_neither_down_nor_disabled(directory: StorageDirectory) -> None:
    directory.set_health("d", IS_DOWN)
    directory.set_enabled("d", enabled=False)
    directory.set_enabled("d", enabled=True)
    assert directory.rank("d") is None
    directory.set_enabled("d", enabled=False)
    directory.set_health("d", StorageHealth())
    assert directory.rank("d") is None
    directory.set_enabled("d", enabled=True)
    assert directory.rank("d") is not None


@pytest.mark.parametrize("closes", [False, True], ids=["replaced", "opened again"])
def test_another_medium_of_that_name_begins_as_up(directory: StorageDirectory, *, closes: bool) -> None:
    directory.set_health("d", IS_DOWN)
    if closes:
        directory.close("d")
        assert directory.health("d") is None
    directory.open(DUMMY)
    assert directory.health("d") == StorageHealth()
    assert directory.rank("d") is not None
