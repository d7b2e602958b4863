"""Admission control: the serving phase, rate limits, overload, deadlines, and the queue of long requests.

Only calls of engines are ever rejected by load: operators, probes and scrapers are rare, and needed most in an
overload. The checks, the cheapest first:

1. `check_head`, when the head of a request has come, where the transport shows that: the backlog takes too long.
2. `rejection`, before a request is read: its deadline has passed, or it has waited for the event loop too long. gRPC
   does not report the wait of the single request; there the present delay of the loop counts, and one request in
   `_ALWAYS_ADMITTED` is served all the same, since the rejections are work, too, and could alone keep the delay up.
3. `enter`: the keys of the request are taken from the token bucket of its client.
4. `enter`: a request of many keys waits for its turn in a queue; short ones never wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kvcm.model.errors import NotLeaderError
from kvcm.registry.leadership import Leadership
from kvcm.service.calls import Arrival, Call, Plane, Reply
from kvcm.service.rejections import RateLimitedError, RejectedError

__all__ = [
    "BUDGET",
    "DEADLINE",
    "QUEUE",
    "REASONS",
    "AdmissionSettings",
    "BacklogEstimate",
    "GuardedAdmission",
    "LoopDelay",
    "Phase",
    "RequestQueue",
    "ServingGate",
    "TokenBuckets",
    "key_count",
    "refuse_unless_leading",
]

# The queue of long requests: few run at a time, few wait, and none waits in vain.
#
# 1. At most `slots` requests run, at most `places` wait, in the order of their arrival. 2. A request that would wait
# too long, by the measured pace, or until after its deadline is rejected at once. 3. A request whose turn does not come
# in time after all is rejected then. 4. A request that is cancelled while it waits gives up its place, and hands on its
# turn if it just had one.

QUEUE: Final = "queue"
"""Reason of a rejection: too many requests wait."""
DEADLINE: Final = "deadline"
"""Reason of a rejection: the deadline of the client passes before the answer."""
BUDGET: Final = "budget"
"""Reason of a rejection: the work on the request takes too long."""
_SMOOTHING: Final = 0.2  # in the pace; the last ten or so count
_MIN_RETRY_SECONDS: Final = 0.1


class RequestQueue:
    """To be used inside one event loop.

    Args:
        clock: seconds of a clock that never runs backwards.
        slots: requests that run at a time.
        places: requests that wait.
        most_wait_seconds: for how long; 0 = for ever.
    """

    def __init__(self, clock: Callable[[], float], slots: int, places: int, most_wait_seconds: float) -> None:
        self._clock = clock
        self._slots = slots
        self._places = places
        self._most_wait_seconds = most_wait_seconds
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pace_seconds = 0.0

    @property
    def running(self) -> int:
        """Requests that run."""
        return self._inside

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def set(self, slots: int, places: int, most_wait_seconds: float) -> None:
        """Change the sizes; requests that run or wait stay."""
        self._slots, self._places, self._most_wait_seconds = slots, places, most_wait_seconds
        self._admit_waiting()

    async def enter(self, deadline: float | None) -> float:
        """Wait for a turn.

        Args:
            deadline: on the clock, when the client gives up; None when it does not say.

        Returns:
            When it began, for `leave`.

        Raises:
            RejectedError: there is no turn for it in time.
        """
        if self._inside >= self._slots or self._waiting:
            await self._wait(deadline)
        else:
            self._inside += 1
        return self._clock()

    def leave(self, began: float) -> None:
        """Give the turn to the next."""
        assert self._inside > 0
        took = self._clock() - began
        self._pace_seconds += (took - self._pace_seconds) * (_SMOOTHING if self._pace_seconds else 1.0)
        self._inside -= 1
        self._admit_waiting()

    def wait_seconds(self) -> float:
        """Return how long a request that comes now will wait, by the pace so far."""
        ahead = self._inside + len(self._waiting) - self._slots + 1
        return max(0, ahead) * self._pace_seconds / self._slots

    async def _wait(self, deadline: float | None) -> None:
        wait_seconds = self.wait_seconds()
        retry_seconds = max(wait_seconds, _MIN_RETRY_SECONDS)
        left_seconds = None if deadline is None else deadline - self._clock() - self._pace_seconds
        if left_seconds is not None and wait_seconds >= left_seconds:
            raise _deadline_missed(retry_seconds)
        if len(self._waiting) >= self._places or 0 < self._most_wait_seconds < wait_seconds:
            raise _queue_full(retry_seconds)
        most = min(left_seconds or float("inf"), self._most_wait_seconds or float("inf"))
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(None if most == float("inf") else most):
                await turn
        except TimeoutError:
            self._abandon(turn)
            raise (_deadline_missed if most == left_seconds else _queue_full)(retry_seconds) from None
        except asyncio.CancelledError:
            self._abandon(turn)
            raise

    def _abandon(self, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():  # its turn came in the same moment
            self._inside -= 1
            self._admit_waiting()
        elif turn in self._waiting:
            self._waiting.remove(turn)

    def _admit_waiting(self) -> None:
        while self._waiting and self._inside < self._slots:
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)


def _queue_full(retry_seconds: float) -> RejectedError:
    text = "many large requests are waiting; retry later, or ask for fewer keys at a time"
    return RejectedError(text, QUEUE, retry_seconds)


def _deadline_missed(retry_seconds: float) -> RejectedError:
    text = "the request would be answered after its deadline; retry later, with more time or fewer keys"
    return RejectedError(text, DEADLINE, retry_seconds)


# How much each client may ask for: a token bucket per principal, in a table that stays small.
#
# A bucket holds up to `burst` tokens and gains `rate` a second. A request for more than a bucket can ever hold passes
# when it is full, and leaves a debt; else it could never pass. 1. A principal never gets more than burst + rate x
# time, plus the excess of its last request over the burst. 2. A request that is retried after the reported time passes,
# unless another one took from the same bucket. 3. The table has `most` buckets: full ones are forgotten, for they hold
# no information, and when none is full all new principals share one bucket. Forgetting the oldest instead would forgive
# the debt of a client that can send from many addresses.

_MAX_PRINCIPALS: Final = 16_384
_SWEEP_SECONDS: Final = 1.0  # between looks for full buckets, which cost milliseconds where the table is full


class _Bucket:
    __slots__ = ("at", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens = tokens
        self.at = at


class TokenBuckets:
    """Buckets by principal, off until `set` gives them a rate.

    Args:
        clock: seconds of a clock that never runs backwards.
        most: buckets in the table.

    Attributes:
        is_on: whether there is a rate.
    """

    def __init__(self, clock: Callable[[], float], most: int = _MAX_PRINCIPALS) -> None:
        self._clock = clock
        self._most = most
        self.is_on = False
        self._rate = 0.0
        self._burst = 0.0
        self._buckets: dict[str, _Bucket] = {}
        self._others = _Bucket(0.0, clock())
        self._swept_at = clock() - _SWEEP_SECONDS

    def __len__(self) -> int:
        return len(self._buckets)

    def set(self, rate: float, burst: float) -> None:
        """Change tokens per second (0 = off) and the size of buckets; what they hold is kept as far as it fits."""
        now = self._clock()
        if self.is_on and rate > 0:
            for bucket in (*self._buckets.values(), self._others):
                self._fill(bucket, now)
                bucket.tokens = min(bucket.tokens, burst)
        else:  # what they held has no meaning at another rate
            self._buckets.clear()
            self._others = _Bucket(burst, now)
        self._rate, self._burst = rate, burst
        self.is_on = rate > 0

    def acquire(self, principal: str, amount: float) -> float:
        """Take tokens of a principal.

        Returns:
            0 when they are taken; else nothing is, and so many seconds later they could be.
        """
        bucket = self._bucket(principal)
        needed = min(amount, self._burst)
        if bucket.tokens < needed:
            return (needed - bucket.tokens) / self._rate
        bucket.tokens -= amount
        return 0.0

    def refund(self, principal: str, amount: float) -> None:
        """Put back the tokens of a request that was not served after all."""
        bucket = self._bucket(principal)
        bucket.tokens = min(bucket.tokens + amount, self._burst)

    def _bucket(self, principal: str) -> _Bucket:
        """Return a principal's bucket as it is now."""
        now = self._clock()
        bucket = self._buckets.get(principal)
        if bucket is None:
            if len(self._buckets) >= self._most:
                self._forget_full(now)
            if len(self._buckets) >= self._most:
                self._fill(self._others, now)
                return self._others
            bucket = self._buckets[principal] = _Bucket(self._burst, now)
            return bucket
        self._fill(bucket, now)
        return bucket

    def _fill(self, bucket: _Bucket, now: float) -> None:
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.at) * self._rate)
        bucket.at = now

    def _forget_full(self, now: float) -> None:
        if now - self._swept_at < _SWEEP_SECONDS:
            return
        self._swept_at = now
        for principal, bucket in list(self._buckets.items()):
            self._fill(bucket, now)
            if bucket.tokens >= self._burst:
                del self._buckets[principal]


# How long a request that comes now will wait for those that came before it.
#
# The event loop takes requests in the order of their arrival, and a rejection costs a twentieth of an answer if it
# comes at once. So the decision is made when the head of a request has come, by the work that was admitted and is not
# done. Its size is estimated from the bodies, whose larger part are keys, and its pace is measured.

_BYTES_PER_REQUEST: Final = 10_000
"""A request without a body costs about as much as so many bytes of keys."""
_MAX_BYTES: Final = 1 << 16
"""Of a request: longer ones are served in batches, and let others pass."""
_SECONDS_PER_BYTE: Final = 5e-8
_MIN_SAMPLE_BYTES: Final = 2_000_000
_BUSY: Final = 0.7
_MAX_CHANGE: Final = 2.0


class BacklogEstimate:
    """The requests of one event loop that were admitted and are not answered.

    Args:
        wall_seconds: clock.
        busy_seconds: CPU time of the loop's thread.

    Attributes:
        seconds_per_byte: pace, measured while the loop is busy: otherwise it is hardly requests that it works on.
    """

    def __init__(
        self,
        wall_seconds: Callable[[], float] = time.monotonic,
        busy_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        self._wall_seconds = wall_seconds
        self._busy_seconds = busy_seconds
        self._bytes = 0
        self._done_bytes = 0
        self._since = (wall_seconds(), busy_seconds())
        self.seconds_per_byte = _SECONDS_PER_BYTE

    @property
    def seconds(self) -> float:
        """The estimated wait of a request that comes now."""
        return self._bytes * self.seconds_per_byte

    def add(self, body_bytes: int) -> None:
        """Add a request with a body of so many bytes."""
        self._bytes += _weight_bytes(body_bytes)

    def remove(self, body_bytes: int) -> None:
        """The request was answered, or rejected after all."""
        self._bytes -= _weight_bytes(body_bytes)
        self._done_bytes += _weight_bytes(body_bytes)
        if self._done_bytes >= _MIN_SAMPLE_BYTES:
            self._update_rate()

    def _update_rate(self) -> None:
        wall, busy = self._wall_seconds(), self._busy_seconds()
        wall_before, busy_before = self._since
        if busy - busy_before >= _BUSY * (wall - wall_before):
            known, measured = self.seconds_per_byte, (busy - busy_before) / self._done_bytes
            self.seconds_per_byte = min(max(measured, known / _MAX_CHANGE), known * _MAX_CHANGE)
        self._since, self._done_bytes = (wall, busy), 0


def _weight_bytes(body_bytes: int) -> int:
    return _BYTES_PER_REQUEST + min(body_bytes, _MAX_BYTES)


_RATE: Final = "rate"
_OVERLOAD: Final = "overload"
REASONS: Final = (_RATE, _OVERLOAD, DEADLINE, QUEUE, BUDGET)
"""Reasons of rejections, as labels of metrics."""
_ALWAYS_ADMITTED: Final = 8
_OVERLOAD_RETRY_SECONDS: Final = 1.0
_TOKENS_PER_KEY: Final = 16  # blocks of engines have 16 to 64 tokens
_KEY_BYTES: Final = 8  # of a packed one


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Attributes:
    keys_per_second: of one client; 0 = any.
    burst_keys: that a client may ask for at once, > 0.
    most_wait_seconds: before a request is begun; 0 = any.
    long_keys: keys from which on a request is a long one.
    long_slots: long requests that are worked on at a time.
    long_places: long requests that wait.
    long_seconds: that the work on a long request may take; 0 = any.
    most_keys: of any request: more is not charged for, since such a request is rejected.
    """

    keys_per_second: int = 0
    burst_keys: int = 131_072
    most_wait_seconds: float = 2.0
    long_keys: int = 4096
    long_slots: int = 4
    long_places: int = 64
    long_seconds: float = 30.0
    most_keys: int = 65_536


class LoopDelay:
    """How long requests wait just now for the event loop, in seconds; written by the measurement of its lag."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


class GuardedAdmission:
    """The `Admission` of a manager. To be used inside one event loop.

    Args:
        settings: limits.
        delay: of requests by the event loop.
        clock: seconds of the clock of `Arrival.deadline`.
        ahead: requests that were admitted by their heads.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        delay: LoopDelay | None = None,
        clock: Callable[[], float] = time.monotonic,
        ahead: BacklogEstimate | None = None,
    ) -> None:
        self._clock = clock
        self._ahead = ahead if ahead is not None else BacklogEstimate()
        self._delay = delay if delay is not None else LoopDelay()
        self._buckets = TokenBuckets(clock)
        self._long = RequestQueue(clock, settings.long_slots, settings.long_places, settings.most_wait_seconds)
        self._late = 0
        self.set(settings)

    def set(self, settings: AdmissionSettings) -> None:
        """Change the limits; they hold for what comes from now on."""
        self._most_wait_seconds = settings.most_wait_seconds
        self._long_keys = settings.long_keys
        self._long_seconds = settings.long_seconds
        self._most_keys = settings.most_keys
        self._long.set(settings.long_slots, settings.long_places, settings.most_wait_seconds)
        self._buckets.set(settings.keys_per_second, settings.burst_keys)

    def check_head(self, call: Call, body_bytes: int) -> RejectedError | None:
        """Return why a request is rejected by its head: the backlog takes too long."""
        if call.plane is not Plane.DATA:
            return None
        if 0 < self._most_wait_seconds < self._ahead.seconds:
            return _overload()
        self._ahead.add(body_bytes)
        return None

    def release_body(self, call: Call, body_bytes: int) -> None:
        """A request that was admitted by its head is answered."""
        if call.plane is Plane.DATA:
            self._ahead.remove(body_bytes)

    def rejection(self, call: Call, arrival: Arrival) -> RejectedError | None:
        """Return why a request is rejected before it is read; None while it may be served."""
        if call.plane is not Plane.DATA:
            return None
        if arrival.deadline is not None and arrival.deadline <= self._clock():
            return RejectedError("its deadline has passed before it was begun", DEADLINE, _OVERLOAD_RETRY_SECONDS)
        most = self._most_wait_seconds
        if not most:
            return None
        if arrival.received_at is not None and self._clock() - arrival.received_at > most:
            return _overload()
        if self._delay.seconds > most:
            self._late += 1
            return _overload() if self._late % _ALWAYS_ADMITTED else None
        return None

    async def enter(self, call: Call, request: Any, arrival: Arrival) -> float | None:
        """Wait for the request's turn.

        Returns:
            When it began, for `leave`; None for a short request, which has no turn.

        Raises:
            RateLimitedError: the client asks for more keys than it may.
            RejectedError: there is no turn for the request in time.
        """
        if call.plane is not Plane.DATA:
            return None
        keys = key_count(call, request)
        if keys < self._long_keys and not self._buckets.is_on:
            return None
        keys = min(keys, self._most_keys)
        if self._buckets.is_on:
            self._charge(arrival.principal.name or arrival.peer, keys)
        if keys < self._long_keys:
            return None
        try:
            return await self._long.enter(arrival.deadline)
        except RejectedError:
            if self._buckets.is_on:
                self._buckets.refund(arrival.principal.name or arrival.peer, keys)
            raise

    async def within_budget(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Return the result of the work on a long request, or cancel it at the end of its time: as when its client goes
        away, what it has done stays, and blocks that it began to write end with its write session."""
        most = self._long_seconds
        try:
            async with asyncio.timeout(most or None) as budget:
                return await work
        except TimeoutError:
            if not budget.expired():
                raise
            text = f"it took longer than {most:g} s (kvcm.limits.long_request_ms): ask for fewer keys at a time"
            raise RejectedError(text, BUDGET, _OVERLOAD_RETRY_SECONDS) from None

    def leave(self, entered: float) -> None:
        """The request that had a turn was answered."""
        self._long.leave(entered)

    def _charge(self, principal: str, keys: int) -> None:
        wait_seconds = self._buckets.acquire(principal, keys)
        if wait_seconds:
            text = f"more keys per second than allowed; these {keys} pass in {wait_seconds:.3f} s"
            raise RateLimitedError(text, _RATE, wait_seconds)


def _overload() -> RejectedError:
    return RejectedError("the manager is overloaded; retry later", _OVERLOAD, _OVERLOAD_RETRY_SECONDS)


_counters: dict[type[Any], tuple[str, ...]] = {}


def key_count(call: Call, request: Any) -> int:
    """Return the cost of a request in keys: its keys, or others that take as long; at least 1."""
    fields = _counters.get(call.request_type)
    if fields is None:
        fields = _counters[call.request_type] = _counted_fields(call.request_type)
    most = 1
    for field in fields:
        if field == "token_ids":
            count = len(request.token_ids) // _TOKENS_PER_KEY
        elif field == "success_blocks":
            count = _named_blocks(request.success_blocks)
        elif field == "changes":
            count = sum(len(each.added_keys) + len(each.removed_keys) for each in request.changes) // _KEY_BYTES
        else:
            count = len(getattr(request, field))
        if count > most:
            most = count
    return most


_COUNTED: Final = (
    *("block_keys", "token_ids", "success_blocks", "parts", "block_cache_keys", "events", "changes"),
    *("block_hashes", "event_hashes"),
)


def _counted_fields(request_type: type[Any]) -> tuple[str, ...]:
    known = request_type.DESCRIPTOR.fields_by_name
    return tuple(name for name in _COUNTED if name in known)


def _named_blocks(mask: Any) -> int:
    return max(mask.offset, len(mask.bool_masks.values)) if mask.WhichOneof("info") else 1


# The serving phase and the requests in flight.
#
# Both transports check the phase before they read a request, and count it until its answer is sent. A request that was
# admitted is carried out in any later phase.

_DRAIN_RETRY_SECONDS = 1.0
_POLL_SECONDS = 0.01
_LATE_SECONDS = 0.05  # of a poll: the event loop stood still, and requests that came meanwhile are not seen yet
_QUIET_SECONDS = 0.1
_MAX_QUIET_WAIT_SECONDS = 3.0  # clients that were rejected come again after one


class Phase(Enum):
    """Stages of a manager's life, in their order."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"  # still serves, and accepts no new clients
    CLOSED = "draining"


_REJECTIONS = {
    Phase.STARTING: "the manager is starting; retry shortly",
    Phase.CLOSED: "the manager is stopping; retry, another one may answer",
}


class ServingGate:
    """Admits requests while the manager serves. To be made inside the event loop.

    Attributes:
        phase: of the manager.
        is_open: whether requests are served in this phase.
        is_draining: whether the end has begun: connections are not worth keeping.
        in_flight: requests that were admitted and are not answered.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.is_open = self.is_draining = False
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._awaits_idle = False  # true at the end only: no request touches the event before
        self._rejected = 0
        self._callbacks: list[Callable[[], Awaitable[None]]] = []

    def on_phase_change(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await a callback after every change of the phase."""
        self._callbacks.append(callback)

    async def enter_phase(self, phase: Phase) -> None:
        """Go on to a phase, and await the callbacks."""
        self.phase = phase
        self.is_open = phase not in _REJECTIONS
        self.is_draining = phase in {Phase.LEAVING, Phase.CLOSED}
        for callback in self._callbacks:
            await callback()

    def rejection(self) -> RejectedError | None:
        """Return why requests are rejected in this phase, None while it is open."""
        if self.is_open:
            return None
        self._rejected += 1
        return RejectedError(_REJECTIONS[self.phase], self.phase.value, _DRAIN_RETRY_SECONDS)

    def enter(self) -> None:
        """Count an admitted request."""
        self.in_flight += 1

    def leave(self) -> None:
        """The answer of an admitted request is sent, or its client is gone."""
        self.in_flight -= 1
        assert self.in_flight >= 0, "every request enters once and leaves once"
        if self._awaits_idle and not self.in_flight:
            self._idle.set()

    async def wait_until_quiet(self) -> None:
        """Wait until no request has been rejected for a moment in which the event loop was never late. Gives up after a
        few seconds."""
        now = asyncio.get_running_loop().time
        end, quiet_since, rejected = now() + _MAX_QUIET_WAIT_SECONDS, now(), self._rejected
        while (begin := now()) < min(end, quiet_since + _QUIET_SECONDS):
            await asyncio.sleep(_POLL_SECONDS)
            if self._rejected != rejected or now() > begin + _LATE_SECONDS:
                quiet_since, rejected = now(), self._rejected

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait until nothing is in flight, for so long at most, and return whether that is so."""
        if not self.in_flight:
            return True
        self._awaits_idle = True
        self._idle.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


# Leader only.


def refuse_unless_leading(leadership: Leadership, plane: Plane) -> None:
    """Send a caller to the leader, for deployments where only the leader serves.

    Args:
        leadership: of this manager.
        plane: which of the leader's addresses the caller needs.

    Raises:
        NotLeaderError: this manager does not lead; the message has the leader's addresses where they are known.
    """
    if leadership.is_leader:
        return
    leader, endpoint = leadership.leader_node_id, leadership.leader_endpoint
    refusal = f"node {leadership.node_id} does not lead"
    if not leader:
        raise NotLeaderError(f"{refusal} and no other node does; retry shortly")
    if endpoint is None:
        raise NotLeaderError(f"{refusal}, {leader} does, whose address is not known yet; retry shortly")
    if plane is Plane.ADMIN:
        rpc, http = endpoint.admin_rpc_port, endpoint.admin_http_port
    else:
        rpc, http = endpoint.meta_rpc_port, endpoint.meta_http_port
    raise NotLeaderError(
        f"{refusal}, {leader} does: call it at {endpoint.host}:{rpc} (gRPC) or {endpoint.host}:{http} (HTTP)"
    )
