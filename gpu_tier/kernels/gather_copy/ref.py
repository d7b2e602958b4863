"""Reference of `gather_copy`: the runs as lists of rows. Waits for the device when its tensors are on one."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.gather_copy import word_bytes
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.types import CopyRuns

__all__ = ["run"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def run(sources: tuple[RowPool, ...], target: RowPool, runs: CopyRuns, *, num_heads: int, moved: Tensor | None) -> None:
    """See `kvcm.gpu_tier.kernels.gather_copy.gather_copy`."""
    inside = torch.arange(runs.kind.shape[1], device=runs.kind.device) < runs.count[:, None]
    for number, source in enumerate(sources):
        lines, places = (inside & (runs.kind == number)).nonzero(as_tuple=True)
        lengths = runs.tokens[lines, places].long().clamp_min(0)
        first = lengths.cumsum(0) - lengths
        ahead = torch.arange(int(lengths.sum()), device=lengths.device) - first.repeat_interleave(lengths)
        here = runs.src[lines, places].repeat_interleave(lengths) + ahead
        there = runs.dst[lines, places].repeat_interleave(lengths) + ahead
        head = (lines % num_heads).repeat_interleave(lengths)
        for part in range(len(target.addressing.parts)):
            size = word_bytes((source, target), part, 8)
            rows = _rows(source, part, size)[_first_words(source, part, size, here, head)]
            _rows(target, part, size)[_first_words(target, part, size, there, head)] = rows.to(target.data.device)
        if moved is not None:
            moved[number] += len(ahead) * sum(part.row_bytes for part in target.addressing.parts)


def _rows(pool: RowPool, part: int, size: int) -> Tensor:
    """Return the row that begins at each word of a pool, ``[words, words of a row]``; rows overlap."""
    words = pool.data.view(_WORDS[size])
    row = pool.addressing.parts[part].row_bytes // size
    return words.as_strided((max(0, len(words) - row + 1), row), (1, 1))


def _first_words(pool: RowPool, part: int, size: int, slots: Tensor, heads: Tensor) -> Tensor:
    """Return the word that the row of each slot and head begins at."""
    strides, page_size = pool.addressing.parts[part], pool.addressing.page_size
    page, token = slots // page_size, slots % page_size
    start = strides.base + strides.layer * pool.layer
    first: Tensor = (start + page * strides.page + token * strides.token + heads * strides.head) // size
    return first.to(pool.data.device)
