"""Carries a plan of an execution buffer out in plain loops, and says what the tokens are that it puts there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_tier.geometry import KVGeometry
from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.types import ExecutionPlan

__all__ = ["assemble", "coded", "rows_of"]


def coded(seed: int, geometry: KVGeometry, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return keys and values of tokens that say whose they are, ``f32 [L, n, H, d or dv]``.

    Numbers 0 to 3 of a row are the seed, the layer (by its position), the head and the token; keys are negative.
    """
    layers, heads = geometry.num_layers, geometry.num_kv_heads

    def rows(dims: int, sign: int) -> Tensor:
        numbers = torch.zeros(layers, len(tokens), heads, dims)
        numbers[..., 0] = seed
        numbers[..., 1] = torch.arange(layers)[:, None, None]
        numbers[..., 2] = torch.arange(heads)
        numbers[..., 3] = torch.tensor(list(tokens))[:, None]
        return sign * numbers

    return rows(geometry.head_dim, -1), rows(geometry.v_head_dim, 1)


def rows_of(pool: RowPool, part: int, slots: Tensor, head: int) -> Tensor:
    """Return the first four numbers of f32 rows, ``f32 [n, 4]``."""
    starts = [pool.addressing.address(part, slot, pool.layer, head) for slot in slots.tolist()]
    places = torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(16)
    return pool.data[places].view(torch.float32)


def assemble(
    sources: Sequence[RowPool], plan: ExecutionPlan, geometry: KVGeometry, tokens_per_row: int
) -> dict[tuple[int, int], list[tuple[float, ...]]]:
    """Return what each row and head attends to, token after token: (seed, layer, head, token).

    Checks that every one of its slots is written once, and none besides.
    """
    runs = plan.runs
    heads = geometry.num_kv_heads
    found: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for line in range(len(runs.count)):
        row, head = divmod(line, heads)
        placed: dict[int, tuple[float, ...]] = {}
        for run in range(int(runs.count[line])):
            kind, tokens = int(runs.kind[line, run]), int(runs.tokens[line, run])
            if kind < 0:
                continue
            slots = int(runs.src[line, run]) + torch.arange(tokens)
            keys = rows_of(sources[kind], 0, slots, head)
            values = rows_of(sources[kind], 1, slots, head)
            assert torch.equal(keys, -values)
            first = int(runs.dst[line, run]) - row * tokens_per_row
            for i, value in enumerate(values.tolist()):
                assert first + i not in placed, "two runs write one slot"
                placed[first + i] = tuple(value)
        length = int(plan.lens[row, head])
        assert sorted(placed) == list(range(length)), (row, head)
        assert length <= tokens_per_row
        found[row, head] = [placed[i] for i in range(length)]
    return found
