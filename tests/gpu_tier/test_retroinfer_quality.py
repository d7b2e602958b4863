"""What the wave index finds on S1 at n = 8K and on inputs without its structure; means over seeds are benchmarks'."""

from __future__ import annotations

import pytest
import torch

from gpu_tier.config import RetroInferConfig, SparseConfig
from gpu_tier.eval.driven import Driven
from gpu_tier.eval.quality import evaluate
from gpu_tier.eval.synth import Adversarial, KVSample, adversarial


def wave(**changes: float | int | str) -> SparseConfig:
    return SparseConfig("retroinfer", algo=RetroInferConfig.parse(changes))


def test_a_giant_cluster_is_estimated_whole() -> None:
    x = adversarial(Adversarial.EQUAL, 3000, 64, 4, 4, seed=1)
    driven = Driven(wave(estimation=1.0), x)
    found = driven.choices()
    # All keys are the same: one cluster has them all, no room holds it, and its estimate is exact.
    assert int(driven.cluster_sizes.max()) == 3000 - 68
    assert int(found.selected.sum(1).max()) == 68
    assert bool((found.estimated | found.selected).all())
    exact = evaluate(wave(estimation=1.0), x)
    assert exact.errors.relative < 0.02  # what bf16 leaves of centroid and sum of values


def test_a_common_offset_of_all_keys_changes_little() -> None:
    plain = adversarial(Adversarial.UNIFORM, 3000, 64, 4, 4, seed=3)
    offset = 4 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    moved = KVSample(plain.k + offset, plain.v, plain.q, plain.observed)
    ours, theirs = (evaluate(wave(), x, recall_k=32) for x in (plain, moved))
    assert ours.recall == pytest.approx(theirs.recall, abs=0.05)
    assert ours.errors.normalised == pytest.approx(theirs.errors.normalised, rel=0.1)
