"""Prefixes in every state of a request: short ones decode densely, long ones outgrow that, prompts see a window."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from coordinator_rig import PAGE
from memory_connector import MemoryConnector, MemoryStorage
from prefix_cases import page_keys
from sharing_rig import Rig, continued, prompt_of

from gpu_tier.engine.latent_model import LatentDecoder, LatentShape
from gpu_tier.engine.llama_model import LlamaDecoder, LlamaShape
from gpu_tier.trackers import RequestState

KEYS = partial(page_keys, page=PAGE)
TOKENS = prompt_of(200)
PREFIX = 192
MODELS_OF = [("llama", "quest"), ("llama", "oracle"), ("latent", "dsa")]


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def rig_of(storage: MemoryStorage, model: str, algorithm: str, **options: Any) -> Rig:
    return Rig(model, algorithm, lambda *_: MemoryConnector(storage), KEYS, **options)


@pytest.mark.parametrize(("model", "algorithm"), MODELS_OF)
def test_prompts_that_are_decoded_densely(storage: MemoryStorage, model: str, algorithm: str) -> None:
    options = {"min_sparse_prompt_len": 300, "publish_every": 1}
    expected = continued(model, algorithm, TOKENS, 40, **options)
    assert rig_of(storage, model, algorithm, **options).run(TOKENS, 40)[0] == expected
    assert set(storage.blocks) == set(KEYS(expected[:-1]))  # all of it is exact
    assert rig_of(storage, model, algorithm, **options).run(TOKENS, 40) == (expected, PREFIX, 1)


@pytest.mark.parametrize(("model", "algorithm"), MODELS_OF)
def test_only_what_was_decoded_densely_is_published(storage: MemoryStorage, model: str, algorithm: str) -> None:
    options = {"min_sparse_prompt_len": 230, "publish_every": 1}
    rig = rig_of(storage, model, algorithm, **options)
    number = rig.engine.submit(TOKENS)
    states = set[RequestState]()
    while len(rig.engine.tokens(number)) < len(TOKENS) + 60:
        rig.engine.step()
        states |= {tracker.state for tracker in rig.coordinator.trackers}
    answer = rig.engine.tokens(number)
    rig.engine.finish(number)
    assert rig.store.flush(10)
    assert {RequestState.DENSE, RequestState.SPARSE} <= states
    assert set(storage.blocks) == set(KEYS(answer[:230]))
    # A conversation goes on: what was decoded sparsely is computed anew, exactly.
    expected = continued(model, algorithm, answer, 6, **options)
    assert rig_of(storage, model, algorithm, **options).run(answer, 6)[:2] == (expected, 224)


@pytest.mark.parametrize(("model", "algorithm"), MODELS_OF)
def test_a_sparse_engine_goes_on_from_a_dense_one(storage: MemoryStorage, model: str, algorithm: str) -> None:
    expected = continued(model, algorithm, TOKENS)
    rig_of(storage, model, algorithm, min_sparse_prompt_len=300).run(TOKENS)
    assert rig_of(storage, model, algorithm).run(TOKENS) == (expected, PREFIX, 1)


@pytest.mark.parametrize(("model", "algorithm"), MODELS_OF)
def test_prompts_longer_than_their_window_on_the_device(storage: MemoryStorage, model: str, algorithm: str) -> None:
    tokens = TOKENS + prompt_of(90, 7)
    expected = continued(model, algorithm, tokens, 6)
    rig_of(storage, model, algorithm, prefill_window_tokens=48).run(TOKENS, 2)
    rig = rig_of(storage, model, algorithm, prefill_window_tokens=48)
    assert rig.run(tokens, 6)[:2] == (expected, PREFIX)
    assert rig.is_empty()
    assert rig_of(storage, model, algorithm).run(tokens, 6) == (expected, 288, 1)


@pytest.mark.parametrize(("steps", "has_storage"), [(1, True), (3, False), (15, True)])
@pytest.mark.parametrize(("model", "algorithm"), [("llama", "quest"), ("latent", "dsa")])
def test_a_retracted_prompt_goes_on_from_the_pool(
    storage: MemoryStorage, steps: int, has_storage: bool, model: str, algorithm: str
) -> None:
    options = {"min_sparse_prompt_len": 300}  # so that all of it is exact
    expected = continued(model, algorithm, TOKENS, 40, **options)
    connect = (lambda *_: MemoryConnector(storage)) if has_storage else None
    rig = Rig(model, algorithm, connect, KEYS, **options)
    number = rig.engine.submit(TOKENS)
    while not rig.engine.running:
        rig.engine.step()
    for _ in range(steps - 1):
        rig.engine.step()
    before = len(rig.engine.tokens(number))
    rig.engine.retract(number)
    rig.engine.retract(number)  # it is off already
    assert rig.engine.running == ()
    assert rig.coordinator.manager.device.allocator.in_use == 0
    while len(rig.engine.tokens(number)) < 240:
        rig.engine.step()
    assert rig.engine.tokens(number) == expected
    computed = min(before - 1, steps * 32)  # tokens that had KV
    assert rig.engine.attached_tokens(number) == computed // PAGE * PAGE
    rig.engine.finish(number)
    assert rig.store.flush(10)
    assert rig.is_empty()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("model", "algorithm"), [*MODELS_OF, ("llama", "full_offload"), ("llama", "snapkv")])
def test_a_gpu_goes_on_from_its_own_prefix(
    storage: MemoryStorage, model: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_TIER_KERNELS", "auto")
    decoder: Any = LlamaDecoder.random(LlamaShape(), device="cuda")
    if model == "latent":
        decoder = LatentDecoder.random(LatentShape(), device="cuda")
    options = {"decoder": decoder, "device": "cuda"}
    tokens, attached, _ = rig_of(storage, model, algorithm, **options).run(TOKENS)
    assert attached == 0
    rig = rig_of(storage, model, algorithm, **options)
    assert rig.run(TOKENS) == (tokens, PREFIX, 1)
    assert rig.is_empty()
