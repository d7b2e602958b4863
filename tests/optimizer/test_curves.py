"""Curves of one pass are what replays count at each capacity, one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, HAND_HITS, flat_traces, prefix_traces, trace_of

from kvcm.optimizer.curves import CURVES, leaf_lru_curve, lru_curve
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay import reference_replay
from kvcm.optimizer.trace import QueryMode, Trace


def assert_equals_replays(trace: Trace, policy: str) -> None:
    curve = CURVES[policy](trace)
    assert not curve.at(0).hits.object_blocks
    for capacity in range(1, trace.unique_blocks + 3):
        replayed = reference_replay(trace, PolicySpec(policy), capacity)
        assert curve.at(capacity).hits == replayed.hits, capacity
        assert curve.totals == replayed.totals


@pytest.mark.parametrize("policy", CURVES)
def test_hits_of_the_hand_sized_trace(policy: str) -> None:
    curve = CURVES[policy](HAND)
    assert tuple(curve.at(capacity).hits.prefix_blocks for capacity in (4, 5, 6, 8)) == HAND_HITS[policy]
    assert curve.at(8).hits.prefix_tokens == 168  # by hand: 20 + 35 + 28 + 30 + 20 + 35
    assert_equals_replays(HAND, policy)


def all_write(trace: Trace) -> Trace:
    return replace(trace, writes=np.ones(len(trace), np.bool_))


@pytest.mark.parametrize("policy", CURVES)
@settings(max_examples=examples(200), deadline=None)
@given(trace=prefix_traces() | prefix_traces(separate=True).map(all_write))
def test_curves_of_prefix_trees(policy: str, trace: Trace) -> None:
    """A cache that holds a block holds those before it, so prefix hits are object hits."""
    assert_equals_replays(trace, policy)
    curve = CURVES[policy](trace)
    assert np.array_equal(curve.prefix_blocks, curve.object_blocks)


@pytest.mark.parametrize("policy", [policy for policy in CURVES if policy != "leaf_lru"])
@settings(max_examples=examples(200), deadline=None)
@given(trace=flat_traces() | flat_traces(separate=True).map(all_write))
def test_curves_of_any_ids(policy: str, trace: Trace) -> None:
    assert_equals_replays(trace, policy)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.lists(st.integers(0, 3).map(lambda chain: 64 * chain), max_size=3), min_size=1, max_size=6))
def test_curves_of_runs_longer_than_a_word(starts: list[list[int]]) -> None:
    """Runs of 70 blocks: they fill words, lie across their borders, and follow themselves."""
    trace = trace_of([[start + each for start in row for each in range(70)] for row in starts])
    curve = lru_curve(trace)
    for capacity in (1, 63, 64, 65, 69, 70, 71, 128, 134, 200, 500):
        assert curve.at(capacity).hits == reference_replay(trace, PolicySpec("lru"), capacity).hits, capacity


@pytest.mark.parametrize("policy", CURVES)
def test_an_empty_trace_has_a_curve(policy: str) -> None:
    assert CURVES[policy](trace_of([])).at(5).block_hit_rate == 0
    assert CURVES[policy](trace_of([[]])).at(5).hits.full_requests == 0


@pytest.mark.parametrize("policy", CURVES)
def test_requests_that_only_read_have_no_curve(policy: str) -> None:
    with pytest.raises(OptionError, match=r"1 requests of 'test' read without writing.*kvcm\.optimizer\.replay"):
        CURVES[policy](trace_of([[1, 2], [1, 2]], writes=[True, False]))


@pytest.mark.parametrize("policy", CURVES)
def test_other_query_modes_have_no_curve(policy: str) -> None:
    with pytest.raises(OptionError, match=r"query modes.*kvcm\.optimizer\.groups"):
        CURVES[policy](replace(HAND, modes={0: QueryMode.BATCH}))


def test_leaf_lru_has_no_curve_where_blocks_follow_several_others() -> None:
    with pytest.raises(OptionError, match="follow several others"):
        leaf_lru_curve(trace_of([[1, 2], [3, 2]]))


def test_belady_has_no_curve_where_one_pass_takes_too_long() -> None:
    """Nothing comes again in a row: the pass would take minutes, and its steps are counted in no time."""
    ids = np.random.default_rng(5).integers(0, 100_000, 300_000)
    trace = trace_of([ids.tolist()])
    with pytest.raises(OptionError, match="too few blocks of 'test' come again in a row"):
        CURVES["belady"](trace)
    again = np.tile(np.arange(100_000), 3)
    curve = CURVES["belady"](trace_of([again.tolist()]))
    assert curve.object_blocks[-1] == 200_000
