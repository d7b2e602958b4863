"""How long a request waits for its first token: the load of its hits and the prefill of the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.results import Replay
from kvcm.optimizer.roi.deployment import Deployment, Floats
from kvcm.optimizer.roi.returns import hit_tokens, loaded_tokens, offered_tokens_per_second
from kvcm.optimizer.trace import BoolColumn, Int32Column, Trace

__all__ = ["FirstTokens", "Queueing", "Spread", "Work", "first_tokens", "simulate", "spread_of", "work_of"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of requests in seconds; all 0 where there are none.

    Attributes:
        mean: over the requests.
        p50, p90, p95, p99: that so many per cent of them do not exceed.
        most: the longest.
    """

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What n requests ask of nodes, in the order of their arrivals.

    Attributes:
        arrivals: [n] seconds from the first one.
        loads: [n] whether something is loaded.
        link_seconds: [n] for which the load would have a link to itself; 0 without a load.
        prefill_seconds: [n] of the tokens that are not loaded.
        latency_seconds: of every load, before it needs the link.
    """

    arrivals: Floats
    loads: BoolColumn
    link_seconds: Floats
    prefill_seconds: Floats
    latency_seconds: float

    @property
    def load_seconds(self) -> Floats:
        """Return [n] L(k), 0 without a load."""
        return np.where(self.loads, self.latency_seconds + self.link_seconds, 0.0)

    @property
    def unqueued_seconds(self) -> Floats:
        """Return [n] the time to the first token when a request meets no other: L(k) + T(n, k)."""
        return self.load_seconds + self.prefill_seconds


def work_of(trace: Trace, deployment: Deployment, hit_blocks: Int32Column | None = None) -> Work:
    """Return what the reading requests of a trace ask of nodes.

    Their distances in time shrink by as much as more is offered than the trace does.

    Args:
        trace: of R requests.
        deployment: what loads and prefills take.
        hit_blocks: [R] leading resident blocks; None without a cache.

    Raises:
        OptionError: hits of another number of requests.
    """
    hit = np.zeros(len(trace), np.int32) if hit_blocks is None else hit_blocks
    if len(hit) != len(trace):
        raise OptionError(f"hits: {len(hit)} requests; allowed: those of the trace, {len(trace)}")
    reads = np.flatnonzero(trace.read_blocks > 0)
    reads = reads[np.argsort(trace.times_us[reads], kind="stable")]
    loaded = loaded_tokens(hit_tokens(trace, hit), deployment)[reads]
    tokens = trace.input_tokens[reads].astype(np.float64)
    seconds = trace.times_us[reads] / 1e6
    return Work(
        arrivals=(seconds - seconds.min(initial=np.inf)) * _stretch(trace, deployment),
        loads=loaded > 0,
        link_seconds=loaded * deployment.link_seconds_per_token,
        prefill_seconds=deployment.prefill.seconds(tokens, loaded),
        latency_seconds=deployment.latency_seconds,
    )


def spread_of(seconds: Floats) -> Spread:
    """Return how times of requests are spread; percentiles are times of requests, none between two."""
    if not len(seconds):
        return Spread(mean=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0, most=0.0)
    at = np.percentile(seconds, [50, 90, 95, 99, 100], method="inverted_cdf").tolist()
    return Spread(float(seconds.mean()), *at)


def _stretch(trace: Trace, deployment: Deployment) -> float:
    offered = offered_tokens_per_second(trace, deployment)
    return trace.totals.tokens / (trace.span_seconds * offered) if trace.span_seconds > 0 and offered > 0 else 1.0


# Requests that wait for each other: an event simulation of nodes, each with one link and one prefill at a time.
#
# Each request goes on arrival to the node with the fewest seconds of loads and prefills before it. Its load starts at
# once and shares the link of the node equally with the other loads there; a loaded request waits for the prefill in the
# order in which loads end. Loads are hidden behind prefills of others, which is what N(h) assumes.
#
# Hits are those of a replay, which knows no queues: they do not change with the time that requests wait.


@dataclass(frozen=True, slots=True, eq=False)
class Queueing:
    """What n requests met.

    Attributes:
        nodes: N.
        seconds: [n] from the arrival of each to its first token.
        waited_seconds: mean time that a request spent on neither its load, as fast as a link is, nor its prefill.
        prefill_busy: share of the time from the first arrival to the last token in which nodes prefill, 0 to 1.
        link_busy: the same of their links, without latencies.
    """

    nodes: int
    seconds: Floats
    waited_seconds: float
    prefill_busy: float
    link_busy: float

    @property
    def spread(self) -> Spread:
        """Return how the times to the first token are spread."""
        return spread_of(self.seconds)


def simulate(work: Work, *, nodes: int) -> Queueing:
    """Return what requests meet on so many nodes.

    Args:
        work: of the requests, see `work_of`.
        nodes: from 1 on.

    Raises:
        OptionError: no nodes.
    """
    if nodes < 1:
        raise OptionError(f"nodes: {nodes}; allowed: from 1")
    seconds = np.array(_Fleet(work, nodes).run(), np.float64) - work.arrivals
    span = float((work.arrivals + seconds).max(initial=0.0))
    node_seconds = nodes * span if span > 0 else 1.0
    waited = np.maximum(0.0, seconds - work.unqueued_seconds)
    return Queueing(
        nodes=nodes,
        seconds=seconds,
        waited_seconds=float(waited.mean()) if len(waited) else 0.0,
        prefill_busy=float(work.prefill_seconds.sum()) / node_seconds,
        link_busy=float(work.link_seconds.sum()) / node_seconds,
    )


class _Link:
    """Loads that share a link equally; `progress` is what a load has got that was there all the time."""

    __slots__ = ("_loads", "_progress", "_since")

    def __init__(self) -> None:
        self._loads: list[tuple[float, int]] = []  # (progress at which it ends, request)
        self._progress = 0.0
        self._since = 0.0

    def add(self, now: float, request: int, seconds: float) -> None:
        """Start a load that would take so many seconds alone."""
        self._advance(now)
        heappush(self._loads, (self._progress + seconds, request))

    def pop(self, now: float) -> int:
        """End the load that ends now; return its request."""
        self._advance(now)
        self._progress, request = heappop(self._loads)
        return request

    def next_end(self) -> float | None:
        """Return when the next load ends if none is added; None without loads."""
        if not self._loads:
            return None
        return self._since + max(0.0, self._loads[0][0] - self._progress) * len(self._loads)

    def _advance(self, now: float) -> None:
        if self._loads:
            self._progress += (now - self._since) / len(self._loads)
        self._since = now


class _Fleet:
    """Nodes driven by events in order of time.

    1. A request is in exactly one place: its latency, a link, a queue, a prefill, or done.
    2. A link has one event in the heap that counts, that of its present `_turns`; loads that are added make older ones
       void.
    3. `_ahead[node]` is the seconds of load and prefill that its requests which are not done had asked for.
    """

    def __init__(self, work: Work, nodes: int) -> None:
        self._prefills: list[float] = work.prefill_seconds.tolist()
        self._transfers: list[float] = work.link_seconds.tolist()
        self._asked: list[float] = (work.link_seconds + work.prefill_seconds).tolist()
        self._loads: list[bool] = work.loads.tolist()
        self._latency = work.latency_seconds
        self._arrivals: list[float] = work.arrivals.tolist()
        self._events: list[tuple[float, int, Callable[[float, int, int], None], int, int]] = []
        self._count = 0
        self._links = [_Link() for _ in range(nodes)]
        self._turns = [0] * nodes
        self._queues: list[deque[int]] = [deque() for _ in range(nodes)]
        self._prefilling = [False] * nodes
        self._present = [0] * nodes
        self._ahead = np.zeros(nodes)
        self.ends = [0.0] * len(self._arrivals)

    def run(self) -> list[float]:
        """Return when each request has its first token."""
        for request, arrival in enumerate(self._arrivals):
            self._run_until(arrival)
            self._arrive(arrival, request)
        self._run_until(float("inf"))
        return self.ends

    def _run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            now, _, happen, node, what = heappop(self._events)
            happen(now, node, what)

    def _at(self, time: float, happen: Callable[[float, int, int], None], node: int, what: int) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, happen, node, what))

    def _arrive(self, now: float, request: int) -> None:
        node = int(self._ahead.argmin())
        self._ahead[node] += self._asked[request]
        self._present[node] += 1
        if self._loads[request]:
            self._at(now + self._latency, self._start_load, node, request)
        else:
            self._wait(now, node, request)

    def _start_load(self, now: float, node: int, request: int) -> None:
        self._links[node].add(now, request, self._transfers[request])
        self._watch_link(node)

    def _watch_link(self, node: int) -> None:
        self._turns[node] += 1
        end = self._links[node].next_end()
        if end is not None:
            self._at(end, self._end_load, node, self._turns[node])

    def _end_load(self, now: float, node: int, turn: int) -> None:
        if turn == self._turns[node]:
            request = self._links[node].pop(now)
            self._watch_link(node)
            self._wait(now, node, request)

    def _wait(self, now: float, node: int, request: int) -> None:
        self._queues[node].append(request)
        if not self._prefilling[node]:
            self._start_prefill(now, node)

    def _start_prefill(self, now: float, node: int) -> None:
        request = self._queues[node].popleft()
        self._prefilling[node] = True
        self._at(now + self._prefills[request], self._end_prefill, node, request)

    def _end_prefill(self, now: float, node: int, request: int) -> None:
        self.ends[request] = now
        self._prefilling[node] = False
        self._present[node] -= 1
        # A node without requests has nothing ahead, whatever the sum of floats says.
        self._ahead[node] = self._ahead[node] - self._asked[request] if self._present[node] else 0.0
        if self._queues[node]:
            self._start_prefill(now, node)


# The time to the first token on nodes where requests wait for each other, with and without a cache.


@dataclass(frozen=True, slots=True, eq=False)
class FirstTokens:
    """The time to the first token with a cache of one capacity.

    Attributes:
        policy: label; "none" without a cache.
        capacity_blocks: 0 without a cache.
        unqueued: how it is spread when no request waits for another.
        queued: what requests met on the nodes.
    """

    policy: str
    capacity_blocks: int
    unqueued: Spread
    queued: Queueing


def first_tokens(
    trace: Trace, replays: Sequence[Replay], deployment: Deployment, *, nodes: int
) -> tuple[FirstTokens, ...]:
    """Return the time to the first token without a cache, and with that of each replay.

    Args:
        trace: that was replayed.
        replays: with their requests kept.
        deployment: what loads and prefills take.
        nodes: that the requests meet.

    Raises:
        OptionError: a replay kept no requests, or an input is out of its range.
    """
    found = []
    for replay in (None, *replays):
        if replay is not None and replay.request_hits is None:
            raise OptionError(f"replays: {replay.policy} kept no requests; allowed: replays with keep_requests")
        work = work_of(trace, deployment, None if replay is None else replay.request_hits)
        found.append(
            FirstTokens(
                policy="none" if replay is None else replay.policy,
                capacity_blocks=0 if replay is None else replay.capacity_blocks,
                unqueued=spread_of(work.unqueued_seconds),
                queued=simulate(work, nodes=nodes),
            )
        )
    return tuple(found)
