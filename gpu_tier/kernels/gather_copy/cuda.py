"""`gather_copy` in CUDA C++; see gather_copy.cu."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kvcm.gpu_tier.kernels import cuda_build
from kvcm.gpu_tier.kernels.gather_copy import word_bytes
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.types import CopyRuns

__all__ = ["run"]

_SOURCES = 3


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("page", "token", "head")]


class _Pool(ctypes.Structure):
    _fields_ = [("first", ctypes.c_void_p * 2), ("strides", _Strides * 2), ("page_size", ctypes.c_int64)]


class _Args(ctypes.Structure):
    _fields_ = [
        ("pools", _Pool * (_SOURCES + 1)),
        *[(name, ctypes.c_void_p) for name in ("kind", "src", "dst", "tokens", "count", "moved")],
        ("row_bytes", ctypes.c_int32 * 2), ("word_bytes", ctypes.c_int32 * 2),
        *[(name, ctypes.c_int32) for name in ("lines", "width", "heads", "num_sources", "num_parts", "blocks")],
    ]  # fmt: skip


def run(sources: tuple[RowPool, ...], target: RowPool, runs: CopyRuns, *, num_heads: int, moved: Tensor | None) -> None:
    """See `kvcm.gpu_tier.kernels.gather_copy.gather_copy`."""
    pools = (*sources, *(sources[0],) * (_SOURCES - len(sources)), target)
    parts = target.addressing.parts
    tables = (runs.kind, runs.src, runs.dst, runs.tokens, runs.count)
    lines, width = runs.kind.shape
    args = _Args(
        (_Pool * (_SOURCES + 1))(*map(_pool, pools)), *(table.data_ptr() for table in tables),
        None if moved is None else moved.data_ptr(),
        (ctypes.c_int32 * 2)(*(part.row_bytes for part in parts)),
        (ctypes.c_int32 * 2)(*(word_bytes(pools, part, 16) for part in range(len(parts)))),
        lines, width, num_heads, len(sources), len(parts), 0,
    )  # fmt: skip
    stream = cuda_build.stream(runs.kind.device)
    cuda_build.check(cuda_build.library().gpu_tier_gather_copy(ctypes.byref(args), stream))


def _pool(pool: RowPool) -> _Pool:
    parts = pool.addressing.parts
    first = (pool.data.data_ptr() + part.base + part.layer * pool.layer for part in parts)
    strides = (_Strides(part.page, part.token, part.head) for part in parts)
    return _Pool((ctypes.c_void_p * 2)(*first), (_Strides * 2)(*strides), pool.addressing.page_size)
