"""Paged KV in the layouts of engines, next to the plain numbers that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from kvcm.connectors.layout.gather import EngineKv
from kvcm.connectors.layout.stored_format import AXES, IndexRange, Shard, StoredFormat
from kvcm.connectors.layout.tensors import dtype_name

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
NUMBERS = {1: np.uint8, 2: np.int16, 4: np.int32}
ELEMENTS = ("block", "kv", "head", "token", "dim")
PARTS_OF = {"slot": ("block", "token"), "kv_dim": ("kv", "dim")}


@dataclass(frozen=True, slots=True)
class EngineCase:
    """An engine's memory.

    Attributes:
        stored: how its blocks are stored.
        axes: names of the tensors' dimensions.
        block_tokens: per block of the engine.
        blocks: of the engine.
        shard: of the rank.
        apart: whether K and V are tensors of their own.
        padding: elements between and around, before and behind each dimension: memory that is not the cache's.
        dtype: of the elements.
    """

    stored: StoredFormat
    axes: tuple[str, ...]
    block_tokens: int
    blocks: int
    shard: Shard
    apart: bool
    padding: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each axis of one tensor."""
        kv = 1 if self.apart else self.stored.kv_parts
        sizes = (self.blocks, kv, self.shard.heads.size, self.block_tokens, self.stored.head_dim)
        return dict(zip(ELEMENTS, sizes, strict=True))

    @property
    def tensors_per_layer(self) -> int:
        """Tensors that make a layer."""
        return self.stored.kv_parts if self.apart else 1

    @property
    def places(self) -> int:
        """Blocks of the engine per stored block."""
        return self.stored.block_tokens // self.block_tokens

    def logical(self, seed: int) -> np.ndarray:
        """Return random numbers as [layer, block, kv, head, token, dim]."""
        sizes = {**self.sizes, "kv": self.stored.kv_parts}
        kind = NUMBERS[self.dtype.itemsize]
        limits = np.iinfo(kind)
        shape = (self.shard.layers.size, *sizes.values())
        return np.random.default_rng(seed).integers(limits.min, limits.max, shape, kind, endpoint=True)

    def memory(self, logical: np.ndarray) -> np.ndarray:
        """Return the memory of all tensors, [layer, tensor, ...]; bytes outside the cache are 0x55."""
        parts = np.split(logical, self.tensors_per_layer, axis=2) if self.apart else [logical]
        tensors = np.stack([self._arranged(part) for part in parts], axis=1)
        memory = np.full(
            [*tensors.shape[:2], *(size + sum(pad) for size, pad in zip(tensors.shape[2:], self.padding, strict=True))],
            0x55,
            tensors.dtype,
        )
        memory[(slice(None), slice(None), *self._inner(tensors.shape[2:]))] = tensors
        return memory

    def engine(self, memory: np.ndarray) -> EngineKv:
        """Return the memory as an engine registers it."""
        lengths = [memory.shape[2 + i] - sum(pad) for i, pad in enumerate(self.padding)]
        inner = self._inner(lengths)
        layers = [[torch.from_numpy(tensor)[inner].view(self.dtype) for tensor in np_layer] for np_layer in memory]
        return EngineKv(self.stored, self.shard, layers, self.axes, self.block_tokens)

    def stored_bytes(self, logical: np.ndarray, block_ids: Sequence[int], shard: Shard) -> np.ndarray:
        """Return the stored blocks, computed with plain indexing: [stored block, bytes]."""
        layers, heads = self.inside(shard)
        blocks = []
        for start in range(0, len(block_ids), self.places):
            ids = list(block_ids[start : start + self.places])
            tokens = np.concatenate([logical[layers, block][:, :, heads] for block in ids], axis=3)
            blocks.append(ordered(tokens, self.stored))
        row_bytes = self.stored.shard_bytes(shard)
        return np.stack(blocks) if blocks else np.empty((0, row_bytes), np.uint8)

    def inside(self, shard: Shard) -> tuple[slice, slice]:
        """Return where the layers and heads of a shard are among those of the rank."""
        (first_layer, _), (first_head, _) = self.shard.layers, self.shard.heads
        return (
            slice(shard.layers.first - first_layer, shard.layers.end - first_layer),
            slice(shard.heads.first - first_head, shard.heads.end - first_head),
        )

    def _arranged(self, part: np.ndarray) -> np.ndarray:
        order = [element for axis in self.axes for element in PARTS_OF.get(axis, (axis,))]
        missing = [element for element in ELEMENTS if element not in order]  # those of size 1
        transposed = part.transpose(0, *(1 + ELEMENTS.index(element) for element in [*missing, *order]))
        return transposed.reshape(len(part), *(self._length(axis) for axis in self.axes))

    def _length(self, axis: str) -> int:
        return int(np.prod([self.sizes[element] for element in PARTS_OF.get(axis, (axis,))]))

    def _inner(self, lengths: Sequence[int]) -> tuple[slice, ...]:
        return tuple(slice(pad[0], pad[0] + size) for pad, size in zip(self.padding, lengths, strict=True))


def ordered(box: np.ndarray, stored: StoredFormat) -> np.ndarray:
    """Return the stored bytes of [layer, kv, head, token, dim]."""
    in_order = np.ascontiguousarray(box.transpose([AXES.index(axis) for axis in stored.axes]))
    return in_order.reshape(-1).view(np.uint8)


@st.composite
def spans(draw: st.DrawFn, within: IndexRange) -> IndexRange:
    """Return a range inside a range."""
    first = draw(st.integers(within.first, within.end - 1))
    return IndexRange(first, draw(st.integers(first + 1, within.end)))


@st.composite
def shards(draw: st.DrawFn, within: Shard) -> Shard:
    """Return a part of a part."""
    return Shard(draw(spans(within.layers)), draw(spans(within.heads)))


@st.composite
def engine_cases(draw: st.DrawFn) -> EngineCase:
    """Return MHA, GQA and MLA in any order of the axes."""
    dtype = draw(st.sampled_from(DTYPES))
    heads, kv_parts = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (4, 2)]))
    block_tokens, places = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    stored = StoredFormat(
        layer_ends=(draw(st.integers(1, 3)),),
        heads=heads,
        head_shards=1,
        kv_parts=kv_parts,
        head_dim=draw(st.integers(1, 8)),
        block_tokens=block_tokens * places,
        dtype=dtype_name(dtype),
        order=".".join(draw(st.permutations(AXES))),
    )
    kv = draw(st.sampled_from(["kv", "packed", "apart"])) if kv_parts == 2 else "latent"
    shard = draw(shards(stored.model))
    names = ["slot"] if draw(st.booleans()) else ["block", "token"]
    names += {"kv": ["kv", "dim"], "packed": ["kv_dim"], "apart": ["dim"], "latent": ["dim"]}[kv]
    if shard.heads.size > 1 or draw(st.booleans()):
        names.append("head")
    axes = tuple(draw(st.permutations(names)))
    padding = tuple(draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in axes)
    return EngineCase(stored, axes, block_tokens, draw(st.integers(places, 8)), shard, kv == "apart", padding, dtype)


@st.composite
def chosen_blocks(draw: st.DrawFn, case: EngineCase) -> list[int]:
    """Return blocks of the engine that make whole stored blocks, none twice."""
    count = draw(st.integers(0, case.blocks // case.places)) * case.places
    return list(draw(st.permutations(range(case.blocks))))[:count]
