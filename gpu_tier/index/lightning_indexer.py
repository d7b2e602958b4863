"""The lightning indexer of DeepSeek-V3.2: a small multi-query attention that only scores.

The score of a key s for a token t is ``I(t, s) = Σ_j w_j(t) · ReLU(q_j(t) · k(s))`` over HI query heads, which share
one key per token. Queries come from the query latent of the attention, keys and weights from the hidden state.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import FP8_MAX

__all__ = ["SCALE_BYTES", "LightningIndexer", "hadamard", "index_rows", "quantise"]

# Index vectors as bytes: an orthonormal Hadamard rotation, then e4m3 with one scale per vector.

SCALE_BYTES = 4


def hadamard(x: Tensor) -> Tensor:
    """Return ``[..., d]`` rotated, in f32.

    Raises:
        ConfigError: d is no power of two.
    """
    dims = x.shape[-1]
    if dims & (dims - 1):
        raise ConfigError("dims", dims, "a Hadamard rotation needs a power of two")
    return (x.double() @ _signs(dims, x.device)).mul(dims**-0.5).float()


@lru_cache(maxsize=16)
def _signs(dims: int, device: torch.device) -> Tensor:
    """Return Sylvester's matrix, ``f64 [d, d]``."""
    signs = torch.ones(1, 1, dtype=torch.float64)
    while len(signs) < dims:
        signs = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), signs)
    return signs.to(device)


def quantise(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """Return ``[..., d]`` as ``e4m3 [..., d]`` and its scales ``f32 [...]``; `scale_format` is f32 or ue8m0."""
    x = x.float()
    scale = (x.abs().amax(-1) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    if scale_format == "ue8m0":
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return (x / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def index_rows(keys: Tensor, scale_format: str) -> Tensor:
    """Return index keys ``[..., d]`` rotated and quantised, ``uint8 [..., d + 4]``.

    The rotation spreads a large number over all dims, so that one scale loses less, and leaves dot products as they
    are. It is one product with a matrix of signs in f64, where the sums are as good as exact: what a vector becomes
    then does not depend on how many others are rotated beside it, and a prompt in chunks leaves the same bytes as a
    whole one. (The butterflies of a fast transform would do that too, but take 7 steps of small kernels in every layer
    and step.)

    Scales are ``max|x| / 448``; with `ue8m0` the next power of two that is not below.
    """
    quantised, scale = quantise(hadamard(keys), scale_format)
    return torch.cat([quantised.view(torch.uint8), scale[..., None].view(torch.uint8)], dim=-1)


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
