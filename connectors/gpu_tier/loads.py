"""One load: the parts of a prefix, straight into the host pool.

Why not through staging memory, as engines' connectors do: the tier can wait for a page that a storage hangs on to; it
keeps the page until `LoadProgress.is_settled`. So the bytes are written once, where they stay.

Blocks are loaded in order, a batch at a time. After the first batch in which a required part failed nothing more is
begun: what follows a gap is of no use. An optional part that failed is left out from there on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from connectors.gpu_tier.lookup import FoundBlocks, Question
from connectors.reuse.loading import LoadReport, PartToLoad, report_of
from connectors.reuse.statistics import ReuseStatistics
from connectors.transfer import CancelToken, Failure, TransferItem, TransferResult
from gpu_tier.connector import LoadProgress, PageDst
from kvcm.model.keys import BlockKey

__all__ = ["PrefixLoad"]

_Part = tuple[int, str]


class PrefixLoad:
    """Loads the blocks of one prefix in the thread that calls `run`; progress may be asked for from any.

    Args:
        question: that was asked.
        found: what was answered.
        pages: where blocks go, in ascending order and without a gap.
        batch_bytes: most bytes at a time.
        checksums: whether parts must have the checksums that their locations tell.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        report: what the manager has to hear, once the load is done.
        is_refused: whether the engine does not know a storage, or refuses an address.
        has_begun: whether it was run.
    """

    def __init__(
        self,
        question: Question,
        found: FoundBlocks,
        pages: Sequence[PageDst],
        *,
        batch_bytes: int,
        checksums: bool = True,
        statistics: ReuseStatistics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report = LoadReport((), ())
        self.is_refused = False
        self.has_begun = False
        self._question = question
        self._found = found
        self._pages = pages
        self._batch_bytes = batch_bytes
        self._checksums = checksums
        self._statistics = statistics or ReuseStatistics()
        self._clock = clock
        self._cancel = CancelToken()
        self._ends = {name: page.block for page in pages[:1] for name in page.parts}
        self._failed: dict[str, str] = {}
        self._is_hanging = False
        self._is_done = False

    def run(self, deadline_seconds: float) -> None:
        """Load what can be loaded in time."""
        self.has_begun = True
        deadline = min(self._clock() + deadline_seconds, self._found.usable_until)
        begun = self._clock()
        try:
            for batch in self._batches():
                if self._cancel.is_cancelled or not self._load(batch, deadline):
                    break
        finally:
            self._statistics.observe("load_seconds", self._clock() - begun)
            self._is_done = True

    def fail(self, reason: str) -> None:
        """End a load that never began, or went wrong."""
        self._failed[""] = reason
        self._is_done = True

    def cancel(self) -> None:
        """End as soon as may be."""
        self._cancel.cancel()

    def progress(self) -> LoadProgress:
        """Return how far it is."""
        engine, is_done = self._found.engine, self._is_done
        is_hanging = self._is_hanging and engine is not None and engine.hung_accesses > 0
        reason = next(iter(self._failed.values()), "")
        return LoadProgress(dict(self._ends), is_done, is_done and not is_hanging, reason)

    def _batches(self) -> Iterator[Sequence[PageDst]]:
        batch: list[PageDst] = []
        size_bytes = 0
        for page in self._pages:
            page_bytes = sum(piece.nbytes for pieces in page.parts.values() for piece in pieces)
            if batch and size_bytes + page_bytes > self._batch_bytes:
                yield batch
                batch, size_bytes = [], 0
            batch.append(page)
            size_bytes += page_bytes
        if batch:
            yield batch

    def _load(self, batch: Sequence[PageDst], deadline: float) -> bool:
        """Load some blocks; returns whether to go on."""
        engine = self._found.engine
        assert engine is not None  # something was found
        places = [(page.block, name) for page in batch for name in page.parts if name not in self._failed]
        items = [self._item(page, name) for page in batch for name in page.parts if name not in self._failed]
        results = engine.load(items, deadline - self._clock(), self._cancel)
        self._note(places, items, results)
        self._advance(places, results)
        return not any(name in self._failed for name in self._question.required)

    def _item(self, page: PageDst, name: str) -> TransferItem:
        location = self._found.locations[page.block]
        checksum = location.checksums.get(name, 0) if self._checksums else 0
        return TransferItem(location.uris[name], page.parts[name], checksum=checksum)

    def _note(self, places: Sequence[_Part], items: Sequence[TransferItem], results: Sequence[TransferResult]) -> None:
        keys = self._question.handle.keys
        parts = [
            PartToLoad(BlockKey(keys[block]), item.uri, item.checksum)
            for (block, _), item in zip(places, items, strict=True)
        ]
        added = report_of(parts, results, self._statistics)
        self.report = LoadReport(self.report.lost + added.lost, self.report.corrupt + added.corrupt)
        self._is_hanging |= any(result.failure is Failure.PENDING for result in results)
        self.is_refused |= any(result.failure is Failure.REFUSED for result in results)

    def _advance(self, places: Sequence[_Part], results: Sequence[TransferResult]) -> None:
        ends = dict(self._ends)
        for (block, name), result in zip(places, results, strict=True):
            if name in self._failed:
                continue
            if result.ok:
                ends[name] = block + 1
            else:
                self._failed[name] = f"block {block}, {name}: {result.reason}"
        self._ends = ends
