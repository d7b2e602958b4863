"""Decode attention over single tokens: every row, and every head that selects on its own, has a table of slots."""

from __future__ import annotations

from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.dense import check_decode
from kvcm.gpu_tier.types import LayerKV

__all__ = ["decode_attn_token"]


def decode_attn_token(
    q: Tensor, kv: LayerKV, token_table: Tensor, lens: Tensor, sm_scale: float, out_o: Tensor, out_lse: Tensor,
    *, impl: str = "auto",
) -> None:  # fmt: skip
    """Attend to the tokens of a table.

    Args:
        q: ``[B, Hq, D]`` queries; of MLA in the absorbed form, D being the dims of the latent.
        kv: rows of the layer; query head j reads KV head ``j // (Hq / H)``.
        token_table: ``int32 [B, Hs, K]`` slots, Hs = 1 or H; negative ones are skipped.
        lens: ``int32 [B, Hs]`` leading entries of the table that count.
        sm_scale: what scores are multiplied by.
        out_o: ``f32 [B, Hq, dv]`` becomes the output, 0 where nothing counts.
        out_lse: ``f32 [B, Hq]`` becomes its log-sum-exp, -inf where nothing counts.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes do not fit.
    """
    check_decode(q, kv, token_table, out_o, out_lse)
    heads = kv.k.data.shape[1]
    if token_table.shape[1] not in (1, heads) or lens.shape != token_table.shape[:2]:
        shapes = (tuple(token_table.shape), tuple(lens.shape))
        raise ConfigError("token_table, lens", shapes, f"must be [B, Hs, K] and [B, Hs] with Hs = 1 or {heads}")
    registry.get("decode_attn_token", q.device, impl)(q, kv, token_table, lens, sm_scale, out_o, out_lse)
