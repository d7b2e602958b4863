"""How much is evicted: what the hysteresis asks for, whatever the delay before a deletion (wire.md 9.3)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from eviction_rig import BLOCK, EvictionRig, group_of
from index_backends import Rig, opened

from kvcm.index.meta_index import MetaIndex

BLOCKS, CHAIN = 10_000, 10


@pytest.fixture(params=["memory", "rocksdb", "redis"])
async def backends(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened(request.param, request) as made:
        yield made


def chains_of(first: int, blocks: int) -> list[range]:
    return [range(key, key + CHAIN) for key in range(first, first + blocks, CHAIN)]


async def run_for(rig: EvictionRig, index: MetaIndex, seconds: float) -> list[int]:
    """Look and delete every 50 ms; return what was evicted."""
    evicted = []
    for _ in range(int(seconds / 0.05)):
        evicted += await rig.settle()
        await rig.executor.run_due()
        rig.clock.time += 0.05
    return evicted


@pytest.mark.parametrize(("hysteresis", "expected"), [(0.0, 10), (None, 10 + BLOCKS // 40), (0.05, 10 + BLOCKS // 16)])
async def test_ten_blocks_too_many_evict_what_the_hysteresis_asks_for(
    hysteresis: float | None, expected: int, backends: Rig
) -> None:
    """10,000 blocks at the mark and 10 more, with delays of 0, 100 and 1000 ms."""
    told = []
    for delay_ms in (0, 100, 1000):
        group = group_of(ratio=0.8, capacity=BLOCKS * BLOCK * 5 // 4, hysteresis=hysteresis, delay_ms=delay_ms)
        rig = EvictionRig({"g": group})
        index = rig.add(backend=backends.fresh())
        await rig.write_chains(index, chains_of(1, BLOCKS))
        assert await run_for(rig, index, 0.2) == []
        await rig.write_chains(index, chains_of(BLOCKS + 1, 10))
        told.append(await run_for(rig, index, 1.3))
        assert (len(told[-1]), index.key_count, index.deleting_keys) == (expected, BLOCKS + 10 - expected, 0)
    assert told[0] == told[1] == told[2]
