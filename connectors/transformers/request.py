"""Checks what is asked of `KVReuse.generate`: sequences, token by token, each from its first token on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from connectors.transformers.batch import Row
from kvcm.model.errors import InvalidArgumentError

__all__ = ["effective_config", "end_tokens", "read_rows"]

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


def read_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int | None
) -> tuple[list[Row], torch.Tensor]:
    """Return the sequences of a batch, and its attention mask.

    Args:
        input_ids: of shape (rows, tokens).
        attention_mask: of the same shape, zeros for padding; None for a batch without padding.
        pad_token_id: with several rows it says that they have padding.

    Raises:
        InvalidArgumentError: naming the argument and what is allowed.
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise InvalidArgumentError(f"input_ids has shape {tuple(input_ids.shape)}, must be (rows, tokens)")
    if attention_mask is None:
        if len(input_ids) > 1 and pad_token_id is not None and bool((input_ids == pad_token_id).any()):
            raise InvalidArgumentError("attention_mask is missing, must say which of the pad tokens are padding")
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise InvalidArgumentError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, must be {tuple(input_ids.shape)} as input_ids"
        )
    is_token = attention_mask.to(torch.bool)
    if not bool(is_token[:, -1].all()) or bool((is_token[:, 1:] < is_token[:, :-1]).any()):
        raise InvalidArgumentError("attention_mask must be zeros and then ones in every row: padding at the left only")
    paddings = (~is_token).sum(dim=1).tolist()
    rows = [Row(index, padding, input_ids[index, padding:].tolist()) for index, padding in enumerate(paddings)]
    return rows, attention_mask


def effective_config(model: PreTrainedModel, arguments: Mapping[str, Any]) -> GenerationConfig:
    """Return the generation settings that hold for these arguments of generate.

    Raises:
        InvalidArgumentError: they ask for something that KV cannot be reused for.
    """
    for name in _REFUSED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise InvalidArgumentError(
                f"{name} is given, must be left out: KVReuse brings the cache, of plain sequences"
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


def end_tokens(config: GenerationConfig) -> frozenset[int]:
    """Return the ids that end a row."""
    ids = config.eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
