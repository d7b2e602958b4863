"""Larger buffers hit more on selections that come back, as exact attention on S1 makes them."""

from __future__ import annotations

import pytest
import torch

from gpu_tier.eval.hitrate import exact_selections, hit_rates
from gpu_tier.eval.synth import Regime, kv


@pytest.mark.parametrize("regime", Regime)
def test_twice_the_selection_hits_clearly_more_and_four_times_not_less(regime: Regime) -> None:
    selections = exact_selections(kv(8192, 128, 64, 4, regime, seed=0), 128)
    once, twice, four = hit_rates(selections, (1, 2, 4))
    assert (once.ratio, twice.ratio, four.ratio) == (1, 2, 4)
    assert twice.rate >= once.rate + 0.05
    assert four.rate >= twice.rate
    assert 0.5 < once.rate < 0.9


def test_a_selection_that_never_changes_always_hits_and_one_that_never_repeats_never_does() -> None:
    still = torch.arange(32, dtype=torch.int32).expand(20, -1)
    assert [rate.rate for rate in hit_rates(still, (1, 4))] == [1, 1]
    moving = torch.arange(20 * 32, dtype=torch.int32).view(20, 32)
    assert hit_rates(moving, (1,))[0].rate == 0


def test_exact_selections_are_the_heaviest_tokens_in_order() -> None:
    x = kv(512, 32, 3, 2, Regime.MID, seed=1)
    chosen = exact_selections(x, 10)
    mass = torch.softmax(x.q @ x.k.T * x.scale, -1).sum(1)
    assert bool((chosen[:, 1:] > chosen[:, :-1]).all())
    for step in range(3):
        outside = torch.ones(512, dtype=torch.bool).index_fill(0, chosen[step].long(), False)
        assert float(mass[step, chosen[step].long()].min()) >= float(mass[step, outside].max())
