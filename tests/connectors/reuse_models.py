"""Small models of other kinds than full attention alone, whose answers depend on their context."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from reuse_cases import MODEL, SIZES, make_model
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
WINDOW = 40


def filled(kind: Any, config: Any, std: float = 0.16) -> Any:
    """Return a model with random weights, large enough that early tokens count."""
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


def gemma3() -> Any:
    """Layers with a window and with full attention in turns."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SIZES, num_hidden_layers=4, head_dim=16, sliding_window=WINDOW, layer_types=kinds)
    return filled(Gemma3ForCausalLM, config)


def qwen2() -> Any:
    """Full attention first, windows behind it."""
    config = Qwen2Config(
        **SIZES, num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    )
    return filled(Qwen2ForCausalLM, config)


def mistral() -> Any:
    """A window in all layers."""
    return filled(MistralForCausalLM, MistralConfig(**SIZES, num_hidden_layers=3, head_dim=16, sliding_window=WINDOW))


def qwen3_next() -> Any:
    """Gated delta rule, with attention in every fourth layer, and experts."""
    config = Qwen3NextConfig(
        **SIZES,
        num_hidden_layers=4,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return filled(Qwen3NextForCausalLM, config)


def falcon_h1() -> Any:
    """Mamba and attention side by side in every layer."""
    return filled(FalconH1ForCausalLM, FalconH1Config(**SIZES, num_hidden_layers=3, mamba_d_ssm=128, **MAMBA))


def bamba() -> Any:
    """Layers of Mamba and of attention in turns; a model that counts positions from 0 unless the caller passes them."""
    return filled(BambaForCausalLM, BambaConfig(**SIZES, num_hidden_layers=4, attn_layer_indices=[1, 3], **MAMBA))


def lfm2() -> Any:
    """Short convolutions between layers of attention."""
    config = Lfm2Config(**SIZES, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)
    return filled(Lfm2ForCausalLM, config)


def jamba(std: float = 0.16) -> Any:
    """Mamba whose model computes a second chunk as if there were none before it."""
    config = JambaConfig(
        **SIZES,
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=1,
        mamba_d_state=8,
    )
    return filled(JambaForCausalLM, config, std)


WINDOWS: dict[str, Callable[[], Any]] = {"gemma3": gemma3, "qwen2": qwen2, "mistral": mistral}
HYBRIDS: dict[str, Callable[[], Any]] = {"bamba": bamba, "falcon_h1": falcon_h1, "lfm2": lfm2, "qwen3_next": qwen3_next}


KINDS: dict[str, Callable[[], Any]] = {"llama": make_model} | WINDOWS | HYBRIDS


@cache
def model_of(kind: str) -> Any:
    return MODEL if kind == "llama" else KINDS[kind]()


def llama4() -> Any:
    """Attention in chunks."""
    config = Llama4TextConfig(
        **SIZES,
        num_hidden_layers=4,
        head_dim=16,
        attention_chunk_size=32,
        num_local_experts=2,
        intermediate_size_mlp=64,
    )
    return filled(Llama4ForCausalLM, config)


def mamba2() -> Any:
    """No attention at all."""
    config = Mamba2Config(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=1
    )
    return filled(Mamba2ForCausalLM, config)


def minimax() -> Any:
    """A cache of its own."""
    return filled(MiniMaxForCausalLM, MiniMaxConfig(**SIZES, num_hidden_layers=2, head_dim=16, num_local_experts=2))


REFUSED: dict[str, Callable[[], Any]] = {"llama4": llama4, "mamba2": mamba2, "minimax": minimax}
