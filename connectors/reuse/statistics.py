"""Counters and times of a connector, as plain numbers: engines sum them over ranks and export them in their own way.

A snapshot is a mapping `name → number` for counters and `name → [accesses per bucket …, sum of seconds]` for times, so
that it can be sent as JSON or msgpack, and added up by `merged`.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

__all__ = ["BUCKETS_SECONDS", "COUNTERS", "TIMES", "ReuseStatistics", "Snapshot", "Unsaved", "merged"]

_log = logging.getLogger(__name__)


class Unsaved(Enum):
    """Why a computed block is not saved."""

    UNREGISTERED = "the manager has not accepted the registration"
    NO_ANSWER = "the manager did not answer the lookup"
    NO_LEAVE = "the manager gave no leave to write"
    FULL = "the manager had no space for them"
    WAITING = "too many blocks were waiting to be saved"
    GAP = "a block before them was not saved"
    STORAGE = "a storage did not take them"
    UNCONFIRMED = "the manager did not confirm the write session"
    WEIGHTS = "the weights changed, or nothing says which they are"
    LENGTH = "their KV depends on the length of the prompt"

    @property
    def counter(self) -> str:
        """Name of the counter of such blocks."""
        return f"unsaved_{self.name.lower()}_blocks"


Snapshot: TypeAlias = dict[str, int | list[float]]
BUCKETS_SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper ends of the buckets; one more bucket holds longer times."""
COUNTERS: Mapping[str, str] = {
    "lookups": "Lookups that the manager answered",
    "lookups_failed": "Lookups without an answer: a miss",
    "lookups_late": "Lookups that took longer than the engine waits: a miss",
    "lookup_blocks": "Blocks asked for",
    "hit_blocks": "Blocks that the manager knows",
    "loaded_blocks": "Blocks that were loaded and used",
    "loaded_bytes": "Bytes of parts that were loaded",
    "lost_parts": "Parts that were not where the manager said; reported to it",
    "corrupt_parts": "Parts with other bytes than were saved; reported to the manager",
    "failed_parts": "Parts that could not be loaded for another reason",
    "saved_blocks": "Blocks that were saved and published",
    "saved_bytes": "Bytes of parts that were saved",
    "failed_save_blocks": "Blocks that a storage did not take",
    "dropped_save_blocks": "Blocks not saved because too many were waiting, or the manager gave no leave",
    "known_blocks": "Blocks that need not be saved: the manager has them",
    "sessions_finished": "Write sessions that published blocks",
    "sessions_aborted": "Write sessions that published nothing",
    **{reason.counter: f"Blocks not saved: {reason.value}" for reason in Unsaved},
}
TIMES: Mapping[str, str] = {
    "lookup_seconds": "Time of a lookup, as the engine waits for it",
    "load_seconds": "Time of a load of one request",
    "save_seconds": "Time from leave to write to the last byte",
}


class ReuseStatistics:
    """Counters and times of one process; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drained: Snapshot = {}
        self._pending: Snapshot = {}
        self._reported: set[Unsaved] = set()

    def add(self, **counts: int) -> None:
        """Add to counters, by name; see `COUNTERS`."""
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._pending = _add(self._pending, name, count)

    def count_unsaved(self, reason: Unsaved, blocks: int, detail: str = "") -> None:
        """Count blocks that are not saved, and log a warning, once per reason.

        Args:
            reason: why not.
            blocks: how many; nothing happens for 0.
            detail: more about it, for the warning.
        """
        if blocks <= 0:
            return
        is_failure = reason in {Unsaved.STORAGE, Unsaved.UNCONFIRMED}
        self.add(**{reason.counter: blocks, "failed_save_blocks" if is_failure else "dropped_save_blocks": blocks})
        with self._lock:
            is_new = reason not in self._reported
            self._reported.add(reason)
        if is_new:
            _log.warning(
                "%d blocks were not saved: %s%s; later ones are counted as %s",
                blocks,
                reason.value,
                f" ({detail})" if detail else "",
                reason.counter,
            )

    def observe(self, name: str, seconds: float) -> None:
        """Record a duration; see `TIMES`."""
        sample = [0.0] * (len(BUCKETS_SECONDS) + 2)
        sample[bisect_left(BUCKETS_SECONDS, seconds)] = 1.0
        sample[-1] = seconds
        with self._lock:
            self._pending = _add(self._pending, name, sample)

    def total(self) -> Snapshot:
        """Return everything counted so far."""
        with self._lock:
            return merged(self._drained, self._pending)

    def drain(self) -> Snapshot:
        """Return the counts since the last call."""
        with self._lock:
            pending, self._pending = self._pending, {}
            self._drained = merged(self._drained, pending)
            return pending


def merged(first: Snapshot, second: Snapshot) -> Snapshot:
    """Return the sum of two snapshots."""
    for name, value in second.items():
        first = _add(first, name, value)
    return first


def _add(snapshot: Snapshot, name: str, value: int | list[float]) -> Snapshot:
    return {**snapshot, name: _sum(snapshot[name], value) if name in snapshot else value}


def _sum(one: int | list[float], other: int | list[float]) -> int | list[float]:
    if isinstance(one, list) and isinstance(other, list):
        return [first + second for first, second in zip(one, other, strict=True)]
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    raise TypeError(f"{one!r} and {other!r} cannot be added")
