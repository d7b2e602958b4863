"""What SGLang asks of a storage, answered by the manager and its storages: which pages are there, load them, save them.

One rank's view: a page is there when every rank saved its part of it, and a rank moves only its own. Nobody waits for
another rank. Nothing here raises because of the manager, the network or a storage: an error is a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from connectors.client import ManagerClient
from connectors.results import Location, MatchResult, Outcome
from connectors.reuse.link import ManagerLink
from connectors.reuse.loading import PartToLoad, load_parts, report_of
from connectors.reuse.saving import save_blocks
from connectors.reuse.sessions import SessionSettings, WriteSessions
from connectors.reuse.staging import Bytes, StagingTrays
from connectors.reuse.statistics import ReuseStatistics
from connectors.sglang.chain_links import ChainLinks
from connectors.sglang.match_book import Found, Lease, MatchBook
from connectors.sglang.options import SglangOptions
from connectors.sglang.page_keys import PageKeys
from connectors.sglang.page_memory import PageMemory
from connectors.sglang.rank import RankParts
from connectors.transfer import Failure, TransferEngine, TransferResult
from connectors.transfer.pool import PRIORITY_SAVE, WorkerPool
from kvcm.model.errors import ErrorCode
from kvcm.model.keys import BlockKey

__all__ = ["Moved", "PageStore"]

_log = logging.getLogger(__name__)

# A request to the manager may have 65,536 keys; a prompt of a million tokens has as many pages of 16.
_MOST_KEYS = 16_384


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of pages that were to be loaded or saved.

    Attributes:
        flags: one per page; a page that counts is there with every byte.
        pages: that really moved.
        bytes: of them.
        seconds: that it took.
    """

    flags: list[bool]
    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class PageStore:
    """Pages of one rank; safe to use from several threads.

    Args:
        link: to the manager; closed with the store.
        memory: of the host pool.
        keys: makes block keys.
        parts: of a block, and which of them is this rank's.
        options: how patient to be.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        link: ManagerLink,
        memory: PageMemory,
        keys: PageKeys,
        parts: RankParts,
        options: SglangOptions,
        statistics: ReuseStatistics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.statistics = statistics or ReuseStatistics()
        self._link = link
        self._memory = memory
        self._keys = keys
        self._parts = parts
        self._options = options
        self._clock = clock
        self._background = WorkerPool(1, "kvcm-sglang")
        self._book = MatchBook(self._release, clock)
        self._links = ChainLinks()
        self._trays = StagingTrays(max(options.staging_bytes, memory.page_bytes), trays=1)
        settings = SessionSettings(session_seconds=options.session_seconds, call_seconds=options.call_seconds)
        self._sessions = WriteSessions(link.client, settings, clock)

    @property
    def lost_trays(self) -> int:
        """Staging memory that was left to storages that hang."""
        return self._trays.lost

    def exists(self, page_hashes: Sequence[str], prefix_hashes: Sequence[str] = ()) -> int:
        """Return how many of the leading pages can be loaded; they stay readable for a while.

        Args:
            page_hashes: consecutive pages.
            prefix_hashes: of the pages before them, as far as SGLang tells.
        """
        keys = self._keys.keys(page_hashes)
        self._links.note([*self._keys.keys(prefix_hashes[-1:]), *keys])
        if not keys or not self._link.is_ready():
            return 0
        hits = 0
        for first in range(0, len(keys), _MOST_KEYS):
            chunk = keys[first : first + _MOST_KEYS]
            locations, lease = self._match(chunk)
            self._book.enter(chunk, locations, lease)
            hits += len(locations)
            if len(locations) < len(chunk):
                break
        self.statistics.add(lookup_blocks=len(keys), hit_blocks=hits)
        return hits

    def load(self, page_hashes: Sequence[str], host_indices: Any) -> Moved:
        """Load pages into the host pool.

        Args:
            page_hashes: of the pages.
            host_indices: where they belong, as SGLang gives them.
        """
        begun = self._clock()
        keys = self._keys.keys(page_hashes)
        engine = self._link.engine_now()
        if engine is None:
            return Moved([False] * len(keys))
        pages = self._memory.pages(host_indices)
        found = self._found(keys)
        try:
            results = self._load(engine, keys, pages, found)
        finally:
            self._book.done(found)
        flags = [result.ok for result in results] + [False] * (len(keys) - len(results))
        seconds = self._clock() - begun
        self.statistics.add(loaded_blocks=sum(flags))
        self.statistics.observe("load_seconds", seconds)
        return Moved(flags, sum(flags), sum(flags) * self._memory.page_bytes, seconds)

    def save(self, page_hashes: Sequence[str], host_indices: Any, prefix_hashes: Sequence[str] = ()) -> Moved:
        """Save pages of the host pool that are not stored yet.

        Args:
            page_hashes: consecutive pages.
            host_indices: where they are, as SGLang gives them.
            prefix_hashes: of the pages before them, as far as SGLang tells.
        """
        begun = self._clock()
        keys = self._keys.keys(page_hashes)
        engine = self._link.engine_now() if self._options.publish else None
        if engine is None or not keys:
            return Moved([False] * len(keys))
        pages = self._memory.pages(host_indices)
        saved = save_blocks(
            self._sessions,
            engine,
            keys,
            self._parent(keys[0], prefix_hashes),
            lambda index, _: [piece.data for piece in pages[index]],
            self._options.save_seconds,
            part_groups=self._parts.groups_of(len(keys)),
            statistics=self.statistics,
            clock=self._clock,
        )
        self._links.note(keys)
        return Moved(list(saved.stored), saved.saved, saved.saved_bytes, self._clock() - begun)

    def clear(self) -> None:
        """Forget what was found."""
        self._book.clear()

    def close(self) -> None:
        """Abort what is being saved, give leases back and close everything, within the deadline."""
        deadline = self._clock() + self._options.shutdown_seconds
        self._book.clear()
        self._sessions.close(self._options.shutdown_seconds / 2)
        self._background.close(max(0.0, deadline - self._clock()))
        self._link.close()

    def _match(self, keys: Sequence[BlockKey]) -> tuple[list[Location], Lease]:
        """Ask the manager; an error is a miss."""
        begun, options = self._clock(), self._options
        answer = self._link.client.match(
            keys,
            spec_names=self._parts.names,
            read_lease_ms=int(options.lease_seconds * 1000),
            timeout_seconds=options.call_seconds,
        )
        self._note(answer)
        self.statistics.observe("lookup_seconds", self._clock() - begun)
        locations = [location for location in answer.locations if location is not None]
        # The lease begins in the manager later than here, so it is there for a little longer than we believe.
        return locations, Lease(answer.lease_id, begun + options.lease_seconds)

    def _note(self, answer: MatchResult) -> None:
        is_ok = answer.outcome is Outcome.OK
        self.statistics.add(lookups=int(is_ok), lookups_failed=int(not is_ok))
        if answer.code == ErrorCode.INSTANCE_NOT_EXIST:
            self._link.forget()  # the manager lost its state

    def _found(self, keys: Sequence[BlockKey]) -> Found:
        """Return where the leading pages lie: those that were just looked up, or else what the manager says now."""
        found = self._book.take(keys)
        missing = keys[len(found.locations) :]
        if not missing:
            return found
        locations, lease = self._match(missing)
        self._book.enter(missing, locations, lease)
        more = self._book.take(missing)
        ends = [part.ends_at for part in (found, more) if part.locations]
        return Found(found.locations + more.locations, found.leases + more.leases, min(ends, default=more.ends_at))

    def _load(
        self, engine: TransferEngine, keys: Sequence[BlockKey], pages: Sequence[Sequence[Bytes]], found: Found
    ) -> list[TransferResult]:
        name = self._parts.name
        parts = [
            PartToLoad(key, location.uris[name], location.checksums.get(name, 0) if self._options.checksums else 0)
            for key, location in zip(keys, found.locations, strict=False)
        ]

        def deliver(rows: Bytes, arrived: Sequence[int]) -> None:
            for row, index in zip(rows, arrived, strict=True):
                self._memory.fill(pages[index], row)

        # Nothing is begun after the lease: what was deleted since then may be somebody else's.
        seconds = min(self._options.load_seconds, found.ends_at - self._clock())
        results = load_parts(engine, self._trays, parts, self._memory.page_bytes, deliver, seconds, clock=self._clock)
        report = report_of(parts, results, self.statistics)
        if report:
            _log.warning("%d pages are gone and %d have other bytes", len(report.lost), len(report.corrupt))
            self._later(partial(self._tell, self._link.client, report.lost, report.corrupt))
        if any(result.failure is Failure.REFUSED for result in results):
            self._link.forget()  # perhaps a storage was added since
        return results

    def _tell(self, client: ManagerClient, lost: Any, corrupt: Any) -> None:
        client.report_missing(lost, corrupt=corrupt, timeout_seconds=self._options.call_seconds)

    def _parent(self, key: BlockKey, prefix_hashes: Sequence[str]) -> BlockKey | None:
        if prefix_hashes:
            return self._keys.keys(prefix_hashes[-1:])[0]
        return self._links.parent(key)

    def _release(self, lease_id: str) -> None:
        self._later(partial(self._end_lease, lease_id))

    def _end_lease(self, lease_id: str) -> None:
        self._link.client.release_lease(lease_id, timeout_seconds=self._options.call_seconds)

    def _later(self, task: Callable[[], None]) -> None:
        self._background.submit(PRIORITY_SAVE, task)
