"""Small random models of transformers, and what they generate on their own."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

__all__ = ["CONFIGS", "make_model", "own_generate", "prompt"]

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config, "mistral": MistralConfig}


def make_model(name: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | ({"sliding_window": None} if name == "mistral" else {}) | changes
    model = AutoModelForCausalLM.from_config(CONFIGS[name](**sizes), dtype=torch.float32).eval()
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
