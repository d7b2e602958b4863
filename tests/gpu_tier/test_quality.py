"""Metrics mean what they say, and methods on S1 at n = 8K are as good as they have to be (means over seeds)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.eval.methods import OBSERVED, method
from gpu_tier.eval.metrics import attended, attention_weights, errors, mass_recall, recall_at, steady_tokens
from gpu_tier.eval.quality import QualityResult, evaluate, kv_bytes, method_for_bytes, selections
from gpu_tier.eval.synth import Adversarial, KVSample, Regime, adversarial, kv
from gpu_tier.types import TokenRanges

TOKENS = 8192
SEEDS = range(2)


@cache
def sample(regime: Regime, seed: int) -> KVSample:
    return kv(TOKENS, 128, 16, 4, regime, seed, observed=OBSERVED)


@cache
def results(name: str, regime: Regime, share: float) -> tuple[QualityResult, ...]:
    config = method(name, round(share * TOKENS), TOKENS)
    return tuple(evaluate(config, sample(regime, seed), recall_k=32) for seed in SEEDS)


def mean_error(name: str, regime: Regime, share: float) -> float:
    return fmean(result.errors.normalised for result in results(name, regime, share))


def test_a_perfect_selection_scores_one_and_everything_has_no_error() -> None:
    x = sample(Regime.MID, 0)
    weights = attention_weights(x.q, x.k, x.scale)
    everything = torch.ones(len(x.q), TOKENS, dtype=torch.bool)
    steady = steady_tokens(TOKENS)
    assert recall_at(32, weights, everything, steady) == 1
    assert mass_recall(weights, everything, steady) == pytest.approx(1)
    full = weights @ x.v
    error = errors(attended(weights, x.v, everything), full, x.v)
    assert error.relative == pytest.approx(0, abs=1e-5)
    assert error.cosine == pytest.approx(1)


def test_recall_counts_only_what_is_not_steady() -> None:
    weights = torch.tensor([[[0.4, 0.3, 0.1, 0.15, 0.05]]])
    steady = steady_tokens(5, TokenRanges(sink=1, local=1))
    assert steady.tolist() == [True, False, False, False, True]
    only_steady = steady[None]
    assert recall_at(2, weights, only_steady, steady) == 0
    assert recall_at(2, weights, torch.tensor([[False, True, True, False, False]]), steady) == 0.5
    assert recall_at(2, weights, torch.tensor([[False, True, False, True, False]]), steady) == 1
    # Steady 0.45; chosen 0.3 + 0.1, the best two others 0.3 + 0.15.
    chosen = torch.tensor([[False, True, True, False, False]])
    assert mass_recall(weights, chosen, steady) == pytest.approx(0.85 / 0.90)


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(8, 60), chosen=st.floats(0, 1), k=st.integers(1, 8))
def test_no_selection_beats_the_best_and_more_tokens_never_find_less(
    seed: int, tokens: int, chosen: float, k: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.softmax(3 * torch.randn(3, 2, tokens, generator=generator), -1)
    steady = steady_tokens(tokens, TokenRanges(sink=2, local=3))
    some = torch.rand(3, tokens, generator=generator) < chosen
    more = some | (torch.rand(3, tokens, generator=generator) < 0.3)
    assert 0 <= mass_recall(weights, some, steady) <= 1 + 1e-6
    assert 0 <= recall_at(k, weights, some, steady) <= recall_at(k, weights, more, steady) <= 1


@pytest.mark.parametrize("regime", Regime)
@pytest.mark.parametrize("name", ["quest", "streaming_llm"])
def test_no_method_beats_the_oracle_and_none_selects_more_than_its_budget(name: str, regime: Regime) -> None:
    for ours, ceiling in zip(results(name, regime, 0.1), results("oracle", regime, 0.1), strict=True):
        assert ours.tokens <= 0.1 * TOKENS + 16
        assert ours.mass <= ceiling.mass + 1e-6
        assert ours.recall < ceiling.recall == 1
        assert ours.errors.normalised > ceiling.errors.normalised


@pytest.mark.parametrize("regime", Regime)
def test_quest_finds_more_with_more_pages(regime: Regime) -> None:
    tenth, fifth = (fmean(r.recall for r in results("quest", regime, share)) for share in (0.1, 0.2))
    assert tenth >= 0.45
    assert fifth >= 0.72
    assert fifth > tenth


@pytest.mark.parametrize("regime", [Regime.SHARP, Regime.MID])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_streaming_is_the_worst(regime: Regime, share: float) -> None:
    for name in ("oracle", "quest"):
        assert mean_error("streaming_llm", regime, share) > mean_error(name, regime, share)


@dataclass(frozen=True)
class NeedleExpectation:
    """Share of steps in which the needle has to be among the selected tokens."""

    name: str
    least: float
    most: float


@pytest.mark.parametrize(
    "expected",
    [NeedleExpectation("oracle", 1, 1), NeedleExpectation("quest", 1, 1), NeedleExpectation("streaming_llm", 0, 0)],
    ids=lambda expected: expected.name,
)
def test_one_needle_is_found_by_methods_that_look(expected: NeedleExpectation) -> None:
    x = adversarial(Adversarial.NEEDLE, 2048, 64, 8, 4, seed=0, observed=OBSERVED)
    weights = attention_weights(x.q, x.k, x.scale)
    found = recall_at(1, weights, selections(method(expected.name, 256, 2048), x), steady_tokens(2048))
    assert expected.least <= found <= expected.most


@pytest.mark.parametrize("case", Adversarial)
@pytest.mark.parametrize("name", ["oracle", "quest", "streaming_llm"])
def test_adversarial_inputs_give_sound_outputs(case: Adversarial, name: str) -> None:
    result = evaluate(
        method(name, 256, 1024), adversarial(case, 1024, 64, 3, 4, seed=1, observed=OBSERVED), recall_k=32
    )
    assert 0 <= result.recall <= 1
    assert 0 <= result.mass <= 1 + 1e-6
    assert result.errors.normalised < 2


def test_equal_bytes_leave_fewer_tokens_to_methods_with_a_representation() -> None:
    x = sample(Regime.MID, 0)
    budget = kv_bytes(0.1 * TOKENS, 128)
    tokens = {}
    for name in ("oracle", "quest", "streaming_llm"):
        config = method_for_bytes(name, budget, x)
        assert config is not None
        result = evaluate(config, x)
        tokens[name] = result.tokens
        held = result.kv_bytes + (0 if name == "oracle" else result.representation_bytes)
        assert held <= budget + kv_bytes(16, 128)
    # Bounds of 16-token pages take 1/16 of the KV.
    assert tokens["quest"] == pytest.approx((0.1 - 0.0625) * TOKENS, abs=32)
    assert tokens["streaming_llm"] == pytest.approx(0.1 * TOKENS, abs=32)
    assert method_for_bytes("quest", kv_bytes(0.06 * TOKENS, 128), x) is None
