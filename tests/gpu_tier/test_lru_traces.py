"""S2 traces, and what a larger buffer gains on them (C2, C3, I13)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from gpu_tier.errors import ConfigError
from gpu_tier.eval.traces import simulate, trace

K, N, STEPS = 512, 32768, 40


def shares(selections: torch.Tensor) -> list[float]:
    return [torch.isin(b, a).float().mean().item() for a, b in pairwise(selections)]


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.8, 1.0])
def test_steps_overlap_as_asked(overlap: float) -> None:
    selections = trace(4096, 200, overlap, 0.5, 12, seed=1)
    assert selections.shape == (12, 200)
    assert selections.dtype is torch.int32
    assert all(len(ids.unique()) == 200 for ids in selections)
    assert shares(selections) == pytest.approx([overlap] * 11)


def test_newcomers_return_as_asked() -> None:
    selections = trace(N, K, 0.8, 0.5, STEPS, seed=3)
    for step in range(10, STEPS):
        newcomers = selections[step][~torch.isin(selections[step], selections[step - 1])]
        assert torch.isin(newcomers, selections[step - 6 : step - 1]).float().mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("seed", range(2))
def test_c2_items_that_return_make_a_larger_buffer_pay(seed: int) -> None:
    selections = trace(N, K, 0.85, 0.5, STEPS, seed)
    assert simulate(selections, K) == pytest.approx(0.865, abs=0.02)
    assert simulate(selections, 2 * K) == pytest.approx(0.926, abs=0.02)


@pytest.mark.parametrize("seed", range(2))
def test_c3_without_returns_a_larger_buffer_gains_nothing(seed: int) -> None:
    selections = trace(N, K, 0.8, 0.0, STEPS, seed)
    rates = [simulate(selections, factor * K) for factor in (1, 2, 4)]
    assert rates[0] == pytest.approx(0.80, abs=0.01)
    assert 0.79 <= rates[1] <= 0.82
    assert 0.79 <= rates[2] <= 0.82


@pytest.mark.parametrize("loads_hottest", [False, True])
@pytest.mark.parametrize("returns", [0.0, 0.3, 0.7, 1.0])
def test_i13_the_hit_rate_does_not_fall_with_the_capacity(returns: float, *, loads_hottest: bool) -> None:
    for seed in range(1):
        selections = trace(4096, 128, 0.7, returns, STEPS, seed)
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
