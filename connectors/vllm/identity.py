"""Who may share KV with a vLLM engine.

Only what vLLM leaves as it is goes in here: model code changes the configuration of a model, and the type of its cache,
while weights are loaded. The model's own files stay what they are, and say the same in every process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from connectors.layout import format_text
from connectors.reuse.identity import KvIdentity
from connectors.reuse.weights import weights_fingerprint
from connectors.vllm.options import VllmOptions
from connectors.vllm.plan import KvGroup, KvPlan
from kvcm.model.errors import InvalidArgumentError

__all__ = ["identity_of"]

_LAYOUT_VERSION = "vllm/1"


def identity_of(config: VllmConfig, plan: KvPlan, options: VllmOptions) -> KvIdentity:
    """Return the identity of an engine.

    Args:
        config: of the engine.
        plan: how its KV is stored.
        options: of the connector.

    Raises:
        InvalidArgumentError: its hashes are its own, or its weights cannot be told from others.
    """
    model = config.model_config
    return KvIdentity(
        model=options.model_name or _model_name(model.model),
        weights=options.weights or _weights(config),
        engine=f"{_LAYOUT_VERSION} {_kernels()}",
        dtype=next(group.stored.dtype for group in plan.groups if group.is_whole),
        hashing=_hashing(config),
        formats={group.prefix or "all": _format(group) for group in plan.groups},
        tp_size=plan.ranks,
        use_mla=bool(getattr(model, "use_mla", False)),
        extra=_extra(config),
    )


def _format(group: KvGroup) -> str:
    reach = f"state/{group.block_tokens}" if group.is_state else f"window={group.window_tokens}"
    return f"{format_text(group.stored)} {reach} quantization={group.quantization}"


def _kernels() -> str:
    """Return whose kernels write KV: those for CPUs arrange the elements of a block as their instructions want them."""
    device = current_platform.device_type
    if device != "cpu":
        return str(device)
    amx = " amx" if torch.cpu._is_amx_tile_supported() else ""
    return f"cpu {torch.backends.cpu.get_cpu_capability()}{amx}"


def _extra(config: VllmConfig) -> Mapping[str, str]:
    """Return what else the KV of given tokens depends on."""
    model, attention = config.model_config, getattr(config, "attention_config", None)
    extra = {
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "max_model_len": str(model.max_model_len),  # long-context RoPE depends on it
        "overrides": _text_of(model.hf_overrides),
        "attention": str(getattr(attention, "backend", None)),
    }
    speculative = config.speculative_config
    if speculative is not None:  # layers of a draft model are stored with the others
        extra["speculative"] = f"{speculative.method} {_weights_in(str(speculative.model), None)}"
    return extra


def _text_of(overrides: Any) -> str:
    return getattr(overrides, "__qualname__", None) or json.dumps(overrides, sort_keys=True, default=str)


def _hashing(config: VllmConfig) -> str:
    """Return what engines must agree on, to give the same blocks the same hashes."""
    name = config.cache_config.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED")
    if "sha256" not in name and seed is None:
        raise InvalidArgumentError(
            f"prefix_caching_hash_algo is {name!r}, whose hashes differ in every process: choose sha256, or set"
            " PYTHONHASHSEED to the same number for all engines"
        )
    return f"{name} seed={seed or 'default'}"


def _model_name(model: str) -> str:
    return Path(model).name if Path(model).exists() else model


def _weights(config: VllmConfig) -> str:
    model = config.model_config
    if str(getattr(config.load_config.load_format, "value", config.load_config.load_format)) == "dummy":
        return f"dummy seed={model.seed}"
    return _weights_in(model.model, getattr(model.hf_config, "_commit_hash", None))


def _weights_in(model: str, commit: str | None) -> str:
    """Return what tells weights apart: a look into their files, or the commit that they were downloaded of."""
    reason = "they are neither in a directory nor of a known commit"
    if Path(model).is_dir():
        try:
            return weights_fingerprint(Path(model))
        except (OSError, ValueError) as error:
            reason = str(error)
    elif commit:
        return f"commit={commit}"
    raise InvalidArgumentError(
        f"the weights of {model!r} cannot be told from others ({reason}): name them with option 'weights'"
    )
