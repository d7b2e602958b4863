"""Who is evicted over a store that managers share: not exact, since nobody is told of every change, but nearly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from random import Random

import pytest
from eviction_rig import BLOCK, EvictionRig, group_of
from index_backends import Rig, opened

from kvcm.index.backends.backend import Access
from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import BlockRecord

CHAINS, CHAIN = 640, 11
SHARED = 3  # blocks at the head of a chain that ten chains share
TICKS = 24


RANKS: Mapping[str, Callable[[Access], tuple[float, ...]]] = {
    "fifo": lambda access: (access.at,),
    "leaf_lru": lambda access: (access.at,),
    "lfu": lambda access: (access.reads, access.at),
    "lru": lambda access: (access.at,),
    "s3fifo": lambda access: (access.reads >= 2, access.at),
    "sieve": lambda access: (access.reads > 0, access.at),
    "ttl": lambda access: (access.at,),
}
"""Where blocks stand in the order of eviction. The time is that of the last read where reads move blocks, else that of
the write, or of the last second chance."""


@pytest.fixture
async def backends(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with opened("redis", request) as made:
        yield made


def key_of(chain: int, depth: int) -> int:
    shared = chain // 10 * 10 if depth < SHARED else chain
    return (shared * CHAIN + depth) * 0x9E3779B97F4A7C15 % (1 << 63)


def keys_of(chain: int, length: int = CHAIN) -> list[int]:
    return [key_of(chain, depth) for depth in range(length)]


class Workload:
    """Chains that are written one after the other, then read with a skew.

    Args:
        popular: chain numbers, the most popular first.
    """

    def __init__(self, rig: EvictionRig, index: MetaIndex, popular: Sequence[int], random: Random) -> None:
        self.rig, self.index, self.popular, self.random = rig, index, popular, random

    async def write(self) -> None:
        for first in range(0, CHAINS, 10):
            await self.rig.write_chains(self.index, map(keys_of, range(first, first + 10)))
            self.rig.clock.time += 1

    async def read(self, ticks: int) -> None:
        """Most reads are of a few chains; many chains are never read."""
        for _ in range(ticks):
            self.rig.clock.time += 1
            counts: dict[int, int] = {}
            for _ in range(60):
                chain = self.popular[int(CHAINS * self.random.random() ** 4)]
                for key in reversed(keys_of(chain, self.random.randint(SHARED, CHAIN))):
                    counts[key] = counts.pop(key, 0) + 1
            await self.rig.touch(self.index, counts)

    async def known(self) -> dict[int, Access]:
        """What can be evicted."""
        keys = list(await self.rig.resident(self.index))
        accesses = zip(keys, await self.index.accesses(keys), strict=True)
        return {key: access for key, access in accesses if access is not None}


def leaves_nobody_behind(victims: Iterable[int], left: Mapping[int, BlockRecord]) -> bool:
    gone = set(victims)
    return not any(record.parent in gone for record in left.values())


def is_among_the_coldest(victims: Sequence[int], ranks: Mapping[int, tuple[float, ...]], share: float) -> float:
    """Return which part of the victims has fewer than such a share of all blocks before it."""
    limit = sorted(ranks.values())[int(share * len(ranks))]
    return sum(ranks[key] <= limit for key in victims) / len(victims)


POPULAR: Mapping[str, Callable[[Random], list[int]]] = {
    "whatever": lambda random: random.sample(range(CHAINS), CHAINS),
    "oldest": lambda random: list(range(CHAINS)),
}


@pytest.mark.parametrize("popular", POPULAR)
@pytest.mark.parametrize("policy", RANKS)
async def test_nearly_all_victims_are_among_the_coldest(policy: str, popular: str, backends: Rig) -> None:
    """Invariant 7, and at least 95 of 100 victims among the coldest tenth; twice, with reads in between."""
    random = Random(f"{policy} {popular}")
    rig = EvictionRig({"g": group_of(policy=policy)})
    index = rig.add(backend=backends.fresh())
    workload = Workload(rig, index, POPULAR[popular](random), random)
    await workload.write()
    await workload.read(TICKS)
    for _ in range(2):
        known = await workload.known()
        used = len(known) * BLOCK
        rig.groups["g"] = group_of(policy=policy, used_size=used - 1, hysteresis=0.06)
        victims = await rig.settle()
        left = await rig.resident(index)
        assert len(victims) == len(known) - len(left) == -(-(used - int((used - 1) * 0.94)) // BLOCK)
        assert leaves_nobody_behind(victims, left)
        ranks = {key: RANKS[policy](each) for key, each in known.items()}
        assert is_among_the_coldest(victims, ranks, 0.1) >= 0.95
        await workload.read(2)
