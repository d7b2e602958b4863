"""Copies rows between two pools of pages: host and device in either direction, or inside the device.

Both pools may have any layout; each byte is found by its pool's strides. Entries are items of `unit_tokens` tokens, and
how many entries of a row count is read on the device, so that a plan made there is carried out without a host sync.

Implementations: the reference by strided indexing, Triton, and CUDA C++ (a warp per contiguous run).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import Addressing, PartStrides
from kvcm.gpu_tier.kernels import registry

__all__ = ["PartCopy", "io_transfer", "item_bytes", "layer_runs", "part_copies", "word_bytes"]


def io_transfer(
    src: Tensor,
    dst: Tensor,
    src_addr: Addressing,
    dst_addr: Addressing,
    src_idx: Tensor,
    dst_idx: Tensor,
    *,
    layers: tuple[tuple[int, int], ...],
    num_heads: int,
    count: Tensor | None = None,
    per_head: bool = False,
    unit_tokens: int = 1,
    blocks: int = 0,
    moved: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Copy items.

    Entry j < ``count[r]`` of row r copies the tokens ``src_idx[r, j] + t`` to ``dst_idx[r, j] + t``, t < `unit_tokens`,
    in all `layers` and all heads, or with `per_head` only in head ``r % num_heads``. An entry with a negative slot is
    skipped. Targets must be unique, and no target may be a source of the same call.

    Args:
        src: flat ``uint8`` pool to read, on the device or in host memory that the device can read.
        dst: flat ``uint8`` pool to write, likewise.
        src_addr: addresses of `src`.
        dst_addr: addresses of `dst`; the rows must have the sizes of those of `src`.
        src_idx: ``int32 or int64 [R, M]`` slot of each item's first token.
        dst_idx: ``int32 or int64 [R, M]`` slot it goes to.
        layers: (position in src, position in dst) of each layer.
        num_heads: KV heads H of both pools.
        count: ``int32 [R]`` entries of each row; None for all M.
        per_head: whether a row concerns one head; rows are (request, head) with the head innermost.
        unit_tokens: tokens of an item.
        blocks: multiprocessors to use, 0 for all.
        moved: ``int64 [1]`` on the device (of the indices); the bytes copied are added to it.
        impl: auto, reference, triton or cuda.

    Raises:
        ConfigError: shapes do not fit.
    """
    _check(src_addr, dst_addr, src_idx, dst_idx, count)
    if not src_idx.numel() or not layers:
        return
    registry.get("io_transfer", src_idx.device, impl)(
        src, dst, src_addr, dst_addr, src_idx, dst_idx, layers=layers, num_heads=num_heads, count=count,
        per_head=per_head, unit_tokens=unit_tokens, blocks=blocks, moved=moved,
    )  # fmt: skip


def _check(src_addr: Addressing, dst_addr: Addressing, src_idx: Tensor, dst_idx: Tensor, count: Tensor | None) -> None:
    if src_idx.ndim != 2 or src_idx.shape != dst_idx.shape:
        shapes = tuple(src_idx.shape), tuple(dst_idx.shape)
        raise ConfigError("src_idx, dst_idx", shapes, "must both be [rows, entries]")
    if count is not None and count.shape != src_idx.shape[:1]:
        raise ConfigError("count", tuple(count.shape), f"must be [{src_idx.shape[0]}], one number for each row")
    if [part.row_bytes for part in src_addr.parts] != [part.row_bytes for part in dst_addr.parts]:
        raise ConfigError("dst_addr", dst_addr.layout, "both pools must have the same rows")


# Launch parameters of `io_transfer`, for the implementations that compute addresses themselves.


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
