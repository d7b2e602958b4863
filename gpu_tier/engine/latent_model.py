"""A decoder of DeepSeek-V3.2's shape: multi-head latent attention and a lightning indexer.

All heads share one latent row per token, ``[c | k_rope]``: `c` is what a token's keys and values of every head are
linear maps of, k_rope carries its position. Attention runs in the absorbed form: the key map is applied to the query
and the value map to the output, so that heads read the latent row itself; its leading `kv_rank` numbers are the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.engine.layers import random_matrix, rms_norm, rotate, swiglu
from gpu_tier.engine.model import AttentionInputs, ModelState
from gpu_tier.geometry import KVKind
from gpu_tier.index.lightning_indexer import LightningIndexer

__all__ = ["LatentDecoder", "LatentShape"]


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of a model.

    Attributes:
        vocab: tokens.
        d_model: numbers of a hidden state.
        num_layers: layers.
        num_q_heads: query heads.
        q_rank: numbers of the query latent.
        kv_rank: numbers of the latent that keys and values are made of.
        nope_dim: numbers of a head's key without a position.
        rope_dim: numbers of a key with one, shared by the heads; even.
        v_dim: numbers of a head's value.
        d_ff: width of the feed-forward.
        index_heads: query heads of the indexer; 0 for a model without one.
        index_dim: numbers of an index key, a power of two.
        index_rope_dim: those of them that carry a position.
        rope_theta: base of the rotary frequencies.
    """

    vocab: int = 128
    d_model: int = 64
    num_layers: int = 3
    num_q_heads: int = 4
    q_rank: int = 32
    kv_rank: int = 32
    nope_dim: int = 16
    rope_dim: int = 16
    v_dim: int = 16
    d_ff: int = 128
    index_heads: int = 4
    index_dim: int = 32
    index_rope_dim: int = 16
    rope_theta: float = 10000.0


class LatentDecoder:
    """Implements `gpu_tier.engine.model.DecoderModel`."""

    kind = KVKind.MLA
    num_kv_heads = 1

    def __init__(self, shape: LatentShape, weights: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.weights = weights
        self.num_layers = shape.num_layers
        self.num_q_heads = shape.num_q_heads
        self.head_dim = shape.kv_rank + shape.rope_dim
        self.v_head_dim = shape.kv_rank
        self.sm_scale = (shape.nope_dim + shape.rope_dim) ** -0.5
        self._indexers = [self._indexer(layer) for layer in range(shape.num_layers)] if shape.index_heads else []

    @classmethod
    def random(
        cls,
        shape: LatentShape,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LatentDecoder:
        """Return a model with random weights; a seed gives the same ones on every device and, rounded, dtype."""
        generator = torch.Generator().manual_seed(seed)
        weights = {"embed": random_matrix(generator, shape.vocab, shape.d_model)}
        for layer in range(shape.num_layers):
            for name, (outputs, inputs) in _layer_sizes(shape).items():
                weights[f"{layer}.{name}"] = random_matrix(generator, outputs, inputs)
            for name, size in _norm_sizes(shape).items():
                weights[f"{layer}.{name}"] = torch.ones(size)
            if shape.index_heads:
                weights |= _indexer_weights(shape, layer, generator)
        weights |= {"head": random_matrix(generator, shape.vocab, shape.d_model), "norm": torch.ones(shape.d_model)}
        return cls(shape, {name: weight.to(device, dtype) for name, weight in weights.items()})

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `DecoderModel`."""
        return self.weights["embed"][token_ids]

    def attention_inputs(
        self,
        layer_id: int,
        hidden: Tensor,
        positions: Tensor,
        states: Sequence[ModelState],
        extend_lens: Sequence[int],
    ) -> AttentionInputs:
        """See `DecoderModel`."""
        x = self._norm(hidden, f"{layer_id}.attention_norm")
        q_latent = self._norm(x @ self.weights[f"{layer_id}.q_a"].T, f"{layer_id}.q_norm")
        q = self._queries(q_latent, positions, layer_id)
        extra = self._indexers[layer_id](x, q_latent, positions) if self._indexers else {}
        return AttentionInputs(q, self._latents(x, positions, layer_id), None, extra)

    def attention_output(self, layer_id: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """See `DecoderModel`."""
        values = self._per_head(f"{layer_id}.v_b")
        heads = torch.einsum("thr,hvr->thv", attention.to(hidden.dtype), values)
        hidden = hidden + heads.flatten(-2) @ self.weights[f"{layer_id}.output"].T
        return hidden + swiglu(self._norm(hidden, f"{layer_id}.mlp_norm"), self.weights, f"{layer_id}.mlp")

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DecoderModel`."""
        return self._norm(hidden, "norm") @ self.weights["head"].T

    def _indexer(self, layer_id: int) -> LightningIndexer:
        shape, prefix = self.shape, f"{layer_id}.indexer."
        with torch.device("meta"):
            indexer = LightningIndexer(
                shape.d_model, shape.q_rank, shape.index_heads, shape.index_dim, shape.index_rope_dim, shape.rope_theta
            )
        own = {name.removeprefix(prefix): x for name, x in self.weights.items() if name.startswith(prefix)}
        indexer.load_state_dict(own, assign=True)
        return indexer.requires_grad_(False)

    def _queries(self, q_latent: Tensor, positions: Tensor, layer_id: int) -> Tensor:
        q = (q_latent @ self.weights[f"{layer_id}.q_b"].T).unflatten(-1, (self.num_q_heads, -1))
        nope, rope = q.split([self.shape.nope_dim, self.shape.rope_dim], dim=-1)
        absorbed = torch.einsum("thn,hnr->thr", nope, self._per_head(f"{layer_id}.k_b"))
        return torch.cat([absorbed, rotate(rope, positions, self.shape.rope_theta)], dim=-1)

    def _latents(self, x: Tensor, positions: Tensor, layer_id: int) -> Tensor:
        row = x @ self.weights[f"{layer_id}.kv_a"].T
        latent, rope = row[:, None].split([self.shape.kv_rank, self.shape.rope_dim], dim=-1)
        latent = self._norm(latent, f"{layer_id}.kv_norm")
        return torch.cat([latent, rotate(rope, positions, self.shape.rope_theta)], dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name])

    def _per_head(self, name: str) -> Tensor:
        heads: Tensor = self.weights[name].unflatten(0, (self.num_q_heads, -1))
        return heads


def _layer_sizes(shape: LatentShape) -> dict[str, tuple[int, int]]:
    heads = shape.num_q_heads
    return {
        "q_a": (shape.q_rank, shape.d_model),
        "q_b": (heads * (shape.nope_dim + shape.rope_dim), shape.q_rank),
        "kv_a": (shape.kv_rank + shape.rope_dim, shape.d_model),
        "k_b": (heads * shape.nope_dim, shape.kv_rank),
        "v_b": (heads * shape.v_dim, shape.kv_rank),
        "output": (shape.d_model, heads * shape.v_dim),
        "mlp.gate_proj.weight": (shape.d_ff, shape.d_model),
        "mlp.up_proj.weight": (shape.d_ff, shape.d_model),
        "mlp.down_proj.weight": (shape.d_model, shape.d_ff),
    }


def _norm_sizes(shape: LatentShape) -> dict[str, int]:
    return {
        "attention_norm": shape.d_model,
        "q_norm": shape.q_rank,
        "kv_norm": shape.kv_rank,
        "mlp_norm": shape.d_model,
    }


def _indexer_weights(shape: LatentShape, layer: int, generator: torch.Generator) -> dict[str, Tensor]:
    weights = {
        "query.weight": random_matrix(generator, shape.index_heads * shape.index_dim, shape.q_rank),
        "key.weight": random_matrix(generator, shape.index_dim, shape.d_model),
        "weight.weight": random_matrix(generator, shape.index_heads, shape.d_model),
        "key_norm.weight": torch.ones(shape.index_dim),
        "key_norm.bias": torch.zeros(shape.index_dim),
    }
    return {f"{layer}.indexer.{name}": weight for name, weight in weights.items()}
