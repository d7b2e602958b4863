"""Continuous batching, the models of the tests, and the lightning indexer."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from coordinator_rig import prompt
from engine_rig import PlainHooks, plain_forward
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

from kvcm.gpu_tier.engine import recall_model
from kvcm.gpu_tier.engine.batch_engine import generate
from kvcm.gpu_tier.engine.decode_engine import DecodeEngine
from kvcm.gpu_tier.engine.decoder_models import LatentDecoder, LatentShape, LlamaDecoder, LlamaShape, rms_norm, rotate
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.geometry import KVDtype, RowFormat
from kvcm.gpu_tier.index.lightning_indexer import LightningIndexer, hadamard, index_rows, quantise
from kvcm.gpu_tier.types import Mode

LLAMA = LlamaDecoder.random(LlamaShape(num_layers=2))


LATENT = LatentDecoder.random(LatentShape(num_layers=2))


with torch.random.fork_rng():
    torch.manual_seed(0)
    RECALL = recall_model.RecallModel().requires_grad_(False)  # keeps the last hidden states of each request


MODELS = pytest.mark.parametrize("model", [LLAMA, LATENT, RECALL], ids=["llama", "latent", "recall"])


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(plain_forward(model, tokens)[-1].argmax()))
    return tokens[-count:]


def engine_of(model: Any, capacity: int = 1 << 30, **options: Any) -> tuple[DecodeEngine, PlainHooks]:
    hooks = PlainHooks(model.v_head_dim, capacity)
    return DecodeEngine(model, hooks, **options), hooks


@MODELS
@settings(max_examples=examples(20), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    chunk=st.integers(1, 50),
    piece=st.integers(1, 50),
    pad_to=st.integers(0, 8),
)
def test_unequal_batches_equal_one_by_one(model: Any, lengths: list[int], chunk: int, piece: int, pad_to: int) -> None:
    engine, hooks = engine_of(model, chunk_tokens=chunk, piece_tokens=piece, pad_to=pad_to)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    assert generate(engine, prompts, 3) == [greedy(model, p, 3) for p in prompts]
    assert hooks.widest_read <= piece
    assert max(sum(b.extend_lens) for b in hooks.batches if b.mode is Mode.PREFILL) <= chunk
    assert not hooks.trackers


@MODELS
@pytest.mark.parametrize(("chunk", "piece"), [(64, 64), (16, 8), (7, 100)])
def test_flash_kernels_give_what_the_exact_ones_do(model: Any, chunk: int, piece: int) -> None:
    engine, hooks = engine_of(model, chunk_tokens=chunk, piece_tokens=piece, prefill="flash")
    requests = [engine.add(prompt(length, length)) for length in (60, 1, 33)]
    while len(engine.logits) < 3:
        engine.step()
    for request in requests:
        expected = plain_forward(model, engine.tokens(request)[:-1])[-1]
        torch.testing.assert_close(engine.logits[request], expected, rtol=1e-4, atol=1e-4)
    assert hooks.widest_read <= max(chunk, piece)


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    engine, _ = engine_of(LLAMA, chunk_tokens=8)
    short = engine.add(prompt(5, 1))
    assert set(engine.step()) == {short}
    long = engine.add(prompt(33, 2))
    got = [set(engine.step()) for _ in range(5)]
    assert got == [{short}] * 4 + [{short, long}]
    assert engine.tokens(short)[5:] == greedy(LLAMA, prompt(5, 1), 6)


def test_hooks_are_called_in_order() -> None:
    engine, hooks = engine_of(LLAMA)
    request = engine.add(prompt(4))
    engine.step()
    engine.step()
    engine.finish(request)
    layers = [(hook, i) for i in range(2) for hook in ("write_kv", "attention_begin", "attention_end")]
    expected: list[tuple[Any, ...]] = []
    for mode in (Mode.PREFILL, Mode.DECODE):
        expected += [("forward_begin", mode), *layers, ("forward_end", mode)]
    assert hooks.calls == [("begin", request, ""), *expected, ("end", request, "finished")]


def test_an_attached_prefix_is_not_computed_again() -> None:
    first, hooks = engine_of(LLAMA)
    tokens = prompt(20)
    request = first.add(tokens)
    first.step()
    prefix = {layer: [part[:15] for part in kv] for layer, kv in hooks.trackers[request].kv.items()}
    engine, hooks = engine_of(LLAMA)
    request = engine.add(tokens, prefix)
    engine.step()
    assert hooks.batches[0].positions.tolist() == [15, 16, 17, 18, 19]
    torch.testing.assert_close(engine.logits[request], plain_forward(LLAMA, tokens)[-1], rtol=1e-5, atol=1e-5)


def test_a_prefix_without_the_models_own_state_is_refused() -> None:
    first, hooks = engine_of(RECALL)
    request = first.add(prompt(20))
    first.step()
    prefix = {layer: [part[:15] for part in kv] for layer, kv in hooks.trackers[request].kv.items()}
    engine, _ = engine_of(RECALL)
    engine.add(prompt(20), prefix)
    with pytest.raises(StateError, match="begins at token 15"):
        engine.step()


def test_requests_end_in_every_state() -> None:
    engine, hooks = engine_of(LLAMA, chunk_tokens=4)
    waiting, half, decoding = (engine.add(prompt(n)) for n in (9, 9, 2))
    engine.abort(waiting)
    engine.step()
    engine.abort(half)
    engine.step()
    assert engine.requests == (decoding,)
    assert engine.retract(decoding)[:2] == prompt(2)
    assert [call[2] for call in hooks.calls if call[0] == "end"] == ["aborted", "aborted", "retracted"]
    engine.abort(decoding)
    assert not hooks.trackers
    assert engine.step() == {}
    with pytest.raises(StateError, match="no such request"):
        engine.finish(decoding)


def test_a_prompt_that_does_not_fit_waits_until_others_end() -> None:
    engine, hooks = engine_of(LLAMA, capacity=30)
    prompts = [prompt(12, seed) for seed in range(4)]
    assert generate(engine, prompts, 4) == [greedy(LLAMA, p, 4) for p in prompts]
    lives = [call[::2] for call in hooks.calls if call[0] in ("begin", "end")]
    assert ("end", "retracted") in lives
    # A retracted request comes back only when another ended, not to be retracted again at once.
    assert not any(a == ("end", "retracted") and b == ("begin", "") for a, b in pairwise(lives))
    assert not hooks.trackers


def test_a_full_pool_is_an_error_when_no_other_request_could_end() -> None:
    engine, hooks = engine_of(LLAMA, capacity=10)
    with pytest.raises(PoolExhaustedError):
        generate(engine, [prompt(4), prompt(12)], 3)
    assert not hooks.trackers
    engine, hooks = engine_of(LLAMA, capacity=6)
    request = engine.add(prompt(5))
    engine.step()
    engine.step()
    before = engine.tokens(request)
    with pytest.raises(PoolExhaustedError):
        engine.step()
    assert engine.tokens(request) == before
    hooks.capacity = 20
    engine.step()
    assert engine.tokens(request)[5:] == greedy(LLAMA, prompt(5), 3)


def test_arguments_out_of_range_are_refused() -> None:
    for options in ({"chunk_tokens": 0}, {"piece_tokens": 0}, {"prefill": "fast"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            engine_of(LLAMA, **options)
    engine, _ = engine_of(LLAMA)
    with pytest.raises(ConfigError, match="prompt_ids"):
        engine.add([])
    with pytest.raises(ConfigError, match="max_new_tokens"):
        generate(engine, [[1]], 0)


TOKENS = torch.randint(0, 128, (37,), generator=torch.Generator().manual_seed(1)).tolist()


def transformers_llama(shape: LlamaShape, weights: dict[str, Tensor]) -> Any:
    widths = {"vocab_size": shape.vocab, "hidden_size": shape.d_model, "intermediate_size": shape.d_ff}
    heads = {"num_attention_heads": shape.num_q_heads, "num_key_value_heads": shape.num_kv_heads}
    layers = {"num_hidden_layers": shape.num_layers, "head_dim": shape.head_dim, "rms_norm_eps": shape.norm_eps}
    config = LlamaConfig(**widths, **heads, **layers, rope_theta=shape.rope_theta, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).double().eval()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (4, 4)])
def test_llama_equals_that_of_transformers(heads: tuple[int, int]) -> None:
    shape = LlamaShape(num_q_heads=heads[0], num_kv_heads=heads[1], norm_eps=1e-5, rope_theta=5e5)
    model = LlamaDecoder.random(shape, seed=3, dtype=torch.float64)
    with torch.no_grad():
        expected = transformers_llama(shape, dict(model.weights))(torch.tensor([TOKENS])).logits[0]
    # Its rotary angles are f32.
    torch.testing.assert_close(plain_forward(model, TOKENS), expected, rtol=1e-5, atol=1e-5)


def expanded_latent_layer(model: LatentDecoder, layer: int, hidden: Tensor) -> Tensor:
    """One layer with keys and values of every head written out, as latent attention is usually given."""
    shape, w = model.shape, {k.removeprefix(f"{layer}."): v for k, v in model.weights.items()}
    positions, heads = torch.arange(len(hidden)), shape.num_q_heads
    x = rms_norm(hidden, w["attention_norm"])
    q = (rms_norm(x @ w["q_a"].T, w["q_norm"]) @ w["q_b"].T).view(len(x), heads, -1)
    kv = x @ w["kv_a"].T
    latent = rms_norm(kv[:, : shape.kv_rank], w["kv_norm"])
    k_rope = rotate(kv[:, None, shape.kv_rank :], positions, shape.rope_theta)
    k = torch.cat([(latent @ w["k_b"].T).view(len(x), heads, -1), k_rope.expand(-1, heads, -1)], -1)
    v = (latent @ w["v_b"].T).view(len(x), heads, -1)
    q_rope = rotate(q[..., shape.nope_dim :], positions, shape.rope_theta)
    q = torch.cat([q[..., : shape.nope_dim], q_rope], -1)
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(shape.nope_dim + shape.rope_dim)
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    attention = torch.einsum("hts,shv->thv", scores.softmax(-1), v)
    hidden = hidden + attention.flatten(1) @ w["output"].T
    x = rms_norm(hidden, w["mlp_norm"])
    gate, up, down = (w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return hidden + (silu(x @ gate.T) * (x @ up.T)) @ down.T


def test_absorbed_latent_attention_equals_the_expanded_one() -> None:
    model = LatentDecoder.random(LatentShape(), seed=5, dtype=torch.float64)
    hidden = model.embed(torch.tensor(TOKENS), torch.arange(len(TOKENS)))
    for layer in range(model.num_layers):
        hidden = expanded_latent_layer(model, layer, hidden)
    torch.testing.assert_close(plain_forward(model, TOKENS), model.logits(hidden), rtol=1e-9, atol=1e-9)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_q_heads=3"):
        LlamaShape(num_q_heads=3, num_kv_heads=2)
    with pytest.raises(ConfigError, match="head_dim=15"):
        LlamaShape(head_dim=15)


def test_training_and_decoding_compute_the_same_logits() -> None:
    tokens = torch.randint(recall_model.VOCAB, (23,), generator=torch.Generator().manual_seed(1))
    trained = RECALL.logits(RECALL(tokens[None]))[0]
    torch.testing.assert_close(plain_forward(RECALL, tokens.tolist()), trained, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("position", ["none", "first", "last"])
def test_answers_are_the_values_of_the_needles_that_are_asked(position: recall_model.QuestionPosition) -> None:
    batch = recall_model.recall_batch(3, 20, 8, torch.Generator().manual_seed(0), position)
    for context, questions, answers in zip(batch.context, batch.questions, batch.answers, strict=True):
        assert int(context[-1]) == recall_model.SEPARATOR
        text = context.tolist()
        begin = 1 + 8 * 4 if position == "first" else 0
        needles = [tuple(text[i : i + 4]) for i in range(begin, begin + 80, 4)]
        assert all(value >= recall_model.KEYS for *_, value in needles)
        assert len({needle[:3] for needle in needles}) == 20
        for question, answer in zip(questions.tolist(), answers.tolist(), strict=True):
            assert (*question, answer) in needles
    assert (batch.context.shape[1] > 81) is (position != "none")


def test_a_checkpoint_is_loaded_only_if_it_is_the_known_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sha256 = recall_model.save_recall_model(RECALL, path)
    loaded = recall_model.load_recall_model(path, sha256)
    assert all(torch.equal(a, b) for a, b in zip(RECALL.parameters(), loaded.parameters(), strict=True))
    with pytest.raises(ConfigError, match="SHA-256"):
        recall_model.load_recall_model(path, "0" * 64)


def make(rope_dim: int = 8) -> LightningIndexer:
    torch.manual_seed(0)
    return LightningIndexer(24, 12, heads=4, dims=16, rope_dim=rope_dim)


@settings(max_examples=examples(100), deadline=None)
@given(power=st.integers(0, 8), seed=st.integers(0, 1000))
def test_the_rotation_is_orthonormal_and_its_own_inverse(power: int, seed: int) -> None:
    x, y = torch.randn(2, 2**power, generator=torch.Generator().manual_seed(seed))
    assert torch.isclose(hadamard(x) @ hadamard(y), x @ y, rtol=1e-4, atol=1e-4)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)


def test_rows_are_fp8_rows_of_the_rotated_vectors() -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(2))
    assert torch.equal(index_rows(x, "f32"), RowFormat(128, KVDtype.FP8).encode(hadamard(x)))


@pytest.mark.parametrize("largest", [448.0, 449.0, 895.9, 896.0, 1e-3, 1.0])
def test_a_ue8m0_scale_is_the_next_power_of_two(largest: float) -> None:
    quantised, scale = quantise(torch.tensor([[largest, -largest / 2]]), "ue8m0")
    assert scale.item() == 2.0 ** math.ceil(math.log2(torch.tensor(largest).item() / 448))
    assert (quantised.float() * scale).flatten().tolist() == pytest.approx([largest, -largest / 2], rel=2**-3)


def test_a_vector_of_zeros_stays_one() -> None:
    for scale_format in ("f32", "ue8m0"):
        quantised, scale = quantise(torch.zeros(2, 8), scale_format)
        assert not (quantised.float() * scale[:, None]).any()
        assert scale.isfinite().all()


def test_a_rotation_needs_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match="dims=12"):
        hadamard(torch.zeros(12))
    with pytest.raises(ConfigError, match="dims=12"):
        LightningIndexer(4, 4, dims=12, rope_dim=4)
    with pytest.raises(ConfigError, match="rope_dim=18"):
        LightningIndexer(4, 4, dims=16, rope_dim=18)


@torch.no_grad()
def test_it_gives_a_query_per_head_one_key_and_a_weight_per_head() -> None:
    indexer, random = make(), torch.Generator().manual_seed(3)
    hidden, latent = torch.randn(5, 24, generator=random), torch.randn(5, 12, generator=random)
    out = indexer(hidden, latent, torch.arange(5))
    assert [out[name].shape for name in ("index_query", "index_key", "index_weight")] == [(5, 4, 16), (5, 16), (5, 4)]
    assert torch.allclose(out["index_weight"], hidden @ indexer.weight.weight.T / 8)


@torch.no_grad()
def test_products_depend_on_the_distance_only() -> None:
    indexer, random = make(), torch.Generator().manual_seed(4)
    hidden, latent = torch.randn(1, 24, generator=random), torch.randn(1, 12, generator=random)

    def product(query_position: int, key_position: int) -> torch.Tensor:
        query = indexer(hidden, latent, torch.tensor([query_position]))["index_query"]
        return query[0] @ indexer(hidden, latent, torch.tensor([key_position]))["index_key"][0]

    assert torch.allclose(product(9, 4), product(105, 100), atol=1e-4)
    assert not torch.allclose(product(9, 4), product(9, 5), atol=1e-2)
