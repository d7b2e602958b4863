"""Estimates for routers: the seconds that an engine saves by what it holds of a prompt, or can load.

For an engine that holds, from the prompt's start, `gpu` tokens in GPU memory, `host` in GPU or host memory, `disk` in
these or on disk, and `joint` in these or in a storage (gpu <= host <= disk <= joint), it can stop loading after any of
the four. Up to each, with b bytes per token, B bytes per second of a medium and C tokens computed per second:

    seconds = (host - gpu) b / B_host + (disk - host) b / B_disk + (joint - disk) b / B_storage + (prompt - usable) / C

An engine does what takes least, and its score is prompt / C minus that: the seconds saved against computing everything.
Loading and computing are added up, although engines overlap them in part: the order of engines is what counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcm.residency.block_holders import Prefixes

__all__ = ["Costs", "Estimates", "estimate"]

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """What loading and computing cost.

    Attributes:
        compute_tokens_per_second: that an engine computes.
        host_bytes_per_second: that it loads from the host's memory.
        disk_bytes_per_second: from the host's disk.
        storage_bytes_per_second: from a storage.
    """

    compute_tokens_per_second: float = 10_000.0
    host_bytes_per_second: float = 20e9
    disk_bytes_per_second: float = 3e9
    storage_bytes_per_second: float = 2e9


class Estimates(NamedTuple):
    """Seconds for each engine.

    Attributes:
        load: to load blocks into GPU memory.
        compute: to compute the rest.
        saved: against computing everything; at least 0.
    """

    load: Seconds
    compute: Seconds
    saved: Seconds


def estimate(
    prefixes: Prefixes, *, prompt_tokens: int, block_tokens: int, bytes_per_token: float, costs: Costs
) -> Estimates:
    """Return estimates for each engine.

    Args:
        prefixes: blocks that it holds.
        prompt_tokens: of the whole prompt.
        block_tokens: tokens of a block.
        bytes_per_token: of KV.
        costs: of loading and computing.
    """
    usable = np.minimum(np.stack(prefixes) * block_tokens, prompt_tokens)
    rates = np.array([costs.host_bytes_per_second, costs.disk_bytes_per_second, costs.storage_bytes_per_second])
    load = np.zeros(usable.shape)
    np.cumsum(np.diff(usable, axis=0) * (bytes_per_token / rates)[:, None], axis=0, out=load[1:])
    compute = (prompt_tokens - usable) / costs.compute_tokens_per_second
    best = (load + compute).argmin(axis=0)
    engines = np.arange(usable.shape[1])
    load, compute = load[best, engines], compute[best, engines]
    return Estimates(load, compute, prompt_tokens / costs.compute_tokens_per_second - load - compute)
