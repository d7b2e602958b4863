"""Replays a trace as the original optimizer does.

A read walks its keys until the first one that is not cached, masked ones included; hits are internal where they are
masked and external elsewhere. A write inserts what is not cached; then blocks are evicted while the group uses more
than its limit: in mode 1 rounds of a batch from every instance of the group, in mode 2 batches from the instance that
writes, in mode 3 from that one exactly what is too much. A turn of a dialogue reads and writes in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups.numbering import Numbering
from kvcm.optimizer.groups.original.cache import OriginalCache
from kvcm.optimizer.groups.original.config import OriginalConfig, OriginalGroup
from kvcm.optimizer.trace import Int32Column, QueryMode, Trace

__all__ = ["OriginalReplay", "Row"]

_ONLY_TURNS = "optimizer_schema"


class Row(NamedTuple):
    """What is said of one read.

    Attributes:
        timestamp_us: of the request.
        cached_here: blocks of the instance, after the write and the eviction of a turn.
        cached: blocks of every instance of the configuration, in its order.
        internal_read, external_read: blocks that were asked for, masked and not masked.
        internal_hits, external_hits: that were cached.
        accumulated: internal hits, external hits and blocks of all reads of the instance so far.
    """

    timestamp_us: int
    cached_here: int
    cached: tuple[int, ...]
    internal_read: int
    external_read: int
    internal_hits: int
    external_hits: int
    accumulated: tuple[int, int, int]


class _Group:
    """A group at work."""

    def __init__(self, group: OriginalGroup, config: OriginalConfig, caches: Sequence[OriginalCache]) -> None:
        self._limit = group.limit
        self._mode = config.eviction_mode
        self._batch = config.batch_size
        self._caches = caches

    def evict_after(self, writer: OriginalCache) -> None:
        """Evict what is too much after a write."""
        givers = self._caches if self._mode == 1 else [writer]
        while (excess := self._excess()) > 0 and any(givers):
            for cache in givers:
                cache.evict(excess if self._mode == 3 else self._batch)

    def _excess(self) -> int:
        return sum(len(cache) for cache in self._caches) - self._limit


class OriginalReplay:
    """A replay.

    Args:
        trace: any one; requests of instances that are not configured are left out, and so are reads that are none of
            a prefix.
        config: of the original.

    Attributes:
        caches: of the instances, in the order of the configuration, as they are now.
        unknown_instances: of the trace that are not configured.

    Raises:
        OptionError: no instance of the trace is configured.
    """

    def __init__(self, trace: Trace, config: OriginalConfig) -> None:
        self._trace = trace
        self._numbering = Numbering.of(trace)
        self._only_turns = config.trace_type == _ONLY_TURNS
        self.caches: list[OriginalCache] = []
        self._groups: dict[str, _Group] = {}
        for group in config.groups:
            self._open(group, config)
        by_name = {cache.instance.instance_id: cache for cache in self.caches}
        self._by_instance = [by_name.get(name) for name in trace.instance_names]
        self.unknown_instances = tuple(name for name in trace.instance_names if name not in by_name)
        if len(trace) and len(self.unknown_instances) == len(trace.instance_names):
            wanted, there = ", ".join(by_name), ", ".join(trace.instance_names)
            raise OptionError(f"instance_id: none of {wanted} is in the trace; allowed: {there}")
        self._sums = dict.fromkeys(by_name, (0, 0, 0))

    def _open(self, group: OriginalGroup, config: OriginalConfig) -> None:
        names = self._trace.instance_names
        caches = []
        for instance in group.instances:
            is_there = instance.instance_id in names
            parents = self._numbering.parents[names.index(instance.instance_id)] if is_there else np.zeros(0, np.int32)
            caches.append(OriginalCache(instance, parents))
        at_work = _Group(group, config, caches)
        self._groups.update(dict.fromkeys((instance.instance_id for instance in group.instances), at_work))
        self.caches += caches

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Replay, and yield the instance and the row of each read. To be called once."""
        trace = self._trace
        for request, instance in enumerate(trace.instances.tolist()):
            cache = self._by_instance[instance]
            if cache is None or not self._is_replayed(request):
                continue
            blocks = self._numbering.blocks[trace.offsets[request] : trace.offsets[request + 1]]
            hits = self._serve(cache, request, blocks)
            if hits is not None:
                yield cache.instance.instance_id, self._row(cache, request, *hits)

    def _is_replayed(self, request: int) -> bool:
        is_turn = self._trace.writes[request] and self._trace.read_blocks[request]
        return self._trace.modes.get(request, QueryMode.PREFIX) is QueryMode.PREFIX and (
            is_turn or not self._only_turns
        )

    def _serve(self, cache: OriginalCache, request: int, blocks: Int32Column) -> tuple[int, int, int] | None:
        """Replay a request; return the blocks that it read masked, and its internal and external hits."""
        trace = self._trace
        reads, writes = int(trace.read_blocks[request]), bool(trace.writes[request])
        prefix = cache.prefix(blocks[:reads])
        cache.access(blocks if writes else blocks[:prefix])
        if writes:
            self._groups[cache.instance.instance_id].evict_after(cache)
        if not reads:
            return None
        masked = trace.masks.get(request)
        if writes or masked is None:  # all that a turn reads is external
            return 0, 0, prefix
        internal = int(masked[:prefix].sum())
        return int(masked[:reads].sum()), internal, prefix - internal

    def _row(self, cache: OriginalCache, request: int, masked: int, internal: int, external: int) -> Row:
        name, reads = cache.instance.instance_id, int(self._trace.read_blocks[request])
        sums = self._sums[name]
        sums = self._sums[name] = (sums[0] + internal, sums[1] + external, sums[2] + reads)
        cached = tuple(len(each) for each in self.caches)
        time = int(self._trace.times_us[request])
        return Row(time, len(cache), cached, masked, reads - masked, internal, external, sums)
