"""The breaker against a simple model, and its numbers."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connectors.transfer.breaker import Breaker, BreakerState, Passage

FAILURES_TO_OPEN, FIRST_PAUSE, LONGEST_PAUSE = 3, 1.0, 60.0


class BreakerMachine(RuleBasedStateMachine):
    """Calls come, go on for a while and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(FAILURES_TO_OPEN, FIRST_PAUSE, LONGEST_PAUSE)
        self.now = 0.0
        self.under_way: list[Passage] = []
        # The model: failures in a row, or how long it is open and the next pause.
        self.failures = 0
        self.open_until: float | None = None
        self.pause = FIRST_PAUSE

    @rule(seconds=st.floats(0.0, 100.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def call_comes(self) -> None:
        passage = self.breaker.enter(self.now)
        if self.open_until is None:
            assert passage is Passage.ORDINARY
        elif Passage.TRIAL in self.under_way or self.now < self.open_until:
            assert passage is None
        else:
            assert passage is Passage.TRIAL
        if passage is not None:
            self.under_way.append(passage)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), succeeded=st.sampled_from([True, False, None]))
    def call_ends(self, data: st.DataObject, succeeded: bool | None) -> None:
        passage = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.breaker.leave(passage, succeeded, self.now)
        if passage is Passage.TRIAL:
            if succeeded:
                self.open_until, self.failures = None, 0
            elif succeeded is False:
                self.pause = min(2 * self.pause, LONGEST_PAUSE)
                self.open_until = self.now + self.pause
        elif self.open_until is None and succeeded is not None:
            self.failures = 0 if succeeded else self.failures + 1
            if self.failures == FAILURES_TO_OPEN:
                self.open_until, self.pause = self.now + FIRST_PAUSE, FIRST_PAUSE

    @rule()
    def sign_of_life(self) -> None:
        self.breaker.hurry(self.now)
        if self.open_until is not None:
            self.open_until = min(self.open_until, self.now)

    @invariant()
    def shows_its_state(self) -> None:
        if self.open_until is None:
            assert self.breaker.state is BreakerState.CLOSED
        elif Passage.TRIAL in self.under_way:
            assert self.breaker.state is BreakerState.TRIAL
        else:
            assert self.breaker.state is BreakerState.OPEN


BreakerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBreaker = BreakerMachine.TestCase


def test_a_single_failure_between_successes_opens_nothing() -> None:
    breaker = Breaker()
    for _ in range(50):
        for succeeded in (False, False, True):
            passage = breaker.enter(0.0)
            assert passage is Passage.ORDINARY
            breaker.leave(passage, succeeded, 0.0)
    assert breaker.state is BreakerState.CLOSED


def test_pauses_double_up_to_a_minute_and_start_anew_after_a_success() -> None:
    breaker, now = Breaker(), 0.0
    for _ in range(3):
        breaker.leave(Passage.ORDINARY, False, now)
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        assert breaker.enter(now + pause - 0.001) is None
        now += pause
        assert breaker.enter(now) is Passage.TRIAL
        assert breaker.enter(now + 1000.0) is None
        breaker.leave(Passage.TRIAL, False, now)
    assert breaker.enter(now + 60.0) is Passage.TRIAL
    breaker.leave(Passage.TRIAL, True, now)
    assert breaker.enter(now) is Passage.ORDINARY
    for _ in range(3):
        breaker.leave(Passage.ORDINARY, False, now)
    assert breaker.enter(now + 0.999) is None
    assert breaker.enter(now + 1.0) is Passage.TRIAL
