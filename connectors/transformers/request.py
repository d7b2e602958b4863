"""Checks what is asked of `KVReuse.generate`: one sequence, token by token, from its first token on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvcm.model.errors import InvalidArgumentError

__all__ = ["check_prompt", "effective_config"]

# Each of these brings KV of its own, or makes KV depend on more than the tokens before it.
_REFUSED_ARGUMENTS = (
    "assistant_model",
    "cache_implementation",
    "decoder_input_ids",
    "inputs_embeds",
    "negative_prompt_ids",
    "past_key_values",
    "position_ids",
    "prefill_chunk_size",
    "token_type_ids",
)
_MODES = frozenset({GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE})


def check_prompt(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Refuse anything but one sequence without padding.

    Raises:
        InvalidArgumentError: naming the argument and what is allowed.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise InvalidArgumentError(
            f"input_ids has shape {tuple(input_ids.shape)}, must be (1, tokens): one sequence at a time"
        )
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape or not bool(attention_mask.all()):
        raise InvalidArgumentError(
            "attention_mask hides tokens of the prompt, must be all ones: pass it without padding"
        )


def effective_config(model: PreTrainedModel, arguments: Mapping[str, Any]) -> GenerationConfig:
    """Return the generation settings that hold for these arguments of generate.

    Raises:
        InvalidArgumentError: they ask for something that KV cannot be reused for.
    """
    for name in _REFUSED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise InvalidArgumentError(
                f"{name} is given, must be left out: KVReuse brings the cache of one plain sequence"
            )
    config = copy.deepcopy(arguments.get("generation_config") or model.generation_config)
    assert config is not None
    config.update(**{name: value for name, value in arguments.items() if hasattr(config, name)})
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise InvalidArgumentError(f"generation mode is {mode.value}, must be greedy search or sampling")
    for name, only in (("num_return_sequences", 1), ("use_cache", True), ("prefill_chunk_size", None)):
        value = getattr(config, name, None)
        if value is not None and value != only:
            raise InvalidArgumentError(f"{name} is {value}, must be {only}")
    return config
