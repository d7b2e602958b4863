"""Reports the blocks of one rank to one manager: a stream of changes, and a snapshot where the manager asks for one.

A stream begins empty: its first report is an empty snapshot, so that the manager drops all that an earlier stream of
this rank reported. The blocks that are held (`HeldBlocks`) are the truth, and changes are collected by block, the last
one counts; so the order between a change and a part of a snapshot does not matter. Invariants:

1. One report is in flight. Until it is answered it is repeated as it is: a manager ignores a number that it has seen.
2. When all pending changes and the rest of a snapshot are sent, the manager has exactly the blocks that are held.
3. There are at most `most_pending` pending changes. With more of them (the manager is away) they are dropped, and a
   snapshot follows.
4. When it is not known which blocks an engine holds, a new stream begins: no block of the old one is left over.
5. Within a heartbeat's time there is a report without changes, however many changes there are: its answer says which
   manager it is, and names the others. After a failure it is the next one, since another manager may have the address.

A stream whose first blocks are not known reports a snapshot all the same. It leaves out what it does not know: the
manager then takes the engine to hold less than it does, and never more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvcm.connectors.calls import new_trace_id
from kvcm.connectors.events.blocks import Change, HeldBlocks, Memory
from kvcm.model.errors import ErrorCode
from kvcm.model.key_schemes import KeyScheme
from kvcm.model.keys import BlockKey
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

__all__ = ["Reporter", "ReporterCounters", "ReporterIdentity", "ReporterSettings", "run_reporter"]

_FIRST_TIMEOUT_SECONDS: Final = 10.0
"""Of the manager, until its first answer says."""

_HEARTBEATS: Final = 3
"""Within the manager's timeout."""

_MAX_SNAPSHOT_SECONDS: Final = 60.0
"""Between two snapshots of which the first was in vain."""

_MAX_PAUSE_SECONDS: Final = 30.0
_OK: Final = int(ErrorCode.OK)


@dataclass(frozen=True, slots=True)
class ReporterIdentity:
    """The rank that is reported.

    Attributes:
        instance_id: instance whose blocks it holds.
        engine: `host:port`, as routers call it.
        rank: data-parallel rank.
        scheme: of its block keys.
    """

    instance_id: str
    engine: str
    rank: int
    scheme: KeyScheme

    def __str__(self) -> str:
        scheme = self.scheme
        keys = f"{scheme.algorithm}, mask {scheme.mask}, blocks of {scheme.block_tokens} tokens"
        return f"engine {self.engine} rank {self.rank} ({keys})"


@dataclass(frozen=True, slots=True)
class ReporterSettings:
    """Sizes and times of reports.

    Attributes:
        batch_keys: changes that are sent at once; a manager takes 8,192.
        batch_seconds: how long fewer changes wait for more.
        snapshot_keys: blocks of one part of a snapshot.
        most_pending: changes that are kept for a manager that does not answer.
        snapshot_seconds: least time between two snapshots; it doubles while they are in vain.
        retry_seconds: pause after a report that failed; it doubles.
    """

    batch_keys: int = 4096
    batch_seconds: float = 0.05
    snapshot_keys: int = 8192
    most_pending: int = 262_144
    snapshot_seconds: float = 1.0
    retry_seconds: float = 0.1


@dataclass(slots=True)
class ReporterCounters:
    """Counts since the start of the process."""

    reports: int = 0
    failures: int = 0
    snapshots: int = 0
    overflows: int = 0
    streams: int = 0


class _Pending:
    """Changes by block, the last one of each, behind a clear of everything."""

    def __init__(self) -> None:
        self._changes: dict[Memory, dict[BlockKey, bool]] = {}
        self.cleared: list[pb.Medium] = []
        self.count = 0

    def __bool__(self) -> bool:
        return bool(self.count or self.cleared)

    def add(self, change: Change) -> None:
        if change.memory is None:
            self.drop()
            self.cleared = [pb.MEDIUM_GPU, pb.MEDIUM_HOST, pb.MEDIUM_DISK]
            return
        changes = self._changes.setdefault(change.memory, {})
        before = len(changes)
        changes[change.key] = change.is_added
        self.count += len(changes) - before

    def drop(self) -> None:
        self._changes.clear()
        self.cleared = []
        self.count = 0

    def take(self, most: int) -> list[pb.ResidencyChange]:
        """Remove the clear and so many changes, and return them as messages."""
        found = [pb.ResidencyChange(medium=medium, cleared=True) for medium in self.cleared]
        self.cleared = []
        for memory in list(self._changes):
            changes = self._changes[memory]
            taken = [changes.popitem() for _ in range(min(most, len(changes)))]
            if not changes:
                del self._changes[memory]
            most -= len(taken)
            self.count -= len(taken)
            removed = [key for key, is_added in taken if not is_added]
            added = [key for key, is_added in taken if is_added]
            found.append(_change(memory, removed=removed, added=added))
            if not most:
                break
        return found


class Reporter:
    """One stream of reports after the other. Not safe to use from several threads without a lock.

    Args:
        identity: of the rank.
        blocks: that it holds.
        settings: sizes and times.
        new_stream: makes a random name.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        counters: of what happened.
        last_answer_at: of the clock; before the first answer, when the reporter was made.
        resident_blocks: as the manager counts them.
        error: why the last report failed, "" when it did not.
    """

    def __init__(
        self,
        identity: ReporterIdentity,
        blocks: HeldBlocks,
        settings: ReporterSettings,
        new_stream: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._blocks = blocks
        self._settings = settings
        self._new_stream = new_stream
        self._clock = clock
        self.counters = ReporterCounters()
        self.last_answer_at = clock()
        self.resident_blocks = 0
        self.error = ""
        self._pending = _Pending()
        self._pending_since = 0.0
        self._in_flight: pb.ReportResidencyRequest | None = None
        self._heartbeat_seconds = _FIRST_TIMEOUT_SECONDS / _HEARTBEATS
        self._asked_at = clock()  # by a report without changes
        self._retry_at = 0.0
        self._pause_seconds = settings.retry_seconds
        self._is_stopping = self._is_stopped = False
        self._stream = ""
        self._sequence = 0
        self._needs_snapshot = True
        self._parts: Iterator[list[tuple[Memory, BlockKey]]] | None = None  # of the snapshot that is being sent
        self._takes_part = True  # the last report was a part
        self._next_snapshot_at = 0.0
        self._snapshot_seconds = settings.snapshot_seconds
        self._begin_stream()

    @property
    def pending(self) -> int:
        """Number of changes that are not sent yet."""
        return self._pending.count

    @property
    def is_stopped(self) -> bool:
        """Whether the manager knows that the engine is gone, so that nothing is reported."""
        return self._is_stopped

    @property
    def is_settled(self) -> bool:
        """Whether the manager has exactly the blocks that are held."""
        is_sent = not self._pending and self._in_flight is None and not self._needs_snapshot
        return is_sent and self._parts is None and not self._is_stopping

    def on_changes(self, changes: Sequence[Change]) -> None:
        """Blocks changed."""
        if self._is_stopped or self._is_stopping or (self._needs_snapshot and self._parts is None):
            return  # the snapshot has them
        if not self._pending:
            self._pending_since = self._clock()
        for change in changes:
            self._pending.add(change)
        if self._pending.count > self._settings.most_pending:
            self.counters.overflows += 1
            self._pending.drop()
            self._parts = None
            self._needs_snapshot = True

    def reset(self) -> None:
        """Begin a new stream: it is not known any more what the engine holds, or it is another run of the engine."""
        self._begin_stream()

    def stop(self) -> None:
        """Report that the engine is gone; nothing else is reported until `reset`."""
        if not self._is_stopped:
            self._is_stopping = True
            self._pending.drop()
            self._needs_snapshot, self._parts = False, None

    def seconds_to_next(self) -> float:
        """Return the time until there is something to send, 0 for now."""
        now = self._clock()
        if self._in_flight is not None:
            return max(0.0, self._retry_at - now)
        if self._is_stopped:
            return self._heartbeat_seconds
        due = [self._asked_at + self._heartbeat_seconds]
        if self._is_stopping or self._parts is not None or self._pending.count >= self._settings.batch_keys:
            due.append(now)
        if self._needs_snapshot:
            due.append(self._next_snapshot_at)
        if self._pending:
            due.append(self._pending_since + self._settings.batch_seconds)
        return max(0.0, min(due) - now)

    def next_report(self) -> pb.ReportResidencyRequest | None:
        """Return what to send now, None for nothing. It is answered by `on_answer` or `on_failure`."""
        if self.seconds_to_next() > 0 or (self._is_stopped and self._in_flight is None):
            return None
        if self._in_flight is None:
            self._in_flight = self._make_report()
        if not self._in_flight.changes:
            self._asked_at = self._clock()
        return self._in_flight

    def on_answer(self, request: pb.ReportResidencyRequest, answer: pb.ReportResidencyResponse) -> None:
        """The manager answered a report."""
        if request is not self._in_flight:
            return  # of a stream that is over
        if answer.header.status.code != _OK:
            self.on_failure(request, f"the manager refuses the report: {answer.header.status.message}")
            return
        self.counters.reports += 1
        self.error = ""
        self._in_flight = None
        self._pause_seconds = self._settings.retry_seconds
        self.last_answer_at = self._clock()
        self.resident_blocks = answer.resident_blocks
        if answer.timeout_ms > 0:
            self._heartbeat_seconds = answer.timeout_ms / 1000 / _HEARTBEATS
        if request.stopped:
            self._is_stopping, self._is_stopped = False, True
        elif not answer.snapshot_required:
            self._snapshot_seconds = self._settings.snapshot_seconds
        elif self._parts is None and not self._needs_snapshot:
            self._needs_snapshot = True
            self._pending.drop()  # the snapshot has them

    def on_failure(self, request: pb.ReportResidencyRequest, reason: str) -> None:
        """A report was not answered, or refused: it is repeated after a pause."""
        if request is not self._in_flight:
            return
        self.counters.failures += 1
        self.error = reason
        self._asked_at = -math.inf
        self._retry_at = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)

    def _begin_stream(self) -> None:
        self.counters.streams += 1
        self._stream = self._new_stream()
        self._sequence = 0
        self._pending.drop()
        self._in_flight = None
        self._is_stopping = self._is_stopped = False
        self._needs_snapshot = True
        self._parts = None
        self._next_snapshot_at = 0.0
        self._takes_part = True
        self._asked_at = -math.inf

    def _make_report(self) -> pb.ReportResidencyRequest:
        identity = self._identity
        self._sequence += 1
        report = pb.ReportResidencyRequest(
            trace_id=new_trace_id(),
            instance_id=identity.instance_id,
            engine=identity.engine,
            rank=identity.rank,
            stream=self._stream,
            sequence=self._sequence,
        )
        if self._is_stopping:
            report.stopped = True
        elif self._asks_now():
            pass  # without changes
        elif self._takes_part_now():
            self._add_part(report)
        else:
            report.changes.extend(self._pending.take(self._settings.batch_keys))
            self._pending_since = self._clock()
        if self._sequence == 1 or report.snapshot.first:  # a manager that asks for a snapshot may have forgotten it
            report.key_scheme.CopyFrom(_key_scheme(identity.scheme))
        return report

    def _asks_now(self) -> bool:
        """Return whether a report without changes is next: a snapshot in parts may take minutes, too. A stream begins
        with its snapshot, which drops the blocks of the one before."""
        return self._sequence > 1 and self._clock() >= self._asked_at + self._heartbeat_seconds

    def _takes_part_now(self) -> bool:
        """Return whether a part of a snapshot is next; changes go in between, so that they do not get old."""
        if self._parts is None:
            return self._needs_snapshot and self._clock() >= self._next_snapshot_at
        self._takes_part = not self._takes_part or not self._pending
        return self._takes_part

    def _add_part(self, report: pb.ReportResidencyRequest) -> None:
        if self._parts is None:
            report.snapshot.first = True
            self._needs_snapshot = False
            self._parts = _cut(self._blocks.pairs(), self._settings.snapshot_keys)
            self.counters.snapshots += 1
        part = next(self._parts)
        if len(part) < self._settings.snapshot_keys:
            report.snapshot.last = True
            self._parts = None
            # A manager that has no memory for a snapshot asks for another one.
            self._next_snapshot_at = self._clock() + self._snapshot_seconds
            self._snapshot_seconds = min(2 * self._snapshot_seconds, _MAX_SNAPSHOT_SECONDS)
        else:
            report.snapshot.SetInParent()
        by_memory: dict[Memory, list[BlockKey]] = {}
        for memory, key in part:
            if self._blocks.holds(memory, key):  # it may be gone since the snapshot began
                by_memory.setdefault(memory, []).append(key)
        report.changes.extend([_change(memory, added=keys) for memory, keys in by_memory.items()])


def _cut(pairs: Sequence[tuple[Memory, BlockKey]], size: int) -> Iterator[list[tuple[Memory, BlockKey]]]:
    """Yield the pairs in parts; the last one is not full, and may be empty."""
    for start in range(0, len(pairs) + 1, size):
        yield list(pairs[start : start + size])


def _change(memory: Memory, removed: Iterable[BlockKey] = (), added: Iterable[BlockKey] = ()) -> pb.ResidencyChange:
    return pb.ResidencyChange(
        medium=memory.medium,
        spec_name=memory.spec_name,
        removed_keys=_packed(list(removed)),
        added_keys=_packed(list(added)),
    )


def _packed(keys: Sequence[BlockKey]) -> bytes:
    return np.array(keys, "<i8").tobytes()


def _key_scheme(scheme: KeyScheme) -> pb.KeyScheme:
    return pb.KeyScheme(
        algorithm=scheme.algorithm, root=scheme.root, mask=scheme.mask, block_tokens=scheme.block_tokens
    )


# ---- the thread ----

Send = Callable[[pb.ReportResidencyRequest], "pb.ReportResidencyResponse | str"]
"""Sends a report: its answer, or why there is none."""


def run_reporter(
    reporter: Reporter,
    changed: threading.Condition,
    send: Send,
    stop: threading.Event,
    *,
    says_stopped: Callable[[], bool] = lambda: True,
    most_seconds: float = 1.0,
) -> None:
    """Send reports until `stop` is set, and then that the engine stopped.

    Args:
        reporter: what to send.
        changed: its lock, notified when there may be something to send.
        send: sends, without the lock.
        stop: ends it.
        says_stopped: whether there is a last report.
        most_seconds: between two checks of `stop`.
    """
    while not stop.is_set():
        if not _send_next(reporter, changed, send):
            with changed:
                changed.wait(min(most_seconds, reporter.seconds_to_next()))
    if not says_stopped():
        return
    with changed:
        reporter.stop()
    while _send_next(reporter, changed, send):  # a report in flight, then the last one; a failure ends it
        pass


def _send_next(reporter: Reporter, changed: threading.Condition, send: Send) -> bool:
    """Send the next report; return whether there was one."""
    with changed:
        request = reporter.next_report()
    if request is None:
        return False
    answer = send(request)
    with changed:
        if isinstance(answer, str):
            reporter.on_failure(request, answer)
        else:
            reporter.on_answer(request, answer)
    return True
