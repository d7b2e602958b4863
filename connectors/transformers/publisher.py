"""Publishes full blocks while tokens are generated, from a thread of its own.

One `Publication` belongs to one row of one call of generate, and one chain of blocks. Rules:

1. Blocks are published in order, each once, beginning behind those that were loaded.
2. A session ends in every case: finished with what was saved, or aborted.
3. After a failure nothing more of this chain is published: what follows a gap could not be matched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from connectors.layout.staging import Staging
from connectors.layout.tensors import iovec
from connectors.reuse.saving import save_blocks
from connectors.reuse.sessions import WriteSessions
from connectors.reuse.statistics import ReuseStatistics
from connectors.transfer import TransferEngine
from connectors.transfer.pool import PRIORITY_SAVE, WorkerPool
from connectors.transformers.batch import BlockMemory
from connectors.transformers.parts import STATE, ModelParts
from connectors.transformers.settings import ReuseSettings
from kvcm.model.keys import BlockKey

__all__ = ["BlockRun", "Publication", "Published", "Saver"]


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
    """What was published so far, and why not more."""

    blocks: int = 0
    bytes: int = 0
    reason: str = ""

    def __add__(self, other: Published) -> Published:
        return Published(self.blocks + other.blocks, self.bytes + other.bytes, self.reason or other.reason)


@dataclass(frozen=True, slots=True)
class Saver:
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
    staging: Mapping[str, Staging]
    parts: ModelParts
    settings: ReuseSettings
    statistics: ReuseStatistics
    clock: Callable[[], float] = time.monotonic

    def publish(self, run: BlockRun) -> Published:
        """Save the blocks of a run that the manager does not have, and publish them."""
        published = Published()
        for piece in run.split(self._most_blocks(run)):
            if not published.reason:
                published += self._publish(piece)
        return published

    def _most_blocks(self, run: BlockRun) -> int:
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
            self.engine,
            run.keys,
            run.parent,
            memory_of,
            self.settings.save_seconds,
            part_groups=groups if self.parts.state else (),
            statistics=self.statistics,
            clock=self.clock,
        )
        if saved.reason:
            for staging in self.staging.values():
                staging.discard()  # perhaps a storage still reads from it
        return Published(saved.saved, saved.saved_bytes, saved.reason)


class Publication:
    """Publishes the chain of one row of a call of generate.

    Args:
        saver: does the work.
        pool: runs it; one thread, so that blocks are published in order.
        loaded_blocks: leading blocks that are in the storage already.
    """

    def __init__(self, saver: Saver, pool: WorkerPool, loaded_blocks: int) -> None:
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

    def finish(self, timeout_seconds: float) -> Published:
        """Wait for the saves and return what was published by then."""
        _, late = wait(self._jobs, timeout_seconds)
        with self._lock:
            published = self._published
        if late and not published.reason:
            return replace(published, reason=f"{len(late)} batches were still being saved")
        return published

    def _publish(self, run: BlockRun) -> None:
        if self._published.reason:
            return
        try:
            added = self._saver.publish(run)
        except Exception as error:
            added = Published(reason=repr(error))
        with self._lock:
            self._published += added
