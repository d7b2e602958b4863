"""The kernel of `gather_rows_on` and `scatter_rows_on` (`kvcm.connectors.layout.gather`) for GPUs.

One kernel does both directions. A program copies one tile of one row: it splits the number of each element into kv,
head, token and dim and finds the element on both sides by strides, so no layout is a special case. Neighbouring
elements of `dim` are neighbours in memory in all engines we know, which is what makes the accesses wide.

Tested in Triton's interpreter (`TRITON_INTERPRET=1` before the import), which runs on a CPU.
"""

from importlib import import_module
from typing import Any

import torch

__all__ = ["gather_rows", "scatter_rows"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")

_TILE = 1024

# Triton evaluates the annotations of a kernel: names that are not Triton's have to be text, and `tl.constexpr`, which
# makes a parameter fixed at compilation, must not be. Hence no `annotations` of the future in this file.


def _copy_tile(
    paged: "Any",
    rows: "Any",
    packed: "Any",
    paged_row: "Any",
    paged_kv: "Any",
    paged_head: "Any",
    paged_token: "Any",
    paged_dim: "Any",
    packed_row: "Any",
    packed_kv: "Any",
    packed_head: "Any",
    packed_token: "Any",
    packed_dim: "Any",
    elements: "Any",
    heads: "Any",
    tokens: "Any",
    dims: "Any",
    to_paged: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = number < elements
    dim = number % dims
    token = number // dims % tokens
    head = number // dims // tokens % heads
    kv = number // dims // tokens // heads
    block = tl.load(rows + row)
    on_page = paged + block * paged_row + kv * paged_kv + head * paged_head + token * paged_token + dim * paged_dim
    off_page = packed + row * packed_row + kv * packed_kv + head * packed_head + token * packed_token + dim * packed_dim
    if to_paged:
        tl.store(on_page, tl.load(off_page, mask=inside), mask=inside)
    else:
        tl.store(off_page, tl.load(on_page, mask=inside), mask=inside)


_kernel = triton.jit(_copy_tile)


def gather_rows(paged: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy rows of `paged` to `packed`, see `kvcm.connectors.layout.rows.CopyRows`."""
    _launch(paged, rows, packed, to_paged=False)


def scatter_rows(paged: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy `packed` to rows of `paged`, see `kvcm.connectors.layout.rows.CopyRows`."""
    _launch(paged, rows, packed, to_paged=True)


def _launch(paged: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor, *, to_paged: bool) -> None:
    if not len(rows):
        return  # a grid cannot be empty
    elements = packed[0].numel()
    grid = (len(rows), triton.cdiv(elements, _TILE))
    sizes = (elements, *packed.shape[2:])
    _kernel[grid](paged, rows, packed, *paged.stride(), *packed.stride(), *sizes, to_paged=to_paged, tile=_TILE)
