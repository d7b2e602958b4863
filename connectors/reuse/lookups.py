"""Lookups that an engine's scheduler does not wait for: started early, polled later, a miss when late.

Invariants:

1. No method blocks: threads of `Lookups` call the manager.
2. A lookup without an answer by its deadline is a miss, and so is one that starts while the breaker is open: then no
   thread is used, except by the probe.
3. Every read lease is released when the last request that uses it ends, and no prefix is returned that might outlive
   its lease.
4. Requests with the same keys share one call for `share_seconds`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from kvcm.connectors.calls import use_trace_id
from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import EncodedMatch, MatchMode, Outcome
from kvcm.connectors.reuse.registration import ManagerLink
from kvcm.connectors.reuse.statistics import ReuseStatistics
from kvcm.connectors.transfer.worker_pool import PRIORITY_LOAD, PRIORITY_SAVE, WorkerPool
from kvcm.model.errors import ErrorCode
from kvcm.model.keys import BlockKey

__all__ = ["FoundPrefix", "LookupPlan", "LookupSettings", "Lookups"]

_MAX_LEASE_SECONDS = 600.0
_MAX_QUEUEING = 4  # times what an answer may take
_RELEASE_SECONDS = 0.1  # leases that end within it are released with one call


class LookupPlan(NamedTuple):
    """The parts that a block must have to be a hit.

    Attributes:
        parts: needed of every block.
        window_parts: needed of the last `window` blocks alone: the KV that sliding-window layers keep.
        window: blocks that a sliding window reaches back from the end of the prefix; 0 without `window_parts`.
        state_parts: needed of the last block alone: linear-attention state.
    """

    parts: tuple[str, ...]
    window_parts: tuple[str, ...] = ()
    window: int = 0
    state_parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The longest prefix that can be used.

    Attributes:
        blocks: how many.
        locations: of each of them, encoded, with `parts`, and in the last one `state_parts`.
        window_locations: of the last ones, with `window_parts`.
        is_answered: whether a manager answered; if not, nothing is known.
        may_save: whether a manager is there to save to: a late one is, and knows which blocks are stored.
        usable_until: of the clock; nothing may be read later.
        lease_ids: read leases that keep it readable until then.
    """

    blocks: int = 0
    locations: tuple[bytes, ...] = ()
    window_locations: tuple[bytes, ...] = ()
    is_answered: bool = True
    may_save: bool = True
    usable_until: float = float("inf")
    lease_ids: tuple[str, ...] = ()


_NO_ANSWER = FoundPrefix(is_answered=False, may_save=False)
_LATE = FoundPrefix(is_answered=False)
_UNKNOWN_INSTANCE = FoundPrefix(is_answered=False, may_save=False, usable_until=0.0)


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """Deadlines of lookups.

    Attributes:
        lookup_seconds: for the answer.
        load_seconds: for loading the prefix; the lease lasts a little longer.
        share_seconds: how long an answer is shared with requests with the same keys.
        threads: calls at once.
    """

    lookup_seconds: float = 0.25
    load_seconds: float = 10.0
    share_seconds: float = 0.5
    threads: int = 4


_LookupKey: TypeAlias = tuple[int, BlockKey]


@dataclass(slots=True)
class _Lookup:
    key: _LookupKey
    started_at: float
    called_at: float | None = None  # when a thread called the manager
    users: set[str] = field(default_factory=set)
    found: FoundPrefix | None = None
    is_shared: bool = True


class Lookups:
    """Answers "how much of this prompt is stored" for the requests of one engine; safe to use from several threads.

    Args:
        link: to the manager.
        plan: parts that blocks must have.
        settings: deadlines.
        statistics: where to count.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        link: ManagerLink,
        plan: LookupPlan,
        settings: LookupSettings,
        statistics: ReuseStatistics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._plan = plan
        self._settings = settings
        self._statistics = statistics
        self._clock = clock
        self._lock = threading.Lock()
        self._by_request: dict[str, _Lookup] = {}
        self._by_key: dict[_LookupKey, _Lookup] = {}
        self._calls = WorkerPool(settings.threads, "kvcm-lookup")
        self._releases = WorkerPool(1, "kvcm-release")
        self._to_release: list[str] = []
        self._is_closing = threading.Event()
        self._is_probing = threading.Lock()
        self.answered = threading.Event()

    def start(self, request_id: str, keys: Sequence[BlockKey]) -> None:
        """Start a lookup for a request, unless it has one. Without keys it finds nothing."""
        key = (len(keys), keys[-1]) if keys else (0, BlockKey(0))
        with self._lock:
            if request_id in self._by_request:
                return
            lookup = self._shared(key) if keys else None
            if lookup is None:
                lookup = _Lookup(key, self._clock())
                if not keys:
                    lookup.found = FoundPrefix()
                elif self._can_start():
                    self._by_key[key] = lookup
                    self._calls.submit(PRIORITY_LOAD, partial(self._run_lookup, lookup, tuple(keys), request_id))
                else:
                    lookup.found = _NO_ANSWER
            lookup.users.add(request_id)
            self._by_request[request_id] = lookup

    def poll(self, request_id: str) -> FoundPrefix | None:
        """Return the prefix found, None while the lookup is pending. A request without a lookup has found nothing."""
        with self._lock:
            lookup = self._by_request.get(request_id)
            if lookup is None:
                return _NO_ANSWER
            if lookup.found is not None:
                return lookup.found
            if not self._is_late(lookup):
                return None
            self._statistics.add(lookups_late=1)
            # The next request with these keys makes a call of its own; the late answer's lease is released.
            self._remove_user(request_id, lookup)
            self._by_request[request_id] = _Lookup(
                lookup.key, started_at=lookup.started_at, called_at=None, users={request_id}, found=_LATE
            )
            return _LATE

    def release(self, request_id: str) -> None:
        """Release a request's answer: it has loaded, or it has ended."""
        with self._lock:
            lookup = self._by_request.pop(request_id, None)
            if lookup is not None:
                self._remove_user(request_id, lookup)

    def clear(self) -> None:
        """Stop sharing answers."""
        with self._lock:
            for lookup in list(self._by_key.values()):
                self._stop_sharing(lookup)

    def close(self, timeout_seconds: float) -> None:
        """Start no more lookups; release leases within the timeout, the others expire."""
        self._calls.close(timeout_seconds / 2)
        self.clear()
        self._is_closing.set()
        self._releases.close(timeout_seconds / 4)
        self._release_batch(timeout_seconds / 4)

    def _is_late(self, lookup: _Lookup) -> bool:
        """Return whether to wait no longer: for the answer, or for a thread, when many requests arrive."""
        if lookup.called_at is None:
            return self._clock() - lookup.started_at >= _MAX_QUEUEING * self._settings.lookup_seconds
        return self._clock() - lookup.called_at >= self._settings.lookup_seconds

    def _can_start(self) -> bool:
        if not self._link.is_ready():
            return False
        if not self._link.client.is_suspended:
            return True
        if self._is_probing.acquire(blocking=False):
            self._releases.submit(PRIORITY_LOAD, self._probe)
        return False

    def _probe(self) -> None:
        try:
            self._link.client.cluster_info(timeout_seconds=self._settings.lookup_seconds)
        finally:
            self._is_probing.release()

    def _run_lookup(self, lookup: _Lookup, keys: Sequence[BlockKey], request_id: str) -> None:
        found = _NO_ANSWER
        try:
            with self._lock:
                lookup.called_at = self._clock()
                if not lookup.users:  # all requests have ended or given up
                    return
            settings = self._settings
            with use_trace_id(request_id):
                found = _match_usable_prefix(
                    self._link.client, keys=keys, plan=self._plan, settings=settings, clock=self._clock
                )
            if found is _UNKNOWN_INSTANCE:
                self._link.invalidate()  # the manager lost its state; the next request registers again
            self._record(lookup, keys, found)
        finally:
            with self._lock:
                lookup.found = found
                if not lookup.users and not lookup.is_shared:
                    self._release(found)
            self.answered.set()

    def _record(self, lookup: _Lookup, keys: Sequence[BlockKey], found: FoundPrefix) -> None:
        self._statistics.observe("lookup_seconds", self._clock() - lookup.started_at)
        if found.is_answered:
            self._statistics.add(lookups=1, lookup_blocks=len(keys), hit_blocks=found.blocks)
        else:
            self._statistics.add(lookups_failed=1)

    def _shared(self, key: _LookupKey) -> _Lookup | None:
        """Return a lookup of the same that is fresh enough."""
        now = self._clock()
        for lookup in list(self._by_key.values()):
            if now - lookup.started_at > self._settings.share_seconds:
                self._stop_sharing(lookup)
        return self._by_key.get(key)

    def _remove_user(self, request_id: str, lookup: _Lookup) -> None:
        lookup.users.discard(request_id)
        if not lookup.users and not lookup.is_shared and lookup.found is not None:
            self._release(lookup.found)

    def _stop_sharing(self, lookup: _Lookup) -> None:
        del self._by_key[lookup.key]
        lookup.is_shared = False
        if not lookup.users and lookup.found is not None:
            self._release(lookup.found)

    def _release(self, found: FoundPrefix) -> None:
        """Release leases soon, in one batch with others. Under the lock."""
        if found.lease_ids and not self._to_release:
            self._releases.submit(PRIORITY_SAVE, self._release_after_delay)
        self._to_release += found.lease_ids

    def _release_after_delay(self) -> None:
        self._is_closing.wait(_RELEASE_SECONDS)
        self._release_batch(self._settings.lookup_seconds)

    def _release_batch(self, timeout_seconds: float) -> None:
        with self._lock:
            lease_ids, self._to_release = self._to_release, []
        if lease_ids:
            self._link.client.release_lease(*lease_ids, timeout_seconds=timeout_seconds)


def _match_usable_prefix(
    client: ManagerClient,
    keys: Sequence[BlockKey],
    plan: LookupPlan,
    settings: LookupSettings,
    clock: Callable[[], float] = time.monotonic,
) -> FoundPrefix:
    """Return the longest prefix that can be used; blocks for `lookup_seconds` at most."""
    deadline = clock() + settings.lookup_seconds
    lease_seconds = min(settings.load_seconds + settings.lookup_seconds, _MAX_LEASE_SECONDS)
    usable_until = clock() + lease_seconds

    def match(keys: Sequence[BlockKey], mode: MatchMode, parts: Sequence[str], window: int = 0) -> EncodedMatch:
        return client.match_encoded(
            keys,
            mode,
            spec_names=parts,
            window=window,
            read_lease_ms=int(lease_seconds * 1000),
            timeout_seconds=max(0.0, deadline - clock()),
        )

    mode = MatchMode.PREFIX_WITH_STATE if plan.state_parts else MatchMode.PREFIX
    prefix = match(keys, mode, plan.parts + plan.state_parts)
    if prefix.outcome is Outcome.TIMEOUT:
        return _LATE
    if prefix.outcome is not Outcome.OK:
        return _UNKNOWN_INSTANCE if prefix.code == ErrorCode.INSTANCE_NOT_EXIST else _NO_ANSWER
    found = FoundPrefix(
        len(prefix.locations),
        locations=prefix.locations,
        window_locations=(),
        is_answered=True,
        usable_until=usable_until,
        lease_ids=_leases(prefix),
    )
    if not plan.window_parts or not found.blocks:
        return found
    window = min(plan.window, found.blocks)
    run = match(keys[: found.blocks], MatchMode.SLIDING_WINDOW, plan.window_parts, window)
    leases = found.lease_ids + _leases(run)
    present = [index for index, location in enumerate(run.locations) if location]
    if run.outcome is not Outcome.OK or not present:
        return FoundPrefix(
            0,
            locations=(),
            window_locations=(),
            is_answered=run.outcome is Outcome.OK,
            usable_until=usable_until,
            lease_ids=leases,
        )
    end = present[-1] + 1
    return FoundPrefix(
        end,
        locations=found.locations[:end],
        window_locations=run.locations[end - window : end],
        is_answered=True,
        usable_until=usable_until,
        lease_ids=leases,
    )


def _leases(match: EncodedMatch) -> tuple[str, ...]:
    return (match.lease_id,) if match.lease_id else ()
