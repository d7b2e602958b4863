"""`io_transfer` in CUDA C++; see io_transfer.cu."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import Addressing, PartStrides
from kvcm.gpu_tier.kernels import cuda_build
from kvcm.gpu_tier.kernels.io_transfer import PartCopy, layer_runs, part_copies

__all__ = ["run"]

_MOST_TASKS = 1 << 31  # of a row, which the kernel numbers with 32 bits


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("base", "page", "token", "layer", "head")]


class _Part(ctypes.Structure):
    _fields_ = [
        ("src", _Strides), ("dst", _Strides), ("row_bytes", ctypes.c_int64), ("heads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("src", "dst", "src_idx", "dst_idx", "count", "moved")],
        ("parts", _Part * 2), ("src_page_size", ctypes.c_int64), ("dst_page_size", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in (
            "num_parts", "rows", "entries", "layers", "src_layer", "dst_layer", "num_heads", "unit", "per_head",
            "src_is_64", "dst_is_64", "blocks",
        )],
    ]  # fmt: skip


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
    _check(src_idx, dst_idx, count, moved)
    src_idx, dst_idx = src_idx.contiguous(), dst_idx.contiguous()
    count = None if count is None else count.contiguous()
    parts = part_copies(src_addr, dst_addr, num_heads, per_head)
    rows, entries = src_idx.shape
    args = _Args(
        src.data_ptr(), dst.data_ptr(), src_idx.data_ptr(), dst_idx.data_ptr(), _pointer(count), _pointer(moved),
        (_Part * 2)(*map(_part, parts)), src_addr.page_size, dst_addr.page_size, len(parts), rows, entries,
        num_heads=num_heads, unit=unit_tokens, per_head=per_head, src_is_64=src_idx.dtype is torch.int64,
        dst_is_64=dst_idx.dtype is torch.int64, blocks=blocks,
    )  # fmt: skip
    library, stream = cuda_build.library(), cuda_build.stream(src_idx.device)
    layer_tasks = entries * unit_tokens * sum(part.heads for part in parts)
    for src_layer, dst_layer, number in _bounded(layers, max(1, (_MOST_TASKS - 1) // layer_tasks)):
        args.src_layer, args.dst_layer, args.layers = src_layer, dst_layer, number
        cuda_build.check(library.gpu_tier_io_transfer(ctypes.byref(args), stream))


def _check(src_idx: Tensor, dst_idx: Tensor, count: Tensor | None, moved: Tensor | None) -> None:
    cuda_build.check_dtype("src_idx", src_idx, torch.int32, torch.int64)
    cuda_build.check_dtype("dst_idx", dst_idx, torch.int32, torch.int64)
    if count is not None:
        cuda_build.check_dtype("count", count, torch.int32)
    if moved is not None:
        cuda_build.check_dtype("moved", moved, torch.int64)


def _bounded(layers: tuple[tuple[int, int], ...], most: int) -> list[tuple[int, int, int]]:
    return [
        (here + i, there + i, min(most, number - i))
        for here, there, number in layer_runs(layers)
        for i in range(0, number, most)
    ]


def _part(part: PartCopy) -> _Part:
    return _Part(_strides(part.src), _strides(part.dst), part.row_bytes, part.heads, 0)


def _strides(strides: PartStrides) -> _Strides:
    return _Strides(strides.base, strides.page, strides.token, strides.layer, strides.head)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
