"""Weights that change inside a running vLLM: tokens of the new ones, reuse right after, and nobody else's blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_kinds import TRANSFORMERS, VLLM
from engine_process import StartEngine
from manager_process import ManagerProcess
from tiny_models import prompt_tokens
from transformers import LlamaForCausalLM
from vllm_rig import Rig, connected, settle

NORM = "model.layers.1.input_layernorm"  # vLLM keeps other weights in a packed form on CPUs


@pytest.fixture
def rig(new_engine: StartEngine, tiny_llama: Path, manager: ManagerProcess, instance_id: str) -> Rig:
    engine = new_engine(VLLM, tiny_llama, **connected(manager.address, instance_id))
    return Rig(engine, manager, instance_id).until_ready()


def answer_of(new_engine: StartEngine, model: Path, prompt: list[int]) -> list[int]:
    engine = new_engine(TRANSFORMERS, model)
    try:
        return engine.generate([prompt], 16)[0].tokens
    finally:
        engine.close()


def test_changed_weights(rig: Rig, new_engine: StartEngine, tiny_llama: Path, tmp_path: Path) -> None:
    """One matrix, one element, and all of them; each is followed by what vLLM itself needs: a reset of its cache."""
    prompt, unchanged = prompt_tokens(200, seed=6001), rig
    other = Rig(
        new_engine(VLLM, tiny_llama, **connected(rig.manager.address, rig.instance_id)), rig.manager, rig.instance_id
    ).until_ready()
    right = unchanged.store(prompt).tokens
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    seen = {tuple(right)}
    for number, change in enumerate(("matrix", "element", "reload")):
        path = tmp_path / change
        with torch.no_grad():
            weight = model.get_submodule(NORM).weight
            if change == "matrix":
                weight.mul_(-1)
            elif change == "element":
                weight[5] *= 1000
            else:
                model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
        model.save_pretrained(path)
        if change == "reload":
            other.engine.ask("reload_weights", path=str(path))
        else:
            scale, element = (-1.0, None) if change == "matrix" else (1000.0, 5)
            other.engine.ask("change_weights", layer=NORM, scale=scale, element=element)
        truth = answer_of(new_engine, path, prompt)
        assert tuple(truth) not in seen, number
        seen.add(tuple(truth))
        for cached in (0, 192):  # at once, and with reuse from the second time on
            answer = other.fresh(prompt)
            assert (answer.tokens, answer.cached_tokens) == (truth, cached), change
            settle(other.engine)
        assert (unchanged.fresh(prompt).tokens, unchanged.fresh(prompt).cached_tokens) == (right, 192)


def test_a_change_without_a_reset_is_seen_and_a_name_is_enough(
    rig: Rig, new_engine: StartEngine, tiny_llama: Path
) -> None:
    prompt = prompt_tokens(200, seed=6002)
    right = rig.store(prompt).tokens
    rig.engine.ask("change_weights", layer=NORM, scale=-1.0)
    saved = rig.count("saved_blocks")
    for seed in (6003, 6004):
        assert rig.generate(prompt_tokens(200, seed=seed)).cached_tokens == 0
        settle(rig.engine)
    assert rig.count("saved_blocks") == saved
    assert "KV is not reused until vLLM's prefix cache is reset" in rig.engine.printed()
    rig.engine.ask("change_weights", layer=NORM, scale=-1.0)  # as they were
    assert (rig.fresh(prompt).tokens, rig.fresh(prompt).cached_tokens) == (right, 192)
    rig.engine.ask("set_weights_version", name="step 1")
    assert (rig.fresh(prompt).tokens, rig.count("unsaved_weights_blocks") > 0) == (right, True)
    settle(rig.engine)
    assert rig.fresh(prompt).cached_tokens == 192
