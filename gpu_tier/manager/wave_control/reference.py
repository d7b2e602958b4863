"""The control in Python: the definition, and the fallback without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcm.gpu_tier.manager.wave_control.tables import Change, Changes, ClusterTable, Int64s, Lines, Places, Plan, Stat
from kvcm.gpu_tier.types import Source

__all__ = ["SEED", "ReferenceControl", "mixed"]

SEED = 0x5EED
"""Of the policy `random`."""
_WORD = (1 << 64) - 1


def mixed(x: int) -> int:
    """Return 64 bits that depend on all bits of x (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


class ReferenceControl:
    """See `Control`. One thread decides updates, in the order in which they were begun.

    Args:
        policy: one of `CACHE_POLICIES`.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wave-update")

    def wake(self) -> None:
        """See `Control`."""

    def lookup(self, lines: Lines, plan: Plan) -> None:
        """See `Control`."""
        plan.stats[:] = 0
        plan.count[:] = 0
        plan.lens[:] = 0
        for line in range(lines.count):
            _lookup(lines, plan, line)

    def begin_update(self, lines: Lines, changes: Changes) -> Callable[[], None]:
        """See `Control`."""
        ended = self._thread.submit(self._update, lines, changes)
        return lambda: ended.result()

    def _update(self, lines: Lines, changes: Changes) -> None:
        changes.counts[:] = 0
        for line in range(lines.count):
            row, head = divmod(line, lines.tables.num_heads)
            if lines.first[row] >= 0:
                _update_line(
                    lines=lines,
                    changes=changes,
                    line=line,
                    table=lines.tables.table(int(lines.requests[row])),
                    head=head,
                    policy=self._policy,
                )

    def close(self) -> None:
        """See `Control`."""
        self._thread.shutdown()


@dataclass(slots=True)
class _Runs:
    """Runs of a line, longer ones where one continues another: (kind, source slot, target slot, tokens)."""

    places: Places
    dst: int
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, kind: Source, slot: int, tokens: int) -> None:
        if self.runs:
            last_kind, src, dst, length = self.runs[-1]
            if last_kind == kind and src + length == slot:
                self.runs[-1] = last_kind, src, dst, length + tokens
                self.dst += tokens
                return
        self.runs.append((int(kind), slot, self.dst, tokens))
        self.dst += tokens

    def add_places(self, kind: Source, place: int, tokens: int) -> None:
        for slot, length in _stretches(self.places, place, tokens):
            self.add(kind, slot, length)


def _stretches(places: Places, place: int, tokens: int) -> list[tuple[int, int]]:
    """Return places as (slot, tokens) of slots that follow each other."""
    found = []
    while tokens > 0:
        length = min(tokens, int(places.stretch[place]))
        found.append((int(places.slots[place]), length))
        place += length
        tokens -= length
    return found


def _steady_tokens(places: Places, first: int, tokens: int) -> tuple[int, int]:
    """Return the steady tokens in the sink, and those behind it."""
    sink = min(places.ring.sink, tokens)
    return sink, max(0, tokens - max(first, sink))


def _add_steady(runs: _Runs, first: int, tokens: int) -> None:
    ring = runs.places.ring
    sink, in_ring = _steady_tokens(runs.places, first, tokens)
    runs.add_places(Source.STEADY, 0, sink)
    token = tokens - in_ring
    while token < tokens:
        place = ring.position(token)
        length = min(tokens - token, ring.capacity - place)
        runs.add_places(Source.STEADY, place, length)
        token += length


def _lookup(lines: Lines, plan: Plan, line: int) -> None:
    row, head = divmod(line, lines.tables.num_heads)
    first, tokens = int(lines.first[row]), int(lines.tokens[row])
    if first < 0:
        return
    table, stats = lines.tables.table(int(lines.requests[row])), plan.stats[line]
    assert table.places is not None
    if sum(_steady_tokens(table.places, first, tokens)) > table.places.ring.capacity:
        stats[Stat.BAD] = 2
        return
    ids = _ids(lines, row, head)
    if any(not 0 <= cluster < table.num_clusters for cluster in ids):
        stats[Stat.BAD] = 1
        return
    runs = _Runs(table.places, row * lines.row_slots)
    _add_steady(runs, first, tokens)
    for cluster in ids:
        _add_cluster(
            runs=runs, table=table, head=head, cluster=cluster, block_tokens=lines.tables.block_tokens, stats=stats
        )
    stats[Stat.RUNS] = len(runs.runs)
    stats[Stat.TOKENS] = plan.lens[line] = runs.dst - row * lines.row_slots
    plan.count[line] = min(len(runs.runs), plan.capacity)
    for number, (kind, src, dst, length) in enumerate(runs.runs[: plan.capacity]):
        plan.kind[line, number], plan.src[line, number] = kind, src
        plan.dst[line, number], plan.tokens[line, number] = dst, length


def _ids(lines: Lines, row: int, head: int) -> list[int]:
    return [int(cluster) for cluster in lines.ids[row, head, : lines.lengths[row, head]]]


def _add_cluster(runs: _Runs, table: ClusterTable, head: int, cluster: int, block_tokens: int, stats: Int64s) -> None:
    first, tokens = (int(number) for number in table.clusters[head, cluster])
    if not tokens:
        return
    count = -(-tokens // block_tokens)
    blocks = table.blocks[head, first : first + count]
    hit = int(blocks["place"][0]) >= 0
    assert table.places is not None
    for number, (host, place) in enumerate(blocks.tolist()):
        length = min(block_tokens, tokens - number * block_tokens)
        if hit:
            runs.add_places(Source.CACHE, table.places.ring.capacity + place * block_tokens, length)
        else:
            runs.add(Source.HOST, host * block_tokens, length)
    counted = {Stat.CLUSTERS: 1, Stat.BLOCKS: count, Stat.CLUSTER_TOKENS: tokens}
    for stat, number in counted.items():
        stats[stat] += number
        stats[stat + 1] += number * hit


def _update_line(lines: Lines, changes: Changes, line: int, table: ClusterTable, head: int, policy: str) -> None:
    if not table.capacity:
        return
    row = line // lines.tables.num_heads
    assert table.places is not None
    cache = _Cache(table, head, policy, lines.tables.block_tokens)
    ids = [cluster for cluster in _ids(lines, row, head) if table.clusters[head, cluster]["tokens"]]
    for cluster in ids:
        cache.use(cluster)
    start = row * lines.row_slots + sum(_steady_tokens(table.places, int(lines.first[row]), int(lines.tokens[row])))
    copies: list[tuple[int, int, int]] = []
    for cluster in ids:
        tokens = int(table.clusters[head, cluster]["tokens"])
        if table.index[head, cluster] < 0:
            _copy_blocks(
                copies=copies,
                places=table.places,
                block_places=cache.admit(cluster),
                src=start,
                tokens=tokens,
                block_tokens=lines.tables.block_tokens,
            )
            changes.counts[line, Change.ADMISSIONS] += int(table.index[head, cluster] >= 0)
        start += tokens
    for number, (src, dst, length) in enumerate(copies):
        changes.src[line, number], changes.dst[line, number], changes.tokens[line, number] = src, dst, length
    changes.counts[line, Change.COPIES] = len(copies)
    changes.counts[line, Change.EVICTIONS] = cache.evictions


def _copy_blocks(
    copies: list[tuple[int, int, int]],
    places: Places,
    block_places: list[int],
    src: int,
    tokens: int,
    block_tokens: int,
) -> None:
    for number, block in enumerate(block_places):
        length = min(block_tokens, tokens - number * block_tokens)
        for slot, part in _stretches(places, places.ring.capacity + block * block_tokens, length):
            last_src, last_dst, last = copies[-1] if copies else (-1, -1, 0)
            if copies and (last_src + last, last_dst + last) == (src, slot):
                copies[-1] = last_src, last_dst, last + part
            else:
                copies.append((src, slot, part))
            src += part


class _Cache:
    """The cache of one line while it is being changed."""

    def __init__(self, table: ClusterTable, head: int, policy: str, block_tokens: int) -> None:
        self._table, self._head, self._policy, self._block_tokens = table, head, policy, block_tokens
        self._begin = int(table.heads["sequence"][head])
        self.evictions = 0

    def use(self, cluster: int) -> None:
        heads = self._table.heads
        heads["sequence"][self._head] += 1
        self._table.used[self._head, cluster] = heads["sequence"][self._head]
        self._table.times[self._head, cluster] += 1

    def admit(self, cluster: int) -> list[int]:
        """Return the block places of a cluster, none when it cannot be taken in."""
        table, head = self._table, self._head
        blocks = self._blocks(cluster)
        if len(blocks) > table.capacity or not self._evict_until(len(blocks)):
            return []
        free = int(table.heads["free"][head])
        given = table.free[head, free - len(blocks) : free][::-1].copy()
        table.heads["free"][head] = free - len(blocks)
        blocks["place"] = given
        table.index[head, cluster] = table.heads["residents"][head]
        table.residents[head, table.index[head, cluster]] = cluster
        table.heads["residents"][head] += 1
        table.admitted[head, cluster] = table.used[head, cluster]
        return [int(place) for place in given]

    def _blocks(self, cluster: int) -> npt.NDArray[np.void]:
        first, tokens = (int(number) for number in self._table.clusters[self._head, cluster])
        return self._table.blocks[self._head, first : first + -(-tokens // self._block_tokens)]

    def _evict_until(self, wanted: int) -> bool:
        heads, head = self._table.heads, self._head
        cached = self._table.residents[head, : heads["residents"][head]].tolist()
        old = [cluster for cluster in cached if self._table.used[head, cluster] <= self._begin]
        if heads["free"][head] + sum(len(self._blocks(cluster)) for cluster in old) < wanted:
            return False
        for cluster in sorted(old, key=self._key):
            if heads["free"][head] >= wanted:
                break
            self._evict(cluster)
        return True

    def _key(self, cluster: int) -> tuple[int, int]:
        table, head = self._table, self._head
        used = int(table.used[head, cluster])
        if self._policy == "lfu":
            return int(table.times[head, cluster]), used
        if self._policy == "fifo":
            return int(table.admitted[head, cluster]), 0
        if self._policy == "random":
            return mixed(mixed(SEED ^ self._begin) ^ (head << 32 | cluster)), 0
        return used, 0

    def _evict(self, cluster: int) -> None:
        table, head = self._table, self._head
        blocks, heads = self._blocks(cluster), table.heads
        free = int(heads["free"][head])
        table.free[head, free : free + len(blocks)] = blocks["place"]
        heads["free"][head] += len(blocks)
        blocks["place"] = -1
        heads["residents"][head] -= 1
        last, index = table.residents[head, heads["residents"][head]], table.index[head, cluster]
        table.residents[head, index] = last
        table.index[head, last] = index
        table.index[head, cluster] = -1
        self.evictions += 1
