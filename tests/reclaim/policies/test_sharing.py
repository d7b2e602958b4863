"""Whose turn it is to give up a block."""

from __future__ import annotations

import pytest

from kvcm.reclaim.policies.sharing import Sharing


def turns(strategy: str, used: list[int], weights: list[float], amount: int, ages: list[float]) -> list[int]:
    """Return who gives, one block after the other."""
    sharing = Sharing(strategy, dict(enumerate(used)), dict(enumerate(weights)), amount)
    given = []
    for _ in range(amount):
        uid = min(range(len(used)), key=lambda uid: sharing.turn(uid, ages[uid]))
        sharing.took(uid, 1)
        given.append(uid)
    return [given.count(uid) for uid in range(len(used))]


@pytest.mark.parametrize("strategy", ["group_lru", ""])
def test_by_age_over_weight(strategy: str) -> None:
    assert turns(strategy, [9, 9], [1, 1], 4, [5, 6]) == [0, 4]
    assert turns(strategy, [9, 9], [1, 2], 4, [5, 6]) == [4, 0]


def test_the_same_part_of_each() -> None:
    assert turns("proportional", [12, 4], [1, 1], 8, [1, 1]) == [6, 2]
    assert turns("proportional", [12, 12], [2, 1], 9, [1, 1]) == [3, 6]


def test_what_is_above_a_share_of_what_remains() -> None:
    assert turns("fixed", [11, 5], [3, 1], 8, [1, 1]) == [5, 3]
    assert turns("fixed", [11, 5], [1, 1], 8, [1, 1]) == [7, 1]
    assert turns("fixed", [8, 8], [1, 3], 4, [1, 9]) == [4, 0]
