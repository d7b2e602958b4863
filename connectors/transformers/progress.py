"""Watches generation token by token.

A stopping criterion is the one public hook that transformers calls after every step with all tokens so far, whatever
the sampling is. It sees the moment of the first token, and a full block as soon as its last token's KV is computed. It
never stops anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from transformers import StoppingCriteria
from transformers.cache_utils import Cache

from connectors.keys import KeyChain
from connectors.transformers.batch import BlockMemory, CallCache, Row
from connectors.transformers.publisher import BlockRun, Publication
from connectors.transformers.states import pack_state
from kvcm.model.keys import BlockKey

__all__ = ["Progress", "RowProgress"]


class _Held(NamedTuple):
    block: int
    state: torch.Tensor
    memory: BlockMemory


class RowProgress:
    """Hands the full blocks of one row to its publication.

    Generation passes through a state at every block's end, and of an answer only the last one is worth its size: the
    newest block is held until the next one is full.

    Args:
        row: of the batch.
        chain: computes keys.
        prompt_keys: keys of the prompt's full blocks.
        publication: where full blocks go.
        states: those that the prefill left, by index of the block.
    """

    def __init__(
        self,
        row: Row,
        chain: KeyChain,
        prompt_keys: Sequence[BlockKey],
        publication: Publication,
        states: dict[int, torch.Tensor],
    ) -> None:
        self._publication = publication
        self._seen_blocks = publication.next_block
        self._row = row
        self._chain = chain
        self._keys = list(prompt_keys)
        self._states = states
        self._held: _Held | None = None

    def see(self, input_ids: torch.Tensor, batch: CallCache, columns: int) -> None:
        """Publish the blocks that are full now that the KV of so many columns is computed."""
        row, size = self._row, self._chain.block_tokens
        full, over = divmod(columns - row.padding, size)
        if full <= self._seen_blocks:
            return
        self._seen_blocks = full
        known = len(self._keys)
        tokens = input_ids[row.index, row.padding + known * size : row.padding + full * size].tolist()
        self._keys += self._chain.keys(tokens, self._keys[-1] if self._keys else None)
        self._release()
        memory, state = batch.memory(row), batch.parts.state
        if state is not None and over == 0 and full - 1 not in self._states:
            full -= 1
            self._held = _Held(full, pack_state(state, batch.layers, row.index), memory)
        self._publish(full, memory)

    def finish(self) -> None:
        """Publish the block that was held, with its state."""
        if self._held is not None:
            self._states[self._held.block] = self._held.state
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._publish(held.block + 1, held.memory)

    def _publish(self, full: int, memory: BlockMemory) -> None:
        first = self._publication.next_block
        if full > first:
            parent = self._keys[first - 1] if first else None
            self._publication.add(BlockRun(first, self._keys[first:full], parent, memory, self._states))


class Progress(StoppingCriteria):
    """Notes the time of the first token and lets rows publish their full blocks, until they have ended.

    Args:
        batch: cache that the model fills.
        rows: per row what publishes it, None to publish nothing.
        end_tokens: ids that end a row; what follows in a batch is padding.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        batch: CallCache,
        rows: Sequence[RowProgress | None],
        end_tokens: Collection[int],
        clock: Callable[[], float],
    ) -> None:
        self.first_token_at: float | None = None
        self.new_tokens = 0
        self._batch = batch
        self._cache = Cache(layers=batch.layers)
        self._input_ids: torch.Tensor | None = None
        self._rows = rows
        self._going = list(range(len(rows)))
        self._end_tokens = end_tokens
        self._clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """See one more token per row; returns that generation goes on."""
        self.new_tokens += len(self._going)
        if self.first_token_at is None:
            input_ids[0, -1].item()  # on an accelerator the token is chosen only when it can be read
            self.first_token_at = self._clock()
        self._input_ids = input_ids
        columns = self._cache.get_seq_length()
        for index in self._going:
            row = self._rows[index]
            if row is not None:
                row.see(input_ids, self._batch, columns)
        if len(self._rows) > 1 and self._end_tokens:
            tokens = input_ids[:, -1].tolist()
            self._going = [index for index in self._going if tokens[index] not in self._end_tokens]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def tokens(self) -> list[list[int]]:
        """Return the tokens of each row whose KV is computed."""
        if self._input_ids is None:
            return [[] for _ in self._rows]
        columns = self._cache.get_seq_length()
        return [self._input_ids[row.index, row.padding : columns].tolist() for row in self._batch.rows]

    def finish(self) -> None:
        """Publish what was held to the end."""
        for row in self._rows:
            if row is not None:
                row.finish()
