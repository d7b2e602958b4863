"""Small random models of transformers, and what they generate on their own."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_WIDTHS = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = _WIDTHS | _HEADS | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 2,
}  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 256},
    "mistral": {"sliding_window": None},
}


def make_model(name: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | OWN_SIZES.get(name, {}) | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float32).eval()
    for parameter in model.parameters():  # the usual start makes attention nearly uniform
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, 128), k=length)


def own_generate(model: Any, tokens: list[int], count: int) -> list[int]:
    ids = torch.tensor([tokens], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(tokens) :].tolist()
