"""The time to the first token: by formula without queues, by simulation with them, and what theory says of both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, trace_of

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay import replay
from kvcm.optimizer.roi import Deployment, LengthProfile, Work, first_tokens, simulate, spread_of, work_of

SMALL = Deployment(prefill_tokens_per_second=100, kv_bytes_per_token=10, bandwidth_bytes_per_second=4000)
LRU = PolicySpec("lru")


def work(arrivals: list[float], links: list[float], prefills: list[float], latency: float = 0.0) -> Work:
    return Work(np.array(arrivals), np.array(links) > 0, np.array(links), np.array(prefills), latency)


works = st.integers(1, 12).flatmap(
    lambda count: st.builds(
        lambda gaps, links, prefills, latency: work(np.cumsum(gaps).tolist(), links, prefills, latency),
        *(st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.5]), min_size=count, max_size=count) for _ in range(3)),
        st.sampled_from([0.0, 0.5]),
    )
)


def test_a_request_takes_its_load_and_the_prefill_of_the_rest() -> None:
    # 30 of 35 tokens are loaded: 0.1 s and 2.5 ms each; 5 are computed, 10 ms each.
    hits = np.array([0, 0, 0, 3, 0, 0, 0, 0], np.int32)
    asked = work_of(HAND, replace(SMALL, latency_seconds=0.1), hits)
    assert asked.unqueued_seconds[3] == pytest.approx(0.1 + 30 * 2.5e-3 + 5 * 10e-3)
    assert asked.unqueued_seconds[0] == pytest.approx(0.35)
    assert asked.loads.tolist() == [False] * 3 + [True] + [False] * 4
    assert asked.arrivals.tolist() == [0, 1, 2, 3, 5, 9, 10, 12]


def test_hits_that_are_not_worth_loading_are_computed() -> None:
    hits = np.array([0, 0, 0, 3, 0, 0, 0, 1], np.int32)
    asked = work_of(HAND, replace(SMALL, latency_seconds=0.1), hits)  # the threshold is 13.3 tokens
    assert asked.loads.tolist() == [False] * 3 + [True] + [False] * 4
    assert asked.unqueued_seconds[7] == pytest.approx(0.35)


@settings(max_examples=examples(100))
@given(
    st.sampled_from([0.0, 0.013, 0.21, 3.7]),
    st.sampled_from([500.0, 1000.0, 1500.0, 1e5]),
    st.sampled_from([None, LengthProfile(0.01, 0.0), LengthProfile(0.001, 0.003), LengthProfile(0.0, 1e-4)]),
)
def test_a_longer_hit_is_never_slower(latency: float, bandwidth: float, profile: LengthProfile | None) -> None:
    deployment = replace(SMALL, latency_seconds=latency, bandwidth_bytes_per_second=bandwidth, profile=profile)
    trace = trace_of([list(range(60))], input_tokens=[597])
    times = [float(work_of(trace, deployment, np.array([k], np.int32)).unqueued_seconds[0]) for k in range(61)]
    assert (np.diff(times) <= 1e-9).all()


def test_a_prefill_of_a_profile_computes_the_last_tokens() -> None:
    profile = LengthProfile(0.01, 0.002)
    asked = work_of(HAND, replace(SMALL, profile=profile), np.array([0, 0, 0, 3, 0, 0, 0, 0], np.int32))
    assert asked.prefill_seconds[3] == pytest.approx(0.01 * 5 + 0.002 * (35**2 - 30**2) / 2)


def test_more_load_brings_requests_closer() -> None:
    assert work_of(HAND, replace(SMALL, load_factor=4.0)).arrivals == pytest.approx(work_of(HAND, SMALL).arrivals / 4)
    said = work_of(HAND, replace(SMALL, offered_tokens_per_second=241.0))
    assert said.arrivals[-1] == pytest.approx(1.0)


def test_requests_that_only_write_have_no_first_token() -> None:
    trace = trace_of([[1], [1], [2]], read_blocks=[1, 0, 1], times_seconds=[3, 4, 5])
    assert work_of(trace, SMALL).arrivals.tolist() == [0, 2]


def test_hits_of_another_trace_are_refused() -> None:
    with pytest.raises(OptionError, match="hits: 1 requests; allowed: those of the trace, 8"):
        work_of(HAND, SMALL, np.array([1], np.int32))


@settings(max_examples=examples(200))
@given(works)
def test_with_a_node_for_each_nothing_waits(asked: Work) -> None:
    met = simulate(asked, nodes=len(asked.arrivals))
    if (asked.prefill_seconds + asked.link_seconds > 0).all():
        assert met.seconds == pytest.approx(asked.unqueued_seconds)
    assert (met.seconds >= asked.unqueued_seconds - 1e-9).all()
    assert met.prefill_busy <= 1 + 1e-9
    assert met.link_busy <= 1 + 1e-9


def shared_link_ends(starts: list[float], needs: list[float]) -> list[float]:
    """Return when loads end that share a link, step by step from one change to the next."""
    left, ends = dict(enumerate(needs)), [0.0] * len(needs)
    now = 0.0
    while left:
        running = [load for load in left if starts[load] <= now]
        coming = [starts[load] for load in left if starts[load] > now]
        step = min([left[load] * len(running) for load in running] + [start - now for start in coming])
        for load in running:
            left[load] -= step / len(running)
        now += step
        for load in [load for load in running if left[load] <= 1e-9]:
            ends[load] = now
            del left[load]
    return ends


@settings(max_examples=examples(300))
@given(works)
def test_loads_of_a_node_share_its_link_and_prefills_follow(asked: Work) -> None:
    """One node against steps through time: loads first, then prefills in the order in which loads end."""
    loads = np.flatnonzero(asked.loads).tolist()
    starts = [float(asked.arrivals[load]) + asked.latency_seconds for load in loads]
    ready = asked.arrivals.copy()
    ready[loads] = shared_link_ends(starts, [float(asked.link_seconds[load]) for load in loads])
    end, ends = 0.0, {}
    for request in sorted(range(len(ready)), key=lambda each: (ready[each], each)):
        end = max(end, ready[request]) + asked.prefill_seconds[request]
        ends[request] = end
    met = simulate(asked, nodes=1)
    # Loads that end together are prefilled in either order: the last one ends at the same time.
    if len(np.unique(np.round(ready, 6))) == len(ready):
        expected = [ends[request] - asked.arrivals[request] for request in range(len(ready))]
        assert met.seconds == pytest.approx(expected, abs=1e-6)
    assert (met.seconds + asked.arrivals).max() == pytest.approx(max(ends.values()), abs=1e-6)


def test_nodes_are_as_busy_as_the_formula_of_nodes_says() -> None:
    # 30 tokens four times a second, of which 20 are loaded: 0.4 nodes prefill and 0.2 links load, on 2 nodes.
    trace = trace_of([[1, 2, 3]] * 2000, times_seconds=np.linspace(0, 500, 2000).tolist())
    asked = work_of(trace, SMALL, np.full(2000, 2, np.int32))
    met = simulate(asked, nodes=2)
    assert met.prefill_busy * 2 == pytest.approx(4 * 10 / 100, rel=0.01)
    assert met.link_busy * 2 == pytest.approx(4 * 20 * 2.5e-3, rel=0.01)


def test_percentiles_are_times_of_requests() -> None:
    spread = spread_of(np.arange(1.0, 101.0))
    assert (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.most) == (50.5, 50, 90, 95, 99, 100)
    assert spread_of(np.array([])).most == spread_of(np.array([])).p50 == 0.0


def test_the_time_to_the_first_token_with_and_without_a_cache() -> None:
    replays = [replay(HAND, LRU, capacity, keep_requests=True) for capacity in (4, 8)]
    found = first_tokens(HAND, replays, SMALL, nodes=1)
    assert [(each.policy, each.capacity_blocks) for each in found] == [("none", 0), ("lru", 4), ("lru", 8)]
    # Requests are a second apart and take 0.4 s at most: none waits.
    for each, hits in zip(found, [None, *(each.request_hits for each in replays)], strict=True):
        assert each.queued.seconds == pytest.approx(work_of(HAND, SMALL, hits).unqueued_seconds)
        assert each.queued.waited_seconds == pytest.approx(0, abs=1e-12)
        assert each.queued.spread.mean == pytest.approx(each.unqueued.mean)
    assert found[0].unqueued.mean > found[1].unqueued.mean > found[2].unqueued.mean


def test_invalid_simulations_are_refused() -> None:
    with pytest.raises(OptionError, match="lru kept no requests"):
        first_tokens(HAND, [replay(HAND, LRU, 4)], SMALL, nodes=1)
    with pytest.raises(OptionError, match="nodes: 0"):
        simulate(work_of(HAND, SMALL), nodes=0)


@pytest.mark.parametrize(
    "trace", [trace_of([]), trace_of([[]]), trace_of([[1]]), trace_of([[1], [1]], times_seconds=[4, 4])]
)
def test_traces_without_requests_or_span(trace: object) -> None:
    met = simulate(work_of(trace, SMALL), nodes=2)
    assert np.isfinite(met.seconds).all()
    assert np.isfinite([met.waited_seconds, met.prefill_busy, met.link_busy]).all()
