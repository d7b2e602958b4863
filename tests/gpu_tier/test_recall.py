"""The trained recall transformer through the whole engine: what methods answer, and what they must not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from gpu_tier.engine.recall_data import RecallBatch, recall_batch
from gpu_tier.engine.recall_model import RecallModel, load_recall_model
from gpu_tier.eval.methods import method, retrieving
from gpu_tier.eval.recall import RecallRun, recall, tokens_for_bytes

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


@cache
def longer() -> RecallBatch:
    """Return contexts that are long enough to be clustered."""
    return recall_batch(2, 288, 6, torch.Generator().manual_seed(5))


def long_run(name: str, share: float, residency: str) -> RecallRun:
    config = retrieving(name, share, 4 * 288 + 1).replaced(residency=residency)
    match config.algo:
        case RetroInferConfig() as wave:
            config = config.replaced(algo=replace(wave, control="gpu"))
        case PQCacheConfig() as pq:
            config = config.replaced(algo=replace(pq, cache_tokens=256, k_cache=2))
    return recall(data()[0], config, longer())


@pytest.mark.parametrize(("name", "share"), [("wave", 0.1), ("pq m4b8", 0.1)])
def test_retrievers_lose_little_and_the_residency_changes_nothing(name: str, share: float) -> None:
    full = recall(data()[0], SparseConfig("full"), longer())
    blocks = long_run(name, share, "blocks")
    assert blocks.accuracy >= full.accuracy - 0.1
    assert 0 < blocks.relative_error(full) < 0.3
    assert blocks.hit_rate is not None
    assert 0 < blocks.hit_rate < 1
    resident = long_run(name, share, "device")
    assert torch.equal(resident.correct, blocks.correct)
    assert resident.relative_error(blocks) < 1e-5


def test_estimation_brings_attention_closer() -> None:
    full = recall(data()[0], SparseConfig("full"), longer())
    errors = [long_run(name, 0.05, "device").relative_error(full) for name in ("wave", "wave, no estimation")]
    assert errors[0] < errors[1]


def test_representations_are_taken_from_a_budget_of_bytes() -> None:
    n_tokens = 4 * 288 + 1
    tokens = {
        name: tokens_for_bytes(data()[0], method(name, n_tokens, n_tokens), 0.25, n_tokens)
        for name in ("oracle", "wave", "pq m4b8")
    }
    assert tokens["wave"] < tokens["oracle"] == round(0.25 * n_tokens)
    assert tokens["pq m4b8"] < tokens["oracle"]
