"""The policy's steps, one by one, with a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.connectors.addresses import Addresses
from kvcm.connectors.calls import CallSteps, Pause, Policy, Reply, RetrySettings, Send, Verdict
from kvcm.connectors.results import Outcome
from kvcm.model.errors import ErrorCode
from kvcm.protocol import meta_service_pb2 as meta

Common = meta.CommonResponse
FIRST, SECOND, THIRD = (f"manager-{number}:1" for number in range(3))


@dataclass
class ManualClock:
    """Time as the test says."""

    seconds: float = 0.0
    steps: list[Send | Pause] = field(default_factory=list)

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def answer(code: ErrorCode) -> Reply[Common]:
    return Reply(
        Common(header=meta.CommonResponseHeader(status=meta.Status(code=meta.ErrorCode.Name(code), message="m")))
    )


def status(code: grpc.StatusCode) -> Reply[Common]:
    return Reply(None, code, "details")


OK = answer(ErrorCode.OK)
UNAVAILABLE = status(grpc.StatusCode.UNAVAILABLE)
TIMEOUT = status(grpc.StatusCode.DEADLINE_EXCEEDED)


def policy(clock: ManualClock, addresses: int = 1, settings: RetrySettings | None = None) -> Policy:
    """Return a policy whose pauses are always the longest possible."""
    given = Addresses([f"manager-{number}:1" for number in range(addresses)], clock)
    return Policy(given, settings or RetrySettings(), clock, lambda low, high: high)


def carry_out(
    policy: Policy, clock: ManualClock, reply: Callable[[Send], Reply[Common]], budget_seconds: float = 1.0
) -> Verdict[Common]:
    """Carry out the steps of one call: an answer takes no time, a timeout and a pause all of theirs."""
    clock.steps.clear()
    steps: CallSteps[Common] = policy.steps(budget_seconds)
    result: Reply[Common] | None = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            verdict: Verdict[Common] = end.value
            return verdict
        clock.steps.append(step)
        result = None
        if isinstance(step, Send):
            result = reply(step)
        if isinstance(step, Pause):
            clock.seconds += step.seconds
        elif result is TIMEOUT:
            clock.seconds += step.timeout_seconds


def test_an_answer_ends_the_call(clock: ManualClock) -> None:
    verdict = carry_out(policy(clock), clock, lambda _: OK)
    assert (verdict.outcome, verdict.code, verdict.retries) == (Outcome.OK, ErrorCode.OK, 0)
    assert clock.steps == [Send(FIRST, 1.0)]


@pytest.mark.parametrize(
    "passing",
    [
        UNAVAILABLE,
        status(grpc.StatusCode.RESOURCE_EXHAUSTED),
        status(grpc.StatusCode.CANCELLED),
        answer(ErrorCode.SERVICE_NOT_READY),
        answer(ErrorCode.SERVER_NOT_LEADER),
    ],
)
def test_what_may_go_away_is_tried_again_after_growing_pauses(clock: ManualClock, passing: Reply[Common]) -> None:
    verdict = carry_out(policy(clock), clock, lambda _: OK if clock.seconds > 0.1 else passing)
    assert verdict.outcome is Outcome.OK
    assert verdict.retries == 2
    assert [step.seconds for step in clock.steps if isinstance(step, Pause)] == [0.05, 0.1]


def shed(pushback_seconds: float, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Reply[Common]:
    return Reply(None, code, "overloaded", pushback_seconds)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_pushback_is_waited_for_and_a_little_longer(clock: ManualClock, code: grpc.StatusCode) -> None:
    verdict = carry_out(policy(clock), clock, lambda _: OK if clock.seconds >= 0.3 else shed(0.3, code))
    assert (verdict.outcome, verdict.retries, clock.steps[1]) == (Outcome.OK, 1, Pause(0.35))


def test_a_second_pushback_ends_the_call(clock: ManualClock) -> None:
    verdict = carry_out(policy(clock), clock, lambda _: shed(0.01), 60.0)
    assert (verdict.outcome, verdict.retries) == (Outcome.MISS_ON_ERROR, 1)
    assert "overloaded" in verdict.reason


def test_a_pushback_beyond_the_deadline_ends_the_call_at_once(clock: ManualClock) -> None:
    carry_out(policy(clock), clock, lambda _: shed(1.0))
    assert (len(clock.steps), clock.seconds) == (1, 0.0)


def test_another_manager_is_asked_before_any_wait(clock: ManualClock) -> None:
    replies = {FIRST: shed(30.0), SECOND: OK}
    assert carry_out(policy(clock, 2), clock, lambda send: replies[send.address]).outcome is Outcome.OK
    assert clock.seconds == 0.0


def test_a_manager_that_says_nothing_is_asked_again_as_ever(clock: ManualClock) -> None:
    replies = {FIRST: shed(30.0), SECOND: UNAVAILABLE}
    carry_out(policy(clock, 2), clock, lambda send: replies[send.address])
    assert [step.seconds for step in clock.steps if isinstance(step, Pause)] == [0.05, 0.1, 0.2]


def test_a_manager_that_sheds_is_alive(clock: ManualClock) -> None:
    living = policy(clock)
    for _ in range(10):
        assert carry_out(living, clock, lambda _: shed(5.0)).reason.endswith("overloaded")


@pytest.mark.parametrize(
    "final",
    [
        answer(ErrorCode.INVALID_ARGUMENT),
        answer(ErrorCode.INSTANCE_NOT_EXIST),
        answer(ErrorCode.IO_ERROR),
        status(grpc.StatusCode.UNIMPLEMENTED),
        status(grpc.StatusCode.UNAUTHENTICATED),
        Reply(Common()),
    ],
)
def test_what_stays_is_not_tried_again(clock: ManualClock, final: Reply[Common]) -> None:
    verdict = carry_out(policy(clock), clock, lambda _: final)
    assert verdict.outcome is Outcome.MISS_ON_ERROR
    assert verdict.reason
    assert len(clock.steps) == 1


def test_a_timeout_of_the_whole_budget_is_final(clock: ManualClock) -> None:
    verdict = carry_out(policy(clock), clock, lambda _: TIMEOUT)
    assert (verdict.outcome, len(clock.steps), clock.seconds) == (Outcome.TIMEOUT, 1, 1.0)


def test_the_list_of_addresses_is_walked_without_pauses_and_remembered(clock: ManualClock) -> None:
    walking = policy(clock, addresses=3)
    replies = {FIRST: UNAVAILABLE, SECOND: answer(ErrorCode.SERVER_NOT_LEADER), THIRD: OK}
    assert carry_out(walking, clock, lambda send: replies[send.address]).outcome is Outcome.OK
    assert [step.address for step in clock.steps if isinstance(step, Send)] == [FIRST, SECOND, THIRD]
    assert clock.seconds == 0
    assert carry_out(walking, clock, lambda send: replies[send.address]).retries == 0
    assert clock.steps == [Send(THIRD, 1.0 / 3)]


def test_a_silent_address_leaves_time_for_the_others(clock: ManualClock) -> None:
    verdict = carry_out(policy(clock, addresses=2), clock, lambda send: OK if send.address == SECOND else TIMEOUT)
    assert verdict.outcome is Outcome.OK
    assert clock.seconds == 0.5


@given(
    st.integers(1, 4),
    st.floats(0.0, 5.0),
    st.lists(st.sampled_from([UNAVAILABLE, TIMEOUT, answer(ErrorCode.SERVER_NOT_LEADER)]), min_size=1),
)
def test_the_budget_is_never_exceeded(addresses: int, budget: float, replies: list[Reply[Common]]) -> None:
    clock = ManualClock()
    verdict = carry_out(
        policy(clock, addresses), clock, lambda _: replies[len(clock.steps) % len(replies)], budget_seconds=budget
    )
    assert verdict.outcome is not Outcome.OK
    assert verdict.reason
    assert clock.seconds <= budget * (1 + 1e-9)
    assert sum(isinstance(step, Send) for step in clock.steps) <= RetrySettings().max_rounds * addresses


def test_the_breaker_opens_probes_and_closes(clock: ManualClock) -> None:
    settings = RetrySettings(max_rounds=1, breaker_failures=2, breaker_seconds=10.0, breaker_max_seconds=15.0)
    broken = policy(clock, settings=settings)
    for _ in range(2):
        carry_out(broken, clock, lambda _: UNAVAILABLE)
        assert len(clock.steps) == 1
    verdict = carry_out(broken, clock, lambda _: OK)
    assert (verdict.outcome, clock.steps) == (Outcome.MISS_ON_ERROR, [])  # open: not even asked
    clock.seconds = 10.0
    carry_out(broken, clock, lambda _: UNAVAILABLE)  # the probe fails: twice as long, up to the limit
    assert len(clock.steps) == 1
    clock.seconds = 24.9
    assert carry_out(broken, clock, lambda _: OK).outcome is Outcome.MISS_ON_ERROR
    clock.seconds = 25.0
    assert carry_out(broken, clock, lambda _: OK).outcome is Outcome.OK
    assert carry_out(broken, clock, lambda _: OK).outcome is Outcome.OK  # closed again


def test_a_refusal_shows_that_the_manager_lives(clock: ManualClock) -> None:
    living = policy(clock, settings=RetrySettings(breaker_failures=1))
    for _ in range(5):
        carry_out(living, clock, lambda _: answer(ErrorCode.INVALID_ARGUMENT))
        assert len(clock.steps) == 1


@pytest.mark.parametrize("code", [ErrorCode.SERVICE_NOT_READY, ErrorCode.SERVER_NOT_LEADER])
def test_an_answer_that_is_tried_again_shows_life_too(clock: ManualClock, code: ErrorCode) -> None:
    settings = RetrySettings(max_rounds=2, breaker_failures=1, breaker_seconds=10.0)
    living = policy(clock, settings=settings)
    for _ in range(5):
        carry_out(living, clock, lambda _: answer(code))
        assert sum(isinstance(step, Send) for step in clock.steps) == 2
    replies = iter([UNAVAILABLE, answer(code)])
    carry_out(living, clock, lambda _: next(replies))
    assert carry_out(living, clock, lambda _: OK).outcome is Outcome.OK  # the last reply decides
    carry_out(living, clock, lambda _: UNAVAILABLE)
    assert carry_out(living, clock, lambda _: OK).outcome is Outcome.MISS_ON_ERROR
    clock.seconds += 10.0
    carry_out(living, clock, lambda _: answer(code))  # the probe is answered
    assert carry_out(living, clock, lambda _: OK).outcome is Outcome.OK


@pytest.mark.parametrize("budget", [0.0, -1.0])
def test_a_call_that_sends_nothing_says_nothing_about_the_manager(clock: ManualClock, budget: float) -> None:
    idle = policy(clock, settings=RetrySettings(breaker_failures=2))
    for _ in range(5):
        assert carry_out(idle, clock, lambda _: OK, budget).outcome is Outcome.TIMEOUT
        assert clock.steps == []
    assert carry_out(idle, clock, lambda _: OK).outcome is Outcome.OK
    carry_out(idle, clock, lambda _: TIMEOUT)
    carry_out(idle, clock, lambda _: OK, budget)  # neither a success nor a failure
    assert carry_out(idle, clock, lambda _: OK).outcome is Outcome.OK


def test_a_probe_that_sends_nothing_leaves_the_probe_to_the_next(clock: ManualClock) -> None:
    broken = policy(clock, settings=RetrySettings(max_rounds=1, breaker_failures=1, breaker_seconds=10.0))
    carry_out(broken, clock, lambda _: UNAVAILABLE)
    clock.seconds = 10.0
    carry_out(broken, clock, lambda _: OK, budget_seconds=0.0)
    probe: CallSteps[Common] = broken.steps(1.0)
    assert isinstance(probe.send(None), Send)
    assert carry_out(broken, clock, lambda _: OK).outcome is Outcome.MISS_ON_ERROR  # still open for all others
