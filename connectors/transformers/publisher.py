"""Publishes full blocks while tokens are generated, from a thread of its own.

One `Publication` belongs to one call of generate and one chain of blocks. Rules:

1. Blocks are published in order, each once, beginning behind those that were loaded.
2. A session ends in every case: finished with what was saved, or aborted.
3. After a failure nothing more of this chain is published: what follows a gap could not be matched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import torch

from connectors.client import ManagerClient
from connectors.layout.sequence import sequence_block
from connectors.layout.staging import Staging
from connectors.results import WriteGrant
from connectors.transfer import Failure, TransferEngine, TransferItem, TransferResult
from connectors.transfer.pool import PRIORITY_SAVE, WorkerPool
from connectors.transformers.settings import ReuseSettings
from kvcm.model.keys import BlockKey

__all__ = ["BlockRun", "Publication", "Published", "Saver"]

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]

# The session outlives the last write by this much: the finishing call must still arrive.
_SESSION_SPARE_SECONDS = 10


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive full blocks of a cache.

    Attributes:
        first: index of the first block.
        keys: of the blocks.
        parent: key of the block before, None at the start of the prompt.
        layers: K and V of each layer, each `[kv_head, token, head_dim]`; the blocks in them do not change any more.
    """

    first: int
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    layers: Layers


@dataclass(frozen=True, slots=True)
class Published:
    """What was published so far, and why not more."""

    blocks: int = 0
    bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Saver:
    """What saving needs: the manager, the storages, a staging buffer of its own, and how patient to be.

    Attributes:
        spec: name of the part of a block that is saved.
        clock: seconds of a clock that never runs backwards.
    """

    client: ManagerClient
    engine: TransferEngine
    staging: Staging
    settings: ReuseSettings
    spec: str
    clock: Callable[[], float] = time.monotonic

    def publish(self, run: BlockRun) -> Published:
        """Save the blocks of a run that the manager does not have, and publish them."""
        grant = self.client.start_write(
            run.keys,
            parent_block_key=run.parent,
            session_seconds=int(self.settings.save_seconds) + _SESSION_SPARE_SECONDS,
            timeout_seconds=self.settings.call_seconds,
        )
        if grant is None:
            return Published(reason="no leave to write")
        results: list[TransferResult] = []
        try:
            results = self._save(run, grant)
        finally:
            finished = self._end_session(grant, results)
        if not finished:
            return Published(reason="the write session was not confirmed")
        reason = next((result.reason for result in results if not result.ok), "")
        saved = sum(result.ok for result in results)
        return Published(saved, saved * self.staging.layout.block_bytes, reason)

    def _end_session(self, grant: WriteGrant, results: Sequence[TransferResult]) -> bool:
        timeout = self.settings.call_seconds
        not_begun = len(grant.locations) - len(results)
        flags = [result.ok for result in results] + [False] * not_begun
        if any(flags) or not flags:
            checksums = [{self.spec: result.checksum} if result.checksum else {} for result in results]
            checksums += [{}] * not_begun
            return self.client.finish_write(grant.session_id, flags, checksums=checksums, timeout_seconds=timeout)
        return self.client.abort_write(grant.session_id, timeout_seconds=timeout)

    def _save(self, run: BlockRun, grant: WriteGrant) -> list[TransferResult]:
        """Save the blocks that the grant does not mask; stops at the first batch with a failure."""
        deadline = self.clock() + self.settings.save_seconds
        wanted = [run.first + index for index, masked in enumerate(grant.mask) if not masked]
        uris = [location.uris[self.spec] for location in grant.locations]
        results: list[TransferResult] = []
        while len(results) < len(wanted) and all(result.ok for result in results):
            left = wanted[len(results) :]
            blocks = self.staging.host_blocks(
                sequence_block(run.layers, index, self.staging.layout.block_tokens) for index in left
            )
            for block in blocks:
                block.gather()
            items = [TransferItem(uri, block.buffers) for uri, block in zip(uris[len(results) :], blocks, strict=False)]
            results += self.engine.save(items, deadline - self.clock())
        if any(result.failure is Failure.PENDING for result in results):
            self.staging.discard()  # a storage still reads from it
        return results


class Publication:
    """Publishes the chain of one call of generate.

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
        per_session = max(1, self._saver.settings.save_batch_bytes // self._saver.staging.layout.block_bytes)
        for start in range(0, len(run.keys), per_session):
            part = BlockRun(
                run.first + start,
                run.keys[start : start + per_session],
                run.keys[start - 1] if start else run.parent,
                run.layers,
            )
            self._jobs.append(self._pool.submit(PRIORITY_SAVE, partial(self._publish, part)))

    def finish(self, timeout_seconds: float) -> Published:
        """Wait for the saves and return what was published by then."""
        _, late = wait(self._jobs, timeout_seconds)
        with self._lock:
            published = self._published
        if late and not published.reason:
            return Published(published.blocks, published.bytes, f"{len(late)} batches were still being saved")
        return published

    def _publish(self, run: BlockRun) -> None:
        if self._published.reason:
            return
        try:
            added = self._saver.publish(run)
        except Exception as error:
            added = Published(reason=repr(error))
        with self._lock:
            so_far = self._published
            self._published = Published(so_far.blocks + added.blocks, so_far.bytes + added.bytes, added.reason)
