"""Weights that change inside a running vLLM: right tokens, reuse right after, and no blocks of other weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from changed_weights import ADAPTED, NORM, answer_of, changes, write_adapter
from engine_kinds import VLLM
from engine_process import StartEngine
from manager_process import ManagerProcess
from tiny_models import prompt_tokens
from vllm_rig import Rig, connected, settle


@pytest.fixture
def rig(new_engine: StartEngine, tiny_llama: Path, manager: ManagerProcess, instance_id: str) -> Rig:
    engine = new_engine(VLLM, tiny_llama, **connected(manager.address, instance_id))
    return Rig(engine, manager, instance_id).until_ready()


def test_changed_weights(rig: Rig, new_engine: StartEngine, tiny_llama: Path, tmp_path: Path) -> None:
    """One matrix, one element, and all of them (an adapter was merged); each before a reset of vLLM's cache."""
    prompt, unchanged = prompt_tokens(200, seed=6001), rig
    other = Rig(
        new_engine(VLLM, tiny_llama, **connected(rig.manager.address, rig.instance_id)), rig.manager, rig.instance_id
    ).until_ready()
    right = unchanged.store(prompt).tokens
    seen = {tuple(right)}
    for change, path in changes(tiny_llama, tmp_path):
        if change == "merged":
            other.engine.ask("reload_weights", path=str(path))
        else:
            scale, element = (-1.0, None) if change == "matrix" else (1000.0, 5)
            other.engine.ask("change_weights", layer=NORM, scale=scale, element=element)
        truth = answer_of(new_engine, path, prompt)
        assert tuple(truth) not in seen, change
        seen.add(tuple(truth))
        for cached in (0, 192):  # at once, and with reuse from the second time on
            answer = other.fresh(prompt)
            assert (answer.tokens, answer.cached_tokens) == (truth, cached), change
            settle(other.engine)
        assert (unchanged.fresh(prompt).tokens, unchanged.fresh(prompt).cached_tokens) == (right, 192)


def test_a_change_without_a_reset_is_seen_a_name_suffices(rig: Rig, new_engine: StartEngine, tiny_llama: Path) -> None:
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


def test_an_adapter_that_is_trained_again_under_its_name(
    new_engine: StartEngine, tiny_llama: Path, manager: ManagerProcess, instance_id: str, tmp_path: Path
) -> None:
    adapter, options = tmp_path / "adapter", {"enable_lora": True, "max_lora_rank": 8}

    def start() -> Rig:
        engine = new_engine(VLLM, tiny_llama, **connected(manager.address, instance_id), **options)
        return Rig(engine, manager, instance_id).until_ready()

    truth = [write_adapter(tiny_llama, adapter, seed=1)]
    rig = start()
    for cached in (0, 192):
        answer = rig.fresh(ADAPTED, adapter=str(adapter))
        assert (answer.tokens, answer.cached_tokens) == (truth[0], cached)
    truth.append(write_adapter(tiny_llama, adapter, seed=2))
    assert truth[0] != truth[1]
    answer = rig.fresh(ADAPTED, adapter=str(adapter))  # vLLM goes on with the one that it has
    assert (answer.tokens, answer.cached_tokens) == (truth[0], 0)
    assert "its files changed after vLLM loaded it" in rig.engine.printed()
    for cached in (0, 192):
        answer = rig.fresh(ADAPTED, adapter=str(adapter), load_inplace=True)
        assert (answer.tokens, answer.cached_tokens) == (truth[1], cached)
    settle(rig.engine)
    rig.engine.close()
    answer = start().fresh(ADAPTED, adapter=str(adapter))
    assert (answer.tokens, answer.cached_tokens) == (truth[1], 192)
