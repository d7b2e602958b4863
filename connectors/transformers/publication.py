"""Publishes full blocks while tokens are generated, from a thread of its own.

One `Publication` belongs to one row of one call of generate, and one chain of blocks. Rules:

1. Blocks are published in order, each once, beginning behind those that were loaded.
2. A session ends in every case: finished with the saved blocks, or aborted.
3. After a failure nothing more of this chain is published: blocks after a gap could not be matched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from transformers import StoppingCriteria
from transformers.cache_utils import Cache

from kvcm.connectors.keys import KeyChain
from kvcm.connectors.layout.tensors import StagingBuffers, iovec
from kvcm.connectors.reuse.statistics import ReuseStatistics, Unsaved
from kvcm.connectors.reuse.write_sessions import WriteSessions, save_blocks
from kvcm.connectors.transfer import TransferEngine
from kvcm.connectors.transfer.worker_pool import PRIORITY_SAVE, WorkerPool
from kvcm.connectors.transformers.cache import BlockMemory, CallCache, Row
from kvcm.connectors.transformers.model_kv import STATE, ModelParts, pack_state
from kvcm.connectors.transformers.settings import ReuseSettings
from kvcm.model.keys import BlockKey

__all__ = ["BlockPublisher", "BlockRun", "GenerationProgress", "Published", "RowProgress", "RowPublication"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive full blocks of a row.

    Attributes:
        first: index of the first block.
        keys: of the blocks.
        parent: key of the block before, None at the start of the prompt.
        memory: where their KV is; it does not change any more.
        states: by index of the block, those that are known, as stored bytes.
    """

    first: int
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    memory: BlockMemory
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def split(self, most: int) -> Iterator[BlockRun]:
        """Yield runs of at most so many blocks."""
        for start in range(0, len(self.keys), most):
            parent = self.keys[start - 1] if start else self.parent
            yield replace(self, first=self.first + start, keys=self.keys[start : start + most], parent=parent)


@dataclass(frozen=True, slots=True)
class Published:
    """The blocks published so far, and the reason for those that are not."""

    blocks: int = 0
    bytes: int = 0
    reason: str = ""

    def __add__(self, other: Published) -> Published:
        return Published(self.blocks + other.blocks, self.bytes + other.bytes, self.reason or other.reason)


@dataclass(frozen=True, slots=True)
class BlockPublisher:
    """What saving needs: the manager, the storages, staging buffers of its own, and how patient to be.

    Attributes:
        sessions: begins and ends the write sessions.
        engine: moves the bytes.
        staging: per name of a part.
        parts: of a block.
        settings: deadlines and sizes.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """

    sessions: WriteSessions
    engine: TransferEngine
    staging: Mapping[str, StagingBuffers]
    parts: ModelParts
    settings: ReuseSettings
    statistics: ReuseStatistics
    clock: Callable[[], float] = time.monotonic

    def publish(self, run: BlockRun) -> Published:
        """Save the blocks of a run that the manager does not have, and publish them."""
        published = Published()
        for piece in run.split(self._max_blocks(run)):
            if not published.reason:
                published += self._publish(piece)
        return published

    def _max_blocks(self, run: BlockRun) -> int:
        """Return how many blocks are reachable at once."""
        reachable = [
            staging.slots
            for name, staging in self.staging.items()
            if staging.host_block(run.memory.pieces(name, run.first), 0).copies
        ]
        return min([len(run.keys), *reachable])

    def _publish(self, run: BlockRun) -> Published:
        groups = [self.parts.group_of(run.first + index in run.states) for index in range(len(run.keys))]

        def memory_of(index: int, part: str) -> Sequence[memoryview]:
            block = run.first + index
            if part == STATE:
                return iovec([run.states[block]])
            host = self.staging[part].host_block(run.memory.pieces(part, block), index)
            host.gather()
            return host.buffers

        saved = save_blocks(
            self.sessions,
            engine=self.engine,
            keys=run.keys,
            parent=run.parent,
            memory_of=memory_of,
            deadline_seconds=self.settings.save_seconds,
            part_groups=groups if self.parts.state else (),
            statistics=self.statistics,
            clock=self.clock,
        )
        if saved.reason:
            for staging in self.staging.values():
                staging.discard()  # perhaps a storage still reads from it
        return Published(saved.saved, saved.saved_bytes, saved.reason)


class RowPublication:
    """Publishes the chain of one row of a call of generate.

    Args:
        saver: does the work.
        pool: runs it; one thread, so that blocks are published in order.
        loaded_blocks: leading blocks that are in the storage already.
    """

    def __init__(self, saver: BlockPublisher, pool: WorkerPool, loaded_blocks: int) -> None:
        self.next_block = loaded_blocks
        self._saver = saver
        self._pool = pool
        self._lock = threading.Lock()
        self._published = Published()
        self._jobs: list[Future[None]] = []

    def add(self, run: BlockRun) -> None:
        """Publish blocks in the background. They must follow those of the last call."""
        assert run.first == self.next_block
        self.next_block += len(run.keys)
        per_session = max(1, self._saver.settings.save_batch_bytes // self._saver.parts.block_bytes)
        for part in run.split(per_session):
            self._jobs.append(self._pool.submit(PRIORITY_SAVE, partial(self._publish, part)))

    def stop(self, reason: str) -> None:
        """Publish nothing more."""
        with self._lock:
            self._published += Published(reason=reason)

    def finish(self, timeout_seconds: float) -> Published:
        """Wait for the saves and return the blocks published by then."""
        _, late = wait(self._jobs, timeout_seconds)
        with self._lock:
            published = self._published
        if late and not published.reason:
            return replace(published, reason=f"{len(late)} batches were still being saved")
        return published

    def count_unsaved(self, reason: Unsaved, blocks: int) -> None:
        """Count blocks that are not even tried."""
        self._saver.statistics.count_unsaved(reason, blocks)

    def _publish(self, run: BlockRun) -> None:
        if self._published.reason:
            self.count_unsaved(Unsaved.GAP, len(run.keys))
            return
        try:
            added = self._saver.publish(run)
        except Exception as error:
            _log.exception("blocks are not published")
            added = Published(reason=repr(error))
        with self._lock:
            self._published += added


# ---- progress of generation, token by token ----
#
# A stopping criterion is the one public hook that transformers calls after every step with all tokens so far, whatever
# the sampling is. It sees the moment of the first token, and a full block as soon as its last token's KV is computed.
# It never stops anything.


class _PendingBlock(NamedTuple):
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
        may_publish: whether the weights are those of the keys.
    """

    def __init__(
        self,
        row: Row,
        chain: KeyChain,
        prompt_keys: Sequence[BlockKey],
        publication: RowPublication,
        states: dict[int, torch.Tensor],
        may_publish: Callable[[], bool] = lambda: True,
    ) -> None:
        self._publication = publication
        self._may_publish = may_publish
        self._seen_blocks = publication.next_block
        self._row = row
        self._chain = chain
        self._keys = list(prompt_keys)
        self._states = states
        self._held: _PendingBlock | None = None

    def on_tokens(self, input_ids: torch.Tensor, batch: CallCache, columns: int, *, is_shared: bool) -> None:
        """Publish the blocks that are full now that the KV of so many columns is computed; else count them."""
        row, size = self._row, self._chain.block_tokens
        full, over = divmod(columns - row.padding, size)
        if full <= self._seen_blocks:
            return
        seen, self._seen_blocks = self._seen_blocks, full
        if not is_shared:
            self._publication.count_unsaved(Unsaved.LENGTH, full - seen)
            return
        if not self._may_publish():
            self._publication.count_unsaved(Unsaved.WEIGHTS, full - seen)
            self._publication.stop("the weights changed while tokens were generated")
            return
        known = len(self._keys)
        tokens = input_ids[row.index, row.padding + known * size : row.padding + full * size].tolist()
        self._keys += self._chain.keys(tokens, self._keys[-1] if self._keys else None)
        self._release()
        memory, state = batch.memory(row), batch.parts.state
        if state is not None and over == 0 and full - 1 not in self._states:
            full -= 1
            self._held = _PendingBlock(full, pack_state(state, batch.layers, row.index), memory)
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
            self._publication.add(
                BlockRun(first, keys=self._keys[first:full], parent=parent, memory=memory, states=self._states)
            )


class GenerationProgress(StoppingCriteria):
    """Notes the time of the first token and lets rows publish their full blocks, until they have ended.

    Args:
        batch: cache that the model fills.
        rows: per row what publishes it, None to publish nothing.
        end_tokens: ids that end a row; what follows in a batch is padding.
        clock: seconds of a clock that never runs backwards.
        max_tokens: of the longest row, up to which KV depends on the tokens before it alone; None for no limit.
    """

    def __init__(
        self,
        batch: CallCache,
        rows: Sequence[RowProgress | None],
        end_tokens: Collection[int],
        clock: Callable[[], float],
        max_tokens: int | None = None,
    ) -> None:
        # A model computes all rows of a batch alike: the longest one counts.
        self._max_columns = None if max_tokens is None else min(row.padding for row in batch.rows) + max_tokens
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
        is_shared = self._max_columns is None or columns <= self._max_columns
        for index in self._going:
            row = self._rows[index]
            if row is not None:
                row.on_tokens(input_ids, self._batch, columns, is_shared=is_shared)
        if len(self._rows) > 1 and self._end_tokens:
            tokens = input_ids[:, -1].tolist()
            self._going = [index for index in self._going if tokens[index] not in self._end_tokens]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def tokens(self) -> list[list[int]]:
        """Return the tokens of each row whose KV is computed, and depends on the tokens before it alone."""
        if self._input_ids is None:
            return [[] for _ in self._rows]
        columns = self._cache.get_seq_length()
        columns = columns if self._max_columns is None else min(columns, self._max_columns)
        return [self._input_ids[row.index, row.padding : columns].tolist() for row in self._batch.rows]

    def computed_blocks(self) -> int:
        """Return how many blocks of all rows are full of KV that was computed or loaded."""
        columns, size = self._cache.get_seq_length(), self._batch.parts.block_tokens
        return sum((columns - row.padding) // size for row in self._batch.rows)

    def finish(self) -> None:
        """Publish the blocks that were held back to the end."""
        for row in self._rows:
            if row is not None:
                row.finish()
