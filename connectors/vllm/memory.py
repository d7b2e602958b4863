"""The KV of one rank, group by group, as memory that blocks are saved from and loaded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from connectors.layout.engine_kv import EngineKv
from connectors.layout.gather import block_memory, gather, scatter
from connectors.layout.tensors import iovec
from connectors.reuse.staging import Bytes
from connectors.vllm.plan import KvGroup, RankPart
from kvcm.model.errors import InvalidArgumentError

__all__ = ["GroupMemory"]

_PACKED = ("block", "head", "token", "kv_dim")
_LATENT = ("block", "head", "token", "dim")


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

    def memory_of(self, block_id: int) -> Sequence[memoryview]:
        """Return the bytes of a block in stored order: the engine's own memory where that is possible, else a copy."""
        direct = block_memory(self._kv, [block_id], self.part.shard)
        if direct is not None:
            return direct
        copy = torch.empty((1, self.part_bytes), dtype=torch.uint8, device=self._kv.device)
        gather(self._kv, [block_id], self.part.shard, copy)
        return iovec([copy.cpu()])

    def put(self, block_ids: Sequence[int], rows: Bytes) -> None:
        """Bring stored bytes into blocks.

        Args:
            block_ids: one per row, none twice.
            rows: [block, byte], as they were stored.
        """
        stored = torch.from_numpy(np.ascontiguousarray(rows)).to(self._kv.device)
        scatter(self._kv, list(block_ids), self.part.shard, stored)
        if self._kv.device.type == "cuda":
            torch.cuda.current_stream(self._kv.device).synchronize()
