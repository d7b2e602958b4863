"""Models of time and memory against the tables of the specification, the planner, its command and reports."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.algorithms.base import AlgorithmContext
from kvcm.gpu_tier.cli import main
from kvcm.gpu_tier.config import ALGORITHMS, PQCacheConfig, SparseConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.eval import report
from kvcm.gpu_tier.eval.capacity_plan import (
    Limits,
    Plan,
    Workload,
    advise,
    fixed_bytes,
    footprint,
    plan,
    representation_bytes,
    time_of,
)
from kvcm.gpu_tier.eval.model_shapes import MODEL_SHAPES, Device, ModelShape, model_shape
from kvcm.gpu_tier.eval.roofline import Traffic, step_time, traffic, wave_traffic
from kvcm.gpu_tier.kernels.lru_diff import DiffScratch
from kvcm.gpu_tier.manager.residency import LruDiffPolicy
from kvcm.gpu_tier.runtime import NullRuntime

LLAMA, DEEPSEEK = model_shape("llama3-8b"), model_shape("deepseek-v3.2")


DEVICE = Device()


KI = 1024


MB, GB, MS = 1e6, 1e9, 1e3


# n, KV in GB, full attention in ms, requests in 120 GB, wave: GB of device memory, ms, MB of the link at 85 %, ms
TABLE = [
    (30 * KI, 4.0, 0.94, 29, 0.33, 0.08, 11, 0.20),
    (60 * KI, 8.1, 1.87, 14, 0.66, 0.15, 22, 0.40),
    (120 * KI, 16.1, 3.75, 7, 1.32, 0.31, 43, 0.79),
    (KI * KI, 137, 32, 0, 11.3, 2.6, 371, 6.7),
]


def _digits(value: float, like: float) -> float:
    """Round a value to the digits that the table gives of it."""
    return round(value, len(str(like).partition(".")[2]) if isinstance(like, float) else 0)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0] // KI}K")
def test_the_table_of_full_and_wave_attention(row: tuple[float, ...]) -> None:
    n, kv, full_ms, requests, wave_gb, wave_ms, link_mb, link_ms = row
    tokens = int(n)
    full = traffic(LLAMA, SparseConfig("full"), tokens, 0.0)
    wave = wave_traffic(LLAMA, tokens, 0.85)
    computed = [
        full.hbm_bytes / GB, full.hbm_bytes / DEVICE.hbm_bytes_per_second * MS, 120 * GB // full.hbm_bytes,
        wave.hbm_bytes / GB, wave.hbm_bytes / DEVICE.hbm_bytes_per_second * MS,
        wave.link_bytes / MB, wave.link_bytes / DEVICE.link_bytes_per_second * MS,
    ]  # fmt: skip
    expected = [kv, full_ms, requests, wave_gb, wave_ms, link_mb, link_ms]
    # 1.8 % · 15 % of 16.1 GB are 43.49 MB, of 4.03 GB 10.87: the table rounds to nearest.
    assert [_digits(value, like) for value, like in zip(computed, expected, strict=True)] == expected


@pytest.mark.parametrize(("buffer_tokens", "megabytes"), [(2 * KI, 144), (4 * KI, 288), (8 * KI, 576)])
def test_the_buffer_of_dsa(buffer_tokens: int, megabytes: int) -> None:
    config = SparseConfig("dsa", device_buffer_size=buffer_tokens)
    request = footprint(DEEPSEEK, config, 128 * KI)
    newest_page = DEEPSEEK.geometry.page_bytes
    assert round((request.kv - newest_page) / MB) == megabytes
    assert request.host / GB == pytest.approx(9.2, abs=0.05)
    assert request.representations / GB == pytest.approx(1.06, abs=0.005)


def test_dsa_reads_index_keys_of_all_tokens_and_rows_of_the_selected() -> None:
    request = traffic(DEEPSEEK, SparseConfig("dsa"), 100_000, 1.0)
    assert request.hbm_bytes == (100_000 * 132 + 2048 * 1152) * 61
    assert request.link_bytes == 0
    assert traffic(DEEPSEEK, SparseConfig("dsa"), 100_000, 0.75).link_bytes == 2048 * 1152 * 61 / 4
    assert request.flops == 2 * (100_000 * 64 * 128 + 2048 * 128 * (576 + 512)) * 61


def test_a_short_request_is_dense() -> None:
    config = SparseConfig("dsa")
    assert traffic(LLAMA, config, 4095, 0.0) == traffic(LLAMA, SparseConfig("full"), 4095, 0.0)
    assert footprint(LLAMA, config, 4095) == footprint(LLAMA, SparseConfig("full"), 4095)
    assert traffic(LLAMA, config, 4096, 0.0) != traffic(LLAMA, SparseConfig("full"), 4096, 0.0)


shapes = st.sampled_from(list(MODEL_SHAPES.values()))


algorithms = st.sampled_from(list(ALGORITHMS)).map(SparseConfig)


lengths = st.integers(1, 1 << 20)


rates = st.floats(0, 1)


@given(shapes, algorithms, lengths, rates, rates)
@settings(max_examples=examples(400), deadline=None)
def test_more_hits_never_cost_more(
    shape: ModelShape, config: SparseConfig, n_tokens: int, one: float, other: float
) -> None:
    best, worst = (traffic(shape, config, n_tokens, rate) for rate in (max(one, other), min(one, other)))
    assert best.link_bytes <= worst.link_bytes
    # A hit of PQCache is read from the cache instead of over the link.
    read_instead = worst.link_bytes - best.link_bytes if config.algorithm == "pqcache" else 0
    assert best.hbm_bytes <= worst.hbm_bytes + read_instead * (1 + 1e-9)
    assert best.flops == worst.flops


@given(algorithms, lengths, rates, st.integers(1, 256))
@settings(max_examples=examples(400), deadline=None)
def test_a_larger_batch_takes_no_less_time_and_overlap_no_more(
    config: SparseConfig, n_tokens: int, hit_rate: float, batch: int
) -> None:
    request = traffic(DEEPSEEK, config, n_tokens, hit_rate)
    smaller, larger = (step_time(DEEPSEEK, DEVICE, request, size) for size in (batch, batch + 1))
    assert smaller.serial <= larger.serial
    assert larger.overlapped <= larger.serial
    assert request.link_bytes <= n_tokens * DEEPSEEK.geometry.token_bytes


@given(algorithms, lengths)
@settings(max_examples=examples(400), deadline=None)
def test_kv_on_the_device_moves_nothing_over_the_link(config: SparseConfig, n_tokens: int) -> None:
    resident = config.replaced(residency="device")
    # PQCache prefetches codes from the host wherever the KV is.
    is_coded = config.algorithm == "pqcache" and n_tokens >= config.min_sparse_prompt_len
    codes = n_tokens * pq_bytes(resident, n_tokens) if is_coded else 0
    assert traffic(LLAMA, resident, n_tokens, 0.0).link_bytes == codes
    assert footprint(LLAMA, resident, n_tokens).host == codes


def pq_bytes(config: SparseConfig, n_tokens: int) -> int:
    assert isinstance(config.algo, PQCacheConfig)
    return config.algo.quantisation(n_tokens)[0] * LLAMA.geometry.num_kv_heads * LLAMA.geometry.num_layers


def test_a_wave_index_takes_about_a_sixteenth_of_the_kv_and_its_cache_a_twentieth() -> None:
    config, n_tokens = SparseConfig("retroinfer"), 128 * KI
    request, kv = footprint(LLAMA, config, n_tokens), n_tokens * LLAMA.geometry.token_bytes
    # A centroid and a value sum for 16 tokens, and 4 bytes: 1.08 GB of a 128K request.
    assert request.representations / GB == pytest.approx(1.08, abs=0.01)
    assert request.representations / kv == pytest.approx(0.063, abs=0.001)
    ring = (4 + 64 + 1024) / n_tokens
    assert request.kv / kv == pytest.approx(0.05 + ring, abs=0.001)
    # Of 8-token blocks every cluster of 16 may waste one: half as much again at most.
    assert request.host / kv == pytest.approx(1.5, abs=0.01)
    assert 0.11 < (request.kv - ring * kv + request.representations) / kv < 0.12


def test_the_codes_and_centroids_of_pq_at_128k() -> None:
    n_tokens = 128 * KI
    of = {
        (m, b): footprint(LLAMA, SparseConfig("pqcache", algo=PQCacheConfig(m=m, b=b)), n_tokens)
        for m, b in ((2, 6), (4, 8))
    }
    kv = n_tokens * LLAMA.geometry.token_bytes
    assert (of[2, 6].host - kv) / MB == pytest.approx(67, abs=0.5)
    assert (of[4, 8].host - kv) / MB == pytest.approx(134, abs=0.5)
    two_layers = 2 * n_tokens * 8 * 4 + 32 * 64 * 8 * 4  # and a page of every layer
    assert (of[4, 8].representations - two_layers) / MB == pytest.approx(16.8, abs=0.05)
    # Of the keys' bytes: one part in 64 of bf16 keys for four bytes a head.
    coded = traffic(LLAMA, SparseConfig("pqcache", algo=PQCacheConfig(m=4, b=8)), n_tokens, 1.0).link_bytes
    assert coded / (kv / 2) == pytest.approx(1 / 64)


def test_misses_of_a_wave_index_are_what_the_table_says() -> None:
    # The table's clusters are the whole context's; in a request 68 tokens are in none.
    for n in (30 * KI, 120 * KI, KI * KI):
        ours, table = traffic(LLAMA, SparseConfig("retroinfer"), n, 0.85), wave_traffic(LLAMA, n, 0.85)
        assert ours.link_bytes == pytest.approx(table.link_bytes, rel=0.02)
        # Ours counts the steady zone, too, and gathered tokens three times.
        assert table.hbm_bytes < ours.hbm_bytes < 1.4 * table.hbm_bytes


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: traffic(LLAMA, SparseConfig("full"), 0, 0.5), "n_tokens"),
        (lambda: traffic(LLAMA, SparseConfig("full"), 1, 1.5), "hit_rate"),
        (lambda: step_time(LLAMA, DEVICE, Traffic(0, 0, 0), 0), "batch"),
        (lambda: Limits(gpu_bytes=1, host_bytes=-1), "host_bytes"),
        (lambda: Device(hbm_bytes_per_second=0), "hbm_bytes_per_second"),
        (lambda: Device(link_efficiency=2), "link_efficiency"),
        (lambda: Device(layer_overhead_seconds=-1), "layer_overhead_seconds"),
        (lambda: model_shape("gpt-9"), "model_shape"),
        (lambda: replace(LLAMA, num_q_heads=12), "num_q_heads"),
        (lambda: replace(LLAMA, active_weight_bytes=1 << 50), "active_weight_bytes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(call: object, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}="):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("algorithm", ["dsa", "quest", "retroinfer", "pqcache"])
def test_the_representations_are_what_the_algorithm_allocates(algorithm: str) -> None:
    geometry = replace(LLAMA.geometry, num_layers=3, num_kv_heads=2, head_dim=8, v_head_dim=8)
    shape = replace(LLAMA, geometry=geometry, num_q_heads=4)
    config = SparseConfig(algorithm)
    made = registry.make(
        AlgorithmContext(geometry, config, 4, 0.35, 2, 4096, 4096, NullRuntime(), keys=None)  # type: ignore[arg-type]
    )
    for n_tokens in (64, 640, 1152, 4096):
        assert representation_bytes(shape, config, n_tokens) == made.representation_bytes(n_tokens)


def test_the_state_of_a_buffer_is_what_the_policy_allocates() -> None:
    geometry = replace(LLAMA.geometry, num_layers=3)
    config = SparseConfig("oracle", top_k=32, device_buffer_size=48, min_sparse_prompt_len=0)
    request = footprint(replace(LLAMA, geometry=geometry), config, 640)
    policy = LruDiffPolicy(
        geometry, capacity=48, unit_tokens=1, selecting_heads=8, max_requests=1, max_items=640,
        host_loc=torch.zeros(1, 640, dtype=torch.int64), runtime=NullRuntime(),
    )  # fmt: skip
    scratch = DiffScratch(1, 8, 640, 48, torch.device("cpu"))
    in_tables = 640 * (4 + 8)
    assert request.tables == policy.nbytes + scratch.item_slot.nbytes + scratch.order.nbytes + in_tables


def test_a_buffer_is_as_many_pages_as_the_manager_takes() -> None:
    config = SparseConfig("quest", device_buffer_size=4096)
    pages = -(-(4096 // 16 + 2) * 16 // LLAMA.geometry.page_size)
    assert footprint(LLAMA, config, 100_000).kv == pages * LLAMA.geometry.page_bytes


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
def test_a_plan_is_the_largest_in_limits(shape: ModelShape, algorithm: str, work: Workload, limits: Limits) -> None:
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


def test_prefill_needs_space_for_a_whole_request() -> None:
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


def test_offload_loses_against_the_same_algorithm_on_the_device_until_that_is_full() -> None:
    limits = Limits(139 * GIB, 400 * GIB)
    full, resident = advise(DEEPSEEK, DEVICE, SparseConfig("dsa"), LONG, limits)
    assert (full.rival.algorithm, resident.rival.residency) == ("full", "device")
    assert resident.ratio_at_one is not None
    assert resident.ratio_at_one < 1
    assert resident.from_batch == resident.rival.batch + 1


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
    code = "import sys; sys.modules['torch'] = None; import kvcm.gpu_tier.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "gpu_tier: torch is not installed; the GPU tier needs: pip install 'kvcm[gpu]'\n"


ARGUMENTS = ["plan", "--gpu-gib", "139", "--host-gib", "400", "--hit-rate", "0.85", "--latency-ms", "50"]


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
        (["--gpu-gib", "nan"], "gpu_gib=nan: must be above 0"),
        (["--host-gib", "-1"], "host_gib=-1.0: must be at least 0"),
        (["--tokens", "0"], "tokens=0: must be above 0"),
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


def test_a_table_is_markdown_and_json(tmp_path: Path) -> None:
    table = report.ResultTable("Rates", ("case", "rate"), (("a|b", 0.12345), ("c", None), ("d", 7)), "As measured.")
    report.write("Results", [table], tmp_path / "new", plots=("rates.svg",))
    text = (tmp_path / "new" / "report.md").read_text()
    assert "| a\\|b | 0.123 |" in text
    assert "| c | – |" in text
    assert "| d | 7 |" in text
    assert text.index("As measured.") < text.index("| case | rate |")
    assert "![rates](rates.svg)" in text
    stored = json.loads((tmp_path / "new" / "report.json").read_text())
    assert stored["tables"][0]["rows"][0] == ["a|b", 0.12345]


def test_a_row_with_a_cell_too_many_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have the 1 columns"):
        report.ResultTable("t", ("one",), ((1, 2),))


def test_every_claim_has_a_status_and_shows_our_figure_only_if_there_is_one() -> None:
    assert len({claim.key for claim in (*report.CLAIMS, *report.RETRIEVAL_CLAIMS)}) == len(report.CLAIMS) + len(
        report.RETRIEVAL_CLAIMS
    )
    table = report.claims_table({"hit_rate": "0.81"})
    shown = {row[1]: row for row in table.rows}
    measured = next(claim for claim in report.CLAIMS if claim.key == "hit_rate")
    assert shown[measured.claim][4] == "0.81"
    assert sum(row[4] is not None for row in table.rows) == 1
    assert {row[3] for row in (*table.rows, *report.claims_table({}, report.RETRIEVAL_CLAIMS).rows)} == {
        s.value for s in report.Status
    }
    assert any("MagicPIG" in str(row[0]) for row in report.left_out_table().rows)


def test_a_plot_is_the_same_file_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panels = {"mid": {"quest": [(20.0, 0.9), (10.0, 0.6)], "oracle": [(10.0, 1.0), (20.0, 1.0)]}}
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        report.plot_lines(panels, "tokens", "recall", path, log_x=True)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert "recall" in paths[0].read_text()
