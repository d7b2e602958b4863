"""Copies between pools: addresses, contiguous runs, and exactly the bytes that were asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gather_cases import Gather, random_gather
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_values import GEOMETRIES, all_rows, fill_coded
from thoroughness import examples
from torch import Tensor
from transfer_cases import random_transfer, transferred

from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import Addressing, KVDtype, KVGeometry, KVKind, Layout
from kvcm.gpu_tier.kernels.dma_copy import dma_copy
from kvcm.gpu_tier.kernels.gather_copy import gather_copy
from kvcm.gpu_tier.kernels.io_transfer import io_transfer, layer_runs, part_copies
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.pools.transfer import Engine, KVTransfer, Runs, copy_runs, slot_pairs
from kvcm.gpu_tier.runtime import NullRuntime, runtime_for
from kvcm.gpu_tier.types import CopyRuns

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


PARTS = 4


def _run(gather: Gather, impl: str) -> tuple[Tensor, list[int]]:
    moved = torch.full((len(gather.sources),), 5, dtype=torch.int64, device=gather.runs.kind.device)
    gather_copy(gather.sources, gather.target, gather.runs, num_heads=gather.num_heads, moved=moved, impl=impl)
    return gather.target.data.cpu(), [number - 5 for number in moved.tolist()]


def _compare(gather: Gather, impl: str, device: str, seed: int) -> None:
    data, moved = gather.wanted()
    got, counted = _run(gather if device == "cpu" else gather.on(device), impl)
    assert torch.equal(got, data), seed
    assert counted == moved, seed


IMPLEMENTATIONS = [
    ("reference", "cpu"), ("triton", "cpu"),
    pytest.param("triton", "cuda", marks=needs_gpu), pytest.param("cuda", "cuda", marks=needs_gpu),
]  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("impl", "device"), IMPLEMENTATIONS)
def test_each_run_is_where_it_was_sent(impl: str, device: str, part: int) -> None:
    each = examples(100 if (impl, device) == ("triton", "cpu") else 200) // PARTS
    for seed in range(part * each, (part + 1) * each):
        _compare(random_gather(seed), impl, device, seed)
        if device == "cuda":
            _compare(random_gather(seed, most_tokens=150, most_runs=40, most_rows=16), impl, device, seed)


@pytest.mark.parametrize(("impl", "device"), IMPLEMENTATIONS)
def test_runs_longer_than_a_tile_and_more_lines_than_a_group_are_whole(impl: str, device: str) -> None:
    for seed in range(10):
        _compare(random_gather(seed, most_tokens=700, most_runs=1, most_rows=1), impl, device, seed)
    _compare(random_gather(4, most_tokens=2, most_runs=2, most_rows=400), impl, device, 4)


def test_nothing_is_counted_and_nothing_copied_without_runs() -> None:
    gather = random_gather(3)
    none = torch.zeros_like(gather.runs.count)
    empty = replace(gather, runs=replace(gather.runs, count=none))
    assert empty.wanted()[1] == [0] * len(gather.sources)
    for impl in ("reference", "triton"):
        _compare(empty, impl, "cpu", 3)
    tables = (gather.runs.kind, gather.runs.src, gather.runs.dst, gather.runs.tokens)
    no_width = CopyRuns(*(table[:, :0].contiguous() for table in tables), none)
    gather_copy(gather.sources, gather.target, no_width, num_heads=gather.num_heads)


def _pool(dims: int, heads: int = 2) -> RowPool:
    addressing = Addressing.of(KVGeometry(KVKind.MHA, 1, heads, dims, dims, KVDtype.F16, 4), Layout.LAYER_FIRST, 2)
    return RowPool(torch.zeros(addressing.total_bytes, dtype=torch.uint8), addressing, 0)


def test_pools_and_runs_that_do_not_fit_are_refused() -> None:
    pool, table, count = _pool(8), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    runs = CopyRuns(table, table.long(), table, table, count)
    for sources in ((), (pool,) * 4, (pool, _pool(4))):
        with pytest.raises(ConfigError, match="sources"):
            gather_copy(sources, pool, runs, num_heads=2)
    with pytest.raises(ConfigError, match="target"):
        gather_copy((pool,), replace(pool, data=pool.data.view(torch.int16)), runs, num_heads=2)
    with pytest.raises(ConfigError, match="heads"):
        gather_copy((pool,), pool, runs, num_heads=3)
    with pytest.raises(ConfigError, match="moved"):
        gather_copy((pool,), pool, runs, num_heads=2, moved=torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("field", ["kind", "src", "dst", "tokens", "count"])
def test_tables_that_a_kernel_would_misread_are_refused(field: str) -> None:
    pool, table = _pool(8), torch.zeros(2, 3, dtype=torch.int32)
    runs = CopyRuns(table, table.long(), table, table, table[:, 0].contiguous())
    right = getattr(runs, field)
    other = right.to(torch.int32 if field == "src" else torch.int64)
    for wrong in (other, right[:1], right.double()):
        with pytest.raises(ConfigError, match="runs"):
            gather_copy((pool,), pool, replace(runs, **{field: wrong}), num_heads=2)
    apart = right.repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ConfigError, match=field):
        gather_copy((pool,), pool, replace(runs, **{field: apart}), num_heads=2)


pytest.importorskip("triton")


PAGES = 3


def triton_kernel() -> ModuleType:
    """Return the kernel: to be imported under the interpreter, so not while tests are collected."""
    return import_module("kvcm.gpu_tier.kernels.io_transfer.triton_impl")


@st.composite
def geometries(draw: st.DrawFn) -> KVGeometry:
    kind, dtype = draw(st.sampled_from(KVKind)), draw(st.sampled_from(KVDtype))
    page, layers = draw(st.sampled_from([1, 3, 4])), draw(st.integers(1, 4))
    if kind is KVKind.MLA:
        rope = draw(st.sampled_from([2, 3, 64]))
        return KVGeometry(kind, layers, 1, 128 + rope, 128, dtype, page)
    heads, dims = draw(st.integers(1, 4)), draw(st.sampled_from([1, 5, 8, 16]))
    return KVGeometry(kind, layers, heads, dims, draw(st.sampled_from([1, 8])), dtype, page)


@settings(max_examples=examples(200), deadline=None)
@given(geometries(), st.sampled_from(Layout), st.data())
def test_triton_and_python_agree_on_addresses(geometry: KVGeometry, layout: Layout, data: st.DataObject) -> None:
    addressing = Addressing.of(geometry, layout, PAGES)
    part = data.draw(st.integers(0, len(geometry.parts) - 1))
    layer = data.draw(st.integers(0, geometry.num_layers - 1))
    head = data.draw(st.integers(0, geometry.num_kv_heads - 1))
    slots = range(PAGES * geometry.page_size)
    got = triton_kernel().addresses(addressing, part, torch.tensor(slots, dtype=torch.int32), layer, head).tolist()
    assert got == [addressing.address(part, slot, layer, head) for slot in slots]


@settings(max_examples=examples(100), deadline=None)
@given(geometries(), st.sampled_from(Layout))
def test_rows_fill_a_pool_without_overlap(geometry: KVGeometry, layout: Layout) -> None:
    addressing = Addressing.of(geometry, layout, PAGES)
    seen = torch.zeros(addressing.total_bytes, dtype=torch.uint8)
    for part, strides in enumerate(addressing.parts):
        for slot in range(PAGES * geometry.page_size):
            for layer in range(geometry.num_layers):
                for head in range(geometry.num_kv_heads):
                    start = addressing.address(part, slot, layer, head)
                    seen[start : start + strides.row_bytes] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("impl", "device"), IMPLEMENTATIONS[1:])
def test_kernels_move_the_same_bytes_as_the_reference(impl: str, device: str, part: int) -> None:
    each = examples(200) // PARTS
    for seed in range(part * each, (part + 1) * each):
        arguments, size = random_transfer(seed)
        wanted = transferred(arguments, size, partial(io_transfer, impl="reference"))
        got = transferred(arguments, size, partial(io_transfer, impl=impl), device)
        assert torch.equal(got[0], wanted[0]), seed
        assert got[1] == wanted[1], seed


@pytest.mark.parametrize("blocks", [1, 3, 0])
@pytest.mark.parametrize("layout", list(Layout))
def test_programs_share_the_tiles_of_uneven_rows(layout: Layout, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel(), "_TILE", 128)
    geometry = KVGeometry(KVKind.MHA, 3, 2, 24, 40, KVDtype.F32, page_size=4)
    both = Addressing.of(geometry, layout, 8), Addressing.of(geometry, Layout.LAYER_FIRST, 8)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(1)).view(4, 8)
    arguments: dict[str, Any] = {
        "src_addr": both[0], "dst_addr": both[1], "src_idx": slots, "dst_idx": slots.flip(1).contiguous(),
        "layers": ((0, 0), (1, 1), (0, 2)), "num_heads": 2, "count": torch.tensor([8, 0, 3, 1], dtype=torch.int32),
        "blocks": blocks,
    }  # fmt: skip
    size = 8 * geometry.page_bytes
    wanted = transferred(arguments, size, partial(io_transfer, impl="reference"))
    got = transferred(arguments, size, partial(io_transfer, impl="triton"))
    assert torch.equal(got[0], wanted[0])
    assert got[1] == wanted[1] == 12 * geometry.token_bytes


def test_heads_that_lie_together_are_one_row() -> None:
    geometry = KVGeometry(KVKind.MHA, 2, 4, 8, 8, KVDtype.F32, 4)
    first, heads = Addressing.of(geometry, Layout.LAYER_FIRST, 2), Addressing.of(geometry, Layout.PAGE_HEAD, 2)
    page = Addressing.of(geometry, Layout.PAGE_FIRST, 2)
    assert [(part.heads, part.row_bytes) for part in part_copies(first, page, 4, per_head=False)] == [(1, 128)] * 2
    assert [(part.heads, part.row_bytes) for part in part_copies(first, heads, 4, per_head=False)] == [(4, 32)] * 2
    assert [(part.heads, part.row_bytes) for part in part_copies(first, page, 4, per_head=True)] == [(1, 32)] * 2


def test_neighbouring_layers_are_one_launch() -> None:
    assert list(layer_runs(((0, 0), (1, 1), (2, 2)))) == [(0, 0, 3)]
    assert list(layer_runs(((3, 0), (4, 1), (6, 2), (7, 2)))) == [(3, 0, 2), (6, 2, 1), (7, 2, 1)]


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


@needs_gpu
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


HOST_PAGES, DEVICE_PAGES = 6, 5


CONFIG = SparseConfig("full")


ENGINES = (Engine.KERNEL, Engine.DMA, Engine.AUTO)


def _pools(
    geometry: KVGeometry, layout: Layout, config: SparseConfig = CONFIG, on: str = "cpu"
) -> tuple[HostKVPool, DeviceKVPool, KVTransfer]:
    runtime = runtime_for(on)
    host, device = HostKVPool(geometry, HOST_PAGES, layout, runtime), DeviceKVPool(geometry, DEVICE_PAGES, runtime)
    fill_coded(host, 1)
    fill_coded(device, 2)
    return host, device, KVTransfer(host, device, runtime, config)


def _expected(
    src: HostKVPool | DeviceKVPool, dst: HostKVPool | DeviceKVPool, pairs: list[tuple[int, int, int]], layers: range,
    per_head: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return all rows of `dst` after (row, source, target) were copied, token by token."""
    geometry = src.geometry
    wanted = []
    for part in range(len(geometry.parts)):
        for layer in range(geometry.num_layers):
            rows, source = all_rows(dst, part, layer), all_rows(src, part, layer)
            for row, here, there in pairs if layer + geometry.start_layer in layers else []:
                heads = slice(row % geometry.num_kv_heads, row % geometry.num_kv_heads + 1) if per_head else slice(None)
                rows[there, heads] = source[here, heads]
            wanted.append(rows)
    return wanted


def _check(dst: HostKVPool | DeviceKVPool, wanted: list[Tensor]) -> None:
    rows = iter(wanted)
    for part in range(len(dst.geometry.parts)):
        for layer in range(dst.geometry.num_layers):
            assert torch.equal(all_rows(dst, part, layer), next(rows)), (part, layer)


@pytest.mark.parametrize(
    ("kernels", "on"),
    [("auto", "cpu"), *(pytest.param(name, "cuda", marks=needs_gpu) for name in ("reference", "triton", "cuda"))],
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", GEOMETRIES)
def test_items_go_where_sent_and_nowhere_else(name: str, layout: Layout, engine: Engine, kernels: str, on: str) -> None:
    geometry = GEOMETRIES[name]
    host, device, transfer = _pools(geometry, layout, CONFIG.replaced(kernels=kernels), on)
    assert host.is_device_readable
    layers = geometry.layers[1:3]
    loads = [(0, 3, 0), (0, 4, 1), (0, 9, 7), (1, 0, 4)]
    wanted = _expected(host, device, loads, layers)
    slots = torch.tensor([[3, 4, 9], [0, -1, 11]]), torch.tensor([[0, 1, 7], [4, 2, -1]], dtype=torch.int32)
    transfer.load(*slots, layers=layers, engine=engine)
    _check(device, wanted)
    stores = [(0, 8, 1), (1, 9, 2)]
    wanted = _expected(device, host, stores, geometry.layers)
    transfer.store(torch.tensor([[8], [9]]), torch.tensor([[1], [2]]), layers=geometry.layers, engine=engine)
    if on == "cuda":
        torch.cuda.synchronize()
    _check(host, wanted)
    wanted = _expected(device, device, [(0, 1, 3)], layers[:1])
    transfer.move(torch.tensor([[1]]), torch.tensor([[3]]), layers=layers[:1], engine=engine)
    _check(device, wanted)
    token = geometry.token_layer_bytes
    counters = transfer.counters
    assert (counters.h2d_bytes, counters.d2h_bytes, counters.d2d_bytes) == (
        len(loads) * token * 2, len(stores) * token * geometry.num_layers, token,
    )  # fmt: skip
    host.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", list(Layout))
def test_a_row_ends_at_its_count(layout: Layout, engine: Engine) -> None:
    geometry = GEOMETRIES["mha"]
    host, device, transfer = _pools(geometry, layout)
    pairs = [(0, 4, 0), (0, 8, 4), (2, 16, 8)]
    pairs = [(row, here + t, there + t) for row, here, there in pairs for t in range(3)]
    wanted = _expected(host, device, pairs, geometry.layers)
    src = torch.tensor([[4, 8, 12], [20, 20, 20], [16, 12, -1]])
    dst = torch.tensor([[0, 4, 8], [12, 12, 12], [8, 13, 14]], dtype=torch.int32)
    count = torch.tensor([2, 0, 1], dtype=torch.int32)
    transfer.load(src, dst, layers=geometry.layers, count=count, unit_tokens=3, engine=engine)
    _check(device, wanted)
    assert transfer.counters.h2d_bytes == len(pairs) * geometry.token_bytes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", list(Layout))
def test_a_row_may_concern_one_head(layout: Layout, engine: Engine) -> None:
    geometry = GEOMETRIES["mha_bf16"]
    host, device, transfer = _pools(geometry, layout)
    generator = torch.Generator().manual_seed(3)
    src = torch.stack([torch.randperm(20, generator=generator)[:4] * 2 for _ in range(8)])
    dst = torch.stack([torch.randperm(20, generator=generator)[:4] * 2 for _ in range(8)])
    dst[4:] = torch.where(dst[4:] % 4 == 0, dst[4:], -1)
    dst[:4] = torch.where(dst[:4] % 4 == 2, dst[:4], -1)
    pairs = [
        (row, int(src[row, j]) + t, int(dst[row, j]) + t)
        for row in range(8) for j in range(4) if dst[row, j] >= 0 for t in range(2)
    ]  # fmt: skip
    wanted = _expected(host, device, pairs, geometry.layers[:2], per_head=True)
    transfer.load(src, dst, layers=geometry.layers[:2], per_head=True, unit_tokens=2, engine=engine)
    _check(device, wanted)
    row_bytes = sum(part.row_bytes for part in geometry.parts)
    assert transfer.counters.h2d_bytes == len(pairs) * row_bytes * 2


def test_pools_of_different_models_are_refused() -> None:
    host, _, _ = _pools(GEOMETRIES["mha"], Layout.PAGE_FIRST)
    _, device, _ = _pools(GEOMETRIES["mla"], Layout.PAGE_FIRST)
    with pytest.raises(ConfigError, match="the same KV"):
        KVTransfer(host, device, NullRuntime(), CONFIG)


def test_arguments_that_do_not_fit_are_refused() -> None:
    _, _, transfer = _pools(GEOMETRIES["mha"], Layout.PAGE_FIRST)
    one, two = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ConfigError, match="src_idx"):
        transfer.load(one, two, layers=range(5, 6))
    with pytest.raises(ConfigError, match="layer_id"):
        transfer.load(one, one, layers=range(4, 6))
    with pytest.raises(ConfigError, match="count"):
        transfer.load(one, one, layers=range(5, 6), count=torch.zeros(2, dtype=torch.int32))
    transfer.load(one[:, :0], one[:, :0], layers=range(5, 6))
    assert transfer.counters.h2d_bytes == 0


@needs_gpu
@pytest.mark.parametrize("kernels", ["triton", "cuda"])
def test_a_captured_load_reads_its_plan_again(kernels: str) -> None:
    geometry = GEOMETRIES["mha"]
    host, device, transfer = _pools(geometry, Layout.PAGE_FIRST, CONFIG.replaced(kernels=kernels), "cuda")
    src, dst = torch.arange(4, device="cuda")[None] + 8, torch.arange(4, device="cuda")[None]
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    transfer.load(src, dst, layers=geometry.layers, count=count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transfer.load(src, dst, layers=geometry.layers, count=count)
    count.fill_(3)
    wanted = _expected(host, device, [(0, 8 + i, i) for i in range(3)], geometry.layers)
    graph.replay()
    torch.cuda.synchronize()
    _check(device, wanted)
    assert transfer.counters.h2d_bytes == 3 * geometry.token_bytes
    host.close()
