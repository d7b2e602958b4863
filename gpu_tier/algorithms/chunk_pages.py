"""A prefill pass laid out in whole scoring pages, so that a reduction over pages needs no atomics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.types import ForwardBatch

__all__ = ["ChunkPages"]


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """The pages that the tokens of a pass touch, row by row.

    Attributes:
        token: ``int64 [T]`` place of each token in ``[touched pages · page]``.
        requests: ``int64 [touched pages]`` request of each page.
        positions: ``int64 [touched pages]`` position of the page's first token in its request.
    """

    token: Tensor
    requests: Tensor
    positions: Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, page: int, device: torch.device) -> ChunkPages:
        """Return the layout of a pass; computed on the host from the lengths that it brings along."""
        tokens, requests, positions, touched = [], [], [], 0
        for request, length, extend in zip(batch.requests, batch.lengths, batch.extend_lens, strict=True):
            if not extend:
                continue
            start = length - extend
            borders = torch.arange(start - start % page, length, page)
            tokens.append(torch.arange(extend) + touched * page + start % page)
            requests.append(torch.full_like(borders, request))
            positions.append(borders)
            touched += len(borders)
        return cls(*(_joined(pieces, device) for pieces in (tokens, requests, positions)))


def _joined(pieces: list[Tensor], device: torch.device) -> Tensor:
    whole = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
    return whole.to(device, non_blocking=True)
