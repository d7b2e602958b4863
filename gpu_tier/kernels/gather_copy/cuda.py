"""`gather_copy` in CUDA C++; see gather_copy.cu."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gpu_tier.kernels import cuda_build

__all__ = ["run"]


_DTYPES = {
    "kind": torch.int32, "src_row": torch.int64, "n_rows": torch.int32, "dst_row": torch.int32, "count": torch.int32,
}  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = [
        ("sources", ctypes.c_void_p * 3), ("strides", ctypes.c_int64 * 3),
        *[(name, ctypes.c_void_p) for name in ("kind", "src_row", "n_rows", "dst_row", "count", "out")],
        ("row_bytes", ctypes.c_int64), ("buffer_bytes", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("buffers", "runs", "num_sources", "reserved")],
    ]  # fmt: skip


def run(
    sources: tuple[Tensor, ...],
    kind: Tensor,
    src_row: Tensor,
    n_rows: Tensor,
    dst_row: Tensor,
    count: Tensor,
    out: Tensor,
) -> None:
    """See `gpu_tier.kernels.gather_copy.gather_copy`."""
    tables = [table.contiguous() for table in (kind, src_row, n_rows, dst_row, count)]
    for table, (field, dtype) in zip(tables, _DTYPES.items(), strict=True):
        cuda_build.check_dtype(field, table, dtype)
    buffers, runs = kind.shape
    args = _Args(
        (ctypes.c_void_p * 3)(*(source.data_ptr() for source in sources)),
        (ctypes.c_int64 * 3)(*(source.stride(0) for source in sources)),
        *(table.data_ptr() for table in tables), out.data_ptr(), out.shape[2], out.shape[1] * out.shape[2], buffers,
        runs, len(sources), 0,
    )  # fmt: skip
    cuda_build.check(cuda_build.library().gpu_tier_gather_copy(ctypes.byref(args), cuda_build.stream(out.device)))
