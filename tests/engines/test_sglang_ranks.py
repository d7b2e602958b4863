"""SGLang with two tensor-parallel ranks: each stores and loads its own heads, and a page counts when all have it."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from engine_kinds import SGLANG
from engine_process import StartEngine, until
from manager_process import ManagerProcess
from sglang_rig import PAGE_TOKENS, Rig, storage_config
from stored_parts import overwrite
from tiny_models import prompt_tokens

_PARTS = ("tp0", "tp1")


@pytest.fixture(scope="module")
def rig(
    shared_engines: StartEngine, tiny_llama: Path, manager: ManagerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Rig:
    """An engine of two ranks, each on a core of its own: else they spin against each other."""
    instance_id, record = f"ranks-{uuid4().hex[:8]}", tmp_path_factory.mktemp("pages") / "record"
    config = storage_config(manager.address, instance_id, record)
    engine = shared_engines(
        SGLANG, tiny_llama, storage=config, tp_size=2, environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    )
    return Rig(engine, record, manager, instance_id, ranks=2)


@pytest.mark.feature("sglang", "tensor parallel: 2 ranks")
def test_each_rank_loads_the_heads_that_it_stored(rig: Rig) -> None:
    prompt = prompt_tokens(200, seed=1)
    computed = rig.store(prompt)
    saved = [{page.key: page.digest for page in rig.pages("save", rank)} for rank in range(2)]
    rig.forget()
    reused = rig.generate(prompt)
    assert reused.tokens == computed.tokens
    assert reused.details["storage"] == 192
    for rank, part in enumerate(_PARTS):
        loaded = rig.pages("load", rank)
        assert len(loaded) == 12
        assert all(page.digest == saved[rank][page.key] == rig.stored_digest(page.key, part) for page in loaded)
    assert saved[0].keys() == saved[1].keys()
    assert not set(saved[0].values()) & set(saved[1].values())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.feature("sglang", "tensor parallel: 2 ranks")
def test_a_page_that_one_rank_cannot_load_ends_the_prefix_of_both(rig: Rig, rank: int) -> None:
    prompt = prompt_tokens(200, seed=2 + rank)
    computed = rig.store(prompt)
    page = rig.pages("save")[4]
    overwrite(rig.uri(page.key, _PARTS[rank]), lambda stored: bytes(len(stored)))
    rig.forget()
    reused = rig.generate(prompt)
    assert reused.tokens == computed.tokens
    assert reused.details["storage"] == 4 * PAGE_TOKENS
    assert [found.ok for found in rig.pages("load", rank)][4] is False
    assert [found.ok for found in rig.pages("load", 1 - rank)][4] is True
    until(lambda: page.key in {found.key for found in rig.pages("save", rank)})
    rig.forget()
    assert rig.generate(prompt).details["storage"] == 192
