"""Probes of many storages that were opened at the same time: they do not run at the same time ever after."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from fake_clock import FakeClock

from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.dummy import DummyStorage
from kvcm.storage.prober import Prober

COUNT = 200
LOOK_SECONDS = 0.1


class CountedStorage(DummyStorage):
    """A storage that tells when it is probed."""

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
        for _ in range(round(seconds / LOOK_SECONDS)):
            prober.look()
            for _ in range(3):
                await asyncio.sleep(0)  # a probe of these waits for nothing
            clock.time += LOOK_SECONDS
    finally:
        prober.stop()
        storages.close_all()
    return [[at - begin for at in each.probed_at] for each in opened]


async def test_a_look_begins_a_part_of_them() -> None:
    times = await probe_all(20.0, 5.0)
    at_once = Counter(round(at / LOOK_SECONDS) for each in times for at in each)
    assert max(at_once.values()) <= COUNT // 5
    assert len({each[-1] for each in times}) > 1, "each goes on at a time of its own"


@pytest.mark.parametrize(("error", "period"), [(None, 5.0), (OSError("gone"), 1.0)], ids=["up", "down"])
async def test_every_one_is_probed_as_often_as_if_it_were_alone(error: Exception | None, period: float) -> None:
    for each in await probe_all(30.0, 5.0, error):
        assert each[0] <= 1.0
        pauses = [later - earlier for earlier, later in pairwise(each)]
        assert max(pauses) <= period + 2 * LOOK_SECONDS
        assert len(each) >= 30 / (period + 2 * LOOK_SECONDS) - 1


async def test_short_intervals_are_kept() -> None:
    for each in await probe_all(5.0, LOOK_SECONDS):
        assert len(each) >= 5.0 / LOOK_SECONDS / 2
