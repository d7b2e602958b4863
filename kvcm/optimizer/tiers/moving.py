"""What kernels of hierarchies count, and rules as the numbers that they take."""

from __future__ import annotations

from typing import NamedTuple

from kvcm.optimizer.tiers.rules import Rules

__all__ = [
    "ARRIVED",
    "DEMOTED",
    "DROPPED",
    "HITS",
    "INSERTED",
    "MOVED",
    "OBJECTS",
    "PROMOTED",
    "SUMS",
    "TOKENS",
    "Moves",
    "moves_of",
]

SUMS = ("prefix_tokens", "object_blocks", "inserted_blocks", "promoted_blocks", "dropped_blocks")
"""Counted for each level."""
TOKENS, OBJECTS, INSERTED, PROMOTED, DROPPED = range(5)

MOVED = ("hits", "arrived", "demoted")
"""Counted for each request and level."""
HITS, ARRIVED, DEMOTED = range(3)

_PROMOTE_AT = {"never": 1 << 30, "hit": 1, "second_hit": 2}


class Moves(NamedTuple):
    """`Rules` as numbers; `promote_at` is the hit at which a block is promoted."""

    touches: bool
    tail_first: bool
    promote_at: int
    through: bool
    back_invalidates: bool
    demote: bool
    lower_sees_hits: bool


def moves_of(rules: Rules) -> Moves:
    """Return rules as kernels take them."""
    return Moves(
        touches=rules.policy != "fifo",
        tail_first=rules.policy == "leaf_lru",
        promote_at=_PROMOTE_AT[rules.promote],
        through=rules.write == "through",
        back_invalidates=rules.back_invalidates,
        demote=rules.demote,
        lower_sees_hits=rules.lower_sees_hits,
    )
