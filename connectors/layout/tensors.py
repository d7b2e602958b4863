"""Memory of torch tensors as iovecs, without a copy where possible, and staging buffers where not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from kvcm.connectors.layout.stored_format import BlockLayout, MemoryRuns, coalesce, contiguous_runs
from kvcm.model.errors import InvalidArgumentError

__all__ = ["HostBlock", "StagingBuffers", "dtype_name", "iovec", "run_count"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that `BlockLayout.dtype` uses."""
    return str(dtype).removeprefix("torch.")


def _storage_memory(tensor: torch.Tensor) -> memoryview:
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
        memory = _storage_memory(of_one_storage[0])
        bounds = coalesce(bound for piece in of_one_storage for bound in _bounds(piece))
        views += [memory[begin:end] for begin, end in bounds]
    return views


def _bounds(piece: torch.Tensor) -> list[tuple[int, int]]:
    """Return first byte and end of each run inside the memory that the tensor is a view of."""
    runs = _runs(piece)
    starts = runs.starts(int(piece.storage_offset()) * piece.element_size())
    return [(start, start + runs.run_bytes) for start in starts]


def _runs(piece: torch.Tensor) -> MemoryRuns:
    return contiguous_runs(piece.shape, piece.stride(), piece.element_size())


def _storage_address(piece: torch.Tensor) -> int:
    return piece.untyped_storage().data_ptr()


# ---- staging buffers, for memory on another device and memory in more pieces than one system call takes ----
#
# Such a block is gathered before a save and scattered after a load, through one reusable buffer that is page-locked if
# the device is a CUDA one. All other blocks go straight from and to their memory.

_MAX_PIECES: int = os.sysconf("SC_IOV_MAX")


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block as memory of the host.

    Attributes:
        buffers: the stored block's bytes in order.
        pieces: the engine's tensors.
        copies: the same shapes inside the staging buffer; empty when `buffers` is the engine's own memory.
    """

    buffers: Sequence[memoryview]
    pieces: Sequence[torch.Tensor]
    copies: Sequence[torch.Tensor] = ()

    def gather(self) -> None:
        """Bring the engine's values into `buffers`; nothing to do for direct memory."""
        for copy, piece in zip(self.copies, self.pieces, strict=False):
            copy.copy_(piece)

    def scatter(self) -> None:
        """Bring `buffers` into the engine's tensors; nothing to do for direct memory."""
        for copy, piece in zip(self.copies, self.pieces, strict=False):
            piece.copy_(copy)


class StagingBuffers:
    """Makes blocks reachable for storages; owns one buffer of `slots` blocks, made when it is first needed.

    Not safe to share between threads: a slot is free again when its block has been moved.

    Args:
        layout: of the stored blocks.
        slots: blocks that can be staged at once, > 0.
    """

    def __init__(self, layout: BlockLayout, slots: int = 8) -> None:
        if slots <= 0:
            raise InvalidArgumentError(f"slots is {slots}, must be > 0")
        self.layout = layout
        self.slots = slots
        self._buffer: torch.Tensor | None = None

    def host_block(self, pieces: Sequence[torch.Tensor], slot: int) -> HostBlock:
        """Return a block's memory, its own where possible and otherwise a slot of the buffer.

        Args:
            pieces: K and V of each layer in order, each of shape [kv_head, token, head_dim], any strides.
            slot: of the buffer, 0 to `slots` - 1.

        Raises:
            InvalidArgumentError: the tensors do not fit the layout.
        """
        self._check(pieces)
        direct = _direct_iovec(pieces)
        if direct is not None:
            return HostBlock(direct, pieces)
        memory = self._slot(slot, pieces[0].device)
        copies = memory.view(pieces[0].dtype).view(len(pieces), *self.layout.piece_shape).unbind()
        return HostBlock(iovec([memory]), pieces, copies)

    def host_blocks(self, blocks: Iterable[Sequence[torch.Tensor]]) -> list[HostBlock]:
        """Return the memory of as many of the blocks, from the first on, as can be reached at once.

        All of them when their memory is direct, otherwise as many as there are slots.
        """
        reachable: list[HostBlock] = []
        for pieces in blocks:
            reachable.append(self.host_block(pieces, len(reachable)))
            if reachable[0].copies and len(reachable) == self.slots:
                break
        return reachable

    def discard(self) -> None:
        """Give the buffer up because a storage may still use it; the next block gets a new one."""
        self._buffer = None

    def _slot(self, slot: int, device: torch.device) -> torch.Tensor:
        size = self.layout.block_bytes
        if self._buffer is None:
            self._buffer = torch.empty(self.slots * size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self._buffer[slot * size : (slot + 1) * size]

    def _check(self, pieces: Sequence[torch.Tensor]) -> None:
        layout = self.layout
        if len(pieces) != 2 * layout.layers:
            raise InvalidArgumentError(f"a block of {len(pieces)} pieces, must be K and V of {layout.layers} layers")
        for piece in pieces:
            if tuple(piece.shape) != layout.piece_shape or dtype_name(piece.dtype) != layout.dtype:
                found, wanted = f"{tuple(piece.shape)} {piece.dtype}", f"{layout.piece_shape} {layout.dtype}"
                raise InvalidArgumentError(f"a piece of the block is {found}, must be {wanted}")


def _direct_iovec(pieces: Sequence[torch.Tensor]) -> list[memoryview] | None:
    """Return the memory of the tensors themselves, None when a storage cannot be given it."""
    if any(piece.device.type != "cpu" for piece in pieces) or run_count(pieces) > _MAX_PIECES:
        return None
    return iovec(pieces)
