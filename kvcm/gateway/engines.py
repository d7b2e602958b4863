"""The engines: what each works on, and whether requests go to it.

States of an engine::

    starting ──probe ok──> healthy ──failures in a row──> ejected ──time is over and probe ok──> trial
                              ^                              ^                                     │
                              └────────── answer ────────────┼─────────────────────────────────────┤
                                                             └────────────── failure ──────────────┘

Failures of probes and of requests are counted apart: an engine whose `/health` is fine and whose answers are not must
go, and so must one that gets no requests. In `trial`, one request at a time goes to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import structlog

from kvcm.gateway.policies import EngineLoad
from kvcm.gateway.settings import EngineAddress
from kvcm.model.clock import Clock

__all__ = ["Engine", "EngineState", "Flight", "HealthRules"]

_log = structlog.get_logger("kvcm.gateway")
_MOST_DOUBLINGS: Final = 30


class EngineState(Enum):
    """Whether requests go to an engine."""

    STARTING = "starting"
    HEALTHY = "healthy"
    EJECTED = "ejected"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When engines are ejected.

    Attributes:
        eject_after: failures in a row.
        eject_seconds: the first time out; it doubles with each ejection in a row.
        max_eject_seconds: the longest.
    """

    eject_after: int = 3
    eject_seconds: float = 5.0
    max_eject_seconds: float = 60.0


class Flight:
    """One request on an engine, until `end`.

    Args:
        engine: that works on it.
        tokens: of the prompt that the engine has to compute.
        computed_at: when it is expected to have computed them, for a request whose first byte comes with its last and
            says nothing of that; None for one that is streamed.
    """

    __slots__ = ("_engine", "_is_over", "computed_at", "tokens")

    def __init__(self, engine: Engine, tokens: float, computed_at: float | None) -> None:
        self._engine = engine
        self.tokens = tokens
        self.computed_at = computed_at
        self._is_over = False

    def begin_answer(self) -> None:
        """Record that the first byte came: the prompt is computed."""
        self.tokens = 0

    def end(self) -> None:
        """Record that the engine is rid of the request; again changes nothing."""
        if not self._is_over:
            self._is_over = True
            self._engine.remove(self)


class Engine:
    """One engine.

    Args:
        address: of the engine.
        rules: of its health.
        clock: decides when an ejection is over.
        random: numbers from 0 to 1, which spread the ends of ejections.
        on_change: called when the engine may take more requests than before, or fewer.
    """

    def __init__(
        self,
        address: EngineAddress,
        rules: HealthRules,
        clock: Clock,
        random: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self.url = address.url
        self.name = address.name
        self.instance = address.instance
        self.state = EngineState.STARTING
        self._rules = rules
        self._clock = clock
        self._random = random
        self._on_change = on_change
        self._flights: set[Flight] = set()
        self._trial: Flight | None = None
        self._failed_requests = self._failed_probes = self._ejections = 0
        self.ejected_until = 0.0

    @property
    def in_flight(self) -> int:
        """Requests that it works on."""
        return len(self._flights)

    @property
    def tokens_in_flight(self) -> float:
        """Tokens of prompts that it still has to compute, as far as answers and time say."""
        now = self._clock.now()
        return sum(each.tokens for each in self._flights if each.computed_at is None or each.computed_at > now)

    @property
    def load(self) -> EngineLoad:
        """Its load at this moment."""
        return EngineLoad(self.name, self.in_flight, self.tokens_in_flight)

    @property
    def is_usable(self) -> bool:
        """Whether requests go to it at all."""
        return self.state in (EngineState.HEALTHY, EngineState.TRIAL)

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return max(self._failed_requests, self._failed_probes)

    def takes_more(self, most: int) -> bool:
        """Return whether one more request may go to it now.

        Args:
            most: requests that it may work on.
        """
        is_open = self.state is EngineState.HEALTHY or (self.state is EngineState.TRIAL and self._trial is None)
        return is_open and self.in_flight < most

    def begin(self, tokens: float, seconds: float | None) -> Flight:
        """Record that a request goes to it.

        Args:
            tokens: of the prompt that it has to compute.
            seconds: in which it is expected to compute them, None for a request that is streamed.
        """
        flight = Flight(self, tokens, None if seconds is None else self._clock.now() + seconds)
        self._flights.add(flight)
        if self.state is EngineState.TRIAL:
            assert self._trial is None, "takes_more was not asked"
            self._trial = flight
        return flight

    def remove(self, flight: Flight) -> None:
        """Forget a request."""
        self._flights.discard(flight)
        if flight is self._trial:
            self._trial = None
        self._on_change()

    def record_success(self) -> None:
        """Record that a request was answered, whatever the answer says of the request."""
        if self.state is EngineState.EJECTED:  # it was sent before
            return
        self._failed_requests = 0  # probes are judged apart: an engine may answer and be broken
        if self.state is EngineState.TRIAL:
            self._ejections = 0
            self._enter(EngineState.HEALTHY)

    def record_failure(self, reason: str) -> None:
        """Record that a request failed for a reason that lies with the engine."""
        self._failed_requests += 1
        is_last = self.state is EngineState.TRIAL or self._failed_requests >= self._rules.eject_after
        if is_last and self.state is not EngineState.EJECTED:
            self._eject(reason)

    def record_probe(self, *, is_healthy: bool) -> None:
        """Record the outcome of a probe."""
        if self.state is EngineState.EJECTED:
            if self._clock.now() < self.ejected_until:
                return
            if is_healthy:
                self._enter(EngineState.TRIAL)
            else:
                self._eject("probe")
        elif is_healthy:
            self._failed_probes = 0
            if self.state is EngineState.STARTING:
                self._enter(EngineState.HEALTHY)
        elif self.state is not EngineState.STARTING:
            self._failed_probes += 1
            if self.state is EngineState.TRIAL or self._failed_probes >= self._rules.eject_after:
                self._eject("probe")

    def _eject(self, reason: str) -> None:
        rules = self._rules
        seconds = min(rules.max_eject_seconds, rules.eject_seconds * 2 ** min(self._ejections, _MOST_DOUBLINGS))
        # Gateways that saw the same failure must not return to the engine in the same moment.
        self.ejected_until = self._clock.now() + seconds * (0.5 + self._random())
        self._ejections += 1
        self._failed_requests = self._failed_probes = 0
        self._enter(EngineState.EJECTED, reason)

    def _enter(self, state: EngineState, reason: str = "") -> None:
        log = _log.warning if state is EngineState.EJECTED else _log.info
        log("engine_state", engine=self.name, state=state.value, before=self.state.value, reason=reason)
        self.state = state
        self._trial = None
        self._on_change()
