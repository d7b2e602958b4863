"""Weights that change inside a running SGLang: right tokens, reuse right after, and no pages of other weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from changed_weights import ADAPTED, NORM, answer_of, changes, write_adapter
from engine_kinds import SGLANG
from engine_process import StartEngine, until
from manager_process import ManagerProcess
from sglang_rig import Rig, storage_config
from tiny_models import prompt_tokens

NewRig = Callable[..., Rig]


@pytest.fixture
def new_rig(
    new_engine: StartEngine, tiny_llama: Path, manager: ManagerProcess, instance_id: str, tmp_path: Path
) -> NewRig:
    def start(record: str = "record", model: Path = tiny_llama, *, trusts: bool = False, **options: object) -> Rig:
        config = storage_config(manager.address, instance_id, tmp_path / record, trust_weight_version=trusts)
        engine = new_engine(SGLANG, model, storage=config, **options)
        ranks = int(str(options.get("tp_size", 1)))
        return Rig(engine, tmp_path / record, manager, instance_id, ranks)

    return start


def fresh(rig: Rig, prompt: list[int], **sampling: object) -> tuple[list[int], int]:
    """Answer a prompt of which only the storage may know anything, and wait until it is stored: tokens, loaded ones."""
    answer = rig.store(prompt, **sampling)
    return answer.tokens, answer.details.get("storage", 0)


def update(rig: Rig, command: str, model: Path, **arguments: object) -> None:
    """Update weights; as long as pages are being saved the flush that follows is refused."""
    until(lambda: rig.engine.ask(command, model=str(model), **arguments))


@pytest.mark.parametrize("ranks", [1, 2])
def test_changed_weights(
    new_rig: NewRig, new_engine: StartEngine, tiny_llama: Path, tmp_path: Path, ranks: int
) -> None:
    """One matrix, one element, and all of them (an adapter was merged), by SGLang's calls, which flush its cache."""
    two = {"tp_size": 2, "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}} if ranks == 2 else {}
    prompt, other = prompt_tokens(200, seed=6101), new_rig("other", **two)
    right, _ = fresh(other, prompt)
    assert fresh(other, prompt) == (right, 192)
    unchanged = new_rig() if ranks == 1 else None
    seen = {tuple(right)}
    for change, path in changes(tiny_llama, tmp_path):
        if change == "merged":
            update(other, "update_weights", path)
        else:
            update(other, "update_tensor", path, name=f"{NORM}.weight", flush_cache=True)
        truth = answer_of(new_engine, path, prompt)
        assert tuple(truth) not in seen, change
        seen.add(tuple(truth))
        for loaded in (0, 192):  # at once, and with reuse from the second time on
            assert fresh(other, prompt) == (truth, loaded), change
        if unchanged:
            assert fresh(unchanged, prompt) == (right, 192)
    update(other, "update_weights", tiny_llama)
    assert fresh(other, prompt) == (right, 192)  # as they were
    if unchanged:
        unchanged.engine.close()
        again = shutil.copytree(path, tmp_path / "again" / tiny_llama.name)
        restarted = new_rig("restarted", again)
        for loaded in (0, 192):
            assert fresh(restarted, prompt) == (truth, loaded)


def test_a_change_without_a_flush_is_noticed(new_rig: NewRig, tiny_llama: Path, tmp_path: Path) -> None:
    prompt, rig = prompt_tokens(200, seed=6102), new_rig()
    right, _ = fresh(rig, prompt)
    _, path = next(changes(tiny_llama, tmp_path))
    rig.forget()
    assert rig.engine.ask("update_tensor", model=str(path), name=f"{NORM}.weight", flush_cache=False)
    assert rig.generate(prompt).cached_tokens == 0
    assert "KV is not reused until SGLang's cache is flushed" in rig.engine.printed()
    assert rig.engine.ask("update_tensor", model=str(tiny_llama), name=f"{NORM}.weight", flush_cache=False)
    assert fresh(rig, prompt) == (right, 192)  # after a flush; what was computed meanwhile is not stored


def test_a_trusted_weight_version_names_the_weights(new_rig: NewRig, tiny_llama: Path, tmp_path: Path) -> None:
    prompt, rig = prompt_tokens(200, seed=6103), new_rig(trusts=True, weight_version="a")
    right, _ = fresh(rig, prompt)
    _, path = next(changes(tiny_llama, tmp_path))
    update(rig, "update_weights", path, version="b")
    changed, loaded = fresh(rig, prompt)
    assert (changed != right, loaded) == (True, 0)
    update(rig, "update_weights", tiny_llama)
    assert fresh(rig, prompt) == (right, 0)
    assert "the weights changed, and weight_version is 'b' as before" in rig.engine.printed()
    rig.engine.close()
    again = shutil.copytree(path, tmp_path / "again" / tiny_llama.name)
    assert fresh(new_rig("restarted", again, trusts=True, weight_version="b"), prompt) == (changed, 192)


def test_an_adapter_that_is_trained_again_under_its_name(new_rig: NewRig, tiny_llama: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    options = {"lora_paths": [f"a={adapter}"], "max_lora_rank": 8, "lora_backend": "torch_native"}
    truth = [write_adapter(tiny_llama, adapter, seed=1)]
    rig = new_rig(**options)
    for loaded in (0, 192):
        assert fresh(rig, ADAPTED, adapter="a") == (truth[0], loaded)
    truth.append(write_adapter(tiny_llama, adapter, seed=2))
    assert truth[0] != truth[1]
    assert fresh(rig, ADAPTED, adapter="a") == (truth[0], 192)  # SGLang goes on with the one that it has
    rig.engine.close()
    rig = new_rig("restarted", **options)
    for loaded in (0, 192):
        assert fresh(rig, ADAPTED, adapter="a") == (truth[1], loaded)
