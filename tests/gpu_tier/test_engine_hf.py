"""Hugging Face models decode through the hooks and the coordinator as they do on their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from coordinator_rig import WHOLE, config_of, nothing_is_held, whole
from engine_rig import PlainHooks, plain_attention
from hf_models import make_model, own_generate, prompt
from torch import Tensor

from kvcm.gpu_tier.engine.batch_engine import BatchEngine, generate
from kvcm.gpu_tier.engine.hf_adapter import ATTENTION_NAME, AttentionShape, HfRunner, SparseGenerator
from kvcm.gpu_tier.engine.layer_attention import PrefillAttention
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind


def runner_of(model: Any, hooks: PlainHooks, shape: AttentionShape) -> HfRunner:
    return HfRunner(model, hooks, shape, PrefillAttention(hooks.key_reader, shape.sm_scale, 64))


class IndexedHooks(PlainHooks):
    """`PlainHooks` whose decode attends to the tokens that the index scores rank highest, in f32."""

    def __init__(self, v_dims: int, sm_scale: float, top_k: int) -> None:
        super().__init__(v_dims)
        self.sm_scale, self.top_k = sm_scale, top_k
        self.index_keys: dict[int, list[Tensor]] = {}

    def attention_begin(self, *, layer_id: int, index_key: Tensor, **others: Any) -> Any:
        self.extra = others
        self.index_keys.setdefault(layer_id, []).append(index_key)
        return super().attention_begin(layer_id=layer_id, index_key=index_key, **others)

    def attend(self, q: Tensor, meta: Any, partials: Any, sm_scale: float) -> Tensor:
        keys = torch.cat(self.index_keys[self._layer])
        scores = self.extra["index_weight"] @ (self.extra["index_query"][0] @ keys.T).relu()
        ids = scores[0].topk(min(self.top_k, len(keys))).indices
        k, v = self.trackers[self._batch.requests[0]].kv[self._layer]
        return plain_attention(q, k[ids], v[ids], sm_scale)


def test_deepseeks_own_indexer_reaches_the_hooks() -> None:
    # Its prompts are sparse too, so they must not be longer than what it selects.
    model = make_model("deepseek_v32", index_topk=16)
    expected = own_generate(model, prompt(15), 30)
    shape = AttentionShape.of(model, 16)
    hooks = IndexedHooks(shape.geometry.v_head_dim, shape.sm_scale, 16)
    runner = runner_of(model, hooks, shape)
    engine = BatchEngine(runner, hooks)
    assert generate(engine, [prompt(15)], 30) == [expected]
    everything = PlainHooks(shape.geometry.v_head_dim)
    runner.close()
    runner = runner_of(model, everything, shape)
    assert generate(BatchEngine(runner, everything), [prompt(15)], 30) != [expected]
    runner.close()


def test_the_model_gets_its_own_attention_back() -> None:
    model = make_model()
    before = model.config._attn_implementation
    expected = own_generate(model, prompt(9), 4)
    runner = runner_of(model, PlainHooks(16), AttentionShape.of(model, 16))
    assert model.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(StateError, match="only inside a pass"), torch.no_grad():
        model(torch.tensor([[5, 6]]))
    runner.close()
    assert model.config._attn_implementation == before
    assert own_generate(model, prompt(9), 4) == expected


def test_a_model_has_one_coordinator_at_a_time() -> None:
    model = make_model()
    shape = AttentionShape.of(model, 16)
    hooks = PlainHooks(16)
    runner = runner_of(model, hooks, shape)
    with pytest.raises(StateError, match="close that first"):
        runner_of(model, PlainHooks(16), shape)
    engine = BatchEngine(runner, hooks)
    engine.add(prompt(4))
    model.set_attn_implementation("sdpa")
    with pytest.raises(StateError, match="now 'sdpa'"):
        engine.step()
    runner.close()


def test_shape_of_a_model() -> None:
    shape = AttentionShape.of(make_model(), 16)
    assert shape == AttentionShape(KVGeometry(KVKind.MHA, 3, 2, 16, 16, KVDtype.F32, 16), 4, 0.25)
    latent = AttentionShape.of(make_model("deepseek_v3"), 16)
    assert latent.geometry == KVGeometry(KVKind.MLA, 3, 1, 32, 24, KVDtype.F32, 16)
    assert latent.sm_scale == pytest.approx(20**-0.5)
    assert AttentionShape.of(make_model().bfloat16(), 16).geometry.dtype is KVDtype.BF16
    assert AttentionShape.of(make_model(), 16, KVDtype.FP8).geometry.dtype is KVDtype.FP8


def test_models_whose_attention_is_another_are_refused() -> None:
    with pytest.raises(ConfigError, match="training mode"):
        runner_of(make_model().train(), PlainHooks(16), AttentionShape.of(make_model(), 16))
    mixed = make_model("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ConfigError, match="layer_types"):
        AttentionShape.of(mixed, 16)
    model, hooks = make_model("mistral", sliding_window=8), PlainHooks(16)
    windowed = BatchEngine(runner_of(model, hooks, AttentionShape.of(model, 16)), hooks)
    windowed.add(prompt(4))
    with pytest.raises(ConfigError, match="sliding_window=8"):
        windowed.step()
    with pytest.raises(ConfigError, match="dtype"):
        AttentionShape.of(make_model().double(), 16)


def test_another_scale_than_the_coordinators_is_refused() -> None:
    hooks = PlainHooks(16)
    other = replace(AttentionShape.of(make_model(), 16), sm_scale=0.5)
    engine = BatchEngine(runner_of(make_model(), hooks, other), hooks)
    engine.add(prompt(4))
    with pytest.raises(ConfigError, match=r"scaling=0\.25"):
        engine.step()


def generator_of(model: Any, algorithm: str, **options: Any) -> SparseGenerator:
    has_indexer = model.config.model_type == "deepseek_v32"
    config = config_of(algorithm, whole(algorithm, has_indexer=has_indexer), min_sparse_prompt_len=20)
    sizes = {"device_pages": 200, "max_requests": 8, "max_tokens": 256} | options
    return SparseGenerator(model, config, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        *((name, "llama") for name in sorted(WHOLE)),
        *(("full", name) for name in ("deepseek_v3", "mistral", "qwen3")),
        *(("quest", "deepseek_v3"), ("dsa", "deepseek_v32")),
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
