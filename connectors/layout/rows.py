"""Copies blocks of a paged tensor to stored blocks and back.

A block is a row here. `gather_rows` and `scatter_rows` of this file work on every device and are the reference; those
of `connectors.layout.rows_triton` have the same signature, move the same bits, and are taken for GPUs where Triton is
installed.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Protocol

import numpy as np
import torch

__all__ = ["CopyRows", "gather_rows", "gather_rows_on", "scatter_rows", "scatter_rows_on", "widened"]

_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_FEW_VALUES = 64  # of a row; for more of them a turn of Python per row is quicker than indexing with all rows


class CopyRows(Protocol):
    """Copies between a tensor with all rows and a tensor with some of them."""

    def __call__(self, paged: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> None:
        """Copy.

        Args:
            paged: [block, kv, head, token, dim], any strides.
            rows: int64, which blocks of `paged`; each of them exists, and none is named twice in a scatter.
            packed: [row, kv, head, token, dim], any strides, same type and device.
        """


def gather_rows(paged: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy rows of `paged` to `packed`, see `CopyRows`."""
    if _has_values(paged, packed):
        source, target = _dims_as_values(paged), _dims_as_values(packed)
        for place, row in enumerate(rows.tolist()):  # indexing with all of them would make a copy in between
            target[place] = source[row]
    else:
        torch.index_select(paged, 0, rows, out=packed)


def scatter_rows(paged: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy `packed` to rows of `paged`, see `CopyRows`."""
    if _has_values(paged, packed):
        target, source = _dims_as_values(paged), _dims_as_values(packed)
        if math.prod(source.shape[1:]) < _FEW_VALUES:
            target[rows.numpy()] = source
        else:
            for place, row in enumerate(rows.tolist()):
                target[row] = source[place]
    else:
        paged.index_copy_(0, rows, packed)


def widened(paged: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors with as many neighbours of `dim` taken as one number as both layouts allow.

    Copying half as many numbers of twice the size takes about half the time.
    """
    item = paged.element_size()
    if paged.stride(-1) != 1 or packed.stride(-1) != 1:
        return paged, packed
    numbers = [int(paged.shape[-1])]
    for tensor in (paged, packed):
        numbers += [*tensor.stride()[:-1], int(tensor.storage_offset()), tensor.data_ptr() // item]
    number = _NUMBERS[item * math.gcd(8 // item, *numbers)]
    return paged.view(number), packed.view(number)


def gather_rows_on(device: torch.device) -> CopyRows:
    """Return the fastest gather for a device."""
    if not _has_kernels(device):
        return gather_rows
    from connectors.layout import rows_triton

    return rows_triton.gather_rows


def scatter_rows_on(device: torch.device) -> CopyRows:
    """Return the fastest scatter for a device."""
    if not _has_kernels(device):
        return scatter_rows
    from connectors.layout import rows_triton

    return rows_triton.scatter_rows


def _has_values(paged: torch.Tensor, packed: torch.Tensor) -> bool:
    """Return whether numpy can take every `dim` as one value; torch goes number by number, and is half as fast."""
    return paged.device.type == "cpu" and paged.stride(-1) == packed.stride(-1) == 1


def _dims_as_values(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """Return the same memory as [..., 1 value of all bytes of `dim`], without the last axis."""
    numbers = tensor.numpy()
    return numbers.view(f"V{tensor.shape[-1] * tensor.element_size()}")[..., 0]


def _has_kernels(device: torch.device) -> bool:
    """Return whether Triton is there and can reach the device: a GPU, or any when it interprets."""
    reachable = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return reachable and importlib.util.find_spec("triton") is not None
