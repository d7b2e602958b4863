"""Assembles execution buffers: runs of rows from up to three sources, one behind the other, for contiguous attention.

A source is a pool seen as rows: the steady zone, the block cache, the host pool. Which unit lies where is read on the
device, so that a plan made there is carried out without a host sync.

Implementations: the reference by indexing, Triton, and CUDA C++ (a warp per row).
"""

from __future__ import annotations

from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels import registry

__all__ = ["MAX_SOURCES", "gather_copy"]

MAX_SOURCES = 3


def gather_copy(
    sources: tuple[Tensor, ...],
    kind: Tensor,
    src_row: Tensor,
    n_rows: Tensor,
    dst_row: Tensor,
    count: Tensor,
    out: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Copy runs of rows.

    Run u < ``count[n]`` of buffer n copies the rows ``src_row[n, u] + i`` of ``sources[kind[n, u]]`` to the rows
    ``dst_row[n, u] + i`` of ``out[n]``, i < ``n_rows[n, u]``. A run of negative kind is skipped.
    Targets must be unique.

    Args:
        sources: one to three ``uint8 [rows, row_bytes]``, rows may be apart; on the device or readable by it.
        kind: ``int32 [N, U]`` source of each run.
        src_row: ``int64 [N, U]`` first row in it.
        n_rows: ``int32 [N, U]`` rows of the run.
        dst_row: ``int32 [N, U]`` first row in the buffer.
        count: ``int32 [N]`` runs of each buffer.
        out: ``uint8 [N, S, row_bytes]``, contiguous.
        impl: auto, reference, triton or cuda.

    Raises:
        ConfigError: shapes do not fit.
    """
    _check(sources, (kind, src_row, n_rows, dst_row), count, out)
    if not kind.numel():
        return
    registry.get("gather_copy", out.device, impl)(sources, kind, src_row, n_rows, dst_row, count, out)


def _check(sources: tuple[Tensor, ...], runs: tuple[Tensor, ...], count: Tensor, out: Tensor) -> None:
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ConfigError("sources", len(sources), f"must be 1 to {MAX_SOURCES}")
    if out.ndim != 3 or not out.is_contiguous():
        raise ConfigError("out", tuple(out.shape), "must be contiguous [N, S, row_bytes]")
    for source in sources:
        if source.ndim != 2 or source.shape[1] != out.shape[2] or source.stride(1) != 1:
            raise ConfigError(
                "sources", tuple(source.shape), f"must be [rows, {out.shape[2]}], bytes of a row together"
            )
    if any(run.shape != runs[0].shape or run.ndim != 2 for run in runs) or count.shape != out.shape[:1]:
        shapes = [tuple(run.shape) for run in (*runs, count)]
        raise ConfigError("kind, src_row, n_rows, dst_row, count", shapes, f"must be [{out.shape[0]}, U], count [N]")
    if runs[0].shape[0] != out.shape[0]:
        raise ConfigError("kind", tuple(runs[0].shape), f"must be [{out.shape[0]}, U]")
