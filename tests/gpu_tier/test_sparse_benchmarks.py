"""What the benchmarks of RetroInfer and PQCache run and publish, with small sizes and a stand-in for a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_stand_in import device_run, found, install, late_after, script

from gpu_tier.runtime import NullRuntime


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


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
def test_what_is_attended_to_is_compared_with_what_was_stored(algorithm: str) -> None:
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


@pytest.mark.parametrize(("micros", "ok"), [(149.0, True), (151.0, False)])
def test_look_up_and_gathering_have_a_bar(micros: float, ok: bool) -> None:
    this = device_run()
    script("k10_breakdown").add_part(this, "case", [micros * 8e-6] * 3, 8, 150.0)
    assert [(row.value, row.ok) for row in this.rows] == [(pytest.approx(micros), ok), (pytest.approx(micros), None)]


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


@pytest.mark.parametrize("batches", [1, 3, 4])
def test_k4_compares_no_budget_where_batches_are_left_out(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    this = device_run()
    bench = k4_bench(monkeypatch, this)
    late_after(monkeypatch, this, "tokens/s, attention layers alone", batches)
    bench.compare()
    assert len(found(this, "tokens/s, attention layers alone")) == batches
    assert found(this, "left out: no time left")
    assert not [row for row in this.rows if "one budget" in row.case]


def test_the_goal_counts_only_where_a_ratio_is_stated() -> None:
    layers = script("scaled_layers")
    for share, verdicts in ((0.9, [(">= 3.0", False), ("", None)]), (0.7, [("", None), ("", None)])):
        this = device_run()
        scaled = layers.Layers(this, script("tiny_llama").TINY_LLAMA, 2)
        theirs = layers.Speed("full", 1, 10.0, 10.0, False)
        scaled.compare("case", layers.Speed("wave", 3, 25.0, 29.0, False), theirs, share, 3.0)
        assert [(row.target, row.ok) for row in this.rows] == verdicts


def test_batches_are_limited_by_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    k4 = script("k4_wave_decode")
    config = k4.wave_config(k4.FULL.settings, 64)
    sizes = {gib: k4.replace(k4.FULL, host_bytes=gib << 30).most(config, 122880) for gib in (8, 64, 400)}
    assert sizes[8] < sizes[64] < sizes[400]
    assert k4.FULL.most(k4.FULL_ATTENTION, 122880) == 4
    assert sizes[400] > 20
    monkeypatch.setattr(k4, "available_bytes", lambda: 64 << 30)
    settled = k4.FULL.settled()
    monkeypatch.setattr(k4, "available_bytes", lambda: 1 << 30)  # the store is there
    assert (
        settled.most(config, 122880) == k4.replace(k4.FULL, host_bytes=int(0.8 * (64 << 30))).most(config, 122880) > 1
    )
    on_device = k4.wave_config(k4.replace(k4.FULL.settings, control="gpu"), 64)
    assert k4.FULL.on_device(on_device, 122880) < k4.FULL.on_device(config, 122880)  # a larger cache


@pytest.mark.parametrize(
    ("name", "cases"),
    [("k4_wave_decode", 1), ("k5_million", 3), ("k7_pq_search", 2), ("k9_end_to_end", 1), ("k10_breakdown", 4)],
)
def test_a_late_script_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch, name: str, cases: int) -> None:
    module, this = script(name), device_run()
    if name == "k5_million":  # what is measured before the first way that can be left out
        monkeypatch.setattr(module, "full_share", lambda *_: 0.9)
        monkeypatch.setattr(module.Size, "batch", lambda _: 2)
    monkeypatch.setattr(script("device_run"), "_LATE_SECONDS", -1.0)
    module.measure(this)
    assert [row.metric for row in this.rows] == ["left out: no time left"] * cases


def k9_bench(shares: dict[int, float], **peaks: float) -> Any:
    """Return a bench of K9 whose model is not run."""
    k9 = script("k9_end_to_end")
    return k9.Bench(device_run(**peaks), k9.SMOKE, None, shares)


def steps(**milliseconds: float) -> Any:
    """Return what was measured of a way: ``b1=…, b2=…`` milliseconds of a step, and `ingest`."""
    k9, samples = script("k9_end_to_end"), script("device_clock").Samples
    ingest = milliseconds.pop("ingest", 0.0) / 1e3
    return k9.Found(ingest, {int(name[1:]): samples((taken / 1e3,)) for name, taken in milliseconds.items()})


def test_k9_says_from_which_output_on_a_way_is_worth_it() -> None:
    bench = k9_bench({1: 0.9, 2: 0.9})
    bench.compare("wave", steps(b1=12.0, b2=14.0, b3=15.0, ingest=500.0), steps(b1=10.0, b2=18.0, ingest=100.0))
    rows = {(row.case.removeprefix("n=300, wave, "), row.metric): row.value for row in bench.this.rows}
    assert rows == {
        ("B=1: the same batch", "speed-up over full at B=1"): pytest.approx(10 / 12),
        ("B=1", "never done before full attention of the same batch"): pytest.approx(-2000.0),
        ("B=2: the same batch", "speed-up over full at B=2"): pytest.approx(18 / 14),
        ("B=2", "output of a request from which on it is worth it"): pytest.approx(2 * 400 / 4),
        ("B=3: what fits", "speed-up over full at B=2"): pytest.approx(3 / 15 / (2 / 18)),
    }


def test_k9_states_nothing_over_a_slow_baseline() -> None:
    bench = k9_bench({1: 0.7})
    bench.compare("wave", steps(b1=1.0), steps(b1=10.0))
    assert [row.metric.partition(":")[0] for row in bench.this.rows] == ["no speed-up over full at B=1 stated"] * 2


def test_k9_tries_what_device_and_host_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    k9 = script("k9_end_to_end")
    ways = k9.FULL.ways()
    for host_gib, expected in ((125, (3, 4, 6)), (60, (3, 2, 3)), (1, (3, 0, 0))):
        monkeypatch.setattr(k9, "available_bytes", lambda gib=host_gib: gib << 30)
        assert tuple(k9.FULL.most(config, 78 << 30) for config in ways.values()) == expected


def test_a_prefill_has_the_operations_of_its_layers() -> None:
    k8, k9 = script("k8_index_build"), script("k9_end_to_end")
    assert k9.operations(k9._SHAPE, 1000) == 32 * k8.FULL.operations(1000)


def test_one_stream_waits_for_nothing_and_orders_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    made = script("one_stream")
    assert isinstance(made.serial_runtime(torch.device("cpu")), NullRuntime)
    runtime = object.__new__(made._OneStream)
    with runtime.stream("h2d"):
        runtime.fence(object(), "compute")
