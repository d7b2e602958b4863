"""The access order of the Redis backend: one score says when a block was last read, how often, and whether it can be
evicted.

The score is unix seconds + min(reads, 4095) / 4096. That of a block without a serving location is greater by `RETIRED`,
so that the blocks that can be evicted stand before all others, the coldest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Final

from kvcm.index.backends.access import Access, is_resident, stored_at, whole_seconds
from kvcm.index.backends.redis_keys import KEY
from kvcm.index.backends.redis_scripts import REQUEUE, RETIRED, TOUCH
from kvcm.model.locations import BlockRecord
from kvcm.store.redis.script import Argument, ScriptCall

__all__ = ["Placed", "access_of", "first_score", "is_retired", "merged", "new_score", "requeue_call", "touch_call"]

_READS_PER_SECOND: Final = 4096

Placed = tuple[bytes, float]
"""A member of the order and its score."""


def access_of(score: float) -> Access:
    """Return the access that a score tells of."""
    seconds, reads = divmod(score, 1)
    return Access(int(seconds) % RETIRED, round(reads * _READS_PER_SECOND))


def is_retired(score: float) -> bool:
    """Return whether the block is one of those that cannot be evicted."""
    return score >= RETIRED


def first_score(record: BlockRecord) -> int:
    """Return the score of a block that nobody has read yet."""
    return whole_seconds(stored_at(record)) + (0 if is_resident(record) else RETIRED)


def new_score(old: BlockRecord | None, new: BlockRecord | None) -> int | bool:
    """Return the score that a change sets, True to retire the block, False to leave its score."""
    if new is None:
        return False
    if old is None:
        return first_score(new)
    if is_resident(new):
        return False if is_resident(old) else first_score(new)
    return is_resident(old)


def touch_call(order: bytes, counts: Mapping[int, int], keys: Iterable[int], at: float, *, moves: bool) -> ScriptCall:
    """Return the call that records reads of some keys."""
    return ScriptCall(TOUCH, [order], [int(at), int(moves), *_pairs(counts, keys)])


def requeue_call(order: bytes, counts: Mapping[int, int], keys: Iterable[int], at: float) -> ScriptCall:
    """Return the call that sets the accesses of some keys."""
    return ScriptCall(REQUEUE, [order], [int(at), *_pairs(counts, keys)])


def _pairs(counts: Mapping[int, int], keys: Iterable[int]) -> list[Argument]:
    return [item for key in keys for item in (KEY.pack(key), counts[key])]


def merged(answers: Sequence[Sequence[bytes]], count: int, asked: int) -> tuple[list[Placed], bool]:
    """Merge the beginnings of the orders of several shards.

    Args:
        answers: members and their scores by turns, per shard.
        count: how many are wanted.
        asked: how many were asked of every shard.

    Returns:
        The coldest of those that can be evicted, and whether no shard can hold a colder one behind its answer.
    """
    orders = [list(zip(answer[::2], map(float, answer[1::2]), strict=True)) for answer in answers]
    # Of equals one of each shard after the other: a call that asks for what comes behind begins equally far in each.
    evictable = (
        (placed[1], position, placed)
        for order in orders
        for position, placed in enumerate(order)
        if not is_retired(placed[1])
    )
    coldest = [placed for _, _, placed in nsmallest(count, evictable, key=lambda each: each[:2])]
    end = coldest[-1][1] if len(coldest) == count else RETIRED
    return coldest, all(len(order) < asked or order[-1][1] >= end for order in orders)
