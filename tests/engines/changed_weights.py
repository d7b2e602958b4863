"""Weights that change while an engine runs, and what the changed models answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from engine_kinds import TRANSFORMERS
from engine_process import StartEngine
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import prompt_tokens
from transformers import LlamaForCausalLM

NORM = "model.layers.1.input_layernorm"  # vLLM keeps other weights in a packed form on CPUs
ADAPTED = prompt_tokens(200, seed=6005)


def changes(model: Path, directory: Path) -> Iterator[tuple[str, Path]]:
    """Write models of which each differs from the one before in one matrix, one element, or a merged adapter."""
    changed = LlamaForCausalLM.from_pretrained(model)
    weight = changed.get_submodule(NORM).weight
    for change in ("matrix", "element", "merged"):
        with torch.no_grad():
            if change == "matrix":
                weight.mul_(-1)
            elif change == "element":
                weight[5] *= 1000
            else:
                changed = _trained(changed, seed=3).merge_and_unload()
        changed.save_pretrained(directory / change)
        yield change, directory / change


def answer_of(new_engine: StartEngine, model: Path, prompt: list[int]) -> list[int]:
    """Return what a model answers without reuse."""
    engine = new_engine(TRANSFORMERS, model)
    try:
        return engine.generate([prompt], 16)[0].tokens
    finally:
        engine.close()


def write_adapter(model: Path, adapter: Path, seed: int) -> list[int]:
    """Train an adapter, as it were; return what the model with it answers to `ADAPTED`."""
    adapted = _trained(LlamaForCausalLM.from_pretrained(model), seed)
    adapted.save_pretrained(adapter)
    ids = torch.tensor([ADAPTED])
    output = adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return list(output[0, len(ADAPTED) :].tolist())


def _trained(model: LlamaForCausalLM, seed: int) -> PeftModel:
    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "down_proj"]  # SGLang takes adapters of the first three only together
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=targets, init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return adapted
