"""The KV of one rank, group by group, as memory that blocks are saved from and loaded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from connectors.layout.engine_kv import EngineKv
from connectors.layout.gather import block_memory, gather, scatter
from connectors.layout.shard import Shard, Span
from connectors.layout.stored import ByteRange
from connectors.layout.tensors import iovec
from connectors.reuse.staging import Bytes
from connectors.transfer.registered import span_of
from connectors.vllm.plan import KvGroup, RankPart
from kvcm.model.errors import InvalidArgumentError

__all__ = ["GroupMemory"]

_PACKED = ("block", "head", "token", "kv_dim")
_LATENT = ("block", "head", "token", "dim")


class _Piece(NamedTuple):
    """Where one contiguous piece of block 0 lies, and how far it is to that of the next block."""

    memory: memoryview
    start: int
    size_bytes: int
    step: int


class GroupMemory:
    """Reads and writes the blocks of one group; safe to use from several threads, for different blocks.

    Args:
        group: of layers.
        part: of the rank.
        caches: vLLM's tensors by name of the layer, each [block, head, token, K and V].

    Raises:
        InvalidArgumentError: a tensor is missing, or not of the form that the group is stored in.
    """

    def __init__(self, group: KvGroup, part: RankPart, caches: Mapping[str, torch.Tensor]) -> None:
        missing = [name for name in group.layer_names if name not in caches]
        if missing:
            raise InvalidArgumentError(f"no KV cache of layer {missing[0]}, vLLM registered {len(caches)}")
        axes = _LATENT if group.stored.kv_parts == 1 else _PACKED
        self.part = part
        self.part_bytes = group.stored.shard_bytes(part.shard)
        self._kv = EngineKv(group.stored, part.shard, [[caches[name]] for name in group.layer_names], axes)
        self._pieces = self._found_pieces()

    def memory_of(self, block_id: int) -> Sequence[memoryview]:
        """Return the bytes of a block in stored order: the engine's own memory where that is possible, else a copy."""
        if self._pieces is not None:
            return [
                memory[start + block_id * step : start + block_id * step + size]
                for memory, start, size, step in self._pieces
            ]
        direct = block_memory(self._kv, [block_id], self.part.shard)
        if direct is not None:
            return direct
        with self._on_device():
            copy = torch.empty((1, self.part_bytes), dtype=torch.uint8, device=self._kv.device)
            gather(self._kv, [block_id], self.part.shard, copy)
            return iovec([copy.cpu()])

    @property
    def layers(self) -> int:
        """Number of layers in a part."""
        return self.part.shard.layers.end - self.part.shard.layers.first

    def layer_range(self, layer: int) -> ByteRange:
        """Return where the bytes of a layer lie in a part."""
        [found] = self._kv.stored.byte_ranges(self.part.shard, self._shard(layer))
        return found

    def put(self, block_ids: Sequence[int], rows: Bytes, layer: int | None = None) -> None:
        """Bring stored bytes into blocks.

        Args:
            block_ids: one per row, none twice.
            rows: [block, byte], as they were stored.
            layer: which the rows are of; None for rows of all layers.
        """
        with self._on_device():
            stored = torch.from_numpy(np.ascontiguousarray(rows)).to(self._kv.device)
            scatter(self._kv, list(block_ids), self._shard(layer), stored)
            if self._kv.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _shard(self, layer: int | None) -> Shard:
        whole = self.part.shard
        if layer is None:
            return whole
        first = whole.layers.first + layer
        return Shard(Span(first, first + 1), whole.heads)

    def _found_pieces(self) -> list[_Piece] | None:
        """Return where the pieces of block 0 lie, when those of every other block lie a fixed distance further on.

        A twentieth of the time of `block_memory`, which has to ask torch for every piece of every block.
        """
        last = self._kv.blocks - 1
        first, end = (block_memory(self._kv, [block], self.part.shard) for block in (0, last))
        if (
            first is None
            or end is None
            or last == 0
            or [each.nbytes for each in first] != [each.nbytes for each in end]
        ):
            return None
        pieces = []
        for view, further in zip(first, end, strict=True):
            step, rest = divmod(span_of(further).address - span_of(view).address, last)
            whole = memoryview(view.obj).cast("B")
            start = span_of(view).address - span_of(whole).address
            if rest or step < view.nbytes or not 0 <= start <= start + last * step + view.nbytes <= whole.nbytes:
                return None
            pieces.append(_Piece(whole, start, view.nbytes, step))
        return pieces

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels are launched on a thread's current device, which is the first one for threads that we start."""
        return torch.cuda.device(self._kv.device) if self._kv.device.type == "cuda" else nullcontext()
