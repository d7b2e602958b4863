"""Token buckets against a plain model, with time as the test says."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.service.token_bucket import TokenBuckets


@dataclass
class Model:
    """One principal: everything that it was given, ever. Exact, without a bucket."""

    rate: int
    burst: int
    taken: list[tuple[Fraction, int]] = field(default_factory=list)

    def holds(self, now: Fraction) -> Fraction:
        """Return the tokens: replayed from the beginning."""
        tokens, at = Fraction(self.burst), Fraction(0)
        for time, amount in self.taken:
            tokens = min(Fraction(self.burst), tokens + (time - at) * self.rate) - amount
            at = time
        return min(Fraction(self.burst), tokens + (now - at) * self.rate)

    def take(self, now: Fraction, amount: int) -> Fraction:
        """Return the seconds to wait, 0 when it is taken."""
        missing = min(amount, self.burst) - self.holds(now)
        if missing > 0:
            return missing / self.rate
        self.taken.append((now, amount))
        return Fraction(0)


class Time:
    """A clock in 64ths of a second, which floats hold exactly."""

    def __init__(self) -> None:
        self.now = Fraction(0)

    def __call__(self) -> float:
        return float(self.now)


STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=40
)  # who, 64ths of a second since the last step, how many


@settings(max_examples=examples(300), deadline=None)
@given(rate=st.sampled_from([1, 2, 8, 64]), burst=st.integers(1, 20), steps=STEPS)
def test_buckets_do_what_a_plain_model_does(rate: int, burst: int, steps: list[tuple[str, int, int]]) -> None:
    time = Time()
    buckets = TokenBuckets(time)
    buckets.set(rate, burst)
    models = {name: Model(rate, burst) for name in "ab"}
    for who, pause, amount in steps:
        time.now += Fraction(pause, 64)
        expected = models[who].take(time.now, amount)
        assert abs(buckets.take(who, amount) - expected) < 1e-9


@settings(max_examples=examples(200), deadline=None)
@given(rate=st.sampled_from([1, 2, 8, 64]), burst=st.integers(1, 20), steps=STEPS)
def test_who_waits_as_long_as_told_passes_then_and_not_before(
    rate: int, burst: int, steps: list[tuple[str, int, int]]
) -> None:
    time = Time()
    buckets = TokenBuckets(time)
    buckets.set(rate, burst)
    for _, pause, amount in steps:
        time.now += Fraction(pause, 64)
        wait = Fraction(buckets.take("a", amount))
        if wait:
            time.now += wait * Fraction(9, 10)
            assert buckets.take("a", amount) > 0
            time.now += wait * Fraction(1, 10) + Fraction(1, 1 << 20)
            assert buckets.take("a", amount) == 0


def _buckets(rate: float = 10, burst: float = 100, most: int = 4) -> tuple[TokenBuckets, Time]:
    time = Time()
    buckets = TokenBuckets(time, most)
    buckets.set(rate, burst)
    return buckets, time


def test_more_than_the_burst_passes_when_the_bucket_is_full_and_leaves_a_debt() -> None:
    buckets, time = _buckets()
    assert buckets.take("a", 150) == 0
    assert buckets.take("a", 10) == 6.0  # 50 of debt and 10 of its own
    assert buckets.take("a", 150) == 15.0
    time.now += 15
    assert buckets.take("a", 150) == 0


def test_what_was_not_done_is_given_back() -> None:
    buckets, _ = _buckets()
    buckets.take("a", 100)
    buckets.give_back("a", 100)
    assert buckets.take("a", 100) == 0


def test_a_bucket_is_off_without_a_rate_and_starts_full_when_it_is_switched_on() -> None:
    buckets, _ = _buckets()
    buckets.take("a", 100)
    buckets.set(0, 100)
    assert (buckets.is_on, len(buckets)) == (False, 0)
    buckets.set(10, 50)
    assert (buckets.is_on, buckets.take("a", 50)) == (True, 0)


def test_a_debt_stays_when_the_limits_change() -> None:
    buckets, _ = _buckets()
    buckets.take("a", 150)
    buckets.set(5, 1000)
    assert buckets.take("a", 10) == 12.0
    assert buckets.take("b", 1000) == 0


def test_full_buckets_are_forgotten_and_others_are_not() -> None:
    buckets, time = _buckets()
    buckets.take("debtor", 199)
    for number in range(3):
        buckets.take(f"idle {number}", 1)
    time.now += 2
    assert buckets.take("new", 1) == 0
    assert len(buckets) == 2
    assert buckets.take("debtor", 1) == 8.0


def test_who_finds_no_room_in_the_table_shares_one_bucket() -> None:
    buckets, time = _buckets()
    for number in range(4):
        buckets.take(f"debtor {number}", 199)
    assert buckets.take("late", 60) == 0
    assert buckets.take("later", 60) == 2.0
    assert len(buckets) == 4
    time.now += 30
    assert buckets.take("later", 60) == 0
    assert len(buckets) == 1


def test_the_table_is_looked_over_once_a_second_at_most() -> None:
    buckets, time = _buckets(rate=1000, burst=10)
    for number in range(4):
        buckets.take(f"debtor {number}", 1000)
    buckets.take("late", 1)
    time.now += Fraction(1, 2)
    buckets.set(100_000, 10)  # all are full a moment later
    time.now += Fraction(1, 4)
    buckets.take("late", 1)
    assert len(buckets) == 4
    time.now += 1
    buckets.take("late", 1)
    assert len(buckets) == 1
