"""Each engine with its connector: a process loads the blocks of the one before, and answers the same as without us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_kinds import CONNECTED, TRANSFORMERS, EngineKind
from engine_process import EngineProcess, StartEngine, until
from manager_process import ManagerProcess
from tiny_models import prompt_tokens
from vllm_rig import Rig, connected, settle

_PROMPTS = [prompt_tokens(count, seed) for seed, count in enumerate((200, 330))]
_NEW = 16
_FEATURE = "saves, and another process loads"
_PACKAGE, _OLD_PACKAGE = "kvcm.connectors", "connectors"  # the old name goes on for one release


def vllm_options(manager: str, instance_id: str, package: str) -> dict[str, Any]:
    return connected(manager, instance_id, package=package, lookup_seconds=10.0)  # a busy machine is no miss


def sglang_options(manager: str, instance_id: str, package: str) -> dict[str, Any]:
    storage = {
        "backend_name": "kvcm",
        "module_path": f"{package}.sglang",
        "class_name": "KVCMStorage",
        "interface_v1": 1,
        "prefetch_threshold": 16,
        "manager": manager,
        "instance_group": "default",
        "instance_id": instance_id,
        "call_seconds": 2.5,  # a busy machine is no miss; more is not allowed together with the others
        "load_seconds": 5.0,
        "save_seconds": 5.0,
    }
    return {"storage": storage}


def transformers_options(manager: str, instance_id: str, _package: str) -> dict[str, Any]:
    settings = {"call_seconds": 10.0, "register_seconds": 20.0}
    place = {"manager": manager, "instance_group": "default", "instance_id": instance_id}
    return {"reuse": {**place, "block_tokens": 32, "settings": settings}}


_OPTIONS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "vllm": vllm_options,
    "sglang": sglang_options,
    "transformers": transformers_options,
}
_BLOCK_TOKENS = {"vllm": 32, "sglang": 16, "transformers": 32}


def is_saved(engine: EngineProcess, loadable: list[int]) -> bool:
    """Return whether SGLang finds all in the storage again: when it ends, it does not wait for its saves."""
    engine.ask("flush_cache")
    return answered(engine)[1] == loadable


def loadable_tokens(kind: EngineKind) -> list[int]:
    """Return how many tokens of each prompt can be loaded: whole blocks, and one token at least is computed."""
    block = _BLOCK_TOKENS[kind.name]
    return [(len(prompt) - 1) // block * block for prompt in _PROMPTS]


def answered(engine: EngineProcess) -> tuple[list[list[int]], list[int]]:
    answers = engine.generate(_PROMPTS, _NEW)
    return [answer.tokens for answer in answers], [answer.cached_tokens for answer in answers]


@pytest.fixture(scope="module")
def truth(shared_engines: StartEngine, tiny_llama: Path) -> list[list[int]]:
    """Return the answers of transformers without us."""
    return answered(shared_engines(TRANSFORMERS, tiny_llama))[0]


@pytest.mark.engines_smoke
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.feature(kind.name, _FEATURE), id=kind.name) for kind in CONNECTED]
)
def test_the_next_process_loads_and_answers_the_same(
    kind: EngineKind,
    new_engine: StartEngine,
    manager: ManagerProcess,
    instance_id: str,
    tiny_llama: Path,
    truth: list[list[int]],
) -> None:
    options = _OPTIONS[kind.name](manager.address, instance_id, _PACKAGE)
    loadable = loadable_tokens(kind)
    with new_engine(kind, tiny_llama, **options) as engine:
        if kind.name == "vllm":  # it starts to serve without waiting for the manager
            Rig(engine, manager, instance_id).until_ready()
        assert answered(engine) == (truth, [0, 0])
        if kind.name == "sglang":
            until(lambda: is_saved(engine, loadable))
        if kind.name == "vllm":
            settle(engine)
    options = _OPTIONS[kind.name](manager.address, instance_id, _OLD_PACKAGE)
    # SGLang allows a call less time than a busy machine may need: then a process loads nothing, and the next one does.
    for _ in range(2 if kind.name == "sglang" else 1):
        with new_engine(kind, tiny_llama, **options) as engine:
            if kind.name == "vllm":
                Rig(engine, manager, instance_id).until_ready()
            tokens, loaded = answered(engine)
        assert tokens == truth
        if any(loaded):
            break
    assert loaded == loadable
