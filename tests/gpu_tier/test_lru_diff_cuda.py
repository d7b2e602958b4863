"""The CUDA C++ kernel, emulated on the CPU: bit-exact with the reference, and its copies are those of the plan.

The source is compiled as C++ against `emulated_cuda.h`. On a GPU test_lru_diff_triton.py runs the kernel itself.
"""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace

import pytest
import torch
from emulation import COMPILER, emulation
from lru_states import RandomSteps, copied, outputs_equal, states_equal
from thoroughness import examples
from torch import Tensor

from gpu_tier.geometry import Addressing, KVGeometry, KVKind, Layout
from gpu_tier.kernels.lru_diff import DiffOutputs, DiffScratch, LayerState, SwapIn, cuda, lru_diff, ref
from gpu_tier.rows import KVDtype

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

DRIVER = """
extern "C" int emulate(const gpu_tier::DiffArgs* args, int threads, unsigned seed) {
  using namespace gpu_tier;
  std::mt19937 random(seed);
  blockDim = {threads, 1};
  for (int row = 0; row < args->rows; ++row) {
    for (int head = 0; head < args->heads; ++head) {
      blockIdx = {row, head};
      auto body = [args] { args->num_parts > 0 ? lru_diff_kernel<true>(*args) : lru_diff_kernel<false>(*args); };
      if (!run_block(threads, random, body)) return 1;
    }
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulation(tmp_path_factory.mktemp("emulated"), "lru_diff", DRIVER)


@pytest.mark.parametrize("part", range(4))
def test_random_states_equal_the_reference(emulated: ctypes.CDLL, part: int) -> None:
    each = examples(160) // 4
    for seed in range(part * each, (part + 1) * each):
        steps = RandomSteps(seed)
        theirs, mine = steps.state, copied(steps.state)
        first, second = steps.outputs(), steps.outputs()
        scratch = DiffScratch(1, 1, 1, 1, torch.device("cpu"))
        for number in range(4):
            arguments = steps.step(number)
            ref.run(*arguments, theirs, first, scratch, **steps.options)
            given = cuda.arguments(*arguments, mine, second, steps.options["unit_tokens"])
            given.promote, given.loads_hottest = steps.options["promote_newest"], steps.options["loads_hottest"]
            assert emulated.emulate(ctypes.byref(given), (128, 160, 256)[seed % 3], seed) == 0, "a barrier was missed"
            outputs_equal(second, first)
            states_equal(mine, theirs)


GEOMETRIES = {
    "mha": KVGeometry(KVKind.MHA, 3, 2, 8, 6, KVDtype.F16, page_size=4),
    "mla": KVGeometry(KVKind.MLA, 3, 1, 12, 8, KVDtype.BF16, page_size=4),
}


def pools(geometry: KVGeometry, layout: Layout, host_pages: int, device_pages: int) -> SwapIn:
    rng = torch.Generator().manual_seed(5)
    host = Addressing.of(geometry, layout, host_pages)
    device = Addressing.of(geometry, Layout.LAYER_FIRST, device_pages)
    host_bytes, device_bytes = (
        torch.randint(0, 256, (addressing.total_bytes,), dtype=torch.uint8, generator=rng)
        for addressing in (host, device)
    )
    return SwapIn(host_bytes, device_bytes, host, device, 2, 1, geometry.num_kv_heads)


CAPACITY, ITEMS, WIDTH = 10, 20, 7
FUSED = [
    pytest.param(kind, heads, layout, unit, id=f"{kind}-{heads}-{layout}-{unit}")
    for kind, heads in (("mha", 1), ("mha", 2), ("mla", 1))
    for layout in Layout
    for unit in (1, 4)
]


def fused_state(heads: int, unit: int) -> LayerState:
    rng = torch.Generator().manual_seed(3)
    return LayerState(
        slot_item=torch.arange(CAPACITY, dtype=torch.int32).repeat(1, heads, 1),
        lru_slots=torch.arange(CAPACITY, dtype=torch.int16).repeat(1, heads, 1),
        newest_item=torch.full((1, heads), ITEMS - 2, dtype=torch.int32),
        slot_loc=unit * torch.randperm(CAPACITY, generator=rng).int()[None],
        newest_slots=torch.tensor([[CAPACITY * unit, (CAPACITY + 1) * unit]], dtype=torch.int32),
        host_loc=unit * torch.randperm(ITEMS, generator=rng)[None],
    )


def fused_step(heads: int, unit: int) -> tuple[Tensor, ...]:
    """Three loads of each head and one promotion, of a selected item and of one that is not."""
    return (
        torch.tensor([[15, 3, 19, 18, 12, 1, 17], [1, 16, 11, 9, 0, 13, 2]][:heads]).int()[None], torch.tensor([0]),
        torch.tensor([ITEMS * unit], dtype=torch.int32), torch.tensor([True]), torch.tensor([1], dtype=torch.int32),
    )  # fmt: skip


def fused_outputs(heads: int, device: str = "cpu") -> DiffOutputs:
    counters, errors = torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    return DiffOutputs.empty(1, heads, WIDTH, counters.to(device), errors.to(device))


def moved_by_the_reference(kind: str, heads: int, layout: Layout, unit: int) -> Tensor:
    expected = pools(GEOMETRIES[kind], layout, ITEMS * unit, (CAPACITY + 2) * unit)
    before, out = expected.device.clone(), fused_outputs(heads)
    scratch = DiffScratch(1, heads, ITEMS, CAPACITY, torch.device("cpu"))
    lru_diff(
        *fused_step(heads, unit), fused_state(heads, unit), out, scratch, unit_tokens=unit, swap_in=expected,
        impl="reference",
    )  # fmt: skip
    assert out.load_count.tolist() == [[3] * heads]
    assert (out.promote_dst >= 0).all()
    assert not torch.equal(expected.device, before)
    return expected.device


@pytest.mark.parametrize(("kind", "heads", "layout", "unit"), FUSED)
def test_the_fused_copies_are_those_of_the_plan(
    emulated: ctypes.CDLL, kind: str, heads: int, layout: Layout, unit: int
) -> None:
    swap_in = pools(GEOMETRIES[kind], layout, ITEMS * unit, (CAPACITY + 2) * unit)
    arguments, state, out = fused_step(heads, unit), fused_state(heads, unit), fused_outputs(heads)
    given = cuda.arguments(*arguments, state, out, unit)
    given.promote = True
    cuda.add_copies(given, swap_in)
    assert emulated.emulate(ctypes.byref(given), 128, 1) == 0
    assert torch.equal(swap_in.device, moved_by_the_reference(kind, heads, layout, unit))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize(("kind", "heads", "layout", "unit"), FUSED)
def test_on_the_gpu_a_step_moves_what_it_planned(kind: str, heads: int, layout: Layout, unit: int, impl: str) -> None:
    swap_in = pools(GEOMETRIES[kind], layout, ITEMS * unit, (CAPACITY + 2) * unit)
    swap_in = replace(swap_in, host=swap_in.host.pin_memory(), device=swap_in.device.cuda())
    state = fused_state(heads, unit)
    state = LayerState(**{field.name: getattr(state, field.name).cuda() for field in fields(LayerState)})
    scratch = DiffScratch(1, heads, ITEMS, CAPACITY, torch.device("cuda"))
    arguments = [argument.cuda() for argument in fused_step(heads, unit)]
    out = fused_outputs(heads, "cuda")
    lru_diff(*arguments, state, out, scratch, unit_tokens=unit, swap_in=swap_in, impl=impl)
    assert torch.equal(swap_in.device.cpu(), moved_by_the_reference(kind, heads, layout, unit))
