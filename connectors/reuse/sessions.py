"""Write sessions of one engine process: each is begun, kept alive while its blocks are written, and ended once.

Invariants:

1. A session that was begun ends: finished with one flag per block, or aborted. `close` aborts what is still open.
2. While it is open it is renewed, at a third of its time, until `most_seconds` after its begin; then it expires in the
   manager, whose blocks were never readable. A writer that hangs does not hold its blocks for ever.
3. A session is ended by whoever takes it out of the table, so nobody ends it twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from connectors.client import ManagerClient
from connectors.results import WriteGrant
from kvcm.model.keys import BlockKey

__all__ = ["SessionSettings", "WriteSessions"]

_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How long sessions live.

    Attributes:
        session_seconds: time that the manager is asked for at a time; what a killed engine reserves is free after it.
        most_seconds: a session that is open for longer is not renewed any more.
        call_seconds: for each call.
    """

    session_seconds: int = 30
    most_seconds: float = 300.0
    call_seconds: float = 1.0


@dataclass(slots=True)
class _Open:
    begun_at: float
    renew_at: float


class WriteSessions:
    """Begins and ends write sessions; safe to use from several threads.

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
        self._open: dict[str, _Open] = {}
        self._changed = threading.Condition()
        self._keeper: threading.Thread | None = None
        self._is_closed = False

    @property
    def count(self) -> int:
        """Sessions that are open."""
        return len(self._open)

    def begin(
        self, keys: Sequence[BlockKey], parent: BlockKey | None, part_groups: Sequence[str] = ()
    ) -> WriteGrant | None:
        """Ask for leave to write blocks; None: write nothing.

        Args:
            keys: consecutive block keys.
            parent: key before the first one, None when they begin a chain.
            part_groups: none, or per key the name of the group of parts to write.
        """
        settings = self._settings
        grant = self._client.start_write(
            keys,
            parent_block_key=parent,
            spec_groups=part_groups,
            session_seconds=settings.session_seconds,
            timeout_seconds=settings.call_seconds,
        )
        if grant is None:
            return None
        if not grant.locations:
            self._client.abort_write(grant.session_id, timeout_seconds=settings.call_seconds)
            return grant
        if not self._enter(grant.session_id):
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
        if not self._leave(session_id):
            return False
        seconds = self._settings.call_seconds
        if not any(written):
            self._client.abort_write(session_id, timeout_seconds=seconds)
            return False
        return self._client.finish_write(session_id, written, checksums=checksums, timeout_seconds=seconds)

    def abort(self, session_id: str) -> None:
        """End a session with nothing written; one that has ended is fine."""
        if self._leave(session_id):
            self._client.abort_write(session_id, timeout_seconds=self._settings.call_seconds)

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Begin nothing more and abort what is open, as far as the time allows; the rest expires in the manager."""
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

    def _enter(self, session_id: str) -> bool:
        now = self._clock()
        with self._changed:
            if self._is_closed:
                return False
            self._open[session_id] = _Open(now, now + self._settings.session_seconds / 3)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="kvcm-sessions", daemon=True)
                self._keeper.start()
            self._changed.notify()
        return True

    def _leave(self, session_id: str) -> bool:
        with self._changed:
            return self._open.pop(session_id, None) is not None

    def _keep(self) -> None:
        """Renew sessions when it is time, until the table is closed."""
        while True:
            with self._changed:
                if self._is_closed:
                    return
                due = self._due()
                if not due:
                    self._changed.wait(self._seconds_to_next())
                    continue
            for session_id in due:
                self._client.renew_write(
                    session_id, self._settings.session_seconds, timeout_seconds=self._settings.call_seconds
                )

    def _due(self) -> list[str]:
        """Return the sessions to renew now, and note when the next time is."""
        now, settings = self._clock(), self._settings
        due = [session_id for session_id, session in self._open.items() if session.renew_at <= now]
        for session_id in due:
            session = self._open[session_id]
            is_too_old = now - session.begun_at >= settings.most_seconds
            session.renew_at = float("inf") if is_too_old else now + settings.session_seconds / 3
        return [session_id for session_id in due if self._open[session_id].renew_at != float("inf")]

    def _seconds_to_next(self) -> float | None:
        soonest = min((session.renew_at for session in self._open.values()), default=float("inf"))
        return None if soonest == float("inf") else max(0.0, soonest - self._clock())
