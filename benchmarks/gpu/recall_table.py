"""The recall transformer's answers under each method, through the whole engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from report import Row

from gpu_tier.config import SparseConfig
from gpu_tier.engine.recall_data import QuestionPosition, RecallBatch, recall_batch
from gpu_tier.engine.recall_model import RecallModel, load_recall_model
from gpu_tier.eval.methods import method
from gpu_tier.eval.recall import RecallRun, recall, tokens_for_bytes

__all__ = ["RECALL_SIZES", "Budget", "RecallSize", "recall_rows"]


@dataclass(frozen=True)
class Budget:
    """A method and what it may use: a share of the context's tokens, or of its KV bytes with its representation."""

    name: str
    share: float
    of: str = "tokens"

    def __str__(self) -> str:
        return f"{self.name} {self.share:.1%}" + (" of bytes" if self.of == "bytes" else "")

    def config(self, model: RecallModel, n_tokens: int) -> SparseConfig:
        """Return its settings for a context of so many tokens."""
        if self.of == "tokens":
            return method(self.name, round(self.share * n_tokens), n_tokens)
        tokens = tokens_for_bytes(model, method(self.name, n_tokens, n_tokens), self.share, n_tokens)
        return method(self.name, tokens, n_tokens)


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

# How far below full attention the oracle may be, and what attention without retrieval must not reach.
_LARGEST_LOSS = 0.05
_MOST_STREAMING = 0.15


def recall_rows(sizes: tuple[RecallSize, ...], is_quick: bool) -> list[Row]:
    """Return accuracy and attention error of every method; all of a table answer the same questions."""
    model = load_recall_model()
    rows: list[Row] = []
    for size in sizes:
        generator = torch.Generator().manual_seed(1)
        batch = recall_batch(size.contexts, size.needles, size.questions, generator, size.position)
        full = recall(model, SparseConfig(algorithm="full"), batch)
        ok = None if is_quick else full.accuracy >= size.least_full
        rows.append(
            Row(f"{size.case}, full", "accuracy", full.accuracy, "share", target=f">= {size.least_full}", ok=ok)
        )
        for budget in size.methods:
            rows += _method_rows(model, size, batch, full, budget, is_quick)
    return rows


def _method_rows(
    model: RecallModel, size: RecallSize, batch: RecallBatch, full: RecallRun, budget: Budget, is_quick: bool
) -> list[Row]:
    run = recall(model, budget.config(model, batch.context.shape[1]), batch)
    target, ok = _bar(budget, run, full)
    case = f"{size.case}, {budget}"
    print(f"{case}: {run.accuracy:.3f} of {full.accuracy:.3f}", file=sys.stderr)
    ratio = run.accuracy / full.accuracy if full.accuracy else None
    rows = [
        Row(case, "accuracy", run.accuracy, "share", full.accuracy, ratio, target, None if is_quick else ok),
        Row(case, "attention rel_err", run.relative_error(full), ""),
    ]
    if run.hit_rate is not None:
        rows.append(Row(case, "hit rate, buffer 2x, cold start included", run.hit_rate, "share"))
    return rows


def _bar(budget: Budget, run: RecallRun, full: RecallRun) -> tuple[str, bool | None]:
    if budget.name == "oracle":
        return f"full - {_LARGEST_LOSS}", run.accuracy >= full.accuracy - _LARGEST_LOSS
    if budget == Budget("streaming_llm", 0.1):
        return f"<= {_MOST_STREAMING}", run.accuracy <= _MOST_STREAMING
    return "", None
