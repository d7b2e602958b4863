"""Which engine a request belongs to before anybody looks at loads: by chance, or by a consistent hash."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcm.optimizer.pooling.router import Router
from kvcm.optimizer.trace import Int32Column, Trace

__all__ = ["homes_of", "keys_of"]

Words = npt.NDArray[np.uint64]

_DEEPEST = 64


def homes_of(trace: Trace, router: Router, engines: int, *, affinity_blocks: int | None, seed: int) -> Int32Column:
    """Return [R] an engine for each request.

    With `affinity` it is that of the request's session; where the trace names none, that of its first
    `affinity_blocks` blocks. If that is None, they are so many that no engine gets more than its share of the requests
    for one prefix's sake, up to 64: where all begin with one system prompt, its blocks keep nothing apart. Engines are
    found by rendezvous hashing: one engine more takes over its share of the sessions, and no session moves between the
    others. With other routers, and for requests without blocks, the engine is drawn.
    """
    drawn = _mixed(np.arange(len(trace), dtype=np.uint64) ^ _mixed(np.full(1, seed, np.uint64)))
    chance = (drawn % np.uint64(engines)).astype(np.int32)
    if router.name != "affinity":
        return chance
    has_key = (trace.sessions >= 0) | (np.diff(trace.offsets) > 0)
    depth = affinity_blocks or _depth_that_spreads(trace, engines)
    homes: Int32Column = np.where(has_key, _rendezvous(keys_of(trace, depth), engines, seed), chance)
    return homes


def _depth_that_spreads(trace: Trace, engines: int) -> int:
    for depth in range(1, _DEEPEST):
        by_prefix = keys_of(trace, depth)[(trace.sessions < 0) & (np.diff(trace.offsets) > 0)]
        if np.unique(by_prefix, return_counts=True)[1].max(initial=0) * engines <= len(by_prefix):
            return depth
    return _DEEPEST


def keys_of(trace: Trace, affinity_blocks: int) -> Words:
    """Return [R] what stays together: odd numbers are sessions, even ones are blocks, which name whole prefixes."""
    counts = np.diff(trace.offsets)
    last = trace.offsets[:-1] + np.minimum(counts, affinity_blocks) - 1
    blocks = np.zeros(len(trace), np.int64)
    blocks[counts > 0] = trace.blocks[last[counts > 0]]
    return np.where(trace.sessions >= 0, trace.sessions * np.int64(2) + 1, blocks * 2).astype(np.uint64)


def _rendezvous(keys: Words, engines: int, seed: int) -> Int32Column:
    best, homes = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.int32)
    hashed = _mixed(keys)
    for engine in range(engines):
        score = _mixed(hashed ^ _mixed(np.full(1, engine * 2**32 + seed, np.uint64)))
        wins = score > best
        best[wins], homes[wins] = score[wins], engine
    return homes


def _mixed(words: Words) -> Words:
    """Return words spread over all of 64 bits (splitmix64, Steele, Lea and Flood 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
