"""Merges attention over disjoint sets of tokens into attention over their union."""

from __future__ import annotations

from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous

__all__ = ["lse_merge"]


def lse_merge(o: Tensor, lse: Tensor, out_o: Tensor, out_lse: Tensor, *, impl: str = "auto") -> None:
    """Merge P partials.

    Args:
        o: ``f32 [P, B, Hq, dv]`` outputs.
        lse: ``f32 [P, B, Hq]`` their log-sum-exps; -inf for a part without tokens, whose output then does not count.
        out_o: ``f32 [B, Hq, dv]`` becomes the merged output, 0 where all parts are empty.
        out_lse: ``f32 [B, Hq]`` becomes its log-sum-exp.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes do not fit.
    """
    if o.shape[:3] != lse.shape or o.shape[1:] != out_o.shape or out_lse.shape != lse.shape[1:]:
        shapes = tuple(tuple(t.shape) for t in (o, lse, out_o, out_lse))
        raise ConfigError("o, lse, out_o, out_lse", shapes, "must be [P,B,Hq,dv], [P,B,Hq], [B,Hq,dv], [B,Hq]")
    check_contiguous(o=o, lse=lse, out_o=out_o, out_lse=out_lse)
    registry.get("lse_merge", o.device, impl)(o, lse, out_o, out_lse)
