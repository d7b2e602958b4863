"""The attention of one layer: prefill by exact, flash or block-sparse kernels, decode through the coordinator's hooks.

Block-sparse prefill: a block of queries attends to some blocks of keys only. Blocks are chosen as in XAttention
(arXiv 2503.16428): a block of keys is worth the softmax weight of its antidiagonals. Queries and keys are cut into
strides of s tokens; query r of a stride is multiplied with key s-1-r of another and the products are added up, which
costs an s-th of all products. A block of queries then attends to the fewest blocks of keys that have `threshold` of
the weight together, and always to the first block and to its own. Query heads of a KV head choose together.

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

from kvcm.gpu_tier.engine.interfaces import EngineHooks, KeyReader
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels.dense import causal_partial, group_scores, merge_partials, softmax_partial
from kvcm.gpu_tier.types import ForwardBatch, Mode, Partial

__all__ = ["AttentionLayer", "BlockSparse", "PrefillAttention", "chosen_blocks"]


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


def _block_sparse_chunk(
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
    k, v = reader.rows(layer_id=layer_id, request=request, start=0, stop=stop)
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


# Prefill attention by torch's flash kernels, for models that compute in half precision.

_HALVES = (torch.float16, torch.bfloat16)
_MOST_DIMS = 256


def _can_flash(q: Tensor) -> bool:
    """Whether the kernels take queries ``[T, Hq, D]``."""
    dims = q.shape[-1]
    return dims % 8 == 0 and dims <= _MOST_DIMS and (q.dtype in _HALVES or q.device.type == "cpu")


def _flash_chunk(
    reader: KeyReader, q: Tensor, layer_id: int, request: int, stop: int, sm_scale: float, piece_tokens: int
) -> Tensor:
    """Return the attention ``f32 [T, Hq, dv]`` of one request's tokens, the last of which is token ``stop - 1``.

    Prefixes are read piece by piece as below; products are taken in the queries' own dtype and not in f32, as an
    engine's own kernels do. The kernels are torch's internal ones: of its public functions none returns the log-sum-exp
    that partial results are merged by.

    Args:
        reader: of the request's KV.
        q: ``[T, Hq, D]`` queries, for which `_can_flash` holds.
        layer_id: id of the layer.
        request: row of the per-request tables.
        stop: tokens of the request, those of the queries included.
        sm_scale: what scores are multiplied by before the softmax.
        piece_tokens: tokens of a piece of the prefix.
    """
    start = stop - len(q)
    total = _partial(q, reader.rows(layer_id, request, start, stop), sm_scale, is_causal=True)
    for first in range(0, start, piece_tokens):
        rows = reader.rows(layer_id, request, first, min(first + piece_tokens, start))
        total = merge_partials(total, _partial(q, rows, sm_scale, is_causal=False))
    return total.o


def _partial(q: Tensor, rows: tuple[Tensor, Tensor], sm_scale: float, *, is_causal: bool) -> Partial:
    heads, v_dims = q.shape[1], rows[1].shape[-1]
    k, v = (row.to(q.dtype).repeat_interleave(heads // row.shape[1], dim=1) for row in rows)
    v = pad(v, (0, k.shape[-1] - v_dims))  # they want values as wide as keys
    on_gpu = q.device.type == "cuda"
    names = torch.ops.aten
    kernel = names._scaled_dot_product_flash_attention if on_gpu else names._scaled_dot_product_flash_attention_for_cpu
    o, lse = kernel(*(x.transpose(0, 1)[None] for x in (q, k, v)), 0.0, is_causal, scale=sm_scale)[:2]
    return Partial(o[0].transpose(0, 1)[..., :v_dims].float(), lse[0].T.float())


# Prefill attention over KV that does not fit the device: it is read piece by piece.

_KERNELS = ("exact", "flash")


class PrefillAttention:
    """Attention of prompt chunks over everything before them and themselves.

    The keys of a request, those of the chunk included, are read as they are stored, in pieces that begin at multiples
    of `piece_tokens`; partial results are merged by their log-sum-exp. So memory does not grow with the prefix, and the
    result does not depend on how a prompt is cut into chunks, but for the order of sums.

    Args:
        reader: of the requests' KV.
        sm_scale: what scores are multiplied by before the softmax.
        piece_tokens: tokens of a piece.
        kernel: exact (f32, any rows) or flash (torch's kernels in the queries' precision, where they take the rows); or
            `BlockSparse`, which leaves blocks of keys out and reads all pieces at once.
    """

    def __init__(
        self, reader: KeyReader, sm_scale: float, piece_tokens: int, kernel: str | BlockSparse = "exact"
    ) -> None:
        if piece_tokens < 1:
            raise ConfigError("piece_tokens", piece_tokens, "must be at least 1")
        if isinstance(kernel, str) and kernel not in _KERNELS:
            raise ConfigError.choice("prefill", kernel, _KERNELS)
        self._sparse = kernel if isinstance(kernel, BlockSparse) else None
        self._flash = kernel == "flash"
        self._reader = reader
        self.sm_scale = sm_scale
        self._piece_tokens = piece_tokens

    def run(self, q: Tensor, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Return the attention ``f32 [T, Hq, dv]`` of the chunks' queries ``q [T, Hq, D]``."""
        rows = zip(batch.requests, batch.lengths, q.split(batch.extend_lens), strict=True)
        return torch.cat([self.chunk(queries, layer_id, request, stop) for request, stop, queries in rows])

    def chunk(self, q: Tensor, layer_id: int, request: int, stop: int) -> Tensor:
        """Return the attention of one request's tokens, the last of which is token ``stop - 1``."""
        if self._sparse is not None:
            return _block_sparse_chunk(
                reader=self._reader,
                q=q,
                layer_id=layer_id,
                request=request,
                stop=stop,
                sm_scale=self.sm_scale,
                settings=self._sparse,
            )
        if self._flash and _can_flash(q):
            return _flash_chunk(
                reader=self._reader,
                q=q,
                layer_id=layer_id,
                request=request,
                stop=stop,
                sm_scale=self.sm_scale,
                piece_tokens=self._piece_tokens,
            )
        q = q.float()
        start = stop - len(q)
        total: Partial | None = None
        for first in range(0, stop, self._piece_tokens):
            k, v = self._reader.rows(layer_id, request, first, min(first + self._piece_tokens, stop))
            part = causal_partial(q, k, v, self.sm_scale, start - first)
            total = part if total is None else merge_partials(total, part)
        assert total is not None
        return total.o


# The attention of one layer, as every engine here runs it through the hooks.


class AttentionLayer:
    """Calls the hooks around the attention of a layer; prefill is exact, decode is the coordinator's.

    It takes and returns the tokens of a pass's real rows. Rows of padding, which only fixed shapes need, are zeros that
    the model never sees.

    Args:
        hooks: of the coordinator.
        prefill: attention of prompts.
    """

    def __init__(self, hooks: EngineHooks, prefill: PrefillAttention) -> None:
        self._hooks = hooks
        self._prefill = prefill

    def write(self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None) -> None:
        """Store the KV of the tokens; before `run`."""
        self._hooks.write_kv(layer_id, batch, _padded(k, batch), None if v is None else _padded(v, batch))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor | None, layer_id: int, batch: ForwardBatch, extra: dict[str, Tensor]
    ) -> Tensor:
        """Return the attention of the tokens, ``f32 [T, Hq, dv]``.

        Args:
            q: ``[T, Hq, D]`` queries.
            k: ``[T, H, D]`` keys, which `write` has stored.
            v: ``[T, H, dv]`` values; None for MLA.
            layer_id: id of the layer.
            batch: the pass.
            extra: what the algorithm needs beyond them, ``[T, ...]``.
        """
        tokens = len(q)
        q, k = _padded(q, batch), _padded(k, batch)
        v = None if v is None else _padded(v, batch)
        extra = {name: _padded(tensor, batch) for name, tensor in extra.items()}
        meta, partials = self._hooks.attention_begin(q=q, k=k, v=v, layer_id=layer_id, batch=batch, meta=None, **extra)
        if batch.mode is Mode.PREFILL:
            out = self._prefill.run(q, layer_id, batch)
        else:
            out = self._hooks.attend(q, meta, partials, self._prefill.sm_scale)
        self._hooks.attention_end(out, layer_id, batch)
        return out[:tokens]


def _padded(x: Tensor, batch: ForwardBatch) -> Tensor:
    missing = batch.positions.shape[0] - x.shape[0]
    return pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
