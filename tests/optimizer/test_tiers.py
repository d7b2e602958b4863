"""Hierarchies: the compiled replay against plain dictionaries, and what holds for every hierarchy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from tier_model import TierModel
from traces import HAND, flat_traces, prefix_traces, trace_of

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay import replay
from kvcm.optimizer.tiers import Tier, block_bytes_of, parse_tiers, replay_tiers
from kvcm.optimizer.trace import QueryMode, Trace

CAPACITIES = st.lists(st.integers(1, 12), min_size=1, max_size=5)
FEW_BLOCKS = st.builds(trace_of, st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=10, max_size=40))
TRACES = st.one_of(prefix_traces(separate=True), flat_traces(separate=True), FEW_BLOCKS)


def tiers_of(capacities: list[int]) -> list[Tier]:
    return [Tier(f"level {number}", capacity) for number, capacity in enumerate(capacities)]


@settings(max_examples=examples(800), deadline=None)
@given(trace=TRACES, capacities=CAPACITIES)
def test_the_replay_counts_like_plain_dictionaries(trace: Trace, capacities: list[int]) -> None:
    model = TierModel(capacities)
    model.replay(trace)
    done = replay_tiers(trace, tiers_of(capacities))
    assert {name: [getattr(use, name) for use in done.tiers] for name in model.sums} == model.sums
    assert done.hits.full_requests == model.full_requests
    assert done.request_hits.sum(axis=0).tolist() == model.sums["prefix_blocks"]


@settings(max_examples=examples(200), deadline=None)
@given(
    trace=st.one_of(prefix_traces(separate=True), flat_traces(separate=True)),
    capacities=st.lists(st.integers(1, 8), min_size=2, max_size=5),
)
def test_a_hierarchy_is_one_lru_of_all_its_space(trace: Trace, capacities: list[int]) -> None:
    # Identity 5 of the semantics, for two to five levels.
    assert replay_tiers(trace, tiers_of(capacities)).hits == replay(trace, PolicySpec("lru"), sum(capacities)).hits


@settings(max_examples=examples(100), deadline=None)
@given(trace=TRACES, capacities=CAPACITIES, data=st.data())
def test_a_level_without_space_is_not_there(trace: Trace, capacities: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(capacities)))
    without = replay_tiers(trace, tiers_of(capacities))
    done = replay_tiers(trace, tiers_of([*capacities[:place], 0, *capacities[place:]]))
    assert done.hits == without.hits
    assert np.array_equal(np.delete(done.request_hits, place, axis=1), without.request_hits)
    assert done.tiers[place].written_blocks == done.tiers[place].read_blocks == 0


def test_loads_take_the_latency_once_and_the_bandwidth_for_every_block() -> None:
    # The second request finds one block at the top and three below.
    trace = trace_of([[1, 2, 3, 4], [4], [4, 1, 2, 3]], block_tokens=10)
    tiers = [Tier("top", 1, 1000.0, 1.0), Tier("below", 3, 100.0, 2.0)]
    one_by_one = replay_tiers(trace, tiers, kv_bytes_per_token=5)
    assert one_by_one.request_hits.tolist() == [[0, 0], [1, 0], [1, 3]]
    assert one_by_one.load_seconds.tolist() == [0.0, 1.0 + 0.05, 1.05 + 2.0 + 3 * 0.5]
    times = one_by_one.load_times
    assert (times.requests, times.longest) == (2, 4.55)
    assert times.mean == pytest.approx((1.05 + 4.55) / 2)
    assert times.total == pytest.approx(1.05 + 4.55)


def test_windows_hold_the_traffic_in_them() -> None:
    trace = trace_of([[1, 2], [3, 4], [1, 2]], times_seconds=[100.0, 100.5, 1100.0], block_tokens=10)
    tiers = [Tier("top", 2, 1.0, price_per_gib_month=2**30), Tier("below", 2, math.inf)]
    done = replay_tiers(trace, tiers, kv_bytes_per_token=1)
    series = done.series
    assert series.window_seconds == 10.0
    assert series.starts_seconds.tolist() == [10.0 * number for number in range(101)]
    assert series.hit_rate[:, [0, 100]].tolist() == [[0.0, 0.0], [0.0, 1.0]]
    # Four blocks of ten bytes came to the top and two went down; then two came up and two went down.
    assert series.written_bytes_per_second[:, [0, 100]].tolist() == [[4.0, 2.0], [2.0, 2.0]]
    assert series.read_bytes_per_second[:, [0, 100]].tolist() == [[2.0, 2.0], [0.0, 2.0]]
    assert series.utilisation[:, [0, 100]].tolist() == [[6.0, 4.0], [0.0, 0.0]]
    assert not series.utilisation[:, 1:100].any()
    assert [use.saturated_seconds for use in done.tiers] == [20.0, 0.0]
    assert (done.tiers[0].read_bytes, done.tiers[0].written_bytes) == (40, 60)
    assert done.price_per_month == done.tiers[0].price_per_month == 20.0


@settings(max_examples=examples(50), deadline=None)
@given(trace=TRACES, capacities=CAPACITIES)
def test_windows_add_up_to_the_traffic_of_the_levels(trace: Trace, capacities: list[int]) -> None:
    done = replay_tiers(trace, tiers_of(capacities), kv_bytes_per_token=3)
    width = done.series.window_seconds
    for level, use in enumerate(done.tiers):
        assert done.series.read_bytes_per_second[level].sum() * width == pytest.approx(use.read_bytes)
        assert done.series.written_bytes_per_second[level].sum() * width == pytest.approx(use.written_bytes)


def test_requests_out_of_order_count_in_their_own_windows() -> None:
    trace = trace_of([[1], [1], [1]], times_seconds=[45.5, 48.0, 45.0])
    series = replay_tiers(trace, [Tier("top", 1)]).series
    assert series.starts_seconds.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert series.hit_rate.tolist() == [[0.5, 0.0, 0.0, 1.0]]


def test_a_trace_of_nothing_moves_nothing() -> None:
    done = replay_tiers(trace_of([[], []], times_seconds=[0, 0]), [Tier("top", 3)])
    assert (done.hits.prefix_blocks, done.block_hit_rate, done.token_hit_rate, done.load_times.requests) == (0, 0, 0, 0)
    assert not np.isnan(done.series.hit_rate).any()


def test_tiers_as_text() -> None:
    gpu, disk = parse_tiers("gpu:25%, disk:7:bandwidth=2e9:latency=0.5:price=3", 40)
    assert (gpu.name, gpu.capacity_blocks, gpu.bandwidth_bytes_per_second) == ("gpu", 10, math.inf)
    assert disk == Tier("disk", 7, 2e9, 0.5, 3.0)
    assert parse_tiers("host:0", 40)[0].capacity_blocks == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host", "'host' has no capacity"),
        ("host:x", "capacities: 'x'"),
        ("host:5,host:6", "names a tier twice"),
        ("host:5:bandwith=3", "did you mean bandwidth"),
        ("host:5:bandwidth=fast", "bandwidth is 'fast'; allowed: a number"),
        ("host:5:bandwidth=0", "bandwidth is 0.0; allowed: bytes/s above 0"),
        ("host:5:latency=-1", "latency is -1.0"),
        ("host:5:price=inf", "price is inf"),
    ],
)
def test_tiers_that_are_none_are_refused(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse_tiers(text, 100)


def test_invalid_replays_are_refused() -> None:
    with pytest.raises(OptionError, match="there are 0; allowed: 1 to 31"):
        replay_tiers(HAND, [])
    with pytest.raises(OptionError, match="kv_bytes_per_token is 0"):
        replay_tiers(HAND, [Tier("top", 1)], kv_bytes_per_token=0)
    with pytest.raises(TraceError, match="plain prefixes"):
        replay_tiers(replace(HAND, modes={0: QueryMode.BATCH}), [Tier("top", 1)])


def test_a_block_is_as_large_as_the_largest_where_they_differ() -> None:
    assert block_bytes_of(HAND, 7) == 70
    assert block_bytes_of(replace(HAND, block_tokens=0, instance_block_tokens=(16, 64)), 2) == 128
