"""How the KV of a block lies in storage when ranks share the work, and who reads which bytes of it.

A block of the whole model is a box with five axes: layer, kv, head, token, dim. It is cut into specs, one per layer
range and head range, and a spec is the contiguous array of its part of the box, without a header, little endian. The
order of the axes is part of the format. Everything else follows from it: what a reader wants is a smaller box, and the
bytes of a box inside a box are runs that strides tell. Those runs, one behind the other, are the contiguous array of
the smaller box in the same order, so what was read is again something that this format describes.

Two orders have names for their use. `LAYER_FIRST` has a range of layers in one run. `PAGE_HEAD` has a range of heads in
one run, so that any number of ranks can share. An engine whose own blocks are in some other order may store in that
order and copy nothing: any order of the axes is a format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

from connectors.layout.dtypes import item_bytes
from connectors.layout.runs import contiguous_runs
from connectors.layout.shard import Shard, Span
from kvcm.model.errors import InvalidArgumentError

__all__ = ["AXES", "KV_PACKED", "LAYER_FIRST", "PAGE_HEAD", "ByteRange", "SpecRead", "StoredFormat", "StoredSpec"]

AXES = ("layer", "kv", "head", "token", "dim")
LAYER_FIRST = "layer.kv.head.token.dim"
PAGE_HEAD = "head.layer.kv.token.dim"
KV_PACKED = "layer.head.token.kv.dim"  # K and V of a token side by side, as vLLM 0.32 keeps them

_MAX_COUNT = 1 << 20  # of anything; a format may come from somebody else's registration
_MAX_SPECS = 4096


class StoredSpec(NamedTuple):
    """One part of a block that is stored by itself.

    Attributes:
        name: to register it under.
        shard: what it holds.
        size_bytes: of one block's part.
    """

    name: str
    shard: Shard
    size_bytes: int


class ByteRange(NamedTuple):
    """Bytes inside a stored spec: `[offset_bytes, offset_bytes + size_bytes)`."""

    offset_bytes: int
    size_bytes: int


class SpecRead(NamedTuple):
    """What a reader takes from one spec.

    Attributes:
        spec: to read from.
        shard: what the bytes are, once they lie one behind the other.
        ranges: ascending, apart from each other; a single one of the full size when the whole spec is needed.
    """

    spec: StoredSpec
    shard: Shard
    ranges: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """The stored format of a block that is cut into specs, version 2.

    Attributes:
        layer_ends: where each range of layers ends, ascending; the last is the number of layers. One range per
            pipeline stage, which may differ in size.
        heads: KV heads of the whole model; 1 for MLA.
        head_shards: equal ranges that the heads are cut into. As many as heads lets any tensor-parallel size write
            and read; fewer make larger files.
        kv_parts: 2 for K and V, 1 for MLA's latent KV.
        head_dim: elements per head and token, the same for K and V.
        block_tokens: tokens per block.
        dtype: of the elements, as torch names it.
        order: the five axes from the outermost to the innermost, joined by points.

    Raises:
        InvalidArgumentError: a field is not what it must be; the message names it.
    """

    layer_ends: tuple[int, ...]
    heads: int
    head_shards: int
    kv_parts: int
    head_dim: int
    block_tokens: int
    dtype: str
    order: str = LAYER_FIRST

    VERSION: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not self.layer_ends or any(first >= end for first, end in pairwise((0, *self.layer_ends))):
            raise InvalidArgumentError(f"layer_ends is {self.layer_ends}, must be one or more ascending numbers > 0")
        for field in ("layers", "heads", "head_shards", "head_dim", "block_tokens"):
            if not 0 < getattr(self, field) <= _MAX_COUNT:
                raise InvalidArgumentError(f"{field} is {getattr(self, field)}, must be 1 to {_MAX_COUNT}")
        if self.kv_parts not in (1, 2):
            raise InvalidArgumentError(f"kv_parts is {self.kv_parts}, must be 2 for K and V or 1 for latent KV")
        if self.heads % self.head_shards:
            raise InvalidArgumentError(f"head_shards is {self.head_shards}, must divide the {self.heads} heads")
        if len(self.layer_ends) * self.head_shards > _MAX_SPECS:
            raise InvalidArgumentError(
                f"head_shards is {self.head_shards} and layer_ends has {len(self.layer_ends)} ranges,"
                f" must be at most {_MAX_SPECS} specs together"
            )
        item_bytes(self.dtype)
        if sorted(self.axes) != sorted(AXES):
            raise InvalidArgumentError(f"order is {self.order!r}, must name each of {', '.join(AXES)} once")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes from the outermost to the innermost."""
        return tuple(self.order.split("."))

    @property
    def layers(self) -> int:
        """Layers of the whole model."""
        return self.layer_ends[-1]

    @property
    def model(self) -> Shard:
        """All layers and heads."""
        return Shard(Span(0, self.layers), Span(0, self.heads))

    @property
    def specs(self) -> tuple[StoredSpec, ...]:
        """The parts that a block is stored in, layer ranges outermost."""
        share = self.heads // self.head_shards
        shards = [
            Shard(Span(*layers), Span(first, first + share))
            for layers in pairwise((0, *self.layer_ends))
            for first in range(0, self.heads, share)
        ]
        return tuple(StoredSpec(shard.name, shard, self.shard_bytes(shard)) for shard in shards)

    def shape(self, shard: Shard) -> dict[str, int]:
        """Return the sizes of a shard's array, in elements, by axis and in the order of the axes."""
        sizes = {
            "layer": shard.layers.size,
            "kv": self.kv_parts,
            "head": shard.heads.size,
            "token": self.block_tokens,
            "dim": self.head_dim,
        }
        return {axis: sizes[axis] for axis in self.axes}

    def shard_bytes(self, shard: Shard) -> int:
        """Return the bytes of a shard of one block."""
        return math.prod(self.shape(shard).values()) * item_bytes(self.dtype)

    def specs_within(self, shard: Shard) -> tuple[StoredSpec, ...]:
        """Return the specs that a rank with this shard can write: those that it has all of."""
        return tuple(spec for spec in self.specs if shard.contains(spec.shard))

    def reads(self, wanted: Shard) -> tuple[SpecRead, ...]:
        """Return which bytes of which specs hold a shard, whatever sizes the writers had.

        Args:
            wanted: a rank's shard, or some layers of it.

        Raises:
            InvalidArgumentError: the model has no such layers or heads.
        """
        if not self.model.contains(wanted):
            raise InvalidArgumentError(f"shard is {wanted.name}, must lie in {self.model.name}")
        found = [(spec, spec.shard.intersection(wanted)) for spec in self.specs]
        return tuple(
            SpecRead(spec, common, self.byte_ranges(spec.shard, common)) for spec, common in found if common is not None
        )

    def byte_ranges(self, stored: Shard, wanted: Shard) -> tuple[ByteRange, ...]:
        """Return where the bytes of one shard lie inside those of another.

        Args:
            stored: whose array the ranges count in.
            wanted: lies inside it.

        Raises:
            InvalidArgumentError: `wanted` does not lie inside `stored`.
        """
        if not stored.contains(wanted):
            raise InvalidArgumentError(f"shard is {wanted.name}, must lie in {stored.name}")
        item = item_bytes(self.dtype)
        strides = _row_major(self.shape(stored))
        runs = contiguous_runs(tuple(self.shape(wanted).values()), tuple(strides.values()), item)
        skipped_layers = wanted.layers.first - stored.layers.first
        skipped_heads = wanted.heads.first - stored.heads.first
        first = (skipped_layers * strides["layer"] + skipped_heads * strides["head"]) * item
        return tuple(ByteRange(start, runs.run_bytes) for start in runs.starts(first))


def _row_major(shape: Mapping[str, int]) -> dict[str, int]:
    """Return the strides of a contiguous array, in elements, by axis and in the order of the shape."""
    sizes = list(shape.values())
    return {axis: math.prod(sizes[position + 1 :]) for position, axis in enumerate(shape)}
