"""A decoder of Llama's shape: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Weights carry the names of Hugging Face's Llama, so that a checkpoint of that shape can be handed in as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.engine.layers import random_matrix, rms_norm, rotate, swiglu
from gpu_tier.engine.model import AttentionInputs, ModelState
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVKind

__all__ = ["LlamaDecoder", "LlamaShape"]


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a model.

    Attributes:
        vocab: tokens.
        d_model: numbers of a hidden state.
        num_layers: layers.
        num_q_heads: query heads.
        num_kv_heads: KV heads; divides the query heads.
        head_dim: numbers of a key and of a value, even.
        d_ff: width of the feed-forward.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square.
    """

    vocab: int = 128
    d_model: int = 64
    num_layers: int = 3
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    d_ff: int = 128
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError("num_q_heads", self.num_q_heads, f"must be a multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ConfigError("head_dim", self.head_dim, "must be even: positions rotate pairs")


class LlamaDecoder:
    """Implements `gpu_tier.engine.model.DecoderModel`."""

    kind = KVKind.MHA

    def __init__(self, shape: LlamaShape, weights: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.weights = weights
        self.num_layers = shape.num_layers
        self.num_q_heads = shape.num_q_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.v_head_dim = shape.head_dim
        self.sm_scale = shape.head_dim**-0.5

    @classmethod
    def random(
        cls,
        shape: LlamaShape,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LlamaDecoder:
        """Return a model with random weights; a seed gives the same ones on every device and, rounded, dtype."""
        generator = torch.Generator().manual_seed(seed)
        weights = {"model.embed_tokens.weight": random_matrix(generator, shape.vocab, shape.d_model)}
        for layer in range(shape.num_layers):
            for name, (outputs, inputs) in _layer_sizes(shape).items():
                weights[f"model.layers.{layer}.{name}.weight"] = random_matrix(generator, outputs, inputs)
        weights["lm_head.weight"] = random_matrix(generator, shape.vocab, shape.d_model)
        for name in _norms(shape):
            weights[name] = torch.ones(shape.d_model)
        return cls(shape, {name: weight.to(device, dtype) for name, weight in weights.items()})

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `DecoderModel`."""
        return self.weights["model.embed_tokens.weight"][token_ids]

    def attention_inputs(
        self,
        layer_id: int,
        hidden: Tensor,
        positions: Tensor,
        states: Sequence[ModelState],
        extend_lens: Sequence[int],
    ) -> AttentionInputs:
        """See `DecoderModel`."""
        x = self._norm(hidden, f"model.layers.{layer_id}.input_layernorm.weight")
        q, k, v = (self._heads(x, layer_id, name) for name in ("q", "k", "v"))
        theta = self.shape.rope_theta
        return AttentionInputs(rotate(q, positions, theta), rotate(k, positions, theta), v)

    def attention_output(self, layer_id: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """See `DecoderModel`."""
        prefix = f"model.layers.{layer_id}"
        output = self.weights[f"{prefix}.self_attn.o_proj.weight"]
        hidden = hidden + attention.flatten(-2).to(hidden.dtype) @ output.T
        x = self._norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        return hidden + swiglu(x, self.weights, f"{prefix}.mlp")

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DecoderModel`."""
        return self._norm(hidden, "model.norm.weight") @ self.weights["lm_head.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name], self.shape.norm_eps)

    def _heads(self, x: Tensor, layer_id: int, name: str) -> Tensor:
        weight = self.weights[f"model.layers.{layer_id}.self_attn.{name}_proj.weight"]
        heads: Tensor = (x @ weight.T).unflatten(-1, (-1, self.head_dim))
        return heads


def _layer_sizes(shape: LlamaShape) -> dict[str, tuple[int, int]]:
    q, kv = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "self_attn.q_proj": (q, shape.d_model),
        "self_attn.k_proj": (kv, shape.d_model),
        "self_attn.v_proj": (kv, shape.d_model),
        "self_attn.o_proj": (shape.d_model, q),
        "mlp.gate_proj": (shape.d_ff, shape.d_model),
        "mlp.up_proj": (shape.d_ff, shape.d_model),
        "mlp.down_proj": (shape.d_model, shape.d_ff),
    }


def _norms(shape: LlamaShape) -> list[str]:
    kinds = ("input_layernorm", "post_attention_layernorm")
    return [
        "model.norm.weight",
        *(f"model.layers.{i}.{kind}.weight" for i in range(shape.num_layers) for kind in kinds),
    ]
