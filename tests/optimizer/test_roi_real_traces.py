"""The return on a cache for real traces, worked out again in plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcm.optimizer.curves import leaf_lru_curve, lru_curve
from kvcm.optimizer.policy_spec import PolicySpec
from kvcm.optimizer.replay import replay
from kvcm.optimizer.roi import PRESETS, LengthProfile, Service, first_tokens, returns, split_budget
from kvcm.optimizer.trace import Trace

RealTrace = Callable[[str], Trace]


def test_conversations_on_deepseek(real_trace: RealTrace) -> None:
    trace = real_trace("mooncake_conversation")
    curve, deployment = lru_curve(trace), PRESETS["deepseek_v3"]
    result = returns(curve, trace, deployment)
    offered = int(trace.input_tokens.sum()) / trace.span_seconds
    total = int(trace.input_tokens.sum())
    best, most = 0, 0.0
    for capacity, tokens in enumerate(curve.prefix_tokens.tolist()):
        share = tokens / total
        nodes = max(offered * (1 - share) / 32_200, offered * share * 70_272 / 20e9)
        net = 8 * (offered / 32_200 - nodes) * 2.0 - capacity * 512 * 70_272 / 2**30 * 0.1 / 730
        if net > most:
            best, most = capacity, net
    assert result.best == best
    assert result.net_per_hour[best] == pytest.approx(most)
    assert result.hit_share[-1] == pytest.approx(0.3736, abs=5e-5)
    assert result.saturated is None


def test_agents_saturate_the_link(real_trace: RealTrace) -> None:
    trace = real_trace("agentic_composed")
    deployment = PRESETS["qwen3_coder_480b"]
    result = returns(leaf_lru_curve(trace), trace, deployment)
    assert result.saturated is not None
    assert result.hit_share[result.saturated - 1] <= deployment.saturation_share < result.hit_share[result.saturated]
    assert result.best == result.saturated
    assert result.hit_share[-1] == pytest.approx(0.9570, abs=5e-5)
    assert result.loaded_share[-1] == pytest.approx(deployment.saturation_share)


def test_hits_that_are_worth_loading_by_curve_and_by_replay(real_trace: RealTrace) -> None:
    trace = real_trace("mooncake_synthetic")
    deployment = replace(PRESETS["deepseek_v3"], latency_seconds=0.05, profile=LengthProfile(2e-5, 1e-9))
    capacity = trace.unique_blocks // 10
    by_curve = returns(lru_curve(trace), trace, deployment)
    replays = [replay(trace, PolicySpec("lru"), capacity, keep_requests=True)]
    by_replay = returns(replays, trace, deployment)
    assert by_curve.loaded_share[capacity] < by_curve.hit_share[capacity]
    assert by_curve.loaded_share[capacity] == pytest.approx(by_replay.loaded_share[1])
    assert by_curve.nodes[capacity] == pytest.approx(by_replay.nodes[1])
    without, cached = first_tokens(trace, replays, replace(deployment, load_factor=10), nodes=20)
    assert cached.queued.spread.p95 < without.queued.spread.p95


def test_one_budget_for_two_services(real_trace: RealTrace) -> None:
    services = [
        Service(name, returns(lru_curve(trace), trace, PRESETS["deepseek_v3"]))
        for name in ("mooncake_conversation", "mooncake_synthetic")
        for trace in [real_trace(name)]
    ]
    budget = 1000.0 * 2**30
    found = split_budget(services, budget)
    assert sum(share.stored_bytes for share in found.shares) <= budget
    assert found.net_per_hour >= 0.99 * found.at_most
    for each in services:
        affordable = each.returns.capacity_blocks * each.returns.block_bytes <= budget
        assert found.net_per_hour > each.returns.net_per_hour[affordable][-1]
