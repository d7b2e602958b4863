"""Engines, their caches, a pool and a router as plain Python: what the compiled replay is compared with."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from kvcm.optimizer.pooling import Engines, Router
from kvcm.optimizer.trace import Trace


class Cache:
    """An LRU cache; one of capacity 0 holds nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def access(self, block: int, *, inserts: bool) -> None:
        if block in self.blocks:
            self.blocks.move_to_end(block)
        elif inserts and self.capacity:
            if len(self.blocks) == self.capacity:
                self.blocks.popitem(last=False)
            self.blocks[block] = None


class PoolingModel:
    """One router over one topology."""

    def __init__(self, engines: Engines, router: Router, homes: Sequence[int], local_blocks: int, pool_blocks: int):
        self.engines, self.router, self.homes = engines, router, homes
        self.caches = [Cache(local_blocks) for _ in range(engines.count)]
        self.pool = Cache(pool_blocks)
        self.outstanding = [0.0] * engines.count
        self.counts: Counter[str] = Counter()
        self.routed = [[0, 0, 0] for _ in range(engines.count)]
        self.waits: list[float] = []
        self.duplicates: list[int] = []

    def replay(self, trace: Trace) -> None:
        before = trace.times_us[0]
        for request in range(len(trace)):
            drained = float(trace.times_us[request] - before) * self.engines.throughput_tokens_per_second / 1e6
            before = trace.times_us[request]
            self.outstanding = [max(0.0, each - drained) for each in self.outstanding]
            blocks = trace.request_blocks(request).tolist()
            reads = int(trace.read_blocks[request])
            engine = self._choose(self.homes[request], blocks[: reads or len(blocks)])
            hits = self._serve(engine, blocks, reads, bool(trace.writes[request]), trace, request)
            self.duplicates.append(self._copies())
            if reads:
                prompt = int(trace.input_tokens[request])
                self.waits.append(self.outstanding[engine])
                self.outstanding[engine] += prompt - hits
                for place, amount in enumerate((1, prompt, prompt - hits)):
                    self.routed[engine][place] += amount

    def _choose(self, home: int, blocks: list[int]) -> int:
        in_turn = [(home + step) % self.engines.count for step in range(self.engines.count)]
        chosen, least = home, min(in_turn, key=self.outstanding.__getitem__)
        if self.router.name == "least_loaded":
            chosen = least
        if self.router.name == "longest_prefix":
            lengths = {engine: self._matched(engine, blocks) for engine in in_turn}
            longest = max(lengths.values())
            if longest < self.engines.least_match * len(blocks):
                longest = min(lengths.values())
                lengths = dict.fromkeys(lengths, longest)
            among = [engine for engine in in_turn if lengths[engine] == longest]
            chosen = min(among, key=self.outstanding.__getitem__)
        load, mean = self.outstanding[chosen], sum(self.outstanding) / self.engines.count
        limit = self.engines.overload_seconds * self.engines.throughput_tokens_per_second
        if self.router.migrates and load > limit and load > self.engines.overload_factor * mean and chosen != least:
            self.counts["migrations"] += 1
            return least
        return chosen

    def _matched(self, engine: int, blocks: list[int]) -> int:
        held = self.caches[engine].blocks
        return next((place for place, block in enumerate(blocks) if block not in held), len(blocks))

    def _serve(self, engine: int, blocks: list[int], reads: int, writes: bool, trace: Trace, request: int) -> int:
        size, prompt = trace.block_tokens, int(trace.input_tokens[request])
        cache, is_prefix, prefix, prefix_tokens = self.caches[engine], True, 0, 0
        for place, block in enumerate(blocks):
            is_local, is_pooled = block in cache.blocks, block in self.pool.blocks
            if place < reads:
                is_prefix = is_prefix and (is_local or is_pooled)
                self.counts["object_blocks"] += is_local or is_pooled
                if is_prefix:
                    tokens = max(0, min(size, prompt - place * size))
                    prefix, prefix_tokens = prefix + 1, prefix_tokens + tokens
                    self.counts["local_hit_blocks" if is_local else "pool_hit_blocks"] += 1
                    self.counts["local_hit_tokens" if is_local else "pool_hit_tokens"] += tokens
            if writes or (place < reads and is_prefix):
                cache.access(block, inserts=writes)
                self.pool.access(block, inserts=writes)
        self.counts["full_requests"] += reads > 0 and prefix == reads
        return prefix_tokens

    def _copies(self) -> int:
        held = [block for cache in self.caches for block in cache.blocks]
        return len(held) - len(set(held))
