"""Deployments as they are asked for: a preset, and inputs that differ from it, such as `deepseek_v3,gpu_hour=2.5`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.roi.deployment import Deployment
from kvcm.optimizer.roi.length_profile import read_profile

__all__ = ["INPUTS", "PRESETS", "parse_deployment"]

PRESETS: Mapping[str, Deployment] = MappingProxyType(
    {
        "deepseek_v3": Deployment(prefill_tokens_per_second=32_200, kv_bytes_per_token=61 * 576 * 2),
        "qwen3_coder_480b": Deployment(prefill_tokens_per_second=10_000, kv_bytes_per_token=62 * 2 * 8 * 128 * 2),
    }
)
"""Published throughput of nodes with 8 GPUs and a link of 20 GB/s; layers · width · 2 bytes of KV per token.

DeepSeek-V3 keeps the latent of multi-head latent attention in bf16, Qwen3-Coder-480B keys and values of 8 heads of 128.
Prices are examples: nobody publishes those that others pay.
"""

INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "prefill": "prefill_tokens_per_second",
        "kv_bytes": "kv_bytes_per_token",
        "gpus": "gpus_per_node",
        "bandwidth": "bandwidth_bytes_per_second",
        "latency": "latency_seconds",
        "usable": "usable_share",
        "utilisation": "utilisation",
        "gpu_hour": "price_per_gpu_hour",
        "gib_month": "price_per_gib_month",
        "offered": "offered_tokens_per_second",
        "load_factor": "load_factor",
        "profile": "profile",
    }
)
"""What an input is called in a text, and its field."""


def parse_deployment(text: str) -> Deployment:
    """Return the deployment of a text: a preset's name, inputs as `name=number`, or both, with commas between.

    `profile=FILE` reads measured points. A text without a preset starts from the first one.

    Raises:
        OptionError: there is no such preset or input, or a value is out of its range.
    """
    first, *rest = (part.strip() for part in text.split(","))
    is_preset = "=" not in first
    deployment = _preset(first) if is_preset else next(iter(PRESETS.values()))
    changes: dict[str, Any] = {}
    for part in rest if is_preset else [first, *rest]:
        changes |= _input(part)
    return replace(deployment, **changes)


def _preset(name: str) -> Deployment:
    if name not in PRESETS:
        raise OptionError(f"deployment: {name!r} is no preset; there are {', '.join(PRESETS)}{_hint(name, PRESETS)}")
    return PRESETS[name]


def _input(part: str) -> dict[str, Any]:
    name, _, value = (each.strip() for each in part.partition("="))
    if name not in INPUTS:
        raise OptionError(f"deployment: {name!r} is no input; there are {', '.join(INPUTS)}{_hint(name, INPUTS)}")
    if name == "profile":
        return {"profile": read_profile(Path(value))}
    try:
        return {INPUTS[name]: float(value)}
    except ValueError as error:
        raise OptionError(f"deployment: {name} is {value!r}; allowed: a number") from error


def _hint(name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
