"""Replays a trace as a manager does (mode manager): the rehearsal of a group that holds so many blocks.

A row of this mode is what a manager with its metadata in its own process answers, hit by hit, to an engine that reads
and then writes at the times of the trace; `tests/optimizer/test_live_manager.py` compares them. Modes block and request
count otherwise, as tables of caches in the literature do:

* They access a request from its head to its tail, and evict a head that others follow: what follows it is resident
  then, and no hit. A manager accesses a request from its tail, and evicts the tail of a chain before its head.
* A manager writes its reads down once a second, and what a request writes is no candidate until it is written.

`belady` and `random_lru` are no policies of a manager: they are replayed in mode request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    EvictionPolicy,
    InstanceGroup,
    InstanceGroupQuota,
    TriggerStrategy,
)
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.live.recording import Access, Coverage, Finish, Lookup, Recording, Start
from kvcm.optimizer.live.rehearsal import UNLIMITED_BYTES, ResidentBlocks, rehearse
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay import Job, replay_all
from kvcm.optimizer.replay.engine import Outcome, check, counted
from kvcm.optimizer.results import Replay
from kvcm.optimizer.trace import Trace
from kvcm.reclaim.policies import POLICIES

__all__ = ["group_holding", "replay_all_in_manager"]

_INSTANCE = "trace"
_NO_FAILURES: frozenset[int] = frozenset()


def replay_all_in_manager(
    trace: Trace,
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Replay]:
    """Do jobs as a manager does and return what each counts, in the order of the jobs.

    Args:
        trace: a plain one; its instances are one, as in other modes.
        jobs: what to replay, whatever their mode.
        workers: threads for policies that no manager has; the others take turns.
        progress: called with the jobs done and all jobs.

    Raises:
        OptionError: one of them cannot be replayed; then none is.
    """
    for job in jobs:
        check(trace, job)
        _check_policy(job.spec)
    recording = _recording_of(trace)
    foreign = [replace(job, mode="request") for job in jobs if job.spec.name not in POLICIES]
    others = iter(replay_all(trace, foreign, workers=workers))
    done: list[Replay] = []
    for job in jobs:
        done.append(_rehearsed(trace, recording, job) if job.spec.name in POLICIES else next(others))
        if progress is not None:
            progress(len(done), len(jobs))
    return done


def group_holding(blocks: int, block_bytes: int, policy: EvictionPolicy) -> InstanceGroup:
    """Return the settings of a group that evicts down to so many blocks, and refuses no write."""
    trigger = TriggerStrategy(used_size=blocks * block_bytes, hysteresis=0.0)
    strategy = CacheReclaimStrategy(trigger_strategy=trigger, policy=policy)
    return InstanceGroup(
        "trace", quota=InstanceGroupQuota(UNLIMITED_BYTES), cache_config=CacheConfig(reclaim_strategy=strategy)
    )


def _check_policy(spec: PolicySpec) -> None:
    if spec.warmup:
        raise OptionError(f"policies: {spec.label} is no policy of a manager; allowed with --mode manager: s3fifo")
    if spec.name == "ttl" and not spec.ttl_seconds.is_integer():
        raise OptionError(f"policies: {spec.label} has no whole seconds; allowed with --mode manager: whole seconds")


def _recording_of(trace: Trace) -> Recording:
    accesses: list[Access] = []
    for request in range(len(trace)):
        at = int(trace.times_us[request]) / 1e6
        blocks = trace.request_blocks(request).tolist()
        accesses.append(Lookup(at, 0, blocks[: int(trace.read_blocks[request])], 0, is_prefix=True))
        if trace.writes[request]:
            accesses.append(Start(at, 0, request, blocks, 0))
            accesses.append(Finish(at, 0, request, _NO_FAILURES))
    return Recording(
        coverage=Coverage(0.0, 0.0, 0, 0),
        instance_names=(_INSTANCE,),
        accesses=accesses,
        owners=[0] * trace.unique_blocks,
        parents=trace.parents.tolist(),
        depths=_depths_of(trace.parents.tolist()),
        warm=(),
    )


def _depths_of(parents: Sequence[int]) -> list[int]:
    """Return how many blocks are before each; blocks are numbered in the order of their first access."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


class _Counter:
    """Counts what lookups find while a trace is rehearsed."""

    def __init__(self, trace: Trace) -> None:
        self._request = -1
        self.outcome = Outcome(np.zeros(len(trace), np.int32), np.zeros(len(trace), np.int32), 0)

    def count(self, access: Access, blocks: ResidentBlocks, used_blocks: int) -> None:
        """Count an access that was carried out; a lookup changes no residency."""
        if isinstance(access, Lookup):
            self._request += 1
            flags = [blocks.is_resident[block] for block in access.blocks]
            self.outcome.request_hits[self._request] = (*flags, 0).index(0)
            self.outcome.object_blocks += sum(flags)
        self.outcome.request_resident[self._request] = used_blocks


def _rehearsed(trace: Trace, recording: Recording, job: Job) -> Replay:
    spec = job.spec
    age = int(spec.ttl_seconds) if spec.name == "ttl" else 0
    policy = EvictionPolicy(spec.name, age, ttl_sliding=spec.name == "ttl" and spec.ttl_sliding)
    counter = _Counter(trace)
    began = time.perf_counter()
    rehearse(recording, group_holding(job.capacity_blocks, 1, policy), {_INSTANCE: 1}, observe=counter.count)
    return counted(trace, job, counter.outcome, time.perf_counter() - began)
