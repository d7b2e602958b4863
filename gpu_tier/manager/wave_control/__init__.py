"""Looks selected clusters up and decides what the block cache takes in and gives up: the wave buffer's control.

Two implementations with the same results, run for run and place for place: `native` (C++, on threads) and `reference`
(Python), which is used where there is no compiler.

A *line* is one KV head of one row of the batch. Rules of the update of a line, in which clusters are taken in the order
of the selection and empty ones count for nothing:

1. All selected clusters are used: each gets the next number of the line's sequence, and one more use.
2. A cluster that is not cached is taken in, unless it has more blocks than the cache, or than are free and can be made
   free. Its blocks get places from the end of the list of free ones.
3. For free places, cached clusters that this step did not use are given up, one after the other until the cluster fits,
   in the order of the policy: lru (least recently used first), lfu (fewest uses, then least recently used), fifo (taken
   in first), random (by a hash of seed, step and cluster).
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.errors import ConfigError, KernelUnavailableError
from kvcm.gpu_tier.manager.wave_control.reference import ReferenceControl
from kvcm.gpu_tier.manager.wave_control.tables import Change, Changes, Control, Lines, Plan, Stat

__all__ = ["CONTROLS", "Change", "Changes", "Control", "Lines", "Plan", "Stat", "make"]

CONTROLS = ("auto", "native", "reference")

_log = logging.getLogger(__name__)


def make(settings: RetroInferConfig, name: str = "auto") -> Control:
    """Return the control.

    Args:
        settings: of RetroInfer; `policy` and `cpu_threads` (at most one per core) are used.
        name: native, reference, or auto for native where it can be built.

    Raises:
        ConfigError: there is no such control.
        KernelUnavailableError: native was asked for, and it cannot be built.
    """
    if name not in CONTROLS:
        raise ConfigError.choice("control", name, CONTROLS)
    if name == "reference":
        return ReferenceControl(settings.policy)
    from kvcm.gpu_tier.manager.wave_control.native import NativeControl

    threads = min(settings.cpu_threads, os.cpu_count() or 1)
    try:
        return NativeControl(settings.policy, threads)
    except KernelUnavailableError as error:
        if name == "native":
            raise
        _warn_once(f"the wave buffer is controlled by Python, which is slow: {error}")
        return ReferenceControl(settings.policy)


@lru_cache
def _warn_once(message: str) -> None:
    _log.warning(message)
