"""Finds out how many tokens a block has, from how many blocks prompts of known length have.

A trace lists either ceil(L/B) blocks of a prompt of L tokens, the last one partial, or floor(L/B), full ones only. So
each prompt bounds B on both sides, once for either way of counting. Where prompts leave several sizes, or agree on
none, one is assumed and it is said: which blocks are hits does not hang on it, only what they are in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcm.optimizer.trace import Int32Column, Int64Column

__all__ = ["BlockSizes", "Prompts", "block_sizes"]

_MOST = 1 << 31  # no block has as many tokens
_USUAL = 16  # what engines have unless they are told otherwise


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Requests of which it is known how many tokens their blocks hold.

    Attributes:
        tokens: [P] of each.
        blocks: [P] of each.
        instances: [P] of each.
        lines: [P] where each was read, for messages.
    """

    tokens: Int64Column
    blocks: Int64Column
    instances: Int32Column
    lines: Int64Column


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Tokens per block.

    Attributes:
        tokens: of each instance.
        assumed: a sentence for each that prompts do not tell exactly.
    """

    tokens: tuple[int, ...]
    assumed: tuple[str, ...] = ()


def block_sizes(
    prompts: Prompts, names: tuple[str, ...], given: tuple[int | None, ...], *, are_full: bool
) -> BlockSizes:
    """Return the tokens per block of each instance; one that tells nothing has what all others have.

    Args:
        prompts: of all instances.
        names: of the instances.
        given: what is known of each.
        are_full: whether only full blocks are listed, not the partial one at the end of a prompt.
    """
    found = [
        _size_of(_of(prompts, number), are_full) if size is None else _Size(size)
        for number, (name, size) in enumerate(zip(names, given, strict=True))
    ]
    known = {size.tokens for size in found if size is not None}
    other = _Size(known.pop()) if len(known) == 1 else _Size(_USUAL, "no prompt tells it")
    sizes = [size if size is not None else other for size in found]
    assumed = tuple(
        f"block_tokens of instance {name!r}: {size.doubt}; {size.tokens} is assumed, --block-tokens says otherwise"
        for name, size in zip(names, sizes, strict=True)
        if size.doubt
    )
    return BlockSizes(tuple(size.tokens for size in sizes), assumed)


class _Size(NamedTuple):
    """Tokens per block, and why that may be wrong."""

    tokens: int
    doubt: str = ""


def _of(prompts: Prompts, instance: int) -> Prompts:
    where = prompts.instances == instance
    if where.all():
        return prompts
    return Prompts(prompts.tokens[where], prompts.blocks[where], prompts.instances[where], prompts.lines[where])


def _size_of(prompts: Prompts, are_full: bool) -> _Size | None:
    """Return the size, None where nothing is known."""
    if not prompts.blocks.any():
        return None
    ways = [_if_all_are_full(prompts)] if are_full else [_if_all_are_full(prompts), _if_last_is_partial(prompts)]
    ranges = [(int(low[-1]), int(high[-1])) for low, high in ways if low[-1] <= high[-1]]
    if not ranges:
        return _Size(_mean_size(prompts), _none_fits(prompts, ways))
    return _chosen(ranges)


_Bounds = tuple[Int64Column, Int64Column]
"""[P] and [P] smallest and largest size that fits the prompts up to and including each."""


def _bounds(low: Int64Column, high: Int64Column) -> _Bounds:
    return np.maximum.accumulate(np.maximum(low, 1)), np.minimum.accumulate(high)


def _if_last_is_partial(prompts: Prompts) -> _Bounds:
    """Return bounds from (n - 1)·B < L ≤ n·B."""
    tokens, blocks = prompts.tokens, prompts.blocks
    low = np.where(blocks > 0, -(-tokens // np.maximum(blocks, 1)), np.where(tokens > 0, _MOST, 1))
    high = np.where(blocks > 1, -(-tokens // np.maximum(blocks - 1, 1)) - 1, _MOST - 1)
    return _bounds(low, np.where((blocks == 1) & (tokens == 0), 0, high))


def _if_all_are_full(prompts: Prompts) -> _Bounds:
    """Return bounds from n·B ≤ L < (n + 1)·B."""
    tokens, blocks = prompts.tokens, prompts.blocks
    high = np.where(blocks > 0, tokens // np.maximum(blocks, 1), _MOST - 1)
    return _bounds(tokens // (blocks + 1) + 1, high)


def _chosen(ranges: list[tuple[int, int]]) -> _Size:
    """Return the only size; else the only one that fits both ways, as prompts of whole blocks do; else the only 2^x;
    else the smallest 2^x, or the smallest size. It is in doubt unless it is the only one of its kind: a size that is
    no 2^x is, where a 2^x fits."""
    powers = sorted({1 << bit for bit in range(31) for low, high in ranges if low <= 1 << bit <= high})
    shown = " or ".join(f"{low} to {high}" if high < _MOST - 1 else f"{low} and more" for low, high in ranges)
    doubt = f"{shown} fit all prompts"
    both = (max(low for low, _ in ranges), min(high for _, high in ranges))
    if both[0] == both[1]:
        return _Size(both[0], doubt if powers and both[0] not in powers else "")
    if len(powers) == 1:
        return _Size(powers[0])
    return _Size(powers[0] if powers else min(low for low, _ in ranges), doubt)


def _mean_size(prompts: Prompts) -> int:
    """Return the tokens per block of all prompts together, rounded up."""
    return max(1, -(-int(prompts.tokens.sum()) // int(prompts.blocks.sum())))


def _none_fits(prompts: Prompts, ways: list[_Bounds]) -> str:
    """Say which prompt fits no size that all prompts before it fit."""
    first = max(int(np.argmax(low > high)) for low, high in ways)
    return (
        f"none fits all prompts: line {prompts.lines[first]} has {prompts.tokens[first]} tokens in "
        f"{prompts.blocks[first]} blocks, other than the lines before it"
    )
