"""Trains the recall transformer and writes its checkpoint.

The seed fixes the data and the first weights; sums on another machine may round differently, so a new checkpoint has
another hash, and `CHECKPOINT_SHA256` changes with it. In one step of three the prompt begins with its questions.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

from kvcm.gpu_tier.engine.recall_model import (
    CHECKPOINT,
    QuestionPosition,
    RecallBatch,
    RecallModel,
    recall_batch,
    save_recall_model,
)

_FIRST_NEEDLES, _LAST_NEEDLES = 4, 96
_ENOUGH = 0.9
_QUESTIONS, _QUESTIONS_FIRST = 32, 8


def main() -> None:
    """Train, print the accuracy on the way, write the checkpoint and print its hash."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    args = parser.parse_args()
    model = train(args.steps, args.rows, args.seed)
    print(f"sha256 {save_recall_model(model, args.out)}")


class Curriculum:
    """How many needles the contexts of one form of question have: more as soon as most questions are answered."""

    def __init__(self, position: QuestionPosition, questions: int) -> None:
        self.position = position
        self.questions = questions
        self.needles = float(_FIRST_NEEDLES)
        self.accuracy = 0.0

    def batch(self, rows: int, generator: torch.Generator) -> RecallBatch:
        """Return the data of a step."""
        return recall_batch(rows, round(self.needles), self.questions, generator, self.position)

    def learned(self, accuracy: float) -> None:
        """Take note of a step's accuracy."""
        self.accuracy = 0.8 * self.accuracy + 0.2 * accuracy
        if self.accuracy > _ENOUGH:
            self.needles = min(_LAST_NEEDLES, self.needles * 1.1)


def train(steps: int, rows: int, seed: int) -> RecallModel:
    """Return a trained model."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = RecallModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    none, first = Curriculum("none", _QUESTIONS), Curriculum("first", _QUESTIONS_FIRST)
    begin = time.perf_counter()
    for step in range(steps):
        form = first if step % 3 == 2 else none
        loss, accuracy = _loss(model, form.batch(rows, generator))
        form.learned(accuracy)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            state = ", ".join(f"{f.position} {f.accuracy:.3f} at {f.needles:.0f} needles" for f in (none, first))
            print(f"{step + 1} {time.perf_counter() - begin:.0f} s: {state}", flush=True)
    return model.requires_grad_(False).eval()


def _loss(model: RecallModel, batch: RecallBatch) -> tuple[torch.Tensor, float]:
    tokens, ends = batch.joined()
    logits = model.logits(model(tokens)[:, ends])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
    return loss, float((logits.argmax(-1) == batch.answers).float().mean())


if __name__ == "__main__":
    main()
