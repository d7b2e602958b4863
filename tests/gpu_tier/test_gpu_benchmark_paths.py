"""What the GPU benchmarks publish on a device, with small sizes and a stand-in for the device's events and graphs."""

from __future__ import annotations

import importlib
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

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
    """A graph that remembers nothing: whoever replays it only wants the time."""

    def replay(self) -> None:
        return None


class Stream:
    def __init__(self, *_: Any) -> None:
        return None

    def wait_stream(self, other: Stream) -> None:
        return None


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("GPU_TIER_KERNELS", "reference")
    for name, value in {
        "Event": Event, "Stream": Stream, "CUDAGraph": Graph, "current_stream": Stream,
        "stream": lambda _: nullcontext(), "graph": lambda _: nullcontext(), "synchronize": lambda _: None,
        "_sleep": lambda _: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    script("checkout")  # first: it makes the others importable


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def device_run(**peaks: float) -> Any:
    """Return a run that believes to be on a device with these peaks."""
    clock = script("device_clock").DeviceClock(torch.device("cpu"), steps=2, repetitions=1)
    clock.is_gpu = True
    this = script("device_run").DeviceRun(clock, is_smoke=False, is_quick=True)
    this._peaks = script("device_run").Peaks(**{"hbm": 1e12, "h2d": 1e9, "d2h": 1e9, "flops": 1e12} | peaks)
    return this


def found(this: Any, metric: str) -> list[Any]:
    return [row for row in this.rows if metric in row.metric]


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


def test_a_late_script_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    k1, this = script("k1_io_transfer"), device_run()
    monkeypatch.setattr(script("device_run"), "_LATE_SECONDS", -1.0)
    k1.measure(this)
    assert [row.metric for row in this.rows] == ["left out: no time left"] * len(k1.CASES)


def test_the_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132, total_memory=1 << 36)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    described = script("device_run")._described(device_run())
    assert described["name"] == "NVIDIA H100"
    assert {"driver", "cuda", "torch", "triton", "command", "clocks, memory in use before"} <= described.keys()
