"""N engines with memory of their own behind a gateway, against one pool that all of them share.

The gateway's own rules place the requests (`kvcm.gateway.policies`), by the manager's own estimates
(`kvcm.residency.scoring`): what is predicted here is what a gateway would do with the loads and blocks of the replay.
"""

from __future__ import annotations

import heapq
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from itertools import product
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcm.gateway.policies import (
    DEFAULT_LOAD_FACTOR,
    DEFAULT_PREFIX_CHARACTERS,
    REGISTRY,
    EngineLoad,
    Prompt,
    rendezvous_weight,
)
from kvcm.optimizer.compiled import compiled
from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.results import Hits
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column, Totals, Trace
from kvcm.residency.block_holders import Prefixes
from kvcm.residency.scoring import Costs, estimate

__all__ = [
    "DEFAULT_ROUTING",
    "Engines",
    "FleetLoad",
    "PoolingRow",
    "PoolingStudy",
    "Routing",
    "Topology",
    "affinities_of",
    "compare_pooling",
    "parse_routing",
]

# Policies as they are asked for: a name of the gateway's, and options behind colons: `consistent_hash:load_factor=0`.

_CHARACTERS_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class Routing:
    """How requests are spread over engines.

    Attributes:
        name: of a policy of the gateway.
        load_factor: bound of loads of `consistent_hash`; 0 for none.
        prefix_tokens: of `consistent_hash`: first tokens of a prompt that keep requests together which name no session.
    """

    name: str
    load_factor: float = DEFAULT_LOAD_FACTOR
    prefix_tokens: int = DEFAULT_PREFIX_CHARACTERS // _CHARACTERS_PER_TOKEN

    @property
    def label(self) -> str:
        """Return the shortest text that parses to this."""
        usual = Routing(self.name)
        parts = [self.name]
        parts += [] if self.load_factor == usual.load_factor else [f"load_factor={self.load_factor:.12g}"]
        parts += [] if self.prefix_tokens == usual.prefix_tokens else [f"prefix_tokens={self.prefix_tokens}"]
        return ":".join(parts)


DEFAULT_ROUTING: Final = tuple(map(Routing, REGISTRY))
"""All policies of the gateway."""


def _load_factor(routing: Routing, value: str) -> Routing:
    factor = float(value)
    if not (factor == 0 or 1 <= factor <= 1000):
        raise ValueError
    return replace(routing, load_factor=factor)


def _prefix_tokens(routing: Routing, value: str) -> Routing:
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 1 << 20):
        raise ValueError
    return replace(routing, prefix_tokens=int(value))


_OPTIONS: Final[Mapping[str, tuple[str, Callable[[Routing, str], Routing]]]] = {
    "load_factor": ("0, or 1 to 1000", _load_factor),
    "prefix_tokens": ("1 to 2^20", _prefix_tokens),
}


def parse_routing(text: str) -> tuple[Routing, ...]:
    """Return the policies of a list with commas, each once; `all` is every one there is.

    Raises:
        OptionError: one of them is none.
    """
    if text.strip() == "all":
        return DEFAULT_ROUTING
    return tuple(dict.fromkeys(_parsed(part.strip()) for part in text.split(",")))


def _parsed(text: str) -> Routing:
    name, *options = text.split(":")
    if name not in REGISTRY:
        near = get_close_matches(name, REGISTRY, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(f"--routing: {name!r} is no policy of the gateway; there are {', '.join(REGISTRY)}{hint}")
    routing = Routing(name)
    for option in options:
        key, _, value = option.partition("=")
        known = _OPTIONS if name == "consistent_hash" else {}
        if key not in known:
            raise OptionError(f"--routing: {name} has no option {option!r}; allowed: {', '.join(known) or 'none'}")
        allowed, change = known[key]
        try:
            routing = change(routing, value)
        except ValueError:
            raise OptionError(f"--routing: {name}:{option} is out of range; allowed: {key}={allowed}") from None
    return routing


# What engines and the pool hold, compiled.
#
# Bit e of `present[b]` says whether the memory of engine e holds block b. Every cache is a ring of blocks from the
# oldest to the newest that begins and ends at U: a row of `older` and `newer` for each engine, and one more for the
# pool. A request touches its blocks from its tail to its head, so that chains are evicted from their ends, as vLLM,
# SGLang and the manager's `leaf_lru` do it. Rejected: functions for single blocks. Numba counts references to every
# array that they get, for each block, which takes many times as long as the work.


class Caches(NamedTuple):
    """E engines' memory and the pool, U blocks; changed by `serve`.

    Attributes:
        capacities: [E + 1] blocks, 0 where there is none; the last one is the pool's.
        sizes: [E + 1] blocks held.
        older, newer: [E + 1, U + 1] rings.
        present: [U] bits of engines.
        in_pool: [U] whether the pool has it.
        readers: [U] engine of the last request that read it, -1 for none.
        duplicates: [1] copies of blocks in engines besides the first.
    """

    capacities: Int64Column
    sizes: Int64Column
    older: npt.NDArray[np.int32]
    newer: npt.NDArray[np.int32]
    present: Int64Column
    in_pool: BoolColumn
    readers: Int32Column
    duplicates: Int64Column


def _empty_caches(engines: int, unique_blocks: int, local_blocks: int, pool_blocks: int) -> Caches:
    rings = [np.empty((engines + 1, unique_blocks + 1), np.int32) for _ in range(2)]
    for ring in rings:
        ring[:, -1] = unique_blocks
    return Caches(
        capacities=np.array([local_blocks] * engines + [pool_blocks], np.int64),
        sizes=np.zeros(engines + 1, np.int64),
        older=rings[0],
        newer=rings[1],
        present=np.zeros(unique_blocks, np.int64),
        in_pool=np.zeros(unique_blocks, np.bool_),
        readers=np.full(unique_blocks, -1, np.int32),
        duplicates=np.zeros(1, np.int64),
    )


@compiled
def held_prefixes(caches: Caches, blocks: Int32Column, held: Int64Column) -> None:
    """Count the leading blocks of a request that each engine has.

    Args:
        caches: that may have them.
        blocks: that are read.
        held: [2, E] in its own memory; in that or in the pool. Counted here.
    """
    own, joint = np.int64(-1), np.int64(-1)
    for place in range(len(blocks)):
        block = blocks[place]
        present = caches.present[block]
        own &= present
        if not caches.in_pool[block]:
            joint &= present
        if not joint:
            return
        for engine in range(held.shape[1]):
            held[0, engine] += (own >> engine) & 1
            held[1, engine] += (joint >> engine) & 1


COUNTS = (
    "local_hit_blocks",
    "pool_hit_blocks",
    "local_hit_tokens",
    "pool_hit_tokens",
    "object_blocks",
    "full_requests",
)
_BLOCKS, _TOKENS, _OBJECTS, _FULL = 0, 2, 4, 5


@compiled
def serve(
    caches: Caches,
    engine: int,
    blocks: Int32Column,
    reads: int,
    writes: bool,
    block_tokens: int,
    prompt_tokens: int,
    counts: Int64Column,
) -> tuple[int, int]:
    """Serve a request and return the tokens that its engine finds in its own memory, and those that it loads.

    Args:
        caches: are changed.
        engine: that serves it.
        blocks: of the request.
        reads: how many of the first it reads.
        writes: whether all of its blocks are there afterwards; else only what it found is touched.
        block_tokens: of a block.
        prompt_tokens: of the prompt.
        counts: [len(COUNTS)] counted here.
    """
    engines = len(caches.sizes) - 1
    end = caches.older.shape[1] - 1
    found = 0
    found_tokens = np.zeros(2, np.int64)
    is_prefix = True
    for place in range(reads):
        block = blocks[place]
        is_local = (caches.present[block] >> engine) & 1
        is_held = is_local or caches.in_pool[block]
        is_prefix = is_prefix and is_held
        counts[_OBJECTS] += is_held
        caches.readers[block] = engine
        if is_prefix:
            source = 0 if is_local else 1
            found += 1
            counts[_BLOCKS + source] += 1
            found_tokens[source] += min((place + 1) * block_tokens, prompt_tokens) - min(
                place * block_tokens, prompt_tokens
            )
    counts[_TOKENS] += found_tokens[0]
    counts[_TOKENS + 1] += found_tokens[1]
    counts[_FULL] += reads > 0 and found == reads

    for place in range((len(blocks) if writes else found) - 1, -1, -1):
        block = blocks[place]
        for cache in range(engine, engines + 1, max(1, engines - engine)):
            is_here = (caches.present[block] >> cache) & 1 if cache < engines else caches.in_pool[block]
            if not (caches.capacities[cache] and (is_here or writes)):
                continue
            if is_here:
                before, after = caches.older[cache, block], caches.newer[cache, block]
                caches.newer[cache, before] = after
                caches.older[cache, after] = before
            else:
                if caches.sizes[cache] == caches.capacities[cache]:
                    victim = caches.newer[cache, end]
                    after = caches.newer[cache, victim]
                    caches.newer[cache, end] = after
                    caches.older[cache, after] = end
                    if cache < engines:
                        caches.present[victim] &= ~(np.int64(1) << cache)
                        caches.duplicates[0] -= caches.present[victim] != 0
                    else:
                        caches.in_pool[victim] = False
                else:
                    caches.sizes[cache] += 1
                if cache < engines:
                    caches.duplicates[0] += caches.present[block] != 0
                    caches.present[block] |= np.int64(1) << cache
                else:
                    caches.in_pool[block] = True
            before = caches.older[cache, end]
            caches.older[cache, block], caches.newer[cache, block] = before, end
            caches.newer[cache, before] = caches.older[cache, end] = block
    return found_tokens[0], found_tokens[1]


# What engines work on, as the gateway sees it.


class FleetLoad:
    """Engines that compute prompts one after the other, in the order of their arrival, and all answers at once.

    A request is in flight until its answer is complete. Its tokens are in flight until its prompt is computed, when the
    first byte of the answer comes, as in `kvcm.gateway.engines.Flight`.

    Args:
        names: of the engines.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._in_flight = [0] * len(names)
        self._tokens = [0] * len(names)
        self._idle_at = [0.0] * len(names)
        self._now = -math.inf
        self._ends: list[tuple[float, int, int, int]] = []  # when an engine is rid of requests and tokens

    def advance(self, now: float) -> None:
        """Let time pass; where a trace goes back in time, none does.

        Args:
            now: seconds.
        """
        self._now = max(self._now, now)
        while self._ends and self._ends[0][0] <= self._now:
            _, engine, requests, tokens = heapq.heappop(self._ends)
            self._in_flight[engine] -= requests
            self._tokens[engine] -= tokens

    @property
    def loads(self) -> list[EngineLoad]:
        """What policies see."""
        return list(map(EngineLoad, self._names, self._in_flight, self._tokens))

    def begin(self, engine: int, tokens: int, prompt_seconds: float, answer_seconds: float) -> float:
        """Put a request on an engine, and return the seconds that it waits for those before it.

        Args:
            engine: its number.
            tokens: of the prompt that it computes.
            prompt_seconds: until the prompt is loaded and computed, once it begins.
            answer_seconds: from then to the end of the answer.
        """
        begin = max(self._now, self._idle_at[engine])
        self._idle_at[engine] = computed_at = begin + prompt_seconds
        self._in_flight[engine] += 1
        self._tokens[engine] += tokens
        heapq.heappush(self._ends, (computed_at, engine, 0, tokens))
        heapq.heappush(self._ends, (computed_at + answer_seconds, engine, 1, 0))
        return begin - self._now


def affinities_of(trace: Trace, prefix_tokens: int) -> list[bytes]:
    """Return for each request what keeps it with others: its session, else the blocks of its first tokens.

    Requests without either are kept with no other.
    """
    sizes = np.maximum(1, trace.tokens_per_block())
    counts = np.diff(trace.offsets)
    last = trace.offsets[:-1] + np.minimum(counts, -(-prefix_tokens // sizes)) - 1
    last_blocks = np.full(len(trace), -1, np.int64)
    last_blocks[counts > 0] = trace.blocks[last[counts > 0]]
    return [
        b"session %d" % session if session >= 0 else b"block %d" % block if block >= 0 else b"request %d" % number
        for number, (session, block) in enumerate(zip(trace.sessions.tolist(), last_blocks.tolist(), strict=True))
    ]


# What engines with memory of their own gave, against one pool that they share.


class Topology(StrEnum):
    """Where blocks are kept."""

    LOCAL = "local"
    POOL = "pool"
    BOTH = "local+pool"


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRow:
    """One policy over one topology; E engines.

    Attributes:
        routing: that spread the requests.
        topology: where blocks are kept.
        local_blocks: capacity of each engine's own memory, 0 if it has none.
        pool_blocks: capacity of the pool, 0 if there is none.
        hits: of engines' memory and pool together.
        local_hit_blocks: prefix hits in the engine's own memory.
        pool_hit_blocks: prefix hits that only the pool had.
        local_hit_tokens, pool_hit_tokens: the same in tokens.
        totals: that hits are relative to.
        routed_requests: [E] requests of each engine that read.
        routed_tokens: [E] tokens of their prompts.
        prefill_tokens: [E] of them, those that had to be computed.
        mean_wait_seconds: until the engine has computed the prompts that came before.
        longest_wait_seconds: the longest of these.
        mean_duplicate_blocks: copies of a block in engines besides the first, on average over the requests.
        most_duplicate_blocks: the largest number of them.
        block_bytes: of each block.
        seconds: the replay took.
        accesses: that were replayed.
    """

    routing: Routing
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
    mean_wait_seconds: float
    longest_wait_seconds: float
    mean_duplicate_blocks: float
    most_duplicate_blocks: int
    block_bytes: int
    seconds: float
    accesses: int

    @property
    def token_hit_rate(self) -> float:
        """Return tokens of prefix hits per token of the prompts."""
        return self.hits.token_rate(self.totals)

    @property
    def local_share(self) -> float:
        """Return the part of the prompts' tokens that engines had in their own memory."""
        return self.local_hit_tokens / max(1, self.totals.tokens)

    @property
    def pool_share(self) -> float:
        """Return the part that came from the pool, over the network."""
        return self.pool_hit_tokens / max(1, self.totals.tokens)

    @property
    def computed_share(self) -> float:
        """Return the part that had to be computed."""
        return 1 - self.token_hit_rate

    @property
    def imbalance(self) -> float:
        """Return the tokens computed by the busiest engine per token computed by the average one, 1 being even."""
        return _busiest(self.prefill_tokens)

    @property
    def request_imbalance(self) -> float:
        """Return the requests of the engine with the most per request of the average one."""
        return _busiest(self.routed_requests)

    @property
    def mean_duplicate_bytes(self) -> float:
        """Return the capacity that copies of a block besides the first take up."""
        return self.mean_duplicate_blocks * self.block_bytes

    def row(self) -> dict[str, str | int | float]:
        """Return what `--json` writes."""
        return {
            "routing": self.routing.label,
            "caches": self.topology.value,
            "engines": len(self.routed_requests),
            "engine_blocks": self.local_blocks,
            "pool_blocks": self.pool_blocks,
            "own_share": self.local_share,
            "pool_share": self.pool_share,
            "computed_share": self.computed_share,
            "token_hit_rate": self.token_hit_rate,
            "block_hit_rate": self.hits.block_rate(self.totals),
            "busiest_requests": self.request_imbalance,
            "busiest_computed": self.imbalance,
            "mean_wait_seconds": self.mean_wait_seconds,
            "longest_wait_seconds": self.longest_wait_seconds,
        }


def _busiest(amounts: Int64Column) -> float:
    total = int(amounts.sum())
    return float(amounts.max()) * len(amounts) / total if total else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class PoolingStudy:
    """Every policy over every topology.

    Attributes:
        engines: E.
        rows: in the order in which policies and topologies were asked for.
    """

    engines: int
    rows: tuple[PoolingRow, ...]


# Compares policies and topologies on one trace.

_MOST_ENGINES = 64


@dataclass(frozen=True, slots=True)
class Engines:
    """Equal engines.

    Attributes:
        count: 1 to 64.
        local_blocks: of each engine's own memory.
        throughput_tokens_per_second: prefill of one engine; the gateway's `compute_tokens_per_second`.
        pool_blocks: of the shared pool; as much as all memories together if None.
        kv_bytes_per_token: of a token in all layers.
        load_bytes_per_second: from the pool, of one engine.
        load_latency_seconds: of a load, whatever its size.
        seconds_per_output_token: of an answer.
        given_names: that policies hash; any others if empty.

    Raises:
        OptionError: a number is out of its range.
    """

    count: int
    local_blocks: int
    throughput_tokens_per_second: float
    pool_blocks: int | None = None
    kv_bytes_per_token: float = 70_272
    load_bytes_per_second: float = 20e9
    load_latency_seconds: float = 0.0
    seconds_per_output_token: float = 0.02
    given_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        most = 1 << 31
        ranges: tuple[tuple[str, float, bool, str], ...] = (
            ("engines", self.count, 1 <= self.count <= _MOST_ENGINES, f"1 to {_MOST_ENGINES}"),
            ("local_blocks", self.local_blocks, 1 <= self.local_blocks < most, "1 to 2^31 - 1"),
            ("pool_blocks", self.shared_blocks, 1 <= self.shared_blocks < most * _MOST_ENGINES, "1 to 2^37 - 1"),
            ("throughput", self.throughput_tokens_per_second, 0 < self.throughput_tokens_per_second < 1e15, "above 0"),
            ("kv_bytes_per_token", self.kv_bytes_per_token, 0 < self.kv_bytes_per_token < 1 << 40, "1 to 2^40 - 1"),
            ("load_bytes_per_second", self.load_bytes_per_second, 0 < self.load_bytes_per_second < 1e18, "above 0"),
            ("load_latency", self.load_latency_seconds, 0 <= self.load_latency_seconds <= 1e6, "0 to 1e6"),
            ("names", len(self.given_names), len(set(self.given_names)) in (0, self.count), "one of each engine"),
            ("output_token", self.seconds_per_output_token, 0 <= self.seconds_per_output_token <= 1e6, "0 to 1e6"),
        )
        for field, value, is_right, allowed in ranges:
            if not is_right:
                raise OptionError(f"pooling: {field} is {value}; allowed: {allowed}")

    @property
    def shared_blocks(self) -> int:
        """Return the capacity of the pool."""
        return self.count * self.local_blocks if self.pool_blocks is None else self.pool_blocks

    @property
    def names(self) -> tuple[str, ...]:
        """Return what policies call them, `host:port` as in a gateway."""
        return self.given_names or tuple(f"engine-{number}:8000" for number in range(self.count))

    @property
    def costs(self) -> Costs:
        """Return what the manager's estimates need of them."""
        return Costs(
            compute_tokens_per_second=self.throughput_tokens_per_second,
            storage_bytes_per_second=self.load_bytes_per_second,
        )


def compare_pooling(
    trace: Trace,
    engines: Engines,
    *,
    routing: Sequence[Routing] = DEFAULT_ROUTING,
    topologies: Sequence[Topology] = tuple(Topology),
    workers: int | None = None,
) -> PoolingStudy:
    """Replay a trace on engines with memory of their own, on a shared pool, and on both.

    All caches evict the block used longest ago, chains from their ends. What an engine computes goes to its own memory
    and to the pool; what it loads from the pool goes to its own memory as well; the pool sees every request, so what it
    holds does not depend on policies. A request that does not write touches its prefix and inserts nothing; one that
    only writes is of the engine that read its blocks last. The manager knows at once what engines hold. Each thread
    needs up to 8 bytes for every engine and unique block.

    Args:
        trace: that only reads prefixes; its instances share engines and pool.
        engines: that it runs on.
        routing: policies that are compared.
        topologies: that each of them is tried with.
        workers: threads; as many as cores if None.

    Raises:
        OptionError: nothing is to be compared.
        TraceError: requests read otherwise than a prefix, or leave something out.
    """
    if not trace.is_plain:
        raise TraceError(f"{trace.name}: has requests that do not read plain prefixes; pooling replays no others")
    if not routing or not topologies:
        raise OptionError("pooling: there is nothing to compare; allowed: one policy and one topology or more")
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        replays = pool.map(lambda pair: _FleetReplay(trace, engines, *pair).row(), product(routing, topologies))
        return PoolingStudy(engines.count, tuple(replays))


class _FleetReplay:
    """A replay of a trace with one policy over one topology."""

    def __init__(self, trace: Trace, engines: Engines, routing: Routing, topology: Topology) -> None:
        self._trace, self._engines, self._routing, self._topology = trace, engines, routing, topology
        self._local_blocks = 0 if topology is Topology.POOL else engines.local_blocks
        self._pool_blocks = 0 if topology is Topology.LOCAL else engines.shared_blocks
        self._policy = REGISTRY[routing.name](engines.throughput_tokens_per_second, routing.load_factor)
        self._names = engines.names
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._fleet = FleetLoad(self._names)
        self._caches = _empty_caches(engines.count, trace.unique_blocks, self._local_blocks, self._pool_blocks)
        self._affinities = affinities_of(trace, routing.prefix_tokens)
        self._counts = np.zeros(len(COUNTS), np.int64)
        self._routed = np.zeros((3, engines.count), np.int64)
        self._waits = self._longest_wait = 0.0
        self._duplicates = self._most_duplicates = 0

    def row(self) -> PoolingRow:
        """Replay all requests, and return what was counted."""
        started = time.perf_counter()
        columns = (self._trace.times_us, self._trace.read_blocks, self._trace.input_tokens, self._trace.output_tokens)
        sizes = self._trace.tokens_per_block().tolist()
        for request, (now, reads, prompt, answer) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            self._fleet.advance(now / 1e6)
            self._replay(request, int(reads), int(prompt), int(answer), sizes[request])
            copies = int(self._caches.duplicates[0])
            self._duplicates += copies
            self._most_duplicates = max(self._most_duplicates, copies)
        return self._counted(time.perf_counter() - started)

    def _replay(self, request: int, reads: int, prompt: int, answer: int, block_tokens: int) -> None:
        blocks = self._trace.request_blocks(request)
        if reads:
            engine = self._choose(request, blocks[:reads], prompt, block_tokens)
        else:
            engine = self._reader_of(request, blocks)
        writes = bool(self._trace.writes[request])
        own, loaded = serve(self._caches, engine, blocks, reads, writes, block_tokens, prompt, self._counts)
        if reads:
            self._record(engine, prompt, loaded, prompt - own - loaded, answer)

    def _choose(self, request: int, blocks: Int32Column, prompt: int, block_tokens: int) -> int:
        scores = self._scores(blocks, prompt, block_tokens) if self._routing.name == "kvcm" else None
        return self._numbers[self._policy.choose(Prompt(self._affinities[request], scores), self._fleet.loads)]

    def _scores(self, blocks: Int32Column, prompt: int, block_tokens: int) -> Mapping[str, float]:
        held = np.zeros((2, self._engines.count), np.int64)
        held_prefixes(self._caches, blocks, held)
        own, joint = held
        found = estimate(
            Prefixes(own, own, own, joint),
            prompt_tokens=prompt,
            block_tokens=block_tokens,
            bytes_per_token=self._engines.kv_bytes_per_token,
            costs=self._engines.costs,
        )
        return dict(zip(self._names, found.saved.tolist(), strict=True))

    def _reader_of(self, request: int, blocks: Int32Column) -> int:
        """Return the engine that last read the deepest of these blocks that any read, else one by a hash."""
        readers = self._caches.readers[blocks]
        known = readers[readers >= 0]
        if len(known):
            return int(known[-1])
        affinity = self._affinities[request]
        return max(range(len(self._names)), key=lambda number: rendezvous_weight(self._names[number], affinity))

    def _record(self, engine: int, prompt: int, loaded: int, computed: int, answer: int) -> None:
        engines = self._engines
        seconds = computed / engines.throughput_tokens_per_second
        if loaded:
            seconds += engines.load_latency_seconds
            seconds += loaded * engines.kv_bytes_per_token / engines.load_bytes_per_second
        wait = self._fleet.begin(engine, computed, seconds, answer * engines.seconds_per_output_token)
        self._waits += wait
        self._longest_wait = max(self._longest_wait, wait)
        self._routed[:, engine] += (1, prompt, computed)

    def _counted(self, seconds: float) -> PoolingRow:
        counted = dict(zip(COUNTS, self._counts.tolist(), strict=True))
        totals = self._trace.totals
        block_tokens = self._trace.block_tokens or max(self._trace.instance_block_tokens, default=1)
        return PoolingRow(
            routing=self._routing,
            topology=self._topology,
            local_blocks=self._local_blocks,
            pool_blocks=self._pool_blocks,
            hits=Hits(
                counted["local_hit_blocks"] + counted["pool_hit_blocks"],
                counted["local_hit_tokens"] + counted["pool_hit_tokens"],
                counted.pop("object_blocks"),
                counted.pop("full_requests"),
            ),
            totals=totals,
            routed_requests=self._routed[0],
            routed_tokens=self._routed[1],
            prefill_tokens=self._routed[2],
            mean_wait_seconds=self._waits / max(1, totals.requests),
            longest_wait_seconds=self._longest_wait,
            mean_duplicate_blocks=self._duplicates / max(1, len(self._trace)),
            most_duplicate_blocks=self._most_duplicates,
            block_bytes=max(1, round(self._engines.kv_bytes_per_token * block_tokens)),
            seconds=seconds,
            accesses=self._trace.accesses,
            **counted,
        )
