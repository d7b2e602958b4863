"""The planner and its command: no plan breaks a limit, and none is smaller than it has to be."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.cli import main
from gpu_tier.config import ALGORITHMS, SparseConfig
from gpu_tier.errors import ConfigError
from gpu_tier.eval.model_shapes import MODEL_SHAPES, Device, ModelShape, model_shape
from gpu_tier.eval.plan import Limits, Plan, Workload, advise, fixed_bytes, plan, time_of

LLAMA, DEEPSEEK = model_shape("llama3-8b"), model_shape("deepseek-v3.2")
DEVICE = Device()
GIB = 1 << 30
LONG = Workload(128 * 1024, 0.85)

limits_of_machines = st.builds(
    Limits,
    gpu_bytes=st.integers(1, 300).map(lambda gib: gib * GIB),
    host_bytes=st.integers(0, 2000).map(lambda gib: gib * GIB),
    latency_seconds=st.one_of(st.none(), st.floats(1e-4, 1.0)),
    reserve_bytes=st.integers(0, 8 * GIB),
    staging_requests=st.integers(0, 2),
)
workloads = st.builds(Workload, n_tokens=st.integers(1, 1 << 20), hit_rate=st.floats(0, 1))


def _keeps(found: Plan, batch: int, shape: ModelShape, limits: Limits, config: SparseConfig, work: Workload) -> bool:
    seconds = time_of(shape, DEVICE, config, work, batch).serial
    return (
        found.fixed_bytes + batch * found.request.device <= limits.gpu_bytes
        and batch * found.request.host <= limits.host_bytes
        and (limits.latency_seconds is None or seconds <= limits.latency_seconds)
    )


@given(st.sampled_from(list(MODEL_SHAPES.values())), st.sampled_from(list(ALGORITHMS)), workloads, limits_of_machines)
@settings(max_examples=examples(600), deadline=None)
def test_a_plan_is_the_largest_batch_that_keeps_every_limit(
    shape: ModelShape, algorithm: str, work: Workload, limits: Limits
) -> None:
    config = SparseConfig(algorithm)
    found = plan(shape, DEVICE, config, work, limits)
    if found.batch:
        assert _keeps(found, found.batch, shape, limits, config, work)
    assert found.binds == "nothing" or not _keeps(found, found.batch + 1, shape, limits, config, work)


def test_each_limit_can_bind() -> None:
    config = SparseConfig("dsa")
    wide = Limits(gpu_bytes=1000 * GIB, host_bytes=10_000 * GIB)
    found = {
        "gpu memory": replace(wide, gpu_bytes=140 * GIB),
        "host memory": replace(wide, host_bytes=100 * GIB),
        "latency": replace(wide, latency_seconds=0.03),
    }
    assert {name: plan(DEEPSEEK, DEVICE, config, LONG, limits).binds for name, limits in found.items()} == {
        name: name for name in found
    }


def test_index_keys_count() -> None:
    # Without them 200 requests of 128K would fit beside the weights; they take more than three times the buffer.
    limits = Limits(gpu_bytes=180 * GIB, host_bytes=4000 * GIB)
    found = plan(DEEPSEEK, DEVICE, SparseConfig("dsa"), LONG, limits)
    assert found.request.representations > 3 * found.request.kv
    free = limits.gpu_bytes - found.fixed_bytes
    assert found.batch == free // found.request.device < free // (4 * found.request.kv)


def test_prefill_needs_room_for_a_whole_request() -> None:
    limits = Limits(80 * GIB, 100 * GIB, staging_requests=2)
    staged = fixed_bytes(LLAMA, SparseConfig("dsa"), LONG, limits)
    assert staged - fixed_bytes(LLAMA, SparseConfig("dsa"), LONG, replace(limits, staging_requests=0)) == (
        2 * LONG.n_tokens * LLAMA.geometry.token_bytes
    )
    assert fixed_bytes(LLAMA, SparseConfig("full"), LONG, limits) == LLAMA.weight_bytes + limits.reserve_bytes


def test_a_buffer_that_is_too_small_is_refused() -> None:
    config = SparseConfig("dsa", device_buffer_size=1024)
    with pytest.raises(ConfigError, match=r"^device_buffer_size=1024: must hold the 2048"):
        plan(LLAMA, DEVICE, config, LONG, Limits(80 * GIB, 100 * GIB))


@pytest.mark.parametrize("field", ["gpu_bytes", "host_bytes", "latency_seconds", "reserve_bytes", "staging_requests"])
def test_limits_are_not_negative(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}=-1"):
        Limits(**{"gpu_bytes": 1, "host_bytes": 1, field: -1})


def test_offload_loses_against_the_same_algorithm_on_the_device_until_that_is_full() -> None:
    limits = Limits(139 * GIB, 400 * GIB)
    full, resident = advise(DEEPSEEK, DEVICE, SparseConfig("dsa"), LONG, limits)
    assert (full.rival.algorithm, resident.rival.residency) == ("full", "device")
    assert resident.ratio_at_one is not None
    assert resident.ratio_at_one < 1
    assert resident.from_batch == resident.rival.batch + 1


def test_offload_never_pays_for_short_requests() -> None:
    advice = advise(LLAMA, DEVICE, SparseConfig("dsa"), Workload(2048, 0.9), Limits(80 * GIB, 400 * GIB))
    assert all(one.from_batch is None for one in advice)


def test_without_a_rival_there_is_no_ratio() -> None:
    limits = Limits(24 * GIB, 400 * GIB, reserve_bytes=0, staging_requests=0)
    full, _ = advise(LLAMA, DEVICE, SparseConfig("dsa"), LONG, limits)
    assert (full.rival.batch, full.from_batch, full.ratio_at_one) == (0, 1, None)


def test_the_document_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "gpu_tier_benchmarks.md").read_text()
    shown = next(block for block in text.split("```") if "$ gpu_tier plan" in block)
    command, _, printed = shown.partition("$ gpu_tier ")[2].replace("\\\n", "").partition("\n")
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed


def test_the_command_without_torch_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import gpu_tier.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "gpu_tier: torch is not installed; the GPU tier needs: pip install 'kvcm[gpu]'\n"


ARGUMENTS = ["plan", "--gpu-gib", "139", "--host-gib", "400", "--hit-rate", "0.85", "--latency-ms", "50"]


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--model-shape", "deepseek-v3.2"]) == 0
    text = capsys.readouterr().out
    assert "hit rate 0.85 (an input)" in text
    assert "limited by gpu memory" in text
    assert "offload wins from a batch of" in text


def test_the_document_holds_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    settings_of_dsa = ["--algorithm", "dsa", "--set", "top_k=1024", "--set", "algo.index_dim=64", "--kv-dtype", "fp8"]
    assert main([*ARGUMENTS, *settings_of_dsa, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workload"] == {"n_tokens": 131072, "hit_rate": 0.85}
    assert document["plan"]["request"]["representations"] == 131072 * 68 * 32
    assert document["plan"]["batch"] == min(m for m in document["plan"]["limits"].values() if m is not None)
    assert [one["rival"]["algorithm"] for one in document["against"]] == ["full", "dsa"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm", "dsaa"], "algorithm='dsaa': must be one of full,"),
        (["--model-shape", "llama"], "model_shape='llama': must be one of llama3-8b"),
        (["--gpu-gib", "-1"], "gpu_gib=-1.0: must be above 0"),
        (["--gpu-gib", "nan"], "gpu_gib=nan: must be above 0"),
        (["--tflops", "inf"], "tflops=inf: must be above 0"),
        (["--host-gib", "-1"], "host_gib=-1.0: must be at least 0"),
        (["--latency-ms", "0"], "latency_ms=0.0: must be above 0"),
        (["--tokens", "0"], "tokens=0: must be above 0"),
        (["--page-size", "0"], "page_size=0: must be above 0"),
        (["--hit-rate", "2"], "hit_rate=2.0: must be from 0 to 1"),
        (["--kv-dtype", "int4"], "kv_dtype='int4': must be one of f32"),
        (["--set", "topk=1"], "topk=1: no such setting; did you mean 'top_k'?"),
        (["--set", "top_k"], "set='top_k': must be KEY=VALUE"),
        (["--link-efficiency", "0"], "link_efficiency=0.0: must be above 0 and at most 1"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, *arguments]) == 2
    assert f"gpu_tier: {message}" in capsys.readouterr().err
