"""The model of the demo: shaped like Llama, with random weights from a fixed seed.

Random weights of this size (standard deviation 0.08 instead of 0.02) make the next token depend on the whole context,
so wrong KV shows in the tokens. What it says is noise; the conversation therefore goes on with the answers in its text.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["BLOCK_TOKENS", "NEW_TOKENS", "make_model", "to_tokens"]

BLOCK_TOKENS = 64
NEW_TOKENS = 16
_SEED = 20260
_STANDARD_DEVIATION = 0.08
_CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=16384,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


def make_model() -> LlamaForCausalLM:
    """Return the model; every process that calls this has the same one."""
    torch.manual_seed(_SEED)
    model = LlamaForCausalLM(_CONFIG).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=_STANDARD_DEVIATION)
    return model


def to_tokens(text: bytes) -> torch.Tensor:
    """Return the tokens of a prompt, shape (1, bytes)."""
    return torch.tensor([list(text)])
