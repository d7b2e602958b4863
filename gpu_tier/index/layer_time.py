"""How long one layer of a model computes over a prompt: attention and the products around it, of random numbers.

A stand-in for engines that do not say how long their layers take: a hidden size of all query heads, three products of a
gated feed-forward part 3.5 times as wide, causal attention. It is measured on the device that attention runs on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_tier.geometry import KVGeometry
from gpu_tier.runtime import DeviceRuntime

__all__ = ["dense_layer_seconds"]

_WIDER = 3.5


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights, transposed; queries, keys and values come of one product."""

    heads: int
    kv_heads: int
    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor, dims: int) -> Tensor:
        """Return ``[s, hidden]``."""
        split = (self.heads, self.kv_heads, self.kv_heads)
        heads: Tensor = (x @ self.qkv).unflatten(-1, (-1, dims)).transpose(0, 1)
        q, k, v = heads.split(split)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + attended.transpose(0, 1).flatten(1) @ self.out
        gate, up = (x @ self.up).chunk(2, -1)
        result: Tensor = x + (torch.nn.functional.silu(gate) * up) @ self.down
        return result


def dense_layer_seconds(
    geometry: KVGeometry, num_q_heads: int, runtime: DeviceRuntime, clock: Callable[[], float] = time.perf_counter
) -> Callable[[int], float]:
    """Return a function that computes a layer over so many tokens and returns the seconds it took."""
    dims = geometry.v_head_dim
    hidden = num_q_heads * dims
    wide = int(_WIDER * hidden)
    dtype = torch.bfloat16 if runtime.is_cuda else torch.float32

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype, device=runtime.device) / math.sqrt(rows)

    layer = _Layer(
        num_q_heads, geometry.num_kv_heads,
        weight(hidden, (num_q_heads + 2 * geometry.num_kv_heads) * dims), weight(hidden, hidden),
        weight(hidden, 2 * wide), weight(wide, hidden),
    )  # fmt: skip

    def seconds(tokens: int) -> float:
        x = torch.randn(tokens, hidden, dtype=dtype, device=runtime.device)
        runtime.record("compute").wait()
        begin = clock()
        layer(x, dims)
        runtime.record("compute").wait()
        return clock() - begin

    return seconds
