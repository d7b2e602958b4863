"""What eviction takes first: hot prefixes under a flood, and victims against orders that are known.

The orders are written down here once more, from what the writer and the reader know of every chain, so that a defect of
a policy cannot hide in its own definition. A store that keeps times in whole seconds is held to whole seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from capacity_site import CapacitySite, GroupShape, fresh_chains, sites
from report import Row

__all__ = ["FULL_FLOOD", "FULL_ORDER", "QUICK_FLOOD", "QUICK_ORDER", "FloodPlan", "OrderPlan", "hot_prefix", "order"]

_DRAIN_SECONDS = 1.5  # until reads are in the order
_FOLLOW_SECONDS = 1.5  # until a manager keeps the order of a new instance; it knows earlier blocks to the second
_PREFIX = 64

# ---- a hot prefix under a flood -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FloodPlan:
    """A flood of blocks that are never read.

    Attributes:
        cache_blocks: capacity of each group.
        times: blocks of the flood, in caches.
        turnover_seconds: that the flood takes to fill the cache once, at least. The prefix is read once a second, a
            read is in the order within a second, and a store keeps whole seconds.
    """

    cache_blocks: int
    times: int
    turnover_seconds: float


FULL_FLOOD = FloodPlan(2000, 20, 4.0)
QUICK_FLOOD = FloodPlan(1000, 3, 4.0)
_LEFT = {"lru": 1.0, "leaf_lru": 1.0, "lfu": 1.0, "sieve": 1.0, "s3fifo": 1.0, "fifo": 0.0}
"""What has to be left of the prefix; fifo shows that the flood is one."""
_FLOODED = {"rocksdb": tuple(_LEFT), "redis": ("leaf_lru", "fifo")}
_CHAIN = 64


async def hot_prefix(stores: Sequence[str], plan: FloodPlan) -> list[Row]:
    """Read a prefix once a second while the cache is flooded; count the rest of it."""
    async with sites(*stores) as found:
        tasks = [_flooded(site, policy, plan) for site in found for policy in _FLOODED[site.store]]
        return list(await asyncio.gather(*tasks))


async def _flooded(site: CapacitySite, policy: str, plan: FloodPlan) -> Row:
    await site.create(GroupShape(policy, plan.cache_blocks, mark=0.9, policy=policy))
    (prefix,) = fresh_chains(_PREFIX, _PREFIX, seed=1)
    await site.write(policy, prefix)
    reading = asyncio.create_task(_read_each_second(site, policy, prefix))
    begin = time.monotonic()
    await _flood(site, policy, plan)
    seconds = time.monotonic() - begin
    reading.cancel()
    left = await site.read(policy, prefix, peek=True) / _PREFIX
    case = f"{site.store}, prefix read every second, flood of {plan.times} caches in {seconds:.0f} s"
    wanted = _LEFT[policy]
    return Row(case, f"share of the prefix left, {policy}", left, "", target=f"= {wanted:g}", ok=left == wanted)


def _seconds(plan: FloodPlan) -> float:
    return plan.times * plan.turnover_seconds


async def _read_each_second(site: CapacitySite, instance: str, keys: Sequence[int]) -> None:
    while True:
        await site.read(instance, keys)
        await asyncio.sleep(1.0)


async def _flood(site: CapacitySite, instance: str, plan: FloodPlan) -> None:
    """Write chains at an even pace. A refused write is repeated a moment later, and a late one is not
    made up for: that would be another pace."""
    blocks = plan.times * plan.cache_blocks
    due = time.monotonic()
    for keys in fresh_chains(blocks, _CHAIN, seed=2):
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic()) + _CHAIN / blocks * _seconds(plan)
        while keys:
            written = await site.write(instance, keys)
            keys = keys[written.blocks :]
            await asyncio.sleep(0.01 if written.is_refused else 0)


# ---- victims against known orders -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderPlan:
    """The blocks written and read before a tenth is evicted.

    Attributes:
        chains: of `chain` blocks each.
        chain: blocks.
        write_seconds: over which they are written.
        reads: of chains, skewed.
        read_seconds: over which they are read.
    """

    chains: int
    chain: int
    write_seconds: float
    reads: int
    read_seconds: float

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.chains * self.chain


FULL_ORDER = OrderPlan(1000, 10, 25.0, 2000, 12.0)
QUICK_ORDER = OrderPlan(100, 20, 5.0, 200, 2.0)


@dataclass(slots=True)
class Chain:
    """A chain as its writer and its reader know it.

    Attributes:
        keys: from the head to the tail.
        written: unix seconds.
        last: of its last read, or of the write.
        latency: seconds that this may have been earlier: the answer came by then.
        reads: how many.
    """

    keys: list[int]
    written: float
    last: float
    latency: float
    reads: int = 0

    def earliest(self) -> Chain:
        """Return it with the earliest times that the manager can know."""
        return replace(self, written=self.written - self.latency, last=self.last - self.latency)


Rank = Callable[[Chain], tuple[float, ...]]

_RANKS: dict[str, Rank] = {
    "lru": lambda chain: (chain.last,),
    "leaf_lru": lambda chain: (chain.last,),
    "fifo": lambda chain: (chain.written,),
    "lfu": lambda chain: (chain.reads, chain.last),
    "sieve": lambda chain: (chain.reads > 0, chain.written),
    "s3fifo": lambda chain: (chain.reads > 1, chain.written),
}
"""The smaller number leaves first; of one chain, the tail before the head."""
_EXACT = ("lru", "fifo")
_LEAST = {"rocksdb": 1.0, "redis": 0.95}


async def order(stores: Sequence[str], plan: OrderPlan) -> list[Row]:
    """Evict a tenth of the blocks, and compare the victims with the coldest tenth."""
    async with sites(*stores) as found:
        rows = await asyncio.gather(*(_ordered(site, plan) for site in found))
    return [row for each in rows for row in each]


async def _ordered(site: CapacitySite, plan: OrderPlan) -> list[Row]:
    chains = dict(zip(_RANKS, await asyncio.gather(*(_used(site, policy, plan) for policy in _RANKS)), strict=True))
    await asyncio.sleep(_DRAIN_SECONDS)
    wanted = plan.blocks // 10
    for policy in _RANKS:  # one block more, since a watermark keeps one block below the limit
        shape = GroupShape(policy, plan.blocks - wanted + 1, mark=1.0, hysteresis=0.0, policy=policy)
        await site.change(shape)
    await site.settle()
    evicted = site.evicted()
    return [row for policy in _RANKS for row in _order_rows(site.store, policy, chains[policy], evicted[policy])]


async def _used(site: CapacitySite, policy: str, plan: OrderPlan) -> list[Chain]:
    """Write chains at an even pace, then read some again and again."""
    await site.create(GroupShape(policy, 2 * plan.blocks, mark=1.0, hysteresis=0.0, policy=policy))
    await asyncio.sleep(_FOLLOW_SECONDS)
    source = random.Random(policy)
    begin, chains = time.monotonic(), []
    for number, keys in enumerate(fresh_chains(plan.blocks, plan.chain, seed=source.getrandbits(32))):
        await asyncio.sleep(max(0.0, begin + number / plan.chains * plan.write_seconds - time.monotonic()))
        sent = time.time()
        await site.write(policy, keys)
        answered = time.time()
        chains.append(Chain(keys, answered, answered, answered - sent))
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(chains) + 1)))
    favourites = source.sample(chains, len(chains))
    begin = time.monotonic()
    for number, chain in enumerate(source.choices(favourites, cum_weights=weights, k=plan.reads)):
        await asyncio.sleep(max(0.0, begin + number / plan.reads * plan.read_seconds - time.monotonic()))
        assert await site.read(policy, chain.keys) == len(chain.keys)
        chain.last, chain.reads = time.time(), chain.reads + 1
    return chains


def _order_rows(store: str, policy: str, chains: Sequence[Chain], evicted: Sequence[int]) -> list[Row]:
    rank = _in_seconds(_RANKS[policy]) if store == "redis" else _RANKS[policy]
    earliest = (lambda chain: rank(chain.earliest())) if store == "redis" else rank  # the second may have ended between
    ordered = [(chain, key) for chain in sorted(chains, key=rank) for key in reversed(chain.keys)]
    wanted = len(ordered) // 10
    coldest, warmest = ordered[:wanted], rank(ordered[wanted - 1][0])
    chain_of = {key: chain for chain, key in ordered}
    share = sum(earliest(chain_of[key]) <= warmest for key in evicted) / max(1, len(evicted))
    case, least = f"{store}, a tenth of {len(ordered):,} blocks evicted", _LEAST[store]
    count = len(evicted)
    rows = [
        Row(case, f"blocks evicted, {policy}", count, "", target=f"= {wanted}", ok=count == wanted),
        Row(case, f"share among the coldest tenth, {policy}", share, "", target=f">= {least:g}", ok=share >= least),
    ]
    if store == "rocksdb" and policy in _EXACT:
        same = sum(key == known for key, (_, known) in zip(evicted, coldest, strict=False)) / wanted
        rows.append(Row(case, f"share in its exact place, {policy}", same, "", target="= 1", ok=same == 1))
    return rows


def _in_seconds(rank: Rank) -> Rank:
    return lambda chain: tuple(int(part) for part in rank(chain))
