"""Operations on a running SGLang: its metrics, attaching and detaching storage."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kinds import SGLANG
from engine_process import StartEngine, until
from manager_process import ManagerProcess
from sglang_rig import Rig, storage_config
from tiny_models import prompt_tokens


@pytest.fixture
def rig(new_engine: StartEngine, tiny_llama: Path, manager: ManagerProcess, instance_id: str, tmp_path: Path) -> Rig:
    """An engine with metrics."""
    config = storage_config(manager.address, instance_id, tmp_path / "record")
    engine = new_engine(SGLANG, tiny_llama, storage=config, enable_metrics=True)
    return Rig(engine, tmp_path / "record", manager, instance_id)


@pytest.mark.feature("sglang", "metrics")
def test_metrics_report_the_reused_tokens(rig: Rig) -> None:
    prompt = prompt_tokens(200, seed=1)
    rig.store(prompt)
    rig.forget()
    rig.generate(prompt)
    rig.generate(prompt_tokens(20, seed=2))  # figures are taken when the engine works
    figures = until(lambda: _figures(rig, "sglang:kvcm_loaded_blocks_total"))
    assert figures["sglang:kvcm_loaded_blocks_total"] == 12
    assert figures["sglang:kvcm_hit_blocks_total"] == 12
    assert figures["sglang:kvcm_saved_blocks_total"] >= 13
    assert figures["sglang:kvcm_loaded_bytes_total"] == 12 * rig.uri(rig.pages("load")[0].key).size
    assert figures["sglang:kvcm_lookup_seconds_count"] >= 2
    assert figures["sglang:prefetch_bandwidth_count"] >= 1
    assert figures["sglang:backup_pgs_sum"] >= 13


def test_storage_is_detached_and_attached_while_the_server_runs(rig: Rig) -> None:
    prompt = prompt_tokens(200, seed=3)
    computed = rig.store(prompt)
    assert "success" in rig.engine.ask("detach")
    until(lambda: rig.engine.ask("flush_cache"))
    alone = rig.generate(prompt)
    assert (alone.tokens, alone.cached_tokens) == (computed.tokens, 0)
    refused = rig.engine.ask("attach", extra=_config(rig, instance="x"))
    assert "option 'instance' is unknown; did you mean 'instance_id'?" in refused
    assert "success" in rig.engine.ask("attach", extra=_config(rig))
    rig.forget()
    again = rig.generate(prompt)
    assert (again.tokens, again.details["storage"]) == (computed.tokens, 192)


def _config(rig: Rig, **options: str) -> dict[str, object]:
    return storage_config(rig.manager.address, rig.instance_id, rig.record) | options


def _figures(rig: Rig, wanted: str) -> dict[str, float]:
    """Return the metrics by name, added up over their labels; nothing as long as one is missing."""
    figures: dict[str, float] = {}
    for line in rig.engine.ask("prometheus").splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            figures[name] = figures.get(name, 0.0) + float(value)
    return figures if figures.get(wanted) else {}
