"""What the benchmarks of RetroInfer and PQCache run and publish, with small sizes and a stand-in for a device."""

from __future__ import annotations

from typing import Any

import pytest
from device_stand_in import device_run, found, install, script

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
