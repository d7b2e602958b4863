"""Engines and a pool as plain Python behind the gateway's own router: what the replay is compared with."""

from __future__ import annotations

from collections import Counter, OrderedDict

from fake_clock import FakeClock

from kvcm.gateway.engine_client import EngineClient, EngineTimeouts
from kvcm.gateway.engines import Engine, Flight, HealthRules
from kvcm.gateway.metrics import GatewayMetrics
from kvcm.gateway.openai_api import RequestFacts
from kvcm.gateway.policies import REGISTRY, ConsistentHash, Prompt
from kvcm.gateway.routing import Router, Studied
from kvcm.gateway.scoring import EngineScore
from kvcm.gateway.settings import EngineAddress
from kvcm.optimizer.pooling import Engines, Routing, affinities_of
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
    """One policy of a gateway over one topology."""

    def __init__(self, engines: Engines, routing: Routing, local_blocks: int, pool_blocks: int) -> None:
        self.engines, self.routing = engines, routing
        self.caches = [Cache(local_blocks) for _ in range(engines.count)]
        self.pool = Cache(pool_blocks)
        self.clock = FakeClock()
        self.begin = self.clock.now()
        self.fleet = [
            Engine(EngineAddress(f"http://{name}"), HealthRules(), self.clock, lambda: 0.5, lambda: None)
            for name in engines.names
        ]
        rate = engines.throughput_tokens_per_second
        self.policy = REGISTRY[routing.name](rate, routing.load_factor)
        self.flights: list[tuple[float, float, Flight]] = []  # when its prompt is computed, and when its answer is done
        self.idle_at = [0.0] * engines.count
        self.readers: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self.routed = [[0, 0, 0] for _ in range(engines.count)]
        self.chosen: list[int] = []
        self.waits: list[float] = []
        self.duplicates: list[int] = []

    def replay(self, trace: Trace) -> None:
        # Of its parts only the choice is asked, which calls neither engines nor a manager.
        self.router = Router(
            self.policy,
            EngineClient(EngineTimeouts()),
            None,
            GatewayMetrics(self.routing.name, self.fleet, lambda: 0),
            tokens_per_second=self.engines.throughput_tokens_per_second,
        )
        affinities = affinities_of(trace, self.routing.prefix_tokens)
        for request in range(len(trace)):
            self._advance(float(trace.times_us[request]) / 1e6)
            blocks = trace.request_blocks(request).tolist()
            reads = int(trace.read_blocks[request])
            if reads:
                self._read(trace, request, blocks, affinities[request])
            else:
                read_before = [self.readers[block] for block in blocks if block in self.readers]
                engine = read_before[-1] if read_before else self._by_hash(affinities[request])
                self._serve(engine, blocks, trace, request)
            self.duplicates.append(self._copies())

    def _advance(self, now: float) -> None:
        self.clock.time = max(self.clock.time, self.begin + now)
        running = []
        for computed_at, done_at, flight in self.flights:
            if computed_at <= now:
                flight.begin_answer()
            if done_at <= now:
                flight.end()
            else:
                running.append((computed_at, done_at, flight))
        self.flights = running

    def _by_hash(self, affinity: bytes) -> int:
        name = ConsistentHash().choose(Prompt(affinity), [each.load for each in self.fleet])
        return self.engines.names.index(name)

    def _read(self, trace: Trace, request: int, blocks: list[int], affinity: bytes) -> None:
        prompt, answer = int(trace.input_tokens[request]), int(trace.output_tokens[request])
        reads = int(trace.read_blocks[request])
        facts = RequestFacts(affinity, is_streamed=True, estimated_tokens=0, fields={}, path="")
        scores = None
        if self.routing.name == "kvcm":
            scores = {
                name: self._score(cache, blocks[:reads], prompt, trace.block_tokens)
                for name, cache in zip(self.engines.names, self.caches, strict=True)
            }
        choice = self.router.choose(Studied(facts, prompt, scores), self.fleet)
        engine = self.fleet.index(choice.engine)
        self.chosen.append(engine)
        own, loaded = self._serve(engine, blocks, trace, request)
        computed = prompt - own - loaded
        if scores is not None:
            assert choice.flight.tokens == computed
        now = self.clock.now() - self.begin
        begin = max(now, self.idle_at[engine])
        computed_at = begin + self._load_seconds(loaded) + computed / self.engines.throughput_tokens_per_second
        self.idle_at[engine] = computed_at
        done_at = computed_at + answer * self.engines.seconds_per_output_token
        self.flights.append((computed_at, done_at, choice.flight))
        self.waits.append(begin - now)
        for place, amount in enumerate((1, prompt, computed)):
            self.routed[engine][place] += amount

    def _load_seconds(self, tokens: int) -> float:
        engines = self.engines
        latency = engines.load_latency_seconds if tokens else 0.0
        return latency + tokens * engines.kv_bytes_per_token / engines.load_bytes_per_second

    def _score(self, cache: Cache, blocks: list[int], prompt: int, block_tokens: int) -> EngineScore:
        """Return what the manager would say (docs/residency.md, Scores), worked out without it."""
        own = next((at for at, block in enumerate(blocks) if block not in cache.blocks), len(blocks))
        held = [block in cache.blocks or block in self.pool.blocks for block in blocks]
        joint = held.index(False) if False in held else len(held)
        own_tokens, joint_tokens = min(prompt, own * block_tokens), min(prompt, joint * block_tokens)
        engines = self.engines
        per_token = 1 / engines.throughput_tokens_per_second
        load = engines.kv_bytes_per_token / engines.load_bytes_per_second
        saved = max(own_tokens * per_token, joint_tokens * per_token - (joint_tokens - own_tokens) * load)
        return EngineScore(saved, gpu_tokens=own_tokens, loadable_tokens=joint_tokens)

    def _serve(self, engine: int, blocks: list[int], trace: Trace, request: int) -> tuple[int, int]:
        size, prompt = trace.block_tokens, int(trace.input_tokens[request])
        reads, writes = int(trace.read_blocks[request]), bool(trace.writes[request])
        cache, found, is_prefix, tokens = self.caches[engine], 0, True, [0, 0]
        for place, block in enumerate(blocks[:reads]):
            is_local, is_pooled = block in cache.blocks, block in self.pool.blocks
            is_prefix = is_prefix and (is_local or is_pooled)
            self.counts["object_blocks"] += is_local or is_pooled
            self.readers[block] = engine
            if is_prefix:
                found += 1
                tokens[0 if is_local else 1] += max(0, min(size, prompt - place * size))
                self.counts["local_hit_blocks" if is_local else "pool_hit_blocks"] += 1
        for block in reversed(blocks if writes else blocks[:found]):
            cache.access(block, inserts=writes)
            self.pool.access(block, inserts=writes)
        self.counts["local_hit_tokens"] += tokens[0]
        self.counts["pool_hit_tokens"] += tokens[1]
        self.counts["full_requests"] += reads > 0 and found == reads
        return tokens[0], tokens[1]

    def _copies(self) -> int:
        held = [block for cache in self.caches for block in cache.blocks]
        return len(held) - len(set(held))
