"""One entrance for all storages: routes items to the mover of their uri's scheme."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from connectors.transfer.file import FileMover
from connectors.transfer.mover import Failure, Mover, TransferItem, TransferResult, not_moved
from kvcm.model.storages import StorageConfig

__all__ = ["MOVERS", "TransferCounters", "TransferEngine"]

# Scheme → what makes its mover from the storages of a group and the number of threads. A new storage is a new line.
MOVERS: dict[str, Callable[[Sequence[StorageConfig], int | None], Mover]] = {
    "file": FileMover.for_storages,
}

_Direction = Callable[[Mover, Sequence[TransferItem], float], list[TransferResult]]


@dataclass(frozen=True, slots=True)
class TransferCounters:
    """What an engine moved since it was made."""

    loaded_items: int = 0
    loaded_bytes: int = 0
    saved_items: int = 0
    saved_bytes: int = 0
    failed_items: int = 0


class TransferEngine:
    """Moves items of any scheme that it has a mover for; safe to use from several threads.

    Args:
        movers: by uri scheme.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(self, movers: Mapping[str, Mover], clock: Callable[[], float] = time.monotonic) -> None:
        self._movers = dict(movers)
        self._clock = clock
        self._lock = threading.Lock()
        self._counters = TransferCounters()

    @classmethod
    def for_storages(cls, storages: Sequence[StorageConfig], threads: int | None = None) -> TransferEngine:
        """Return an engine for the storages that the manager named at registration.

        Args:
            storages: candidates of the instance's group; those without a mover here are left out.
            threads: most system calls at once per scheme; default is the number of cores, at most 4.
        """
        # vcns_hf3fs storages hand out hf3fs uris
        schemes = {storage.storage_type.kind.removeprefix("vcns_") for storage in storages}
        return cls({scheme: MOVERS[scheme](storages, threads) for scheme in sorted(schemes & MOVERS.keys())})

    @property
    def counters(self) -> TransferCounters:
        """Snapshot of what was moved so far."""
        return self._counters

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Fill the buffers of each item from its uri.

        Args:
            items: what to load; buffers must be writable.
            deadline_seconds: time from now after which nothing more is begun. Items that the storage is busy with at
                that moment come back as `Failure.PENDING`: their buffers may still change and must not be used again.

        Returns:
            One result per item, in order; never raises for an item.
        """
        results = self._route(_load, items, deadline_seconds)
        with self._lock:
            self._counters = _add(self._counters, results, loaded=True)
        return results

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        """Write the buffers of each item to its uri; arguments and results as for `load`.

        Items that come back as pending are still being read: their buffers must stay as they are.
        """
        results = self._route(_save, items, deadline_seconds)
        with self._lock:
            self._counters = _add(self._counters, results, loaded=False)
        return results

    def close(self) -> None:
        """Close all movers."""
        for mover in self._movers.values():
            mover.close()

    def _route(
        self, direction: _Direction, items: Sequence[TransferItem], deadline_seconds: float
    ) -> list[TransferResult]:
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for index, item in enumerate(items):
            groups[item.uri.scheme].append(index)
        deadline = self._clock() + deadline_seconds
        results: dict[int, TransferResult] = {}
        for scheme, indices in groups.items():
            group = [items[index] for index in indices]
            mover = self._movers.get(scheme)
            left_seconds = deadline - self._clock()
            moved = direction(mover, group, left_seconds) if mover else [self._no_mover(scheme)] * len(group)
            results |= zip(indices, moved, strict=True)
        return [results[index] for index in range(len(items))]

    def _no_mover(self, scheme: str) -> TransferResult:
        return not_moved(Failure.REFUSED, f"no mover for scheme {scheme!r}, there is one for {sorted(self._movers)}")


def _load(mover: Mover, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
    return mover.load(items, deadline_seconds)


def _save(mover: Mover, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
    return mover.save(items, deadline_seconds)


def _add(counters: TransferCounters, results: Sequence[TransferResult], *, loaded: bool) -> TransferCounters:
    succeeded = sum(result.ok for result in results)
    moved_bytes = sum(result.moved_bytes for result in results)
    return TransferCounters(
        loaded_items=counters.loaded_items + succeeded * loaded,
        loaded_bytes=counters.loaded_bytes + moved_bytes * loaded,
        saved_items=counters.saved_items + succeeded * (not loaded),
        saved_bytes=counters.saved_bytes + moved_bytes * (not loaded),
        failed_items=counters.failed_items + len(results) - succeeded,
    )
