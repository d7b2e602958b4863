"""Block-sparse prefill attention: a block of queries attends to some blocks of keys only.

Blocks are chosen as in XAttention (arXiv 2503.16428): a block of keys is worth the softmax weight of its antidiagonals.
Queries and keys are cut into strides of s tokens; query r of a stride is multiplied with key s-1-r of another and the
products are added up, which costs an s-th of all products. A block of queries then attends to the fewest blocks of keys
that have `threshold` of the weight together, and always to the first block and to its own. Query heads of a KV head
choose together.

KV computed with it differs from exact KV in all layers behind the first, and follows from where chunks of a prompt end
unless they end at blocks. Nothing else does: indexes are made of the KV that is stored, however it came about.

This is plain torch, in f32, and reads all keys of a request at once; what it leaves out it does not multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_tier.engine.hooks import KeyReader
from gpu_tier.errors import ConfigError
from gpu_tier.kernels.dense import group_scores, softmax_partial

__all__ = ["BlockSparse", "block_sparse_chunk", "chosen_blocks"]


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """Settings.

    Attributes:
        block: tokens of a block, of queries and of keys.
        stride: tokens of a stride s; divides the block.
        threshold: share of the estimated weight that the chosen blocks have together; with 1 all blocks are chosen.
    """

    block: int = 128
    stride: int = 16
    threshold: float = 0.9

    def __post_init__(self) -> None:
        if self.stride < 1 or self.block < 1 or self.block % self.stride:
            raise ConfigError("stride", self.stride, f"must divide the block of {self.block} tokens")
        if not 0 < self.threshold <= 1:
            raise ConfigError("threshold", self.threshold, "must be above 0 and at most 1")


def block_sparse_chunk(
    reader: KeyReader, q: Tensor, layer_id: int, request: int, stop: int, sm_scale: float, settings: BlockSparse
) -> Tensor:
    """Return the attention ``f32 [T, Hq, dv]`` of one request's tokens, the last of which is token ``stop - 1``.

    Args:
        reader: of the request's KV.
        q: ``[T, Hq, D]`` queries.
        layer_id: id of the layer.
        request: row of the per-request tables.
        stop: tokens of the request, those of the queries included.
        sm_scale: what scores are multiplied by before the softmax.
        settings: which blocks are chosen.
    """
    k, v = reader.rows(layer_id, request, 0, stop)
    start, size = stop - len(q), settings.block
    borders = [start, *range((start // size + 1) * size, stop, size), stop]
    return torch.cat([
        _attend(q[first - start : last - start].float(), k[:last], v[:last], sm_scale, settings)
        for first, last in pairwise(borders)
    ])  # fmt: skip


def _attend(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, settings: BlockSparse) -> Tensor:
    """Return the attention of queries ``[t, Hq, D]`` of one block; the last one's key is the last of k."""
    tokens, (n, heads) = len(q), k.shape[:2]
    wanted = chosen_blocks(q, k, sm_scale, settings).repeat_interleave(settings.block, 1)[:, :n]
    width = int(wanted.sum(1).max())
    keys = wanted.int().sort(dim=1, descending=True, stable=True).indices[:, :width]
    is_key = wanted.gather(1, keys)
    k, v = (_rows(x, keys) for x in (k, v))
    grouped = q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [H, G·t, D]
    scores = group_scores(grouped, k[:, None], sm_scale).unflatten(1, (-1, tokens))
    own = torch.arange(n - tokens, n, device=q.device)
    hidden = (keys[:, None] > own[:, None]) | ~is_key[:, None]
    part = softmax_partial(scores.masked_fill(hidden[:, None], -torch.inf).flatten(1, 2), v[:, None])
    by_head: Tensor = part.o.unflatten(1, (-1, tokens))
    return by_head.permute(2, 0, 1, 3).flatten(1, 2)


def _rows(x: Tensor, tokens: Tensor) -> Tensor:
    """Return rows ``[H, N, d]`` of ``x [n, H, d]``, for each head its own tokens."""
    picked: Tensor = x.transpose(0, 1).gather(1, tokens[..., None].expand(*tokens.shape, x.shape[2]))
    return picked


def chosen_blocks(q: Tensor, k: Tensor, sm_scale: float, settings: BlockSparse) -> Tensor:
    """Return which blocks of keys are attended to, ``bool [H, blocks]``.

    Args:
        q: ``[t, Hq, D]`` queries of one block.
        k: ``[n, H, D]`` keys up to that of the last query.
        sm_scale: what scores are multiplied by before the softmax.
        settings: which blocks are chosen.
    """
    blocks = -(-len(k) // settings.block)
    weight = _weights(q, k, sm_scale, settings.stride)
    strides = settings.block // settings.stride
    weight = pad(weight, (0, blocks * strides - weight.shape[1])).unflatten(1, (blocks, strides)).sum(2)
    best, order = (weight / weight.sum(1, keepdim=True)).sort(dim=1, descending=True, stable=True)
    before = best.cumsum(1) - best
    chosen = torch.zeros_like(weight, dtype=torch.bool).scatter_(1, order, before < settings.threshold)
    chosen[:, 0] = chosen[:, -1] = True
    return chosen | (settings.threshold == 1)


def _weights(q: Tensor, k: Tensor, sm_scale: float, stride: int) -> Tensor:
    """Return what strides of keys are worth to a block of queries, ``f32 [H, strides]``."""
    first, heads = len(k) - len(q), k.shape[1]
    q, k = (pad(x.float(), (0, 0, 0, 0, 0, -len(x) % stride)).unflatten(0, (-1, stride)) for x in (q, k))
    grouped = q.unflatten(2, (heads, -1))
    scores = torch.einsum("irhgd,jrhd->hgij", grouped, k.flip(1)) * (sm_scale / stride)
    last = first + stride * torch.arange(1, len(q) + 1, device=q.device) - 1
    hidden = stride * torch.arange(len(k), device=q.device) > last[:, None]
    weights: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return weights.sum((1, 2))
