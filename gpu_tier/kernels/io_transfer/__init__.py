"""Copies rows between two pools of pages: host and device in either direction, or inside the device.

Both pools may have any layout; each byte is found by its pool's strides. Entries are items of `unit_tokens` tokens, and
how many entries of a row count is read on the device, so that a plan made there is carried out without a host sync.

Implementations: the reference by strided indexing, Triton, and CUDA C++ (a warp per contiguous run).
"""

from __future__ import annotations

from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import Addressing
from gpu_tier.kernels import registry

__all__ = ["io_transfer"]


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
