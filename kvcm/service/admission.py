"""Whom to serve while more is asked for than can be answered: rate, overload, deadlines, lanes.

Only calls of engines are ever refused here: what operators, probes and scrapers ask for is rare, and is needed most
when there is too much of the rest. In this order, the cheapest first:

1. When its head has come, where the transport shows that (`knock`): those before it will take too long (work_ahead.py).
2. Before a request is read (`refusal`): its client has given up already; or it has waited in the event loop for longer
   than it may. Where that is not known of the single request, as with gRPC, it is the time that requests of that kind
   wait just now, and one in `_LET_IN` is served all the same: the answers to the refused ones are work, too, and may
   alone keep the wait as long as it is.
3. Its keys are taken from its client's bucket.
4. A request of many keys takes the lane of its kind; short ones never wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvcm.service.calls import Arrival, Call, Plane
from kvcm.service.lanes import DEADLINE, QUEUE, Lane
from kvcm.service.token_bucket import TokenBuckets
from kvcm.service.turned_away import RateLimitedError, TurnedAwayError
from kvcm.service.work_ahead import WorkAhead

__all__ = ["REASONS", "AdmissionSettings", "GuardedAdmission", "key_count"]

_RATE: Final = "rate"
_OVERLOAD: Final = "overload"
REASONS: Final = (_RATE, _OVERLOAD, DEADLINE, QUEUE)
"""Why requests are turned away, as labels of metrics."""

_LET_IN: Final = 8
_RETRY_SECONDS: Final = 1.0
_TOKENS_PER_KEY: Final = 16  # blocks of engines have 16 to 64 tokens


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Attributes:
    keys_per_second: of one client; 0 = any.
    burst_keys: that a client may ask for at once, > 0.
    most_wait_seconds: before a request is begun; 0 = any.
    long_keys: keys from which on a request is a long one.
    long_slots: long requests that are worked on at a time.
    long_places: long requests that wait.
    """

    keys_per_second: int = 0
    burst_keys: int = 131_072
    most_wait_seconds: float = 2.0
    long_keys: int = 4096
    long_slots: int = 4
    long_places: int = 64


class GuardedAdmission:
    """The `Admission` of a manager. To be used inside one event loop.

    Args:
        settings: limits.
        most_keys: of any request: more is not charged for, since it will be refused.
        waits_now: how long requests wait just now for the event loop to turn to them, in seconds.
        clock: seconds of the clock of `Arrival.deadline`.
        ahead: requests that were let in when their heads came.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        most_keys: Callable[[], int],
        waits_now: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        ahead: WorkAhead | None = None,
    ) -> None:
        self._clock = clock
        self._ahead = ahead if ahead is not None else WorkAhead()
        self._most_keys = most_keys
        self._waits_now = waits_now
        self._buckets = TokenBuckets(clock)
        self._long = Lane(clock, settings.long_slots, settings.long_places, settings.most_wait_seconds)
        self._late = 0
        self.set(settings)

    def set(self, settings: AdmissionSettings) -> None:
        """Change the limits; they hold for what comes from now on."""
        self._most_wait_seconds = settings.most_wait_seconds
        self._long_keys = settings.long_keys
        self._long.set(settings.long_slots, settings.long_places, settings.most_wait_seconds)
        self._buckets.set(settings.keys_per_second, settings.burst_keys)

    def knock(self, call: Call, body_bytes: int) -> TurnedAwayError | None:
        """Return why a request whose head has come is not let in: those before it will take too long."""
        if call.plane is not Plane.DATA:
            return None
        if 0 < self._most_wait_seconds < self._ahead.seconds:
            return _overload()
        self._ahead.begin(body_bytes)
        return None

    def gone(self, call: Call, body_bytes: int) -> None:
        """A request that was let in is answered."""
        if call.plane is Plane.DATA:
            self._ahead.end(body_bytes)

    def refusal(self, call: Call, arrival: Arrival) -> TurnedAwayError | None:
        """Return why a request that has come is not even read; None while it may be served."""
        if call.plane is not Plane.DATA:
            return None
        if arrival.deadline is not None and arrival.deadline <= self._clock():
            return TurnedAwayError("its deadline has passed before it was begun", DEADLINE, _RETRY_SECONDS)
        most = self._most_wait_seconds
        if not most:
            return None
        if arrival.came is not None and self._clock() - arrival.came > most:
            return _overload()
        if self._waits_now() > most:
            self._late += 1
            return _overload() if self._late % _LET_IN else None
        return None

    async def enter(self, call: Call, request: Any, arrival: Arrival) -> float | None:
        """Return when the request's turn has come.

        Raises:
            RateLimitedError: the client asks for more keys than it may.
            TurnedAwayError: there is no turn for the request in time.
        """
        if call.plane is not Plane.DATA:
            return None
        keys = min(key_count(call, request), self._most_keys())
        if self._buckets.is_on:
            self._charge(arrival.principal.name or arrival.peer, keys)
        if keys < self._long_keys:
            return None
        try:
            return await self._long.enter(arrival.deadline)
        except TurnedAwayError:
            if self._buckets.is_on:
                self._buckets.give_back(arrival.principal.name or arrival.peer, keys)
            raise

    def leave(self, entered: float | None) -> None:
        """The request that entered was answered."""
        if entered is not None:
            self._long.leave(entered)

    def _charge(self, principal: str, keys: int) -> None:
        wait_seconds = self._buckets.take(principal, keys)
        if wait_seconds:
            text = f"more keys per second than allowed; these {keys} pass in {wait_seconds:.3f} s"
            raise RateLimitedError(text, _RATE, wait_seconds)


def _overload() -> TurnedAwayError:
    return TurnedAwayError("the manager is overloaded; retry later", _OVERLOAD, _RETRY_SECONDS)


_counters: dict[type[Any], tuple[str, ...]] = {}


def key_count(call: Call, request: Any) -> int:
    """Return how many keys a request is worth: those that it names, or what takes as long; at least 1."""
    fields = _counters.get(call.request_type)
    if fields is None:
        fields = _counters[call.request_type] = _counted(call.request_type)
    most = 1
    for field in fields:
        if field == "token_ids":
            count = len(request.token_ids) // _TOKENS_PER_KEY
        elif field == "success_blocks":
            count = _named_blocks(request.success_blocks)
        else:
            count = len(getattr(request, field))
        if count > most:
            most = count
    return most


def _counted(request_type: type[Any]) -> tuple[str, ...]:
    known = request_type.DESCRIPTOR.fields_by_name
    return tuple(name for name in ("block_keys", "token_ids", "success_blocks", "parts") if name in known)


def _named_blocks(mask: Any) -> int:
    return max(mask.offset, len(mask.bool_masks.values)) if mask.WhichOneof("info") else 1
