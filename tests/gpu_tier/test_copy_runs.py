"""Contiguous runs: as few as there can be, and cut at the borders of registrations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_tier.config import SparseConfig
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import Addressing, KVGeometry, KVKind, Layout
from gpu_tier.kernels.dma_copy import dma_copy
from gpu_tier.pools.copy_runs import Runs, copy_runs, slot_pairs
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.host_pool import HostKVPool
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import NullRuntime

GEOMETRY = KVGeometry(KVKind.MHA, 2, 2, 4, 4, KVDtype.F32, page_size=4)


def _runs(layout: Layout, src: list[list[int]], dst: list[list[int]], unit: int = 1) -> Runs:
    addresses = Addressing.of(GEOMETRY, layout, 8), Addressing.of(GEOMETRY, Layout.LAYER_FIRST, 8)
    pairs = slot_pairs(torch.tensor(src), torch.tensor(dst), None, unit)
    return copy_runs(*addresses, pairs, layers=((0, 0), (1, 1)), num_heads=2, per_head=False)


def test_layers_may_change_their_place() -> None:
    addresses = Addressing.of(GEOMETRY, Layout.PAGE_HEAD, 8), Addressing.of(GEOMETRY, Layout.LAYER_FIRST, 8)
    pairs = slot_pairs(torch.tensor([[9]]), torch.tensor([[2]]), None, 1)
    runs = copy_runs(*addresses, pairs, layers=((0, 1),), num_heads=2, per_head=False)
    assert runs.src.tolist() == [addresses[0].address(part, 9, 0, head) for part in range(2) for head in range(2)]
    assert runs.dst.tolist() == [addresses[1].address(part, 2, 1, head) for part in range(2) for head in range(2)]


def test_neighbouring_pages_are_one_run_per_part_and_layer() -> None:
    runs = _runs(Layout.LAYER_FIRST, [[4, 8]], [[12, 16]], unit=4)
    assert runs.nbytes.tolist() == [8 * 32] * 4
    apart = _runs(Layout.LAYER_FIRST, [[4, 8]], [[16, 12]], unit=4)
    assert apart.nbytes.tolist() == [4 * 32] * 8


def test_other_orders_are_contiguous_by_token_or_head() -> None:
    assert set(_runs(Layout.PAGE_FIRST, [[4]], [[12]], unit=4).nbytes.tolist()) == {32}
    assert set(_runs(Layout.PAGE_HEAD, [[4]], [[12]], unit=4).nbytes.tolist()) == {16}
    nothing = _runs(Layout.PAGE_HEAD, [[-1]], [[12]])
    assert (nothing.total_bytes, nothing.mean_bytes) == (0, 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(1, 90)), max_size=4),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_cut_runs_move_the_same_bytes(copies: list[tuple[int, int, int]], src_border: int, dst_border: int) -> None:
    columns = np.array(copies, np.int64).reshape(-1, 3).T
    runs = Runs(*columns).split(src_border, dst_border)
    wanted = [(src + i, dst + i) for src, dst, size in copies for i in range(size)]
    got = list(zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True))
    assert [(src + i, dst + i) for src, dst, size in got for i in range(size)] == wanted
    for border, side in ((src_border, 0), (dst_border, 1)):
        if border:
            assert all(run[side] // border == (run[side] + run[2] - 1) // border for run in got)


def test_long_runs_are_left_to_the_copy_engine() -> None:
    geometry = KVGeometry(KVKind.MHA, 1, 4, 64, 64, KVDtype.F32, page_size=64)
    moved = {}
    for layout in (Layout.LAYER_FIRST, Layout.PAGE_FIRST):
        host = HostKVPool(geometry, 3, layout, NullRuntime())
        device = DeviceKVPool(geometry, 3, NullRuntime())
        transfer = KVTransfer(host, device, NullRuntime(), SparseConfig("full"))
        slots = torch.arange(0, 128)[None]
        transfer.load(slots, slots + 64, layers=range(1))
        transfer.load(slots[:, :8], slots[:, :8], layers=range(1))
        assert transfer.counters.h2d_bytes == (128 + 8) * geometry.token_layer_bytes
        moved[layout] = transfer._by_dma[0]
    assert moved == {Layout.LAYER_FIRST: 128 * geometry.token_layer_bytes, Layout.PAGE_FIRST: 0}


def test_the_copy_engine_is_never_sent_outside_of_a_pool() -> None:
    data, one = torch.zeros(8, dtype=torch.uint8), torch.ones(1, dtype=torch.int64)
    for src, dst, size in ((one * 5, one, one * 4), (one, one * 5, one * 4), (-one, one, one), (one, -one, one)):
        with pytest.raises(ConfigError, match="8 bytes"):
            dma_copy(data, data.clone(), src, dst, size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("impl", ["reference", "cuda"])
def test_a_gpu_copies_each_run(impl: str) -> None:
    src = torch.randint(0, 256, (1000,), dtype=torch.uint8).pin_memory()
    dst = torch.zeros(1000, dtype=torch.uint8, device="cuda")
    starts, sizes = torch.tensor([3, 500, 17]), torch.tensor([5, 250, 1])
    dma_copy(src, dst, starts, starts + 100, sizes, impl=impl)
    wanted = torch.zeros(1000, dtype=torch.uint8)
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        wanted[start + 100 : start + 100 + size] = src[start : start + size]
    assert torch.equal(dst.cpu(), wanted)
