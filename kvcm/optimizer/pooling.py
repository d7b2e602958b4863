"""N engines with caches of their own against one pool that all of them share."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.results import Hits
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column, Totals, Trace

__all__ = [
    "COUNTS",
    "DEFAULT_ROUTERS",
    "Cluster",
    "Engines",
    "PoolingRow",
    "PoolingStudy",
    "Router",
    "Topology",
    "compare_pooling",
    "homes_of",
    "keys_of",
    "replay_engines",
]

# The replay of engines behind a router, compiled.
#
# Bit e of `present[b]` says whether the local cache of engine e holds block b. Every cache is a ring of blocks from
# the oldest to the newest that begins and ends at U: a row of `older` and `newer` for each engine, and one more for
# the pool. The kernel is one long function: split up, its parts hand a dozen arrays to one another for every block,
# each with atomic counts of references, and the replay takes many times as long.

COUNTS = (
    "local_hit_blocks",
    "pool_hit_blocks",
    "local_hit_tokens",
    "pool_hit_tokens",
    "object_blocks",
    "full_requests",
    "migrations",
    "duplicates_summed",
    "most_duplicate_blocks",
)
_BLOCKS, _TOKENS, _OBJECTS, _FULL, _MIGRATIONS, _DUPLICATES, _MOST = 0, 2, 4, 5, 6, 7, 8


class Cluster(NamedTuple):
    """Engines, caches and how requests are spread, as numbers.

    Attributes:
        local_blocks, pool_blocks: capacities; 0 means that there is none.
        by_load: whether the least loaded engine is taken.
        by_prefix: whether only those are considered whose caches hold the longest prefix.
        migrates: whether the least loaded engine is taken when the one found is overloaded.
        least_match: share of a request's blocks from which on a prefix counts.
        tokens_per_us: prefill of an engine.
        overload_factor: times the mean of outstanding tokens, and
        overload_tokens: outstanding tokens above which an engine is overloaded.
    """

    local_blocks: int
    pool_blocks: int
    by_load: bool
    by_prefix: bool
    migrates: bool
    least_match: float
    tokens_per_us: float
    overload_factor: float
    overload_tokens: float


@compiled
def replay_engines(  # noqa: C901 - one loop over all blocks, see above
    times_us: Int64Column,
    blocks: Int32Column,
    offsets: Int64Column,
    read_blocks: Int32Column,
    writes: BoolColumn,
    input_tokens: Int64Column,
    block_tokens: Int64Column,
    homes: Int32Column,
    unique_blocks: int,
    cluster: Cluster,
    counts: Int64Column,
    engine_counts: Int64Column,
) -> tuple[float, float]:
    """Replay R requests on E engines and return the sum and the maximum of what they find outstanding, in tokens.

    Args:
        times_us, blocks, offsets, read_blocks, writes, input_tokens: of the trace.
        block_tokens: [R] tokens per block of each request.
        homes: [R] engine each request belongs to; among equally loaded ones the first from there on is taken.
        unique_blocks: U.
        cluster: what it runs on.
        counts: [len(COUNTS)] counted here.
        engine_counts: [3, E] requests, tokens of their prompts and tokens computed, counted here.
    """
    engines = engine_counts.shape[1]
    has_local, has_pool = cluster.local_blocks > 0, cluster.pool_blocks > 0
    end = unique_blocks
    older = np.empty((engines + 1, end + 1), np.int32)
    newer = np.empty((engines + 1, end + 1), np.int32)
    older[:, end] = newer[:, end] = end
    sizes = np.zeros(engines + 1, np.int64)
    present, in_pool = np.zeros(unique_blocks, np.int64), np.zeros(unique_blocks, np.bool_)
    outstanding = np.zeros(engines)
    duplicates, now = 0, times_us[0] if times_us.size else 0
    waits, longest_wait = 0.0, 0.0
    for request in range(writes.size):
        begin, count = offsets[request], offsets[request + 1] - offsets[request]
        reads, size, prompt = read_blocks[request], block_tokens[request], input_tokens[request]

        drained = max(0, times_us[request] - now) * cluster.tokens_per_us
        now = max(now, times_us[request])
        total = 0.0
        for each in range(engines):
            outstanding[each] = max(0.0, outstanding[each] - drained)
            total += outstanding[each]

        candidates, length, matched = np.int64(-1), reads if reads > 0 else count, 0
        while cluster.by_prefix and matched < length and candidates & present[blocks[begin + matched]]:
            candidates &= present[blocks[begin + matched]]
            matched += 1
        if matched < cluster.least_match * length:
            candidates = np.int64(-1)
        engine = homes[request]
        least, chosen = engine, -1
        for step in range(engines):
            each = (homes[request] + step) % engines
            if outstanding[each] < outstanding[least]:
                least = each
            if (candidates >> each) & 1 and (chosen < 0 or outstanding[each] < outstanding[chosen]):
                chosen = each
        if cluster.by_load or cluster.by_prefix:
            engine = chosen
        if (
            cluster.migrates
            and outstanding[engine] > cluster.overload_tokens
            and outstanding[engine] * engines > cluster.overload_factor * total
        ):
            engine = least
            counts[_MIGRATIONS] += 1

        prefix, prefix_tokens, is_prefix = 0, 0, True
        for place in range(count if writes[request] else reads):
            block = blocks[begin + place]
            is_local = (present[block] >> engine) & 1
            is_pooled = in_pool[block]
            if place < reads:
                is_prefix &= is_local or is_pooled
                counts[_OBJECTS] += is_local or is_pooled
                if is_prefix:
                    source = 0 if is_local else 1
                    tokens = min((place + 1) * size, prompt) - min(place * size, prompt)
                    prefix += 1
                    prefix_tokens += tokens
                    counts[_BLOCKS + source] += 1
                    counts[_TOKENS + source] += tokens
            if not (writes[request] or is_prefix):
                continue
            for cache in range(engine, engines + 1, max(1, engines - engine)):
                is_here = is_local if cache < engines else is_pooled
                if not (has_local if cache < engines else has_pool) or not (is_here or writes[request]):
                    continue
                if is_here:
                    before, after = older[cache, block], newer[cache, block]
                    newer[cache, before] = after
                    older[cache, after] = before
                else:
                    if sizes[cache] == (cluster.local_blocks if cache < engines else cluster.pool_blocks):
                        victim = newer[cache, end]
                        after = newer[cache, victim]
                        newer[cache, end] = after
                        older[cache, after] = end
                        if cache < engines:
                            present[victim] &= ~(np.int64(1) << cache)
                            duplicates -= present[victim] != 0
                        else:
                            in_pool[victim] = False
                    else:
                        sizes[cache] += 1
                    if cache < engines:
                        duplicates += present[block] != 0
                        present[block] |= np.int64(1) << cache
                    else:
                        in_pool[block] = True
                before = older[cache, end]
                older[cache, block], newer[cache, block] = before, end
                newer[cache, before] = older[cache, end] = block

        counts[_DUPLICATES] += duplicates
        counts[_MOST] = max(counts[_MOST], duplicates)
        if reads > 0:
            counts[_FULL] += prefix == reads
            waits += outstanding[engine]
            longest_wait = max(longest_wait, outstanding[engine])
            outstanding[engine] += prompt - prefix_tokens
            engine_counts[0, engine] += 1
            engine_counts[1, engine] += prompt
            engine_counts[2, engine] += prompt - prefix_tokens
    return waits, longest_wait


# How requests are spread over engines, such as `affinity` or `longest_prefix+migration`.

_ROUTER_NAMES = ("random", "least_loaded", "affinity", "longest_prefix")
_WITH_MIGRATION = ("affinity", "longest_prefix")


@dataclass(frozen=True, slots=True)
class Router:
    """Which engine a request goes to.

    Attributes:
        name: one of `_ROUTER_NAMES`: by chance; to the engine with the least outstanding prefill; by a consistent hash
            of the session (of the first blocks where the trace names none); to the engine whose local cache holds the
            longest prefix, the least loaded of several or of all if that is short.
        migrates: whether a request goes to the least loaded engine instead when its own is overloaded.

    Raises:
        OptionError: there is no such router.
    """

    name: str
    migrates: bool = False

    def __post_init__(self) -> None:
        if self.name not in _ROUTER_NAMES:
            raise OptionError(f"routers: {self.name!r} is no router; allowed: {', '.join(_ROUTER_NAMES)}")
        if self.migrates and self.name not in _WITH_MIGRATION:
            raise OptionError(f"routers: {self.name} never migrates; allowed: {', '.join(_WITH_MIGRATION)}")

    @property
    def label(self) -> str:
        """Return what people call it."""
        return self.name + ("+migration" if self.migrates else "")


DEFAULT_ROUTERS = (
    Router("random"),
    Router("least_loaded"),
    Router("affinity"),
    Router("affinity", migrates=True),
    Router("longest_prefix"),
    Router("longest_prefix", migrates=True),
)

# Which engine a request belongs to before anybody looks at loads: by chance, or by a consistent hash.

Words = npt.NDArray[np.uint64]
_DEEPEST = 64


def homes_of(trace: Trace, router: Router, engines: int, *, affinity_blocks: int | None, seed: int) -> Int32Column:
    """Return [R] an engine for each request.

    With `affinity` it is that of the request's session; where the trace names none, that of its first
    `affinity_blocks` blocks. If that is None, they are so many that no engine gets more than its share of the requests
    for one prefix's sake, up to 64: where all begin with one system prompt, its blocks keep nothing apart. Engines are
    found by rendezvous hashing: one engine more takes over its share of the sessions, and no session moves between the
    others. With other routers, and for requests without blocks, the engine is drawn.
    """
    drawn = _mixed(np.arange(len(trace), dtype=np.uint64) ^ _mixed(np.full(1, seed, np.uint64)))
    chance = (drawn % np.uint64(engines)).astype(np.int32)
    if router.name != "affinity":
        return chance
    has_key = (trace.sessions >= 0) | (np.diff(trace.offsets) > 0)
    depth = affinity_blocks or _depth_that_spreads(trace, engines)
    homes: Int32Column = np.where(has_key, _rendezvous(keys_of(trace, depth), engines, seed), chance)
    return homes


def _depth_that_spreads(trace: Trace, engines: int) -> int:
    for depth in range(1, _DEEPEST):
        by_prefix = keys_of(trace, depth)[(trace.sessions < 0) & (np.diff(trace.offsets) > 0)]
        if np.unique(by_prefix, return_counts=True)[1].max(initial=0) * engines <= len(by_prefix):
            return depth
    return _DEEPEST


def keys_of(trace: Trace, affinity_blocks: int) -> Words:
    """Return [R] what stays together: odd numbers are sessions, even ones are blocks, which name whole prefixes."""
    counts = np.diff(trace.offsets)
    last = trace.offsets[:-1] + np.minimum(counts, affinity_blocks) - 1
    blocks = np.zeros(len(trace), np.int64)
    blocks[counts > 0] = trace.blocks[last[counts > 0]]
    return np.where(trace.sessions >= 0, trace.sessions * np.int64(2) + 1, blocks * 2).astype(np.uint64)


def _rendezvous(keys: Words, engines: int, seed: int) -> Int32Column:
    best, homes = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.int32)
    hashed = _mixed(keys)
    for engine in range(engines):
        score = _mixed(hashed ^ _mixed(np.full(1, engine * 2**32 + seed, np.uint64)))
        wins = score > best
        best[wins], homes[wins] = score[wins], engine
    return homes


def _mixed(words: Words) -> Words:
    """Return words spread over all of 64 bits (splitmix64, Steele, Lea and Flood 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# What N engines with caches of their own gave, against one pool that they share.


class Topology(StrEnum):
    """Where blocks are kept."""

    LOCAL = "local"
    POOL = "pool"
    BOTH = "local+pool"


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRow:
    """One router over one topology; E engines.

    Attributes:
        router: that spread the requests.
        topology: where blocks are kept.
        local_blocks: capacity of each engine's own cache, 0 if it has none.
        pool_blocks: capacity of the pool, 0 if there is none.
        hits: of local caches and pool together.
        local_hit_blocks: prefix hits in the engine's own cache.
        pool_hit_blocks: prefix hits that only the pool had.
        local_hit_tokens, pool_hit_tokens: the same in tokens.
        totals: that hits are relative to.
        routed_requests: [E] requests of each engine that read.
        routed_tokens: [E] tokens of their prompts.
        prefill_tokens: [E] of them, those that had to be computed.
        migrations: requests that went elsewhere because their engine was overloaded.
        mean_wait_seconds: outstanding prefill of the chosen engine at the arrival of a request.
        longest_wait_seconds: the longest of these.
        mean_duplicate_blocks: copies of a block in local caches besides the first, on average over the requests.
        most_duplicate_blocks: the largest number of them.
        block_bytes: of each block.
        seconds: the replay took.
        accesses: that were replayed.
    """

    router: Router
    topology: Topology
    local_blocks: int
    pool_blocks: int
    hits: Hits
    local_hit_blocks: int
    pool_hit_blocks: int
    local_hit_tokens: int
    pool_hit_tokens: int
    totals: Totals
    routed_requests: Int64Column
    routed_tokens: Int64Column
    prefill_tokens: Int64Column
    migrations: int
    mean_wait_seconds: float
    longest_wait_seconds: float
    mean_duplicate_blocks: float
    most_duplicate_blocks: int
    block_bytes: int
    seconds: float
    accesses: int

    @property
    def block_hit_rate(self) -> float:
        """Return prefix hits per block read."""
        return self.hits.block_rate(self.totals)

    @property
    def token_hit_rate(self) -> float:
        """Return tokens of prefix hits per token of the prompts."""
        return self.hits.token_rate(self.totals)

    @property
    def imbalance(self) -> float:
        """Return the tokens computed by the busiest engine per token computed by the average one, 1 being even."""
        total = int(self.prefill_tokens.sum())
        return float(self.prefill_tokens.max()) * len(self.prefill_tokens) / total if total else 1.0

    @property
    def mean_duplicate_bytes(self) -> float:
        """Return the capacity that copies of a block besides the first take up."""
        return self.mean_duplicate_blocks * self.block_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PoolingStudy:
    """Every router over every topology.

    Attributes:
        engines: E.
        rows: in the order in which routers and topologies were asked for.
    """

    engines: int
    rows: tuple[PoolingRow, ...]


# Compares routers and topologies on one trace.

_MOST_ENGINES = 64


@dataclass(frozen=True, slots=True)
class Engines:
    """A cluster of equal engines.

    Attributes:
        count: 1 to 64.
        local_blocks: of each engine's own cache.
        throughput_tokens_per_second: prefill of one engine.
        pool_blocks: of the shared pool; as much as all local caches together if None.
        overload_factor: an engine is overloaded when it has more outstanding prefill than so many times the mean (its
            own included, so it is to be smaller than the number of engines)
        overload_seconds: and than it computes in so many seconds.
        least_match: share of a request's blocks that an engine must hold for `longest_prefix` to follow them; a system
            prompt that all requests begin with would lead all of them to one engine.
        affinity_blocks: first blocks that keep requests together where the trace names no sessions; as many as spread
            them if None (`homes_of`).
        seed: of random routing and of the hash.

    Raises:
        OptionError: a number is out of its range.
    """

    count: int
    local_blocks: int
    throughput_tokens_per_second: float
    pool_blocks: int | None = None
    overload_factor: float = 1.5
    overload_seconds: float = 1.0
    least_match: float = 0.1
    affinity_blocks: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        most = 1 << 31
        ranges: tuple[tuple[str, float, bool, str], ...] = (
            ("engines", self.count, 1 <= self.count <= _MOST_ENGINES, f"1 to {_MOST_ENGINES}"),
            ("local_blocks", self.local_blocks, 1 <= self.local_blocks < most, "1 to 2^31 - 1"),
            ("pool_blocks", self.shared_blocks, 1 <= self.shared_blocks < most * _MOST_ENGINES, "1 to 2^37 - 1"),
            ("throughput", self.throughput_tokens_per_second, 0 < self.throughput_tokens_per_second < 1e15, "above 0"),
            ("overload_factor", self.overload_factor, 1 <= self.overload_factor < math.inf, "1 or more"),
            ("overload_seconds", self.overload_seconds, 0 <= self.overload_seconds < math.inf, "0 or more"),
            ("least_match", self.least_match, 0 <= self.least_match <= 1, "0 to 1"),
            ("affinity_blocks", self.affinity_blocks or 0, self._has_depth, "1 to 2^31 - 1, or none"),
            ("seed", self.seed, 0 <= self.seed < 1 << 32, "0 to 2^32 - 1"),
        )
        for field, value, is_right, allowed in ranges:
            if not is_right:
                raise OptionError(f"pooling: {field} is {value}; allowed: {allowed}")

    @property
    def _has_depth(self) -> bool:
        return self.affinity_blocks is None or 1 <= self.affinity_blocks < 1 << 31

    @property
    def shared_blocks(self) -> int:
        """Return the capacity of the pool."""
        return self.count * self.local_blocks if self.pool_blocks is None else self.pool_blocks


def compare_pooling(
    trace: Trace,
    engines: Engines,
    *,
    routers: Sequence[Router] = DEFAULT_ROUTERS,
    topologies: Sequence[Topology] = tuple(Topology),
    kv_bytes_per_token: int = 70_272,
    workers: int | None = None,
) -> PoolingStudy:
    """Replay a trace on engines with caches of their own, on a shared pool, and on both.

    All caches are LRU, in mode block (optimizer.md). What an engine computes goes to its own cache and to the pool;
    what it loads from the pool goes to its own cache as well; the pool sees every request, so what it holds does not
    depend on routers. A request that does not write touches its prefix and inserts nothing. An engine is loaded by the
    prefill that it was given and has not computed yet, at a constant throughput. Each thread needs up to 8 bytes for
    every engine and unique block.

    Args:
        trace: that only reads prefixes; its instances share engines and pool.
        engines: what it runs on.
        routers: that are compared.
        topologies: that each of them is tried with.
        kv_bytes_per_token: of a token in all layers.
        workers: threads; as many as cores if None.

    Raises:
        OptionError: a number is out of its range, or nothing is to be compared.
        TraceError: requests read otherwise than a prefix, or leave something out.
    """
    if not trace.is_plain:
        raise TraceError(f"{trace.name}: has requests that do not read plain prefixes; pooling replays no others")
    if not routers or not topologies:
        raise OptionError("pooling: there is nothing to compare; allowed: one router and one topology or more")
    if not 0 < kv_bytes_per_token < 1 << 40:
        raise OptionError(f"kv_bytes_per_token is {kv_bytes_per_token}; allowed: 1 to 2^40 - 1")
    block_bytes = kv_bytes_per_token * (trace.block_tokens or max(trace.instance_block_tokens, default=1))
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        rows = pool.map(lambda pair: _row(trace, engines, pair[0], pair[1], block_bytes), product(routers, topologies))
        return PoolingStudy(engines.count, tuple(rows))


def _row(trace: Trace, engines: Engines, router: Router, topology: Topology, block_bytes: int) -> PoolingRow:
    cluster = _cluster(engines, router, topology)
    homes = homes_of(trace, router, engines.count, affinity_blocks=engines.affinity_blocks, seed=engines.seed)
    counts, engine_counts = np.zeros(len(COUNTS), np.int64), np.zeros((3, engines.count), np.int64)
    started = time.perf_counter()
    waits, longest_wait = replay_engines(
        trace.times_us,
        trace.blocks,
        trace.offsets,
        trace.read_blocks,
        trace.writes,
        trace.input_tokens,
        trace.tokens_per_block(),
        homes,
        trace.unique_blocks,
        cluster,
        counts,
        engine_counts,
    )
    seconds = time.perf_counter() - started
    counted = dict(zip(COUNTS, counts.tolist(), strict=True))
    totals = trace.totals
    return PoolingRow(
        router=router,
        topology=topology,
        local_blocks=cluster.local_blocks,
        pool_blocks=cluster.pool_blocks,
        hits=Hits(
            counted["local_hit_blocks"] + counted["pool_hit_blocks"],
            counted["local_hit_tokens"] + counted["pool_hit_tokens"],
            counted.pop("object_blocks"),
            counted.pop("full_requests"),
        ),
        totals=totals,
        routed_requests=engine_counts[0],
        routed_tokens=engine_counts[1],
        prefill_tokens=engine_counts[2],
        mean_wait_seconds=waits / engines.throughput_tokens_per_second / max(1, totals.requests),
        longest_wait_seconds=longest_wait / engines.throughput_tokens_per_second,
        mean_duplicate_blocks=counted.pop("duplicates_summed") / max(1, len(trace)),
        block_bytes=block_bytes,
        seconds=seconds,
        accesses=trace.accesses,
        **counted,
    )


def _cluster(engines: Engines, router: Router, topology: Topology) -> Cluster:
    return Cluster(
        local_blocks=0 if topology is Topology.POOL else engines.local_blocks,
        pool_blocks=0 if topology is Topology.LOCAL else engines.shared_blocks,
        by_load=router.name == "least_loaded",
        by_prefix=router.name == "longest_prefix",
        migrates=router.migrates,
        least_match=engines.least_match,
        tokens_per_us=engines.throughput_tokens_per_second / 1e6,
        overload_factor=engines.overload_factor,
        overload_tokens=engines.overload_seconds * engines.throughput_tokens_per_second,
    )
