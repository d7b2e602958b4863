"""Puts the KV of a clustered segment into cluster order, and from there into the store.

The rows are permuted on the device into a staging area of whole blocks (the unused end of a block is zeros); that goes
to the host in runs as long as the blocks of the store follow each other. Nobody waits: the copies run on `d2h`, and
`h2d`, where blocks are read, comes after them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_tier.errors import StateError
from gpu_tier.index.wave_segment import WaveSegment
from gpu_tier.kernels.dma_copy import dma_copy
from gpu_tier.manager.wave_store import WaveStore
from gpu_tier.pools.copy_runs import Runs
from gpu_tier.runtime import DeviceRuntime

__all__ = ["RawRows", "WaveFill"]


class RawRows(Protocol):
    """Reads a request's KV as bytes wherever it is; `KVReader` does."""

    def raw(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        """Return the rows of a part (0 for keys and latents, 1 for values), ``uint8 [n, H, row_bytes]``."""


class WaveFill:
    """Fills blocks of a store.

    Args:
        store: the store.
        rows: reader of the KV.
        runtime: of the device.
        kernels: which implementation of the kernels.
    """

    def __init__(self, store: WaveStore, rows: RawRows, runtime: DeviceRuntime, kernels: str = "auto") -> None:
        self._store = store
        self._rows = rows
        self._runtime = runtime
        self._kernels = kernels

    def take_over(
        self, layer_id: int, request: int, segment: WaveSegment, known: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Give a segment blocks and fill them; waits for the sizes of its clusters.

        Args:
            layer_id: id of the layer.
            request: row of the per-request tables.
            segment: the segment.
            known: clusters that the request has in the layer already.

        Returns:
            Sizes of the clusters ``int32 [H, m]``, and the blocks: head after head, in each cluster after cluster.

        Raises:
            PoolExhaustedError: the store is full; nothing changed.
            StateError: the segment is not the next one.
        """
        if segment.first_cluster != known:
            text = f"{known} clusters of layer {layer_id} are known"
            raise StateError(f"a segment of request {request} begins at cluster {segment.first_cluster}, {text}")
        sizes = segment.sizes.cpu().numpy().astype(np.int32)
        needed = int((-(-sizes // self._store.block_tokens)).sum())
        blocks = self._store.take(layer_id, request, needed, segment.tokens)
        self._fill(layer_id, request, segment, blocks)
        return sizes, blocks

    def _fill(self, layer_id: int, request: int, segment: WaveSegment, blocks: npt.NDArray[np.int32]) -> None:
        staged_slots = _slots(segment, self._store.block_tokens)
        heads = torch.arange(segment.members.shape[0], device=segment.members.device)
        heads = heads.repeat_interleave(segment.tokens)
        members = segment.members.flatten().long()
        for part, strides in enumerate(self._store.addressing.parts):
            rows = self._rows.raw(layer_id, part, request, segment.start, segment.start + segment.tokens)
            staged = rows.new_zeros((len(blocks) * self._store.block_tokens, strides.row_bytes))
            _words(staged)[staged_slots] = _words(rows)[members, heads]
            self._send(staged.flatten(), self._runs(part, blocks))
        self._runtime.fence(self._runtime.record("d2h"), "h2d")

    def _runs(self, part: int, blocks: npt.NDArray[np.int32]) -> Runs:
        strides = self._store.addressing.parts[part]
        first = np.flatnonzero(np.diff(blocks, prepend=blocks[:1] - 2) != 1)
        count = np.diff(np.append(first, len(blocks)))
        runs = Runs(
            first * strides.page, strides.base + blocks[first].astype(np.int64) * strides.page, count * strides.page
        )
        return runs.split(0, self._store.chunk_bytes)

    def _send(self, staged: Tensor, runs: Runs) -> None:
        # Compute has staged the rows, and has waited for every fetch that read the blocks for those who had them.
        self._runtime.fence(self._runtime.record("compute"), "d2h")
        with self._runtime.stream("d2h"):
            numbers = (torch.from_numpy(side) for side in (runs.src, runs.dst, runs.nbytes))
            dma_copy(staged, self._store.data, *numbers, impl=self._kernels)
            self._runtime.used(staged)


def _slots(segment: WaveSegment, block_tokens: int) -> Tensor:
    """Return where each member goes among the staged rows, ``int64 [H·t]``."""
    sizes = segment.sizes.flatten().long()
    blocks = -(-sizes // block_tokens)
    shift = (blocks.cumsum(0) - blocks) * block_tokens - (sizes.cumsum(0) - sizes)
    members = segment.members.numel()
    return torch.arange(members, device=sizes.device) + shift.repeat_interleave(sizes, output_size=members)


def _words(rows: Tensor) -> Tensor:
    """Return rows of bytes as rows of the widest numbers that they consist of: indexing works number by number."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if rows.shape[-1] % dtype.itemsize == 0 and rows.stride(-1) == 1:
            return rows.view(dtype)
    return rows
