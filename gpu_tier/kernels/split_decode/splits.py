"""Into how many pieces the keys of each row are split, so that all processors of a GPU have work."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["plan_splits"]

_RESIDENT = 2  # programs that a processor holds at once, with the tiles that the kernel uses
_LEAST_TOKENS = 32  # of a piece: below, writing the partial costs more than reading the keys
_MOST = 256
_GOOD_ENOUGH = 0.85


@lru_cache(maxsize=4096)
def plan_splits(programs: int, max_tokens: int, processors: int) -> int:
    """Return the number of pieces.

    The fewest are taken that keep nearly as many processors busy as any number would: the last wave of programs is
    seldom full, and each piece costs a partial result.

    Args:
        programs: programs of one piece of all rows.
        max_tokens: most tokens that a row can have.
        processors: of the GPU.
    """
    places = _RESIDENT * processors
    most = max(1, min(_MOST, -(-max_tokens // _LEAST_TOKENS)))
    busy = [programs * n / (places * -(-programs * n // places)) for n in range(1, most + 1)]
    best = max(busy)
    return next(n for n, share in enumerate(busy, 1) if share >= _GOOD_ENOUGH * best)
