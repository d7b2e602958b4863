"""Estimates from samples lie as near to the truth as they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, flat_traces, prefix_traces, trace_of

from kvcm.optimizer.curves import CURVES, SampledCurve, sampled_curves
from kvcm.optimizer.curves.sampled import sample_of, unlimited_hits
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import PolicySpec, parse_policy
from kvcm.optimizer.replay import reference_replay, replay
from kvcm.optimizer.trace import QueryMode, Trace

CHAINS = trace_of([[*range(chain * 300, chain * 300 + 300)] for chain in (0, 1, 0, 2, 1, 0, 3, 1, 0, 2)])


def sampled(trace: Trace, spec: PolicySpec, *, points: int = 20, **options: Any) -> SampledCurve:
    """Return estimates at so many points between 10 sampled blocks and all, at equal ratios, or at those named."""
    if "capacities" not in options:
        rate = options.get("rate", 0.1)
        sizes = np.rint(np.geomspace(10, trace.unique_blocks * rate, points))
        options["capacities"] = np.rint(1 + (np.unique(sizes) - 0.5) / rate).astype(int).tolist()
    (curve,) = sampled_curves(trace, [spec], **options)
    return curve


def object_rates(trace: Trace, spec: PolicySpec, estimate: SampledCurve) -> list[float]:
    hits = [replay(trace, spec, int(capacity)).hits.object_blocks for capacity in estimate.capacities]
    return [each / trace.totals.blocks for each in hits]


@pytest.mark.parametrize("policy", CURVES)
@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic", "agentic_composed"])
@pytest.mark.parametrize("rate", [0.1, 0.03])
def test_true_rates_lie_within_bars(name: str, policy: str, rate: float, real_trace: Callable[[str], Trace]) -> None:
    trace = real_trace(name)
    curve = CURVES[policy](trace)
    estimate = sampled(trace, PolicySpec(policy), rate=rate)
    true = [curve.at(int(capacity)).block_hit_rate for capacity in estimate.capacities]
    errors = np.abs(estimate.hit_rates - true)
    assert estimate.is_prefix_rate
    assert np.mean(errors <= estimate.errors + 1e-9) >= 0.75  # they belong together: most miss where one does
    assert errors.mean() < 0.003
    assert errors.max() < 0.006
    assert estimate.errors.max() < 0.03


@pytest.mark.parametrize("policy", ["fifo", "s3fifo", "random_lru"])
def test_policies_without_a_curve_are_replayed_in_miniature(policy: str, real_trace: Callable[[str], Trace]) -> None:
    trace, spec = real_trace("mooncake_synthetic"), PolicySpec(policy)
    estimate = sampled(trace, spec, repeats=4, points=6)
    errors = np.abs(estimate.hit_rates - object_rates(trace, spec, estimate))
    assert not estimate.is_prefix_rate
    assert np.mean(errors <= estimate.errors) >= 0.75
    assert errors.mean() < 0.01


def test_requests_that_only_read_are_replayed_in_miniature() -> None:
    """Chains that are read and written in turn: what one of ten blocks says is true of all."""
    writes = [False, True] * 10
    requests = [[*range(chain * 300, chain * 300 + 300)] for chain in (0, 1, 0, 2, 1, 0, 3, 1, 0, 2) for _ in (0, 1)]
    trace = trace_of(requests, writes=writes)
    spec = PolicySpec("lru")
    estimate = sampled(trace, spec, repeats=3, points=8)
    assert not estimate.is_prefix_rate
    assert np.allclose(estimate.hit_rates[:-1], object_rates(trace, spec, estimate)[:-1], atol=0.01)
    assert estimate.hit_rates[-1] == pytest.approx(0.6)


def test_bars_end_where_all_is_held() -> None:
    held = sampled(CHAINS, PolicySpec("belady"), capacities=[CHAINS.unique_blocks, 5000])
    assert held.errors.tolist() == [0, 0]
    assert held.hit_rates.tolist() == [unlimited_hits(CHAINS) / CHAINS.totals.blocks] * 2


def test_several_policies_are_estimated_from_the_same_samples() -> None:
    specs = [PolicySpec("fifo"), PolicySpec("lru")]
    reported: list[tuple[int, int]] = []
    both = sampled_curves(
        CHAINS, specs, repeats=3, capacities=[200, 500], progress=lambda done, total: reported.append((done, total))
    )
    for spec, curve in zip(specs, both, strict=True):
        alone = sampled(CHAINS, spec, repeats=3, capacities=[200, 500])
        assert curve.policy == spec.label
        assert np.array_equal(curve.hit_rates, alone.hit_rates)
        assert np.array_equal(curve.errors, alone.errors)
    assert reported == [(done, 6) for done in range(1, 7)]


@settings(max_examples=examples(100), deadline=None)
@given(
    prefix_traces(separate=True) | flat_traces(separate=True),
    st.sampled_from([0.1, 0.25, 0.37, 0.5]),
    st.integers(0, 99),
)
def test_a_sample_is_the_trace_without_the_other_blocks(trace: Trace, rate: float, seed: int) -> None:
    count = int(trace.unique_blocks * rate)
    drawn = ((np.arange(count) + np.random.default_rng(seed).random(count)) / rate).astype(int).tolist()
    assert all(number / rate - 1 < block < (number + 1) / rate for number, block in enumerate(drawn))
    sample = sample_of(trace, rate, seed)
    assert sample.unique_blocks == len(set(drawn))
    seen: list[int] = []
    for request in range(len(trace)):
        whole = trace.request_blocks(request).tolist()
        part = [each for each in whole if each in drawn]
        seen += [each for each in dict.fromkeys(part) if each not in seen]
        assert sample.request_blocks(request).tolist() == [seen.index(each) for each in part]
        assert sample.read_blocks[request] == sum(each in drawn for each in whole[: trace.read_blocks[request]])
        if trace.has_one_parent:
            assert sample.parents[[seen.index(each) for each in part]].tolist() == [
                seen.index(each) if each >= 0 else -1 for each in [-1, *part[:-1]][: len(part)]
            ]


@settings(max_examples=examples(100), deadline=None)
@given(prefix_traces(separate=True) | flat_traces(separate=True))
def test_unlimited_hits_are_those_of_a_cache_for_all_blocks(trace: Trace) -> None:
    replayed = reference_replay(trace, PolicySpec("fifo"), max(1, trace.unique_blocks))
    assert unlimited_hits(trace) == replayed.hits.object_blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0, "capacities": [500]}, "rate: 0 is out of range; allowed: 0.083 to 0.5"),
        ({"rate": 0.08}, "allowed: 0.083 to 0.5"),
        ({"repeats": 1}, "repeats: 1 is out of range; allowed: 2 to 31"),
        ({"capacities": [500, 95]}, "capacities: 95 is out of range; allowed: 96 blocks or more"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace(".", r"\.")):
        sampled(CHAINS, PolicySpec("lru"), **options)  # type: ignore[arg-type]


def test_small_traces_have_no_samples() -> None:
    with pytest.raises(OptionError, match="allowed: none, with 8 unique blocks"):
        sampled(HAND, PolicySpec("lru"), rate=0.5, capacities=[8])


def test_other_query_modes_are_refused() -> None:
    with pytest.raises(OptionError, match="query modes"):
        sampled(replace(CHAINS, modes={0: QueryMode.BATCH}), parse_policy("lru"))
