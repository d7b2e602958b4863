"""The trained recall transformer through the whole engine: what methods answer, and what they must not."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from gpu_tier.config import SparseConfig
from gpu_tier.engine.recall_data import RecallBatch, recall_batch
from gpu_tier.engine.recall_model import RecallModel, load_recall_model
from gpu_tier.eval.methods import method
from gpu_tier.eval.recall import RecallRun, recall

NEEDLES = 128
CONTEXT = 4 * NEEDLES + 1


@cache
def data() -> tuple[RecallModel, RecallBatch]:
    return load_recall_model(), recall_batch(6, NEEDLES, 8, torch.Generator().manual_seed(3))


@cache
def run(name: str, share: float) -> RecallRun:
    config = method(name, round(share * CONTEXT), CONTEXT) if share else SparseConfig(algorithm=name)
    return recall(data()[0], config, data()[1])


def test_full_attention_through_the_engine_answers_as_a_whole_forward_pass() -> None:
    model, batch = data()
    tokens, ends = batch.joined()
    expected = model.logits(model(tokens)[:, ends]).argmax(-1) == batch.answers
    assert torch.equal(run("full", 0).correct, expected)
    assert run("full", 0).accuracy >= 0.9


def test_full_attention_streamed_from_the_host_is_the_same() -> None:
    assert torch.equal(run("full_offload", 0).correct, run("full", 0).correct)
    assert run("full_offload", 0).relative_error(run("full", 0)) < 1e-4


def test_the_exact_top_tenth_loses_nothing_and_a_window_loses_nearly_all() -> None:
    full = run("full", 0)
    assert run("oracle", 0.1).accuracy >= full.accuracy - 0.05
    assert run("streaming_llm", 0.2).accuracy <= 0.35


@pytest.mark.parametrize(("name", "share"), [("quest", 0.25), ("streaming_llm", 0.25)])
def test_methods_of_pages_are_further_off_than_the_oracle(name: str, share: float) -> None:
    full = run("full", 0)
    assert run(name, share).relative_error(full) > run("oracle", share).relative_error(full) > 0


def test_what_was_loaded_is_counted() -> None:
    rate = run("oracle", 0.1).hit_rate
    assert rate is not None
    assert 0.2 < rate < 1
    assert run("full", 0).hit_rate is None
