"""One kernel on one kind of input, and how large inputs are: what `kernel_checks` lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Check", "Outputs", "Sizes", "ragged"]

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large inputs are.

    Attributes:
        tokens: of a request.
        selected: tokens that a step selects.
        batch: requests.
        steps: of the buffers.
        dims: of an MHA head; of an MLA latent four times as many and rope.
        latent_heads: query heads of MLA.
    """

    tokens: int = 16384
    selected: int = 2048
    batch: int = 5
    steps: int = 12
    dims: int = 128
    latent_heads: int = 128


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel on one kind of input.

    Attributes:
        kernel: its folder.
        case: what the input is.
        run: computes the outputs with an implementation.
        tolerance: of ``‖out - reference‖ / ‖reference‖``; 0 means that all bits are equal.
    """

    kernel: str
    case: str
    run: Callable[[str], Outputs]
    tolerance: float = 0.0


def ragged(sizes: Sizes, most: int) -> Tensor:
    """Return lengths from nothing to everything, ``int32 [batch]``."""
    return torch.tensor([most, 0, 1, max(1, most // 3), most - 1] * sizes.batch, dtype=torch.int32)[: sizes.batch]
