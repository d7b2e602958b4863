"""Decode attention over pages: one table of pages for all heads of a row, all pages but its last full."""

from __future__ import annotations

from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.dense import check_decode
from kvcm.gpu_tier.types import LayerKV

__all__ = ["decode_attn_paged"]


def decode_attn_paged(
    q: Tensor, kv: LayerKV, page_table: Tensor, cache_seqlens: Tensor, page_tokens: int, sm_scale: float,
    out_o: Tensor, out_lse: Tensor, *, impl: str = "auto",
) -> None:  # fmt: skip
    """Attend to the tokens of pages.

    Args:
        q: ``[B, Hq, D]`` queries; of MLA in the absorbed form, D being the dims of the latent.
        kv: rows of the layer; query head j reads KV head ``j // (Hq / H)``.
        page_table: ``int32 [B, P]`` pages; page p is slots ``p·page_tokens`` to ``(p+1)·page_tokens - 1``; negative
            ones are skipped.
        cache_seqlens: ``int32 [B]`` tokens of each row.
        page_tokens: tokens of a page.
        sm_scale: what scores are multiplied by.
        out_o: ``f32 [B, Hq, dv]`` becomes the output, 0 where nothing counts.
        out_lse: ``f32 [B, Hq]`` becomes its log-sum-exp, -inf where nothing counts.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes do not fit.
    """
    check_decode(q, kv, page_table, out_o, out_lse)
    if page_tokens < 1:
        raise ConfigError("page_tokens", page_tokens, "must be at least 1")
    if page_table.dim() != 2 or cache_seqlens.shape != page_table.shape[:1]:
        shapes = (tuple(page_table.shape), tuple(cache_seqlens.shape))
        raise ConfigError("page_table, cache_seqlens", shapes, "must be [B, P] and [B]")
    run = registry.get("decode_attn_paged", q.device, impl)
    run(q, kv, page_table, cache_seqlens, page_tokens, sm_scale, out_o, out_lse)
