"""What a manager does for memory pools in the background: nothing waits for a scrub, which may read everything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from fake_clock import FakeClock

from kvcm import rooms as rooms_module
from kvcm.app import Manager
from kvcm.config import Settings
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec
from kvcm.reclaim.custody import IndexInCustody
from kvcm.reclaim.pool_leaks import PoolLeaks
from kvcm.reclaim.scrub import StorageScrubber
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.pool_state import PoolReport

MIB = 1 << 20
_DEADLINE_SECONDS = 20.0


@dataclass
class EndlessIndexes:
    """Indexes that are read for ever."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def indexes(self) -> Iterable[IndexInCustody]:
        return []

    async def unreadable_instances(self) -> Sequence[str]:
        self.asked.set()
        await asyncio.Event().wait()
        return []


async def test_memory_that_is_gone_is_forgotten_while_a_pool_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms_module, "_POOLS_SECONDS", 0.0)
    clock, indexes = FakeClock(), EndlessIndexes()
    async with Manager(Settings(), clock).opened() as opened:
        await opened.leadership.tick()
        pool_config = StorageConfig("p", TairMemPoolStorageSpec(node_id="n", capacity_bytes=MIB))
        await opened.registry.storages.add(pool_config)
        pool = opened.storages.pools()["p"]
        await pool.report(PoolReport("n", 1, MIB))
        await pool.allocate(Allocation("i", "x", [Part("kv", 1, 1)]))
        scrubber = StorageScrubber(indexes, opened.storages, clock, opened.storages.cluster_id)
        leaks = PoolLeaks(opened.storages.pools, lambda _name: 0, scrubber, clock)
        rooms = replace(opened, leaks=leaks)
        duties = [asyncio.create_task(duty()) for name, duty in rooms.duties() if name in {"pools", "leaks"}]
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                while not indexes.asked.is_set():
                    clock.time += 1.0
                    await opened.leadership.tick()
                    await asyncio.sleep(0)
                assert await pool.report(PoolReport("n", 2, MIB))
                while await pool.lost():
                    clock.time += 1.0
                    await opened.leadership.tick()
                    await asyncio.sleep(0)
            assert not any(duty.done() for duty in duties)
        finally:
            for duty in duties:
                duty.cancel()
            await asyncio.gather(*duties, return_exceptions=True)
