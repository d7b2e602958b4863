"""Finds the segment of a memory pool by its name, again and again: it may come later than we, go, and come back."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from connectors.transfer.pool_making import make_segment, open_segment
from connectors.transfer.pool_segment import PoolSegment
from kvcm.model.errors import StorageIOError

__all__ = ["PoolAccess"]

_RETRY_SECONDS = 1.0


def _new_generation() -> int:
    return secrets.randbits(64)


class PoolAccess:
    """The segment under one name. Safe to use from several threads.

    Args:
        path: of the segment.
        capacity_bytes: that it must have.
        creates: make it when it is missing.
        clock: seconds of a clock that never runs backwards.
        new_generation: draws 64 random bits.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        creates: bool = True,
        clock: Callable[[], float] = time.monotonic,
        new_generation: Callable[[], int] = _new_generation,
    ) -> None:
        self.path = path
        self._capacity_bytes = capacity_bytes
        self._creates = creates
        self._clock = clock
        self._new_generation = new_generation
        self._attached: PoolSegment | None = None
        self._attaching = threading.Lock()
        self._making = threading.Lock()
        self._failure = (0.0, "")  # when making may be tried again, and why it failed

    @property
    def attached(self) -> PoolSegment | None:
        """The segment that was there when somebody last looked."""
        return self._attached

    def find(self) -> PoolSegment | None:
        """Return the segment that is there, None when there is none.

        Raises:
            StorageIOError: what is there cannot be used.
        """
        segment = self._attached
        if segment is not None and segment.is_at(self.path):
            return segment
        with self._attaching:
            if self._attached is None or not self._attached.is_at(self.path):
                self._attached = None  # also when opening fails
                self._attached = open_segment(self.path, self._capacity_bytes)
            return self._attached

    def find_or_make(self) -> PoolSegment:
        """Return the segment that is there, or a new one; a failure is remembered for a second.

        Raises:
            StorageIOError: there is none and none could be made, or what is there cannot be used.
        """
        segment = self.find()
        if segment is None:
            self._make()
            segment = self.find()
        if segment is None:
            raise StorageIOError(f"memory pool {self.path}: it was removed as soon as it was made")
        return segment

    def close(self) -> None:
        """Let go of the memory; it stays mapped as long as somebody copies."""
        with self._attaching:
            self._attached = None

    def _make(self) -> None:
        if not self._creates:
            raise StorageIOError(f"memory pool {self.path}: it is not there, is the host agent running?")
        if not self._making.acquire(blocking=False):
            raise StorageIOError(f"memory pool {self.path}: it is being made")
        try:
            self._make_unless_failed()
        finally:
            self._making.release()

    def _make_unless_failed(self) -> None:
        retry_at, reason = self._failure
        if reason and self._clock() < retry_at:
            raise StorageIOError(reason)
        try:
            make_segment(self.path, self._capacity_bytes, self._new_generation)
        except StorageIOError as error:
            self._failure = (self._clock() + _RETRY_SECONDS, str(error))
            raise
        self._failure = (0.0, "")
