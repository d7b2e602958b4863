"""SparseGenerator: a Hugging Face model generates over the real coordinator what it generates on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coordinator_rig import WHOLE, config_of, nothing_is_held, whole
from hf_models import make_model, own_generate, prompt

from gpu_tier.engine.hf_adapter import SparseGenerator
from gpu_tier.errors import ConfigError, PoolExhaustedError, StateError


def generator_of(model: Any, algorithm: str, **options: Any) -> SparseGenerator:
    has_indexer = model.config.model_type == "deepseek_v32"
    config = config_of(algorithm, whole(algorithm, has_indexer=has_indexer), min_sparse_prompt_len=20)
    sizes = {"device_pages": 200, "max_requests": 8, "max_tokens": 256} | options
    return SparseGenerator(model, config, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        *((name, "llama") for name in sorted(WHOLE)),
        ("full", "deepseek_v3"),
        ("quest", "deepseek_v3"),
        ("dsa", "deepseek_v32"),
    ],
)
def test_batches_of_unequal_lengths_generate_what_the_model_does(algorithm: str, name: str) -> None:
    model = make_model(name)
    prompts = [prompt(length, length) for length in (1, 33, 12, 100)]
    expected = [own_generate(model, p, 8) for p in prompts]
    with generator_of(model, algorithm, chunk_tokens=40, piece_tokens=24) as generator:
        assert generator.generate(prompts, 8) == expected
        assert generator.generate(prompts[1:], 8) == expected[1:]
    assert own_generate(model, prompts[0], 8) == expected[0]


def test_generation_ends_at_the_models_own_stop_token() -> None:
    whole = own_generate(make_model(), prompt(20), 10)
    model = make_model(eos_token_id=whole[3])
    with generator_of(model, "full") as generator:
        assert generator.generate([prompt(20)], 10) == [whole[: whole.index(whole[3]) + 1]]
        assert generator.generate([prompt(20)], 10, stop_tokens=()) == [whole]


def test_more_prompts_than_fit_wait() -> None:
    model = make_model()
    prompts = [prompt(40, seed) for seed in range(6)]
    expected = [own_generate(model, p, 5) for p in prompts]
    with generator_of(model, "full", device_pages=8, max_requests=3) as generator:
        assert generator.generate(prompts, 5) == expected
        with pytest.raises(PoolExhaustedError):
            generator.generate([prompt(200)], 5)
        with pytest.raises(ConfigError, match="max_new_tokens=57"):
            generator.generate([prompt(10), prompt(200)], 57)
        assert generator.generate(prompts[:1], 5) == expected[:1]


def test_a_closed_generator_holds_nothing_and_generates_nothing() -> None:
    model = make_model()
    first = generator_of(model, "quest")
    first.engine.add(prompt(50))
    first.engine.step()
    first.close()
    assert first.coordinator.manager.host.data.numel() == 0
    assert nothing_is_held(first.coordinator)
    expected = own_generate(model, prompt(50), 4)
    with generator_of(model, "quest") as second:
        first.close()
        with pytest.raises(StateError, match="close that first"):
            generator_of(model, "full")
        assert second.generate([prompt(50)], 4) == [expected]
    with pytest.raises(StateError, match="attention is now"):
        first.generate([prompt(50)], 4)


@pytest.mark.parametrize("prefill", ["exact", "flash"])
def test_a_model_in_bf16_generates(prefill: str) -> None:
    model = make_model().bfloat16()
    with generator_of(model, "quest", prefill=prefill) as generator:
        tokens = generator.generate([prompt(50)], 6)[0]
    expected = own_generate(model, prompt(50), 6)
    assert tokens[0] == expected[0]
    assert len(tokens) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("algorithm", sorted(WHOLE))
def test_a_gpu_generates_what_the_model_does_there(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_TIER_KERNELS", "auto")
    model = make_model().cuda()
    prompts = [prompt(length, length) for length in (1, 33, 100)]
    expected = [own_generate(model, p, 8) for p in prompts]
    with generator_of(model, algorithm) as generator:
        assert generator.generate(prompts, 8) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_flash_prefill_on_a_gpu_is_as_near_as_the_models_own(name: str) -> None:
    exact = make_model(name).cuda()
    ids = torch.tensor([prompt(100)], device="cuda")
    with torch.no_grad():
        expected = exact(ids).logits[0, -1]
        half = exact.bfloat16()
        own = half(ids).logits[0, -1]
    with generator_of(half, "full", prefill="flash", chunk_tokens=40, piece_tokens=24) as generator:
        request = generator.engine.add(prompt(100))
        while request not in generator.engine.logits:
            generator.engine.step()
        ours = generator.engine.logits[request]
    assert (ours - expected).norm() < 2 * (own - expected).norm() + 1e-3 * expected.norm()
