"""Levels, classes, state, ages and pins over a store that managers share, where victims come from a window."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from levels_rig import BLOCK, LEVELS_POOL, Levels, group, instance, levels
from redis_servers import Standalone

from kvcm.index.backends.redis import RedisBackend
from kvcm.index.backends.redis_runs import RunsBackend
from kvcm.model.groups import CachePreferStrategy, EvictionPolicy, PrefixClass
from kvcm.model.keys import mixed, unmixed
from kvcm.model.storages import StorageType
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import parse_redis_uri


@pytest.fixture(autouse=True, params=[(RedisBackend, 4), (RunsBackend, 1), (RunsBackend, 4)])
async def over_redis(
    request: pytest.FixtureRequest, redis_standalone: Standalone, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    """Every index of this module lies in a real server."""
    kind, parts = request.param
    client = RedisClient.of(parse_redis_uri(redis_standalone.uri(f"t{secrets.token_hex(6)}", timeout_ms=10_000)))
    backend = staticmethod(lambda placement: kind(client, placement.uid, parts))
    monkeypatch.setattr(Levels, "new_backend", backend)
    yield
    await client.close()


def exact(mark: float, **fields: Any) -> Any:
    return group(blocks=100, mark=mark, hysteresis=0.0, **fields)


async def test_a_type_gives_up_its_own_copies_only() -> None:
    configured = exact(
        0.5,
        storages=("a", LEVELS_POOL),
        types={StorageType.ST_TAIRMEMPOOL: 10 * BLOCK},
        prefers=CachePreferStrategy.CPS_PREFER_TAIR_MEMPOOL,
    )
    with levels(configured) as rig:
        await rig.without(LEVELS_POOL, lambda: rig.write(list(range(9))))
        await rig.without("a", lambda: rig.write(list(range(9))))
        assert await rig.reclaim() == 4
        assert await rig.left(range(9)) == list(range(9))
        assert all(uri.startswith(f"dummy://{LEVELS_POOL}/") for uri in rig.marked_uris())


async def test_states_between_go_first() -> None:
    """40 bytes per block, 30 of them state; the mark is 110 bytes below the usage."""
    registered = instance(specs={"kv": 10, "state": 30}, linear=("state",))
    configured = group(blocks=40, mark=0.525, hysteresis=0.0)
    with levels(configured, registered) as rig:
        await rig.write(list(range(8)))
        await rig.reclaim()
        assert rig.remaining() == 320 - 4 * 30
        entries = await rig.seen(range(8))
        assert [len(entry) for entry in entries].count(2) == 4
        assert "state" in entries[7]
        await rig.delete()
        assert rig.remaining() == rig.used() == 200


async def test_a_class_over_its_budget_goes_first_and_no_further() -> None:
    deep = PrefixClass("deep", min_depth=1, budget=0.1)
    reclaim = {"prefix_classes": (deep,), "policy": EvictionPolicy("lru")}
    with levels(exact(0.4, reclaim=reclaim)) as rig:
        await rig.write_each(range(40))
        await rig.write([100 + depth for depth in range(15)])  # 14 of the class, 10 are its budget
        assert await rig.reclaim() == 15
        assert sorted(rig.order()) == [*range(11), 111, 112, 113, 114]


async def test_a_short_age_of_a_class_is_kept_behind_many_older_blocks() -> None:
    """What expires is not among the coldest blocks of the instance."""
    deep = PrefixClass("deep", min_depth=1, policy=EvictionPolicy("lru", 50))
    reclaim = {"prefix_classes": (deep,), "policy": EvictionPolicy("lru")}
    with levels(group(blocks=10_000, mark=0, reclaim=reclaim)) as rig:
        for start in range(0, 1500, 500):
            for key in range(start, start + 500):
                await rig.write([key])
        rig.wait(100)
        await rig.write([5000, 5001, 5002])
        await rig.reclaim(after=51)
        assert await rig.left([5000, 5001, 5002]) == [5000]


async def test_unpinned_blocks_go_before_warmer_ones() -> None:
    """The coldest blocks, two windows of them, are pinned: the walk goes on behind them, and comes back."""
    fields: Any = {"blocks": 10_000, "mark": 0, "hysteresis": 0.0, "pin_budget_bytes": 100_000}
    with levels(group(**fields)) as rig:
        # Neighbouring numbers spread evenly over the shards: else the walk is exact but for blocks at its seams.
        cold, cool = mixed(range(1100)), mixed(range(10_000, 11_000))
        for keys, seconds in ((cold, 500), (cool, 5000)):
            await rig.write(keys)
            await rig.pin(keys, seconds)
            rig.wait(1)
        await rig.write_each(mixed(range(20_000, 20_060)))
        await rig.update(group(used_size=2150 * BLOCK, **fields))
        assert await rig.reclaim() == 10
        assert sorted(unmixed(rig.order())) == list(range(20_000, 20_010))
        rig.wait(500)
        await rig.write_each(mixed(range(30_000, 30_010)))
        assert await rig.reclaim() == 10
        assert sorted(unmixed(rig.order()[10:])) == list(range(1090, 1100))
