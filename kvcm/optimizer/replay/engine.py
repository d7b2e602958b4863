"""Replays policies at given capacities."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay.kernels.frequency import replay_lfu, replay_lfu_aging
from kvcm.optimizer.replay.kernels.future import replay_belady
from kvcm.optimizer.replay.kernels.recency import replay_fifo, replay_leaf_lru, replay_lru
from kvcm.optimizer.replay.kernels.requests import Requests, requests_of
from kvcm.optimizer.replay.kernels.s3fifo import replay_s3fifo
from kvcm.optimizer.replay.kernels.sampling import replay_random_lru
from kvcm.optimizer.replay.kernels.sieve import replay_sieve
from kvcm.optimizer.results import Hits, Replay
from kvcm.optimizer.trace import Int32Column, Trace

__all__ = ["Job", "Mode", "Outcome", "check", "counted", "replay", "replay_all"]

# Requests for replays, and which are rejected.

Mode = Literal["block", "request"]
"""Whether a cache is held to its capacity before each block that it takes, or after each request."""


@dataclass(frozen=True, slots=True)
class Job:
    """One replay.

    Attributes:
        spec: the policy.
        capacity_blocks: 1 or more.
        mode: `block` or `request`.
        keep_requests: whether the outcome of each request is kept.
    """

    spec: PolicySpec
    capacity_blocks: int
    mode: Mode = "block"
    keep_requests: bool = False


def check(trace: Trace, job: Job) -> None:
    """Do nothing if a job can be done.

    Raises:
        OptionError: it cannot.
    """
    if job.capacity_blocks < 1:
        raise OptionError(f"capacity_blocks: {job.capacity_blocks} is out of range; allowed: 1 or more")
    if job.mode not in get_args(Mode):
        raise OptionError(f"mode: {job.mode!r} is none; allowed: {', '.join(get_args(Mode))}")
    if not trace.is_plain:
        raise OptionError(
            f"trace: {trace.name!r} has requests with query modes, masks or location specs; allowed here: plain "
            "prefix reads. Replay it as groups (kvcm.optimizer.groups)"
        )


# The result of a replay, and the counts from it (optimizer.md, Counting).


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
    return Replay(
        policy=job.spec.label,
        capacity_blocks=job.capacity_blocks,
        hits=Hits(int(hits.sum(dtype=np.int64)), int(tokens.sum()), int(outcome.object_blocks), int(is_full.sum())),
        totals=trace.totals,
        seconds=seconds,
        accesses=trace.accesses,
        request_hits=hits if job.keep_requests else None,
        request_resident=outcome.request_resident if job.keep_requests else None,
    )


_LONGEST_FIRST = ("random_lru", "lfu_aging", "lfu", "s3fifo", "belady", "sieve", "ttl", "leaf_lru", "lru", "fifo")
_NO_LIMIT = -1


def replay(
    trace: Trace, spec: PolicySpec, capacity_blocks: int, *, mode: Mode = "block", keep_requests: bool = False
) -> Replay:
    """Replay one policy at one capacity; `kvcm.optimizer.replay.reference` says what each does in each mode.

    Args:
        trace: a plain one.
        spec: the policy.
        capacity_blocks: 1 or more.
        mode: `block` or `request`.
        keep_requests: whether the outcome of each request is kept.

    Raises:
        OptionError: this cannot be replayed.
    """
    job = Job(spec, capacity_blocks, mode, keep_requests)
    check(trace, job)
    return _replay_job(trace, requests_of(trace), job)


def replay_all(
    trace: Trace,
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Replay]:
    """Replay jobs in threads, the longest first, and return what each counts, in the order of the jobs.

    Args:
        trace: a plain one.
        jobs: what to replay.
        workers: threads; as many as there are processors by default.
        progress: called in the caller's thread with the jobs done and all jobs.

    Raises:
        OptionError: one of them cannot be replayed; then none is.
    """
    for job in jobs:
        check(trace, job)
    requests = requests_of(trace)
    done: dict[int, Replay] = {}
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        places = {pool.submit(_replay_job, trace, requests, jobs[place]): place for place in _longest_first(jobs)}
        for future in as_completed(places):
            done[places[future]] = future.result()
            if progress is not None:
                progress(len(done), len(jobs))
    return [done[place] for place in range(len(jobs))]


def _longest_first(jobs: Sequence[Job]) -> list[int]:
    """Return places of jobs by how long they take: that of a policy grows with what misses at a small capacity."""
    return sorted(
        range(len(jobs)),
        key=lambda place: (_LONGEST_FIRST.index(jobs[place].spec.name), jobs[place].capacity_blocks),
    )


def _replay_job(trace: Trace, requests: Requests, job: Job) -> Replay:
    kernel = _kernel(job.spec)
    by_request = job.mode == "request"
    hits, resident = np.zeros(len(trace), np.int32), np.zeros(len(trace), np.int32)
    # Over no requests, so that the time measured is none of the compiler's.
    kernel(requests._replace(read_blocks=requests.read_blocks[:0]), job.capacity_blocks, by_request, hits, resident)
    began = time.perf_counter()
    objects = kernel(requests, job.capacity_blocks, by_request, hits, resident)
    seconds = time.perf_counter() - began
    return counted(trace, job, Outcome(hits, resident, objects), seconds)


def _kernel(spec: PolicySpec) -> Callable[[Requests, int, bool, Int32Column, Int32Column], int]:
    most_age_us = round(spec.ttl_seconds * 1e6) if spec.name == "ttl" else _NO_LIMIT
    kernels: dict[str, Callable[[Requests, int, bool, Int32Column, Int32Column], int]] = {
        "lru": partial(replay_lru, most_age_us=_NO_LIMIT),
        "leaf_lru": replay_leaf_lru,
        "belady": partial(replay_belady, bypass=spec.bypass),
        "lfu": replay_lfu,
        "lfu_aging": replay_lfu_aging,
        "fifo": partial(replay_fifo, most_age_us=_NO_LIMIT),
        "sieve": replay_sieve,
        "s3fifo": partial(replay_s3fifo, warmup=spec.warmup),
        "ttl": partial(replay_lru if spec.ttl_sliding else replay_fifo, most_age_us=most_age_us),
        "random_lru": partial(replay_random_lru, sample=spec.sample, seed=spec.seed),
    }
    return kernels[spec.name]
