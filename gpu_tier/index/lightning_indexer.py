"""The lightning indexer of DeepSeek-V3.2: a small multi-query attention that only scores.

The score of a key s for a token t is ``I(t, s) = Σ_j w_j(t) · ReLU(q_j(t) · k(s))`` over HI query heads, which share
one key per token. Queries come from the query latent of the attention, keys and weights from the hidden state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpu_tier.errors import ConfigError

__all__ = ["LightningIndexer"]


class LightningIndexer(nn.Module):
    """Makes what the algorithm `dsa` needs beside keys and queries.

    Args:
        d_model: numbers of a hidden state.
        q_dim: numbers of a query latent.
        heads: index query heads HI.
        dims: numbers of an index key dI, a power of two.
        rope_dim: leading numbers of them that are rotated by position, even.
        rope_theta: base of the rotation's frequencies.
    """

    def __init__(
        self, d_model: int, q_dim: int, heads: int = 64, dims: int = 128, rope_dim: int = 64, rope_theta: float = 1e4
    ) -> None:
        super().__init__()
        if rope_dim % 2 or not 0 <= rope_dim <= dims:
            raise ConfigError("rope_dim", rope_dim, f"must be even and at most {dims}")
        if dims & (dims - 1):
            raise ConfigError("dims", dims, "must be a power of two")
        self.heads, self.dims, self.rope_dim, self.rope_theta = heads, dims, rope_dim, rope_theta
        self.query = nn.Linear(q_dim, heads * dims, bias=False)
        self.key = nn.Linear(d_model, dims, bias=False)
        self.key_norm = nn.LayerNorm(dims, eps=1e-6)
        self.weight = nn.Linear(d_model, heads, bias=False)

    def forward(self, hidden: Tensor, q_latent: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Return what the engine passes to the hooks as `extra`.

        Args:
            hidden: ``[T, d_model]``, normalised as for the attention.
            q_latent: ``[T, q_dim]``.
            positions: ``int64 [T]``.

        Returns:
            index_query ``[T, HI, dI]``, index_key ``[T, dI]`` and index_weight ``f32 [T, HI]``.
        """
        query = self.query(q_latent).unflatten(-1, (self.heads, self.dims))
        key = self.key_norm(self.key(hidden))
        # In f32: the weights' errors would all go into the order of the scores.
        weight = nn.functional.linear(hidden.float(), self.weight.weight.float())
        return {
            "index_query": self._rotated(query, positions[:, None]),
            "index_key": self._rotated(key, positions),
            "index_weight": weight * (self.heads * self.dims) ** -0.5,
        }

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.rope_dim // 2
        powers = torch.arange(half, device=x.device, dtype=torch.float32) / max(half, 1)
        angles = positions[..., None].float() * self.rope_theta**-powers
        first, second, rest = x.float().split([half, half, self.dims - self.rope_dim], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)
