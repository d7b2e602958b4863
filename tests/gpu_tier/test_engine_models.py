"""The models compute what their formulas say: Llama as transformers does, latent attention as without absorption."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine_rig import plain_forward
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_tier.engine.latent_model import LatentDecoder, LatentShape
from gpu_tier.engine.layers import rms_norm, rotate
from gpu_tier.engine.llama_model import LlamaDecoder, LlamaShape
from gpu_tier.errors import ConfigError

TOKENS = torch.randint(0, 128, (37,), generator=torch.Generator().manual_seed(1)).tolist()


def transformers_llama(shape: LlamaShape, weights: dict[str, Tensor]) -> Any:
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_q_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=False,
    )
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
