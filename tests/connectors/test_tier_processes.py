"""One process prefills and publishes; another attaches and decodes the same tokens without prefill."""

from __future__ import annotations

import json
from typing import Any

import pytest
from manager_process import ManagerProcess
from memory_connector import MemoryConnector, MemoryStorage
from script_process import run_script
from sharing_rig import SHORT, Rig, continued
from tier_engine_process import TOKENS

from kvcm.gpu_tier.connector import KVFormat

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

PREFIX = 192  # full blocks that leave a token of the prompt
LAYERS = 3


def answer(*arguments: str) -> Any:
    return run_script("tier_engine_process.py", *arguments, beside="gpu_tier", GPU_TIER_KERNELS="reference")


@pytest.mark.parametrize(("model", "algorithm"), [("llama", "quest"), ("llama", "snapkv"), ("latent", "dsa")])
def test_another_process_needs_no_prefill(
    manager: ManagerProcess, instance_id: str, model: str, algorithm: str
) -> None:
    expected = continued(model, algorithm, TOKENS)
    first = answer(manager.address, instance_id, model, algorithm)
    assert first.items() >= {"tokens": expected, "attached": 0, "steps": 7, "written": 12}.items()
    second = answer(manager.address, instance_id, model, algorithm)
    assert second.items() >= {"tokens": expected, "attached": PREFIX, "steps": 1, "written": 0}.items()


# Indexes of a layer that the prefix has whole: of RetroInfer segments, of PQCache the codebook.
WHOLE = {"retroinfer": 5 * LAYERS, "pqcache": LAYERS}


@pytest.mark.parametrize("algorithm", WHOLE)
def test_another_process_takes_the_index_over(manager: ManagerProcess, instance_id: str, algorithm: str) -> None:
    expected = continued("llama", algorithm, TOKENS)
    first = answer(manager.address, instance_id, "llama", algorithm)
    assert first.items() >= {"tokens": expected, "attached": 0, "steps": 7, "written": 12, "imported": 0}.items()
    second = answer(manager.address, instance_id, "llama", algorithm)
    assert second.items() >= {"tokens": expected, "attached": PREFIX, "steps": 1, "written": 0}.items()
    assert second["imported"] == WHOLE[algorithm]
    assert second["built"] == first["built"] - WHOLE[algorithm]  # nothing twice


# Settings whose indexes are others': each of them clusters differently.
OTHERS: dict[str, dict[str, Any]] = {"retroinfer": {"iterations": 1}, "pqcache": {"seed": 1}}


@pytest.mark.parametrize("writer", ["none", "foreign"])
@pytest.mark.parametrize("algorithm", OTHERS)
def test_a_missing_or_foreign_index_is_built(
    manager: ManagerProcess, instance_id: str, algorithm: str, writer: str
) -> None:
    changed = {**SHORT[algorithm]["algo"], **OTHERS[algorithm]}
    parts = {**sidecars_of(algorithm), **sidecars_of(algorithm, algo=changed)}
    assert len(parts) == 2
    instance = (manager.address, instance_id, "llama")
    if writer == "none":
        assert answer(*instance, "full", "{}", json.dumps(parts))["written"] == 13  # its answer is exact, too
    else:
        first = answer(*instance, algorithm, json.dumps(OTHERS[algorithm]), json.dumps(parts))
        assert first["written"] == 12
        assert first["tokens"] == continued("llama", algorithm, TOKENS, algo=changed)
    second = answer(*instance, algorithm, "{}", json.dumps(parts))
    assert second.items() >= {"attached": PREFIX, "steps": 1, "imported": 0}.items()
    assert second["tokens"] == continued("llama", algorithm, TOKENS)
    assert second["built"] >= WHOLE[algorithm]


def sidecars_of(algorithm: str, **options: Any) -> dict[str, int]:
    """Return the spec of the sidecars of an engine, and their bytes."""
    found: dict[str, int] = {}

    def connect(_kv: KVFormat, _bytes: int, sidecars: dict[str, int]) -> MemoryConnector:
        found.update(sidecars)
        return MemoryConnector(MemoryStorage())

    Rig("llama", algorithm, connect, lambda _: (), **options)
    return found
