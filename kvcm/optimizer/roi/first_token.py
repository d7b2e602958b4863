"""How long a request waits for its first token: the load of its hits and the prefill of the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.roi.deployment import Deployment
from kvcm.optimizer.roi.formulas import Floats
from kvcm.optimizer.roi.returns import offered_tokens_per_second
from kvcm.optimizer.roi.reuse import hit_tokens, loaded_tokens
from kvcm.optimizer.trace import BoolColumn, Int32Column, Trace

__all__ = ["Spread", "Work", "spread_of", "work_of"]


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
        prefill_seconds: [n] of what is not loaded.
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
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    at = np.percentile(seconds, [50, 90, 95, 99, 100], method="inverted_cdf").tolist()
    return Spread(float(seconds.mean()), *at)


def _stretch(trace: Trace, deployment: Deployment) -> float:
    offered = offered_tokens_per_second(trace, deployment)
    return trace.totals.tokens / (trace.span_seconds * offered) if trace.span_seconds > 0 and offered > 0 else 1.0
