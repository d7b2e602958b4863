"""Lets a model compute some tokens of a sequence, as `generate` does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

__all__ = ["compute"]


def compute(model: Any, tokens: Sequence[int], start: int, cache: Cache, *, last_only: bool = True) -> torch.Tensor:
    """Compute tokens of one sequence without padding, and return their logits, `[token, vocabulary]`.

    Args:
        model: a causal language model.
        tokens: to compute.
        start: position of the first one; the cache holds all before it. Given to the model where it takes that: some
            models would count from 0.
        cache: is filled.
        last_only: whether the logits of the last token suffice.
    """
    positions = torch.arange(start, start + len(tokens), device=model.device)[None]
    possible = {"position_ids": positions, "logits_to_keep": int(last_only)}
    taken = inspect.signature(model.forward).parameters
    arguments = {name: value for name, value in possible.items() if name in taken}
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, **arguments).logits
    return logits[0]
