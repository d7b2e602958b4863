"""Reference of `io_transfer`: indexing of strided views. Waits for the device when its tensors are on one."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import Addressing
from kvcm.gpu_tier.kernels.operands import pool_rows

__all__ = ["run"]


def run(
    src: Tensor,
    dst: Tensor,
    src_addr: Addressing,
    dst_addr: Addressing,
    src_idx: Tensor,
    dst_idx: Tensor,
    *,
    layers: tuple[tuple[int, int], ...],
    num_heads: int,
    count: Tensor | None,
    per_head: bool,
    unit_tokens: int,
    blocks: int,
    moved: Tensor | None,
) -> None:
    """See `kvcm.gpu_tier.kernels.io_transfer.io_transfer`."""
    rows, entries = _live(src_idx, dst_idx, count).nonzero(as_tuple=True)
    read = _place(src_addr, src_idx[rows, entries], unit_tokens, src.device)
    written = _place(dst_addr, dst_idx[rows, entries], unit_tokens, dst.device)
    if per_head:
        head = (rows % num_heads).repeat_interleave(unit_tokens)
        read, written = (*read, head.to(src.device)), (*written, head.to(dst.device))
    for part in range(len(src_addr.parts)):
        for src_layer, dst_layer in layers:
            values = pool_rows(src, src_addr, part, src_layer, num_heads)[read]
            pool_rows(dst, dst_addr, part, dst_layer, num_heads)[written] = values.to(dst.device)
    if moved is not None:
        row_bytes = sum(part.row_bytes for part in src_addr.parts) * (1 if per_head else num_heads)
        moved += rows.numel() * unit_tokens * len(layers) * row_bytes


def _live(src_idx: Tensor, dst_idx: Tensor, count: Tensor | None) -> Tensor:
    live = (src_idx >= 0) & (dst_idx >= 0)
    if count is None:
        return live
    return live & (torch.arange(live.shape[1], device=live.device) < count[:, None])


def _place(addressing: Addressing, slots: Tensor, unit_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    offsets = torch.arange(unit_tokens, device=slots.device)
    tokens = (slots.long()[:, None] + offsets).flatten().to(device)
    return tokens // addressing.page_size, tokens % addressing.page_size
