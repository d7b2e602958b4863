"""Which parts a stored block of a model has, and how far a prefix goes whose parts are known.

Layers that keep KV in the same way and shape are one part: those with full attention, and those with a sliding window.
What linear-attention layers remember of all tokens so far, their state, is another part; only blocks where somebody
stopped computing have it. Whoever goes on behind block `n` needs

1. the full-attention parts of all `n` blocks,
2. a window's part of as many blocks before `n` as the window reaches back,
3. the state at the end of block `n - 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from connectors.layout import BlockLayout
from connectors.layout.tensors import dtype_name
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, LocationSpecKind

__all__ = ["STATE", "KVPart", "ModelParts", "PartOfBlock", "StatePart", "StateTensor"]

STATE = "state"
_KV_GROUP, _ALL_GROUP = "kv", "kv+state"
_ALIGNMENT_BYTES = 16

PartOfBlock = tuple[str, int]
"""Name of a part, and index of the block in its prefix."""


@dataclass(frozen=True, slots=True)
class KVPart:
    """Layers whose KV is stored together.

    Attributes:
        name: of the spec.
        layers: their indices in the model's cache.
        layout: of the stored part.
        dtype: of K and V.
        devices: where each layer's KV is.
        window: tokens that a token sees, itself included; None for all.
    """

    name: str
    layers: tuple[int, ...]
    layout: BlockLayout
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    window: int | None = None

    @property
    def window_blocks(self) -> int | None:
        """Blocks before a block boundary that a token behind it may see; None for all."""
        return None if self.window is None else math.ceil((self.window - 1) / self.layout.block_tokens)

    @property
    def fingerprint(self) -> str:
        """Text that two parts share exactly when their stored bytes are interchangeable."""
        return f"{self.layout.fingerprint} of={self.layers} window={self.window}"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a linear-attention layer's state.

    Attributes:
        layer: its index in the model's cache.
        kind: `conv_states` or `recurrent_states`, as the cache names them.
        index: which of the layer's states.
        shape: of one sequence's, without the batch.
        dtype: of the elements.
        device: where it is.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(compare=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of one sequence's."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StatePart:
    """State of all linear-attention layers, stored as one part: each tensor from a multiple of 16 bytes on."""

    tensors: tuple[StateTensor, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each tensor."""
        offsets, end = [], 0
        for tensor in self.tensors:
            offsets.append(end)
            end += -(-tensor.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return tuple(offsets)

    @property
    def size_bytes(self) -> int:
        """Bytes of the stored part."""
        last = self.tensors[-1]
        return self.offsets[-1] + -(-last.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def fingerprint(self) -> str:
        """Text that two parts share exactly when their stored bytes are interchangeable."""
        return "kvcm-state/1 " + " ".join(
            f"{tensor.layer}.{tensor.kind}.{tensor.index}{list(tensor.shape)}{dtype_name(tensor.dtype)}"
            for tensor in self.tensors
        )


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a stored block.

    Attributes:
        block_tokens: tokens per block.
        kv: layers with attention, one entry per part; at least one.
        state: None when no layer has one.
    """

    block_tokens: int
    kv: tuple[KVPart, ...]
    state: StatePart | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a stored block, without state."""
        return sum(part.layout.block_bytes for part in self.kv)

    @property
    def formats(self) -> dict[str, str]:
        """How each part is stored, by its name."""
        formats = {part.name: part.fingerprint for part in self.kv}
        return formats | ({STATE: self.state.fingerprint} if self.state else {})

    @property
    def spec_infos(self) -> list[LocationSpecInfo]:
        """The parts, to be registered."""
        full = LocationSpecKind.LSK_FULL_ATTENTION if self.state else LocationSpecKind.LSK_UNSPECIFIED
        infos = [LocationSpecInfo(part.name, part.layout.block_bytes, full) for part in self.kv]
        if self.state:
            infos.append(LocationSpecInfo(STATE, self.state.size_bytes, LocationSpecKind.LSK_LINEAR_ATTENTION))
        return infos

    @property
    def spec_groups(self) -> list[LocationSpecGroup]:
        """What is written together, to be registered: everything, unless some blocks have no state."""
        if not self.state:
            return []
        names = tuple(part.name for part in self.kv)
        return [LocationSpecGroup(_KV_GROUP, names), LocationSpecGroup(_ALL_GROUP, (*names, STATE))]

    @property
    def reach_blocks(self) -> int | None:
        """Blocks before a block boundary that whoever goes on needs; None for all, or when there is a state."""
        reaches = [part.window_blocks for part in self.kv]
        known = [reach for reach in reaches if reach is not None]
        return None if self.state is not None or len(known) < len(reaches) else max([1, *known])

    @property
    def without_state(self) -> ModelParts:
        """The same blocks without state."""
        return replace(self, state=None)

    def group_of(self, has_state: bool) -> str:
        """Return the name of the spec group of a block that has a state, or has none."""
        return _ALL_GROUP if has_state else _KV_GROUP

    def usable_blocks(self, has: Callable[[str, int], bool], blocks: int) -> int:
        """Return the length of the longest prefix that can be gone on from.

        Args:
            has: whether a part of a block is known, by name of the part and index of the block.
            blocks: most blocks.
        """
        for part in self.kv:
            if part.window is None:
                blocks = next((block for block in range(blocks) if not has(part.name, block)), blocks)
        runs = [_runs(part, has, blocks) for part in self.kv if part.window is not None]
        for length in range(blocks, 0, -1):
            in_windows = all(run[length - 1] >= min(length, needed) for run, needed in runs)
            if in_windows and (self.state is None or has(STATE, length - 1)):
                return length
        return 0

    def needed(self, blocks: int) -> list[PartOfBlock]:
        """Return the parts that have to be loaded to go on behind a prefix of so many blocks."""
        needed: list[PartOfBlock] = []
        for part in self.kv:
            reach = part.window_blocks
            first = 0 if reach is None else max(0, blocks - reach)
            needed += [(part.name, block) for block in range(first, blocks)]
        return needed + ([(STATE, blocks - 1)] if self.state and blocks else [])


def _runs(part: KVPart, has: Callable[[str, int], bool], blocks: int) -> tuple[Sequence[int], int]:
    """Return how many consecutive blocks up to each one are known, and how many are needed."""
    runs: list[int] = []
    for block in range(blocks):
        runs.append((runs[-1] if runs else 0) + 1 if has(part.name, block) else 0)
    return runs, part.window_blocks or 0
