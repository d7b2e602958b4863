"""Puts execution buffers together: runs of tokens from up to three pools, for each row of the batch and KV head.

A source is one layer of a pool: the steady zone and the block cache in the arena, blocks or pages on the host. What
lies where is read on the device, so that a plan made there is carried out without a host sync. The runs of all lines
are one list that the programs take from in turn: a head with many misses gets as many of them as it has work.

Implementations: the reference by indexing, Triton, and CUDA C++.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import RowPool, check_contiguous
from kvcm.gpu_tier.types import CopyRuns

__all__ = ["MAX_SOURCES", "gather_copy", "word_bytes"]

MAX_SOURCES = 3


def gather_copy(
    sources: tuple[RowPool, ...],
    target: RowPool,
    runs: CopyRuns,
    *,
    num_heads: int,
    moved: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Copy runs of tokens.

    Run u < ``runs.count[n]`` of line n copies, of each part, the rows of head ``n % num_heads`` and of the tokens
    ``runs.src[n, u] + i`` of ``sources[runs.kind[n, u]]`` to the tokens ``runs.dst[n, u] + i`` of the target,
    i < ``runs.tokens[n, u]``. A run may go on from page to page. One that is of none of the sources is skipped.
    Targets must be unique, and no target may be a source of the same call.

    Args:
        sources: one to three pools, on the device or readable by it; `Source` names them by their places.
        target: the pool to write.
        runs: what to copy, on the device, contiguous.
        num_heads: KV heads H of the target; a source may have the rows of one head only (a head stride of 0).
        moved: ``int64 [len(sources)]`` on the device; the bytes copied from each source are added to it.
        impl: auto, reference, triton or cuda.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    _check_pools(sources, target)
    _check_runs(runs, num_heads)
    if moved is not None and (moved.dtype is not torch.int64 or moved.shape != (len(sources),)):
        raise ConfigError("moved", (moved.dtype, *moved.shape), f"must be int64 [{len(sources)}]")
    if not runs.kind.numel():
        return
    run = registry.get("gather_copy", runs.kind.device, impl)
    run(sources, target, runs, num_heads=num_heads, moved=moved)


def _check_pools(sources: tuple[RowPool, ...], target: RowPool) -> None:
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ConfigError("sources", len(sources), f"must be 1 to {MAX_SOURCES}")
    sizes = [part.row_bytes for part in target.addressing.parts]
    for pool in (*sources, target):
        if [part.row_bytes for part in pool.addressing.parts] != sizes:
            raise ConfigError("sources", pool.addressing.layout, f"must have rows of {sizes} bytes as the target")
        if pool.data.dtype is not torch.uint8 or pool.data.ndim != 1:
            raise ConfigError("sources, target", (pool.data.dtype, *pool.data.shape), "pools must be flat uint8")
        check_contiguous(data=pool.data)


def _check_runs(runs: CopyRuns, num_heads: int) -> None:
    lines, width = runs.kind.shape
    if lines % num_heads:
        raise ConfigError(
            "runs", tuple(runs.kind.shape), f"must have a line for each row and each of {num_heads} heads"
        )
    tables = {"kind": runs.kind, "src": runs.src, "dst": runs.dst, "tokens": runs.tokens, "count": runs.count}
    for name, table in tables.items():
        shape = (lines,) if name == "count" else (lines, width)
        dtype = torch.int64 if name == "src" else torch.int32
        if table.shape != shape or table.dtype is not dtype:
            raise ConfigError(f"runs.{name}", (table.dtype, *table.shape), f"must be {dtype} {shape}")
    check_contiguous(**tables)


# The words that rows are copied in: as large as all addresses of the pools allow.


def word_bytes(pools: tuple[RowPool, ...], part: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides every address and size of a part of the pools.

    Args:
        pools: that rows are copied between.
        part: 0 for keys and latents, 1 for values.
        most: a power of two.
    """
    sizes = [most]
    for pool in pools:
        strides = pool.addressing.parts[part]
        sizes += [pool.data.data_ptr(), int(pool.data.storage_offset()), pool.data.numel(), strides.row_bytes]
        sizes += [strides.base + strides.layer * pool.layer, strides.page, strides.token, strides.head]
    return math.gcd(*sizes)
