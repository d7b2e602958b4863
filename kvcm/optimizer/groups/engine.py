"""Replays a trace through groups of instances that share quotas.

Reads, before a request writes anything (`kvcm.optimizer.groups.queries`):

* A request that does not write, a lookup, touches the blocks of its answer and inserts nothing.
* A request that writes accesses all of its blocks in their order: one that is there is touched, another is inserted.
  One that reads nothing, the end of a write session, does no less; what it masks was not written.

A block is evicted as a whole, with all of its specs; where states are thinned, they go before. Mode, watermarks and
shares are those of the layout; with one instance, one spec and a mark of 1 this counts what `kvcm.optimizer.replay`
counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups.layout import GroupLayout, QuotaGroup
from kvcm.optimizer.groups.numbering import Numbering
from kvcm.optimizer.groups.pool import Pool, Write
from kvcm.optimizer.groups.queries import Answer, Needs, answer, padded
from kvcm.optimizer.groups.results import GroupReplay, InstanceReplay
from kvcm.optimizer.groups.store import Store
from kvcm.optimizer.results import Hits
from kvcm.optimizer.trace import Int32Column, QueryMode, Totals, Trace

__all__ = ["replay_groups"]


def replay_groups(trace: Trace, layout: GroupLayout, *, looks: int = 1000, keep_requests: bool = False) -> GroupReplay:
    """Replay a trace through groups.

    Args:
        trace: any one, also with query modes, masks and specs.
        layout: the groups. Requests of instances that it does not have are left out.
        looks: at the usage of all instances, at most, evenly over the requests.
        keep_requests: whether the outcome of each request is kept.

    Raises:
        OptionError: the layout makes no sense, or no instance of the trace is in it.
    """
    layout.check()
    began = time.perf_counter()
    run = _Run(trace, layout)
    hits = np.full(len(trace), -1, np.int32) if keep_requests else None
    run.replay(max(1, -(-len(trace) // looks)), hits)
    return run.result(hits, time.perf_counter() - began)


class _Member:
    """An instance at work, and what it counted."""

    def __init__(self, store: Store, pool: Pool, group: QuotaGroup, block_tokens: int) -> None:
        self.store = store
        self.pool = pool
        self.group = group
        self.block_tokens = block_tokens
        self.needs = Needs.of(store.instance.specs)
        self.external = self.internal = self.tokens = self.objects = self.full = 0
        self.requests = self.blocks = self.input_tokens = 0

    def count(self, request: _Request, found: Answer, there: bytes) -> None:
        """Count a read."""
        reads = request.reads
        self.requests += 1
        self.blocks += reads
        self.input_tokens += request.input_tokens
        self.external += found.external
        self.internal += found.internal
        reached = min(found.reach * self.block_tokens, request.input_tokens)
        self.tokens += max(0, reached - found.internal * self.block_tokens)
        self.full += found.external + found.internal == reads
        self.objects += request.needs.count(there[:reads], request.masked)

    def result(self) -> InstanceReplay:
        """Return what was counted."""
        store = self.store
        return InstanceReplay(
            store.instance.name,
            self.group.name,
            Hits(self.external, self.tokens, self.objects, self.full),
            self.internal,
            Totals(self.requests, self.blocks, self.input_tokens),
            store.written,
            store.refused,
            store.evicted,
            len(store),
            store.used,
        )


class _Request(NamedTuple):
    blocks: list[int]
    reads: int
    is_write: bool
    now: int
    input_tokens: int
    mode: QueryMode
    window: int
    masked: Sequence[bool] | None
    names: tuple[str, ...] | None
    needs: Needs


class _Run:
    def __init__(self, trace: Trace, layout: GroupLayout) -> None:
        self._trace = trace
        self._numbering = Numbering.of(trace)
        self._members: list[_Member] = []
        for group in layout.groups:
            self._open(group, layout)
        by_name = {member.store.instance.name: member for member in self._members}
        self._by_instance = [by_name.get(name) for name in trace.instance_names]
        if len(trace) and not any(self._by_instance):
            has = ", ".join(trace.instance_names)
            raise OptionError(f"instances: none of {', '.join(sorted(by_name))} is in the trace; allowed: {has}")
        self._looks: list[tuple[int, list[int], list[int]]] = []
        self._accesses = 0

    def _open(self, group: QuotaGroup, layout: GroupLayout) -> None:
        trace = self._trace
        places = {name: place for place, name in enumerate(trace.instance_names)}
        nothing = np.zeros(0, np.int32)
        stores = []
        for instance in group.instances:
            place = places.get(instance.name)
            parents = nothing if place is None else self._numbering.parents[place]
            stores.append(Store(instance, group, parents, is_tree=trace.has_one_parent))
        pool = Pool(group, stores, layout.mode)
        for store in stores:
            place = places.get(store.instance.name)
            block_tokens = trace.block_tokens if place is None else self._block_tokens(place)
            self._members.append(_Member(store, pool, group, block_tokens))

    def _block_tokens(self, place: int) -> int:
        return self._trace.instance_block_tokens[place] or self._trace.block_tokens

    def replay(self, step: int, hits: Int32Column | None) -> None:
        """Serve all requests, and look at the usage after every `step` of them and at the end."""
        instances = self._trace.instances.tolist()
        for place, instance in enumerate(instances):
            member = self._by_instance[instance]
            if member is not None:
                request = self._request(place, member)
                self._accesses += len(request.blocks) if request.is_write else request.reads
                found = self._serve(member, request)
                if hits is not None and found is not None:
                    hits[place] = found.external + found.internal
            if not (place + 1) % step or place + 1 == len(instances):
                self._look(place)

    def _request(self, place: int, member: _Member) -> _Request:
        trace = self._trace
        start, end = int(trace.offsets[place]), int(trace.offsets[place + 1])
        masked = trace.masks.get(place)
        names = trace.specs.get(place)
        return _Request(
            self._numbering.blocks[start:end].tolist(),
            int(trace.read_blocks[place]),
            bool(trace.writes[place]),
            int(trace.times_us[place]),
            int(trace.input_tokens[place]),
            trace.modes.get(place, QueryMode.PREFIX),
            trace.windows.get(place, 0),
            None if masked is None else masked.tolist(),
            names,
            member.needs if names is None else Needs.of(member.store.instance.specs, names),
        )

    def _serve(self, member: _Member, request: _Request) -> Answer | None:
        member.pool.drop_aged(request.now)
        store, reads = member.store, request.reads
        read = request.blocks[:reads]
        present = bytes([store.here[block] for block in read])
        found = answer(request.mode, present, request.needs, masked=request.masked, window=request.window)
        if request.is_write:
            there = member.pool.write(self._write(store, request))
        else:
            there = present
            # A prefix may be known by the state of its end alone, without all of its blocks.
            store.touch([read[place] for place in found.positions if there[place]], request.now)
        if reads:
            member.count(request, found, there)
        return found if reads else None

    @staticmethod
    def _write(store: Store, request: _Request) -> Write:
        masks: Sequence[int] = store.masks_of(len(request.blocks))
        if request.names is not None:
            named = request.needs.any
            masks = [mask & named for mask in masks]
        if request.reads or request.masked is None:
            return Write(store, request.blocks, masks, request.now)
        left_out = padded(request.masked, len(masks))
        written = [place for place, is_left_out in enumerate(left_out) if not is_left_out]
        blocks = [request.blocks[place] for place in written]
        return Write(store, blocks, [masks[place] for place in written], request.now)

    def _look(self, place: int) -> None:
        stores = [member.store for member in self._members]
        used, evicted = [store.used for store in stores], [store.evicted for store in stores]
        self._looks.append((int(self._trace.times_us[place]), used, evicted))

    def result(self, hits: Int32Column | None, seconds: float) -> GroupReplay:
        """Return what was counted."""
        trace, shape = self._trace, (-1, len(self._members))
        unknown = (name for name, member in zip(trace.instance_names, self._by_instance, strict=True) if member is None)
        return GroupReplay(
            tuple(member.result() for member in self._members),
            tuple(unknown),
            np.array([look[0] for look in self._looks], np.int64),
            np.array([look[1] for look in self._looks], np.int64).reshape(shape),
            np.array([look[2] for look in self._looks], np.int64).reshape(shape),
            seconds,
            self._accesses,
            hits,
        )
