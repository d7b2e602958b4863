"""Splits from one pass against replays of each, and budgets against every way to spend them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, flat_traces, prefix_traces, trace_of

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.tiers import (
    BestSplit,
    SplitCurve,
    Tier,
    best_split,
    block_bytes_of,
    parse_tiers,
    replay_tiers,
    split_curve,
)
from kvcm.optimizer.trace import Trace

CAPACITIES = st.lists(st.integers(0, 12), min_size=1, max_size=5)
FIGURES = st.tuples(st.sampled_from([2.0, 8.0, 1e9]), st.sampled_from([0.0, 0.5, 3.0]))
PER_TOKEN = 0.25
BLOCK_BYTES = 16


def tiers_of(capacities: list[int], figures: list[tuple[float, float]]) -> list[Tier]:
    return [
        Tier(f"level {number}", capacity, *figures[number % len(figures)]) for number, capacity in enumerate(capacities)
    ]


def check_split(curve: SplitCurve, trace: Trace, tiers: list[Tier]) -> None:
    capacities = [tier.capacity_blocks for tier in tiers]
    # Not alone in its table, so that rows are kept apart.
    hits = curve.at([[1] * len(tiers), capacities])
    done = replay_tiers(trace, tiers, kv_bytes_per_token=1)
    assert hits.prefix_blocks[1].tolist() == [use.prefix_blocks for use in done.tiers]
    assert hits.prefix_tokens[1].tolist() == [use.prefix_tokens for use in done.tiers]
    assert hits.loading_requests[1].tolist() == (done.request_hits > 0).sum(axis=0).tolist()
    assert hits.read_blocks[1].tolist() == [use.read_blocks for use in done.tiers]
    assert hits.written_blocks[1].tolist() == [use.written_blocks for use in done.tiers]
    ends = np.minimum(done.request_hits.sum(axis=1) * trace.block_tokens, trace.input_tokens)
    each = np.maximum(0.0, ends * PER_TOKEN - done.load_seconds)
    saved = curve.saved_seconds(
        tiers, [capacities], block_bytes=trace.block_tokens, recompute_seconds_per_token=PER_TOKEN
    )
    assert saved.tolist() == pytest.approx([each.sum()])


@settings(max_examples=examples(400), deadline=None)
@given(
    trace=st.one_of(prefix_traces(), flat_traces()),
    capacities=CAPACITIES,
    figures=st.lists(FIGURES, min_size=1, max_size=5),
)
def test_any_split_equals_its_replay(trace: Trace, capacities: list[int], figures: list[tuple[float, float]]) -> None:
    check_split(split_curve(trace), trace, tiers_of(capacities, figures))


@settings(max_examples=examples(100), deadline=None)
@given(trace=prefix_traces(), data=st.data())
def test_requests_may_read_less_than_they_write(trace: Trace, data: st.DataObject) -> None:
    reads = [data.draw(st.integers(0, int(each))) for each in trace.read_blocks]
    trace = replace(trace, read_blocks=np.array(reads, np.int32))
    check_split(split_curve(trace), trace, tiers_of([2, 3, 4], [(8.0, 0.5)]))


def best_of(curve: SplitCurve, tiers: list[Tier], budget: float, block_bytes: int = BLOCK_BYTES) -> BestSplit:
    return best_split(curve, tiers, budget, block_bytes=block_bytes, recompute_seconds_per_token=PER_TOKEN)


@settings(max_examples=examples(150), deadline=None)
@given(
    trace=prefix_traces(),
    prices=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    figures=st.lists(FIGURES, min_size=2, max_size=2),
    budget=st.integers(0, 20),
)
def test_the_best_split_is_the_best_of_all_there_are(
    trace: Trace, prices: tuple[int, int], figures: list[tuple[float, float]], budget: int
) -> None:
    # One unit of money buys a block at price 1.
    curve = split_curve(trace)
    tiers = [
        Tier(f"level {number}", 0, *figures[number], price_per_gib_month=price * 2**30 / BLOCK_BYTES)
        for number, price in enumerate(prices)
    ]
    best = best_of(curve, tiers, float(budget))
    most = trace.unique_blocks
    every = [
        each
        for each in product(range(most + 1), repeat=2)
        if each[0] * prices[0] + each[1] * prices[1] <= budget and (prices[1] or each[1] == most)
    ]
    saved = curve.saved_seconds(tiers, every, block_bytes=BLOCK_BYTES, recompute_seconds_per_token=PER_TOKEN)
    assert best.saved_seconds == pytest.approx(saved.max())
    assert best.price_per_month == pytest.approx(best.capacities[0] * prices[0] + best.capacities[1] * prices[1])
    assert best.price_per_month <= budget + 1e-9
    assert list(best.prefix_blocks) == curve.at([best.capacities]).prefix_blocks[0].tolist()


def test_a_split_of_many_is_better_than_any_of_equal_parts(real_trace: Callable[[str], Trace]) -> None:
    trace = real_trace("mooncake_synthetic")
    curve, size = split_curve(trace), block_bytes_of(trace, 70_272)
    tiers = parse_tiers("host:0,ssd:0,pool:0", trace.unique_blocks)
    best = best_split(curve, tiers, 300.0, block_bytes=size, recompute_seconds_per_token=1 / 32_200)
    # These are the 2,925 ways to hand out 24 parts, with which the search begins.
    parts = [each for each in product(range(25), repeat=3) if sum(each) <= 24]
    prices = [tier.price_per_gib_month * size / 2**30 for tier in tiers]
    spaces = np.minimum(np.array(parts) * 12.5 / prices, trace.unique_blocks).astype(np.int64)
    saved = curve.saved_seconds(tiers, spaces, block_bytes=size, recompute_seconds_per_token=1 / 32_200)
    assert best.saved_seconds > saved.max() > 0
    assert 250 < best.price_per_month <= 300
    assert best.price_per_month == pytest.approx(np.dot(best.capacities, prices))
    assert best.tried > len(parts)


def test_a_budget_stops_where_more_space_is_of_no_use() -> None:
    curve = split_curve(HAND)
    dear = Tier("memory", 0, price_per_gib_month=2**30 / BLOCK_BYTES)
    rich = best_of(curve, [dear], 1e6)
    assert rich.capacities == (8,)
    assert sum(rich.prefix_blocks) == 18
    limited = best_of(curve, [replace(dear, capacity_blocks=5)], 1e6)
    assert limited.capacities == (5,)
    assert sum(limited.prefix_blocks) == 9
    assert best_of(curve, [dear], 0.0).capacities == (0,)
    once = split_curve(trace_of([[1], [1], [2]]))
    assert best_of(once, [dear], 1e6).capacities == (1,)


def test_a_prefix_that_loads_slower_than_it_computes_saves_nothing() -> None:
    curve = split_curve(HAND)
    assert best_of(curve, [Tier("tape", 8, bandwidth_bytes_per_second=0.001)], 1.0).saved_seconds == 0.0


def test_invalid_splits_are_refused() -> None:
    curve = split_curve(HAND)
    with pytest.raises(TraceError, match="read and write plain prefixes"):
        split_curve(trace_of([[1]], writes=[False]))
    for table in ([[1, -1]], [[1], [1, 2]], [1, 2], [], [[]], [["a"]], [[1 << 40]]):
        with pytest.raises(OptionError, match="no rows of equally many numbers"):
            curve.at(table)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="rows have 2 numbers; allowed: 1"):
        curve.saved_seconds([Tier("top", 1)], [[1, 2]], block_bytes=1, recompute_seconds_per_token=1.0)
    with pytest.raises(OptionError, match="budget_per_month is -1"):
        best_of(curve, [Tier("top", 1)], -1.0)
    with pytest.raises(OptionError, match="there are none"):
        best_of(curve, [], 1.0)


def test_a_search_among_few_splits_is_short_and_nearly_as_good(real_trace: Callable[[str], Trace]) -> None:
    trace = real_trace("mooncake_synthetic")
    curve, size = split_curve(trace), block_bytes_of(trace, 70_272)
    tiers = parse_tiers("host:0,ssd:0,pool:0", trace.unique_blocks)
    long = best_split(curve, tiers, 300.0, block_bytes=size, recompute_seconds_per_token=1 / 32_200)
    short = best_split(curve, tiers, 300.0, block_bytes=size, recompute_seconds_per_token=1 / 32_200, most_splits=30)
    a_round = (len(tiers) + 1) ** 2
    assert short.tried <= 3 * 30 + a_round < long.tried
    assert 0.9 * long.saved_seconds < short.saved_seconds <= long.saved_seconds
    assert short.price_per_month <= 300
