"""The CUDA C++ kernels, compiled as C++ against `emulated_cuda.h`: bit-exact with the references.

On a GPU the tests of each kernel run it itself.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gather_cases import Gather, random_gather
from lru_model import RandomSteps
from test_lru_diff import equals_the_reference
from thoroughness import examples
from torch import Tensor
from transfer_cases import random_transfer, transferred

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import Addressing, KVDtype, KVGeometry, KVKind, Layout
from kvcm.gpu_tier.kernels import cuda_build
from kvcm.gpu_tier.kernels.gather_copy import cuda as gather_cuda
from kvcm.gpu_tier.kernels.io_transfer import cuda as transfer_cuda
from kvcm.gpu_tier.kernels.io_transfer import ref as transfer_ref
from kvcm.gpu_tier.kernels.lru_diff import DiffOutputs, DiffScratch, LayerState, SwapIn, cuda, lru_diff

COMPILER = shutil.which("g++") or shutil.which("clang++")


_HERE = Path(__file__).parent


_KERNELS = Path(cuda_build.__file__).parent


def emulation(folder: Path, name: str, driver: str) -> ctypes.CDLL:
    """Return a library of the device code of ``kernels/NAME/NAME.cu`` and a driver, built in a folder of its own."""
    for header in _KERNELS.glob("*.cuh"):
        text = '#include "emulated_cuda.h"' if header.name == "copy.cuh" else header.read_text()
        (folder / header.name).write_text(text)
    kernel = (_KERNELS / name / f"{name}.cu").read_text()
    kernel = kernel[: kernel.index('extern "C"')].replace('"../', '"')
    source, target = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(kernel + driver)
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", f"-I{folder}", f"-I{_HERE}"]
    subprocess.run([str(COMPILER), *flags, "-o", str(target), str(source)], check=True)
    return ctypes.CDLL(str(target))


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
    def run(*arguments: Any, seed: int, unit_tokens: int, promote_newest: bool, loads_hottest: bool) -> None:
        given = cuda.arguments(*arguments[:-1], unit_tokens)  # all but the scratch memory
        given.promote, given.loads_hottest = promote_newest, loads_hottest
        assert emulated.emulate(ctypes.byref(given), (128, 160, 256)[seed % 3], seed) == 0, "a barrier was missed"

    each = examples(160) // 4
    for seed in range(part * each, (part + 1) * each):
        equals_the_reference(RandomSteps(seed), partial(run, seed=seed))


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
def test_fused_copies_follow_the_plan(emulated: ctypes.CDLL, kind: str, heads: int, layout: Layout, unit: int) -> None:
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


PARTS = 4


def driver(entry: str, arguments: str, *, threads: str, blocks: str, kernel: str) -> str:
    """Return a function that runs a kernel block by block, with threads in any order."""
    return f"""
extern "C" int gpu_tier_{entry}(const gpu_tier::{arguments}* args, void*) {{
  using namespace gpu_tier;
  static std::mt19937 random(1);
  blockDim = {{kWarp * {threads}, 1}};
  gridDim = {{{blocks}, 1}};
  for (int i = 0; i < gridDim.x; ++i) {{
    blockIdx = {{i, 0}};
    if (!run_block(blockDim.x, random, [args] {{ {kernel}(*args); }})) return 1;
  }}
  return 0;
}}
"""


ANY_FEW = "1 + static_cast<int>(random() % 5)"
GATHER_DRIVER = driver("gather_copy", "GatherArgs", threads="kGatherWarps", blocks=ANY_FEW, kernel="gather_copy_kernel")


@pytest.fixture(scope="module")
def emulated_gather(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulation(tmp_path_factory.mktemp("emulated"), "gather_copy", GATHER_DRIVER)


def codes_of(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the library be an emulation; return what its calls return."""
    found: list[int] = []
    monkeypatch.setattr(cuda_build, "library", lambda: library)
    monkeypatch.setattr(cuda_build, "stream", lambda device: None)
    monkeypatch.setattr(cuda_build, "check", found.append)
    return found


@pytest.fixture
def codes(emulated_gather: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return codes_of(emulated_gather, monkeypatch)


def _compare(gather: Gather, seed: int) -> None:
    data, counts = gather.wanted()
    moved = torch.full((len(gather.sources),), 5, dtype=torch.int64)
    gather_cuda.run(gather.sources, gather.target, gather.runs, num_heads=gather.num_heads, moved=moved)
    assert torch.equal(gather.target.data, data), seed
    assert (moved - 5).tolist() == counts, seed


@pytest.mark.parametrize("part", range(PARTS))
def test_each_run_is_where_it_was_sent(codes: list[int], part: int) -> None:
    each = examples(120) // PARTS
    for seed in range(part * each, (part + 1) * each):
        _compare(random_gather(seed), seed)
    assert not any(codes), "lanes parted at a barrier"


@pytest.mark.parametrize(
    ("tokens", "runs", "rows"), [(700, 2, 2), (40, 60, 3), (3, 3, 60)], ids=["long runs", "many runs", "many lines"]
)
def test_runs_are_shared_by_warps_and_blocks(codes: list[int], tokens: int, runs: int, rows: int) -> None:
    for seed in range(6):
        _compare(random_gather(seed, most_tokens=tokens, most_runs=runs, most_rows=rows), seed)
    assert not any(codes), "lanes parted at a barrier"


def test_bytes_need_not_be_counted(codes: list[int]) -> None:
    gather = random_gather(2)
    want, _ = gather.wanted()
    gather_cuda.run(gather.sources, gather.target, gather.runs, num_heads=gather.num_heads, moved=None)
    assert torch.equal(gather.target.data, want)
    assert codes == [0]


TRANSFER_DRIVER = driver(
    "io_transfer", "TransferArgs", threads="kWarpsPerBlock", blocks="args->blocks", kernel="io_transfer_kernel"
)


@pytest.fixture(scope="module")
def emulated_transfer(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulation(tmp_path_factory.mktemp("emulated"), "io_transfer", TRANSFER_DRIVER)


@pytest.mark.parametrize("part", range(4))
def test_rows_equal_the_reference(emulated_transfer: ctypes.CDLL, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = codes_of(emulated_transfer, monkeypatch)
    each = examples(80) // 4
    for seed in range(part * each, (part + 1) * each):
        arguments, size = random_transfer(seed, most_rows=25)
        arguments["blocks"] = 1 + seed % 3
        wanted, got = (transferred(arguments, size, run) for run in (transfer_ref.run, transfer_cuda.run))
        assert torch.equal(got[0], wanted[0]), seed
        assert got[1] == wanted[1], seed
    assert not any(codes), "lanes parted at a barrier"


@pytest.mark.parametrize(
    ("field", "dtype"), [("count", torch.int64), ("src_idx", torch.int16), ("dst_idx", torch.float32)]
)
def test_tables_that_the_kernel_would_misread_are_refused(field: str, dtype: torch.dtype) -> None:
    arguments, size = random_transfer(1)
    arguments["count"] = torch.zeros(arguments["src_idx"].shape[0], dtype=torch.int32)
    arguments[field] = arguments[field].to(dtype)
    with pytest.raises(ConfigError, match=f"{field}={dtype}"):
        transferred(arguments, size, transfer_cuda.run)
