"""One write: blocks with all of their parts, in sessions of bounded size, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from connectors.gpu_tier.identity import BlockParts
from connectors.gpu_tier.settings import TierSettings
from connectors.reuse.link import ManagerLink
from connectors.reuse.saving import SavedBlocks, save_blocks
from connectors.reuse.sessions import WriteSessions
from connectors.reuse.statistics import ReuseStatistics
from connectors.transfer import CancelToken, TransferEngine
from gpu_tier.connector import PageSrc, WriteProgress
from kvcm.model.keys import BlockKey

__all__ = ["BlockWrite"]


class BlockWrite:
    """Writes consecutive blocks of one chain in the thread that calls `run`.

    A part is asked leave for only where it is missing: of a block whose KV another engine stored, the sidecar alone is
    written. After a failure nothing more is written: what follows a gap could not be matched.

    Args:
        parent: key before the first block, None at the start of a prompt.
        pages: what to write.
        parts: of the instance's blocks.

    Attributes:
        has_begun: whether it was run.
    """

    def __init__(self, parent: int | None, pages: Sequence[PageSrc], parts: BlockParts) -> None:
        self.has_begun = False
        self._parent = None if parent is None else BlockKey(parent)
        self._pages = pages
        self._parts = parts
        self._groups = [parts.group_of(page.parts) for page in pages]
        self._cancel = CancelToken()
        self._progress = WriteProgress(False)

    @property
    def progress(self) -> WriteProgress:
        """How far it is."""
        return self._progress

    def cancel(self) -> None:
        """End as soon as may be."""
        self._cancel.cancel()

    def fail(self, reason: str) -> None:
        """End a write that never began, or went wrong."""
        self._progress = WriteProgress(True, self._progress.stored, reason)

    def run(
        self,
        link: ManagerLink,
        sessions: WriteSessions,
        settings: TierSettings,
        statistics: ReuseStatistics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write what the manager does not have, and publish it."""
        self.has_begun = True
        engine = link.engine(settings.call_seconds)
        if engine is None:
            statistics.add(dropped_save_blocks=len(self._pages))
            self.fail(f"not registered: {link.registration.message}")
            return
        for start, stop in self._batches(settings.batch_bytes):
            saved = self._save(start, stop, engine, sessions, settings, statistics, clock)
            leading = next((i for i, is_stored in enumerate(saved.stored) if not is_stored), len(saved.stored))
            self._progress = WriteProgress(False, start + leading)
            if saved.reason or leading < stop - start:
                self.fail(saved.reason)
                return
        self._progress = WriteProgress(True, len(self._pages))

    def _batches(self, batch_bytes: int) -> Iterator[tuple[int, int]]:
        start = size_bytes = 0
        for position, page in enumerate(self._pages):
            page_bytes = sum(piece.nbytes for pieces in page.parts.values() for piece in pieces)
            if position > start and size_bytes + page_bytes > batch_bytes:
                yield start, position
                start, size_bytes = position, 0
            size_bytes += page_bytes
        if self._pages:
            yield start, len(self._pages)

    def _save(
        self,
        start: int,
        stop: int,
        engine: TransferEngine,
        sessions: WriteSessions,
        settings: TierSettings,
        statistics: ReuseStatistics,
        clock: Callable[[], float],
    ) -> SavedBlocks:
        pages = self._pages[start:stop]
        parent = BlockKey(self._pages[start - 1].key) if start else self._parent
        return save_blocks(
            sessions,
            engine,
            [BlockKey(page.key) for page in pages],
            parent,
            lambda index, name: pages[index].parts[name],
            settings.save_seconds,
            part_groups=self._groups[start:stop] if self._parts.sidecars else (),
            cancel=self._cancel,
            statistics=statistics,
            clock=clock,
        )
