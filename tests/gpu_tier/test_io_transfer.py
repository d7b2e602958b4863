"""The transfer kernel: the addresses that it computes, and the bytes that it moves, in all its implementations."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.geometry import Addressing, KVGeometry, KVKind, Layout
from gpu_tier.kernels.io_transfer import io_transfer
from gpu_tier.kernels.io_transfer.plan import layer_runs, part_copies
from gpu_tier.rows import KVDtype

pytest.importorskip("triton")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PAGES = 3


def triton_kernel() -> ModuleType:
    """Return the kernel: to be imported under the interpreter, so not while tests are collected."""
    return import_module("gpu_tier.kernels.io_transfer.triton_impl")


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


@st.composite
def transfers(draw: st.DrawFn) -> tuple[dict[str, object], int]:
    geometry = draw(geometries())
    layouts = draw(st.sampled_from(Layout)), draw(st.sampled_from(Layout))
    unit = draw(st.sampled_from([1, 2, 3]))
    items = PAGES * geometry.page_size // unit
    per_head = draw(st.booleans())
    rows = geometry.num_kv_heads * draw(st.integers(1, 2)) if per_head else draw(st.integers(1, 3))
    entries = draw(st.integers(1, 4))
    heads = geometry.num_kv_heads if per_head else 1
    # The targets of a head, or of all rows, are unique.
    targets = [draw(st.permutations(range(items))) for _ in range(heads)]
    dst, src = torch.full((rows, entries), -1), torch.full((rows, entries), -1)
    for row in range(rows):
        for entry in range(entries):
            free = targets[row % heads]
            if items and free:
                src[row, entry] = draw(st.integers(-1, items - 1)) * unit
                dst[row, entry] = draw(st.sampled_from([free.pop() * unit, -1]))
    layer = st.integers(0, geometry.num_layers - 1)
    pairs = draw(st.lists(st.tuples(layer, layer), min_size=1, max_size=3, unique_by=lambda pair: pair[1]))
    count = draw(st.none() | st.lists(st.integers(0, entries + 1), min_size=rows, max_size=rows))
    arguments: dict[str, object] = {
        "src_addr": Addressing.of(geometry, layouts[0], PAGES), "dst_addr": Addressing.of(geometry, layouts[1], PAGES),
        "src_idx": src.to(draw(st.sampled_from([torch.int32, torch.int64]))), "dst_idx": dst.to(torch.int32),
        "layers": tuple(pairs), "num_heads": geometry.num_kv_heads, "per_head": per_head, "unit_tokens": unit,
        "count": None if count is None else torch.tensor(count, dtype=torch.int32), "blocks": draw(st.integers(0, 2)),
    }  # fmt: skip
    return arguments, geometry.page_bytes * PAGES


def _run(arguments: dict[str, object], size: int, impl: str, device: str) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(size)
    src = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)
    dst = torch.full((size,), 7, dtype=torch.uint8, device=device)
    moved = torch.tensor([5], device=device)
    on_device = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    io_transfer(src, dst, **on_device, moved=moved, impl=impl)  # type: ignore[arg-type]
    return dst.cpu(), int(moved) - 5


@settings(max_examples=examples(200), deadline=None)
@given(transfers())
def test_triton_moves_the_same_bytes_as_the_reference(transfer: tuple[dict[str, object], int]) -> None:
    wanted, wanted_bytes = _run(*transfer, "reference", "cpu")
    got, got_bytes = _run(*transfer, "triton", "cpu")
    assert torch.equal(got, wanted)
    assert got_bytes == wanted_bytes


@needs_gpu
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@settings(max_examples=examples(400), deadline=None)
@given(transfers())
def test_kernels_of_a_gpu_move_the_same_bytes(impl: str, transfer: tuple[dict[str, object], int]) -> None:
    wanted = _run(*transfer, "reference", "cpu")
    got = _run(*transfer, impl, "cuda")
    assert torch.equal(got[0], wanted[0])
    assert got[1] == wanted[1]


@pytest.mark.parametrize("blocks", [1, 3, 0])
@pytest.mark.parametrize("layout", list(Layout))
def test_programs_share_the_tiles_of_uneven_rows(layout: Layout, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel(), "_TILE", 128)
    geometry = KVGeometry(KVKind.MHA, 3, 2, 24, 40, KVDtype.F32, page_size=4)
    both = Addressing.of(geometry, layout, 8), Addressing.of(geometry, Layout.LAYER_FIRST, 8)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(1)).view(4, 8)
    arguments: dict[str, object] = {
        "src_addr": both[0], "dst_addr": both[1], "src_idx": slots, "dst_idx": slots.flip(1).contiguous(),
        "layers": ((0, 0), (1, 1), (0, 2)), "num_heads": 2, "count": torch.tensor([8, 0, 3, 1], dtype=torch.int32),
        "blocks": blocks,
    }  # fmt: skip
    size = 8 * geometry.page_bytes
    wanted = _run(arguments, size, "reference", "cpu")
    got = _run(arguments, size, "triton", "cpu")
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
