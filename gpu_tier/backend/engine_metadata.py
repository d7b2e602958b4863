"""The metadata object of an engine whose attention backend reads it in place (FlashAttention's in SGLang and vLLM).

Such an engine has one object per step, with a page table and lengths that all layers read. Its fields are kept at the
first sparse layer, replaced for each layer, and put back after the last: the engine finds its object as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_tier.errors import StateError
from gpu_tier.types import PagedMeta

__all__ = ["EngineMetadata"]


class EngineMetadata:
    """Swaps the fields of an engine's metadata.

    Args:
        page_table: name of its field with ``int32 [B, Pmax]`` pages.
        cache_seqlens: name of its field with ``int32 [B]`` tokens.
        cu_seqlens_k: name of its field with ``int32 [B + 1]`` running sums of them.
        max_seqlen_k: name of its field with the largest of them, on the host.
    """

    def __init__(
        self,
        page_table: str = "page_table",
        cache_seqlens: str = "cache_seqlens_int32",
        cu_seqlens_k: str = "cu_seqlens_k",
        max_seqlen_k: str = "max_seq_len_k",
    ) -> None:
        self._names = (page_table, cache_seqlens, cu_seqlens_k, max_seqlen_k)
        self._saved: tuple[Any, ...] | None = None

    def save_original_metadata(self, meta: object) -> None:
        """Keep the engine's fields; a second call before `restore` keeps the first ones."""
        if self._saved is None:
            self._saved = tuple(getattr(meta, name) for name in self._names)

    def apply(self, meta: object, sparse: PagedMeta) -> None:
        """Let the engine's object say what `sparse` says.

        Raises:
            StateError: the engine's fields were not kept, so they would be lost.
        """
        if self._saved is None:
            raise StateError("save_original_metadata was not called before apply")
        lengths = sparse.cache_seqlens
        values = (sparse.page_table, lengths, _running_sums(lengths), sparse.page_table.shape[1] * sparse.page_tokens)
        for name, value in zip(self._names, values, strict=True):
            setattr(meta, name, value)

    def restore(self, meta: object) -> None:
        """Give the engine its fields back, the same objects; without kept ones nothing happens."""
        if self._saved is not None:
            for name, value in zip(self._names, self._saved, strict=True):
                setattr(meta, name, value)
            self._saved = None


def _running_sums(lengths: Tensor) -> Tensor:
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    sums[1:] = lengths.cumsum(0)
    return sums
