"""What the GPU benchmarks publish on a device, with small sizes and a stand-in for the device's events and graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from device_stand_in import device_run, found, install, script


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


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


@pytest.mark.parametrize(
    ("name", "cases"), [("k1_io_transfer", 5), ("k2_lru_diff", 1), ("k3_decode_attention", 4), ("k6_dsa_decode", 2)]
)
def test_a_late_script_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch, name: str, cases: int) -> None:
    this = device_run()
    monkeypatch.setattr(script("device_run"), "_LATE_SECONDS", -1.0)
    script(name).measure(this)
    assert [row.metric for row in this.rows] == ["left out: no time left"] * cases


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
