"""What a replay leaves behind, and what is counted from it (optimizer.md, Counting)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.replay.job import Job
from kvcm.optimizer.results import Hits, Replay
from kvcm.optimizer.trace import Int32Column, Trace

__all__ = ["Outcome", "counted"]


@dataclass(slots=True, eq=False)
class Outcome:
    """What a replay finds.

    Attributes:
        request_hits: [R] leading resident blocks of each request.
        request_resident: [R] blocks resident after each request.
        object_blocks: accesses to a resident block.
    """

    request_hits: Int32Column
    request_resident: Int32Column
    object_blocks: int


def counted(trace: Trace, job: Job, outcome: Outcome, seconds: float) -> Replay:
    """Return what a replay counts."""
    hits = outcome.request_hits
    tokens = np.minimum(hits * trace.tokens_per_block(), trace.input_tokens)
    is_full = (trace.read_blocks > 0) & (hits == trace.read_blocks)
    kept = (hits, outcome.request_resident) if job.keep_requests else (None, None)
    return Replay(
        job.spec.label,
        job.capacity_blocks,
        Hits(int(hits.sum(dtype=np.int64)), int(tokens.sum()), int(outcome.object_blocks), int(is_full.sum())),
        trace.totals,
        seconds,
        trace.accesses,
        *kept,
    )
