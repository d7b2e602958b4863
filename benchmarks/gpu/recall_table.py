"""The recall transformer's answers under each method, through the whole engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from report import Row

from gpu_tier.config import SparseConfig
from gpu_tier.engine.recall_data import QuestionPosition, RecallBatch, recall_batch
from gpu_tier.engine.recall_model import RecallModel, load_recall_model
from gpu_tier.eval.quality import method
from gpu_tier.eval.recall import RecallRun, recall

__all__ = ["RECALL_SIZES", "RecallSize", "recall_rows"]


@dataclass(frozen=True)
class RecallSize:
    """One table: contexts of one length with questions about each."""

    needles: int
    contexts: int
    questions: int
    position: QuestionPosition
    methods: tuple[tuple[str, float], ...]
    least_full: float

    @property
    def case(self) -> str:
        """Its name."""
        asked = {"none": "", "first": ", questions first", "last": ", questions last"}[self.position]
        return f"recall {self.needles * 4 / 1024:.2g}K{asked}"


_METHODS = (
    ("oracle", 0.018), ("oracle", 0.1), ("dsa", 0.05), ("dsa", 0.1), ("quest", 0.1), ("quest", 0.2), ("quest", 0.5),
    ("snapkv", 0.1), ("streaming_llm", 0.1),
)  # fmt: skip
_POSITION_METHODS = (("oracle", 0.1), ("quest", 0.2), ("snapkv", 0.1), ("snapkv", 0.2))

RECALL_SIZES = {
    "full": (
        RecallSize(512, 12, 50, "none", _METHODS, 0.88),
        RecallSize(1024, 12, 50, "none", _METHODS, 0.72),
        # As many questions as the observation window of SnapKV holds.
        RecallSize(256, 75, 8, "first", _POSITION_METHODS, 0.88),
        RecallSize(256, 75, 8, "last", _POSITION_METHODS, 0.88),
    ),
    "quick": (RecallSize(128, 2, 4, "none", (("oracle", 0.1), ("snapkv", 0.2)), 0.0),),
}

# How far below full attention a method may be, and what attention without retrieval must not reach.
_LARGEST_LOSS = {("oracle", 0.018): 0.05, ("oracle", 0.1): 0.02}
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
        for name, share in size.methods:
            rows += _method_rows(model, size, batch, full, name, share, is_quick)
    return rows


def _method_rows(
    model: RecallModel, size: RecallSize, batch: RecallBatch, full: RecallRun, name: str, share: float, is_quick: bool
) -> list[Row]:
    run = recall(model, method(name, round(share * batch.context.shape[1])), batch)
    target, ok = _bar(name, share, run, full)
    case = f"{size.case}, {name} {share:.1%}"
    print(f"{case}: {run.accuracy:.3f} of {full.accuracy:.3f}", file=sys.stderr)
    ratio = run.accuracy / full.accuracy if full.accuracy else None
    rows = [
        Row(case, "accuracy", run.accuracy, "share", full.accuracy, ratio, target, None if is_quick else ok),
        Row(case, "attention rel_err", run.relative_error(full), ""),
    ]
    if run.hit_rate is not None:
        rows.append(Row(case, "hit rate, buffer 2x, cold start included", run.hit_rate, "share"))
    return rows


def _bar(name: str, share: float, run: RecallRun, full: RecallRun) -> tuple[str, bool | None]:
    if (name, share) in _LARGEST_LOSS:
        loss = _LARGEST_LOSS[name, share]
        return f"full - {loss}", run.accuracy >= full.accuracy - loss
    if name == "streaming_llm":
        return f"<= {_MOST_STREAMING}", run.accuracy <= _MOST_STREAMING
    return "", None
