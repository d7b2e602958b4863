"""Pages and bandwidth of single loads and saves, as SGLang shows them."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

__all__ = ["Operation", "OperationFigures"]

_MOST = 4096  # nobody may ask, and then old ones are of no use


class Operation(NamedTuple):
    """One load or save.

    Attributes:
        pages: that moved.
        gigabytes_per_second: that they moved with.
    """

    pages: int
    gigabytes_per_second: float


class OperationFigures:
    """Collects operations until they are taken; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: deque[Operation] = deque(maxlen=_MOST)
        self._saves: deque[Operation] = deque(maxlen=_MOST)

    def loaded(self, pages: int, size_bytes: int, seconds: float) -> None:
        """Note a load; one without pages does not count."""
        self._add(self._loads, pages, size_bytes, seconds)

    def saved(self, pages: int, size_bytes: int, seconds: float) -> None:
        """Note a save; one without pages does not count."""
        self._add(self._saves, pages, size_bytes, seconds)

    def take(self) -> tuple[list[Operation], list[Operation]]:
        """Return loads and saves since the last call."""
        with self._lock:
            loads, saves = list(self._loads), list(self._saves)
            self._loads.clear()
            self._saves.clear()
        return loads, saves

    def _add(self, operations: deque[Operation], pages: int, size_bytes: int, seconds: float) -> None:
        if pages > 0 and seconds > 0:
            with self._lock:
                operations.append(Operation(pages, size_bytes / seconds / 1e9))
