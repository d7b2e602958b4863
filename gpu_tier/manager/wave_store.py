"""The KV of clusters in host memory: blocks in cluster order, so that a cluster is read as a few long runs.

A block holds the key rows, and in parallel the value rows, of up to bt tokens of one cluster, layer and head. A slot is
``block · bt + i``. All blocks of a request come out of its account, in the order in which they are filled:

1. `hold` sets aside what the clusters of n tokens take at worst, over all layers and heads. A cluster wastes less than
   a block, so t tokens in m clusters take at most (t + m·(bt-1)) / bt blocks.
2. `alloc_blocks` gives out blocks of the account. Blocks that a segment did not need stay there for the next ones.
3. `release` gives everything back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.geometry import Addressing, KVGeometry, Layout, PartStrides
from kvcm.gpu_tier.index.wave_index import WaveSegment
from kvcm.gpu_tier.kernels.dma_copy import dma_copy
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.pools.allocator import PagedAllocator
from kvcm.gpu_tier.pools.pinned import PinnedMemory
from kvcm.gpu_tier.pools.transfer import Runs
from kvcm.gpu_tier.runtime import DeviceRuntime

__all__ = ["EXTENT_BLOCKS", "RawRows", "WaveFill", "WaveStore", "block_tokens"]

EXTENT_BLOCKS = 64
"""Blocks that are given to a request at a time."""
_ODD_SEGMENTS = 2  # those whose tokens are no multiple of tokens_per_centroid: the end of a prompt, and of its prefix


def block_tokens(geometry: KVGeometry, settings: RetroInferConfig) -> int:
    """Return bt, the tokens of a block: those whose keys fill `block_bytes`, at least 1."""
    return max(1, settings.block_bytes // geometry.parts[0].row_bytes)


@dataclass(slots=True)
class _Account:
    """What a request holds, in blocks.

    Attributes:
        extents: pages of the allocator, in the order in which they are filled.
        used: blocks that were taken.
        stored: tokens that were stored of each layer.
    """

    stored: list[int]
    extents: list[int] = field(default_factory=list)
    used: int = 0


class WaveStore:
    """Pinned blocks and their owners.

    Attributes:
        block_tokens: tokens bt of a block.
        addressing: where the row of a slot lies; the same for all layers and heads, a block belongs to one of each.
        allocator: of extents.

    Args:
        geometry: of the KV.
        settings: of RetroInfer; `block_bytes`, `tokens_per_centroid` and the steady zone are used.
        nbytes: size; rounded down to whole extents.
        runtime: of the device that reads it.

    Raises:
        ConfigError: it does not hold one extent.
        PoolExhaustedError: the host has too little memory.
    """

    def __init__(self, geometry: KVGeometry, settings: RetroInferConfig, nbytes: int, runtime: DeviceRuntime) -> None:
        self.geometry = geometry
        self.block_tokens = block_tokens(geometry, settings)
        self._settings = settings
        self._runtime = runtime
        rows = [part.row_bytes for part in geometry.parts]
        extent = EXTENT_BLOCKS * self.block_tokens
        extents = nbytes // (extent * sum(rows))
        if extents < 1:
            raise ConfigError("host_bytes", nbytes, f"an extent of the wave store takes {extent * sum(rows)} bytes")
        self.allocator = PagedAllocator(num_pages=extents, page_size=extent, name="wave store", knob="host_bytes")
        slots = extents * extent
        self.addressing = _addressing(rows, self.block_tokens, slots)
        self._memory = PinnedMemory(slots * sum(rows), extent * rows[0], runtime)
        self._accounts: dict[int, _Account] = {}

    @property
    def data(self) -> Tensor:
        """The blocks, flat ``uint8``."""
        return self._memory.data

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a registered piece; one copy must not span two of them."""
        return self._memory.chunk_bytes

    @property
    def is_device_readable(self) -> bool:
        """Whether kernels may read the blocks: they are pinned, or there is no device."""
        return self._memory.is_pinned or not self._runtime.is_cuda

    @property
    def nbytes(self) -> int:
        """Bytes of the store."""
        return self._memory.nbytes

    def source(self) -> RowPool:
        """Return the blocks as a source of `gather_copy`."""
        return RowPool(self.data, self.addressing, 0)

    def _worst_of(self, clustered: int) -> int:
        """Return the most blocks that one layer and head takes for so many tokens in clusters."""
        if clustered <= 0:
            return 0
        clusters = clustered // self._settings.tokens_per_centroid + _ODD_SEGMENTS
        return min(clustered, (clustered + clusters * (self.block_tokens - 1)) // self.block_tokens)

    def hold(self, request: int, n_tokens: int) -> None:
        """Set aside blocks for a request of so many tokens, more than before or the same.

        Raises:
            PoolExhaustedError: there are too few; what the request had stays.
        """
        account = self._account(request)
        clustered = n_tokens - self._settings.sink - self._settings.local
        ahead = sum(self._worst_of(clustered - stored) for stored in account.stored)
        self._extend(account, account.used + ahead * self.geometry.num_kv_heads)
        self._accounts[request] = account

    def _account(self, request: int) -> _Account:
        return self._accounts.get(request) or _Account([0] * self.geometry.num_layers)

    def _extend(self, account: _Account, blocks: int) -> None:
        extents = -(-blocks // EXTENT_BLOCKS) - len(account.extents)
        if extents > 0:
            account.extents.extend(self.allocator.alloc(extents))

    def alloc_blocks(self, layer_id: int, request: int, blocks: int, tokens: int) -> npt.NDArray[np.int32]:
        """Return blocks of a request's account that are to be filled, ``int32 [blocks]``.

        Args:
            layer_id: id of the layer of the segment.
            request: row of the per-request tables.
            blocks: how many the segment takes, over all heads.
            tokens: of the segment.

        Raises:
            PoolExhaustedError: they are more than were set aside, and the store has no others; nothing was taken.
        """
        account = self._account(request)
        self._extend(account, account.used + blocks)
        self._accounts[request] = account
        number = np.arange(account.used, account.used + blocks)
        extents = np.asarray(account.extents[: -(-(account.used + blocks) // EXTENT_BLOCKS)], dtype=np.int64)
        account.used += blocks
        account.stored[self.geometry.layer_index(layer_id)] += tokens
        return (extents[number // EXTENT_BLOCKS] * EXTENT_BLOCKS + number % EXTENT_BLOCKS).astype(np.int32)

    def release(self, request: int) -> None:
        """Give back what a request holds; one that is not known too."""
        account = self._accounts.pop(request, None)
        if account is not None:
            self.allocator.free(account.extents)

    def close(self) -> None:
        """Give the memory back; views of it must not be used any more. A second call does nothing."""
        self._memory.close()


def _addressing(rows: list[int], block_tokens: int, slots: int) -> Addressing:
    bases = [sum(rows[:part]) * slots for part in range(len(rows))]
    parts = tuple(
        PartStrides(base=base, page=row * block_tokens, token=row, layer=0, head=0, row_bytes=row)
        for base, row in zip(bases, rows, strict=True)
    )
    return Addressing(Layout.LAYER_FIRST, block_tokens, sum(rows) * slots, parts)


# Puts the KV of a clustered segment into cluster order, and from there into the store.


class RawRows(Protocol):
    """Reads a request's KV as bytes from both pools; `KVReader` does."""

    def raw(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        """Return the rows of a part (0 for keys and latents, 1 for values), ``uint8 [n, H, row_bytes]``."""


class WaveFill:
    """Fills blocks of a store.

    The rows are permuted on the device into a staging area of whole blocks (the unused end of a block is zeros); that
    goes to the host in runs as long as the blocks of the store follow each other. The host does not wait: the copies
    run on `d2h`, and `h2d`, where blocks are read, comes after them.

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
        blocks = self._store.alloc_blocks(layer_id, request, needed, segment.tokens)
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
        # Compute has staged the rows, and has waited for every fetch that read the blocks for their former owners.
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
