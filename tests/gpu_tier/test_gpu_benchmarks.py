"""The GPU benchmarks run on a CPU with tiny sizes, state nothing there, and say what they need."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcm.gpu_tier.eval.synth import Regime
from kvcm.gpu_tier.runtime import NullRuntime

pytestmark = pytest.mark.ci

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"


NAMES = [
    "k1_io_transfer", "k2_lru_diff", "k3_decode_attention", "k4_wave_decode", "k5_million", "k6_dsa_decode",
    "k7_pq_search", "k8_index_build", "k9_end_to_end", "k10_breakdown", "check_device",
]  # fmt: skip


CHECKS = ("bytes are equal", "buffer equals host", "all requests decode this way", "largest relative difference")


@pytest.fixture(autouse=True, scope="module")
def scripts_folder() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what smoke runs wrote."""
    return tmp_path_factory.mktemp("results")


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def smoke(name: str, results: Path) -> dict[str, Any]:
    """Return the document of a smoke run; one run serves all tests."""
    target = results / f"{name}.json"
    if not target.exists():
        assert script(name).main(["--cpu-smoke", "--json", str(target)]) == 0
    document: dict[str, Any] = json.loads(target.read_text())
    return document


@pytest.mark.parametrize("name", NAMES)
def test_a_smoke_run_states_nothing(name: str, results: Path) -> None:
    document = smoke(name, results)
    assert document["rows"]
    for row in document["rows"]:
        if row["metric"] in CHECKS:
            assert row["ok"]
            continue
        assert row["metric"].startswith("CPU smoke, meaningless: ")
        assert "speed-up" not in row["metric"]
        assert (row["baseline"], row["ratio"], row["target"], row["ok"]) == (None, None, "", None)
    assert document["machine"]["device"]["name"] == "CPU smoke: no figure here means anything"
    with (results / f"{name}.csv").open() as file:
        assert (len(list(csv.reader(file))) > 2) is (name != "check_device")


def test_every_kernel_is_checked() -> None:
    module = script("kernel_checks")
    checked = {check.kernel for check in module.checks(NullRuntime(), script("check_device").SMOKE)}
    kernels = {path.parent.name for path in (SCRIPTS.parents[1] / "gpu_tier" / "kernels").glob("*/ref.py")}
    assert checked == kernels


def values(document: dict[str, Any], metric: str) -> list[float]:
    return [row["value"] for row in document["rows"] if row["metric"].endswith(metric)]


def test_bytes_are_compared_before_they_are_timed(results: Path) -> None:
    assert values(smoke("k1_io_transfer", results), "bytes are equal") == [1] * 5


def test_the_hit_rate_is_what_the_row_says(results: Path) -> None:
    assert values(smoke("k2_lru_diff", results), "hit rate counted") == [pytest.approx(0.75, abs=0.01)]
    document = smoke("k6_dsa_decode", results)
    assert values(document, "hit rate counted") == [pytest.approx(0.75, abs=0.01)] * 2
    assert values(document, "buffer equals host") == [1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_no_script_measures_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert script(name).main([]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert script(name).MEASURES in printed.err


@pytest.mark.parametrize(("share", "stated"), [(0.74, False), (0.76, True)])
def test_a_speed_up_needs_a_baseline_worth_beating(share: float, stated: bool) -> None:
    module, clock = script("device_run"), script("device_clock")
    this = module.DeviceRun(clock.DeviceClock(torch.device("cpu"), 2, 1), is_smoke=False, is_quick=True)
    this.add_speed_up("case", "dense", 3.0, share, (True, True))
    (row,) = this.rows
    assert (row.ratio == 3.0) is stated
    assert row.metric.startswith("speed-up over dense" if stated else "no speed-up over dense stated")


@pytest.mark.parametrize(
    ("mine", "apart"), [([1.0, 2.0], 0.0), ([1.0, 2.5], 0.5 / 5**0.5), ([1.0, torch.nan], torch.inf)]
)
def test_differences_are_relative(mine: list[float], apart: float) -> None:
    found = script("check_device").difference(torch.tensor(mine), torch.tensor([1.0, 2.0]))
    assert found == pytest.approx(apart)


def test_a_trace_has_its_hit_rate_and_selects_each_token_once() -> None:
    trace = script("sliding_trace").SlidingTrace(3, 500, 100, 0.7, torch.device("cpu"))
    before = trace.select(0, 500)
    for step in range(1, 40):
        now = trace.select(step, 500 + step)
        assert now.shape == (3, 100)
        for row, old in zip(now.tolist(), before.tolist(), strict=True):
            assert row == sorted(set(row))
            assert row[-1] == 500 + step
            assert len(set(row[:-1]) - set(old)) == 30
        before = now


def test_samples_give_median_and_tail() -> None:
    samples = script("device_clock").Samples(tuple(range(1, 101)))
    assert (samples.median, samples.p95) == (50.5, 96)


def test_every_step_is_prepared_once_and_in_order() -> None:
    clock = script("device_clock").DeviceClock(torch.device("cpu"), steps=3, repetitions=2)
    prepared: list[int] = []
    samples = clock.samples(lambda: None, prepared.append)
    assert prepared == list(range(clock.total_steps))
    assert len(samples.seconds) == 6


@pytest.mark.parametrize(("layer_seconds", "stated"), [(1.30, True), (1.40, False)])
def test_what_an_index_costs_is_no_share_of_a_slow_layer(layer_seconds: float, stated: bool) -> None:
    k8, clock, run = script("k8_index_build"), script("device_clock"), script("device_run")
    this = run.DeviceRun(clock.DeviceClock(torch.device("cpu"), 2, 1), is_smoke=False, is_quick=True)
    k8.add_index(this, "case", clock.Samples((0.13,)), clock.Samples((layer_seconds,)), best=1.0, target=0.05)
    bound, share = this.rows[-2:]
    assert bound.value == pytest.approx(0.13)
    assert bound.ok is None
    if stated:
        assert (share.value, share.ok) == (pytest.approx(0.1), False)
    else:
        assert share.metric.startswith("no share of the layer stated")
        assert share.ok is None


def test_operations_of_a_layer_are_those_of_llama() -> None:
    size = script("k8_index_build").FULL
    # 218 million weights of a layer's products; half of the square of attention.
    assert size.operations(1) == pytest.approx(2 * 218.1e6, rel=1e-3)
    assert size.operations(2**17) - 2**17 * (size.operations(1) - 2 * 4096) == 2 * 2**34 * 4096


def test_ways_are_compared_at_one_budget() -> None:
    k6 = script("k6_dsa_decode")
    resident = k6.FULL.config.replaced(residency="device")
    for n_tokens in k6.FULL.lengths:
        assert k6.FULL.most(resident, n_tokens) < k6.FULL.most(k6.FULL.config, n_tokens)
    assert k6.FULL.sizes(7) == [1, 4, 7]
    assert k6.FULL.sizes(0) == []


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
