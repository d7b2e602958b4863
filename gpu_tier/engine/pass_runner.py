"""What continuous batching needs of whoever computes a pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from gpu_tier.engine.model import ModelState
from gpu_tier.types import ForwardBatch

__all__ = ["PassRunner", "last_tokens"]


class PassRunner(Protocol):
    """Computes one pass of a model through the hooks."""

    def run(self, batch: ForwardBatch, token_ids: Tensor, states: Sequence[ModelState]) -> Tensor:
        """Return the logits ``[num_real, vocab]`` of each real row's last token.

        Args:
            batch: the pass, as the coordinator planned it.
            token_ids: ``int64`` tokens of the real rows, one row after the other.
            states: what the model keeps of each real row's request.
        """


def last_tokens(batch: ForwardBatch) -> Tensor:
    """Return where the last token of each real row is in the pass, ``int64 [num_real]``."""
    ends = [end - 1 for end in accumulate(batch.extend_lens)]
    return torch.tensor(ends, dtype=torch.long, device=batch.positions.device)
