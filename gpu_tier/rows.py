"""One row of KV: what a token's key (or value, or MLA latent) of one head is as bytes.

Every pool holds rows as bytes, so that pools, transfer kernels and storage never ask what is in them; only attention
and the representations decode. A row is ``[quantised | scales | plain]``:

* plain formats (f32, f16, bf16): `dims` elements, nothing else;
* fp8 of MHA: `dims` e4m3 bytes and one f32 scale;
* fp8 of MLA: the latent in e4m3 with one f32 scale for each group of 128 dims, then the rope dims in bf16
  (512 + 16 + 128 = 656 bytes for DeepSeek's 512 + 64 dims).

A scale is ``max|x| / 448`` of its group, 448 being the largest e4m3 number.

Rows lie back to back, without padding. A known limit follows: an fp8 row of MHA with 128 dims takes 132 bytes, as an
index key of DSA does, so rows begin at multiples of 4 bytes only, and a thread of a GPU can neither load nor copy more
than 4 bytes of one at once. bf16 rows of 128 dims, and MLA in fp8 (656 = 41 * 16), are read 16 bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError

__all__ = ["FP8_MAX", "KVDtype", "RowFormat", "Rows"]

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
