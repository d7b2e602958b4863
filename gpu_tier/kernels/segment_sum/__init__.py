"""Sums of the rows that share a label, in many problems at once: value sums and means of clusters."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous, check_last_contiguous

__all__ = ["segment_sum"]


def segment_sum(x: Tensor, labels: Tensor, out: Tensor, *, impl: str = "auto") -> None:
    """Add up rows by label.

    Rows are added in f32, in an order that depends on nothing but the problem's own rows: the same call gives the same
    bits. Rows without a label are not read for a sum, with any content.

    Args:
        x: ``f32, f16 or bf16 [S, T, d]`` rows of S problems.
        labels: ``int32 [S, T]`` of each row: below C, -1 for none.
        out: ``f32 [S, C, d]`` becomes the sums; 0 where no row has the label.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes or the dtype do not fit.
    """
    problems, tokens, dims = x.shape
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError("x", x.dtype, "must be f32, f16 or bf16")
    if labels.shape != (problems, tokens):
        raise ConfigError("labels", tuple(labels.shape), f"must be {(problems, tokens)}")
    if out.ndim != 3 or out.shape[::2] != (problems, dims):
        raise ConfigError("out", tuple(out.shape), f"must be [{problems}, C, {dims}]")
    check_contiguous(labels=labels, out=out)
    check_last_contiguous(x=x)
    registry.get("segment_sum", x.device, impl)(x, labels, out)
