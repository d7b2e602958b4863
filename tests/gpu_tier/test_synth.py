"""S1 has the concentration and the drift that its regimes stand for, and S5 has what its cases are named for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gpu_tier.eval.synth import Adversarial, KVSample, Regime, adversarial, kv, rotated

SINKS, LOCAL = 4, 64


@dataclass(frozen=True)
class Expected:
    """Means over seeds at n = 8K, and how far they may be off."""

    mass: float
    overlap: float
    tolerance: float = 0.06


EXPECTED = {
    Regime.SHARP: Expected(0.98, 0.78),
    Regime.MID: Expected(0.85, 0.76),
    Regime.DIFFUSE: Expected(0.57, 0.72),
}


def weights(sample: KVSample) -> Tensor:
    """Return the attention of each step over the tokens that need retrieval, summed over the group, sums of 1."""
    mass = torch.softmax(sample.q @ sample.k.T * sample.scale, -1).sum(1)[:, SINKS:-LOCAL]
    return mass / mass.sum(1, keepdim=True)


def overlap(mass: Tensor, k: int) -> float:
    """Return how much of a step's top k is in the next step's."""
    chosen = torch.zeros_like(mass, dtype=torch.bool).scatter_(1, mass.topk(k).indices, True)
    return float((chosen[1:] & chosen[:-1]).sum(1).float().mean() / k)


@pytest.mark.parametrize("regime", Regime)
def test_attention_is_as_concentrated_and_as_steady_as_the_regime_says(regime: Regime) -> None:
    masses = [weights(kv(8192, 128, 16, 4, regime, seed)) for seed in range(4)]
    top = torch.tensor([float(mass.topk(round(0.018 * 8192)).values.sum(1).mean()) for mass in masses])
    steady = torch.tensor([overlap(mass, 100) for mass in masses])
    expected = EXPECTED[regime]
    assert float(top.mean()) == pytest.approx(expected.mass, abs=expected.tolerance)
    assert float(steady.mean()) == pytest.approx(expected.overlap, abs=expected.tolerance)


def test_a_seed_gives_the_same_sample_and_another_gives_another() -> None:
    one, again, other = (kv(256, 32, 3, 2, Regime.MID, seed) for seed in (1, 1, 2))
    assert torch.equal(one.k, again.k)
    assert torch.equal(one.v, again.v)
    assert torch.equal(one.q, again.q)
    assert not torch.equal(one.k, other.k)
    assert one.k.shape == one.v.shape == (256, 32)
    assert one.q.shape == (3, 2, 32)


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
