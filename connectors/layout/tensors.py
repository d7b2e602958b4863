"""Memory of torch tensors as iovecs, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from connectors.layout.runs import Runs, coalesced, contiguous_runs
from kvcm.model.errors import InvalidArgumentError

__all__ = ["dtype_name", "iovec", "run_count", "storage_memory"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that `BlockLayout.dtype` uses."""
    return str(dtype).removeprefix("torch.")


def storage_memory(tensor: torch.Tensor) -> memoryview:
    """Return the whole memory that a CPU tensor is a view of, writable, and kept alive by the result.

    Raises:
        InvalidArgumentError: the tensor is on another device.
    """
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(f"tensor is on {tensor.device}, its memory can be described on cpu only")
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat.numpy().data


def run_count(pieces: Sequence[torch.Tensor]) -> int:
    """Return how many contiguous runs the tensors have, neighbours not yet joined."""
    return sum(_runs(piece).count for piece in pieces)


def iovec(pieces: Sequence[torch.Tensor]) -> list[memoryview]:
    """Return the memory of the tensors' elements, in order, as few contiguous pieces of memory.

    Args:
        pieces: CPU tensors of any shapes, strides and dtypes; computed from their strides, nothing is assumed.

    Raises:
        InvalidArgumentError: a tensor is on another device, or repeats memory (expanded).
    """
    views: list[memoryview] = []
    for _, group in groupby(pieces, key=_storage_address):
        of_one_storage = list(group)
        memory = storage_memory(of_one_storage[0])
        bounds = coalesced(bound for piece in of_one_storage for bound in _bounds(piece))
        views += [memory[begin:end] for begin, end in bounds]
    return views


def _bounds(piece: torch.Tensor) -> list[tuple[int, int]]:
    """Return first byte and end of each run inside the memory that the tensor is a view of."""
    runs = _runs(piece)
    starts = runs.starts(int(piece.storage_offset()) * piece.element_size())
    return [(start, start + runs.run_bytes) for start in starts]


def _runs(piece: torch.Tensor) -> Runs:
    return contiguous_runs(piece.shape, piece.stride(), piece.element_size())


def _storage_address(piece: torch.Tensor) -> int:
    return piece.untyped_storage().data_ptr()
