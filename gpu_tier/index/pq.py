"""Product quantisation of keys: a key is cut into m sub-vectors, each of which is known by its nearest centroid.

Sub-vectors of a head have centroids of their own: H·m problems of 2^b centroids per layer. Centroids are kept in f16
(saturated, so that no key makes an infinity) and codes are those of the rounded centroids: what is scored is exactly
the product with the key that the codes stand for.

The product of a query with all keys is then a table of its products with all centroids, ``m · 2^b`` numbers per query
head, and one look-up per key and sub-vector (`gpu_tier.kernels.pq_score`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.index.kmeans import lloyd
from gpu_tier.kernels.kmeans_assign import kmeans_assign

__all__ = [
    "CENTROID_BYTES", "PQShape", "encode", "encode_rows", "packed_bytes", "reconstruct", "split", "tables", "train",
]  # fmt: skip

CENTROID_BYTES = 2
_F16_MOST = 65504.0


@dataclass(frozen=True, slots=True)
class PQShape:
    """How the keys of a layer are quantised.

    Attributes:
        heads: KV heads H.
        dims: numbers of a key d.
        m: sub-vectors of a key.
        b: bits of a code.

    Raises:
        ConfigError: keys cannot be cut into m parts, or codes are no bytes.
    """

    heads: int
    dims: int
    m: int
    b: int

    def __post_init__(self) -> None:
        if self.m < 1 or self.dims % self.m:
            raise ConfigError("m", self.m, f"must divide the {self.dims} numbers of a key")
        if not 1 <= self.b <= 8:
            raise ConfigError("b", self.b, "codes are bytes: 1 to 8 bits")

    @property
    def centroids(self) -> int:
        """Centroids of a sub-vector, 2^b."""
        return 1 << self.b

    @property
    def sub_dims(self) -> int:
        """Numbers of a sub-vector."""
        return self.dims // self.m

    @property
    def codebook_shape(self) -> tuple[int, int, int, int]:
        """``[H, m, 2^b, d/m]``, the centroids of a layer."""
        return self.heads, self.m, self.centroids, self.sub_dims

    @property
    def codebook_bytes(self) -> int:
        """Bytes of a layer's centroids in f16: ``H · 2^b · d · 2``, whatever m is."""
        return math.prod(self.codebook_shape) * CENTROID_BYTES

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a token and layer: ``H · m``, one byte per code."""
        return self.heads * self.m

    @property
    def fewest(self) -> int:
        """Tokens from which there is an index: two per centroid."""
        return 2 * self.centroids


def packed_bytes(n_tokens: int, heads: int, m: int, b: int) -> int:
    """Return the bytes of codes of b bits without gaps, ``n · H · m·b/8``: what the document counts.

    Here a code is a byte, which for b = 8 is the same and spares the kernels the shifting otherwise.
    """
    return -(-n_tokens * heads * m * b // 8)


def split(keys: Tensor, m: int) -> Tensor:
    """Return the sub-vectors of keys ``[n, H, d]`` as problems ``f32 [H·m, n, d/m]``."""
    parts: Tensor = keys.float().unflatten(-1, (m, -1))
    return parts.permute(1, 2, 0, 3).flatten(0, 1).contiguous()


def train(keys: Tensor, shape: PQShape, iterations: int, seed: int, *, kernels: str = "auto") -> Tensor:
    """Return the centroids of keys ``[n, H, d]`` as they are kept, ``f16 [H, m, 2^b, d/m]``.

    They depend on the keys, the iterations and the seed, and on nothing else.

    Raises:
        ConfigError: there are fewer keys than two per centroid.
    """
    if len(keys) < shape.fewest:
        raise ConfigError("keys", len(keys), f"{shape.centroids} centroids need at least {shape.fewest} keys")
    x = split(keys, shape.m)
    problems = len(x)
    counts, wanted = [len(keys)] * problems, [shape.centroids] * problems
    centroids, _, _ = lloyd(x, counts, wanted, iterations, seed, kernels=kernels)
    return centroids.clamp(-_F16_MOST, _F16_MOST).half().view(shape.codebook_shape)


def encode(keys: Tensor, codebook: Tensor, *, kernels: str = "auto") -> Tensor:
    """Return the nearest centroid of every sub-vector, ties to the lower id.

    Args:
        keys: ``[n, H, d]``.
        codebook: ``f16 [H, m, 2^b, d/m]``.
        kernels: implementation of the kernels, see `registry.get`.

    Returns:
        ``uint8 [n, H, m]``.
    """
    heads, m = codebook.shape[:2]
    x, centroids = split(keys, m), codebook.float().flatten(0, 1)
    counts = torch.full((len(x),), len(keys), dtype=torch.int32, device=x.device)
    wanted = torch.full_like(counts, codebook.shape[2])
    labels = torch.empty(x.shape[:2], dtype=torch.int32, device=x.device)
    kmeans_assign(x, centroids, counts, wanted, labels, metric="l2", impl=kernels)
    codes: Tensor = labels.view(heads, m, -1).permute(2, 0, 1)
    return codes.to(torch.uint8)


def encode_rows(keys: Tensor, codebooks: Tensor) -> Tensor:
    """Return the codes of one key of each row, whose codebooks differ.

    Args:
        keys: ``[B, H, d]``.
        codebooks: ``f32 [B, H, m, 2^b, d/m]``, numbers that f16 can hold.

    Returns:
        ``uint8 [B, H, m]``.
    """
    x: Tensor = keys.float().unflatten(-1, (codebooks.shape[2], -1))
    half_norms = torch.linalg.vector_norm(codebooks, dim=-1).square() / 2
    apart: Tensor = half_norms - torch.einsum("bhme,bhmke->bhmk", x, codebooks)
    return apart.min(-1).indices.to(torch.uint8)


def reconstruct(codes: Tensor, codebook: Tensor) -> Tensor:
    """Return the keys that codes stand for.

    Args:
        codes: ``uint8 [n, H, m]``.
        codebook: ``f16 [H, m, 2^b, d/m]``.

    Returns:
        ``f32 [n, H, d]``.
    """
    heads, m, _, sub = codebook.shape
    picked = codebook.float()[torch.arange(heads)[:, None], torch.arange(m), codes.long()]
    return picked.reshape(len(codes), heads, m * sub)


def tables(queries: Tensor, codebooks: Tensor, sm_scale: float) -> Tensor:
    """Return the products of queries with all centroids.

    Args:
        queries: ``[B, Hq, d]``.
        codebooks: ``f32 [B, H, m, 2^b, d/m]``, numbers that f16 can hold.
        sm_scale: what products are multiplied by.

    Returns:
        ``f32 [B, Hq, m, 2^b]``.
    """
    rows, heads, m = codebooks.shape[:3]
    q = queries.float().view(rows, heads, -1, m, codebooks.shape[-1])
    products: Tensor = torch.einsum("bhgme,bhmke->bhgmk", q, codebooks)
    return (products * sm_scale).flatten(1, 2)
