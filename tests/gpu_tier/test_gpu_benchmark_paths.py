"""What the GPU benchmarks publish on a device, with small sizes and a stand-in for the device's events and graphs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_stand_in import Stream, device_run, found, install, late_after, script


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def test_a_step_is_timed_between_its_events() -> None:
    clock = device_run().clock
    samples = clock.samples(lambda: None)
    assert samples.seconds == (0.002, 0.002)


def test_a_step_that_cannot_be_captured_is_timed_with_its_launches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_k1_states_shares_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    k1 = script("k1_io_transfer")
    case = k1.replace(k1.CASES[2], items=64)
    this = device_run(h2d=64 * 1152 / 0.002 / 0.69, d2h=64 * 1152 / 0.002 / 0.71)
    k1.measure_case(this, case, script("gpu_tier.runtime").NullRuntime())
    to_device, to_host = found(this, "speed to")
    assert (round(to_device.ratio, 2), to_device.ok) == (0.69, False)
    assert (round(to_host.ratio, 2), to_host.ok) == (0.71, True)
    assert [row.ok for row in found(this, "bytes are equal")] == [True]


def test_k2_compares_the_headline_with_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    k2 = script("k2_lru_diff")
    monkeypatch.setattr(k2, "HEADLINE", k2.SMOKE[0])
    monkeypatch.setattr(k2, "LAYERS", 4)
    this = device_run()
    k2.measure(this)
    (row,) = found(this, "plan of one layer")
    assert (row.value, row.ok) == (pytest.approx(500.0), False)
    assert found(this, "one graph")


@pytest.mark.parametrize(("share", "stated"), [(0.7, 0), (0.8, 1)])
def test_k3_states_a_speed_up_over_a_good_baseline_only(
    monkeypatch: pytest.MonkeyPatch, share: float, stated: int
) -> None:
    k3 = script("k3_decode_attention")
    monkeypatch.setattr(k3, "QUICK", [(*k3.CASES[2][:2], [(2, 128)])])
    monkeypatch.setattr(k3, "SELECTED", 16)
    this = device_run(hbm=2 * 128 * 1152 / 0.002 / share, flops=1e15)
    k3.measure(this)
    (row,) = found(this, "speed-up")
    assert row.metric.startswith("speed-up over full, ours") is bool(stated)
    (target,) = found(this, "KV read")
    assert (round(target.ratio, 2), target.ok) == (share, bool(stated))


def test_k6_states_ratios_at_one_budget_and_at_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    k6 = script("k6_dsa_decode")
    monkeypatch.setattr(k6, "QUICK", k6.SMOKE)
    this = device_run(hbm=1e7)
    k6.measure(this)
    cases = {row.case.rpartition(": ")[2] for row in found(this, "speed-up over resident, sparse")}
    assert cases == {"one budget of 0 GiB", "the same batch"}
    assert [row.ok for row in found(this, "buffer equals host")] == [True, True]
    (lru,) = [row for row in found(this, "share of the step") if "lru_diff alone" in row.case]
    assert (lru.ratio, lru.target, lru.ok) == (None, "<= 0.02", False)


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


@pytest.mark.parametrize(("batches", "hosts"), [(4, 0), (5, 0), (6, 1)])
def test_k6_compares_no_budget_where_batches_are_left_out(
    monkeypatch: pytest.MonkeyPatch, batches: int, hosts: int
) -> None:
    # Three resident batches, two dense ones, three hierarchical ones.
    bench, this = k6_bench(monkeypatch, hbm=1e12)
    made: list[int] = []
    host_pool = script("k6_dsa_decode").host_pool
    monkeypatch.setattr(script("k6_dsa_decode"), "host_pool", lambda *args: made.append(1) or host_pool(*args))
    late_after(monkeypatch, this, "tokens/s, attention layers alone", batches)
    bench.compare()
    assert len(found(this, "tokens/s, attention layers alone")) == batches
    assert found(this, "left out: no time left")
    assert len(made) == hosts
    assert not [row for row in this.rows if "one budget" in row.case]


@pytest.mark.parametrize(
    ("name", "cases"), [("k1_io_transfer", 5), ("k2_lru_diff", 1), ("k3_decode_attention", 4), ("k6_dsa_decode", 2)]
)
def test_a_late_script_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch, name: str, cases: int) -> None:
    this = device_run()
    monkeypatch.setattr(script("device_run"), "_LATE_SECONDS", -1.0)
    script(name).measure(this)
    assert [row.metric for row in this.rows] == ["left out: no time left"] * cases


def test_the_tests_for_a_gpu_have_what_is_left_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    check, this, given = script("check_device"), device_run(), []

    def ran(*_: Any, timeout: float, **__: Any) -> SimpleNamespace:
        given.append(timeout)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(check.subprocess, "run", ran)
    for seconds in (10.0, 470.0, 600.0):
        monkeypatch.setattr(type(this), "seconds", seconds)
        check.run_tests(this)
    assert given == [360, 100, 1]


def test_what_was_measured_is_published_when_a_case_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_kernel_that_fails_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_speed_up_compares_graphs_with_graphs() -> None:
    this = device_run()
    for graphs in ((True, True), (False, False), (True, False), (False, True)):
        this.add_speed_up("case", "dense", 3.0, 0.9, graphs)
    assert [row.metric for row in this.rows] == [
        "speed-up over dense",
        "speed-up over dense",
        "no speed-up over dense stated: only this was captured in a graph",
        "no speed-up over dense stated: only the baseline was captured in a graph",
    ]


def test_steps_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = device_run().clock, []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: made.append(Stream()) or made[-1])
    for _ in range(3):
        clock.captured(lambda: None)
    assert len(made) == 1


@pytest.mark.parametrize("name", ["k1_io_transfer", "k6_dsa_decode"])
def test_memory_that_could_not_be_pinned_is_not_measured(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    this, module = device_run(), script(name)
    pool = script("gpu_tier.pools.host_pool").HostKVPool
    monkeypatch.setattr(pool, "is_device_readable", property(lambda _: False))
    this.is_smoke = True  # small sizes
    with pytest.raises(RuntimeError, match="bytes of host memory could not be pinned"):
        module.measure(this)


def test_the_new_token_of_a_baseline_goes_where_the_next_one_belongs() -> None:
    k6, decode = script("k6_dsa_decode"), script("dsa_decode")
    clock = device_run().clock
    work = k6.Bench(device_run(), k6.SMOKE, 256).work(2, k6.SMOKE.config.replaced(residency="device"), 0.75)
    step = decode.Dense(work, None, script("gpu_tier.runtime").NullRuntime(), clock)
    for _ in range(2):
        assert step.written.tolist() == [int(step.seq_lens[0]) - 1, work.max_tokens + int(step.seq_lens[1]) - 1]
        step.prepare()


def test_the_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132, total_memory=1 << 36)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    described = script("device_run")._described(device_run())
    assert described["name"] == "NVIDIA H100"
    assert {"driver", "cuda", "torch", "triton", "command", "clocks, memory in use before"} <= described.keys()
