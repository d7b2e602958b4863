"""Lock shards: which keys share a lock, and in which batches a call takes them.

Invariant 8: a batch takes its lock shards in ascending order; sub-batches of one call hold disjoint shards; reads take
none. A batch is made of whole shards, so two batches of one call never wait for the same lock, and ascending order
within a batch makes deadlock between calls impossible.

Rejected: one lock per key (a million locks, or a table that itself needs a lock); one lock per index (a slow store
would let one writer hold up all).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from kvcm.model.keys import unmixed
from kvcm.telemetry.metrics import Histogram

__all__ = ["ShardLocks", "SubBatch", "plan_sub_batches", "shard_of", "shards_of", "uninterrupted"]

_FIBONACCI = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class SubBatch(NamedTuple):
    """Keys that are changed together, and the shards they lie in, ascending."""

    shards: tuple[int, ...]
    keys: list[int]


def shard_of(key: int, shard_count: int) -> int:
    """Return the shard of a key as the store knows it, not mixed: shards are the same for all managers and for ever.

    It is the top bits of a multiplicative hash, since keys need not be well mixed.

    Args:
        key: block key.
        shard_count: a power of two.
    """
    return ((key * _FIBONACCI & _MASK) * shard_count) >> 64


def shards_of(keys: Sequence[int], shard_count: int) -> list[int]:
    """Return the shards of mixed keys."""
    if shard_count == 1:
        return [0] * len(keys)
    return [shard_of(key, shard_count) for key in unmixed(keys)]


def plan_sub_batches(keys: Sequence[int], shard_count: int, batch_key_size: int) -> list[SubBatch]:
    """Cut `keys` into sub-batches of whole shards, each of at least `batch_key_size` keys except the last."""
    by_shard: dict[int, list[int]] = {}
    for key, shard in zip(keys, shards_of(keys, shard_count), strict=True):
        by_shard.setdefault(shard, []).append(key)
    batches: list[SubBatch] = []
    shards: list[int] = []
    batch: list[int] = []
    for shard in sorted(by_shard):
        shards.append(shard)
        batch.extend(by_shard[shard])
        if len(batch) >= batch_key_size:
            batches.append(SubBatch(tuple(shards), batch))
            shards, batch = [], []
    if batch:
        batches.append(SubBatch(tuple(shards), batch))
    return batches


class ShardLocks:
    """The locks of one index.

    Args:
        shard_count: how many.
        waits: receives the waiting times.
    """

    def __init__(self, shard_count: int, waits: Histogram | None = None) -> None:
        self._locks = [asyncio.Lock() for _ in range(shard_count)]
        self._waits = waits if waits is not None else Histogram()

    @asynccontextmanager
    async def hold(self, shards: tuple[int, ...]) -> AsyncIterator[None]:
        """Hold the locks of `shards`, which must be ascending; released in any case, also on cancellation."""
        assert all(a < b for a, b in pairwise(shards)), shards
        begin = time.perf_counter()
        async with AsyncExitStack() as stack:
            for shard in shards:
                await stack.enter_async_context(self._locks[shard])
            self._waits.observe(time.perf_counter() - begin)
            yield


# Work that a cancelled caller must not interrupt: the store and the counts of it have to agree.
#
# A client that hangs up cancels the task of its request at whatever point it waits. The work runs on to its end in a
# task of its own, the caller waits for it (locks stay held), and only then is the cancellation delivered.
#
# Rejected: `asyncio.shield` alone, which lets the caller go and release its locks while the work still runs.

Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end whatever happens to the caller, and return or raise what it does.

    Raises:
        CancelledError: the caller was cancelled meanwhile; the work is done, well or badly.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        task.cancelled() or task.exception()  # retrieved, so that asyncio does not log it
        raise cancellation
    return task.result()
