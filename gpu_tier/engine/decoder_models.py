"""Small decoders whose attention the coordinator computes: one of Llama's shape and one of DeepSeek-V3.2's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvcm.gpu_tier.engine.interfaces import AttentionInputs, ModelState
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVKind
from kvcm.gpu_tier.index.lightning_indexer import LightningIndexer

__all__ = ["LatentDecoder", "LatentShape", "LlamaDecoder", "LlamaShape", "rms_norm", "rotate"]


def _random_matrix(generator: torch.Generator, outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
    """Return a weight ``f64 [outputs, inputs]`` that keeps the size of its input's numbers, times `gain`."""
    scale = gain * inputs**-0.5
    weight: Tensor = scale * torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    return weight


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``x [..., d]`` divided by the root of its mean square, times the weight; reduced in f32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return ``x [T, heads, d]`` with rotary positions; angles are computed in f32 at least.

    Numbers i and i + d/2 are a pair, which is the order of Llama's weights.
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** -(torch.arange(half, device=x.device, dtype=wide) / half)
    angle = positions.to(wide)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _swiglu(x: Tensor, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    """Return the feed-forward of Llama: ``down(silu(gate(x)) * up(x))``; weights are named as there."""
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


# A decoder of Llama's shape: RMSNorm, rotary positions, grouped-query attention, SwiGLU.


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
    """Implements `kvcm.gpu_tier.engine.interfaces.DecoderModel`.

    Weights carry the names of Hugging Face's Llama, so that a checkpoint of that shape can be handed in as it is.
    """

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
        weights = {"model.embed_tokens.weight": _random_matrix(generator, shape.vocab, shape.d_model)}
        for layer in range(shape.num_layers):
            for name, (outputs, inputs) in _layer_sizes(shape).items():
                weights[f"model.layers.{layer}.{name}.weight"] = _random_matrix(generator, outputs, inputs)
        weights["lm_head.weight"] = _random_matrix(generator, shape.vocab, shape.d_model)
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
        return hidden + _swiglu(x, self.weights, f"{prefix}.mlp")

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


# A decoder of DeepSeek-V3.2's shape: multi-head latent attention and a lightning indexer.


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
    """Implements `kvcm.gpu_tier.engine.interfaces.DecoderModel`.

    All heads share one latent row per token, ``[c | k_rope]``: `c` is what a token's keys and values of every head are
    linear maps of, k_rope carries its position. Attention runs in the absorbed form: the key map is applied to the
    query and the value map to the output, so that heads read the latent row itself; its leading `kv_rank` numbers are
    the value.
    """

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
        weights = {"embed": _random_matrix(generator, shape.vocab, shape.d_model)}
        for layer in range(shape.num_layers):
            for name, (outputs, inputs) in _latent_model_layer_sizes(shape).items():
                weights[f"{layer}.{name}"] = _random_matrix(generator, outputs, inputs)
            for name, size in _norm_sizes(shape).items():
                weights[f"{layer}.{name}"] = torch.ones(size)
            if shape.index_heads:
                weights |= _indexer_weights(shape, layer, generator)
        weights |= {"head": _random_matrix(generator, shape.vocab, shape.d_model), "norm": torch.ones(shape.d_model)}
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
        return AttentionInputs(q=q, k=self._latents(x, positions, layer_id), v=None, extra=extra)

    def attention_output(self, layer_id: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """See `DecoderModel`."""
        values = self._per_head(f"{layer_id}.v_b")
        heads = torch.einsum("thr,hvr->thv", attention.to(hidden.dtype), values)
        hidden = hidden + heads.flatten(-2) @ self.weights[f"{layer_id}.output"].T
        return hidden + _swiglu(self._norm(hidden, f"{layer_id}.mlp_norm"), self.weights, f"{layer_id}.mlp")

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DecoderModel`."""
        return self._norm(hidden, "norm") @ self.weights["head"].T

    def _indexer(self, layer_id: int) -> LightningIndexer:
        shape, prefix = self.shape, f"{layer_id}.indexer."
        with torch.device("meta"):
            indexer = LightningIndexer(
                d_model=shape.d_model,
                q_dim=shape.q_rank,
                heads=shape.index_heads,
                dims=shape.index_dim,
                rope_dim=shape.index_rope_dim,
                rope_theta=shape.rope_theta,
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


def _latent_model_layer_sizes(shape: LatentShape) -> dict[str, tuple[int, int]]:
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
        "query.weight": _random_matrix(generator, shape.index_heads * shape.index_dim, shape.q_rank),
        "key.weight": _random_matrix(generator, shape.index_dim, shape.d_model),
        "weight.weight": _random_matrix(generator, shape.index_heads, shape.d_model),
        "key_norm.weight": torch.ones(shape.index_dim),
        "key_norm.bias": torch.zeros(shape.index_dim),
    }
    return {f"{layer}.indexer.{name}": weight for name, weight in weights.items()}
