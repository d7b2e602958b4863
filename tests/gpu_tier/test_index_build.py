"""The benchmark of building the wave index: what it compares, and that its rows say what was measured."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gpu_tier.eval.synth import Regime, kv
from gpu_tier.retrieval_config import RetroInferConfig

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture(autouse=True, scope="module")
def scripts_folder() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


def bench() -> ModuleType:
    return importlib.import_module("index_build")


def test_a_quick_run_states_nothing(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    assert bench().main(["--quick", "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert all(row["ok"] is None for row in rows)
    by_key = {(row["case"], row["metric"]): row for row in rows}
    build = by_key["4096 tokens, segments of 1024 against one", "build, median"]
    assert build["ratio"] == build["value"] / build["baseline"]
    for regime in Regime:
        recall = by_key[f"4096 tokens, segments of 1024 against one, {regime}", "recall@100"]
        assert 0.3 < recall["value"] <= 1
        assert recall["baseline"] == by_key["4096 tokens, segments of 4096", f"recall@100, {regime}"]["value"]


@pytest.mark.parametrize("segment", [256, 512, 1024])
def test_every_indexed_token_is_in_the_cluster_whose_mean_it_is_part_of(segment: int) -> None:
    sample = kv(1024, 16, 2, 2, Regime.MID, seed=0)
    settings = RetroInferConfig(segment=segment, update_segment=256)
    index = bench().index_of(1024, bench().build_prompt(sample.k[:, None], sample.v[:, None], settings))
    assert torch.all(index.cluster_of[:4] == -1)
    assert torch.all(index.cluster_of[-64:] == -1)
    inside = index.cluster_of[4:-64]
    assert torch.equal(inside.bincount(minlength=len(index.sizes)), index.sizes.long())
    for cluster in inside.unique().tolist():
        members = sample.k[index.cluster_of == cluster]
        torch.testing.assert_close(index.centroids[cluster], members.mean(0), rtol=1e-4, atol=1e-4)


def test_sides_are_gated_by_means_over_seeds() -> None:
    module = bench()
    size = module.Size(64, 32, 0.4, seeds=2, repeats=1)
    mine, whole = (
        module.Side([1.0, 1.0], {r: [0.5, 0.7] for r in Regime}),
        module.Side([2.0, 3.0], {r: [0.56, 0.6] for r in Regime}),
    )
    rows = {row.metric: row for row in module.claim_rows(size, {32: mine, 64: whole}, is_quick=False)}
    assert (rows["build, median"].ratio, rows["build, median"].ok) == (pytest.approx(0.4), True)
    assert rows["build, slowest of 2 pairs"].value == pytest.approx(0.5)
    assert rows["recall@100"].ok  # -0.06 and +0.1 are 0.02 on average
    assert rows["difference, largest"].value == pytest.approx(0.1)
    assert rows["difference, standard error"].value == pytest.approx(0.08)
    whole.recall = {r: [0.56, 0.59] for r in Regime}
    rows = {row.metric: row for row in module.claim_rows(size, {32: mine, 64: whole}, is_quick=False)}
    assert not rows["recall@100"].ok
