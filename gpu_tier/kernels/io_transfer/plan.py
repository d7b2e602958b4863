"""What a launch of `io_transfer` is told, for the implementations that compute addresses themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from gpu_tier.geometry import Addressing, PartStrides

__all__ = ["PartCopy", "item_bytes", "layer_runs", "part_copies", "word_bytes"]


@dataclass(frozen=True, slots=True)
class PartCopy:
    """One part of a transfer.

    Attributes:
        src: strides of the pool that is read.
        dst: strides of the other.
        heads: rows of a token that are copied on their own.
        row_bytes: bytes of such a row.
    """

    src: PartStrides
    dst: PartStrides
    heads: int
    row_bytes: int


def part_copies(src: Addressing, dst: Addressing, num_heads: int, per_head: bool) -> tuple[PartCopy, ...]:
    """Return the parts; where both pools keep the heads of a token together they are one row."""
    parts = []
    for here, there in zip(src.parts, dst.parts, strict=True):
        together = not per_head and here.head == there.head == here.row_bytes
        heads = 1 if per_head or together else num_heads
        parts.append(PartCopy(here, there, heads, here.row_bytes * (num_heads if together else 1)))
    return tuple(parts)


def item_bytes(parts: tuple[PartCopy, ...], layers: int, unit_tokens: int) -> int:
    """Return the bytes of one entry."""
    return sum(part.heads * part.row_bytes for part in parts) * layers * unit_tokens


def layer_runs(layers: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Give (first layer in src, first in dst, layers) of each run of neighbours: one launch each."""
    start = 0
    for i in range(1, len(layers) + 1):
        here, there = layers[start]
        if i == len(layers) or layers[i] != (here + i - start, there + i - start):
            yield here, there, i - start
            start = i


def word_bytes(part: PartCopy, src: Tensor, dst: Tensor) -> int:
    """Return the largest of 8, 4, 2 and 1 that divides every address and size of a part."""
    sizes = [part.row_bytes, src.data_ptr(), dst.data_ptr(), src.numel(), dst.numel()]
    for strides in (part.src, part.dst):
        sizes += [strides.base, strides.page, strides.token, strides.layer, strides.head]
    return math.gcd(8, *sizes)
