"""Merging of partial attention in Triton.

A program merges all parts of one query head, or of some of its dims: P is small (splits of the keys), so all of it is
one tile and nothing is read twice.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

from kvcm.gpu_tier.kernels.tuning import next_power_of_2

__all__ = ["run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")

_TILE = 8192  # numbers of a program's tile


def _merge(
    o: "Any",
    lse: "Any",
    out_o: "Any",
    out_lse: "Any",
    o_part: "Any",
    lse_part: "Any",
    parts: "Any",
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dim < DIMS
    score = tl.load(lse + part * lse_part + row, mask=part < parts, other=-float("inf"))
    highest = tl.max(score, axis=0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    weight = tl.exp(score - highest)
    total = tl.sum(weight, axis=0)
    # The output of an empty part may never have been written.
    counts = weight > 0.0
    at = part[:, None] * o_part + row * DIMS + dim[None, :]
    value = tl.load(o + at, mask=counts[:, None] & inside[None, :], other=0.0)
    some = tl.where(total > 0.0, total, 1.0)
    merged = tl.sum(value * weight[:, None], axis=0) / some
    tl.store(out_o + row * DIMS + dim, merged, mask=inside)
    log_total = tl.where(total > 0.0, tl.log(some) + highest, -float("inf"))
    tl.store(out_lse + row, log_total, mask=tl.program_id(1) == 0)


_kernel = triton.jit(_merge)


def run(o: Tensor, lse: Tensor, out_o: Tensor, out_lse: Tensor) -> None:
    """See `lse_merge`; of each part, and of the outputs, the numbers must be contiguous."""
    parts, rows, heads, dims = o.shape
    if not rows * heads:
        return
    padded = next_power_of_2(max(parts, 1))
    block = min(next_power_of_2(dims), max(16, _TILE // padded))
    grid = (rows * heads, triton.cdiv(dims, block))
    options = {"DIMS": dims, "PARTS": padded, "BLOCK": block}
    _kernel[grid](o, lse, out_o, out_lse, o.stride(0), lse.stride(0), parts, **options)
