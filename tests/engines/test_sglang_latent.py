"""SGLang with MLA: all ranks have the same latent rows, so one of them stores and all load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from engine_kinds import SGLANG
from engine_process import StartEngine
from manager_process import ManagerProcess
from sglang_rig import Rig, storage_config
from stored_parts import overwrite, swapped_halves
from tiny_models import prompt_tokens


@pytest.fixture(scope="module")
def latent(model_named: Callable[[str], Path]) -> Path:
    """Return a model with MLA."""
    return model_named("latent")


def _rig(engines: StartEngine, model: Path, manager: ManagerProcess, record: Path, name: str, **options: object) -> Rig:
    checks = {"checksums": options.pop("checksums", True)}
    engine = engines(SGLANG, model, storage=storage_config(manager.address, name, record, **checks), **options)
    return Rig(engine, record, manager, name)


@pytest.mark.feature("sglang", "latent rows (MLA)")
def test_latent_rows_come_back_in_another_layout(
    shared_engines: StartEngine, latent: Path, manager: ManagerProcess, tmp_path: Path
) -> None:
    name, prompt = f"latent-{uuid4().hex[:8]}", prompt_tokens(200, seed=1)
    rig = _rig(shared_engines, latent, manager, tmp_path / "one", name)
    computed = rig.store(prompt)
    saved = {page.key: page.digest for page in rig.pages("save")}
    rig.forget()
    reused = rig.generate(prompt)
    assert (reused.tokens, reused.details["storage"]) == (computed.tokens, 192)
    assert all(page.digest == saved[page.key] == rig.stored_digest(page.key) for page in rig.pages("load"))

    trusting = {"checksums": False, "hicache_mem_layout": "layer_first"}
    other = _rig(shared_engines, latent, manager, tmp_path / "other", name, **trusting)
    answer = other.generate(prompt)
    assert (answer.tokens, answer.details["storage"]) == (computed.tokens, 192)
    assert {page.key: page.digest for page in other.pages("load")}.items() <= saved.items()
    for key in saved:
        overwrite(rig.uri(key), swapped_halves)
    other.forget()
    assert other.generate(prompt).tokens != computed.tokens  # the answer comes from the loaded rows


@pytest.mark.feature("sglang", "latent rows (MLA)")
def test_one_rank_stores_for_all(
    new_engine: StartEngine, latent: Path, manager: ManagerProcess, tmp_path: Path
) -> None:
    name, prompt = f"latent-{uuid4().hex[:8]}", prompt_tokens(200, seed=2)
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    rig = _rig(new_engine, latent, manager, tmp_path / "record", name, tp_size=2, environment=cores)
    computed = rig.store(prompt)
    rig.forget()
    reused = rig.generate(prompt)
    assert (reused.tokens, reused.details["storage"]) == (computed.tokens, 192)
    rig.ranks = 2
    loaded = [{page.key: page.digest for page in rig.pages("load", rank)} for rank in range(2)]
    assert loaded[0].items() <= loaded[1].items()
    assert not rig.pages("save", rank=1)
    stored = rig.locations(list(loaded[0]))
    assert {part for location in stored if location for part in location.uris} == {"tp0"}
