"""The pools: views of pages and layers, sidecars, and writes of tokens."""

from __future__ import annotations

import pytest
import torch
from pool_values import GEOMETRIES, all_rows, fill_coded

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import Layout
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.pools.host_pool import HostKVPool
from gpu_tier.runtime import NullRuntime

CPU = NullRuntime()


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_pieces_of_a_page_are_all_of_its_rows_and_no_others(name: str, layout: Layout) -> None:
    geometry = GEOMETRIES[name]
    pool = HostKVPool(geometry, 3, layout, CPU)
    pieces = pool.page_pieces(1)
    parts = len(geometry.parts)
    assert len(pieces) == (parts * geometry.num_layers if layout is Layout.LAYER_FIRST else 1)
    assert sum(piece.numel() for piece in pieces) == geometry.page_bytes
    for piece in pieces:
        piece += 1
    for part in range(parts):
        for layer in range(geometry.num_layers):
            marked = all_rows(pool, part, layer).flatten(1).float().mean(1)
            page = torch.arange(3).repeat_interleave(geometry.page_size)
            assert torch.equal(marked, (page == 1).float())


@pytest.mark.parametrize("layout", list(Layout))
def test_rows_are_read_by_their_slots(layout: Layout) -> None:
    geometry = GEOMETRIES["mha"]
    pool = HostKVPool(geometry, 3, layout, CPU)
    fill_coded(pool, 4)
    slots = torch.tensor([11, 0, 5, 5], dtype=torch.int32)
    for part in range(2):
        got = pool.read(geometry.start_layer + 2, part, slots)
        assert got.shape == (4, geometry.num_kv_heads, geometry.parts[part].row_bytes)
        assert torch.equal(got, all_rows(pool, part, 2)[slots.long()])
    with pytest.raises(ConfigError, match="layer_id"):
        pool.read(0, 0, slots)


def test_sidecars_lie_beside_pages() -> None:
    pool = HostKVPool(GEOMETRIES["mla"], 3, Layout.PAGE_FIRST, CPU)
    before = pool.nbytes
    pool.add_sidecar("index.dsa", 40)
    assert pool.sidecar("index.dsa").shape == (3, 40)
    pool.sidecar("index.dsa")[2] = 9
    assert int(pool.sidecar("index.dsa").sum()) == 9 * 40
    assert pool.nbytes == before + 120
    for name, size in (("index.dsa", 40), ("other", 0)):
        with pytest.raises(ConfigError):
            pool.add_sidecar(name, size)
    with pytest.raises(ConfigError, match="must be one of index"):
        pool.sidecar("index.quest")
    pool.close()
    pool.close()
    assert pool.data.numel() == 0


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_layer_is_a_view_and_writes_reach_it(name: str) -> None:
    geometry = GEOMETRIES[name]
    pool = DeviceKVPool(geometry, 3, CPU)
    assert pool.nbytes == 3 * geometry.page_bytes
    fill_coded(pool, 1)
    layer = geometry.layers[1]
    before = [all_rows(pool, part, index) for part in range(len(geometry.parts)) for index in range(3)]
    slots = torch.tensor([-1, 4, 0, -3])
    k = torch.randn(4, geometry.num_kv_heads, geometry.head_dim)
    v = torch.randn(4, geometry.num_kv_heads, geometry.v_head_dim) if len(geometry.parts) == 2 else None
    pool.write(layer, slots, k, v)
    wanted = iter(before)
    for part, numbers in enumerate((k, v)[: len(geometry.parts)]):
        for index in range(3):
            rows = next(wanted)
            if index == 1 and numbers is not None:
                rows[[4, 0]] = geometry.parts[part].encode(numbers[1:3])
            assert torch.equal(all_rows(pool, part, index), rows)
    view = pool.layer(layer)
    assert view.k.data.data_ptr() == pool.data.data_ptr() + pool.addressing.address(0, 0, 1, 0)
    assert (view.v is None) == (v is None)
    assert view.v_dims == geometry.v_head_dim


@pytest.mark.parametrize("slots", [[-1, -1], [0, -1], [-1, 0], []])
def test_tokens_without_a_slot_change_nothing(slots: list[int]) -> None:
    geometry = GEOMETRIES["mha"]
    pool = DeviceKVPool(geometry, 2, CPU)
    fill_coded(pool, 1)
    rows = all_rows(pool, 0, 0)
    k = torch.randn(len(slots), geometry.num_kv_heads, geometry.head_dim)
    v = torch.randn(len(slots), geometry.num_kv_heads, geometry.v_head_dim)
    pool.write(geometry.start_layer, torch.tensor(slots, dtype=torch.int64), k, v)
    for token, slot in enumerate(slots):
        if slot >= 0:
            rows[slot] = geometry.parts[0].encode(k[token])
    assert torch.equal(all_rows(pool, 0, 0), rows)


def test_parts_have_to_be_those_of_the_model() -> None:
    k = torch.zeros(1, 2, 8)
    with pytest.raises(ConfigError, match="mha stores 2 rows"):
        DeviceKVPool(GEOMETRIES["mha"], 1, CPU).write(5, torch.tensor([0]), k)
    with pytest.raises(ConfigError, match="mla stores 1 rows"):
        DeviceKVPool(GEOMETRIES["mla"], 1, CPU).write(1, torch.tensor([0]), k, k)
