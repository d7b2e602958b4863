"""Health of a storage, derived from its probes. Pure, with time passed in.

A storage is UP, DEGRADED or DOWN, and used until it is DOWN. A probe ends in one of these ways:

* answered: good, or slow when it took longer than a bound;
* unwritable: the medium answers and takes no bytes (it is full, or mounted read-only);
* unseen: the medium is not on this host, and need not be;
* failed, or late: no answer within the time limit.

Rules:

* Any other result than good makes an UP storage DEGRADED at once: an administrator should see it, and no block is
hidden.
* Only `down_after` failures in a row (late ones count) make it DOWN. Nothing makes it DOWN at once: one lost answer, a
  remount or a second of a busy network would hide every block on it, and asking twice more takes two seconds.
* Whether it accepts bytes is known from answers only: the last one, or the last write, holds until the next.
* It is full when it has no room for a probe, when it answers with less than its margin free (`free_margin.py`), or when
  an allocation was refused for lack of space. It is DEGRADED then, and blocks leave it.
* A full medium is never DOWN for that: its blocks can be read, and hidden blocks would not be evicted. Writes go to
  another storage if there is one.
* What is not on this host is DEGRADED and used: engines see it. This manager neither deletes there nor knows how it is.
* Only `up_after` answers in a row bring it back from DOWN, as UP when all of them were good, else as DEGRADED; and as
  many good ones make a DEGRADED storage UP.

Rejected: a share of failures over a window, which finds a storage that fails now and then, but takes a window's length
to see that one is gone, and as long to see that it is back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import NamedTuple

from kvcm.model.storages import StorageSpace

__all__ = ["HealthRules", "HealthState", "Probe", "ProbeOutcome", "StorageHealth"]


class HealthState(IntEnum):
    """How a storage is; numbers are those of the wire."""

    SH_UP = 1
    SH_DEGRADED = 2
    SH_DOWN = 3

    @property
    def label(self) -> str:
        """What people read: up, degraded or down."""
        return self.name.removeprefix("SH_").lower()


class ProbeOutcome(Enum):
    """How a probe ended."""

    ANSWERED = "answered"
    UNWRITABLE = "unwritable"
    NOT_HERE = "unseen"
    FAILED = "failed"
    LATE = "late"


class Probe(NamedTuple):
    """One look at a storage.

    Attributes:
        outcome: how it ended.
        seconds: from its begin to its end; so far, of a late one.
        reason: why it is not good, for people; "" where it answered.
        space: of the medium, where it answered.
        is_full: whether the medium has no space, or too little.
    """

    outcome: ProbeOutcome
    seconds: float
    reason: str = ""
    space: StorageSpace | None = None
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a storage changes its state.

    Attributes:
        down_after: failures in a row that make it DOWN.
        up_after: answers in a row that bring it back.
        slow_seconds: an answer that takes longer is slow.
    """

    down_after: int = 3
    up_after: int = 2
    slow_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class StorageHealth:
    """State of a storage; the default is that before the first probe.

    Attributes:
        state: by the rules.
        reason: the last error, for administrators; "" while it is UP.
        since: unix seconds of the last change of state, or of the first probe; 0 before that.
        probe_seconds: what the last probe took.
        failed_probes: those that were not answered, since the storage was opened.
        space: of the medium at the last answer, None before that.
        is_unwritable: the medium took no bytes when it answered last, or refused a write since.
        is_full: of these for lack of space; or it has little left.
        observations: how often it was found full or not, by probes and by writes.
        failures: in a row.
        answers: in a row.
        good_answers: in a row.
    """

    state: HealthState = HealthState.SH_UP
    reason: str = ""
    since: float = 0.0
    probe_seconds: float = 0.0
    failed_probes: int = 0
    space: StorageSpace | None = None
    is_unwritable: bool = False
    is_full: bool = False
    observations: int = 0
    failures: int = 0
    answers: int = 0
    good_answers: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether reads and writes may use the storage."""
        return self.state is not HealthState.SH_DOWN

    @property
    def is_writable(self) -> bool:
        """Whether a new block is expected to fit."""
        return self.is_usable and not self.is_unwritable and not self.is_full

    def after(self, probe: Probe, now: float, rules: HealthRules) -> StorageHealth:
        """Return the health after one more probe.

        Args:
            probe: how it ended.
            now: unix seconds.
            rules: when the state changes.
        """
        failed = probe.outcome in {ProbeOutcome.FAILED, ProbeOutcome.LATE}
        good = probe.outcome is ProbeOutcome.ANSWERED and not probe.is_full and probe.seconds <= rules.slow_seconds
        counted = replace(
            self,
            probe_seconds=probe.seconds,
            failed_probes=self.failed_probes + (failed or probe.outcome is ProbeOutcome.UNWRITABLE),
            space=probe.space or self.space,
            is_full=self.is_full if failed else probe.is_full,
            observations=self.observations + (not failed),
            is_unwritable=self.is_unwritable if failed else probe.outcome is ProbeOutcome.UNWRITABLE,
            failures=self.failures + 1 if failed else 0,
            answers=0 if failed else self.answers + 1,
            good_answers=self.good_answers + 1 if good else 0,
        )
        state = counted._next_state(rules)
        reason = self.reason if good else probe.reason or f"slow: it took {probe.seconds:.1f} s to answer"
        return replace(
            counted,
            state=state,
            reason="" if state is HealthState.SH_UP else reason,
            since=now if state is not self.state or not self.since else self.since,
        )

    def _next_state(self, rules: HealthRules) -> HealthState:
        if self.failures >= rules.down_after:
            return HealthState.SH_DOWN
        if self.state is HealthState.SH_DOWN and self.answers < rules.up_after:
            return HealthState.SH_DOWN
        if self.good_answers >= rules.up_after or (self.state is HealthState.SH_UP and self.good_answers):
            return HealthState.SH_UP
        return HealthState.SH_DEGRADED
