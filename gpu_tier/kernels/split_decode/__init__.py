"""Split-K decode attention in Triton, which `decode_attn_token` and `decode_attn_paged` share: no kernel of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVDtype, Rows
from kvcm.gpu_tier.kernels.tuning import next_power_of_2
from kvcm.gpu_tier.types import LayerKV

__all__ = ["Operand", "RowOperands", "SlotTable", "operands_of", "plan_splits", "tile_sizes"]

# What the kernel gets: the rows of a layer as typed tensors it can point into, and which of them count.


@dataclass(frozen=True, slots=True)
class Operand:
    """Numbers of one type of all rows, ``[slots, heads, n]``; never read when `n` is 0.

    Attributes:
        data: a view of the rows.
        n: numbers of a row.
    """

    data: Tensor
    n: int

    @property
    def alignment(self) -> int:
        """A power of two up to 16 that both strides are multiples of."""
        return gcd(16, self.data.stride(0), self.data.stride(1))

    @property
    def strides(self) -> tuple[int, int]:
        """From slot to slot, and from head to head, in units of `alignment` elements."""
        return self.data.stride(0) // self.alignment, self.data.stride(1) // self.alignment


@dataclass(frozen=True, slots=True)
class RowOperands:
    """Rows as typed numbers.

    Attributes:
        main: the numbers that are scaled (fp8), or all of a plain row; of MLA the part that is the value too.
        scale: f32 scales of the groups of `main`; n is 0 of plain rows.
        rope: the trailing numbers of MLA.
    """

    main: Operand
    scale: Operand
    rope: Operand


@dataclass(frozen=True, slots=True)
class SlotTable:
    """Which slots each row attends to.

    Attributes:
        table: ``int32 [B, Hs, K]`` slots, or pages.
        lens: ``int32 [B, Hs]`` tokens that count.
        page_tokens: tokens of an entry: 1 for slots.
    """

    table: Tensor
    lens: Tensor
    page_tokens: int = 1

    @property
    def capacity(self) -> int:
        """Most tokens that a row can name."""
        return self.table.shape[-1] * self.page_tokens


def operands_of(kv: LayerKV) -> tuple[RowOperands, RowOperands]:
    """Return keys and values (of MLA the latents twice)."""
    if kv.v is None:
        latent = _split(kv.k, kv.k.format.dims - kv.v_dims)
        return latent, latent
    return _split(kv.k, 0), _split(kv.v, 0)


def _split(rows: Rows, rope: int) -> RowOperands:
    row = rows.format
    main = row.dims - rope
    if row.dtype is not KVDtype.FP8:
        typed = rows.typed
        return RowOperands(Operand(typed, main), Operand(typed, 0), Operand(typed[..., main:] if rope else typed, rope))
    if row.quant_dims % 4 or rows.data.storage_offset() % 4:
        raise ConfigError("dims", row.quant_dims, "the quantised dims must be a multiple of 4, and rows aligned to it")
    quantised = rows.data.view(torch.float8_e4m3fn)
    scale = rows.data.view(torch.float32)[..., row.quant_dims // 4 :]
    plain = rows.data.view(torch.bfloat16)[..., (row.quant_dims + 4 * row.groups) // 2 :] if rope else quantised
    return RowOperands(Operand(quantised, main), Operand(scale, row.groups), Operand(plain, rope))


def tile_sizes(keys: RowOperands, values: RowOperands, *, latent: bool) -> dict[str, int | bool]:
    """Return dims and alignments as the kernel takes them: tiles have powers of two, groups are padded one by one."""
    groups = max(1, keys.scale.n) if latent else 1
    groups_padded = next_power_of_2(groups)
    k_padded = max(16, groups_padded * next_power_of_2(keys.main.n // groups))
    return {
        "K_DIMS": keys.main.n,
        "K_PADDED": k_padded,
        "GROUPS": groups,
        "GROUPS_PADDED": groups_padded,
        "ROPE": keys.rope.n,
        "ROPE_PADDED": max(16, next_power_of_2(max(1, keys.rope.n))),
        "V_DIMS": values.main.n,
        "V_PADDED": k_padded if latent else max(16, next_power_of_2(values.main.n)),
        "FP8": keys.scale.n > 0,
        "K_ALIGN": keys.main.alignment,
        "SCALE_ALIGN": keys.scale.alignment,
        "ROPE_ALIGN": keys.rope.alignment,
        "V_ALIGN": values.main.alignment,
        "V_SCALE_ALIGN": values.scale.alignment,
    }


# Into how many pieces the keys of each row are split, so that all processors of a GPU have work.

_RESIDENT = 2  # programs that a processor holds at once, with the tiles that the kernel uses
_LEAST_TOKENS = 32  # of a piece: below, writing the partial costs more than reading the keys
_MOST = 256
_GOOD_ENOUGH = 0.85


@lru_cache(maxsize=4096)
def plan_splits(programs: int, max_tokens: int, processors: int) -> int:
    """Return the number of pieces.

    The fewest are taken that keep nearly as many processors busy as any number would: the last wave of programs is
    seldom full, and each piece costs a partial result.

    Args:
        programs: programs of one piece of all rows.
        max_tokens: most tokens that a row can have.
        processors: of the GPU.
    """
    places = _RESIDENT * processors
    most = max(1, min(_MOST, -(-max_tokens // _LEAST_TOKENS)))
    busy = [programs * n / (places * -(-programs * n // places)) for n in range(1, most + 1)]
    best = max(busy)
    return next(n for n, share in enumerate(busy, 1) if share >= _GOOD_ENOUGH * best)
