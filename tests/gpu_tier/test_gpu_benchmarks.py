"""What the GPU benchmarks publish on a device, with a stand-in for its events and graphs, and on a CPU: nothing."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcm.gpu_tier.eval.synth import Regime
from kvcm.gpu_tier.runtime import NullRuntime

pytestmark = pytest.mark.ci


SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"


class Event:
    """An event of a device on which every step takes 2 ms."""

    ticks = itertools.count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.tick = next(self.ticks)

    def elapsed_time(self, other: Event) -> float:
        return 2.0 * (other.tick - self.tick)


class Graph:
    """A graph that remembers nothing: only the time of its replay is read."""

    def replay(self) -> None:
        return None


class Stream:
    """A stream that is always done."""

    def __init__(self, *_: Any) -> None:
        return None

    def wait_stream(self, other: Stream) -> None:
        return None


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch and the scripts believe that there is a device."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("GPU_TIER_KERNELS", "reference")
    for name, value in {
        "Event": Event, "Stream": Stream, "CUDAGraph": Graph, "current_stream": Stream,
        "stream": lambda _: nullcontext(), "graph": lambda _, stream: nullcontext(), "synchronize": lambda _: None,
        "_sleep": lambda _: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    script("checkout")  # first: it makes the others importable


def script(name: str) -> ModuleType:
    """Return a script of the benchmarks."""
    return importlib.import_module(name)


def device_run(**peaks: float) -> Any:
    """Return a run that believes to be on a device with these peaks."""
    clock = script("device_clock").DeviceClock(torch.device("cpu"), steps=2, repetitions=1)
    clock.is_gpu = True
    this = script("device_run").DeviceRun(clock, is_smoke=False, is_quick=True)
    this._peaks = script("device_run").Peaks(**{"hbm": 1e12, "h2d": 1e9, "d2h": 1e9, "flops": 1e12} | peaks)
    return this


def found(this: Any, metric: str) -> list[Any]:
    """Return the rows of a run whose metric contains a text."""
    return [row for row in this.rows if metric in row.metric]


def test_a_step_that_cannot_be_captured_is_timed_with_its_launches(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def step() -> None:
        calls.append(1)
        if len(calls) == 4:  # the first three warm up
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    this = device_run()
    samples = this.time("case", step)
    assert not samples.is_graph
    assert capsys.readouterr().out.startswith(
        "not captured in a graph, timed with its launches: operation not permitted"
    )
    this.add_time("case", samples)
    assert this.rows[0].metric == "time, median (launched one by one)"


@pytest.mark.parametrize(("share", "stated"), [(0.7, 0), (0.8, 1)])
def test_k3_speed_ups_are_over_a_good_baseline_only(monkeypatch: pytest.MonkeyPatch, share: float, stated: int) -> None:
    k3 = script("k3_decode_attention")
    monkeypatch.setattr(k3, "QUICK", [(*k3.CASES[2][:2], [(2, 128)])])
    monkeypatch.setattr(k3, "SELECTED", 16)
    this = device_run(hbm=2 * 128 * 1152 / 0.002 / share, flops=1e15)
    k3.measure(this)
    (row,) = found(this, "speed-up")
    assert row.metric.startswith("speed-up over full, ours") is bool(stated)
    (target,) = found(this, "KV read")
    assert (round(target.ratio, 2), target.ok) == (share, bool(stated))


def test_measured_rows_are_published_when_a_case_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(this: Any) -> None:
        this.add_time("case", this.time("case", lambda: None))
        raise ValueError("broken")

    target = tmp_path / "found.json"
    assert script("device_run").run("A claim.", "nothing", measure, ["--cpu-smoke", "--json", str(target)]) == 1
    rows = json.loads(target.read_text())["rows"]
    assert [row["case"] for row in rows] == ["case", "case", "the run"]
    assert (rows[-1]["metric"], rows[-1]["ok"]) == ("stopped: ValueError: broken", False)
    assert len(target.with_suffix(".csv").read_text().splitlines()) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_failing_kernel_hides_no_others(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check, this = script("check_device"), device_run()

    def broken(impl: str) -> tuple[torch.Tensor, ...]:
        if impl == "triton":
            raise ValueError("illegal address")
        return (torch.ones(2),)

    good = script("kernel_checks").Check("lse_merge", "good", lambda _: (torch.ones(2),))
    bad = script("kernel_checks").Check("lse_merge", "bad", broken)
    monkeypatch.setattr(check, "checks", lambda *_: [bad, good])
    monkeypatch.setattr(check, "run_tests", lambda _: None)
    check.measure(this)
    assert {(row.case, row.ok) for row in this.rows if "triton" in row.case} == {
        ("lse_merge, triton: bad", False), ("lse_merge, triton: good", True),
    }  # fmt: skip
    assert found(this, "failed: ValueError: illegal address")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("share", "graphs", "reason"),
    [
        (0.76, (True, True), ""),
        (0.74, (True, True), "full attention reaches less than 0.75 of the roofline"),
        (0.9, (False, False), ""),
        (0.9, (True, False), "only this was captured in a graph"),
        (0.9, (False, True), "only the baseline was captured in a graph"),
    ],
)
def test_a_speed_up_needs_a_good_baseline_timed_equally(share: float, graphs: tuple[bool, bool], reason: str) -> None:
    this = device_run()
    this.add_speed_up("case", "dense", 3.0, share, graphs)
    (row,) = this.rows
    assert row.metric == (f"no speed-up over dense stated: {reason}" if reason else "speed-up over dense")
    assert (row.ratio == 3.0) is not bool(reason)


def system(batch: int = 2, algorithm: str = "wave", n_prompt: int = 300) -> Any:
    """Return tiny requests."""
    k4, tiny = script("k4_wave_decode"), script("tiny_llama")
    control = "gpu" if algorithm == "wave, gpu" else "cpu"
    config = k4.wave_config(k4.replace(tiny.TINY_WAVE, control=control, exec_factor=4), tiny.TINY_PAGE)
    if algorithm == "gpu_only":
        config = config.replaced(residency="device")
    if algorithm == "codes":
        config = k4.SparseConfig("pqcache", page_size=tiny.TINY_PAGE, algo=tiny.TINY_PQ)
    work = script("sparse_system").Work(tiny.TINY_LLAMA, config, batch, n_prompt, 16)
    return script("sparse_system").SparseSystem(work, device_run().clock, NullRuntime())


@pytest.mark.parametrize("algorithm", ["wave", "wave, gpu", "codes", "gpu_only"])
def test_attended_rows_are_compared_with_the_stored_ones(algorithm: str) -> None:
    made = system(algorithm=algorithm)
    step = script("sparse_decode").SparseDecode(made, 2, 0.5)
    assert step.is_right()
    if algorithm.startswith("wave"):
        made.manager.blocks.store.data.zero_()
    elif algorithm == "codes":
        made.manager.host.data.zero_()
    else:
        made.manager.tables.table.add_(1)
        made.retrieved_tokens = lambda head, ids, of=made.retrieved_tokens: of(head, ids) + 1
    step.prepare()
    assert not step.is_right()
    made.close()


def k4_bench(monkeypatch: pytest.MonkeyPatch, this: Any) -> Any:
    """Return a bench of K4 in which full attention fits with one and two requests, the wave index with three."""
    k4 = script("k4_wave_decode")
    sweep = k4.replace(k4.SMOKE, batches=(1, 2), hit_rates=((0.5,), ()), controls=("cpu",))
    monkeypatch.setattr(
        k4.Sweep,
        "most",
        lambda _sweep, config, _n: 2 if config.algorithm == "full" or config.residency == "device" else 3,
    )
    return k4.Bench(this, sweep, 300)


def test_k4_gates_each_ratio_by_full_attention_at_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    this = device_run(flops=1e15)
    bench = k4_bench(monkeypatch, this)
    shares = {1: 0.5, 2: 0.9}
    monkeypatch.setattr(script("k4_wave_decode"), "dense_share", lambda _run, _shape, batch, *_: shares[batch])
    bench.compare()
    stated = {row.case for row in this.rows if row.metric.startswith("speed-up")}
    refused = {row.case for row in found(this, "no speed-up over full")}
    wave = "wave, control cpu, hit rate 0.50 (input)"
    assert f"n=300: one budget of 0 GiB, {wave}, B=3" in stated
    assert stated >= {f"n=300: the same batch, {wave}, B=2", "n=300: the same batch, wave, gpu_only, B=2"}
    assert refused == {f"n=300: the same batch, {way}, B=1" for way in (wave, "wave, gpu_only")}
    assert all(row.ok for row in found(this, "buffer equals host"))


def test_the_goal_counts_only_where_a_ratio_is_stated() -> None:
    layers = script("scaled_layers")
    for share, verdicts in ((0.9, [(">= 3.0", False), ("", None)]), (0.7, [("", None), ("", None)])):
        this = device_run()
        scaled = layers.Layers(this, script("tiny_llama").TINY_LLAMA, 2)
        theirs = layers.Speed("full", 1, 10.0, 10.0, False)
        scaled.compare("case", layers.Speed("wave", 3, 25.0, 29.0, False), theirs, share, 3.0)
        assert [(row.target, row.ok) for row in this.rows] == verdicts


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        *(("k1_io_transfer", 5), ("k2_lru_diff", 1), ("k3_decode_attention", 4), ("k4_wave_decode", 1)),
        *(("k5_million", 3), ("k6_dsa_decode", 2), ("k7_pq_search", 2), ("k9_end_to_end", 1), ("k10_breakdown", 4)),
    ],
)
def test_a_late_script_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch, name: str, cases: int) -> None:
    module, this = script(name), device_run()
    if name == "k5_million":  # measured before the first way that can be left out
        monkeypatch.setattr(module, "full_share", lambda *_: 0.9)
        monkeypatch.setattr(module.Size, "batch", lambda _: 2)
    monkeypatch.setattr(script("device_run"), "_LATE_SECONDS", -1.0)
    module.measure(this)
    assert [row.metric for row in this.rows] == ["left out: no time left"] * cases


def test_a_step_is_timed_between_its_events() -> None:
    clock = device_run().clock
    samples = clock.samples(lambda: None)
    assert samples.seconds == (0.002, 0.002)


def k6_bench(monkeypatch: pytest.MonkeyPatch, hbm: float) -> tuple[Any, Any]:
    """Return a bench of K6 whose dense attention fits with one and with two requests, and its run."""
    k6, this = script("k6_dsa_decode"), device_run(hbm=hbm, flops=1e15)
    sweep = k6.replace(k6.SMOKE, batches=(1, 2))
    monkeypatch.setattr(k6.Sweep, "most", lambda _sweep, config, _n: 2 if config.algorithm == "full" else 3)
    return k6.Bench(this, sweep, 256), this


def test_k6_gates_each_ratio_by_dense_attention_at_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, this = k6_bench(monkeypatch, hbm=1e12)
    shares = {1: 0.5, 2: 0.9}
    monkeypatch.setattr(type(bench), "dense_share", lambda _bench, batch, _speed: shares[batch])
    bench.compare()
    stated = {row.case.rpartition("(input), ")[2] for row in found(this, "speed-up over resident") if row.unit == "x"}
    refused = {
        row.case.rpartition("(input), ")[2]: row.metric.rpartition(": ")[2]
        for row in found(this, "no speed-up over resident")
    }
    assert stated == {"B=3: one budget of 0 GiB", "B=2: the same batch"}
    assert refused == {
        "B=1: the same batch": "full attention reaches less than 0.75 of the roofline",
        "B=3: the same batch": "full attention was not measured there",
    }


def test_steps_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = device_run().clock, []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: made.append(Stream()) or made[-1])
    for _ in range(3):
        clock.captured(lambda: None)
    assert len(made) == 1


def test_the_new_token_of_a_baseline_goes_where_the_next_one_belongs() -> None:
    k6, decode = script("k6_dsa_decode"), script("dsa_decode")
    clock = device_run().clock
    work = k6.Bench(device_run(), k6.SMOKE, 256).work(2, k6.SMOKE.config.replaced(residency="device"), 0.75)
    step = decode.Dense(work, None, script("kvcm.gpu_tier.runtime").NullRuntime(), clock)
    for _ in range(2):
        assert step.written.tolist() == [int(step.seq_lens[0]) - 1, work.max_tokens + int(step.seq_lens[1]) - 1]
        step.prepare()


@pytest.mark.parametrize(
    ("algorithm", "rate"), [("wave", 0.8), ("wave", 0.0), ("wave, gpu", 0.0), ("wave, gpu", 1.0), ("codes", 0.5)]
)
def test_the_hit_rate_counted_is_the_one_put_in(algorithm: str, rate: float) -> None:
    made = system(algorithm=algorithm, n_prompt=300 if algorithm == "codes" else 2400)
    step = script("sparse_decode").SparseDecode(made, 2, rate)
    for _ in range(4):
        step.prepare()
        step.run()
    counted = script("sparse_decode").counted_hit_rate(step)
    made.close()
    assert counted == pytest.approx(rate, abs=0.04)


def test_rows_of_layers_and_requests_differ() -> None:
    tiny = script("tiny_llama")
    kv = script("planted_kv").PlantedKV(tiny.TINY_LLAMA.geometry, torch.device("cpu"), 4096)
    one = kv.raw(0, 0, 0, 5, 25)
    assert one.shape == (20, 2, 32)
    assert torch.equal(kv.raw(0, 0, 0, 10, 12), one[5:7])
    for layer, part, request in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(kv.raw(layer, part, request, 5, 25), one)


def test_tokens_that_return_are_those_of_some_blocks_and_the_others_are_new() -> None:
    made = system(batch=1, algorithm="codes")
    fed = script("fed_selections").fed_selections(made, 1, 0.4)
    _, k = made.algorithm.budgets.tokens(300)
    hot = min(round(0.4 * k), 32)
    seen = []
    for step in range(3):
        fed.prepare(step)
        rows = fed.indices[0, 0].tolist()
        assert all(row == sorted(set(row)) and len(row) == k for row in rows)
        seen.append(set(rows[0]))
    made.close()
    assert len(seen[0] & seen[1]) == len(seen[0] & seen[2]) == hot


def test_parts_of_a_step_are_taken_apart() -> None:
    k10 = script("k10_breakdown")
    this, made = device_run(), system()
    on_device, on_host = k10.parts_of(this, script("sparse_decode").SparseDecode(made, 2, 0.5))
    made.close()
    # The stand-in's clock ticks once an event: 2 ms for each part, in each of four layers.
    assert set(on_device) == set(script("sparse_decode").PARTS)
    assert all(seconds == pytest.approx([0.008] * this.clock.steps) for seconds in on_device.values())
    assert all(0 < taken < 10 for seconds in on_host.values() for taken in seconds)


NAMES = [
    "k1_io_transfer", "k2_lru_diff", "k3_decode_attention", "k4_wave_decode", "k5_million", "k6_dsa_decode",
    "k7_pq_search", "k8_index_build", "k9_end_to_end", "k10_breakdown", "check_device",
]  # fmt: skip


CHECKS = ("bytes are equal", "buffer equals host", "all requests decode this way", "largest relative difference")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what smoke runs wrote."""
    return tmp_path_factory.mktemp("results")


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


def test_a_quick_run_states_nothing(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    assert script("index_build").main(["--quick", "--json", str(target)]) == 0
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
    module = script("index_build")
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
