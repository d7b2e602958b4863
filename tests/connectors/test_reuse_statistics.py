"""Counts of connectors: nothing is lost or counted twice, in whatever intervals and on whatever ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connectors.reuse.statistics import BUCKETS_SECONDS, ReuseStatistics, Snapshot, merged

NAMES = ("lookups", "saved_blocks")
DEEDS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), st.integers(0, 9)),
    st.tuples(st.just("observe"), st.just("load_seconds"), st.sampled_from([0.0001, 0.002, 0.5, 99.0])),
    st.tuples(st.just("take"), st.none(), st.none()),
)


@given(st.lists(DEEDS, max_size=40))
def test_the_takings_add_up_to_the_total(deeds: list[tuple[str, str, float]]) -> None:
    counted, taken = ReuseStatistics(), Snapshot()
    model: dict[str, float] = dict.fromkeys(NAMES, 0)
    seconds: list[float] = []
    for deed, name, value in deeds:
        if deed == "add":
            counted.add(**{name: int(value)})
            model[name] += value
        elif deed == "observe":
            counted.observe(name, value)
            seconds.append(value)
        else:
            taken = merged(taken, counted.take())
    taken = merged(taken, counted.take())
    total = counted.total()
    assert {name: total.get(name, 0) for name in NAMES} == model == {name: taken.get(name, 0) for name in NAMES}
    for snapshot in (total, taken):
        times = snapshot.get("load_seconds", [0.0] * (len(BUCKETS_SECONDS) + 2))
        assert isinstance(times, list)
        assert sum(times[:-1]) == len(seconds)
        assert abs(times[-1] - sum(seconds)) < 1e-6
    assert counted.take() == {}


def test_a_time_is_counted_in_its_bucket() -> None:
    counted = ReuseStatistics()
    counted.observe("load_seconds", BUCKETS_SECONDS[2])
    counted.observe("load_seconds", BUCKETS_SECONDS[-1] + 1)
    times = counted.total()["load_seconds"]
    assert isinstance(times, list)
    assert [bucket for bucket, count in enumerate(times[:-1]) if count] == [2, len(BUCKETS_SECONDS)]
