"""How a kernel gets its tile sizes, and its scratch memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Shape, expected, random_kv, random_query

from gpu_tier.kernels.decode_attn_token import decode_attn_token
from gpu_tier.kernels.scratch import scratch
from gpu_tier.kernels.tuning import Tiling, TunedKernel, interpreting, next_power_of_2, processors
from gpu_tier.rows import KVDtype
from gpu_tier.types import LayerKV

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
        return TunedKernel(nothing, (Tiling.of(BLOCK=64, num_warps=8), Tiling.of(BLOCK=32)), key=("n",))


@pytest.mark.parametrize("environment", [{"TRITON_INTERPRET": "1"}, {"GPU_TIER_TUNING": "first"}])
def test_the_first_tiling_is_taken_where_nothing_is_measured(environment: dict[str, str]) -> None:
    tuned, launched = kernel(**environment), Launched()
    tuned._kernel = launched
    tuned[(3,)](1, n=2)
    assert launched.calls == [((3,), {"n": 2, "BLOCK": 64, "num_warps": 8, "num_stages": 2})]


def test_elsewhere_tilings_are_measured_unless_one_is_forced() -> None:
    tuned, launched = kernel(), Launched()
    tuned.__dict__["_measured"] = launched
    tuned[(3,)](1, n=2)
    assert launched.calls == [((3,), {"n": 2})]
    tuned._kernel, tuned.forced = Launched(), tuned.tilings[1]
    tuned[(3,)](1)
    assert tuned._kernel.calls[0][1]["BLOCK"] == 32


def test_scratch_is_kept_and_its_sizes_are_powers_of_two() -> None:
    room = scratch(CPU, torch.float32, 100)
    assert room.numel() == 128
    assert scratch(CPU, torch.float32, 128) is room
    assert scratch(CPU, torch.float32, 129) is not room
    assert scratch(CPU, torch.int32, 100).dtype is torch.int32
    assert scratch(CPU, torch.int32, 0).numel() == 1


def test_powers_of_two_and_processors() -> None:
    assert [next_power_of_2(n) for n in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
    assert processors(CPU) >= 1


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
