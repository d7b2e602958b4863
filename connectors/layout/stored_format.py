"""The stored format of a block: axes, shards of ranks, byte ranges, and its text in registrations.

Plain Python, without torch: the manager's clients and tests compute with formats in processes that have no tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple

from kvcm.model.errors import InvalidArgumentError

__all__ = [
    "AXES",
    "KV_PACKED",
    "LAYER_FIRST",
    "PAGE_HEAD",
    "BlockLayout",
    "ByteRange",
    "IndexRange",
    "MemoryRuns",
    "RankHeads",
    "Shard",
    "SpecRead",
    "StoredFormat",
    "StoredSpec",
    "coalesce",
    "contiguous_runs",
    "format_text",
    "item_bytes",
    "parse_format",
    "rank_heads",
]

_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element.

    Args:
        dtype: as torch names it: `float32`, `bfloat16`, ...; `uint8` and `int8` are for what an engine has packed.

    Raises:
        InvalidArgumentError: the dtype is unknown.
    """
    if dtype not in _ITEM_BYTES:
        raise InvalidArgumentError(f"dtype is {dtype!r}, must be one of {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[dtype]


# ---- the bytes that a strided array covers, as contiguous runs ----
#
# Plain Python on purpose: a block has tens of runs, and numpy's cost per call is that of tens of additions.


@dataclass(frozen=True, slots=True)
class MemoryRuns:
    """Runs of equal length.

    Attributes:
        outer: sizes and strides in bytes of the dimensions that separate the runs, outermost first.
        run_bytes: bytes of each run; 0 when the array is empty.
    """

    outer: tuple[tuple[int, int], ...]
    run_bytes: int

    @property
    def count(self) -> int:
        """Number of runs."""
        total = 1 if self.run_bytes else 0
        for size, _ in self.outer:
            total *= size
        return total

    def starts(self, first: int) -> list[int]:
        """Return where each run begins, in the order of the elements; the first one begins at byte `first`."""
        starts = [first] if self.run_bytes else []
        for size, stride in self.outer:
            steps = range(0, size * stride, stride)
            starts = [start + step for start in starts for step in steps]
        return starts


@lru_cache(maxsize=256)  # the pieces of a cache share a few shapes
def contiguous_runs(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> MemoryRuns:
    """Return the runs of an array: together, in order, they are its elements in row-major order.

    Args:
        shape: of the array, any number of dimensions.
        strides: in elements, one per dimension.
        item_bytes: bytes per element.

    Raises:
        InvalidArgumentError: a dimension repeats the same memory, so writing to it has no meaning.
    """
    dimensions = [(size, stride * item_bytes) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if any(size == 0 for size, _ in dimensions):
        return MemoryRuns((), 0)
    if any(stride <= 0 for _, stride in dimensions):
        raise InvalidArgumentError(f"strides {strides} of shape {tuple(shape)} repeat memory, must be > 0")
    run_bytes = item_bytes
    while dimensions and dimensions[-1][1] == run_bytes:
        run_bytes *= dimensions.pop()[0]
    return MemoryRuns(tuple(dimensions), run_bytes)


def coalesce(bounds: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join runs (first byte, end) that follow each other in the list and in memory."""
    joined: list[tuple[int, int]] = []
    for begin, end in bounds:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


# ---- shards: the part of a model's KV that a rank or a spec holds ----
#
# A part is a range of layers times a range of KV heads. Pipeline stages cut the layers, tensor parallelism cuts the
# heads, and two parts have in common what both ranges have in common.


class IndexRange(NamedTuple):
    """Whole numbers from `first` up to, not including, `end`."""

    first: int
    end: int

    @property
    def size(self) -> int:
        """How many numbers."""
        return self.end - self.first

    def contains(self, other: IndexRange) -> bool:
        """Return whether every number of `other` is in this span."""
        return self.first <= other.first and other.end <= self.end

    def intersection(self, other: IndexRange) -> IndexRange | None:
        """Return what both have, None when that is nothing."""
        common = IndexRange(max(self.first, other.first), min(self.end, other.end))
        return common if common.size > 0 else None


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of layers times a range of KV heads, counted over the whole model.

    Raises:
        InvalidArgumentError: a range is empty or begins below 0.
    """

    layers: IndexRange
    heads: IndexRange

    def __post_init__(self) -> None:
        for field in ("layers", "heads"):
            first, end = getattr(self, field)
            if not 0 <= first < end:
                raise InvalidArgumentError(f"{field} is {first} to {end}, must be 0 <= first < end")

    @property
    def name(self) -> str:
        """The name of a spec that holds this part: `layers0-16.heads0-4`, ends not included."""
        return f"layers{self.layers.first}-{self.layers.end}.heads{self.heads.first}-{self.heads.end}"

    def contains(self, other: Shard) -> bool:
        """Return whether all of `other` is in this part."""
        return self.layers.contains(other.layers) and self.heads.contains(other.heads)

    def intersection(self, other: Shard) -> Shard | None:
        """Return what both have, None when that is nothing."""
        layers, heads = self.layers.intersection(other.layers), self.heads.intersection(other.heads)
        return Shard(layers, heads) if layers and heads else None


class RankHeads(NamedTuple):
    """The KV heads of one rank.

    Attributes:
        heads: that the rank computes.
        replica: which of the ranks that compute the same heads it is; number 0 stores them, the others only read.
    """

    heads: IndexRange
    replica: int


def rank_heads(heads: int, rank: int, ranks: int) -> RankHeads:
    """Return the KV heads of a tensor-parallel rank.

    With more ranks than heads, each head is computed by several neighbours. MLA is the case of one head: all ranks
    have the same latent KV.

    Args:
        heads: KV heads of the model; 1 for MLA.
        rank: 0 to `ranks` - 1.
        ranks: size of the tensor-parallel group.

    Raises:
        InvalidArgumentError: the rank is not one of the group, or heads and ranks do not divide.
    """
    if heads <= 0 or ranks <= 0:
        raise InvalidArgumentError(f"heads is {heads} and ranks is {ranks}, must both be > 0")
    if not 0 <= rank < ranks:
        raise InvalidArgumentError(f"rank is {rank}, must be 0 to {ranks - 1}")
    if heads % ranks and ranks % heads:
        raise InvalidArgumentError(f"ranks is {ranks}, must divide the {heads} KV heads or be a multiple of them")
    replicas = max(1, ranks // heads)
    share = max(1, heads // ranks)
    first = rank // replicas * share
    return RankHeads(IndexRange(first, first + share), rank % replicas)


# ---- the stored block ----


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The stored format of one block of KV, version 1.

    A stored block is one contiguous array without a header, in the machine's byte order (little endian):

        [layer][K, V][kv_head][token][head_dim]

    so each layer is one byte range, of `block_bytes / layers` bytes, and can be read alone.

    Attributes:
        layers: attention layers that keep KV.
        kv_heads: key/value heads stored per layer (of this rank).
        head_dim: elements per head and token, the same for K and V.
        block_tokens: tokens per block.
        dtype: of the elements, as torch names it: `float32`, `bfloat16`, ...

    Raises:
        InvalidArgumentError: a count is not positive, or the dtype is unknown.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    VERSION = 1

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, field) <= 0:
                raise InvalidArgumentError(f"{field} is {getattr(self, field)}, must be > 0")
        item_bytes(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * item_bytes(self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of a stored block."""
        return self.token_bytes * self.block_tokens

    @property
    def piece_shape(self) -> tuple[int, int, int]:
        """Shape of the K, or the V, of one layer: [kv_head, token, head_dim]."""
        return (self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def fingerprint(self) -> str:
        """Text that two layouts share exactly when their stored bytes are interchangeable."""
        return (
            f"kvcm-block/{self.VERSION} layers={self.layers} kv_heads={self.kv_heads} head_dim={self.head_dim}"
            f" block_tokens={self.block_tokens} dtype={self.dtype} order=layer.kv.head.token.dim"
        )


# ---- the stored format of a block, and the bytes of it that a rank reads ----
#
# A block of the whole model is a box with five axes: layer, kv, head, token, dim. It is cut into specs, one per layer
# range and head range, and a spec is the contiguous array of its part of the box, without a header, little endian. The
# order of the axes is part of the format. Everything else follows from it: a reader's part is a smaller box, and the
# strides give the byte runs of a box inside a box. Those runs, one after the other, are the contiguous array of the
# smaller box in the same order, so the bytes read are in this format again.
#
# Two orders have names for their use. `LAYER_FIRST` has a range of layers in one run. `PAGE_HEAD` has a range of heads
# in one run, so that any number of ranks can share. An engine whose own blocks are in some other order may store in
# that order and copy nothing: any order of the axes is a format.

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
        return Shard(IndexRange(0, self.layers), IndexRange(0, self.heads))

    @property
    def specs(self) -> tuple[StoredSpec, ...]:
        """The parts that a block is stored in, layer ranges outermost."""
        share = self.heads // self.head_shards
        shards = [
            Shard(IndexRange(*layers), IndexRange(first, first + share))
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


# ---- the stored format as one line of text, for the registration of an instance ----
#
# Engines share blocks exactly when their texts are equal, so there is one text per format, and parsing rejects every
# other text.

_NUMBER = "([1-9][0-9]{0,6})"
_TEXT = re.compile(
    rf"kvcm-block/{_NUMBER} layer_ends=([0-9,]{{1,512}}) heads={_NUMBER} head_shards={_NUMBER} kv_parts={_NUMBER}"
    rf" head_dim={_NUMBER} block_tokens={_NUMBER} dtype=([a-z0-9_]{{1,32}}) order=([a-z.]{{1,64}})",
    re.ASCII,
)


def format_text(stored: StoredFormat) -> str:
    """Return the text of a format: `kvcm-block/2 layer_ends=16,32 heads=8 ...`."""
    ends = ",".join(map(str, stored.layer_ends))
    return (
        f"kvcm-block/{stored.VERSION} layer_ends={ends} heads={stored.heads} head_shards={stored.head_shards}"
        f" kv_parts={stored.kv_parts} head_dim={stored.head_dim} block_tokens={stored.block_tokens}"
        f" dtype={stored.dtype} order={stored.order}"
    )


def parse_format(text: str) -> StoredFormat:
    """Return the format that `format_text` wrote.

    Raises:
        InvalidArgumentError: the text is of another version, has another form, or describes what cannot be.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(f"stored format is {text[:200]!r}, must be as in {format_text(_EXAMPLE)!r}")
    version, ends, heads, head_shards, kv_parts, head_dim, block_tokens, dtype, order = match.groups()
    if int(version) != StoredFormat.VERSION:
        raise InvalidArgumentError(f"stored format has version {version}, must be {StoredFormat.VERSION}")
    if not re.fullmatch(rf"{_NUMBER}(,{_NUMBER})*", ends):
        raise InvalidArgumentError(f"layer_ends is {ends!r}, must be numbers joined by commas")
    return StoredFormat(
        layer_ends=tuple(map(int, ends.split(","))),
        heads=int(heads),
        head_shards=int(head_shards),
        kv_parts=int(kv_parts),
        head_dim=int(head_dim),
        block_tokens=int(block_tokens),
        dtype=dtype,
        order=order,
    )


_EXAMPLE = StoredFormat((16, 32), heads=8, head_shards=2, kv_parts=2, head_dim=128, block_tokens=64, dtype="bfloat16")
