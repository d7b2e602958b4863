"""What the wave index and product quantisation have to reach on S1, as means over seeds and for every seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from equal_budgets import Samples
from report import Row

from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.eval.methods import method, pq_top, wave_share
from kvcm.gpu_tier.eval.quality import QualityResult, evaluate
from kvcm.gpu_tier.eval.synth import KVSample, Regime

__all__ = ["WAVE", "long_rows", "pq", "pq_rows", "wave_rows", "wave_small_rows"]

_SHARP, _MID, _DIFFUSE = Regime.SHARP, Regime.MID, Regime.DIFFUSE
_RETRIEVAL = 0.018
_PQ_SHARES = (0.1, 0.2)

WAVE = SparseConfig("retroinfer", algo=wave_share(_RETRIEVAL))


def pq(m: int, b: int, top: int) -> SparseConfig:
    """Return PQ that retrieves `top` tokens."""
    return SparseConfig("pqcache", algo=pq_top(m, b, top))


@dataclass(frozen=True)
class Bar:
    """The bound on a figure.

    Attributes:
        key: of the check, with its subject.
        metric: that is checked.
        value: of one seed's result.
        mean: of each regime.
        every: of every seed, by regime; empty for none.
        least: whether figures must be at least so much, or at most.
    """

    key: str
    metric: str
    value: Callable[[QualityResult], float]
    mean: dict[Regime, float]
    every: dict[Regime, float]
    least: bool = True

    def rows(self, regime: Regime, results: Sequence[QualityResult], is_quick: bool) -> Iterator[Row]:
        """Yield the mean and the worst seed of one regime."""
        values = [self.value(result) for result in results]
        case = f"{self.key}, {regime}"
        yield self._row(case, f"{self.metric}, mean", fmean(values), self.mean.get(regime), is_quick)
        worst = min(values) if self.least else max(values)
        yield self._row(case, f"{self.metric}, worst of {len(values)} seeds", worst, self.every.get(regime), is_quick)

    def _row(self, case: str, metric: str, value: float, bar: float | None, is_quick: bool) -> Row:
        if bar is None:
            return Row(case, metric, value, "")
        holds = value >= bar if self.least else value <= bar
        target = f"{'>=' if self.least else '<='} {bar}"
        return Row(case, metric, value, "", target=target, ok=None if is_quick else holds)


def _each(sharp: float, mid: float, diffuse: float) -> dict[Regime, float]:
    return {_SHARP: sharp, _MID: mid, _DIFFUSE: diffuse}


def _all(value: float) -> dict[Regime, float]:
    return _each(value, value, value)


def _gain(result: QualityResult) -> float:
    return result.errors_alone.relative / result.errors.relative


_Q1 = Bar("Q1 wave 1.8 %", "recall@100", lambda r: r.recall, _each(0.75, 0.80, 0.82), _all(0.68))
_Q2 = Bar("Q2 wave 1.8 %", "mass recall", lambda r: r.mass, _each(0.80, 0.77, 0.76), _all(0.70))
_Q3 = Bar(
    "Q3 wave 1.8 % + 23.2 %", "norm_err", lambda r: r.errors.normalised, _each(0.105, 0.090, 0.075), _all(0.14), False
)
_Q4 = Bar("Q4 estimation", "rel_err without / with", _gain, _each(1.12, 2.0, 3.5), _each(1.03, 1.5, 2.8))
_P95 = Bar("wave 1.8 % + 23.2 %", "p95 of norm_err, worst head", lambda r: r.errors.p95, {}, {}, False)
_TOKENS = Bar("wave 1.8 %", "tokens selected, steady included", lambda r: r.tokens, {}, {}, False)
_Q1S = (
    Bar("Q1s wave 1.8 %, n=8K", "recall@32", lambda r: r.recall, _each(0.66, 0.70, 0.74), _all(0.45)),
    Bar("Q1s wave, n=8K", "norm_err", lambda r: r.errors.normalised, _each(0.12, 0.10, 0.095), {}, False),
)
_Q9 = {
    share: Bar(f"Q9 PQ m4b8 {share:.0%}, n=8K", "recall@32", lambda r: r.recall, _all(mean), _all(every))
    for share, mean, every in ((0.1, 0.94, 0.88), (0.2, 0.98, 0.96))
}
_Q10 = Bar("Q10 PQ m2b6 20%, n=8K", "recall@32", lambda r: r.recall, _all(0.75), _all(0.50))
_Q11 = Bar("Q11 PQ m4b8 20%, n=8K", "norm_err", lambda r: r.errors.normalised, _each(0.012, 0.040, 0.085), {}, False)
_Q5_MOST = 0.5


def wave_rows(samples: Samples, is_quick: bool) -> Iterator[Row]:
    """Yield Q1 to Q5 and what goes with them."""
    for regime, of_regime in samples.items():
        results = _results(WAVE, of_regime)
        for bar in (_Q1, _Q2, _Q3, _Q4, _P95, _TOKENS):
            yield from bar.rows(regime, results, is_quick)
        yield _against_oracle(regime, results, of_regime, is_quick)
        print(f"Q1-Q5 {regime} done", file=sys.stderr)


def _against_oracle(
    regime: Regime, results: Sequence[QualityResult], samples: Sequence[KVSample], is_quick: bool
) -> Row:
    """Return Q5: the error with estimation over that of the exact top tokens, as many as the clusters hold."""
    oracles = [evaluate(method("oracle", round(r.tokens), len(x.k)), x) for r, x in zip(results, samples, strict=True)]
    ours, exact = (fmean(r.errors.relative for r in found) for found in (results, oracles))
    has_bar = regime is _DIFFUSE
    return Row(
        f"Q5 wave against the oracle of as many tokens, {regime}", "rel_err", ours, "", exact, ours / exact,
        f"<= {_Q5_MOST}x" if has_bar else "", ours <= _Q5_MOST * exact if has_bar and not is_quick else None,
    )  # fmt: skip


def wave_small_rows(samples: Samples, is_quick: bool) -> Iterator[Row]:
    """Yield Q1s."""
    for regime, of_regime in samples.items():
        results = _results(WAVE, of_regime, 32)
        for bar in _Q1S:
            yield from bar.rows(regime, results, is_quick)


def pq_rows(samples: Samples, is_quick: bool) -> Iterator[Row]:
    """Yield Q9 to Q11."""
    for regime, of_regime in samples.items():
        tops = {share: round(share * len(of_regime[0].k)) for share in _PQ_SHARES}
        fine = {share: _results(pq(4, 8, top), of_regime, 32) for share, top in tops.items()}
        coarse = {share: _results(pq(2, 6, top), of_regime, 32) for share, top in tops.items()}
        for share, bar in _Q9.items():
            yield from bar.rows(regime, fine[share], is_quick)
        yield from _Q10.rows(regime, coarse[0.2], is_quick)
        yield from _Q11.rows(regime, fine[0.2], is_quick)
        for share in _PQ_SHARES:
            yield _finer_is_better(regime, share, fine[share], coarse[share], is_quick)


def _finer_is_better(
    regime: Regime, share: float, fine: Sequence[QualityResult], coarse: Sequence[QualityResult], is_quick: bool
) -> Row:
    margins = [f.recall - c.recall for f, c in zip(fine, coarse, strict=True)]
    return Row(
        f"Q10 PQ m4b8 over m2b6 {share:.0%}, n=8K, {regime}", "recall@32, least difference of a seed", min(margins), "",
        target="> 0", ok=None if is_quick else min(margins) > 0,
    )  # fmt: skip


def long_rows(sample: KVSample, is_quick: bool) -> Iterator[Row]:
    """Yield Q8: one long context, mid, one seed."""
    result = evaluate(WAVE, sample)
    bars: tuple[tuple[str, float, float], ...] = (
        ("recall@100", result.recall, 0.85),
        ("mass recall", result.mass, 0.77),
    )
    for metric, value, least in bars:
        ok = None if is_quick else value >= least
        yield Row(f"Q8 wave 1.8 %, n={len(sample.k) // 1024}K, mid", metric, value, "", target=f">= {least}", ok=ok)


def _results(config: SparseConfig, samples: Sequence[KVSample], recall_k: int = 100) -> list[QualityResult]:
    return [evaluate(config, sample, recall_k) for sample in samples]
