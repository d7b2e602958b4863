"""Replays a trace through the policies themselves, block by block: slow, and what the kernels are proven equal to.

The classes are those that the live reclaimer runs; Belady and random LRU, which it does not, are defined beside this
file. A block's slot is its number in the trace.

A request that writes accesses its blocks in their order: one that is resident is touched, also behind the first miss,
since an engine computes and writes it again; another is inserted. A request that does not write touches the blocks of
its longest resident prefix and inserts nothing. Only requests that read count, and only their first `read_blocks`
blocks do; an access is a hit if its block is resident at its turn.

In mode block, a block is evicted before an insert that finds the cache full. In mode request all blocks of a request
are inserted, and then blocks are evicted until the cache holds no more than its capacity: as the policy orders them
after the request, its own blocks among them. Hence in mode request:

* lru, fifo, sieve and ttl may evict the head of the request before its tail, having seen it earlier; lfu does so among
  those of its blocks that are new;
* leaf_lru evicts what mode block evicts, since its path is newer than all else and goes from the tail;
* s3fifo keeps small, main and ghost as shares of the capacity, not of the blocks that are resident at the moment;
* belady needs no bypass: the block that is needed last is inserted and leaves at once. `bypass` has no effect.

Leaf LRU asks which blocks follow which, and blocks that follow several ones answer nothing: for a trace without a tree
it is what it is equal to on a tree, an LRU in mode request that touches a request from its tail to its head. Belady is
a bound where all requests read and write; a lookup that misses brings nothing back, which it does not foresee.
"""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay.engine import Job, Mode, Outcome, check, counted
from kvcm.optimizer.replay.policies import Future, policy_of
from kvcm.optimizer.results import Replay
from kvcm.optimizer.trace import Trace

__all__ = ["reference_replay"]


def reference_replay(
    trace: Trace, spec: PolicySpec, capacity_blocks: int, *, mode: Mode = "block", keep_requests: bool = False
) -> Replay:
    """Replay one policy at one capacity.

    Args:
        trace: a plain one.
        spec: the policy.
        capacity_blocks: 1 or more.
        mode: `block` or `request`.
        keep_requests: whether the outcome of each request is kept.

    Raises:
        OptionError: this cannot be replayed.
    """
    job = Job(spec, capacity_blocks, mode, keep_requests)
    check(trace, job)
    began = time.perf_counter()
    cache = _Cache(trace, job)
    cache.replay()
    return counted(trace, job, cache.outcome, time.perf_counter() - began)


class _Cache:
    def __init__(self, trace: Trace, job: Job) -> None:
        self._trace = trace
        self._capacity = job.capacity_blocks
        self._from_tail = job.spec.name == "leaf_lru" and not trace.has_one_parent
        self._by_request = job.mode == "request" or self._from_tail
        self._spec = job.spec
        self._future = Future(trace) if job.spec.name == "belady" else None
        spec = PolicySpec("lru") if self._from_tail else job.spec
        self._policy = policy_of(spec, self._capacity, self._is_leaf, self._future)
        self._children = Counter[int]()
        self._times: dict[int, int] = {}  # of the last access, or of the insert where age counts from it
        self._now = 0
        self._path: frozenset[int] = frozenset()
        requests = len(trace)
        self.outcome = Outcome(np.zeros(requests, np.int32), np.zeros(requests, np.int32), 0)

    def replay(self) -> None:
        for request in range(len(self._trace)):
            self._now = int(self._trace.times_us[request])
            if self._spec.name == "ttl":
                self._drop_aged()
            self._serve(request)
            while len(self._policy) > self._capacity and self._evict():
                pass
            self.outcome.request_resident[request] = len(self._policy)

    def _serve(self, request: int) -> None:
        blocks = self._trace.request_blocks(request).tolist()
        reads = blocks[: int(self._trace.read_blocks[request])]
        writes = bool(self._trace.writes[request])
        self._path = frozenset(blocks) if self._spec.name == "leaf_lru" else frozenset()
        if self._from_tail:
            self._serve_from_tail(request, blocks, reads, writes=writes)
            return
        is_prefix = True
        for place, block in enumerate(blocks if writes else reads):
            if self._future is not None:
                self._future.now = int(self._trace.offsets[request]) + place
            is_hit = block in self._policy
            is_prefix = is_prefix and is_hit
            if place < len(reads):
                self._count(request, is_hit=is_hit, is_prefix=is_prefix)
            if writes or is_prefix:
                self._access(block)

    def _serve_from_tail(self, request: int, blocks: list[int], reads: list[int], *, writes: bool) -> None:
        hits = [block in self._policy for block in reads]
        prefix = (*hits, False).index(False)
        for place, is_hit in enumerate(hits):
            self._count(request, is_hit=is_hit, is_prefix=place < prefix)
        for block in reversed(blocks if writes else reads[:prefix]):
            self._access(block)

    def _count(self, request: int, *, is_hit: bool, is_prefix: bool) -> None:
        self.outcome.object_blocks += is_hit
        self.outcome.request_hits[request] += is_prefix

    def _access(self, block: int) -> None:
        if block in self._policy:
            self._policy.touch(block)
            if self._spec.name != "ttl" or self._spec.ttl_sliding:
                self._times[block] = self._now
        elif self._evict_for(block):
            self._policy.insert(block, block)
            self._times[block] = self._now
            self._children[int(self._trace.parents[block])] += 1

    def _evict_for(self, block: int) -> bool:
        if self._by_request or len(self._policy) < self._capacity:
            return True
        if self._future is not None and self._spec.bypass:
            next_access = self._future.next_access
            if next_access(block) >= next_access(next(self._policy.victims())):
                return False
        return self._evict()

    def _evict(self) -> bool:
        """Evict one block and return whether there was one: leaf LRU spares the path of the request that evicts."""
        for slot in self._policy.victims():
            if self._by_request or slot not in self._path:
                self._remove(slot)
                return True
        return False

    def _remove(self, block: int, *, evicted: bool = True) -> None:
        self._policy.remove(block, evicted=evicted)
        self._children[int(self._trace.parents[block])] -= 1

    def _drop_aged(self) -> None:
        oldest_time = self._now - round(self._spec.ttl_seconds * 1e6)
        for slot in self._policy.victims():
            if self._times[slot] >= oldest_time:
                return
            self._remove(slot, evicted=False)

    def _is_leaf(self, slot: int) -> bool:
        return not self._children[slot]
