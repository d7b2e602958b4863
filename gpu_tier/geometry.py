"""The KV of a model: formats of its rows, layouts of a pool of pages, and the address of every row.

`KVGeometry` describes the model. `Addressing` gives the byte of every row: each layout is linear in (page, token of the
page, layer, head), so five strides per part describe all of them and one transfer kernel serves any two pools.

| layout | order, outermost first | contiguous |
|---|---|---|
| layer_first | part, layer, page, token, head | a layer of a page |
| page_first | page, part, token, layer, head | a page: one object of a storage |
| page_head | page, head, part, token, layer | a page of one head: a tensor-parallel shard of it |

Pools on the device are layer_first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError

__all__ = ["FP8_MAX", "Addressing", "KVDtype", "KVGeometry", "KVKind", "Layout", "PartStrides", "RowFormat", "Rows"]

# One row of KV: what a token's key (or value, or MLA latent) of one head is as bytes.

FP8_MAX = 448.0
_GROUP = 128


class KVDtype(StrEnum):
    """How the numbers of KV are stored."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of an element; of fp8 the quantised ones."""
        return _TORCH[self]


_TORCH = {
    KVDtype.F32: torch.float32,
    KVDtype.F16: torch.float16,
    KVDtype.BF16: torch.bfloat16,
    KVDtype.FP8: torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The bytes of one row.

    Every pool holds rows as bytes, so that pools, transfer kernels and storage do not depend on their content; only
    attention and the representations decode. A row is ``[quantised | scales | plain]``:

    * plain formats (f32, f16, bf16): `dims` elements, nothing else;
    * fp8 of MHA: `dims` e4m3 bytes and one f32 scale;
    * fp8 of MLA: the latent in e4m3 with one f32 scale for each group of 128 dims, then the rope dims in bf16
      (512 + 16 + 128 = 656 bytes for DeepSeek's 512 + 64 dims).

    A scale is ``max|x| / 448`` of its group, 448 being the largest e4m3 number.

    Rows lie back to back, without padding. A known limit follows: an fp8 row of MHA with 128 dims takes 132 bytes, as
    an index key of DSA does, so rows begin at multiples of 4 bytes only, and a thread of a GPU can neither load nor
    copy more than 4 bytes of one at once. bf16 rows of 128 dims, and MLA in fp8 (656 = 41 * 16), are read 16 bytes at a
    time.

    Attributes:
        dims: numbers of a row.
        dtype: how they are stored.
        plain_dims: of fp8 the trailing numbers that stay bf16 (the rope part of MLA), 0 otherwise.
    """

    dims: int
    dtype: KVDtype
    plain_dims: int = 0

    def __post_init__(self) -> None:
        if self.dims < 1:
            raise ConfigError("dims", self.dims, "a row has at least one number")
        if not 0 <= self.plain_dims < self.dims or (self.plain_dims and self.dtype is not KVDtype.FP8):
            raise ConfigError("plain_dims", self.plain_dims, "only fp8 rows have some, and fewer than dims")
        if self.quant_dims > self.group_dims and self.quant_dims % self.group_dims:
            raise ConfigError("dims", self.dims, f"the quantised dims must be a multiple of {_GROUP}")

    @property
    def quant_dims(self) -> int:
        """Numbers stored in e4m3."""
        return self.dims - self.plain_dims if self.dtype is KVDtype.FP8 else 0

    @property
    def group_dims(self) -> int:
        """Numbers that share a scale: a whole row of MHA, 128 of an MLA latent."""
        return min(self.quant_dims, _GROUP) if self.plain_dims else self.quant_dims

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.quant_dims // self.group_dims if self.quant_dims else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        if self.dtype is KVDtype.FP8:
            return self.quant_dims + 4 * self.groups + 2 * self.plain_dims
        return self.dims * self.dtype.torch_dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        """Return numbers ``[..., dims]`` as bytes ``uint8 [..., row_bytes]``."""
        if x.shape[-1] != self.dims:
            raise ConfigError("x", tuple(x.shape), f"the last dimension must be {self.dims}")
        if self.dtype is not KVDtype.FP8:
            return x.to(self.dtype.torch_dtype).contiguous().view(torch.uint8)
        groups = x[..., : self.quant_dims].float().unflatten(-1, (self.groups, self.group_dims))
        scale = (groups.abs().amax(-1) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        quantised = (groups / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        pieces = [quantised.flatten(-2).view(torch.uint8), scale.view(torch.uint8)]
        if self.plain_dims:
            pieces.append(x[..., self.quant_dims :].to(torch.bfloat16).contiguous().view(torch.uint8))
        return torch.cat(pieces, dim=-1)

    def decode(self, data: Tensor) -> Tensor:
        """Return bytes ``uint8 [..., row_bytes]`` as numbers ``f32 [..., dims]``."""
        if data.shape[-1] != self.row_bytes or data.dtype is not torch.uint8:
            raise ConfigError("data", (data.dtype, *data.shape), f"rows must be {self.row_bytes} bytes of uint8")
        if self.dtype is not KVDtype.FP8:
            return data.contiguous().view(self.dtype.torch_dtype).float()
        scales_end = self.quant_dims + 4 * self.groups
        groups = data[..., : self.quant_dims].contiguous().view(torch.float8_e4m3fn).float()
        scale = data[..., self.quant_dims : scales_end].contiguous().view(torch.float32)
        scaled: Tensor = (groups.unflatten(-1, (self.groups, self.group_dims)) * scale[..., None]).flatten(-2)
        if not self.plain_dims:
            return scaled
        plain = data[..., scales_end:].contiguous().view(torch.bfloat16).float()
        return torch.cat([scaled, plain], dim=-1)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one layer and one part (keys, values or latents), as attention reads them.

    Attributes:
        data: ``uint8 [slots, heads, row_bytes]``; the last dimension is contiguous.
        format: what a row is.
    """

    data: Tensor
    format: RowFormat

    @property
    def typed(self) -> Tensor:
        """The numbers of a plain format without a copy, ``[slots, heads, dims]``."""
        if self.format.dtype is KVDtype.FP8:
            raise ConfigError("format", self.format.dtype, "fp8 rows have no single type; use decode")
        return self.data.view(self.format.dtype.torch_dtype)

    def decode(self, slots: Tensor) -> Tensor:
        """Return the rows at ``slots int [...]`` as ``f32 [..., heads, dims]``."""
        return self.format.decode(self.data[slots.long()])


class KVKind(StrEnum):
    """Whether keys and values are rows of their own, or one latent row is both."""

    MHA = "mha"
    MLA = "mla"


class Layout(StrEnum):
    """The order of a pool's dimensions."""

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_HEAD = "page_head"


@dataclass(frozen=True)
class KVGeometry:
    """The KV of one model on one device.

    Attributes:
        kind: mha (a key row and a value row per head) or mla (one latent row per token, `num_kv_heads` = 1).
        num_layers: layers whose KV is held here.
        num_kv_heads: KV heads.
        head_dim: numbers of a key row; of MLA of the whole latent row (kv_lora_rank + rope dims, 576 for DeepSeek).
        v_head_dim: numbers of a value row; of MLA the leading numbers of the latent that are the value (512).
        dtype: how the numbers are stored.
        page_size: tokens of a page, the unit of allocation, and the block of the storage.
        start_layer: id of the first of the layers, for a pipeline stage.
    """

    kind: KVKind
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: KVDtype
    page_size: int = 64
    start_layer: int = 0

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "v_head_dim", "page_size"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "must be at least 1")
        if self.start_layer < 0:
            raise ConfigError("start_layer", self.start_layer, "must not be negative")
        if self.kind is KVKind.MLA and (self.num_kv_heads != 1 or self.v_head_dim >= self.head_dim):
            allowed = "MLA has one KV head, and its value is a leading part of the latent row"
            raise ConfigError("num_kv_heads, v_head_dim", (self.num_kv_heads, self.v_head_dim), allowed)

    @cached_property
    def parts(self) -> tuple[RowFormat, ...]:
        """The rows of a token and head: (key, value) of MHA, (latent,) of MLA."""
        if self.kind is KVKind.MHA:
            return RowFormat(self.head_dim, self.dtype), RowFormat(self.v_head_dim, self.dtype)
        rope = self.head_dim - self.v_head_dim if self.dtype is KVDtype.FP8 else 0
        return (RowFormat(self.head_dim, self.dtype, plain_dims=rope),)

    @property
    def layers(self) -> range:
        """Ids of the layers."""
        return range(self.start_layer, self.start_layer + self.num_layers)

    def layer_index(self, layer_id: int) -> int:
        """Return the position of a layer in the pools.

        Raises:
            ConfigError: the layer is not held here.
        """
        if layer_id not in self.layers:
            raise ConfigError("layer_id", layer_id, f"layers here are {self.layers.start} to {self.layers.stop - 1}")
        return layer_id - self.start_layer

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of one token in one layer, all parts and heads."""
        return self.num_kv_heads * sum(part.row_bytes for part in self.parts)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.token_layer_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.page_size * self.token_bytes


@dataclass(frozen=True, slots=True)
class PartStrides:
    """Where the rows of one part lie: byte = base + page·p + token·o + layer·l + head·h, of page p and its token o."""

    base: int
    page: int
    token: int
    layer: int
    head: int
    row_bytes: int

    def address(self, page: int, token: int, layer: int, head: int) -> int:
        """Return the first byte of a row; `layer` is its position in the pool, `token` its offset in the page."""
        return self.base + self.page * page + self.token * token + self.layer * layer + self.head * head


@dataclass(frozen=True, slots=True)
class Addressing:
    """The addresses of a pool of pages.

    Attributes:
        layout: order of its dimensions.
        page_size: tokens of a page. A slot s is token ``s % page_size`` of page ``s // page_size``.
        total_bytes: bytes of the pool.
        parts: strides of each part.
    """

    layout: Layout
    page_size: int
    total_bytes: int
    parts: tuple[PartStrides, ...]

    @classmethod
    def of(cls, geometry: KVGeometry, layout: Layout, num_pages: int) -> Addressing:
        """Return the addresses of `num_pages` pages in `layout`."""
        strides = {
            Layout.LAYER_FIRST: _layer_first,
            Layout.PAGE_FIRST: _page_first,
            Layout.PAGE_HEAD: _page_head,
        }[layout](geometry, num_pages)
        return cls(layout, geometry.page_size, num_pages * geometry.page_bytes, strides)

    def address(self, part: int, slot: int, layer: int, head: int) -> int:
        """Return the first byte of the row of a slot (page · page_size + token)."""
        page, token = divmod(slot, self.page_size)
        return self.parts[part].address(page, token, layer, head)


def _bases(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _layer_first(g: KVGeometry, pages: int) -> tuple[PartStrides, ...]:
    rows = [part.row_bytes for part in g.parts]
    tokens = pages * g.page_size * g.num_kv_heads
    bases = _bases([row * tokens * g.num_layers for row in rows])
    return tuple(
        PartStrides(
            base=base,
            page=row * g.num_kv_heads * g.page_size,
            token=row * g.num_kv_heads,
            layer=row * tokens,
            head=row,
            row_bytes=row,
        )
        for base, row in zip(bases, rows, strict=True)
    )


def _page_first(g: KVGeometry, _pages: int) -> tuple[PartStrides, ...]:
    rows = [part.row_bytes for part in g.parts]
    bases = _bases([row * g.page_size * g.num_layers * g.num_kv_heads for row in rows])
    return tuple(
        PartStrides(
            base=base,
            page=g.page_bytes,
            token=row * g.num_kv_heads * g.num_layers,
            layer=row * g.num_kv_heads,
            head=row,
            row_bytes=row,
        )
        for base, row in zip(bases, rows, strict=True)
    )


def _page_head(g: KVGeometry, _pages: int) -> tuple[PartStrides, ...]:
    rows = [part.row_bytes for part in g.parts]
    bases = _bases([row * g.page_size * g.num_layers for row in rows])
    head = g.page_bytes // g.num_kv_heads
    return tuple(
        PartStrides(base=base, page=g.page_bytes, token=row * g.num_layers, layer=row, head=head, row_bytes=row)
        for base, row in zip(bases, rows, strict=True)
    )
