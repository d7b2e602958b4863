"""Computes what is missing of prompts whose prefixes were loaded, so that generation can begin in one column.

The rows of a batch are known to different lengths. Each that is behind is computed by itself, in the batch's memory,
until all are in the column where the one that is known longest begins; from there on transformers computes all of them
together. Never more is computed than without reuse: a row computed by itself has no padding.

A model with state leaves it where it stops. So its rows stop at the last block boundary that another prompt can use,
and where a longer prefix is known than could be gone on from: there prompts part, and the next one will come by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from connectors.transformers.batch import CallCache, Row
from connectors.transformers.forward import compute
from connectors.transformers.states import empty_state, join_states, pack_state, unpack_state

__all__ = ["Prefill", "RowStart"]


@dataclass(frozen=True, slots=True)
class RowStart:
    """Where a row begins to compute.

    Attributes:
        row: of the batch.
        blocks: that were loaded.
        known_blocks: whose KV is known, with or without a state.
        state: at the end of the loaded blocks, None when the model has none.
    """

    row: Row
    blocks: int = 0
    known_blocks: int = 0
    state: torch.Tensor | None = None


class Prefill:
    """Brings all rows to one column.

    Args:
        model: that computes.
        batch: its cache, with what was loaded.
        starts: of the rows, in order.
        keeps_states: whether rows stop where their state is worth saving.

    Attributes:
        column: where generation goes on.
        states: per row, at the end of which block which state, as stored bytes.
    """

    def __init__(self, model: Any, batch: CallCache, starts: Sequence[RowStart], *, keeps_states: bool) -> None:
        self.states: list[dict[int, torch.Tensor]] = [{} for _ in starts]
        self._model = model
        self._batch = batch
        self._starts = starts
        self._block_tokens = batch.parts.block_tokens
        self._state = batch.parts.state
        self._stops = [self._stops_of(start) if self._state and keeps_states else () for start in starts]
        self.column = self._column()

    def run(self) -> Cache:
        """Compute, and return the cache to go on with."""
        states = [self._advance(start, stops) for start, stops in zip(self._starts, self._stops, strict=True)]
        cache = self._batch.joint_cache(self.column)
        if self._state is not None and self.column:
            join_states(self._state, [state for state in states if state is not None], cache.layers)
        return cache

    def _column(self) -> int:
        size = self._block_tokens
        if self._state is not None and len(self._starts) > 1:
            return self._batch.columns - 1  # a state has no columns: all rows must be at their ends
        ends = [max((start.blocks, *stops)) for start, stops in zip(self._starts, self._stops, strict=True)]
        return max(start.row.padding + end * size if end else 0 for start, end in zip(self._starts, ends, strict=True))

    def _stops_of(self, start: RowStart) -> tuple[int, ...]:
        """Return the blocks behind which a row stops."""
        last = (len(start.row.tokens) - 1) // self._block_tokens
        return tuple(sorted({block for block in (start.known_blocks, last) if start.blocks < block <= last}))

    def _advance(self, start: RowStart, stops: Sequence[int]) -> torch.Tensor | None:
        """Compute a row up to the common column; returns its state there, None when the model has none."""
        row, position = start.row, start.blocks * self._block_tokens
        target = self.column - row.padding
        if target <= position:
            return start.state if self._state is None or start.state is not None else empty_state(self._state)
        cache = self._batch.row_cache(row, position)
        if self._state is not None and start.state is not None:
            unpack_state(self._state, start.state, cache.layers)
        for end in sorted({*(stop * self._block_tokens for stop in stops), target}):
            compute(self._model, row.tokens[position:end], position, cache)
            position = end
            if self._state is not None and end // self._block_tokens in stops and end % self._block_tokens == 0:
                self.states[row.index][end // self._block_tokens - 1] = pack_state(self._state, cache.layers, 0)
        return None if self._state is None else pack_state(self._state, cache.layers, 0)
