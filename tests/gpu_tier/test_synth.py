"""S1 has the concentration and the drift that its regimes stand for, and S5 has what its cases are named for."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from gpu_tier.eval.concentration import ERROR_TOLERANCE, EXPECTED, TOLERANCE, concentration
from gpu_tier.eval.methods import OBSERVED
from gpu_tier.eval.synth import Adversarial, Regime, adversarial, kv, rotated


@pytest.mark.parametrize("regime", Regime)
def test_attention_is_as_concentrated_and_as_steady_as_the_regime_says(regime: Regime) -> None:
    found = [concentration(kv(32768, 128, 16, 4, regime, seed, observed=OBSERVED)) for seed in range(4)]
    expected = EXPECTED[regime]
    for field in ("mass", "overlap", "wide_overlap"):
        mean = fmean(getattr(one, field) for one in found)
        assert mean == pytest.approx(getattr(expected, field), abs=TOLERANCE), field
    if expected.exact_error:
        assert fmean(one.exact_error for one in found) == pytest.approx(expected.exact_error, rel=ERROR_TOLERANCE)
    assert all(one.lasting < one.overlap for one in found)


def test_equal_attention_has_no_top() -> None:
    flat = adversarial(Adversarial.EQUAL, 1000, 32, 3, 2, seed=0)
    assert concentration(flat).mass == pytest.approx(0.018, rel=1e-3)


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
