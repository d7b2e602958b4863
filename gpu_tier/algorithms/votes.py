"""How much the last queries of a prompt attend to each of its tokens (SnapKV, Li et al., NeurIPS 2024)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

__all__ = ["votes"]


def votes(
    queries: Tensor, positions: range, keys: Tensor, *, sm_scale: float, candidates: int, pool: str, kernel: int
) -> Tensor:
    """Return the votes for the leading tokens, ``f32 [H, candidates]``.

    A query head's vote for a token is the sum of its attention weights over the queries, each over all keys up to its
    own position. It is pooled over the neighbours among the candidates (avg counts what lies outside as zeros) and
    summed over the query heads of a KV head.

    Args:
        queries: ``[m, Hq, d]``.
        positions: of the queries.
        keys: ``f32 [n, H, d]`` of all tokens.
        sm_scale: what products are multiplied by before the softmax.
        candidates: tokens that can be voted for; at least 1.
        pool: avg or max.
        kernel: tokens that are pooled, odd.
    """
    heads = keys.shape[1]
    grouped = queries.float().unflatten(1, (heads, -1))
    own = torch.arange(positions.start, positions.stop, device=keys.device)
    future = torch.arange(len(keys), device=keys.device) > own[:, None]
    pooled = avg_pool1d if pool == "avg" else max_pool1d
    result = torch.empty(heads, candidates, device=keys.device)
    # Head by head: the weights of all of them would be the largest tensor of the prefill.
    for head in range(heads):
        products = torch.einsum("mgd,nd->gmn", grouped[:, head], keys[:, head]) * sm_scale
        weights = products.masked_fill_(future, -torch.inf).softmax(-1)[..., :candidates].sum(1)
        result[head] = pooled(weights[:, None], kernel, stride=1, padding=kernel // 2).sum((0, 1))
    return result
