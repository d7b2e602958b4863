"""The history against plain models: a dict of samples for the ring, lists of events for the rates."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.model.nodes import METHODS, Endpoint, GroupTotals, Vitals
from kvcm.service.vitals_history import History, Ring, Series

SIZE = 7
NAMES = [Series(name, (("group", group),)) for name in ("x", "y") for group in ("a", "b")]

samples = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 1000))


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.integers(1, 12), samples), min_size=1, max_size=200), st.integers(1, SIZE), st.integers(0, 9)
)
def test_the_ring_is_the_last_slots_of_a_dict(
    steps: list[tuple[int, Mapping[Series, float]]], count: int, late: int
) -> None:
    ring, model, slot = Ring(SIZE), {}, 100
    for gap, sample in steps:
        slot += gap
        ring.append(slot, sample)
        model[slot] = sample
    until = slot + late
    known = {at: sample for at, sample in model.items() if slot - SIZE < at}
    expected = {
        series: [known.get(at, {}).get(series, math.nan) for at in range(until - count + 1, until + 1)]
        for series in NAMES
    }
    found = ring.read(until, count)
    for series in NAMES:
        np.testing.assert_array_equal(found.get(series, np.full(count, np.nan)), expected[series])


def test_series_of_which_nothing_is_left_are_forgotten() -> None:
    ring = Ring(SIZE)
    ring.append(1, {NAMES[0]: 1, NAMES[1]: 1})
    for slot in range(2, 200):
        ring.append(slot, {NAMES[1]: 1})
    assert set(ring) == {NAMES[1]}


@dataclass
class Life:
    """One run of a manager: what it counted, and when. Attributes are those of `Vitals`."""

    started_at: float
    events: list[tuple[float, int]] = field(default_factory=list)

    def counted(self, since: float, until: float) -> int:
        """Return the count of events after one moment and up to another."""
        return sum(count for at, count in self.events if since < at <= until)

    def vitals(self, name: str, at: float) -> Vitals:
        """Return the vitals that it reports at a moment."""
        total = self.counted(-1.0, at)
        return Vitals(
            Endpoint(name, "h", 1, 2, 3, 4), "1", self.started_at, at, "serving", False,
            dict.fromkeys(METHODS, total), dict.fromkeys(METHODS, 0), (1.0,), (total, 0), {"a": GroupTotals(total)},
        )  # fmt: skip


ticks = st.lists(
    st.tuples(
        st.sampled_from([10, 10, 10, 20, 50]),
        st.lists(
            st.tuples(st.sampled_from(["m1", "m2", "m3"]), st.sampled_from(["count", "restart", "end", "silent"]),
                      st.integers(1, 1000)),
            max_size=5,
        ),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


def _rates(
    lives: Mapping[str, Life], received: Mapping[str, tuple[Life, float]], last: float, now: float
) -> Sequence[float]:
    """Return the rates of managers as the model has them: each manager's count since its last report or its start."""
    found = []
    for name, life in lives.items():
        known, at = received.get(name, (None, last))
        if known is life:
            found.append(life.counted(at, now) / (now - at))
        elif life.started_at >= at:
            found.append(life.counted(-1.0, now) / max(1.0, now - life.started_at))
    return found


@settings(max_examples=examples(100))
@given(ticks)
def test_rates_are_the_events_of_all_managers_while_managers_come_and_go(
    steps: list[tuple[int, list[tuple[str, str, int]]]],
) -> None:
    now = 1000.0
    history, last = History(now), now
    lives: dict[str, Life] = {}
    received: dict[str, tuple[Life, float]] = {}
    expected: list[float | None] = []
    for gap, actions in steps:
        begin, now = now, now + gap
        silent = set()
        for number, (name, deed, count) in enumerate(actions):
            at = begin + (number + 1) * gap / 10
            if deed == "end":
                lives.pop(name, None)
            elif deed == "silent":
                silent.add(name)
            elif deed == "restart" or name not in lives:
                lives[name] = Life(at, [(at, count)])
            else:
                lives[name].events.append((at, count))
        reported = {name: life for name, life in lives.items() if name not in silent}
        rates = _rates(reported, received, last, now)
        history.add(now, {name: life.vitals(name, now) for name, life in reported.items()}, {"a": 5})
        expected += [None] * (gap // 10 - 1) + [sum(rates) if rates else None]
        received, last = {name: (life, now) for name, life in reported.items()}, now
    seconds = max(60, 10 * len(expected))
    span = asyncio.run(history.range(now, seconds))
    values = {(each.name, *each.labels.values()): each.values for each in span.series}
    absent: list[float | None] = [None] * (seconds // 10)
    requests = values.get(("requests_per_second", "match"), absent)[-len(expected) :]
    assert span.until * 1000 == now * 1000
    assert [value is None for value in requests] == [rate is None for rate in expected]
    assert [value or 0.0 for value in requests] == [pytest.approx(rate or 0.0, rel=1e-5) for rate in expected]
    hits = values.get(("lookup_keys_per_second", "a", "hit"), absent)[-len(expected) :]
    assert hits == requests


def test_a_day_is_reported_in_few_values_that_are_means_and_of_the_99th_percentile_the_most() -> None:
    history = History(0.0)
    counts = [0, 0]
    for minute in range(1, 1441):
        counts[minute % 2] += 60
        vitals = Vitals(
            Endpoint("m", "h", 1, 2, 3, 4), "1", 0.0, minute * 60.0, "serving", True,
            dict.fromkeys(METHODS, sum(counts)), dict.fromkeys(METHODS, 0),
            (1.0, 2.0), (*counts, 0), used_bytes={"a": {"nfs": minute}},
        )  # fmt: skip
        history.add(minute * 60.0, {"m": vitals}, {"a": 9})
    span = asyncio.run(history.range(86400.0, 86400))
    values = {each.name: each.values for each in span.series}
    assert span.interval_seconds == 240
    assert {len(each.values) for each in span.series} == {360}
    assert set(values["requests_per_second"]) == {1.0}
    assert set(values["quota_bytes"]) == {9.0}
    assert values["used_bytes"][-1] == 1438.5
    assert values["match_p99_seconds"][-1] == pytest.approx(1.99)
    assert values["match_p50_seconds"][-1] == pytest.approx((0.5 + 1.5) / 2)


def test_groups_beyond_the_bound_are_summed_up_and_make_space_when_they_are_gone() -> None:
    history = History(0.0)
    for tick in range(300):  # of ten minutes: the first groups are gone for more than a day
        names = [f"g{tick // 150}-{number}" for number in range(100)]
        history.add(tick * 600.0, {}, dict.fromkeys(names, 1))
    span = asyncio.run(history.range(299 * 600.0, 3600))
    found = {each.labels["group"]: each.values[-1] for each in span.series}
    assert found.pop("other") == 100 - 64
    assert len(found) == 64
    assert all(name.startswith("g1-") for name in found)
