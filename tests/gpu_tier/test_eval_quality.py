"""Synthetic inputs, metrics and methods: each method is as good as it has to be, and caches hit as plain models do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.engine.recall_model import RecallBatch, RecallModel, load_recall_model, recall_batch
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.eval import quality
from kvcm.gpu_tier.eval.hit_rates import exact_selections, hit_rates, pq_hits, simulate, trace, wave_hits
from kvcm.gpu_tier.eval.methods import METHODS, OBSERVED, RETRIEVAL, method, pq_top, retrieving, wave_share
from kvcm.gpu_tier.eval.quality import selections
from kvcm.gpu_tier.eval.recall import RecallRun, recall, tokens_for_bytes
from kvcm.gpu_tier.eval.synth import Adversarial, KVSample, Regime, adversarial, kv, rotated
from kvcm.gpu_tier.types import Selection, TokenRanges

pytestmark = pytest.mark.ci


TOKENS = 8192


@cache
def sample(regime: Regime, seed: int) -> KVSample:
    return kv(TOKENS, 128, 16, 4, regime, seed, observed=OBSERVED)


@cache
def results(name: str, regime: Regime, share: float) -> tuple[quality.QualityResult, ...]:
    config = method(name, round(share * TOKENS), TOKENS)
    return tuple(quality.evaluate(config, sample(regime, seed), recall_k=32) for seed in range(2))


def test_a_perfect_selection_scores_one_and_everything_has_no_error() -> None:
    x = sample(Regime.MID, 0)
    weights = quality.attention_weights(x.q, x.k, x.scale)
    everything = torch.ones(len(x.q), TOKENS, dtype=torch.bool)
    steady = quality.steady_tokens(TOKENS)
    assert quality.recall_at(32, weights, everything, steady) == 1
    assert quality.mass_recall(weights, everything, steady) == pytest.approx(1)
    full = weights @ x.v
    error = quality.errors(quality.attended(weights, x.v, everything), full, x.v)
    assert error.relative == pytest.approx(0, abs=1e-5)
    assert error.cosine == pytest.approx(1)


def test_recall_counts_only_tokens_outside_the_steady_zone() -> None:
    weights = torch.tensor([[[0.4, 0.3, 0.1, 0.15, 0.05]]])
    steady = quality.steady_tokens(5, TokenRanges(sink=1, local=1))
    assert steady.tolist() == [True, False, False, False, True]
    only_steady = steady[None]
    assert quality.recall_at(2, weights, only_steady, steady) == 0
    assert quality.recall_at(2, weights, torch.tensor([[False, True, True, False, False]]), steady) == 0.5
    assert quality.recall_at(2, weights, torch.tensor([[False, True, False, True, False]]), steady) == 1
    # Steady 0.45; chosen 0.3 + 0.1, the best two others 0.3 + 0.15.
    chosen = torch.tensor([[False, True, True, False, False]])
    assert quality.mass_recall(weights, chosen, steady) == pytest.approx(0.85 / 0.90)


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(8, 60), chosen=st.floats(0, 1), k=st.integers(1, 8))
def test_nothing_beats_the_best_and_more_tokens_never_find_less(seed: int, tokens: int, chosen: float, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.softmax(3 * torch.randn(3, 2, tokens, generator=generator), -1)
    steady = quality.steady_tokens(tokens, TokenRanges(sink=2, local=3))
    some = torch.rand(3, tokens, generator=generator) < chosen
    more = some | (torch.rand(3, tokens, generator=generator) < 0.3)
    assert 0 <= quality.mass_recall(weights, some, steady) <= 1 + 1e-6
    assert 0 <= quality.recall_at(k, weights, some, steady) <= quality.recall_at(k, weights, more, steady) <= 1


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


@pytest.mark.parametrize("case", Adversarial)
@pytest.mark.parametrize("name", ["oracle", "quest", "streaming_llm", "wave", "pq m4b8"])
def test_adversarial_inputs_give_sound_outputs(case: Adversarial, name: str) -> None:
    result = quality.evaluate(
        method(name, 512, 4096), adversarial(case, 4096, 64, 3, 4, seed=1, observed=OBSERVED), recall_k=32
    )
    assert 0 <= result.recall <= 1
    assert 0 <= result.mass <= 1 + 1e-6
    assert result.errors.normalised < 2


RETRIEVAL_SEEDS = range(6)


WAVE = SparseConfig("retroinfer", algo=wave_share(0.018))


SHARP, MID, DIFFUSE = Regime.SHARP, Regime.MID, Regime.DIFFUSE


@cache
def wave(regime: Regime) -> tuple[quality.QualityResult, ...]:
    return tuple(quality.evaluate(WAVE, sample(regime, seed), 32) for seed in RETRIEVAL_SEEDS)


@cache
def pq(m: int, b: int, share: float, regime: Regime) -> tuple[quality.QualityResult, ...]:
    config = SparseConfig("pqcache", algo=pq_top(m, b, round(share * TOKENS)))
    return tuple(quality.evaluate(config, sample(regime, seed), 32) for seed in RETRIEVAL_SEEDS)


@pytest.mark.parametrize(
    ("regime", "recall", "error"), [(SHARP, 0.66, 0.12), (MID, 0.70, 0.10), (DIFFUSE, 0.74, 0.095)]
)
def test_the_wave_index_finds_the_heaviest_tokens(regime: Regime, recall: float, error: float) -> None:
    found = wave(regime)
    assert fmean(result.recall for result in found) >= recall
    assert min(result.recall for result in found) >= 0.45
    assert fmean(result.errors.normalised for result in found) <= error
    # 1.8 % of the clusters and the steady zone; clusters differ in size, so do selections.
    assert 0.01 * TOKENS < fmean(result.tokens for result in found) < 0.04 * TOKENS
    assert 0.15 * TOKENS < fmean(result.estimated for result in found) < 0.35 * TOKENS
    # Estimation makes it no worse on average.
    assert fmean(r.errors.relative for r in found) < fmean(r.errors_alone.relative for r in found)


@pytest.mark.parametrize(("regime", "most"), [(SHARP, 0.012), (MID, 0.040), (DIFFUSE, 0.085)])
def test_fine_codes_find_nearly_all_and_cost_little(regime: Regime, most: float) -> None:
    for share, mean, every in ((0.1, 0.94, 0.88), (0.2, 0.98, 0.96)):
        found = [result.recall for result in pq(4, 8, share, regime)]
        assert fmean(found) >= mean
        assert min(found) >= every
    assert fmean(result.errors.normalised for result in pq(4, 8, 0.2, regime)) <= most


@pytest.mark.parametrize("regime", Regime)
def test_coarse_codes_find_most_and_fine_ones_more(regime: Regime) -> None:
    fine, coarse = pq(4, 8, 0.2, regime), pq(2, 6, 0.2, regime)
    assert fmean(result.recall for result in coarse) >= 0.75
    assert min(result.recall for result in coarse) >= 0.50
    assert all(f.recall > c.recall for f, c in zip(fine, coarse, strict=True))


@pytest.mark.parametrize("name", RETRIEVAL)
def test_methods_attend_to_about_their_budget(name: str) -> None:
    for share in (0.05, 0.2):
        result = quality.evaluate(method(name, round(share * TOKENS), TOKENS), sample(MID, 0))
        # A cluster is attended to whole.
        slack = 0.35 * share * TOKENS if METHODS[name].algorithm == "retroinfer" else 1
        assert result.tokens == pytest.approx(share * TOKENS, abs=slack)


# A cluster is attended to whole.
@pytest.mark.parametrize(
    ("name", "index", "slack"),
    [("streaming_llm", 0, 0), ("quest", 0.0625, 0), ("wave", 0.063, 0.2), ("pq m4b8", 0.031, 0)],
)
def test_equal_bytes_leave_fewer_tokens_to_methods_with_a_representation(name: str, index: float, slack: float) -> None:
    x = sample(MID, 0)
    config = quality.method_for_bytes(name, quality.kv_bytes(0.2 * TOKENS, 128), x)
    assert config is not None
    result = quality.evaluate(config, x)
    assert result.representation_bytes / quality.kv_bytes(TOKENS, 128) == pytest.approx(index, abs=0.01)
    assert result.tokens <= (0.2 - index) * (1 + slack) * TOKENS + 32


def test_a_budget_that_a_representation_takes_whole_leaves_no_method() -> None:
    assert quality.method_for_bytes("quest", quality.kv_bytes(0.06 * TOKENS, 128), sample(MID, 0)) is None


def test_a_seed_gives_the_same_sample_and_another_gives_another() -> None:
    one, again, other = (kv(256, 32, 3, 2, MID, seed) for seed in (1, 1, 2))
    assert all(torch.equal(getattr(one, name), getattr(again, name)) for name in "qkv")
    assert not torch.equal(one.k, other.k)


def test_a_giant_cluster_is_estimated_whole() -> None:
    x = adversarial(Adversarial.EQUAL, 3000, 64, 4, 4, seed=1)
    config = SparseConfig("retroinfer", algo=RetroInferConfig(estimation=1.0))
    driven = quality.Driven(config, x)
    found = driven.choices()
    # All keys are the same: one cluster has them all, no buffer holds it, and its estimate is exact.
    assert int(driven.cluster_sizes.max()) == 3000 - 68
    assert int(found.selected.sum(1).max()) == 68
    assert bool((found.estimated | found.selected).all())
    assert quality.evaluate(config, x).errors.relative < 0.02  # what bf16 leaves of centroid and sum of values


@pytest.mark.parametrize("regime", Regime)
def test_attention_is_as_concentrated_and_as_steady_as_the_regime_says(regime: Regime) -> None:
    found = [quality.concentration(kv(32768, 128, 16, 4, regime, seed, observed=OBSERVED)) for seed in range(4)]
    expected = quality.EXPECTED[regime]
    for field in ("mass", "overlap", "wide_overlap"):
        mean = fmean(getattr(one, field) for one in found)
        assert mean == pytest.approx(getattr(expected, field), abs=quality.TOLERANCE), field
    if expected.exact_error:
        assert fmean(one.exact_error for one in found) == pytest.approx(
            expected.exact_error, rel=quality.ERROR_TOLERANCE
        )
    assert all(one.lasting < one.overlap for one in found)


def test_equal_attention_has_no_top() -> None:
    flat = adversarial(Adversarial.EQUAL, 1000, 32, 3, 2, seed=0)
    assert quality.concentration(flat).mass == pytest.approx(0.018, rel=1e-3)


def test_rope_keeps_lengths_and_depends_only_on_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 64, generator=generator)
    at = torch.arange(100)
    spread_a, spread_b = rotated(a.expand(100, -1), at), rotated(b.expand(100, -1), at)
    torch.testing.assert_close(spread_a.norm(dim=1), a.norm().expand(100))
    products = (spread_a[7:] * spread_b[:-7]).sum(1)
    torch.testing.assert_close(products, products[:1].expand_as(products), atol=1e-4, rtol=1e-4)


def test_adversarial_inputs_are_what_they_are_named_for() -> None:
    samples = {case: adversarial(case, 512, 64, 4, 2, seed=3) for case in Adversarial}
    equal = samples[Adversarial.EQUAL]
    assert bool((equal.k == equal.k[0]).all())
    needle = torch.softmax(samples[Adversarial.NEEDLE].q @ samples[Adversarial.NEEDLE].k.T / 8, -1)
    assert float(needle.max(-1).values.min()) > 0.95
    plain, offset = samples[Adversarial.UNIFORM], samples[Adversarial.OFFSET]
    assert float(offset.k.mean(0).norm()) > 10 * float(plain.k.mean(0).norm())
    spread = samples[Adversarial.ONE_CLUSTER].k.std(0)
    assert float((samples[Adversarial.ONE_CLUSTER].k - 3).norm(dim=1).median()) < float(spread.norm())


@pytest.mark.parametrize("regime", Regime)
def test_twice_the_selection_hits_clearly_more_and_four_times_not_less(regime: Regime) -> None:
    selections = exact_selections(kv(8192, 128, 64, 4, regime, seed=0), 128)
    once, twice, four = hit_rates(selections, (1, 2, 4))
    assert (once.ratio, twice.ratio, four.ratio) == (1, 2, 4)
    assert twice.rate >= once.rate + 0.05
    assert four.rate >= twice.rate
    assert 0.5 < once.rate < 0.9


def test_exact_selections_are_the_heaviest_tokens_in_order() -> None:
    x = kv(512, 32, 3, 2, Regime.MID, seed=1)
    chosen = exact_selections(x, 10)
    mass = torch.softmax(x.q @ x.k.T * x.scale, -1).sum(1)
    assert bool((chosen[:, 1:] > chosen[:, :-1]).all())
    for step in range(3):
        outside = torch.ones(512, dtype=torch.bool).index_fill(0, chosen[step].long(), False)
        assert float(mass[step, chosen[step].long()].min()) >= float(mass[step, outside].max())


K, N, STEPS = 512, 32768, 40


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.8, 1.0])
def test_steps_overlap_as_asked(overlap: float) -> None:
    selections = trace(4096, 200, overlap, 0.5, 12, seed=1)
    assert selections.shape == (12, 200)
    assert selections.dtype is torch.int32
    assert all(len(ids.unique()) == 200 for ids in selections)
    shares = [torch.isin(b, a).float().mean().item() for a, b in pairwise(selections)]
    assert shares == pytest.approx([overlap] * 11)


@pytest.mark.parametrize("seed", range(2))
def test_c2_c3_a_larger_buffer_pays_only_where_items_return(seed: int) -> None:
    returning, new = trace(N, K, 0.85, 0.5, STEPS, seed), trace(N, K, 0.8, 0.0, STEPS, seed)
    assert [simulate(returning, factor * K) for factor in (1, 2)] == pytest.approx([0.865, 0.926], abs=0.02)
    assert [simulate(new, factor * K) for factor in (1, 2, 4)] == pytest.approx([0.80, 0.805, 0.805], abs=0.015)


@pytest.mark.parametrize("loads_hottest", [False, True])
@pytest.mark.parametrize("returns", [0.0, 0.3, 0.7, 1.0])
def test_i13_the_hit_rate_does_not_fall_with_the_capacity(returns: float, *, loads_hottest: bool) -> None:
    selections = trace(4096, 128, 0.7, returns, STEPS, 0)
    rates = [simulate(selections, size, loads_hottest=loads_hottest) for size in (128, 192, 256, 512, 1024, 4096)]
    # Ties within a step forbid plain inclusion, so a hair is allowed.
    assert all(b >= a - 0.002 for a, b in pairwise(rates)), rates
    assert rates[-1] > rates[0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overlap=1\.5"):
        trace(N, K, 1.5, 0.0, STEPS, 0)
    with pytest.raises(ConfigError, match="n=512"):
        trace(K, K, 0.5, 0.0, STEPS, 0)
    with pytest.raises(ConfigError, match="capacity=511"):
        simulate(trace(N, K, 0.5, 0.0, STEPS, 0), K - 1)
    with pytest.raises(ConfigError, match="selections=10"):
        simulate(trace(N, K, 0.5, 0.0, 10, 0), K)


CACHE_TOKENS = 8192


WAVE_ALGO = wave_share(0.018)


PQ = pq_top(4, 8, 819)


@cache
def chosen(algorithm: str) -> tuple[quality.Driven, list[Selection]]:
    algo = WAVE_ALGO if algorithm == "retroinfer" else PQ
    driven = quality.Driven(SparseConfig(algorithm, algo=algo), kv(CACHE_TOKENS, 128, 24, 4, Regime.MID, 0, OBSERVED))
    return driven, driven.selections()


def ids(selection: Selection) -> list[int]:
    return selection.indices[0, 0, : int(selection.lengths[0, 0])].tolist()


@pytest.mark.parametrize("is_async", [True, False])
def test_a_cache_of_all_clusters_hits_clusters_retrieved_before(is_async: bool) -> None:
    driven, selections = chosen("retroinfer")
    settings = replace(WAVE_ALGO, cache_ratio=1.0, async_update=is_async)
    hits, total, seen = 0, 0, set(ids(selections[0]))
    for clusters in map(ids, selections[1:]):
        hits, total = hits + len(seen & set(clusters)), total + len(clusters)
        seen |= set(clusters)
    found = wave_hits(driven, selections, settings)
    assert found.clusters == hits / total
    for policy in ("lru", "lfu", "fifo"):
        small = wave_hits(driven, selections, replace(settings, cache_ratio=0.025, policy=policy))
        assert 0 < small.clusters < found.clusters
        assert found.host_share < small.host_share < 0.02


def test_without_a_cache_all_comes_from_the_host() -> None:
    wave = wave_hits(*chosen("retroinfer"), replace(WAVE_ALGO, cache_ratio=0.0))
    pq = pq_hits(*chosen("pqcache"), replace(PQ, cache_tokens=0))
    assert (wave.clusters, wave.tokens, pq.tokens) == (0, 0, 0)
    sizes = chosen("retroinfer")[0].cluster_sizes
    retrieved = [int(sizes[ids(selection)].sum()) for selection in chosen("retroinfer")[1][1:]]
    assert wave.host_share == pytest.approx(sum(retrieved) / len(retrieved) / CACHE_TOKENS)
    assert pq.host_share == pytest.approx(819 / CACHE_TOKENS)


def test_a_cache_of_everything_loads_everything_once() -> None:
    driven, selections = chosen("pqcache")
    found = pq_hits(driven, selections, replace(PQ, cache_tokens=CACHE_TOKENS, k_cache=CACHE_TOKENS // 128))
    missed, seen = 0, set[int]()
    for step, selection in enumerate(selections):
        blocks = [(token - PQ.init) // 128 for token in ids(selection)]
        missed += sum(block not in seen for block in blocks) if step else 0
        # Blocks that reach into the local window are never admitted.
        seen |= {block for block in blocks if PQ.init + (block + 1) * 128 <= CACHE_TOKENS - 64}
    assert found.host_share == pytest.approx(missed / (len(selections) - 1) / CACHE_TOKENS)


def test_what_pqcache_admits_comes_from_the_host_and_what_retroinfer_admits_does_not() -> None:
    assert pq_hits(*chosen("pqcache"), PQ).admitted_share > 0
    settings: RetroInferConfig = WAVE_ALGO
    wave = wave_hits(*chosen("retroinfer"), settings)
    assert wave.admitted > 0
    assert wave.admitted_share == 0


NEEDLES = 128


CONTEXT = 4 * NEEDLES + 1


@cache
def data() -> tuple[RecallModel, RecallBatch]:
    return load_recall_model(), recall_batch(6, NEEDLES, 8, torch.Generator().manual_seed(3))


@cache
def run(name: str, share: float) -> RecallRun:
    config = method(name, round(share * CONTEXT), CONTEXT) if share else SparseConfig(algorithm=name)
    return recall(data()[0], config, data()[1])


def test_full_attention_through_the_engine_answers_as_a_whole_forward_pass() -> None:
    model, batch = data()
    tokens, ends = batch.joined()
    expected = model.logits(model(tokens)[:, ends]).argmax(-1) == batch.answers
    assert torch.equal(run("full", 0).correct, expected)
    assert run("full", 0).accuracy >= 0.9
    streamed = run("full_offload", 0)
    assert torch.equal(streamed.correct, expected)
    assert streamed.relative_error(run("full", 0)) < 1e-4


def test_the_exact_top_tenth_loses_nothing_and_a_window_loses_nearly_all() -> None:
    full = run("full", 0)
    assert run("oracle", 0.1).accuracy >= full.accuracy - 0.05
    assert run("streaming_llm", 0.2).accuracy <= 0.35


def test_the_hit_rate_counts_loads() -> None:
    rate = run("oracle", 0.1).hit_rate
    assert rate is not None
    assert 0.2 < rate < 1
    assert run("full", 0).hit_rate is None


@cache
def longer() -> RecallBatch:
    """Return contexts that are long enough to be clustered."""
    return recall_batch(2, 288, 6, torch.Generator().manual_seed(5))


def long_run(name: str, share: float, residency: str) -> RecallRun:
    config = retrieving(name, share, 4 * 288 + 1).replaced(residency=residency)
    match config.algo:
        case RetroInferConfig() as wave:
            config = config.replaced(algo=replace(wave, control="gpu"))
        case PQCacheConfig() as pq:
            config = config.replaced(algo=replace(pq, cache_tokens=256, k_cache=2))
    return recall(data()[0], config, longer())


@pytest.mark.parametrize(("name", "share"), [("wave", 0.1), ("pq m4b8", 0.1)])
def test_retrievers_lose_little_and_the_residency_changes_nothing(name: str, share: float) -> None:
    full = recall(data()[0], SparseConfig("full"), longer())
    blocks = long_run(name, share, "blocks")
    assert blocks.accuracy >= full.accuracy - 0.1
    assert 0 < blocks.relative_error(full) < 0.3
    assert blocks.hit_rate is not None
    assert 0 < blocks.hit_rate < 1
    resident = long_run(name, share, "device")
    assert torch.equal(resident.correct, blocks.correct)
    assert resident.relative_error(blocks) < 1e-5


def test_representations_are_taken_from_a_budget_of_bytes() -> None:
    n_tokens = 4 * 288 + 1
    tokens = {
        name: tokens_for_bytes(data()[0], method(name, n_tokens, n_tokens), 0.25, n_tokens)
        for name in ("oracle", "wave", "pq m4b8")
    }
    assert tokens["wave"] < tokens["oracle"] == round(0.25 * n_tokens)
    assert tokens["pq m4b8"] < tokens["oracle"]


@pytest.mark.parametrize(
    ("name", "found"), [("oracle", 1), ("quest", 1), ("streaming_llm", 0), ("wave", 1), ("pq m4b8", 1)]
)
def test_one_needle_is_found_by_methods_that_observe(name: str, found: int) -> None:
    x = adversarial(Adversarial.NEEDLE, 4096, 64, 8, 4, 0, OBSERVED)
    weights = quality.attention_weights(x.q, x.k, x.scale)
    assert quality.recall_at(1, weights, selections(method(name, 512, 4096), x), quality.steady_tokens(4096)) == found
