"""Transfers between the pools: every layout, every row, exactly the bytes that were asked for."""

from __future__ import annotations

import pytest
import torch
from pool_values import GEOMETRIES, all_rows, fill_coded
from torch import Tensor

from gpu_tier.config import SparseConfig
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry, Layout
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.host_pool import HostKVPool
from gpu_tier.pools.transfer import Engine, KVTransfer
from gpu_tier.runtime import NullRuntime, runtime_for

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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", GEOMETRIES)
def test_items_go_where_they_were_sent_and_nothing_else_changes(name: str, layout: Layout, engine: Engine) -> None:
    geometry = GEOMETRIES[name]
    host, device, transfer = _pools(geometry, layout)
    layers = geometry.layers[1:3]
    loads = [(0, 3, 0), (0, 4, 1), (0, 9, 7), (1, 0, 4)]
    wanted = _expected(host, device, loads, layers)
    slots = torch.tensor([[3, 4, 9], [0, -1, 11]]), torch.tensor([[0, 1, 7], [4, 2, -1]], dtype=torch.int32)
    transfer.load(*slots, layers=layers, engine=engine)
    _check(device, wanted)
    stores = [(0, 8, 1), (1, 9, 2)]
    wanted = _expected(device, host, stores, geometry.layers)
    transfer.store(torch.tensor([[8], [9]]), torch.tensor([[1], [2]]), layers=geometry.layers, engine=engine)
    _check(host, wanted)
    wanted = _expected(device, device, [(0, 1, 3)], layers[:1])
    transfer.move(torch.tensor([[1]]), torch.tensor([[3]]), layers=layers[:1], engine=engine)
    _check(device, wanted)
    token = geometry.token_layer_bytes
    counters = transfer.counters
    assert (counters.h2d_bytes, counters.d2h_bytes, counters.d2d_bytes) == (
        len(loads) * token * 2, len(stores) * token * geometry.num_layers, token,
    )  # fmt: skip


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


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_round_trip_gives_the_numbers_back(name: str, layout: Layout) -> None:
    geometry = GEOMETRIES[name]
    _, device, transfer = _pools(geometry, layout)
    heads = geometry.num_kv_heads
    slots = torch.tensor([geometry.page_size, 0, -1, geometry.page_size + 1])
    written: dict[int, tuple[Tensor, Tensor | None]] = {}
    for layer in geometry.layers:
        k = torch.arange(4.0)[:, None, None] + 10 * torch.arange(heads)[:, None] + 100.0 * layer
        k = k.expand(4, heads, geometry.head_dim)
        v = -k[..., :1].expand(4, heads, geometry.v_head_dim) if len(geometry.parts) > 1 else None
        device.write(layer, slots, k, v)
        written[layer] = k, v
    pages = torch.arange(0, geometry.page_size * 2)[None]
    transfer.store(pages, pages + geometry.page_size, layers=geometry.layers)
    device.data.zero_()
    transfer.load(pages + geometry.page_size, pages + 2, layers=geometry.layers)
    valid = slots >= 0
    for layer, (k, v) in written.items():
        rows = device.layer(layer)
        for got, numbers in ((rows.k, k), (rows.v, v)):
            if got is not None and numbers is not None:
                rounded = got.format.decode(got.format.encode(numbers[valid]))
                assert torch.equal(got.decode(slots[valid] + 2), rounded), layer


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernels", ["reference", "triton", "cuda"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_gpu_and_its_host_exchange_the_same_bytes(name: str, layout: Layout, engine: Engine, kernels: str) -> None:
    geometry = GEOMETRIES[name]
    host, device, transfer = _pools(geometry, layout, CONFIG.replaced(kernels=kernels), "cuda")
    assert host.is_device_readable
    slots = torch.tensor([[3, 4, 9], [0, -1, 11]]), torch.tensor([[0, 1, 7], [4, 2, -1]])
    wanted = _expected(host, device, [(0, 3, 0), (0, 4, 1), (0, 9, 7), (1, 0, 4)], geometry.layers)
    transfer.load(*slots, layers=geometry.layers, engine=engine)
    _check(device, wanted)
    wanted = _expected(device, host, [(0, 8, 1), (1, 9, 2)], geometry.layers)
    transfer.store(torch.tensor([[8], [9]]), torch.tensor([[1], [2]]), layers=geometry.layers, engine=engine)
    torch.cuda.synchronize()
    _check(host, wanted)
    assert transfer.counters.h2d_bytes == 4 * geometry.token_bytes
    assert transfer.counters.d2h_bytes == 2 * geometry.token_bytes
    host.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernels", ["triton", "cuda"])
def test_a_captured_load_reads_its_plan_anew(kernels: str) -> None:
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
