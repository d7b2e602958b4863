"""Claim: the settings of RetroInfer and PQCache are where their documents put them for a reason, one at a time.

S1, three regimes: each line changes one setting of the default one. The caches are the policies
themselves, on the selections of the mid regime. Other benchmarks measure on a GPU the time that settings cost;
here are quality, bytes and hit rates.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import checkout  # noqa: F401 - first: it makes the rest importable
from equal_budgets import DIM, GROUP, Samples, samples_of
from report import Row, arguments, publish

from kvcm.gpu_tier.config import AlgorithmConfig, PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.eval.hit_rates import BlockHits, pq_hits, wave_hits
from kvcm.gpu_tier.eval.methods import OBSERVED, pq_top, wave_share
from kvcm.gpu_tier.eval.quality import Driven, QualityResult, evaluate, kv_bytes
from kvcm.gpu_tier.eval.report import Cell, ResultTable, write
from kvcm.gpu_tier.eval.synth import Regime, kv
from kvcm.gpu_tier.types import Selection

_WAVE = wave_share(0.018)
_K = 1024

Results = dict[Regime, list[QualityResult]]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    tokens: int
    seeds: int
    steps: int
    cache_steps: int


FULL = Size(32768, 4, 16, 64)
QUICK = Size(4096, 1, 2, 3)


def wave_settings(n_tokens: int) -> dict[str, RetroInferConfig]:
    """Return the settings of the wave index that are compared."""
    changed: dict[str, dict[str, float | str]] = {
        "default": {},
        "estimation 0": {"estimation": 0.0},
        "estimation of all": {"estimation": 1.0},
        "retrieval 0.9 %": {"retrieval": 0.009},
        "retrieval 3.6 %": {"retrieval": 0.036},
        "steady zone 4 + 256": {"local": 256},
        "steady zone 4 + 1024": {"local": 1024},
        "8 tokens a centroid": {"tokens_per_centroid": 8},
        "32 tokens a centroid": {"tokens_per_centroid": 32},
        "3 iterations": {"iterations": 3},
        "25 iterations": {"iterations": 25},
        "centred on the prompt": {"center": "prompt"},
        "not centred": {"center": "none"},
        "assigned over all segments": {"final_assign": "global"},
        "ranked by the largest product": {"rank": "max_ip"},
    }
    sizes = [size * _K for size in (1, 2, 4, 16, 32) if size * _K <= n_tokens]
    changed |= {f"segments of {size // _K}K": {"segment": size} for size in sizes}
    return {name: replace(_WAVE, **settings) for name, settings in changed.items()}  # type: ignore[arg-type]


def pq_settings(n_tokens: int) -> dict[str, PQCacheConfig]:
    """Return the settings of PQ that are compared: a tenth of the tokens retrieved, but where it says otherwise."""
    tenth = round(0.1 * n_tokens)
    codes = {f"m={m} b={b}": pq_top(m, b, tenth) for m, b in ((2, 4), (2, 6), (2, 8), (4, 6), (4, 8), (8, 6), (8, 8))}
    default = codes["m=4 b=8"]
    iterations = {f"m=4 b=8, {count} iterations": replace(default, iterations=count) for count in (1, 3, 25)}
    halves = {
        f"m=4 b=8, {share:.0%} of the tokens, half of them local": replace(
            default, token_budget=0, token_ratio=share, local_ratio=0.5
        )
        for share in (0.1, 0.2)
    }
    return {**codes, **iterations, **halves}


def evaluated(settings: Mapping[str, AlgorithmConfig], size: Size, pool: Executor) -> dict[str, Results]:
    """Return every setting's results in every regime."""
    return dict(zip(settings, pool.map(_results, settings, settings.values(), repeat(size)), strict=True))


def _results(name: str, algo: AlgorithmConfig, size: Size) -> Results:
    algorithm = "retroinfer" if isinstance(algo, RetroInferConfig) else "pqcache"
    config = SparseConfig(algorithm, algo=algo)
    found = {regime: [evaluate(config, x) for x in of_regime] for regime, of_regime in _samples(size).items()}
    print(f"{algorithm}, {name} done", file=sys.stderr)
    return found


@cache
def _samples(size: Size) -> Samples:
    """Return S1, once in each process."""
    return samples_of(size.tokens, size.steps, size.seeds)


def quality_table(title: str, found: Mapping[str, Results], n_tokens: int) -> ResultTable:
    """Return recall and errors of every setting."""
    columns = (
        "setting", "tokens", "estimated", "representation / KV",
        *(f"{label}, {regime}" for label in ("recall@100", "norm_err") for regime in Regime),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name, by_regime in found.items():
        everything = [result for results in by_regime.values() for result in results]
        index = fmean(r.representation_bytes for r in everything) / kv_bytes(n_tokens, DIM)
        head = (round(fmean(r.tokens for r in everything)), round(fmean(r.estimated for r in everything)), index)
        recall = (fmean(r.recall for r in by_regime[regime]) for regime in Regime)
        error = (fmean(r.errors.normalised for r in by_regime[regime]) for regime in Regime)
        rows.append((name, *head, *recall, *error))
    note = f"S1, {n_tokens // _K}K tokens, means over seeds and steps. Tokens: attended to, steady ones included."
    return ResultTable(title, columns, tuple(rows), note)


def cache_tables(size: Size) -> tuple[ResultTable, ResultTable]:
    """Return what the caches do on the selections of the mid regime, of the wave index and of PQ."""
    samples = [kv(size.tokens, DIM, size.cache_steps, GROUP, Regime.MID, seed, OBSERVED) for seed in range(size.seeds)]
    pq = pq_top(4, 8, round(0.1 * size.tokens))
    chosen_by = {"retroinfer": _WAVE, "pqcache": pq}
    wave_driven, pq_driven = (
        [Driven(SparseConfig(name, algo=algo), sample) for sample in samples] for name, algo in chosen_by.items()
    )
    return (
        _cache_table("RetroInfer: block cache", wave_caches(), wave_driven),
        _cache_table("PQCache: block cache", pq_caches(pq), pq_driven),
    )


def wave_caches() -> dict[str, AlgorithmConfig]:
    """Return the caches of RetroInfer that are compared."""
    changed: dict[str, dict[str, float | str | bool]] = {
        "no cache": {"cache_ratio": 0.0},
        "5 % of the KV, updated beside attention": {},
        "5 %, updated before attention": {"async_update": False},
        "2.5 %": {"cache_ratio": 0.025},
        "10 %": {"cache_ratio": 0.1},
        **{f"5 %, {policy}": {"policy": policy} for policy in ("lfu", "fifo", "random")},
    }
    return {name: replace(_WAVE, **settings) for name, settings in changed.items()}  # type: ignore[arg-type]


def pq_caches(pq: PQCacheConfig) -> dict[str, AlgorithmConfig]:
    """Return the caches of PQCache that are compared."""
    changed: dict[str, dict[str, int | str]] = {
        "no cache": {"cache_tokens": 0},
        "4K tokens in blocks, 32 blocks wanted": {},
        "4K, 8 blocks wanted": {"k_cache": 8},
        "8K, 32 blocks wanted": {"cache_tokens": 8192},
        "8K, 64 blocks wanted": {"cache_tokens": 8192, "k_cache": 64},
        "4K, least often used": {"policy": "lfu"},
        "4K single tokens": {"cache_unit": "token"},
        "8K single tokens": {"cache_unit": "token", "cache_tokens": 8192},
    }
    return {name: replace(pq, **settings) for name, settings in changed.items()}  # type: ignore[arg-type]


def _cache_table(title: str, caches: Mapping[str, AlgorithmConfig], driven: Sequence[Driven]) -> ResultTable:
    selections = [one.selections() for one in driven]
    rows: list[tuple[Cell, ...]] = []
    for name, settings in caches.items():
        hits = [_hits(one, chosen, settings) for one, chosen in zip(driven, selections, strict=True)]
        fields = ("tokens", "host_share", "admitted", "admitted_share")
        figures = (fmean(getattr(one, field) for one in hits) for field in fields)
        rows.append((name, *figures))
        print(f"{title}, {name} done", file=sys.stderr)
    note = (
        "S1 mid, means over seeds, the first step left out. Bytes from the host of a step, of misses and for what is "
        "admitted, are over those of the whole KV. Admitted: clusters, blocks or tokens that come into the cache in a "
        "step; RetroInfer copies them out of the execution buffer, PQCache loads them whole from the host. Whether a "
        "cache is updated before or beside attention changes times alone, which are measured on a GPU."
    )
    columns = ("cache", "token hit rate", "misses from the host / KV", "admitted a step", "admitted from the host / KV")
    return ResultTable(title, columns, tuple(rows), note)


def _hits(driven: Driven, selections: Sequence[Selection], settings: AlgorithmConfig) -> BlockHits:
    if isinstance(settings, RetroInferConfig):
        return wave_hits(driven, selections, settings)
    assert isinstance(settings, PQCacheConfig)
    return pq_hits(driven, selections, settings)


def rows_of(tables: Sequence[ResultTable]) -> list[Row]:
    """Return the figures of tables as rows."""
    return [
        Row(f"{table.title.partition(':')[0]}, {cells[0]}", column, float(value), "")
        for table in tables
        for cells in table.rows
        for column, value in zip(table.columns[1:], cells[1:], strict=True)
        if isinstance(value, int | float)
    ]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--report", type=Path, help="folder to write the tables to")
    parser.add_argument("--jobs", type=int, default=1, help="processes that measure")
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    # A process that is forked while torch has threads may wait for one of them for ever.
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        caches = pool.submit(cache_tables, size)
        wave = evaluated(wave_settings(size.tokens), size, pool)
        pq = evaluated(pq_settings(size.tokens), size, pool)
        wave_cache, pq_cache = caches.result()
    tables = [
        quality_table("RetroInfer: wave index, 1.8 % of the clusters retrieved", wave, size.tokens), wave_cache,
        quality_table("PQCache: codes, a tenth of the tokens retrieved", pq, size.tokens), pq_cache,
    ]  # fmt: skip
    if args.report is not None:
        write("Ablations of RetroInfer and PQCache", tables, args.report)
    return 0 if publish("Ablations", rows_of(tables), args.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
