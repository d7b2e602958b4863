"""What it is worth that engines share one pool."""

from __future__ import annotations

from kvcm.optimizer.pooling import Engines, PoolingStudy, compare_pooling
from kvcm.optimizer.study.options import StudyOptions
from kvcm.optimizer.trace import Trace

__all__ = ["pooling_of"]


def pooling_of(trace: Trace, options: StudyOptions, capacity_blocks: int) -> PoolingStudy:
    """Compare caches of single engines with one pool that is as large as all of them together.

    Args:
        trace: that is replayed.
        options: how many engines there are.
        capacity_blocks: of the pool.

    Raises:
        OptionError: a number of engines that is none.
        TraceError: requests read otherwise than a prefix.
    """
    local = max(1, capacity_blocks // max(1, options.engines))
    engines = Engines(options.engines, local, options.deployment.prefill_tokens_per_second)
    kv_bytes = max(1, round(options.deployment.kv_bytes_per_token))
    return compare_pooling(trace, engines, kv_bytes_per_token=kv_bytes, workers=options.workers)
