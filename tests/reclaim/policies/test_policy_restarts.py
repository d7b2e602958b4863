"""Blocks put back into an order by what a store remembers of them leave as they would have left."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvcm.reclaim.policies import Fifo, LeafLru, Lfu, Lru, S3Fifo, Sieve, Summary
from kvcm.reclaim.policies.policy import Policy

BLOCKS = 200


def restored(make: Callable[[], Policy], summaries: dict[int, Summary]) -> Policy:
    policy = make()
    for slot in sorted(summaries, key=lambda slot: policy.rank(summaries[slot])):
        policy.restore(slot, slot, summaries[slot])
    return policy


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [Lru, Fifo, lambda: Lfu(ageing=False), lambda: LeafLru(lambda slot: True)])
def test_a_restart_changes_no_order(make: Callable[[], Policy], seed: int) -> None:
    random = Random(seed)
    policy = make()
    summaries: dict[int, Summary] = {}
    for second in range(3 * BLOCKS):
        slot = random.randrange(BLOCKS)
        if slot not in policy:
            policy.insert(slot, slot)
            summaries[slot] = Summary(second, second, 0)
        elif second % 7:
            policy.touch(slot, reads := random.randrange(1, 4))
            summaries[slot] = Summary(summaries[slot].written_at, second, summaries[slot].reads + reads)
        else:
            policy.remove(slot)
            del summaries[slot]
    after = restored(make, summaries)
    assert list(after.victims()) == list(policy.victims())
    for slot in list(summaries)[::3]:
        policy.touch(slot)
        after.touch(slot)
    assert list(after.victims()) == list(policy.victims())


def summary(written_at: float, reads: int) -> Summary:
    return Summary(written_at, written_at + reads, reads)


def test_sieve_takes_what_was_never_read_and_then_the_rest_each_by_age() -> None:
    summaries = {0: summary(4, 0), 1: summary(1, 2), 2: summary(2, 0), 3: summary(3, 1)}
    policy = restored(Sieve, summaries)
    policy.insert(4, 4)
    assert list(policy.victims()) == [2, 0, 4, 1, 3]


def test_s3fifo_puts_what_was_read_twice_into_main() -> None:
    summaries = {slot: summary(slot, 2 if slot < 6 else slot % 2) for slot in range(10)}
    policy = restored(S3Fifo, summaries)
    assert list(policy.victims()) == [*range(6, 10), *range(6)]
    policy.touch(7)  # its read before the restart still counts
    for slot in (6, 8, 9):
        policy.remove(slot)
    assert list(policy.victims()) == [*range(6), 7]


@pytest.mark.parametrize("make", [lambda: Lfu(ageing=False), lambda: Lfu(ageing=True), S3Fifo, Sieve])
def test_counts_of_any_size_are_taken(make: Callable[[], Policy]) -> None:
    policy = restored(make, {0: summary(0, 2**40), 1: summary(1, 2**31 - 1)})
    policy.touch(0, 2**31)
    policy.insert(2, 2)
    assert next(policy.victims()) == 2
