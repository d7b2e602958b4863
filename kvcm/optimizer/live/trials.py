"""Rehearsals of several settings, in processes beside each other where there is much to rehearse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from kvcm.model.groups import InstanceGroup
from kvcm.optimizer.live.recording import Lookup, Recording
from kvcm.optimizer.live.rehearsal import Outcome, rehearse

__all__ = ["Rehearse", "Trial", "rehearsals"]

_WORTH_A_PROCESS = 100_000  # accesses to blocks: below, a process takes longer to start


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings, and what they would have given."""

    group: InstanceGroup
    outcome: Outcome


Rehearse = Callable[[Sequence[InstanceGroup], Mapping[str, int], int], list[Trial]]
"""Rehearses one group with several settings: those, the bytes of a block by instance, and what the group uses now."""

_recording: Recording | None = None


@contextmanager
def rehearsals(recording: Recording, workers: int = 0) -> Iterator[Rehearse]:
    """Yield what rehearses settings inside the block.

    Args:
        recording: what to rehearse.
        workers: processes, 0 for one per core; one does without.
    """
    accesses = sum(len(access.blocks) for access in recording.accesses if isinstance(access, Lookup))
    workers = workers or len(os.sched_getaffinity(0))
    if workers == 1 or accesses < _WORTH_A_PROCESS:
        yield partial(_here, recording)
        return
    # Started afresh: whoever shows progress has threads, which a fork would leave behind.
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (recording,)) as pool:
        yield partial(_there, pool)


def _here(
    recording: Recording, groups: Sequence[InstanceGroup], block_bytes: Mapping[str, int], used_bytes: int
) -> list[Trial]:
    return [Trial(group, rehearse(recording, group, block_bytes, used_bytes)) for group in groups]


def _there(
    pool: ProcessPoolExecutor, groups: Sequence[InstanceGroup], block_bytes: Mapping[str, int], used_bytes: int
) -> list[Trial]:
    one = partial(_rehearse_known, block_bytes=dict(block_bytes), used_bytes=used_bytes)
    return [Trial(group, outcome) for group, outcome in zip(groups, pool.map(one, groups), strict=True)]


def _begin(recording: Recording) -> None:
    global _recording
    _recording = recording


def _rehearse_known(group: InstanceGroup, block_bytes: Mapping[str, int], used_bytes: int) -> Outcome:
    assert _recording is not None
    return rehearse(_recording, group, block_bytes, used_bytes)
