"""The recall transformer's answers under each method, through the whole engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
from report import Row

from kvcm.gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.engine.recall_model import QuestionPosition, RecallModel, load_recall_model, recall_batch
from kvcm.gpu_tier.eval.methods import BASELINES, method, retrieving
from kvcm.gpu_tier.eval.recall import RecallRun, recall, tokens_for_bytes

__all__ = ["RECALL_SIZES", "RETRIEVAL_SIZES", "Budget", "RecallSize", "recall_rows"]


@dataclass(frozen=True)
class Budget:
    """A method and what it may use of the context.

    Attributes:
        name: of the method.
        share: of what `of` says.
        of: "tokens", steady ones included; "bytes" of the KV, those of the representation included; or "retrieved": of
            clusters or tokens, beside which all steady tokens are attended to.
    """

    name: str
    share: float
    of: str = "tokens"

    def __str__(self) -> str:
        return f"{self.name} {self.share:.1%}" + ("" if self.of == "tokens" else f" {_OF[self.of]}")

    def config(self, model: RecallModel, n_tokens: int) -> SparseConfig:
        """Return its settings for a context of so many tokens."""
        if self.of == "retrieved":
            return _small_cache(retrieving(self.name, self.share, n_tokens))
        tokens = round(self.share * n_tokens)
        if self.of == "bytes":
            tokens = tokens_for_bytes(model, method(self.name, n_tokens, n_tokens), self.share, n_tokens)
        return _small_cache(method(self.name, tokens, n_tokens))


_OF = {"bytes": "of bytes", "retrieved": "retrieved"}


def _small_cache(config: SparseConfig) -> SparseConfig:
    """Return the settings with a block cache that does not hold these short contexts whole, kept on the device."""
    match config.algo:
        case PQCacheConfig() as pq:
            return config.replaced(algo=replace(pq, cache_tokens=512, k_cache=4))
        case RetroInferConfig() as wave:
            return config.replaced(algo=replace(wave, control="gpu"))
    return config


@dataclass(frozen=True)
class RecallSize:
    """One table: contexts of one length with questions about each."""

    needles: int
    contexts: int
    questions: int
    position: QuestionPosition
    methods: tuple[Budget, ...]
    least_full: float

    @property
    def case(self) -> str:
        """Its name."""
        asked = {"none": "", "first": ", questions first", "last": ", questions last"}[self.position]
        return f"recall {self.needles * 4 / 1024:.2g}K{asked}"


_NAMES = ("oracle", "dsa", "quest", "snapkv", "streaming_llm")
_EQUAL = (*(Budget(name, 0.1) for name in _NAMES), *(Budget(name, 0.25, "bytes") for name in _NAMES))
_METHODS = (Budget("oracle", 0.018), Budget("dsa", 0.05), Budget("quest", 0.2), Budget("quest", 0.5), *_EQUAL)
_POSITION_METHODS = (Budget("quest", 0.2), Budget("snapkv", 0.2), *_EQUAL)

RECALL_SIZES = {
    "full": (
        RecallSize(512, 12, 50, "none", _METHODS, 0.88),
        RecallSize(1024, 12, 50, "none", _METHODS, 0.72),
        # As many questions as the observation window of SnapKV holds.
        RecallSize(256, 75, 8, "first", _POSITION_METHODS, 0.88),
        RecallSize(256, 75, 8, "last", _POSITION_METHODS, 0.88),
    ),
    "quick": (RecallSize(128, 2, 4, "none", (Budget("oracle", 0.1), Budget("quest", 0.3, "bytes")), 0.0),),
}

_RETRIEVED = (
    Budget("wave", 0.018, "retrieved"), Budget("wave, no estimation", 0.018, "retrieved"),
    Budget("pq m4b8", 0.018, "retrieved"), Budget("pq m4b8", 0.1, "retrieved"),
    Budget("pq m2b6", 0.018, "retrieved"), Budget("pq m2b6", 0.2, "retrieved"),
)  # fmt: skip
_RETRIEVERS = ("oracle", "wave", "pq m4b8", "pq m2b6")
_RETRIEVERS_EQUAL = (
    *(Budget(name, 0.1) for name in _RETRIEVERS),
    *(Budget(name, 0.25, "bytes") for name in _RETRIEVERS),
)
_RETRIEVERS_ALL = (Budget("oracle", 0.018), *_RETRIEVED, *_RETRIEVERS_EQUAL)
_RETRIEVERS_SOME = (
    Budget("oracle", 0.1), *(b for b in _RETRIEVED if b != Budget("pq m2b6", 0.018, "retrieved")),
    Budget("wave", 0.1), Budget("pq m4b8", 0.1),
)  # fmt: skip

RETRIEVAL_SIZES = {
    "full": (
        RecallSize(512, 12, 50, "none", _RETRIEVERS_ALL, 0.88),
        RecallSize(1024, 12, 50, "none", _RETRIEVERS_ALL, 0.72),
        RecallSize(512, 38, 16, "first", _RETRIEVERS_SOME, 0.88),
        RecallSize(512, 38, 16, "last", _RETRIEVERS_SOME, 0.88),
    ),
    "quick": (RecallSize(288, 1, 4, "none", (*_RETRIEVED[:2], _RETRIEVED[3]), 0.0),),
}

# How far below full attention these may be, and what attention without retrieval must not reach.
_MOST_LOST = {
    Budget("oracle", 0.018): 0.05, Budget("oracle", 0.1): 0.05, Budget("oracle", 0.25, "bytes"): 0.05,
    Budget("wave", 0.018, "retrieved"): 0.05, Budget("pq m4b8", 0.018, "retrieved"): 0.05,
    Budget("pq m4b8", 0.1, "retrieved"): 0.05, Budget("pq m2b6", 0.2, "retrieved"): 0.03,
}  # fmt: skip
_MOST_STREAMING = 0.15
_LEAST_GAIN = 1.5


def recall_rows(sizes: tuple[RecallSize, ...], is_quick: bool, pool: Executor | None = None) -> Iterator[Row]:
    """Yield accuracy and attention error of every method; all of a table answer the same questions.

    Args:
        sizes: tables.
        is_quick: whether it is a smoke run.
        pool: processes that run methods beside each other; it gets all of them at once.
    """
    run_all = map if pool is None else pool.map
    tables = [(size, run_all(_run, repeat(size), (None, *size.methods))) for size in sizes]
    return chain.from_iterable(_table_rows(size, runs, is_quick) for size, runs in tables)


def _run(size: RecallSize, budget: Budget | None) -> RecallRun:
    """Return what a method answers; full attention without one."""
    model = load_recall_model()
    generator = torch.Generator().manual_seed(1)
    batch = recall_batch(size.contexts, size.needles, size.questions, generator, size.position)
    config = SparseConfig("full") if budget is None else budget.config(model, batch.context.shape[1])
    return recall(model, config, batch)


def _table_rows(size: RecallSize, runs: Iterator[RecallRun], is_quick: bool) -> Iterator[Row]:
    full = next(runs)
    ok = None if is_quick else full.accuracy >= size.least_full
    yield Row(f"{size.case}, full", "accuracy", full.accuracy, "share", target=f">= {size.least_full}", ok=ok)
    errors: dict[Budget, float] = {}
    for budget, run in zip(size.methods, runs, strict=True):
        errors[budget] = run.relative_error(full)
        yield from _method_rows(size, run, full, budget, is_quick)
    yield from _gain_rows(size, errors, is_quick)


def _method_rows(size: RecallSize, run: RecallRun, full: RecallRun, budget: Budget, is_quick: bool) -> list[Row]:
    target, ok = _bar(budget, run, full)
    case = f"{size.case}, {budget}"
    print(f"{case}: {run.accuracy:.3f} of {full.accuracy:.3f}", file=sys.stderr)
    ratio = run.accuracy / full.accuracy if full.accuracy else None
    rows = [
        Row(case, "accuracy", run.accuracy, "share", full.accuracy, ratio, target, None if is_quick else ok),
        Row(case, "attention rel_err", run.relative_error(full), ""),
    ]
    if run.hit_rate is not None:
        rows.append(Row(case, f"hit rate, {_BUFFER.get(budget.name, 'block cache')}", run.hit_rate, "share"))
    return rows


_BUFFER = dict.fromkeys(BASELINES, "buffer 2x, cold start included")


def _gain_rows(size: RecallSize, errors: dict[Budget, float], is_quick: bool) -> list[Row]:
    """Return how much estimation lowers the error of attention, where it was measured with and without."""
    rows = []
    for budget, error in errors.items():
        without = errors.get(Budget("wave, no estimation", budget.share, budget.of))
        if budget.name == "wave" and without is not None:
            gain = without / error
            rows.append(
                Row(
                    f"{size.case}, estimation", "attention rel_err, without over with", error, "", without, gain,
                    f">= {_LEAST_GAIN}x", None if is_quick else gain >= _LEAST_GAIN,
                )
            )  # fmt: skip
    return rows


def _bar(budget: Budget, run: RecallRun, full: RecallRun) -> tuple[str, bool | None]:
    if budget in _MOST_LOST:
        return f"full - {_MOST_LOST[budget]}", run.accuracy >= full.accuracy - _MOST_LOST[budget]
    if budget == Budget("streaming_llm", 0.1):
        return f"<= {_MOST_STREAMING}", run.accuracy <= _MOST_STREAMING
    return "", None
