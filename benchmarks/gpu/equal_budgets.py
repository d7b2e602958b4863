"""Methods on S1 under equal tokens and under equal bytes, for the quality benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from kvcm.gpu_tier.eval.methods import OBSERVED, method
from kvcm.gpu_tier.eval.quality import QualityResult, evaluate, kv_bytes, method_for_bytes
from kvcm.gpu_tier.eval.synth import KVSample, Regime, kv

__all__ = ["DIM", "GROUP", "TOKEN_SHARES", "Measured", "Samples", "measure", "samples_of"]

TOKEN_SHARES = (0.018, 0.05, 0.1, 0.2)
BYTE_SHARES = (0.05, 0.1, 0.2, 0.4)
DIM, GROUP = 128, 4

Samples = dict[Regime, list[KVSample]]


@dataclass(frozen=True)
class Measured:
    """The mean over seeds of one method at one budget.

    Attributes:
        regime: of the keys.
        budget: "tokens" or "bytes".
        share: of the context's tokens or KV bytes.
        name: of the method.
        context_tokens: tokens of a sample.
        results: of each seed; empty when the representation alone takes the budget.
    """

    regime: Regime
    budget: str
    share: float
    name: str
    context_tokens: int
    results: tuple[QualityResult, ...]

    def mean(self, metric: str) -> float:
        """Return the mean of `recall`, `mass`, `tokens`, ... or of an error by its name."""
        owners = [r if hasattr(r, metric) else r.errors for r in self.results]
        return fmean(getattr(owner, metric) for owner in owners)


def samples_of(tokens: int, steps: int, seeds: int) -> Samples:
    """Return S1 in all regimes: contexts of so many tokens, queries of so many steps, so many seeds."""
    return {
        regime: [kv(tokens, DIM, steps, GROUP, regime, seed, OBSERVED) for seed in range(seeds)] for regime in Regime
    }


def measure(samples: Samples, names: Sequence[str]) -> list[Measured]:
    """Return every method in every regime under both kinds of budget."""
    measured = []
    for regime, name in product(samples, names):
        for share in TOKEN_SHARES:
            configs = [method(name, round(share * len(x.k)), len(x.k)) for x in samples[regime]]
            results = tuple(evaluate(c, x) for c, x in zip(configs, samples[regime], strict=True))
            measured.append(Measured(regime, "tokens", share, name, len(samples[regime][0].k), results))
        measured += [_under_bytes(regime, name, share, samples[regime]) for share in BYTE_SHARES]
        print(f"{regime}, {name} done", file=sys.stderr)
    return measured


def _under_bytes(regime: Regime, name: str, share: float, samples: list[KVSample]) -> Measured:
    results = []
    for x in samples:
        config = method_for_bytes(name, kv_bytes(share * len(x.k), DIM), x)
        if config is not None:
            results.append(evaluate(config, x))
    return Measured(regime, "bytes", share, name, len(samples[0].k), tuple(results))
