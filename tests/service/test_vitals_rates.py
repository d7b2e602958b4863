"""Rates of counters that begin anew with every start, quantiles of buckets, and sums over managers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vitals_rig import BOUNDS, vitals

from kvcm.model.vitals import GroupTotals, Vitals
from kvcm.service.vitals import samples
from kvcm.service.vitals.rates import Rates, quantile, rates_between
from kvcm.service.vitals.ring import Series


def rates(before: Vitals | None, after: Vitals, since: float = 0.0) -> Rates:
    found = rates_between(before, after, since)
    assert found is not None
    return found


def test_a_rate_is_what_was_gained_over_the_time_between_the_two_vitals() -> None:
    before = vitals(at=10, requests=100, errors=1, groups={"a": GroupTotals(10, 20, 30, 40)}, match_counts=(1, 2, 3))
    after = vitals(at=20, requests=150, errors=2, groups={"a": GroupTotals(20, 40, 60, 80)}, match_counts=(2, 2, 9))
    found = rates(before, after)
    assert found.requests == dict.fromkeys(("match", "start", "finish", "other"), 5.0)
    assert found.errors["match"] == pytest.approx(0.1)
    assert found.groups["a"] == (1.0, 2.0, 3.0, 4.0)
    assert found.match_counts == (1, 0, 6)


def test_a_restart_makes_no_rate_negative() -> None:
    before = vitals(at=10, requests=100)
    assert rates(before, vitals(started_at=12, at=22, requests=50)).requests["match"] == 5.0


def test_counters_that_shrink_have_gained_nothing() -> None:
    found = rates(vitals(at=10, requests=9, match_counts=(5, 0, 1)), vitals(at=20, requests=3, match_counts=(2, 0, 4)))
    assert found.requests["match"] == 0.0
    assert found.match_counts == (0, 0, 3)


def test_vitals_that_are_still_the_same_tell_no_rate() -> None:
    assert rates_between(vitals(at=10), vitals(at=10), 0.0) is None


@pytest.mark.parametrize(("started_at", "is_known"), [(4.0, False), (5.0, True), (8.0, True)])
def test_a_manager_that_is_heard_for_the_first_time_has_rates_if_it_began_meanwhile(
    started_at: float, is_known: bool
) -> None:
    found = rates_between(None, vitals(started_at=started_at, at=10, requests=10), since=5.0)
    assert (found is not None) is is_known


def test_the_first_moment_of_a_manager_is_not_taken_for_its_rate() -> None:
    assert rates(None, vitals(started_at=9.99, at=10, requests=3), since=5.0).requests["match"] == 3.0


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        (0.5, (0, 0, 0), None),
        (0.5, (10, 0, 0), 0.0005),
        (1.0, (10, 0, 0), 0.001),
        (0.5, (5, 5, 0), 0.001),
        (0.75, (5, 5, 0), 0.0055),
        (0.99, (0, 0, 7), 0.01),
        (0.5, (0, 4, 0), 0.0055),
    ],
)
def test_a_quantile_is_inside_its_bucket(share: float, counts: tuple[int, ...], expected: float | None) -> None:
    found = quantile(share, BOUNDS, counts)
    assert found == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.integers(0, 50), min_size=3, max_size=3), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_stands_for(counts: list[int], share: float) -> None:
    values = [bucket for bucket, count in enumerate(counts) for _ in range(count)]
    found = quantile(share, BOUNDS, counts)
    if not values:
        assert found is None
        return
    bucket = next(at for at in range(3) if sum(counts[: at + 1]) >= share * len(values))
    low, high = (0.0, *BOUNDS)[min(bucket, 2)], (*BOUNDS, BOUNDS[-1])[bucket]
    assert found is not None
    assert low <= found <= high + 1e-12


def _sample(
    *found: Rates, used: list[Vitals] | None = None, quotas: dict[str, int] | None = None
) -> dict[Series, float]:
    return dict(samples.sample_of(found, used or [], quotas or {}, lambda name: name if name != "b" else "other"))


def _of(name: str, *labels: tuple[str, str]) -> Series:
    return Series(name, labels)


def test_a_sample_sums_up_managers_and_groups_of_one_name() -> None:
    groups = {"a": GroupTotals(10, 10), "b": GroupTotals(1), "other": GroupTotals(2)}
    one = rates(None, vitals(at=1, requests=3, errors=1, groups=groups))
    sample = _sample(one, one)
    assert sample[_of(samples.REQUESTS, ("method", "match"))] == 6.0
    assert sample[_of(samples.ERRORS)] == 8.0
    assert sample[_of(samples.HIT_KEYS, ("group", "a"))] == 20.0
    assert sample[_of(samples.HIT_KEYS, ("group", "other"))] == 6.0


def test_percentiles_are_of_the_lookups_of_all_managers_together() -> None:
    fast = rates(None, vitals(at=1, match_counts=(98, 0, 0)))
    slow = rates(None, vitals(at=1, match_counts=(0, 2, 0)))
    sample = _sample(fast, slow)
    assert sample[_of(samples.P50)] == pytest.approx(0.001 * 50 / 98)
    assert sample[_of(samples.P99)] == pytest.approx(0.0055)


def test_buckets_of_another_release_are_left_out() -> None:
    fast = rates(None, vitals(at=1, match_counts=(10, 0, 0)))
    sample = _sample(fast, fast._replace(match_bounds=(7.0,), match_counts=(5, 5)))
    assert sample[_of(samples.P99)] <= 0.001


def test_nothing_is_told_where_nothing_is_known() -> None:
    assert _sample() == {}
    assert samples.P50 not in {series.name for series in _sample(rates(None, vitals(at=1)))}


def test_what_is_used_is_what_the_latest_leader_says() -> None:
    old = vitals(at=10, used_bytes={"a": {"nfs": 1, "hf3fs": 7}})
    new = vitals("m2", at=20, used_bytes={"a": {"nfs": 2}})
    follower = replace(vitals("m3", at=30, used_bytes={"a": {"nfs": 9}}), is_leader=False)
    sample = _sample(used=[old, new, follower], quotas={"a": 100})
    assert sample == {
        _of(samples.USED, ("group", "a"), ("tier", "nfs")): 2,
        _of(samples.QUOTA, ("group", "a")): 100,
    }
