"""KV blocks of one process, in memory of a fixed size: lent to sequences, and kept afterwards while nobody needs them.

Each block has room for the KV of `block_tokens` tokens of one sequence, in all layers. Invariants:

1. A block is free, held by one or more sequences, or idle: nobody holds it, and its content is kept under its key.
2. A block with a key is full and never changes; a block without one is held by one sequence.
3. `take` gives free blocks first, then the idle ones that nobody has used for the longest time.
4. A block that a storage may still write to is never given back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch

from connectors.transformers.cache import KVMemory
from connectors.transformers.parts import ModelParts
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import BlockKey

__all__ = ["BlockPool"]


class BlockPool:
    """Memory for blocks of a model with full attention in all layers; safe to use from several threads.

    Args:
        parts: of a block.
        blocks: how many there are, > 0.

    Attributes:
        memory: K and V of each layer, by its index, each `[block, kv_head, token, head_dim]`.

    Raises:
        InvalidArgumentError: the model has other layers.
    """

    def __init__(self, parts: ModelParts, blocks: int) -> None:
        if blocks <= 0:
            raise InvalidArgumentError(f"pool_blocks is {blocks}, must be > 0")
        if parts.state is not None or any(part.window is not None for part in parts.kv):
            raise InvalidArgumentError("pool_blocks is given, must be 0 for a model with windows or states")
        self.blocks = blocks
        self.memory: dict[int, KVMemory] = {}
        for part in parts.kv:
            shape = (blocks, *part.layout.piece_shape)
            for layer, device in zip(part.layers, part.devices, strict=True):
                keys, values = (torch.empty(shape, dtype=part.dtype, device=device) for _ in range(2))
                self.memory[layer] = keys, values
        self._lock = threading.Lock()
        self._holders = [0] * blocks
        self._free = list(reversed(range(blocks)))
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        with self._lock:
            return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """Lend blocks whose content is nobody's; None when there are not as many."""
        with self._lock:
            if count > len(self._free) + len(self._idle):
                return None
            taken = [self._free.pop() if self._free else self._forget_idle() for _ in range(count)]
            for block in taken:
                self._holders[block] = 1
            return taken

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        """Lend the blocks that hold the longest prefix of these keys."""
        with self._lock:
            found: list[int] = []
            for key in keys:
                block = self._block_of.get(key)
                if block is None:
                    break
                self._holders[block] += 1
                self._idle.pop(block, None)
                found.append(block)
            return found

    def keep(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Say what the blocks that somebody holds contain; a key that is known has its block already."""
        with self._lock:
            for key, block in zip(keys, blocks, strict=True):
                assert self._holders[block]
                if key not in self._block_of and block not in self._key_of:
                    self._block_of[key], self._key_of[block] = block, key

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take the blocks of a sequence back; the end of a prefix is forgotten before its beginning."""
        with self._lock:
            for block in reversed(blocks):
                self._holders[block] -= 1
                assert self._holders[block] >= 0
                if self._holders[block]:
                    continue
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def _forget_idle(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
