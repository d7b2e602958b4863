"""Random attention problems, and attention in f64 as a textbook has it, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import KVDtype, RowFormat, Rows
from kvcm.gpu_tier.types import LayerKV

# One bf16 step, relative; the kernels' dots take bf16 numbers on a GPU.
TOLERANCE = {KVDtype.F32: 2e-5, KVDtype.F16: 2**-7, KVDtype.BF16: 2**-7, KVDtype.FP8: 2**-7}


@dataclass(frozen=True)
class Shape:
    """Heads and dims of a problem; MLA when `rope` is not 0 (dims are v_dims + rope)."""

    heads: int
    group: int
    dims: int
    dtype: KVDtype
    rope: int = 0

    @property
    def v_dims(self) -> int:
        return self.dims - self.rope

    def __str__(self) -> str:
        return f"{self.heads}x{self.group}-d{self.dims}r{self.rope}-{self.dtype}"


def device_under_test() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_kv(shape: Shape, slots: int, seed: int = 0, device: torch.device | str = "cpu") -> LayerKV:
    """Return rows as a pool has them: views into a longer buffer, so that strides are not those of the rows alone."""
    generator = torch.Generator().manual_seed(seed)
    plain = shape.rope if shape.dtype is KVDtype.FP8 else 0
    key = RowFormat(shape.dims, shape.dtype, plain_dims=plain)
    value = RowFormat(shape.v_dims, shape.dtype)

    def rows(row: RowFormat) -> Rows:
        data = row.encode(torch.randn(slots, shape.heads, row.dims, generator=generator))
        pool = torch.full((slots * shape.heads * row.row_bytes + 4 * row.row_bytes,), 0xFF, dtype=torch.uint8)
        pool = pool.to(device)
        view = pool[2 * row.row_bytes : -2 * row.row_bytes].view(slots, shape.heads, row.row_bytes)
        view.copy_(data)
        return Rows(view, row)

    return LayerKV(rows(key), None if shape.rope else rows(value), shape.v_dims)


def random_query(shape: Shape, rows: int, seed: int = 1) -> Tensor:
    """Return queries ``[B, Hq, D]``: f32 for f32 KV, else bf16 (f16 for f16)."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, shape.heads * shape.group, shape.dims, generator=generator)
    return q.to(torch.bfloat16 if shape.dtype is KVDtype.FP8 else shape.dtype.torch_dtype)


def expected(q: Tensor, kv: LayerKV, slots: list[list[list[int]]], sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return (o, lse) in f64 of the slots of each row and KV head."""
    rows, q_heads, _ = q.shape
    group = q_heads // kv.k.data.shape[1]
    o = torch.zeros(rows, q_heads, kv.v_dims, dtype=torch.float64)
    lse = torch.full((rows, q_heads), -torch.inf, dtype=torch.float64)
    for row in range(rows):
        for head in range(q_heads):
            chosen = torch.tensor(slots[row][head // group])
            if not len(chosen):
                continue
            k = kv.k.decode(chosen)[:, head // group].double()
            v = k[:, : kv.v_dims] if kv.v is None else kv.v.decode(chosen)[:, head // group].double()
            scores = k @ q[row, head].double() * sm_scale
            o[row, head] = scores.softmax(0) @ v
            lse[row, head] = scores.logsumexp(0)
    return o, lse
