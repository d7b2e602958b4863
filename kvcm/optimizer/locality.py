"""How often, how soon and by whom blocks are used again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.curves import lru_curve
from kvcm.optimizer.results import Curve
from kvcm.optimizer.trace import BoolColumn, Int32Column, Int64Column, Trace

__all__ = [
    "Accesses",
    "Distribution",
    "FloatColumn",
    "Locality",
    "Popularity",
    "PrefixNode",
    "PrefixTree",
    "SessionReuse",
    "WorkingSet",
    "distribution",
    "locality_of",
    "valuable_prefixes",
]

# How values are spread: a cumulative curve that is small enough to draw, and exact quantiles.

FloatColumn = npt.NDArray[np.float64]
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_DISTRIBUTION_POINTS = 200


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Of a count of values.

    Attributes:
        count: of values.
        values: ascending; spaced evenly on a logarithmic scale where there are many.
        shares: what part of the values is at most so large.
        quantiles: by share: the least value that so many are at most as large as.
    """

    count: int
    values: FloatColumn
    shares: FloatColumn
    quantiles: Mapping[float, float] = field(default_factory=dict)


def distribution(samples: FloatColumn | Int64Column) -> Distribution:
    """Return how non-negative numbers are spread; nothing is known of none."""
    ordered = np.sort(samples).astype(np.float64)
    count = len(ordered)
    if not count:
        return Distribution(0, ordered, ordered)
    values = _thresholds(ordered)
    shares = np.searchsorted(ordered, values, side="right") / count
    places = [min(count - 1, max(0, int(np.ceil(share * count)) - 1)) for share in _QUANTILES]
    return Distribution(count, values, shares, dict(zip(_QUANTILES, ordered[places].tolist(), strict=True)))


def _thresholds(ordered: FloatColumn) -> FloatColumn:
    """Return the distinct values, or points between the least and the greatest where there are more than can be drawn.

    The greatest is among them as it is: a power of ten that is rounded must not leave it out.
    """
    distinct = np.unique(ordered)
    if len(distinct) <= _DISTRIBUTION_POINTS:
        return distinct
    positive = distinct[distinct > 0]
    spaced = np.geomspace(positive[0], positive[-1], _DISTRIBUTION_POINTS)
    return np.concatenate([distinct[:1], spaced[1:-1], distinct[-1:]])


# Each access of a trace beside the access of the same block before it: what all of these statistics are made of.


@dataclass(frozen=True, slots=True, eq=False)
class Accesses:
    """Accesses in the order of their replay.

    Attributes:
        requests: [N] the request of each.
        previous: [N] the access of the same block before it, -1 for its first.
        is_read: [N] whether the request reads the block; the others only write it.
        times_us: [N] of the request.
    """

    requests: Int32Column
    previous: Int64Column
    is_read: BoolColumn
    times_us: Int64Column

    @property
    def reuses(self) -> Int64Column:
        """Return the reads of blocks that were accessed before."""
        return np.flatnonzero(self.is_read & (self.previous >= 0))


def _accesses_of(trace: Trace) -> Accesses:
    """Return the accesses of a trace, beside those before them."""
    lengths = np.diff(trace.offsets)
    requests = np.repeat(np.arange(len(trace), dtype=np.int32), lengths)
    places = np.arange(trace.accesses) - np.repeat(trace.offsets[:-1], lengths)
    is_read = places < np.repeat(trace.read_blocks, lengths)
    return Accesses(requests, _previous(trace.blocks), is_read, trace.times_us[requests])


def _previous(blocks: Int32Column) -> Int64Column:
    order = np.argsort(blocks, kind="stable")
    is_again = np.concatenate([[False], blocks[order[1:]] == blocks[order[:-1]]])[: len(blocks)]
    previous = np.full(len(blocks), -1, np.int64)
    again = np.flatnonzero(is_again)
    previous[order[again]] = order[again - 1]
    return previous


# How unequally blocks are used.

_POPULARITY_POINTS = 100


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Blocks by the number of their accesses.

    Attributes:
        ranks: 1 for the most accessed block; spaced evenly on a logarithmic scale.
        accesses: of the block of that rank.
        shares: part of all accesses that go to the blocks up to that rank.
        zipf_exponent: s of accesses ~ rank^-s, by least squares on both logarithms over blocks accessed more than once,
            each of these points weighing the same; 0 where fewer than two ranks have such blocks.
        once_share: part of the blocks that are accessed once only: a cache keeps them in vain.
    """

    ranks: Int64Column
    accesses: Int64Column
    shares: FloatColumn
    zipf_exponent: float
    once_share: float


def _popularity_of(trace: Trace) -> Popularity:
    """Return how unequally the blocks of a trace are used."""
    counts = np.sort(np.bincount(trace.blocks, minlength=trace.unique_blocks))[::-1].astype(np.int64)
    if not len(counts):
        return Popularity(ranks=counts, accesses=counts, shares=np.zeros(0), zipf_exponent=0.0, once_share=0.0)
    ranks = np.unique(np.geomspace(1, len(counts), _POPULARITY_POINTS).round().astype(np.int64))
    shares = np.cumsum(counts)[ranks - 1] / counts.sum()
    once_share = float((counts == 1).mean())
    return Popularity(ranks, counts[ranks - 1], shares, _zipf_exponent(ranks, counts[ranks - 1]), once_share)


def _zipf_exponent(ranks: Int64Column, counts: Int64Column) -> float:
    again = counts > 1
    if again.sum() < 2:
        return 0.0
    slope, _ = np.polyfit(np.log(ranks[again]), np.log(counts[again]), 1)
    return max(0.0, -float(slope))


# Reuse of blocks: by the conversation that wrote them, or by another one.


@dataclass(frozen=True, slots=True, eq=False)
class SessionReuse:
    """Of a trace that names its sessions.

    Attributes:
        sessions: how many.
        own_share: part of the blocks read whose last user was the same session.
        other_share: part whose last user was another session, or one that is not named.
        new_share: part that was never accessed before.
        turns: requests per session.
        turn_interval_seconds: from one request of a session to its next.
        reuse_rates: of each session: the part of its blocks read that were accessed before.
    """

    sessions: int
    own_share: float
    other_share: float
    new_share: float
    turns: Distribution
    turn_interval_seconds: Distribution
    reuse_rates: Distribution


def _session_reuse_of(trace: Trace, accesses: Accesses) -> SessionReuse | None:
    """Return which conversations use blocks again; None where the trace names no sessions."""
    named = trace.sessions >= 0
    if not named.any():
        return None
    is_counted = accesses.is_read & named[accesses.requests]
    counted = np.flatnonzero(is_counted)
    users = trace.sessions[accesses.requests[counted]]
    before = accesses.previous[counted]
    is_again = before >= 0
    last_users = np.where(is_again, trace.sessions[accesses.requests[before]], -2)
    own, total = int((last_users == users).sum()), max(1, len(counted))
    again = int(is_again.sum())
    reads = np.bincount(users)
    reused = np.bincount(users, weights=is_again, minlength=len(reads))
    return SessionReuse(
        sessions=len(np.unique(trace.sessions[named])),
        own_share=own / total,
        other_share=(again - own) / total,
        new_share=(len(counted) - again) / total,
        turns=distribution(_positive(np.bincount(trace.sessions[named]))),
        turn_interval_seconds=distribution(_turn_intervals_us(trace) / 1e6),
        reuse_rates=distribution(reused[reads > 0] / reads[reads > 0]),
    )


def _positive(counts: Int64Column) -> Int64Column:
    return counts[counts > 0]


def _turn_intervals_us(trace: Trace) -> Int64Column:
    order = np.argsort(trace.sessions, kind="stable")
    order = order[trace.sessions[order] >= 0]
    is_same = trace.sessions[order[1:]] == trace.sessions[order[:-1]]
    intervals: Int64Column = (trace.times_us[order[1:]] - trace.times_us[order[:-1]])[is_same]
    return intervals


# How many different blocks are in use: over time, and by how far back "in use" reaches.
#
# A block is in the working set W(t, T) when it was accessed in the last T seconds before t (Denning 1968, "The working
# set model for program behavior"). A cache whose blocks live T seconds after their last access holds just this set.

_SAMPLES = 200
_LIFETIMES = 60
_WINDOWS_SECONDS = (10, 60, 300, 1800, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)


@dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """Blocks in use.

    Attributes:
        seconds: [S] since the first request.
        seen: [S] different blocks accessed until then.
        windows: seconds that a window reaches back -> [S] blocks in it.
        lifetimes_seconds: [L] how long blocks live after an access.
        mean_blocks: [L] blocks that so live, on average over the trace.
        hit_share: [L] part of the reads that find their block alive (the object hit rate of a cache without bound).
    """

    seconds: FloatColumn
    seen: Int64Column
    windows: dict[int, Int64Column]
    lifetimes_seconds: FloatColumn
    mean_blocks: FloatColumn
    hit_share: FloatColumn


def _working_set_of(trace: Trace, accesses: Accesses) -> WorkingSet:
    """Return how many blocks are in use."""
    since_us = accesses.times_us - (trace.times_us[0] if len(trace) else 0)
    span_us = int(trace.span_seconds * 1e6)
    next_us = _next_times(accesses, since_us)
    samples_us = np.linspace(0, span_us, _SAMPLES)
    seen = np.searchsorted(np.sort(since_us[accesses.previous < 0]), samples_us, side="right")
    windows = {
        seconds: _alive(since_us, next_us, seconds * 1e6, samples_us)
        for seconds in _WINDOWS_SECONDS
        if seconds * 1e6 <= span_us
    }
    lifetimes = np.geomspace(1.0, max(2.0, trace.span_seconds), _LIFETIMES)
    mean_blocks, hit_share = _by_lifetime(accesses, since_us, next_us, lifetimes, span_us)
    return WorkingSet(
        seconds=samples_us / 1e6,
        seen=seen,
        windows=windows,
        lifetimes_seconds=lifetimes,
        mean_blocks=mean_blocks,
        hit_share=hit_share,
    )


def _next_times(accesses: Accesses, since_us: Int64Column) -> FloatColumn:
    """Return [N] when the block of each access is accessed again; infinity if it is not."""
    next_us = np.full(len(since_us), np.inf)
    again = np.flatnonzero(accesses.previous >= 0)
    next_us[accesses.previous[again]] = since_us[again]
    return next_us


def _alive(since_us: Int64Column, next_us: FloatColumn, life_us: float, samples_us: FloatColumn) -> Int64Column:
    """Return the blocks whose last access is at most `life_us` ago, at each sample."""
    ends = np.minimum(next_us, np.nextafter(since_us + life_us, np.inf))
    begun = np.searchsorted(np.sort(since_us), samples_us, side="right")
    ended = np.searchsorted(np.sort(ends), samples_us, side="right")
    return (begun - ended).astype(np.int64)


def _by_lifetime(
    accesses: Accesses, since_us: Int64Column, next_us: FloatColumn, lifetimes: FloatColumn, span_us: int
) -> tuple[FloatColumn, FloatColumn]:
    """Return the mean number of living blocks and the part of reads that find theirs, for each lifetime.

    Both are sums over sorted gaps: a block lives for the gap to its next access, at most the lifetime, and not beyond
    the end of the trace.
    """
    gaps_us = np.sort(np.minimum(next_us, span_us) - since_us)
    sums = np.concatenate([[0.0], np.cumsum(gaps_us)])
    shorter = np.searchsorted(gaps_us, lifetimes * 1e6, side="right")
    living_us = sums[shorter] + (len(gaps_us) - shorter) * lifetimes * 1e6
    again = accesses.reuses
    waits_us = np.sort(since_us[again] - since_us[accesses.previous[again]])
    found = np.searchsorted(waits_us, lifetimes * 1e6, side="right")
    return living_us / max(1, span_us), found / max(1, int(accesses.is_read.sum()))


# All statistics of locality of a trace.


@dataclass(frozen=True, slots=True, eq=False)
class Locality:
    """How a trace uses its blocks again.

    Attributes:
        reuse_distance_blocks: of each access to a known block: different blocks accessed since its last access, itself
            included (the LRU stack distance; a cache of so many blocks still holds it).
        reuse_seconds: of each read of a known block: since its last access.
        revisit_seconds: of each request that finds its first block known: since the last access of the deepest known
            block of its prefix, which is the conversation or prompt it continues.
        popularity: how unequally blocks are used.
        working_set: how many blocks are in use.
        sessions: which conversations use blocks again; None where the trace names no sessions.
    """

    reuse_distance_blocks: Distribution
    reuse_seconds: Distribution
    revisit_seconds: Distribution
    popularity: Popularity
    working_set: WorkingSet
    sessions: SessionReuse | None


def locality_of(trace: Trace, lru: Curve | None = None) -> Locality:
    """Return how a trace uses its blocks again.

    Args:
        trace: any.
        lru: its curve, made if it is not there yet; of a trace with lookups that do not write, one is always made, in
            which they count as accesses like all others.
    """
    accesses = _accesses_of(trace)
    again = accesses.reuses
    waits_us = accesses.times_us[again] - accesses.times_us[accesses.previous[again]]
    if lru is None or not trace.writes.all():
        lru = lru_curve(replace(trace, writes=np.ones_like(trace.writes)))
    return Locality(
        reuse_distance_blocks=_distances(lru),
        reuse_seconds=distribution(waits_us / 1e6),
        revisit_seconds=distribution(_revisits_us(trace, accesses) / 1e6),
        popularity=_popularity_of(trace),
        working_set=_working_set_of(trace, accesses),
        sessions=_session_reuse_of(trace, accesses),
    )


def _distances(lru: Curve) -> Distribution:
    """Return the stack distances: so many blocks more are hits with every block of capacity."""
    counts = np.diff(lru.object_blocks)
    return distribution(np.repeat(np.arange(1, len(counts) + 1), counts))


def _revisits_us(trace: Trace, accesses: Accesses) -> Int64Column:
    """Return the wait of each reading request behind the last use of the deepest known block of its prefix."""
    is_known = accesses.is_read & (accesses.previous >= 0)
    # The first access of a request that is not a known block ends its prefix.
    ends = np.flatnonzero(~is_known)
    reading = np.flatnonzero(trace.read_blocks > 0)
    starts = trace.offsets[reading]
    places = np.searchsorted(ends, starts)
    first_ends = np.concatenate([ends, [trace.accesses]])[places]
    stops = np.minimum(first_ends, trace.offsets[reading + 1])
    deepest = stops[stops > starts] - 1
    waits: Int64Column = accesses.times_us[deepest] - accesses.times_us[accesses.previous[deepest]]
    return waits


# The most valuable prefixes, as a tree: which prompts a cache lives on.
#
# Blocks that follow each other and are saved equally often are one node, so a system prompt of a hundred blocks is one
# line. What a node saves are tokens that a cache without bound would not compute again.


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """Blocks that follow each other and are used again equally often.

    Attributes:
        parent: index into the tree's nodes of the nearest ancestor shown, -1 for none.
        level: how many ancestors are shown.
        instance: name of the instance.
        first_block: number of its first block in the trace.
        depth: of its first block, counted from 0.
        blocks: how many.
        reuses: how often each was read after its first access.
        saved_tokens: by its blocks.
        sessions: different sessions among its requests; 0 where the trace names none.
        first_seconds: first access, since the first request of the trace.
        last_seconds: last access.
    """

    parent: int
    level: int
    instance: str
    first_block: int
    depth: int
    blocks: int
    reuses: int
    saved_tokens: int
    sessions: int
    first_seconds: float
    last_seconds: float


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The nodes that save most, each behind its ancestors; siblings by what they save.

    Attributes:
        nodes: in the order of a walk from the roots.
        saved_tokens: by all nodes of the trace, shown or not.
        node_count: of the whole trace.
    """

    nodes: tuple[PrefixNode, ...]
    saved_tokens: int
    node_count: int


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """All nodes of a trace, by number; the columns are as in `PrefixNode`."""

    of_block: Int64Column
    heads: Int64Column
    parents: Int64Column
    blocks: Int64Column
    reuses: Int64Column
    saved_tokens: Int64Column


def valuable_prefixes(trace: Trace, most: int = 40) -> PrefixTree:
    """Return the prefixes that save most.

    Args:
        trace: with one parent per block; where blocks have several, the first is taken.
        most: nodes to choose; their ancestors come on top.
    """
    accesses = _accesses_of(trace)
    saved = np.bincount(trace.blocks[accesses.reuses], minlength=trace.unique_blocks)
    nodes = _nodes_of(trace, saved)
    ranked = np.argsort(-nodes.saved_tokens, kind="stable")[:most]
    shown = _with_ancestors(nodes, [int(node) for node in ranked if nodes.saved_tokens[node] > 0])
    walked = _nodes_in_order(trace, accesses, nodes, shown) if shown else ()
    return PrefixTree(walked, int(nodes.saved_tokens.sum()), len(nodes.heads))


def _nodes_of(trace: Trace, saved: Int64Column) -> _Nodes:
    parents = trace.parents.astype(np.int64)
    is_head = (parents < 0) | (saved != saved[parents])
    head = np.where(is_head, np.arange(len(parents)), parents)
    while not np.array_equal(further := head[head], head):
        head = further
    heads, of_block, blocks = np.unique(head, return_inverse=True, return_counts=True)
    block_tokens = np.array(trace.instance_block_tokens, np.int64)[_instance_of_blocks(trace)[heads]]
    above = parents[heads]
    return _Nodes(
        of_block=of_block,
        heads=heads,
        parents=np.where(above < 0, -1, of_block[above]),
        blocks=blocks,
        reuses=saved[heads],
        saved_tokens=saved[heads] * blocks * block_tokens,
    )


def _instance_of_blocks(trace: Trace) -> Int32Column:
    instances = np.zeros(trace.unique_blocks, np.int32)
    instances[trace.blocks] = np.repeat(trace.instances, np.diff(trace.offsets))
    return instances


def _with_ancestors(nodes: _Nodes, chosen: list[int]) -> set[int]:
    shown: set[int] = set()
    for node in chosen:
        at = node
        while at >= 0 and at not in shown:
            shown.add(at)
            at = int(nodes.parents[at])
    return shown


def _nodes_in_order(trace: Trace, accesses: Accesses, nodes: _Nodes, shown: set[int]) -> tuple[PrefixNode, ...]:
    depths, instances = _depths(trace.parents), _instance_of_blocks(trace)
    uses = _uses_of_heads(trace, nodes, shown)
    children: dict[int, list[int]] = {}
    for node in sorted(shown, key=lambda node: (-nodes.saved_tokens[node], node)):
        children.setdefault(int(nodes.parents[node]), []).append(node)
    found: list[PrefixNode] = []
    waiting = [(node, -1, 0) for node in reversed(children.get(-1, []))]
    while waiting:
        node, parent, level = waiting.pop()
        head = int(nodes.heads[node])
        requests = accesses.requests[uses[node]]
        seconds = (trace.times_us[requests[[0, -1]]] - trace.times_us[0]) / 1e6
        sessions = trace.sessions[requests]
        found.append(
            PrefixNode(
                parent=parent,
                level=level,
                instance=trace.instance_names[instances[head]],
                first_block=head,
                depth=int(depths[head]),
                blocks=int(nodes.blocks[node]),
                reuses=int(nodes.reuses[node]),
                saved_tokens=int(nodes.saved_tokens[node]),
                sessions=len(np.unique(sessions[sessions >= 0])),
                first_seconds=float(seconds[0]),
                last_seconds=float(seconds[1]),
            )
        )
        waiting += [(child, len(found) - 1, level + 1) for child in reversed(children.get(node, []))]
    return tuple(found)


def _uses_of_heads(trace: Trace, nodes: _Nodes, shown: set[int]) -> dict[int, Int64Column]:
    """Return the accesses of each shown node's first block."""
    wanted = np.zeros(trace.unique_blocks, np.bool_)
    wanted[nodes.heads[sorted(shown)]] = True
    places = np.flatnonzero(wanted[trace.blocks])
    order = np.argsort(trace.blocks[places], kind="stable")
    places = places[order]
    blocks, starts = np.unique(trace.blocks[places], return_index=True)
    parts = np.split(places, starts[1:])
    return {int(nodes.of_block[block]): part for block, part in zip(blocks, parts, strict=True)}


def _depths(parents: Int32Column) -> Int64Column:
    """Return [U] depths; each step looks twice as far up."""
    up = parents.astype(np.int64)
    depths = np.where(up >= 0, 1, 0)
    while (up >= 0).any():
        has_more = up >= 0
        depths = depths + np.where(has_more, depths[up], 0)
        up = np.where(has_more, up[up], -1)
    return depths
