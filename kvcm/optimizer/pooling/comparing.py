"""Compares routers and topologies on one trace."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.pooling.engines import COUNTS, Cluster, replay_engines
from kvcm.optimizer.pooling.homes import homes_of
from kvcm.optimizer.pooling.outcome import PoolingRow, PoolingStudy, Topology
from kvcm.optimizer.pooling.router import DEFAULT_ROUTERS, Router
from kvcm.optimizer.results import Hits
from kvcm.optimizer.trace import Trace

__all__ = ["Engines", "compare_pooling"]

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
