"""Probes of the open storages: each by itself, so that one that hangs holds up no other.

Every manager probes its open storages, whether it leads or not: each has its own view of a mount. Of a storage at most
one probe is under way. One that hangs is left to hang, since nothing can take it back from the medium; meanwhile it
counts as late again and again, and no other is begun. Disabled storages are probed, too, so that an administrator sees
whether it can be enabled again.

A look decides, for every storage, whether a probe is due or late. Looks never wait for a medium. Storages are opened
many at a time, when a manager starts: so that their probes do not all run at once ever after, a look begins a part of
them only, the longest overdue first; each continues from there at its own time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError
from kvcm.storage.backend import NotHereError, StorageBackend, StorageSpace, is_full, is_unwritable
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.free_margin import NO_MARGIN, FreeMargin
from kvcm.storage.health import HealthRules, HealthState, Probe, ProbeOutcome, StorageHealth
from kvcm.telemetry.metrics import Distribution, Histogram

__all__ = ["Prober"]

_RETRY_SECONDS = 1.0  # of a storage that is not UP: three failures in a row are seen within some three seconds
_TICK_SECONDS = 0.1
_AT_ONCE = 8  # probes that one look begins,
_PART = 5  # or this part of all, where they are more: twice as many while none is UP
_log = structlog.get_logger("kvcm.storage")


@dataclass(slots=True, eq=False)
class _Watch:
    """The probes of one open storage; the next storage of that name has another.

    Attributes:
        backend: the storage.
        next_at: when the next probe is due, or the one under way counts as late.
        began_at: when the last probe began.
        probe: under way.
        is_late: whether that one was counted already.
    """

    backend: StorageBackend
    next_at: float
    began_at: float = 0.0
    probe: asyncio.Task[None] | None = None
    is_late: bool = False


class Prober:
    """Keeps the health of storages up to date.

    Args:
        storages: the open storages; receives their health.
        clock: time source.
        interval_seconds: between probes of a storage that is UP; of others at most a second.
        timeout_seconds: after that a probe is late.
        rules: when a storage changes its state.
        margin: returns what of a storage's medium is to stay free, given its space.
        on_full: called with every storage that a probe found full.
    """

    def __init__(
        self,
        storages: StorageDirectory,
        clock: Clock,
        interval_seconds: float,
        timeout_seconds: float,
        rules: HealthRules | None = None,
        *,
        margin: Callable[[str, StorageSpace], FreeMargin] = lambda _storage, _space: NO_MARGIN,
        on_full: Callable[[str], None] = lambda _storage: None,
    ) -> None:
        self._storages = storages
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._rules = rules or HealthRules()
        self._margin = margin
        self._on_full = on_full
        self._watches: dict[str, _Watch] = {}
        self._durations: defaultdict[str, Histogram] = defaultdict(Histogram)

    def set_times(self, interval_seconds: float, timeout_seconds: float) -> None:
        """Probe at another pace from now on; a probe that is under way keeps its time."""
        self._interval_seconds, self._timeout_seconds = interval_seconds, timeout_seconds
        latest = self._clock.now() + interval_seconds
        for watch in self._watches.values():
            if watch.probe is None:
                watch.next_at = min(watch.next_at, latest)

    def durations(self, storage: str) -> Distribution:
        """Return how long the probes of a storage took, so far those that are late, in seconds."""
        return self._durations[storage].read() if storage in self._watches else Histogram().read()

    async def run(self) -> None:
        """Probe for good."""
        try:
            while True:
                self.start_due()
                await asyncio.sleep(min(_TICK_SECONDS, self._interval_seconds))
        finally:
            self.stop()

    def start_due(self) -> None:
        """Begin the probes that are due, and count those that are late."""
        now = self._clock.now()
        self._sync_watches(now)
        due = [(name, watch) for name, watch in self._watches.items() if watch.next_at <= now]
        for name, watch in due:
            if watch.probe is not None:
                watch.is_late = True
                seconds = now - watch.began_at
                self._record(name, watch, Probe(ProbeOutcome.LATE, seconds, f"no answer for {seconds:.1f} s"))
        waiting = sorted((each for each in due if each[1].probe is None), key=lambda each: each[1].next_at)
        for name, watch in waiting[: self._most_at_once]:
            watch.is_late, watch.began_at, watch.next_at = False, now, now + self._timeout_seconds
            watch.probe = asyncio.create_task(self._probe(name, watch))

    @property
    def _most_at_once(self) -> int:
        count = len(self._watches)
        return count if self._interval_seconds < _RETRY_SECONDS else max(_AT_ONCE, count // _PART)

    def stop(self) -> None:
        """Forget everything; what hangs is left to itself."""
        for watch in self._watches.values():
            _abandon(watch)
        self._watches.clear()

    def _sync_watches(self, now: float) -> None:
        """Watch the open storages, each from its beginning."""
        is_open = self._storages.open_backends()
        for name, watch in list(self._watches.items()):
            if is_open.get(name) is not watch.backend:
                _abandon(self._watches.pop(name))
                self._durations.pop(name, None)
        for name, backend in is_open.items():
            if name not in self._watches:
                self._watches[name] = _Watch(backend, now)

    async def _probe(self, name: str, watch: _Watch) -> None:
        space, reason, end, full = None, "", ProbeOutcome.ANSWERED, False
        try:
            await watch.backend.probe()
            space = await watch.backend.space()
        except NotHereError as error:
            reason, end = str(error), ProbeOutcome.NOT_HERE
        except Exception as error:  # whatever it raises, it cannot be used
            reason = str(error) if isinstance(error, KvcmError) else f"{type(error).__name__}: {error}"
            end, full = ProbeOutcome.UNWRITABLE if is_unwritable(error) else ProbeOutcome.FAILED, is_full(error)
        if full:
            with suppress(Exception):  # how full it is helps, and is no condition
                space = await watch.backend.space()
        probe = Probe(end, self._clock.now() - watch.began_at, reason, space, is_full=full)
        watch.probe = None
        if watch.is_late:  # it counted; what it says now is about a time long past
            watch.next_at = self._clock.now()
        else:
            self._record(name, watch, probe)

    def _record(self, name: str, watch: _Watch, probe: Probe) -> None:
        before = self._storages.health(name)  # with what writes found out since the last probe
        if before is None or self._storages.backend(name) is not watch.backend:
            return  # it was closed or replaced a moment ago, and is not watched any more with the next look
        now = self._clock.now()
        if shortage := self._shortage(name, before, probe):
            probe = probe._replace(reason=shortage, is_full=True)
        health = before.after(probe, now, self._rules)
        is_up = health.state is HealthState.SH_UP
        watch.next_at = now + (self._interval_seconds if is_up else min(self._interval_seconds, _RETRY_SECONDS))
        self._storages.set_health(name, health)
        if health.state is not before.state:
            log = _log.info if is_up else _log.warning
            log("storage_health", storage=name, state=health.state.label, reason=health.reason)
        self._durations[name].observe(probe.seconds)
        if health.is_full:
            self._on_full(name)

    def _shortage(self, name: str, before: StorageHealth, probe: Probe) -> str:
        """Return why a medium that answered well is full nevertheless, "" where it is not."""
        if probe.outcome is not ProbeOutcome.ANSWERED or probe.space is None:
            return ""
        margin = self._margin(name, probe.space)
        reason = margin.shortage(probe.space, was_full=before.is_full)
        return f"storage {name} is full: {reason}" if reason else ""

    def expedite(self, name: str) -> None:
        """Probe a storage soon, since writes of engines failed there: a second after the last probe at the earliest."""
        watch = self._watches.get(name)
        if watch is not None and watch.probe is None:
            watch.next_at = min(watch.next_at, watch.began_at + _RETRY_SECONDS)


def _abandon(watch: _Watch) -> None:
    if watch.probe is not None:
        watch.probe.cancel()
