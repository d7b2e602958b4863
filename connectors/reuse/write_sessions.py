"""Write sessions of one engine process: each is started, renewed while its blocks are written, and ended once.

Invariants:

1. Every started session ends: finished with one flag per block, or aborted. `close` aborts the open ones.
2. While it is open it is renewed, at a third of its time, until `max_seconds` after its start; then it expires in the
   manager, whose blocks were never readable. A writer that hangs does not reserve its blocks forever.
3. The thread that removes a session from the table ends it, so it ends once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import WriteGrant
from kvcm.connectors.reuse.statistics import ReuseStatistics, Unsaved
from kvcm.connectors.transfer import CancelToken, TransferEngine, TransferItem, TransferResult
from kvcm.model.keys import BlockKey

__all__ = ["SavedBlocks", "SessionSettings", "WriteSessions", "count_masked", "save_blocks"]

_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How long sessions live.

    Attributes:
        session_seconds: of each start and renewal; the blocks that a killed engine reserved are free after it.
        max_seconds: a session that is open for longer is not renewed any more.
        call_seconds: for each call.
    """

    session_seconds: int = 30
    max_seconds: float = 300.0
    call_seconds: float = 1.0


@dataclass(slots=True)
class _OpenSession:
    started_at: float
    renew_at: float


class WriteSessions:
    """Starts and ends write sessions; safe to use from several threads.

    Args:
        client: of the manager.
        settings: how long sessions live.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        client: ManagerClient,
        settings: SessionSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._open: dict[str, _OpenSession] = {}
        self._changed = threading.Condition()
        self._renewer: threading.Thread | None = None
        self._is_closed = False

    @property
    def count(self) -> int:
        """Sessions that are open."""
        return len(self._open)

    def start(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        part_groups: Sequence[str] = (),
        event_hashes: Sequence[int] = (),
    ) -> WriteGrant | None:
        """Start a session; None: write nothing.

        Args:
            keys: consecutive block keys.
            parent: key before the first one, None when they begin a chain.
            part_groups: none, or per key the name of the group of parts to write.
            event_hashes: none, or per key the number by which the engine's KV events name the block.
        """
        settings = self._settings
        grant = self._client.start_write(
            keys,
            parent_block_key=parent,
            spec_groups=part_groups,
            session_seconds=settings.session_seconds,
            event_hashes=event_hashes,
            timeout_seconds=settings.call_seconds,
        )
        if grant is None:
            return None
        if not grant.locations:
            self._client.abort_write(grant.session_id, timeout_seconds=settings.call_seconds)
            return grant
        if not self._register(grant.session_id):
            self._client.abort_write(grant.session_id, timeout_seconds=settings.call_seconds)
            return None
        return grant

    def finish(self, session_id: str, written: Sequence[bool], checksums: Sequence[Mapping[str, int]] = ()) -> bool:
        """End a session: blocks that were written are published. Returns whether the manager confirmed it.

        Args:
            session_id: of the grant.
            written: one flag per location of the grant.
            checksums: none, or per location those of its parts by name.
        """
        if not self._unregister(session_id):
            return False
        seconds = self._settings.call_seconds
        if not any(written):
            self._client.abort_write(session_id, timeout_seconds=seconds)
            return False
        return self._client.finish_write(session_id, written, checksums=checksums, timeout_seconds=seconds)

    def abort(self, session_id: str) -> None:
        """End a session with nothing written; one that has ended is fine."""
        if self._unregister(session_id):
            self._client.abort_write(session_id, timeout_seconds=self._settings.call_seconds)

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Start no more sessions and abort the open ones within the timeout; the rest expires in the manager."""
        with self._changed:
            self._is_closed = True
            left, self._open = list(self._open), {}
            self._changed.notify()
        deadline = self._clock() + timeout_seconds
        for session_id in left:
            seconds = deadline - self._clock()
            if seconds <= 0:
                break
            self._client.abort_write(session_id, timeout_seconds=seconds)

    def _register(self, session_id: str) -> bool:
        now = self._clock()
        with self._changed:
            if self._is_closed:
                return False
            self._open[session_id] = _OpenSession(now, now + self._settings.session_seconds / 3)
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._renew_loop, name="kvcm-sessions", daemon=True)
                self._renewer.start()
            self._changed.notify()
        return True

    def _unregister(self, session_id: str) -> bool:
        with self._changed:
            return self._open.pop(session_id, None) is not None

    def _renew_loop(self) -> None:
        """Renew sessions when it is time, until the table is closed."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                due = self._due_sessions()
                if not due:
                    self._changed.wait(self._seconds_to_next())
                    continue
            for session_id in due:
                self._client.renew_write(
                    session_id, self._settings.session_seconds, timeout_seconds=self._settings.call_seconds
                )

    def _due_sessions(self) -> list[str]:
        """Return the sessions to renew now, and schedule their next renewal."""
        now, settings = self._clock(), self._settings
        due = [session_id for session_id, session in self._open.items() if session.renew_at <= now]
        for session_id in due:
            session = self._open[session_id]
            is_too_old = now - session.started_at >= settings.max_seconds
            session.renew_at = float("inf") if is_too_old else now + settings.session_seconds / 3
        return [session_id for session_id in due if self._open[session_id].renew_at != float("inf")]

    def _seconds_to_next(self) -> float | None:
        soonest = min((session.renew_at for session in self._open.values()), default=float("inf"))
        return None if soonest == float("inf") else max(0.0, soonest - self._clock())


# ---- saves in the calling thread: start, bytes, finish ----

MemoryOf = Callable[[int, str], Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class SavedBlocks:
    """The result of a save.

    Attributes:
        stored: one flag per key: the block is stored, now or before, or another session is writing it. All false if
            the manager rejected the start, or did not confirm the finish.
        saved: blocks that were saved now.
        saved_bytes: of them.
        reason: why not all blocks are stored, "" when they are.
    """

    stored: tuple[bool, ...]
    saved: int = 0
    saved_bytes: int = 0
    reason: str = ""


def save_blocks(
    sessions: WriteSessions,
    engine: TransferEngine,
    keys: Sequence[BlockKey],
    parent: BlockKey | None,
    memory_of: MemoryOf,
    deadline_seconds: float,
    *,
    part_groups: Sequence[str] = (),
    event_hashes: Sequence[int] = (),
    cancel: CancelToken | None = None,
    statistics: ReuseStatistics | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SavedBlocks:
    """Save the blocks that the manager does not have, and publish them. The session ends on every path.

    Args:
        sessions: for the write session.
        engine: moves the bytes.
        keys: consecutive block keys.
        parent: key before the first one, None when they begin a chain.
        memory_of: returns the memory of a part of a block, by the block's position in `keys` and the part's name; it
            must stay as it is until the call returns.
        deadline_seconds: for the bytes; late blocks are not published.
        part_groups: none, or per key the name of the group of parts to write.
        event_hashes: none, or per key the number by which the engine's KV events name the block.
        cancel: ends the call as its deadline does.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """
    statistics = statistics or ReuseStatistics()
    started = clock()
    grant = sessions.start(keys, parent, part_groups, event_hashes)
    if grant is None:
        statistics.count_unsaved(Unsaved.NO_LEAVE, len(keys))
        return SavedBlocks((False,) * len(keys), reason="no leave to write")
    count_masked(grant, statistics)
    if not grant.locations:
        return SavedBlocks((True,) * len(keys))
    written: list[bool] = []
    checksums: list[Mapping[str, int]] = []
    try:
        written, checksums, reason = _write(
            engine, grant=grant, memory_of=memory_of, deadline_seconds=deadline_seconds, cancel=cancel
        )
    finally:
        is_published = _finish(sessions, grant=grant, written=written, checksums=checksums, statistics=statistics)
    statistics.observe("save_seconds", clock() - started)
    return _saved_blocks(grant, written=written, is_published=is_published, reason=reason, statistics=statistics)


def _write(
    engine: TransferEngine,
    grant: WriteGrant,
    memory_of: MemoryOf,
    deadline_seconds: float,
    cancel: CancelToken | None,
) -> tuple[list[bool], list[Mapping[str, int]], str]:
    """Return per location whether it was written and its checksums, and the first reason for one that was not."""
    wanted = [index for index, is_masked in enumerate(grant.mask) if not is_masked]
    places = [
        (number, name, TransferItem(uri, memory_of(index, name)))
        for number, (index, location) in enumerate(zip(wanted, grant.locations, strict=True))
        for name, uri in location.uris.items()
    ]
    results = engine.save([item for _, _, item in places], deadline_seconds, cancel)
    outcomes: list[dict[str, TransferResult]] = [{} for _ in grant.locations]
    for (number, name, _), result in zip(places, results, strict=True):
        outcomes[number][name] = result
    written = [all(result.ok for result in parts.values()) for parts in outcomes]
    checksums = [{name: result.checksum for name, result in parts.items() if result.checksum} for parts in outcomes]
    return written, list(checksums), next((result.reason for result in results if not result.ok), "")


def _finish(
    sessions: WriteSessions,
    grant: WriteGrant,
    written: Sequence[bool],
    checksums: Sequence[Mapping[str, int]],
    statistics: ReuseStatistics,
) -> bool:
    if not any(written):
        sessions.abort(grant.session_id)
        statistics.add(sessions_aborted=1)
        return False
    is_published = sessions.finish(grant.session_id, written, checksums)
    statistics.add(sessions_finished=int(is_published), sessions_aborted=int(not is_published))
    return is_published


def _fitting_blocks(grant: WriteGrant) -> int:
    """Return how many of the first blocks have space: masked ones behind the last block to write do not fit."""
    if not grant.refusal or not grant.locations:
        return len(grant.mask)
    return len(grant.mask) - grant.mask[::-1].index(False)


def count_masked(grant: WriteGrant, statistics: ReuseStatistics) -> None:
    """Count the blocks that the manager has, and those that it has no space for."""
    end = _fitting_blocks(grant)
    statistics.add(known_blocks=sum(grant.mask[:end]))
    statistics.count_unsaved(Unsaved.FULL, len(grant.mask) - end, grant.refusal)


def _saved_blocks(
    grant: WriteGrant, written: Sequence[bool], is_published: bool, reason: str, statistics: ReuseStatistics
) -> SavedBlocks:
    if not is_published and not reason:
        reason = "the write session was not confirmed"
    flags = iter(written)
    stored = [is_masked or (next(flags) and is_published) for is_masked in grant.mask]
    end = _fitting_blocks(grant)
    stored[end:] = [False] * (len(stored) - end)
    sizes = [sum(uri.size for uri in location.uris.values()) for location in grant.locations]
    saved = sum(written) if is_published else 0
    saved_bytes = sum(size for size, is_written in zip(sizes, written, strict=True) if is_written) if saved else 0
    statistics.add(saved_blocks=saved, saved_bytes=saved_bytes)
    statistics.count_unsaved(Unsaved.STORAGE, len(grant.locations) - sum(written), reason)
    statistics.count_unsaved(Unsaved.UNCONFIRMED, sum(written) - saved)
    return SavedBlocks(tuple(stored), saved, saved_bytes, reason or grant.refusal)
