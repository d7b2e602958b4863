"""What a cache returns at each capacity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, flat_traces, prefix_traces, trace_of

from kvcm.optimizer.curves import leaf_lru_curve, lru_curve
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay import replay
from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.roi import PRESETS, Deployment, LengthProfile, Returns, returns
from kvcm.optimizer.trace import Trace

LRU = PolicySpec("lru")
SMALL = Deployment(
    prefill_tokens_per_second=100, kv_bytes_per_token=10, gpus_per_node=8, bandwidth_bytes_per_second=4000,
    price_per_gpu_hour=3, price_per_gib_month=1e6,
)  # fmt: skip
"""Ten tokens to a block of 100 bytes: 10 ms to compute a token and 2.5 ms to load it."""


def replays_of(trace: Trace, spec: PolicySpec = LRU) -> list[Replay]:
    return [replay(trace, spec, capacity, keep_requests=True) for capacity in range(1, trace.unique_blocks + 1)]


def curve_of(trace: Trace, policy: str = "lru") -> Curve:
    """Return the curve from replays at every capacity."""
    hits = [each.hits for each in replays_of(trace)]
    return Curve(
        policy,
        *(np.array([0, *(getattr(each, name) for each in hits)], np.int64)
          for name in ("prefix_blocks", "prefix_tokens", "object_blocks", "full_requests")),
        totals=trace.totals, seconds=0.0, accesses=trace.accesses,
    )  # fmt: skip


def assert_finite(result: Returns) -> None:
    for column in (result.nodes, result.gpus_saved, result.net_per_hour, result.hit_share, result.loaded_share):
        assert np.isfinite(column).all()


def test_the_hand_sized_example() -> None:
    # 241 tokens in 12 s; 8 blocks hit all that comes again: prompts of 35, 28, 20 and 35, and 20 and 30 of others.
    result = returns(curve_of(HAND), HAND, SMALL)
    tokens = 168
    assert result.offered_tokens_per_second == pytest.approx(241 / 12)
    assert result.nodes_without == pytest.approx(241 / 12 / 100)
    assert result.loaded_share[-1] == pytest.approx(tokens / 241)
    assert result.nodes[-1] == pytest.approx((241 - tokens) / 12 / 100)
    assert result.node_seconds_saved[-1] == pytest.approx(tokens / 100)
    assert result.gpus_saved[-1] == pytest.approx(8 * tokens / 12 / 100)
    assert result.saved_per_hour[-1] == pytest.approx(3 * 8 * tokens / 12 / 100)
    assert result.storage_per_hour[-1] == pytest.approx(8 * 100 / 2**30 * 1e6 / 730)


deployments = st.builds(
    Deployment,
    prefill_tokens_per_second=st.sampled_from([10.0, 100.0, 1000.0]),
    kv_bytes_per_token=st.sampled_from([1.0, 10.0, 100.0]),
    bandwidth_bytes_per_second=st.sampled_from([1e3, 2e3, 1e4, 1e6]),
    latency_seconds=st.sampled_from([0.0, 0.01371, 0.21137, 1.03719]),  # no hit takes as long to load as to compute
    usable_share=st.sampled_from([0.3, 1.0]),
    utilisation=st.sampled_from([0.5, 1.0]),
    price_per_gib_month=st.sampled_from([0.0, 1e4, 1e6, 1e9]),
    offered_tokens_per_second=st.sampled_from([None, 1.0, 500.0]),
    load_factor=st.sampled_from([1.0, 20.0]),
    profile=st.sampled_from([None, None, LengthProfile(0.01, 0.0), LengthProfile(0.001, 0.002)]),
)


@pytest.mark.parametrize(("policy", "curve"), [("lru", lru_curve), ("leaf_lru", leaf_lru_curve)])
@settings(max_examples=examples(100), deadline=None)
@given(trace=prefix_traces(most_requests=12), deployment=deployments)
def test_a_curve_and_replays_give_the_same(
    policy: str, curve: Callable[[Trace], Curve], trace: Trace, deployment: Deployment
) -> None:
    by_curve = returns(curve(trace), trace, deployment)
    by_replay = returns(replays_of(trace, PolicySpec(policy)), trace, deployment)
    assert_finite(by_curve)
    assert by_curve.capacity_blocks.tolist() == by_replay.capacity_blocks.tolist()
    assert by_curve.nodes == pytest.approx(by_replay.nodes)
    assert by_curve.loaded_share == pytest.approx(by_replay.loaded_share)
    assert by_curve.node_seconds_saved == pytest.approx(by_replay.node_seconds_saved, abs=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(flat_traces(most_requests=12), deployments)
@example(trace_of([[1], [2], [3], [1, 3]]), replace(SMALL, profile=LengthProfile(0.01)))  # 3 stays longer than 1
def test_blocks_in_any_order_return_the_same_as_their_replays(trace: Trace, deployment: Deployment) -> None:
    by_curve, by_replay = returns(lru_curve(trace), trace, deployment), returns(replays_of(trace), trace, deployment)
    assert by_curve.nodes == pytest.approx(by_replay.nodes)
    assert by_curve.loaded_share == pytest.approx(by_replay.loaded_share)


@settings(max_examples=examples(120), deadline=None)
@given(prefix_traces(most_requests=12), deployments)
def test_the_model_request_by_request(trace: Trace, deployment: Deployment) -> None:
    """Every request's k, its load, N(h) of the loaded tokens and the largest net value, by the formulas themselves."""
    deployment = replace(deployment, profile=None)
    result = returns(replays_of(trace), trace, deployment)
    total = max(1, trace.totals.tokens)
    offered = result.offered_tokens_per_second
    nets = []
    for place, each in enumerate([None, *replays_of(trace)]):
        hits = np.zeros(len(trace), np.int32) if each is None else each.request_hits
        assert hits is not None
        loaded = 0
        for request, blocks in enumerate(hits):
            tokens = min(int(blocks) * 10, int(trace.input_tokens[request]))
            load = deployment.latency_seconds + tokens * deployment.link_seconds_per_token
            if load < tokens / deployment.prefill_tokens_per_second:
                loaded += tokens
        share = min(loaded / total, result.turning_share)
        compute = offered * (1 - share) / (deployment.prefill_tokens_per_second * deployment.utilisation)
        bandwidth = deployment.bandwidth_bytes_per_second * deployment.usable_share
        nodes = max(compute, offered * share * deployment.kv_bytes_per_token / bandwidth)
        if trace.totals.tokens:
            assert result.loaded_share[place] == pytest.approx(share, abs=1e-12)
            assert result.nodes[place] == pytest.approx(nodes, abs=1e-12)
        nets.append(float(result.saved_per_hour[place] - result.storage_per_hour[place]))
    assert result.best == nets.index(max(nets))
    assert result.nearly_best == next(place for place, net in enumerate(nets) if net >= 0.99 * max(nets))
    assert max(nets) >= 0


def test_a_link_as_slow_as_the_prefill_saves_nothing() -> None:
    equal = replace(SMALL, bandwidth_bytes_per_second=100 * 10)
    for deployment in (equal, replace(equal, bandwidth_bytes_per_second=500)):
        result = returns(curve_of(HAND), HAND, deployment)
        assert not result.gpus_saved.any()
        assert not result.node_seconds_saved.any()
        assert (result.best, result.saturated) == (0, None)
        assert result.break_even_gib_month == 0
        assert_finite(result)


def test_short_hits_are_computed_rather_than_loaded() -> None:
    # Threshold 25 tokens: 0.1875 s over 7.5 ms a token. Of 30 and 20 tokens only the 30 are loaded.
    trace = trace_of([[1, 2, 3], [4, 5], [1, 2, 3], [4, 5]])
    deployment = replace(SMALL, latency_seconds=0.1875)
    assert deployment.threshold_tokens == pytest.approx(25)
    result = returns(replays_of(trace), trace, deployment)
    assert result.hit_share[-1] == pytest.approx(0.5)
    assert result.loaded_share[-1] == pytest.approx(0.3)
    assert returns(curve_of(trace), trace, deployment).loaded_share[-1] == pytest.approx(0.3)
    with pytest.raises(OptionError, match="curve: that of belady does not tell how long hits are"):
        returns(curve_of(trace, "belady"), trace, deployment)


def test_replays_without_requests_are_refused() -> None:
    with pytest.raises(OptionError, match="lru kept no requests"):
        returns([replay(HAND, LRU, 4)], HAND, SMALL)


def test_a_saturated_link_makes_more_hits_worth_nothing() -> None:
    # Loading a token takes half as long as computing it: links are saturated at h* = 2/3, nine tenths are hits.
    trace = trace_of([[1, 2]] * 5 + [[3, 4]] * 15)
    slow = replace(SMALL, bandwidth_bytes_per_second=2000)
    result = returns(curve_of(trace), trace, slow)
    assert result.turning_share == pytest.approx(2 / 3)
    assert result.hit_share.tolist() == pytest.approx([0, 0, 0.9, 0.9, 0.9])
    assert result.loaded_share[2] == pytest.approx(2 / 3)
    assert result.nodes[2] == pytest.approx(result.nodes_without / 3)
    assert result.saturated == 2
    assert returns(curve_of(trace), trace, replace(slow, bandwidth_bytes_per_second=2e6)).saturated is None


def test_whole_nodes_save_only_whole_nodes() -> None:
    result = returns(curve_of(HAND), HAND, replace(SMALL, offered_tokens_per_second=250.0))
    assert result.nodes_without == pytest.approx(2.5)
    assert set(result.whole_gpus_saved.tolist()) <= {0, 8, 16}
    assert result.whole_gpus_saved[-1] == 8 * (3 - math.ceil(result.nodes[-1]))


def test_at_the_break_even_price_the_best_capacity_returns_nothing() -> None:
    result = returns(curve_of(HAND), HAND, replace(SMALL, price_per_gib_month=1e5))
    even = returns(curve_of(HAND), HAND, replace(result.deployment, price_per_gib_month=result.break_even_gib_month))
    assert even.net_per_hour[result.best] == pytest.approx(0, abs=1e-12)


def test_load_scales_nodes_and_not_the_share() -> None:
    once = returns(curve_of(HAND), HAND, SMALL)
    thrice = returns(curve_of(HAND), HAND, replace(SMALL, load_factor=3.0))
    assert thrice.nodes == pytest.approx(3 * once.nodes)
    assert thrice.loaded_share == pytest.approx(once.loaded_share)
    assert thrice.node_seconds_saved == pytest.approx(once.node_seconds_saved)


@pytest.mark.parametrize(
    "trace",
    [
        trace_of([]),
        trace_of([[]]),
        trace_of([[1, 2, 3]]),
        trace_of([[1], [2], [3]]),
        trace_of([[1, 2], [1, 2]], times_seconds=[5, 5]),
        trace_of([[1], [1]], input_tokens=[0, 0], times_seconds=[0, 1]),
        trace_of([[1], [1]], read_blocks=[0, 0], times_seconds=[0, 1]),
    ],
    ids=["empty", "no blocks", "one request", "no reuse", "no span", "no tokens", "only writes"],
)
@pytest.mark.parametrize("change", [{}, {"latency_seconds": 1.0}, {"profile": LengthProfile(0.1, 0.1)}])
def test_a_trace_with_nothing_to_gain_saves_nothing(trace: Trace, change: dict[str, object]) -> None:
    result = returns(replays_of(trace), trace, replace(PRESETS["deepseek_v3"], **change))
    assert_finite(result)
    assert not result.gpus_saved.any()
    assert result.best == 0


def test_a_trace_without_a_duration_needs_the_offered_rate() -> None:
    trace = trace_of([[1, 2], [1, 2]], times_seconds=[5, 5])
    result = returns(curve_of(trace), trace, replace(SMALL, offered_tokens_per_second=1000.0))
    assert result.nodes_without == pytest.approx(10)
    assert result.nodes[-1] == pytest.approx(5)


def test_instances_of_several_block_sizes_are_priced_at_the_largest() -> None:
    result = returns(replays_of(HAND), replace(HAND, block_tokens=0, instance_block_tokens=(10, 20)), SMALL)
    assert result.block_bytes == 200
