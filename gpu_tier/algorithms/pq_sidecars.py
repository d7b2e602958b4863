"""What is stored of product-quantised keys beside a page of KV: codes, and a slice of the codebook that they belong to.

    row of a page:  codebook id (16 bytes) | slice of the codebook | codes of the page, all layers

Codes mean nothing without their codebook, which is large and belongs to one chain of blocks. It is therefore spread
over the first P pages that use it, where P is the pages of the fewest tokens that ever get an index: whoever finds so
many pages has all of it. All rows have the same size; behind the first P pages slices are zeros.

The id is a hash of the codebook and of the parameters, so that codes are never taken for another codebook's, and a
codebook of which a slice is damaged is not taken at all. A page whose codes did not exist has the id 0.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.index.pq import PQShape

__all__ = ["ID_BYTES", "CodebookImport", "PQSidecars"]

ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class PQSidecars:
    """The form of the rows.

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
        return ID_BYTES + self.slice_bytes + self.code_bytes

    def identity(self, codebook: Tensor) -> bytes:
        """Return the id of a codebook, flat ``uint8``; never 0."""
        digest = hashlib.blake2b(self.parameters.encode(), digest_size=ID_BYTES)
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
        rows[:, :ID_BYTES] = torch.frombuffer(bytearray(self.identity(codebook)), dtype=torch.uint8)
        slices = torch.nn.functional.pad(codebook, (0, self.slice_bytes * self.pages - len(codebook)))
        here = slices.view(self.pages, self.slice_bytes)[first : first + len(codes)]
        rows[: len(here), ID_BYTES : ID_BYTES + self.slice_bytes] = here
        rows[:, ID_BYTES + self.slice_bytes :] = codes
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
        self._slices.extend(own[:missing, ID_BYTES : ID_BYTES + self.form.slice_bytes].clone())
        self._seen += len(own)
        self._waiting.append(own[:, ID_BYTES + self.form.slice_bytes :])
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
            self._identity = rows[0, :ID_BYTES].clone()
        same = (rows[:, :ID_BYTES] == self._identity).all(1) & self._identity.any()
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
