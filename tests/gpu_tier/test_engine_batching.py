"""Continuous batching: chunks, unequal lengths, padding, lack of room, and the order of the hooks."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_rig import PlainHooks, plain_forward
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.engine.decode_engine import DecodeEngine
from gpu_tier.engine.generation import generate
from gpu_tier.engine.latent_model import LatentDecoder, LatentShape
from gpu_tier.engine.llama_model import LlamaDecoder, LlamaShape
from gpu_tier.engine.recall_model import RecallModel
from gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from gpu_tier.types import Mode

LLAMA = LlamaDecoder.random(LlamaShape(num_layers=2))
LATENT = LatentDecoder.random(LatentShape(num_layers=2))
with torch.random.fork_rng():
    torch.manual_seed(0)
    RECALL = RecallModel().requires_grad_(False)  # keeps the last hidden states of each request
MODELS = pytest.mark.parametrize("model", [LLAMA, LATENT, RECALL], ids=["llama", "latent", "recall"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=length)


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(plain_forward(model, tokens)[-1].argmax()))
    return tokens[-count:]


def engine_of(model: Any, capacity: int = 1 << 30, **options: Any) -> tuple[DecodeEngine, PlainHooks]:
    hooks = PlainHooks(model.v_head_dim, capacity)
    return DecodeEngine(model, hooks, **options), hooks


@MODELS
def test_tokens_and_logits_equal_those_of_a_whole_forward_pass(model: Any) -> None:
    engine, _ = engine_of(model, chunk_tokens=16, piece_tokens=8)
    request = engine.add(prompt(30))
    assert engine.step() == {}
    for _ in range(5):
        token = engine.step()[request]
        tokens = engine.tokens(request)
        expected = plain_forward(model, tokens[:-1])[-1]
        torch.testing.assert_close(engine.logits[request], expected, rtol=1e-5, atol=1e-5)
        assert token == tokens[-1] == int(expected.argmax())


@MODELS
@settings(max_examples=examples(20), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    chunk=st.integers(1, 50),
    piece=st.integers(1, 50),
    pad_to=st.integers(0, 8),
)
def test_batches_of_unequal_lengths_equal_one_by_one(
    model: Any, lengths: list[int], chunk: int, piece: int, pad_to: int
) -> None:
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


def test_a_prompt_that_finds_no_room_waits_until_others_end() -> None:
    engine, hooks = engine_of(LLAMA, capacity=30)
    prompts = [prompt(12, seed) for seed in range(4)]
    assert generate(engine, prompts, 4) == [greedy(LLAMA, p, 4) for p in prompts]
    lives = [call[::2] for call in hooks.calls if call[0] in ("begin", "end")]
    assert ("end", "retracted") in lives
    # Who was retracted comes back only when somebody ended, not to be retracted again at once.
    assert not any(a == ("end", "retracted") and b == ("begin", "") for a, b in pairwise(lives))
    assert not hooks.trackers


def test_lack_of_room_is_said_when_nobody_else_could_make_some() -> None:
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


def test_generation_ends_at_a_stop_token() -> None:
    engine, _ = engine_of(LLAMA)
    whole = greedy(LLAMA, prompt(6), 6)
    stop = whole[2]
    assert generate(engine, [prompt(6)], 6, [stop]) == [whole[: whole.index(stop) + 1]]


def test_arguments_out_of_range_are_refused() -> None:
    for options in ({"chunk_tokens": 0}, {"piece_tokens": 0}, {"prefill": "fast"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            engine_of(LLAMA, **options)
    engine, _ = engine_of(LLAMA)
    with pytest.raises(ConfigError, match="prompt_ids"):
        engine.add([])
    with pytest.raises(ConfigError, match="max_new_tokens"):
        generate(engine, [[1]], 0)
