"""Blocks on their way to the storage. Their pages are held meanwhile, whatever becomes of their requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_tier.connector import KV_SPEC, KVConnector, PageSrc, WriteTicket
from gpu_tier.manager.block_pages import BlockPages
from gpu_tier.manager.prefix_counters import PrefixCounters

__all__ = ["BlockWrites"]


@dataclass(frozen=True, slots=True)
class _Written:
    """Consecutive blocks of one write."""

    keys: tuple[int, ...]
    pages: tuple[int, ...]


class BlockWrites:
    """Offers blocks to a storage.

    Args:
        blocks: the pool.
        connector: to the storage.
        counters: where to count.
        most_pages: that may be held for writing at once.
    """

    def __init__(self, blocks: BlockPages, connector: KVConnector, counters: PrefixCounters, most_pages: int) -> None:
        self._blocks = blocks
        self._connector = connector
        self._counters = counters
        self._most_pages = most_pages
        self._writing: dict[WriteTicket, _Written] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        return not self._writing

    def offer(self, keys: Sequence[int], pages: Sequence[int]) -> None:
        """Begin to write what the storage does not have, from the first such block on.

        Args:
            keys: of a chain's blocks, from the first one on.
            pages: their pages.
        """
        start = next((i for i, page in enumerate(pages) if not self._blocks.is_stored(page)), len(pages))
        start = max([start, *(i + 1 for i, page in enumerate(pages) if self._blocks.is_busy(page))])
        room = max(0, self._most_pages - sum(len(written.pages) for written in self._writing.values()))
        held = tuple(pages[start : start + room])
        self._counters.dropped_pages += len(pages) - start - len(held)
        if not held:
            return
        written = _Written(tuple(keys[start : start + len(held)]), held)
        names = [KV_SPEC]
        if self._blocks.sidecar is not None and self._blocks.with_sidecar(held) == len(held):
            names.append(self._blocks.sidecar.name)
        sources = [PageSrc(key, self._blocks.memory(page, names)) for key, page in zip(written.keys, held, strict=True)]
        self._blocks.allocator.begin_write(held)
        self._writing[self._connector.write(keys[start - 1] if start else None, sources)] = written

    def step(self) -> None:
        """Let go of pages whose write is done."""
        for ticket, written in list(self._writing.items()):
            progress = self._connector.poll_write(ticket)
            if not progress.is_done:
                continue
            del self._writing[ticket]
            stored = progress.stored
            self._blocks.mark_stored(written.keys[:stored], written.pages[:stored], True)
            self._blocks.allocator.end_write(written.pages)
            self._counters.written_pages += stored
            self._counters.failed_pages += len(written.pages) - stored
