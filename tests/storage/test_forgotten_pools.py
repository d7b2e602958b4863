"""Documents of a removed pool are deleted, unless somebody added the pool again and uses it."""

from __future__ import annotations

from random import Random

import pytest
from fake_clock import FakeClock
from pool_rig import MIB, NODE, SlowTable, open_pool, pool_config, report, stamp_of

from kvcm.model.storages import StorageType
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.mempool import PoolOpener


def some(count: int) -> Allocation:
    return Allocation("i", "l", [Part("kv", key, 4096) for key in range(count)])


async def test_other_managers_find_out_and_stamps_go_on_growing() -> None:
    table, clock = SlowTable(), FakeClock()
    pool, other = open_pool(table, clock), open_pool(table, clock)
    await pool.report(report(7))
    before = [stamp_of(uri) for uri in await other.allocate(some(8))]
    clock.time += 1
    await pool.forget(clock.time)
    assert await table.all() == {}
    assert not (await other.refresh()).generation
    await other.report(report(8))
    uris = await other.allocate(some(8))
    assert min(map(stamp_of, uris)) > max(before)
    assert await open_pool(table, clock).exists(uris) == [True] * 8  # invariant 5


async def test_what_was_taken_of_a_pool_that_was_added_again_stays() -> None:
    table, clock = SlowTable(), FakeClock()
    pool = open_pool(table, clock)
    await pool.report(report(7))
    uris = await pool.allocate(some(8))
    await pool.forget(clock.time - 1)
    assert await open_pool(table, clock).exists(uris) == [True] * 8
    assert (await pool.refresh()).why_not_usable(NODE, clock.time) == ""


@pytest.mark.parametrize("name", ["p", "p/0"])
async def test_what_cannot_be_read_stays_and_holds_up_nobody(name: str) -> None:
    table, clock = SlowTable(), FakeClock()
    pool = open_pool(table, clock)
    await pool.report(report(7))
    await pool.allocate(some(1))
    await table.replace(name, await table.get(name), b"of a later release")
    clock.time += 1
    await pool.forget(clock.time)
    assert await table.all() == {name: b"of a later release"}


async def test_a_directory_forgets_pools_by_their_config_and_remembers_no_closed_one() -> None:
    table, clock = SlowTable(), FakeClock()
    opener = PoolOpener(table, clock, Random(0), is_shared=False)
    storages = StorageDirectory("cluster", openers={**OPENERS, StorageType.ST_TAIRMEMPOOL: opener})
    config = pool_config(capacity_bytes=MIB)
    storages.open(config)
    removed = storages.pools()["p"]
    await removed.report(report(7))
    await removed.allocate(some(8))
    storages.close("p")
    clock.time += 1
    await storages.forget(config, clock.time)
    assert await table.all() == {}
    storages.open(config)
    assert storages.pools()["p"].taken_bytes == 0
    assert storages.pools()["p"]._chunks is not removed._chunks
    storages.close_all()
