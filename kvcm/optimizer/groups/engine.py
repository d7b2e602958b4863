"""Replays a trace through one group: instances that share a capacity, with requests of every query mode and with masks.

Reads, before a request writes anything:

* A masked block is one that the engine has itself: it is not asked for, ends no prefix, and is never part of a window
  (wire.md 5.1 and 5.3, design.md decision 13).
* A request that does not write, a lookup, touches the blocks of its answer and inserts nothing.
* A request that writes accesses all of its blocks in their order: one that is there is touched, another is inserted.
  One that reads nothing, the end of a write session, does no less; what it masks was not written.

A block is stored and read whole, whichever location specs a request names. The order of eviction is kept by the classes
of the live reclaimer, and so is the choice among instances (`group_lru`). Requests of `leaf_lru` are written as a whole
and from the tail: every block is then newer than those that follow it, as in a live cache (docs/eviction.md). With one
instance this counts what `kvcm.optimizer.replay` counts.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay import Mode
from kvcm.optimizer.replay.policies import policy_of
from kvcm.optimizer.results import Hits, Replay
from kvcm.optimizer.trace import Int32Column, QueryMode, Trace
from kvcm.reclaim.policies.sharing import Sharing

__all__ = ["Numbering", "replay_group"]

# Numbers of blocks within their own instance, so that the columns of an instance are as long as it has blocks.


@dataclass(frozen=True, slots=True, eq=False)
class Numbering:
    """Blocks by instance; a number within an instance goes by first appearance as well.

    Attributes:
        blocks: [N] the accesses of the trace, in numbers of the instance of each.
        parents: for each instance of the trace, the block before each of its blocks; -1 for the first of a chain.
    """

    blocks: Int32Column
    parents: tuple[Int32Column, ...]

    @classmethod
    def of(cls, trace: Trace) -> Numbering:
        """Return the numbers of a trace."""
        lengths = np.diff(trace.offsets)
        owners = np.zeros(trace.unique_blocks, np.int32)
        owners[trace.blocks] = np.repeat(trace.instances, lengths)
        order = np.argsort(owners, kind="stable")
        starts = np.searchsorted(owners[order], np.arange(len(trace.instance_names) + 1))
        numbers = np.empty(trace.unique_blocks, np.int32)
        numbers[order] = np.arange(trace.unique_blocks, dtype=np.int32) - starts[owners[order]].astype(np.int32)
        parents = np.where(trace.parents >= 0, numbers[trace.parents], -1).astype(np.int32)
        ranges = pairwise(starts)
        return cls(numbers[trace.blocks], tuple(parents[order[start:end]] for start, end in ranges))


_NOT_REPLAYED = "belady"  # it looks ahead in one cache; instances of a group compete


def replay_group(
    trace: Trace, spec: PolicySpec, capacity_blocks: int, *, mode: Mode = "block", keep_requests: bool = False
) -> Replay:
    """Replay a trace through one group of all its instances.

    Prefix hits are the blocks of the answers, whatever the query mode, and the masked blocks before their end; their
    tokens are what the engine need not compute, without those of masked blocks, and never more than the prompt has.

    Args:
        trace: any one, also with query modes, masks and specs.
        spec: the policy of every instance.
        capacity_blocks: that the instances share.
        mode: `block`: evict before each block that is written; `request`: after all blocks of a request.
        keep_requests: whether the outcome of each request is kept.

    Raises:
        OptionError: the policy is not replayed in groups.
    """
    if spec.name == _NOT_REPLAYED:
        raise OptionError(f"policy: {_NOT_REPLAYED} is not replayed in groups; allowed: any other policy")
    began = time.perf_counter()
    run = _Run(trace, spec, capacity_blocks, mode)
    hits, resident = run.replay()
    return Replay(
        policy=spec.label,
        capacity_blocks=capacity_blocks,
        hits=Hits(run.prefix_blocks, run.prefix_tokens, run.object_blocks, run.full_requests),
        totals=trace.totals,
        seconds=time.perf_counter() - began,
        accesses=run.accesses,
        request_hits=hits if keep_requests else None,
        request_resident=resident if keep_requests else None,
    )


class _Answer(NamedTuple):
    """What a read found.

    Attributes:
        positions: of the answered blocks.
        internal: masked blocks before the end.
        reach: blocks of the prompt that need not be computed.
    """

    positions: Sequence[int]
    internal: int
    reach: int


def _answer(mode: QueryMode, present: bytes, is_masked: Sequence[bool], window: int) -> _Answer:
    """Return what a read of blocks finds that are resident or not; windows of no blocks find nothing."""
    if mode is QueryMode.BATCH:
        found = [place for place, here in enumerate(present) if here and not is_masked[place]]
        internal = sum(is_masked)
        return _Answer(found, internal, len(found) + internal)
    if mode is QueryMode.WINDOW:
        run = 0
        for place in range(len(present) - 1, -1, -1):
            run = run + 1 if present[place] and not is_masked[place] else 0
            if run == window > 0:
                return _Answer(range(place, place + window), 0, place + window)
        return _Answer((), 0, 0)
    ends = (place for place, here in enumerate(present) if not (here or is_masked[place]))
    end = next(ends, len(present))
    found = [place for place in range(end) if not is_masked[place]]
    return _Answer(found, end - len(found), end)


def _padded(masked: Sequence[bool], length: int) -> list[bool]:
    """Return whether each of so many positions is masked; those behind the end are not."""
    return [*masked[:length], *[False] * (length - len(masked))]


class _Run:
    """One replay, and what it counts."""

    def __init__(self, trace: Trace, spec: PolicySpec, capacity_blocks: int, mode: Mode) -> None:
        self._trace = trace
        self._numbering = Numbering.of(trace)
        self._group = _Group(spec, capacity_blocks, mode, self._numbering.parents, is_tree=trace.has_one_parent)
        self.prefix_blocks = self.prefix_tokens = self.object_blocks = self.full_requests = self.accesses = 0

    def replay(self) -> tuple[Int32Column, Int32Column]:
        """Serve all requests; return [R] the blocks of each answer, masked ones included, and those resident then."""
        hits, resident = np.zeros(len(self._trace), np.int32), np.zeros(len(self._trace), np.int32)
        for request, instance in enumerate(self._trace.instances.tolist()):
            hits[request] = self._serve(request, instance)
            resident[request] = self._group.used
        return hits, resident

    def _serve(self, request: int, instance: int) -> int:
        trace, store = self._trace, self._group.stores[instance]
        start, end = int(trace.offsets[request]), int(trace.offsets[request + 1])
        blocks: list[int] = self._numbering.blocks[start:end].tolist()
        reads, now = int(trace.read_blocks[request]), int(trace.times_us[request])
        masked = trace.masks.get(request)
        is_masked = _padded([] if masked is None else masked.tolist(), len(blocks))
        self._group.drop_aged(now)
        present = bytes([store.here[block] for block in blocks[:reads]])
        mode, window = trace.modes.get(request, QueryMode.PREFIX), trace.windows.get(request, 0)
        found = _answer(mode, present, is_masked[:reads], window)
        if trace.writes[request]:
            written = blocks if reads else [block for block, left in zip(blocks, is_masked, strict=True) if not left]
            present = self._group.write(store, written, now)
            self.accesses += len(blocks)
        else:
            store.touch([blocks[place] for place in found.positions], now)
            self.accesses += reads
        return self._count(request, found, present[:reads], is_masked) if reads else 0

    def _count(self, request: int, found: _Answer, present: bytes, is_masked: Sequence[bool]) -> int:
        trace, instance = self._trace, int(self._trace.instances[request])
        block_tokens = trace.instance_block_tokens[instance] or trace.block_tokens
        reached = min(found.reach * block_tokens, int(trace.input_tokens[request]))
        hits = len(found.positions) + found.internal
        self.prefix_blocks += hits
        self.prefix_tokens += max(0, reached - found.internal * block_tokens)
        self.full_requests += hits == len(present)
        self.object_blocks += sum(here and not is_masked[place] for place, here in enumerate(present))
        return hits


class _Store:
    """The blocks of one instance, by their numbers in it.

    Args:
        spec: the order of eviction.
        capacity: of the instance alone; None where it shares one.
        parents: the block before each block.
        is_tree: whether blocks follow no other than those.

    Attributes:
        here: whether each block is resident.
        used: blocks that are.
    """

    __slots__ = ("_followed", "_has_ages", "_parents", "_policy", "_read_at", "_since", "here", "used")

    def __init__(self, spec: PolicySpec, capacity: int | None, parents: Int32Column, *, is_tree: bool) -> None:
        count, expires = len(parents), spec.name == "ttl"
        self.here = bytearray(count)
        self.used = 0
        self._parents: list[int] = parents.tolist()
        self._followed = array("i", [0]) * (count + 1 if spec.name == "leaf_lru" and is_tree else 0)
        self._has_ages = expires or capacity is None
        self._read_at = array("q", [0]) * (count if self._has_ages else 0)
        self._since = array("q", [0]) * count if expires and not spec.ttl_sliding else self._read_at
        # Where blocks are no tree there are no leaves: then it is an LRU that is touched from the tail.
        ordered = spec if spec.name != "leaf_lru" or is_tree else PolicySpec("lru")
        self._policy = policy_of(ordered, capacity, lambda slot: not self._followed[slot])

    def read_at(self, block: int) -> int:
        """Return when a resident block was last read or written, in microseconds."""
        return self._read_at[block]

    def touch(self, blocks: Sequence[int], now: int) -> None:
        """Read resident blocks, one after the other."""
        if not blocks:
            return
        if len(set(blocks)) == len(blocks):
            self._policy.touch_all(blocks, [1] * len(blocks))
        else:
            for block in blocks:
                self._policy.touch(block)
        if self._has_ages:
            for block in blocks:
                self._read_at[block] = now

    def insert(self, blocks: Sequence[int], now: int) -> None:
        """Write distinct blocks that are not there, one after the other."""
        self._policy.insert_all(blocks, blocks)
        self.used += len(blocks)
        for block in blocks:
            self.here[block] = 1
            if self._followed:
                self._followed[self._parents[block]] += 1
            if self._has_ages:
                self._read_at[block] = self._since[block] = now

    def evict(self, block: int, *, for_capacity: bool = True) -> None:
        """Evict a block, for its bytes or for its age."""
        self._policy.remove(block, evicted=for_capacity)
        self.here[block] = 0
        self.used -= 1
        if self._followed:
            self._followed[self._parents[block]] -= 1

    def victims(self) -> Iterator[int]:
        """Yield the block that is to go next; it is evicted before the next one is asked for."""
        while self._policy:
            yield next(self._policy.victims())

    def drop_aged(self, oldest: int) -> None:
        """Evict blocks that are older than the policy allows."""
        while self._policy and self._since[block := next(self._policy.victims())] < oldest:
            self.evict(block, for_capacity=False)


class _Group:
    """Instances and what they use together.

    Args:
        spec: the policy of each.
        capacity: that they share.
        mode: when blocks are evicted.
        parents: of each instance, the block before each of its blocks.
        is_tree: whether blocks follow no other than those.
    """

    def __init__(
        self, spec: PolicySpec, capacity: int, mode: Mode, parents: Sequence[Int32Column], *, is_tree: bool
    ) -> None:
        alone = capacity if len(parents) == 1 else None
        self.stores = [_Store(spec, alone, each, is_tree=is_tree) for each in parents]
        self._capacity = capacity
        self._age_us = round(spec.ttl_seconds * 1e6) if spec.name == "ttl" else None
        self._from_tail = spec.name == "leaf_lru"
        self._is_whole = self._from_tail or mode == "request"

    @property
    def used(self) -> int:
        """Return the blocks that are resident."""
        return sum(store.used for store in self.stores)

    def drop_aged(self, now: int) -> None:
        """Evict blocks that are older than the policy allows."""
        if self._age_us is not None:
            for store in self.stores:
                store.drop_aged(now - self._age_us)

    def write(self, store: _Store, blocks: Sequence[int], now: int) -> bytes:
        """Write blocks; return for each whether it was there when its turn came."""
        if not self._is_whole:
            return self._write_each(store, blocks, now)
        there = self._write_whole(store, blocks, now)
        self._shrink(self._capacity, now)
        return there

    def _write_whole(self, store: _Store, blocks: Sequence[int], now: int) -> bytes:
        """Write all blocks, whatever they take. Blocks that are there, or are not, go together."""
        there = bytearray([store.here[block] for block in blocks])
        order: Sequence[int] = range(len(blocks))[::-1] if self._from_tail else range(len(blocks))
        if len(set(blocks)) < len(blocks):  # some are named twice: one by one
            for place in order:
                if not self._from_tail:
                    there[place] = store.here[blocks[place]]
                (store.touch if store.here[blocks[place]] else store.insert)([blocks[place]], now)
            return bytes(there)
        for is_there, run in groupby(order, key=there.__getitem__):
            (store.touch if is_there else store.insert)([blocks[place] for place in run], now)
        return bytes(there)

    def _write_each(self, store: _Store, blocks: Sequence[int], now: int) -> bytes:
        """Evict before each block, as a cache does that is never larger than its capacity."""
        there = bytearray(len(blocks))
        run: list[int] = []
        for place, block in enumerate(blocks):
            there[place] = store.here[block]
            if there[place]:
                run.append(block)
                continue
            store.touch(run, now)
            run.clear()
            self._shrink(self._capacity - 1, now)
            store.insert([block], now)
        store.touch(run, now)
        return bytes(there)

    def _shrink(self, target: int, now: int) -> None:
        """Evict until no more than `target` blocks are used."""
        excess = self.used - target
        if excess <= 0:
            return
        if len(self.stores) > 1:
            self._shrink_in_turns(excess, now)
            return
        victims = self.stores[0].victims()
        for _ in range(excess):
            self.stores[0].evict(next(victims))

    def _shrink_in_turns(self, excess: int, now: int) -> None:
        used = {uid: store.used for uid, store in enumerate(self.stores)}
        sharing = Sharing("group_lru", used, dict.fromkeys(used, 1.0), excess)
        walks = [store.victims() for store in self.stores]
        heads = {uid: head for uid, walk in enumerate(walks) if (head := next(walk, None)) is not None}

        def turn(uid: int) -> tuple[tuple[float, float], int]:
            return sharing.priority(uid, (now - self.stores[uid].read_at(heads[uid])) / 1e6), uid

        for _ in range(excess):
            uid = min(heads, key=turn)
            self.stores[uid].evict(heads.pop(uid))
            if (head := next(walks[uid], None)) is not None:
                heads[uid] = head
