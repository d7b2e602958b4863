"""The CUDA C++ gather, emulated on the CPU, copies and counts what is right whatever its grid is.

On a GPU test_gather_copy.py runs the kernel itself.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulation import COMPILER, emulation
from gather_cases import Gather, random_gather
from thoroughness import examples

from gpu_tier.kernels import cuda_build
from gpu_tier.kernels.gather_copy import cuda

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
PARTS = 4

DRIVER = """
extern "C" int gpu_tier_gather_copy(const gpu_tier::GatherArgs* args, void*) {
  using namespace gpu_tier;
  static std::mt19937 random(1);
  blockDim = {kWarp * kGatherWarps, 1};
  gridDim = {1 + static_cast<int>(random() % 5), 1};
  for (int i = 0; i < gridDim.x; ++i) {
    blockIdx = {i, 0};
    if (!run_block(blockDim.x, random, [args] { gather_copy_kernel(*args); })) return 1;
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulation(tmp_path_factory.mktemp("emulated"), "gather_copy", DRIVER)


@pytest.fixture
def codes(emulated: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the library be the emulation; return what its calls return."""
    found: list[int] = []
    monkeypatch.setattr(cuda_build, "library", lambda: emulated)
    monkeypatch.setattr(cuda_build, "stream", lambda device: None)
    monkeypatch.setattr(cuda_build, "check", found.append)
    return found


def _compare(gather: Gather, seed: int) -> None:
    data, counts = gather.wanted()
    moved = torch.full((len(gather.sources),), 5, dtype=torch.int64)
    cuda.run(gather.sources, gather.target, gather.runs, num_heads=gather.num_heads, moved=moved)
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
    cuda.run(gather.sources, gather.target, gather.runs, num_heads=gather.num_heads, moved=None)
    assert torch.equal(gather.target.data, want)
    assert codes == [0]
