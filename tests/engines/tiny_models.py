"""Models with random weights, small enough to be made on the spot.

Their weights are drawn wider than those of a fresh model, whose answer hardly depends on the prompt: a test that
compares tokens would not tell the right KV from any other.

    python tests/engines/tiny_models.py llama DIRECTORY
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["VOCABULARY", "WRITERS", "prompt_tokens", "write_large_llama", "write_llama"]

VOCABULARY = 1024
_STD = 0.08


def prompt_tokens(count: int, seed: int) -> list[int]:
    """Return a prompt that every model here takes; another seed is another prompt."""
    return Random(seed).choices(range(3, VOCABULARY), k=count)


def write_llama(directory: Path) -> None:
    """Write the model on which all engines print the same tokens: Llama, 4 layers, 4 KV heads, of 11 MB."""
    _write_llama(directory, hidden=256, layers=4, heads=8, kv_heads=4)


def write_large_llama(directory: Path, *, hidden: int = 1024, layers: int = 8) -> None:
    """Write a Llama for measurements, large enough that computing the prompt is what takes the time."""
    _write_llama(directory, hidden=hidden, layers=layers, heads=hidden // 64, kv_heads=hidden // 256, std=0.03)


def _write_llama(directory: Path, *, hidden: int, layers: int, heads: int, kv_heads: int, std: float = _STD) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=16_384,
        bos_token_id=1,
        eos_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )
    _write(LlamaForCausalLM(config), directory, std)


def _write(model: Any, directory: Path, std: float) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.to(torch.float32).save_pretrained(directory)
    _tokenizer().save_pretrained(directory)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One word per token: `t7` is token 7."""
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1")


WRITERS: dict[str, Callable[[Path], None]] = {"llama": write_llama, "large_llama": write_large_llama}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]))
