"""Models with random weights, small enough to be made on the spot.

Their weights are drawn wider than those of a fresh model, whose answer hardly depends on the prompt: a test that
compares tokens would not distinguish the right KV from any other.

    python tests/engines/tiny_models.py llama DIRECTORY
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

_VOCABULARY = 1024
_WINDOW_TOKENS = 64  # two blocks of the smallest size that vLLM takes on CPUs
_STD = 0.08
_SLOW_DECAY = -8.0  # else a state has forgotten a token after a few others


def prompt_tokens(count: int, seed: int) -> list[int]:
    """Return a prompt that every model here takes; another seed is another prompt."""
    return Random(seed).choices(range(3, _VOCABULARY), k=count)


def write_llama(directory: Path) -> None:
    """Write the model on which all engines print the same tokens: Llama, 4 layers, 4 KV heads, of 11 MB."""
    _write_llama(directory, hidden=256, layers=4, heads=8, kv_heads=4)


def write_large_llama(directory: Path, *, hidden: int = 1024, layers: int = 8) -> None:
    """Write a Llama for measurements, large enough that computing the prompt takes most of the time."""
    _write_llama(directory, hidden=hidden, layers=layers, heads=hidden // 64, kv_heads=hidden // 256, std=0.03)


def _write_window(directory: Path) -> None:
    """Write a model in which two of three layers see a sliding window: vLLM makes three groups of its six layers."""
    config = MinistralConfig(
        **_shape(hidden=256, layers=6, heads=8, kv_heads=4),
        sliding_window=_WINDOW_TOKENS,
        layer_types=["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(6)],
    )
    _write(MinistralForCausalLM(config), directory, _STD)
    _call(directory, "MistralForCausalLM")


def _write_linear(directory: Path) -> None:
    """Write a model in which three of four layers keep a state instead of KV: Qwen3-Next.

    On CPUs vLLM computes such layers in bfloat16 only, with states of this size only, and makes the blocks of the other
    layers as large as a state: the last layer's KV is wide, so that these are not too many tokens.
    """
    config = Qwen3NextConfig(
        **_shape(hidden=128, layers=4, heads=4, kv_heads=4) | {"head_dim": 128, "pad_token_id": 0},
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[0, 1, 2],  # vLLM wants a layer of experts
    )
    model = Qwen3NextForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(parameter, _SLOW_DECAY)
    _write(model, directory, _STD)


def _write_latent(directory: Path) -> None:
    """Write a model with MLA: a layer keeps one row of 80 numbers per token. SGLang wants a rotation that scales."""
    config = DeepseekV2Config(
        **_shape(hidden=256, layers=4, heads=8, kv_heads=8) | {"head_dim": 16},
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=4,  # no experts
        n_routed_experts=4,
    )
    _write(DeepseekV2ForCausalLM(config), directory, _STD)
    rotation = {"rope_type": "deepseek_yarn", "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192,
                "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"moe_layer_freq": 1, "rope_scaling": rotation}))


def _write_llama(directory: Path, *, hidden: int, layers: int, heads: int, kv_heads: int, std: float = _STD) -> None:
    config = LlamaConfig(**_shape(hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads))
    _write(LlamaForCausalLM(config), directory, std)


def _shape(*, hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """No token ends an answer, so that engines need no option to go on."""
    return {
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 16_384,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _write(model: Any, directory: Path, std: float) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.to(torch.float32).save_pretrained(directory)
    _tokenizer().save_pretrained(directory)


def _call(directory: Path, architecture: str) -> None:
    """Name an architecture for engines that have no name for this one; transformers goes by the type of the model."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))


def _tokenizer() -> PreTrainedTokenizerFast:
    """One word per token: `t7` is token 7."""
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(_VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1")


WRITERS: dict[str, Callable[[Path], None]] = {
    "llama": write_llama,
    "large_llama": write_large_llama,
    "window": _write_window,
    "linear": _write_linear,
    "latent": _write_latent,
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]))
