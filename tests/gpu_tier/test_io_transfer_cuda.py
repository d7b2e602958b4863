"""The CUDA C++ transfer, emulated on the CPU, moves the bytes of the reference; it refuses what it would misread.

On a GPU test_io_transfer.py runs the kernel itself.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch
from emulation import COMPILER, emulation
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import Addressing, KVGeometry, KVKind, Layout
from gpu_tier.kernels import cuda_build
from gpu_tier.kernels.io_transfer import cuda, ref
from gpu_tier.rows import KVDtype

DRIVER = """
extern "C" int gpu_tier_io_transfer(const gpu_tier::TransferArgs* args, void*) {
  using namespace gpu_tier;
  static std::mt19937 random(1);
  blockDim = {kWarp * kWarpsPerBlock, 1};
  gridDim = {args->blocks, 1};
  for (int i = 0; i < args->blocks; ++i) {
    blockIdx = {i, 0};
    if (!run_block(blockDim.x, random, [args] { io_transfer_kernel(*args); })) return 1;
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulation(tmp_path_factory.mktemp("emulated"), "io_transfer", DRIVER)


def _transfer(seed: int) -> tuple[dict[str, Any], int]:
    """Return arguments of up to a hundred rows, many of them empty, and the bytes of either pool."""
    draw = random.Random(seed)
    kind = draw.choice(list(KVKind))
    heads = 1 if kind is KVKind.MLA else draw.randint(1, 4)
    dims, dims_v = (12, 8) if kind is KVKind.MLA else (8, draw.choice([1, 8]))
    geometry = KVGeometry(kind, 3, heads, dims, dims_v, draw.choice([KVDtype.F16, KVDtype.F32]), draw.choice([1, 3, 4]))
    per_head, unit = draw.random() < 0.5, draw.choice([1, 2, 3])
    rows, entries = heads * draw.choice([1, 5, 8, 16, 25]), draw.randint(1, 4)
    items = rows * entries
    pages = -(-items * unit // geometry.page_size)
    generator = torch.Generator().manual_seed(seed)
    src, dst = (unit * torch.randperm(items, generator=generator).view(rows, entries) for _ in range(2))
    src[torch.rand(src.shape, generator=generator) < 0.1] = -1
    most = draw.choice([1, entries + 1])
    count = torch.randint(-1, most + 1, (rows,), dtype=torch.int32, generator=generator)
    arguments = {
        "src_addr": Addressing.of(geometry, draw.choice(list(Layout)), pages),
        "dst_addr": Addressing.of(geometry, draw.choice(list(Layout)), pages),
        "src_idx": src, "dst_idx": dst.int(), "layers": draw.choice([((0, 0),), ((0, 1), (1, 2), (2, 0))]),
        "num_heads": heads, "per_head": per_head, "unit_tokens": unit, "blocks": draw.randint(1, 3),
        "count": draw.choice([None, count, count]),
    }  # fmt: skip
    return arguments, geometry.page_bytes * pages


def _run(run: Any, arguments: dict[str, Any], size: int) -> tuple[Tensor, int]:
    src = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    dst, moved = torch.full((size,), 7, dtype=torch.uint8), torch.tensor([5])
    run(src, dst, **arguments, moved=moved)
    return dst, int(moved) - 5


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("part", range(4))
def test_random_rows_equal_the_reference(emulated: ctypes.CDLL, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(cuda_build, "library", lambda: emulated)
    monkeypatch.setattr(cuda_build, "stream", lambda device: None)
    monkeypatch.setattr(cuda_build, "check", codes.append)
    each = examples(80) // 4
    for seed in range(part * each, (part + 1) * each):
        transfer = _transfer(seed)
        wanted, got = _run(ref.run, *transfer), _run(cuda.run, *transfer)
        assert torch.equal(got[0], wanted[0]), seed
        assert got[1] == wanted[1], seed
    assert not any(codes), "lanes parted at a barrier"


@pytest.mark.parametrize(
    ("field", "dtype"), [("count", torch.int64), ("src_idx", torch.int16), ("dst_idx", torch.float32)]
)
def test_tables_that_the_kernel_would_misread_are_refused(field: str, dtype: torch.dtype) -> None:
    arguments, size = _transfer(1)
    arguments["count"] = torch.zeros(arguments["src_idx"].shape[0], dtype=torch.int32)
    arguments[field] = arguments[field].to(dtype)
    with pytest.raises(ConfigError, match=f"{field}={dtype}"):
        _run(cuda.run, arguments, size)
