"""Claim: what a method leaves out costs little, measured without anybody's weights or data.

S1 are synthetic keys with the concentration and drift of attention on long text; the algorithms of the tier choose on
them as in an engine, under equal tokens and under equal bytes on the device. The recall transformer answers questions
through the whole engine. Hit rates are of the LRU diff buffer on exact selections and on traces.

`--report FOLDER` writes all tables and plots; the rows here are those with a bar, and the same methods at a tenth of
the tokens. A machine without a GPU suffices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import checkout  # noqa: F401 - first: it makes the rest importable
import torch
from equal_budgets import DIM, GROUP, TOKEN_SHARES, Measured, Samples, measure, samples_of
from quality_report import publish_report
from recall_table import RECALL_SIZES, recall_rows
from report import Row, arguments, publish

from kvcm.gpu_tier.eval.hit_rates import HitRate, exact_selections, hit_rates, simulate, trace
from kvcm.gpu_tier.eval.methods import BASELINES
from kvcm.gpu_tier.eval.quality import ERROR_TOLERANCE, EXPECTED, TOLERANCE, concentration
from kvcm.gpu_tier.eval.synth import Regime, kv

RATIOS = (1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    tokens: int
    steps: int
    seeds: int
    cache_steps: int


FULL = Size(tokens=32768, steps=16, seeds=4, cache_steps=128)
QUICK = Size(tokens=8192, steps=4, seeds=1, cache_steps=16)


def property_rows(samples: Samples, is_quick: bool) -> Iterator[Row]:
    """Yield how concentrated and how steady S1's attention is."""
    for regime, of_regime in samples.items():
        found, expected = [concentration(x) for x in of_regime], EXPECTED[regime]
        for field, metric in (
            ("mass", "a head's attention in its top 1.8 %"), ("overlap", "top-100 overlap of steps"),
            ("wide_overlap", "top-1.8 % overlap of steps"),
        ):  # fmt: skip
            value, want = fmean(getattr(one, field) for one in found), getattr(expected, field)
            ok = None if is_quick else abs(value - want) <= TOLERANCE
            target = f"within {TOLERANCE} of"
            yield Row(f"S1 {regime}", metric, value, "share", want, value / want, target, ok)
        error = fmean(one.exact_error for one in found)
        if expected.exact_error:
            ratio = error / expected.exact_error
            ok = None if is_quick else abs(ratio - 1) <= ERROR_TOLERANCE
            yield Row(
                f"S1 {regime}", "rel_err of the exact top 1.8 %", error, "", expected.exact_error, ratio,
                f"within {ERROR_TOLERANCE:.0%} of", ok,
            )  # fmt: skip


def quality_rows(measured: list[Measured], is_quick: bool) -> Iterator[Row]:
    """Yield recall and errors at a tenth of the tokens, and the bars Q12 and Q13."""
    by_key = {(m.regime, m.name, m.share): m for m in measured if m.budget == "tokens"}
    for regime, name in product(Regime, BASELINES):
        found, oracle = by_key[regime, name, 0.1], by_key[regime, "oracle", 0.1]
        for metric in ("recall", "mass", "normalised"):
            value, ceiling = found.mean(metric), oracle.mean(metric)
            label = {"recall": "recall@100", "mass": "mass recall", "normalised": "norm_err"}[metric]
            yield Row(f"S1 {regime}, {name} 10 % of tokens", label, value, "", ceiling, value / ceiling)
    for regime, (share, least) in product(Regime, ((0.1, 0.45), (0.2, 0.72))):
        value = by_key[regime, "quest", share].mean("recall")
        ok = None if is_quick else value >= least
        yield Row(f"Q12 quest {share:.0%}, {regime}", "recall@100", value, "", target=f">= {least}", ok=ok)
    for regime, share in product((Regime.SHARP, Regime.MID), TOKEN_SHARES):
        streaming = by_key[regime, "streaming_llm", share].mean("relative")
        best_other = max(by_key[regime, name, share].mean("relative") for name in ("oracle", "quest", "dsa"))
        yield Row(
            f"Q13 streaming {share:.1%}, {regime}", "rel_err", streaming, "", best_other, streaming / best_other,
            "> 1", None if is_quick else streaming > best_other,
        )  # fmt: skip


def cache_rates(size: Size) -> dict[str, list[HitRate]]:
    """Return the hit rates of each trace: C1 in three regimes, C2, C3."""
    k = 512 if size is FULL else 128
    rates = {}
    for regime in Regime:
        x = kv(size.tokens, DIM, size.cache_steps, GROUP, regime, seed=0)
        rates[f"C1 {regime}"] = hit_rates(exact_selections(x, k), RATIOS)
    for case, overlap, returns in (("C2 half return", 0.85, 0.5), ("C3 none return", 0.8, 0.0)):
        ids = trace(131072, k, overlap, returns, size.cache_steps, seed=0)
        rates[case] = [HitRate(k, round(r * k), simulate(ids, round(r * k))) for r in RATIOS]
    return rates


def cache_rows(rates: dict[str, list[HitRate]], is_quick: bool) -> Iterator[Row]:
    """Yield the hit rates with the bars C1 to C3."""
    bars = {
        "C1 mid": ("2x >= 1x + 0.08, 4x >= 2x", lambda a, b, c: b >= a + 0.08 and c >= b),
        "C2 half return": ("0.865 and 0.926 within 0.02", lambda a, b, c: abs(a - 0.865) < 0.02 > abs(b - 0.926)),
        "C3 none return": ("all 0.80 to 0.82", lambda a, b, c: 0.79 <= a <= b + 0.01 and max(b, c) <= 0.83),
    }
    for case, found in rates.items():
        values = [rate.rate for rate in found]
        target, holds = bars.get(case, ("", None))
        ok = None if is_quick or holds is None else holds(*values)
        for rate in found:
            yield Row(
                case, f"hit rate, buffer {rate.ratio:.0f}x", rate.rate, "share", values[0], rate.rate / values[0],
                target, ok,
            )  # fmt: skip


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--report", type=Path, help="folder to write all tables and plots to")
    args = parser.parse_args()
    torch.manual_seed(0)
    size = QUICK if args.quick else FULL
    samples = samples_of(size.tokens, size.steps, size.seeds)
    measured = measure(samples, BASELINES)
    rates = cache_rates(size)
    rows = [*property_rows(samples, args.quick), *quality_rows(measured, args.quick), *cache_rows(rates, args.quick)]
    answers = recall_rows(RECALL_SIZES["quick" if args.quick else "full"], args.quick)
    rows += answers
    is_met = publish("Quality of selections", rows, args.json)
    if args.report is not None:
        publish_report(args.report, measured, rates, rows)
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
