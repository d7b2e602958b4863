"""How a kernel gets its tile sizes, and its scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from attention_cases import Shape, expected, random_kv, random_query

from kvcm.gpu_tier.geometry import KVDtype
from kvcm.gpu_tier.kernels import tuning
from kvcm.gpu_tier.kernels.decode_attn_token import decode_attn_token
from kvcm.gpu_tier.kernels.indexer_score import indexer_score
from kvcm.gpu_tier.kernels.operands import scratch
from kvcm.gpu_tier.kernels.quest_score import quest_score
from kvcm.gpu_tier.kernels.tuning import Tiling, TunedKernel, interpreting
from kvcm.gpu_tier.types import LayerKV

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available() or interpreting(), reason="needs a GPU")


class Launched:
    """Stands in for a kernel that Triton made."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_args, **options: self.calls.append((grid, options))


def nothing() -> None:
    """Triton reads the source of a kernel, so it has to be a function."""


def kernel(**environment: str) -> TunedKernel:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRITON_INTERPRET", "GPU_TIER_TUNING"):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        return TunedKernel(nothing, (Tiling.of(BLOCK=64, num_warps=8), Tiling.of(BLOCK=32)))


def test_a_kernel_is_launched_with_the_sizes_of_a_tiling() -> None:
    tuned, launched = kernel(), Launched()
    tuned._kernel = launched
    tuned.at(tuned.tilings[0], (3,))(1, n=2)
    assert launched.calls == [((3,), {"n": 2, "BLOCK": 64, "num_warps": 8, "num_stages": 2})]


def timed(times: dict[Tiling, float], monkeypatch: pytest.MonkeyPatch) -> list[Tiling]:
    """Let calls take so long; return the list of those that are measured."""
    measured: list[Tiling] = []

    def milliseconds(call: Any) -> float:
        measured.append(call())
        return times[measured[-1]]

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    return measured


def same(tiling: Tiling) -> Tiling:
    return tiling


def test_the_fastest_that_fits_is_measured_once_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = kernel()
    wide, narrow = tuned.tilings
    times = {wide: 1.0, narrow: 2.0}
    measured = timed(times, monkeypatch)
    assert [tuned.choose("a", lambda _: True, same) for _ in range(2)] == [wide] * 2
    assert measured == [wide, narrow]
    times[narrow] = 0.5
    assert tuned.choose("a", lambda _: True, same) is wide
    assert tuned.choose("b", lambda _: True, same) is narrow
    assert tuned.choose("c", lambda tiling: tiling["BLOCK"] == 64, same) is wide


def test_without_measuring_the_first_that_fits_is_chosen_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = kernel()
    measured = timed(dict.fromkeys(tuned.tilings, 1.0), monkeypatch)
    assert tuned.choose("a", lambda tiling: tiling["BLOCK"] < 64, same, measure=False) is tuned.tilings[1]
    assert kernel(GPU_TIER_TUNING="first").choose("a", lambda _: True, same) == tuned.tilings[0]
    assert kernel(TRITON_INTERPRET="1").choose("a", lambda _: True, same) == tuned.tilings[0]
    assert not measured
    assert tuned.choose("a", lambda _: True, same) is tuned.tilings[0]
    assert len(measured) == 2
    tuned.forced = Tiling.of(BLOCK=16)
    assert tuned.choose("a", lambda _: False, same) is tuned.forced


def score_keys(monkeypatch: pytest.MonkeyPatch, name: str, *calls: Callable[[], None]) -> list[tuple[Any, bool]]:
    """Return what scores ask to choose with: the key, and whether it may be measured."""
    asked: list[tuple[Any, bool]] = []
    module = import_module(f"kvcm.gpu_tier.kernels.{name}.triton_impl")

    def choose(key: Any, _fits: Any, _call: Any, *, measure: bool) -> Tiling:
        asked.append((key, measure))
        return module.kernel.tilings[0]  # type: ignore[no-any-return]

    monkeypatch.setattr(module.kernel, "choose", choose)
    for call in calls:
        call()
    return asked


def quest(rows: int, width: int) -> None:
    q, bounds = torch.ones(rows, 4, 16), torch.zeros(2, 2, 2, 16, dtype=torch.bfloat16)
    table, pages = torch.zeros(rows, width, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    quest_score(q, bounds, table, pages, torch.empty(rows, 4, width), impl="triton")


def indexer(rows: int, width: int) -> None:
    q8, weight = torch.ones(rows, 2, 32).to(torch.float8_e4m3fn), torch.ones(rows, 2)
    keys, table = torch.zeros(16, 36, dtype=torch.uint8), torch.zeros(rows, width, dtype=torch.int32)
    lengths = torch.ones(rows, dtype=torch.int32)
    indexer_score(q8, weight, keys, table, 16, lengths, torch.empty(rows, width), impl="triton")


def attention(rows: int, width: int, group: int = 2) -> None:
    shape = Shape(2, group, 16, KVDtype.F32)
    kv, q = random_kv(shape, 4), random_query(shape, rows)
    out = torch.empty(*q.shape[:2], shape.v_dims), torch.empty(q.shape[:2])
    table, lens = torch.zeros(rows, 1, width, dtype=torch.int32), torch.ones(rows, 1, dtype=torch.int32)
    decode_attn_token(q, kv, table, lens, 0.1, *out, impl="triton")


SCORES = {"quest_score": quest, "indexer_score": indexer, "split_decode": attention}


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_measured_again_for_four_times_the_pages_or_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (1, 64), (1, 100), (4, 64), (1, 256)
    asked = score_keys(monkeypatch, name, *(partial(SCORES[name], *size) for size in sizes))
    keys = [key for key, _ in asked]
    assert keys[0] == keys[1]
    assert keys[2] == keys[3] != keys[0]
    assert all(measure for _, measure in asked)


@pytest.mark.parametrize("name", ["quest_score", "indexer_score"])
def test_scores_are_not_measured_in_a_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(f"kvcm.gpu_tier.kernels.{name}.triton_impl")
    monkeypatch.setattr(module, "is_capturing", lambda _: True)
    [(_, measure)] = score_keys(monkeypatch, name, partial(SCORES[name], 1, 32))
    assert not measure


def test_attention_is_measured_again_for_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = (partial(attention, 1, 64, group) for group in (2, 2, 4))
    keys = [key for key, _ in score_keys(monkeypatch, "split_decode", *calls)]
    assert keys[0] == keys[1] != keys[2]


def test_scratch_is_kept_and_its_sizes_are_powers_of_two() -> None:
    memory = scratch(CPU, torch.float32, 100)
    assert memory.numel() == 128
    assert scratch(CPU, torch.float32, 128) is memory
    assert scratch(CPU, torch.float32, 129) is not memory
    assert scratch(CPU, torch.int32, 100).dtype is torch.int32
    assert scratch(CPU, torch.int32, 0).numel() == 1


@on_gpu
def test_scores_of_a_size_never_measured_can_be_captured() -> None:
    device = torch.device("cuda")
    q, bounds = torch.randn(1, 8, 128, device=device), torch.randn(64, 2, 2, 128, device=device).bfloat16()
    arguments = q, bounds, torch.arange(64, device=device).int()[None], torch.tensor([50], device=device).int()
    module = import_module("kvcm.gpu_tier.kernels.quest_score.triton_impl")
    captured, direct = (torch.empty(1, 8, 64, device=device) for _ in range(2))
    module._launch(*arguments, captured, module.kernel.tilings[0])  # compiled, but not measured
    module.kernel._fastest.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quest_score(*arguments, captured, impl="triton")
    assert not module.kernel._fastest
    graph.replay()
    quest_score(*arguments, direct, impl="triton")
    torch.testing.assert_close(captured, direct, rtol=1e-3, atol=1e-3)


@on_gpu
def test_a_captured_graph_follows_its_table_and_lengths() -> None:
    shape, device = Shape(2, 4, 128, KVDtype.BF16), torch.device("cuda")
    kv, q = random_kv(shape, 256, device=device), random_query(shape, 2).to(device)
    table = torch.randint(0, 256, (2, 1, 128), dtype=torch.int32, device=device)
    lens = torch.full((2, 1), 128, dtype=torch.int32, device=device)
    o, lse = torch.empty(2, 8, 128, device=device), torch.empty(2, 8, device=device)
    decode_attn_token(q, kv, table, lens, 0.1, o, lse, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attn_token(q, kv, table, lens, 0.1, o, lse, impl="triton")
    lens.copy_(torch.tensor([[77], [0]]))
    table.copy_(table.flip(2))
    graph.replay()
    assert kv.v is not None
    rows = [type(part)(part.data.cpu(), part.format) for part in (kv.k, kv.v)]
    slots = [[table[0, 0, :77].tolist()] * 2, [[]] * 2]
    want, want_lse = expected(q.cpu(), LayerKV(rows[0], rows[1], kv.v_dims), slots, 0.1)
    torch.testing.assert_close(o.cpu().double(), want, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2**-7, atol=2**-7)
