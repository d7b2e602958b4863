"""Product quantisation of keys: a key is cut into m sub-vectors, each of which is known by its nearest centroid.

Sub-vectors of a head have centroids of their own: H·m problems of 2^b centroids per layer. Centroids are kept in f16
(saturated, so that no key makes an infinity) and codes are those of the rounded centroids: scores are exactly the
products with the keys that the codes stand for.

The product of a query with all keys is then a table of its products with all centroids, ``m · 2^b`` numbers per query
head, and one look-up per key and sub-vector (`kvcm.gpu_tier.kernels.pq_score`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.index.kmeans import lloyd
from kvcm.gpu_tier.kernels.kmeans_assign import kmeans_assign

__all__ = [
    "CodebookImport",
    "PQShape",
    "PQSidecars",
    "encode",
    "encode_rows",
    "reconstruct",
    "split",
    "tables",
    "train",
]

_CENTROID_BYTES = 2
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
        """Bytes of a layer's centroids in f16: ``H · 2^b · d · 2``, for every m."""
        return math.prod(self.codebook_shape) * _CENTROID_BYTES

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a token and layer: ``H · m``, one byte per code."""
        return self.heads * self.m

    @property
    def fewest(self) -> int:
        """Tokens from which there is an index: two per centroid."""
        return 2 * self.centroids


def _packed_bytes(n_tokens: int, heads: int, m: int, b: int) -> int:
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


# Side data of product-quantised keys beside a page of KV: codes, and a slice of the codebook that they belong to.

_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class PQSidecars:
    """The form of the rows.

        row of a page:  codebook id (16 bytes) | slice of the codebook | codes of the page, all layers

    Codes mean nothing without their codebook, which is large and belongs to one chain of blocks. It is therefore spread
    over the first P pages that use it, where P is the pages of the fewest tokens that ever get an index: a reader that
    finds so many pages has all of it. All rows have the same size; behind the first P pages slices are zeros.

    The id is a hash of the codebook and of the parameters, so that codes are never taken for another codebook's, and a
    codebook of which a slice is damaged is not taken at all. A page whose codes did not exist has the id 0.

    Attributes:
        codebook_bytes: bytes of a codebook, all layers.
        pages: P, pages that a codebook is spread over.
        code_bytes: bytes of a page's codes, all layers.
        parameters: what else a codebook's id stands for.
    """

    codebook_bytes: int
    pages: int
    code_bytes: int
    parameters: str

    @classmethod
    def of(cls, shape: PQShape, layers: range, page_tokens: int, init: int) -> PQSidecars:
        """Return the form of the rows of a model's layers; P is the pages of the fewest tokens that get an index."""
        return cls(
            codebook_bytes=len(layers) * shape.codebook_bytes,
            pages=max(1, (init + shape.fewest) // page_tokens),
            code_bytes=len(layers) * page_tokens * shape.code_bytes,
            parameters=f"{shape} {layers} {page_tokens} 1",
        )

    @property
    def slice_bytes(self) -> int:
        """Bytes of a codebook's slice, the last one filled up with zeros."""
        return -(-self.codebook_bytes // self.pages)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return _ID_BYTES + self.slice_bytes + self.code_bytes

    def identity(self, codebook: Tensor) -> bytes:
        """Return the id of a codebook, flat ``uint8``; never 0."""
        digest = hashlib.blake2b(self.parameters.encode(), digest_size=_ID_BYTES)
        digest.update(codebook.numpy().tobytes())
        return digest.digest()

    def blank(self, pages: int) -> Tensor:
        """Return the rows of pages without codes."""
        return torch.zeros(pages, self.row_bytes, dtype=torch.uint8)

    def rows(self, codebook: Tensor, first: int, codes: Tensor) -> Tensor:
        """Return the rows of pages of one codebook.

        Args:
            codebook: flat ``uint8``.
            first: number of the first page among the codebook's.
            codes: ``uint8 [pages, code bytes]``.
        """
        rows = self.blank(len(codes))
        rows[:, :_ID_BYTES] = torch.frombuffer(bytearray(self.identity(codebook)), dtype=torch.uint8)
        slices = torch.nn.functional.pad(codebook, (0, self.slice_bytes * self.pages - len(codebook)))
        here = slices.view(self.pages, self.slice_bytes)[first : first + len(codes)]
        rows[: len(here), _ID_BYTES : _ID_BYTES + self.slice_bytes] = here
        rows[:, _ID_BYTES + self.slice_bytes :] = codes
        return rows


@dataclass(slots=True)
class CodebookImport:
    """Takes the leading pages of one codebook out of sidecars that arrive run by run.

    Attributes:
        form: of the rows.
        codebook: flat ``uint8``, once all of it has arrived and its hash is right.
        accepted: leading pages whose codes were handed out.
    """

    form: PQSidecars
    codebook: Tensor | None = None
    accepted: int = 0
    _identity: Tensor | None = None
    _waiting: list[Tensor] = field(default_factory=list)
    _slices: list[Tensor] = field(default_factory=list)
    _seen: int = 0
    _ended: bool = False

    def add(self, first: int, rows: Tensor) -> Tensor:
        """Take the rows of pages from `first` on and return codes that can be used now, of pages from `accepted` on.

        Returns:
            ``uint8 [pages, code bytes]``; none before the codebook is complete, nor behind the first page that is not
            of it.

        Raises:
            ConfigError: the rows have another form.
        """
        if rows.dtype is not torch.uint8 or rows.shape[1:] != (self.form.row_bytes,):
            raise ConfigError("data", tuple(rows.shape), f"must be uint8 rows of {self.form.row_bytes} bytes")
        own = self._own(first, rows)
        missing = self.form.pages - len(self._slices)
        self._slices.extend(own[:missing, _ID_BYTES : _ID_BYTES + self.form.slice_bytes].clone())
        self._seen += len(own)
        self._waiting.append(own[:, _ID_BYTES + self.form.slice_bytes :])
        if self.codebook is None and len(self._slices) == self.form.pages:
            self._complete()
        if self.codebook is None:
            return rows.new_empty(0, self.form.code_bytes)
        codes = torch.cat(self._waiting)
        self._waiting.clear()
        self.accepted += len(codes)
        return codes

    def _own(self, first: int, rows: Tensor) -> Tensor:
        """Return the leading rows that continue the run of one codebook."""
        if self._ended or first != self._seen or not len(rows):
            self._ended = self._ended or bool(len(rows))
            return rows[:0]
        if self._identity is None:
            self._identity = rows[0, :_ID_BYTES].clone()
        same = (rows[:, :_ID_BYTES] == self._identity).all(1) & self._identity.any()
        leading = int(same.int().cumprod(0).sum())
        self._ended = leading < len(rows)
        return rows[:leading]

    def _complete(self) -> None:
        assert self._identity is not None
        codebook = torch.cat(self._slices)[: self.form.codebook_bytes]
        if self.form.identity(codebook) == self._identity.numpy().tobytes():
            self.codebook = codebook
        else:
            self._ended = True
            self._waiting.clear()
