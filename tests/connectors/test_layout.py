"""Iovecs of tensors: the same bytes as plain indexing, for any strides."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import EngineCase, chosen_blocks, engine_cases, ordered, shards
from thoroughness import examples

from kvcm.connectors.layout import BlockLayout, contiguous_runs
from kvcm.connectors.layout.gather import EngineKv, block_memory, gather, scatter
from kvcm.connectors.layout.paged import Axis, PagedKv
from kvcm.connectors.layout.stored_format import (
    AXES,
    KV_PACKED,
    LAYER_FIRST,
    PAGE_HEAD,
    IndexRange,
    Shard,
    StoredFormat,
    format_text,
    parse_format,
    rank_heads,
)
from kvcm.connectors.layout.tensors import StagingBuffers, dtype_name, iovec, run_count
from kvcm.model.errors import InvalidArgumentError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@st.composite
def strided_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Return a view of random numbers: transposed, sliced and stepped."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).to(dtype)
    tensor = numbers.permute(draw(st.permutations(range(len(shape)))))
    for dimension, size in enumerate(tensor.shape):
        start = draw(st.integers(0, size - 1))
        tensor = tensor.narrow(dimension, start, draw(st.integers(1, size - start)))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    return tensor[tuple(slice(None, None, step) for step in steps)]


def raw(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes in row-major order."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


@given(st.lists(strided_tensors(), min_size=1, max_size=4))
def test_iovec_covers_the_elements_in_order(tensors: list[torch.Tensor]) -> None:
    assert b"".join(iovec(tensors)) == b"".join(raw(tensor) for tensor in tensors)


def test_adjacent_runs_become_one() -> None:
    memory = torch.arange(24.0)
    assert len(iovec([memory[:6], memory[6:12]])) == 1
    assert len(iovec([memory[6:12], memory[:6]])) == 2
    assert [view.nbytes for view in iovec([memory.view(4, 6)[:, :3]])] == [12] * 4


def test_repeated_memory_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="repeat memory"):
        iovec([torch.zeros(1).expand(4)])
    assert contiguous_runs((3, 0), (5, 1), 4).starts(8) == []


def test_other_devices_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="meta"):
        iovec([torch.zeros(2, device="meta")])


LAYOUT = BlockLayout(layers=2, kv_heads=3, head_dim=4, block_tokens=5, dtype="float32")


@given(st.sampled_from(DTYPES), st.permutations([0, 1, 2]), st.integers(0, 1))
def test_staged_blocks_are_the_same_bytes(dtype: torch.dtype, order: list[int], slot: int) -> None:
    # Memory [head][dim][token] or the like with 1,100 tokens: more pieces than a system call takes, hence staged.
    layout = BlockLayout(layers=1, kv_heads=2, head_dim=3, block_tokens=1100, dtype=dtype_name(dtype))
    shape = [layout.piece_shape[dimension] for dimension in order]
    inverse = [order.index(dimension) for dimension in range(3)]
    pieces = [torch.randn(shape).to(dtype).permute(inverse)[:, :, :] for _ in range(2)]
    staging = StagingBuffers(layout, slots=2)
    block = staging.host_block(pieces, slot)
    block.gather()
    stored = b"".join(block.buffers)
    assert stored == b"".join(raw(piece) for piece in pieces)
    assert bool(block.copies) == (run_count(pieces) > 1024)

    targets = [torch.zeros(shape, dtype=dtype).permute(inverse) for _ in range(2)]
    block = staging.host_block(targets, slot)
    position = 0
    for view in block.buffers:
        view[:] = stored[position : position + len(view)]
        position += len(view)
    block.scatter()
    assert all(torch.equal(target, piece) for target, piece in zip(targets, pieces, strict=True))


def test_staged_blocks_are_limited_by_slots_and_direct_ones_are_not() -> None:
    direct = StagingBuffers(LAYOUT, slots=2)
    assert len(direct.host_blocks(list(torch.randn(4, 3, 5, 4)) for _ in range(10))) == 10

    layout = BlockLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=1100, dtype="float32")
    scattered = [list(torch.randn(2, 1, 2, 1100).transpose(2, 3)) for _ in range(4)]
    blocks = StagingBuffers(layout, slots=3).host_blocks(scattered)
    assert len(blocks) == 3
    for block in blocks:
        block.gather()
    for pieces, block in zip(scattered, blocks, strict=False):  # slots do not overlap
        assert b"".join(block.buffers) == b"".join(raw(piece) for piece in pieces)


def test_pieces_must_fit_the_layout() -> None:
    staging = StagingBuffers(LAYOUT)
    good = [torch.zeros(3, 5, 4) for _ in range(4)]
    staging.host_block(good, 0)
    for bad in (good[:3], [torch.zeros(3, 5, 5)] * 4, [piece.double() for piece in good]):
        with pytest.raises(InvalidArgumentError, match="must be"):
            staging.host_block(bad, 0)
    with pytest.raises(InvalidArgumentError, match="slots"):
        StagingBuffers(LAYOUT, slots=0)


def test_fingerprints_differ_with_every_field() -> None:
    values = {"layers": 2, "kv_heads": 3, "head_dim": 4, "block_tokens": 5, "dtype": "float32"}
    changed = [{**values, name: 7} for name in ("layers", "kv_heads", "head_dim", "block_tokens")]
    changed.append({**values, "dtype": "bfloat16"})
    prints = {BlockLayout(**fields).fingerprint for fields in [values, *changed]}  # type: ignore[arg-type]
    assert len(prints) == 6
    assert LAYOUT.fingerprint == (
        "kvcm-block/1 layers=2 kv_heads=3 head_dim=4 block_tokens=5 dtype=float32 order=layer.kv.head.token.dim"
    )


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "block_tokens"])
def test_layouts_are_checked(field: str) -> None:
    values = {"layers": 1, "kv_heads": 1, "head_dim": 1, "block_tokens": 1, field: 0}
    with pytest.raises(InvalidArgumentError, match=f"{field} is 0"):
        BlockLayout(**values, dtype="float32")
    with pytest.raises(InvalidArgumentError, match="int3"):
        BlockLayout(1, 1, 1, 1, "int3")


# ---- Descriptions of paged tensors: the layouts that engines have, and invalid descriptions ----


def described(axes: Sequence[str], shape: Sequence[int], block_tokens: int | None = None) -> PagedKv:
    """Describe a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return PagedKv.named(axes, shape, strides, "float16", block_tokens)


@pytest.mark.parametrize(
    ("axes", "sizes", "block_tokens", "shape", "strides"),
    [
        ("block head token kv_dim", (100, 4, 32, 64), None, (100, 2, 4, 32, 32), (8192, 32, 2048, 64, 1)),
        ("kv block token head dim", (2, 99, 16, 8, 128), None, (99, 2, 8, 16, 128), (16384, 1622016, 128, 1024, 1)),
        ("slot head dim", (160, 8, 128), 16, (10, 1, 8, 16, 128), (16384, 0, 128, 1024, 1)),
        ("block token dim", (10, 64, 576), None, (10, 1, 1, 64, 576), (36864, 0, 0, 576, 1)),
    ],
    ids=["kv behind heads as in vLLM 0.32", "kv outermost as in older vLLM", "slots as in SGLang", "latent"],
)
def test_paged_kv_of_engines(
    axes: str, sizes: Sequence[int], block_tokens: int | None, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    paged = described(axes.split(), sizes, block_tokens)
    assert (paged.shape, paged.strides) == (shape, strides)


@pytest.mark.parametrize(
    ("axes", "shape", "block_tokens", "text"),
    [
        (("block", "heads", "token", "dim"), (2, 2, 2, 2), None, "axes has 'heads', must be of block, token"),
        (("block", "block", "token", "dim"), (2, 2, 2, 2), None, "must name each axis once"),
        (("block", "token", "dim"), (2, 2, 2, 2), None, "axes has 3 names, must be one for each of the 4 sizes"),
        (("block", "head", "dim"), (2, 2, 2), None, "must have block and token, or slot alone"),
        (("block", "slot", "dim"), (2, 2, 2), None, "must have block and token, or slot alone"),
        (("block", "token", "head"), (2, 2, 2), None, "must have dim with or without kv, or kv_dim alone"),
        (("block", "token", "kv", "kv_dim"), (2, 2, 2, 2), None, "or kv_dim alone"),
        (("block", "token", "kv_dim"), (2, 2, 3), None, "kv_dim has size 3, must be even"),
        (("block", "token", "kv", "dim"), (2, 2, 3, 2), None, "kv has size 3, must be 2 for K and V or 1"),
        (("block", "token", "dim"), (0, 2, 2), None, "block has size 0, stride 4, must be > 0"),
        (("block", "token", "dim"), (2, 4, 2), 3, "block_tokens is 3, must be 4 as the axis says"),
        (("slot", "dim"), (12, 2), None, "block_tokens is None, must divide the 12 slots"),
        (("slot", "dim"), (12, 2), 5, "block_tokens is 5, must divide the 12 slots"),
        (("slot", "dim"), (12, 2), -3, "block_tokens is -3, must divide the 12 slots"),
    ],
)
def test_wrong_axes_are_refused(axes: Sequence[str], shape: Sequence[int], block_tokens: int | None, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        described(axes, shape, block_tokens)


def test_elements_that_share_memory_are_refused() -> None:
    """Writing to them has no meaning: a repeated axis, and axes that step into each other."""
    axes = ("block", "token", "dim")
    with pytest.raises(InvalidArgumentError, match="token has size 4, stride 0"):
        PagedKv.named(axes, (2, 4, 8), (32, 0, 1), "float16")
    with pytest.raises(InvalidArgumentError, match="share memory"):
        PagedKv.named(axes, (2, 4, 8), (32, 7, 1), "float16")
    with pytest.raises(InvalidArgumentError, match="share memory"):
        PagedKv.named(axes, (2, 4, 8), (31, 8, 1), "float16")
    assert PagedKv.named(axes, (2, 4, 8), (99, 9, 1), "float16").token == Axis(4, 9)


# ---- The stored format: which bytes a reader takes, for any sizes of the groups that wrote and read ----

NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "uint8": np.uint8}
FIXED = settings(max_examples=examples(150), deadline=None, derandomize=True)
FORMAT = StoredFormat((16, 32), heads=8, head_shards=2, kv_parts=2, head_dim=128, block_tokens=64, dtype="bfloat16")


@st.composite
def stored_formats(draw: st.DrawFn) -> StoredFormat:
    """Return small formats of any order, cut in any way."""
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    return StoredFormat(
        layer_ends=tuple(sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3)))),
        heads=heads,
        head_shards=draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= heads])),
        kv_parts=draw(st.sampled_from([1, 2])),
        head_dim=draw(st.integers(1, 3)),
        block_tokens=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(list(NUMPY_DTYPES))),
        order=".".join(draw(st.permutations(AXES))),
    )


def numbers(stored: StoredFormat) -> np.ndarray:
    """Return a block of the whole model, [layer, kv, head, token, dim], of random bits."""
    item = np.dtype(NUMPY_DTYPES[stored.dtype]).itemsize
    shape = (stored.layers, stored.kv_parts, stored.heads, stored.block_tokens, stored.head_dim)
    return np.random.default_rng(7).integers(0, 256, (*shape, item), np.uint8).view(f"V{item}")[..., 0]


def part(block: np.ndarray, shard: Shard) -> np.ndarray:
    """Return a shard of a block by plain indexing."""
    return block[shard.layers.first : shard.layers.end, :, shard.heads.first : shard.heads.end]


@FIXED
@given(stored_formats(), st.data())
def test_any_shard_is_put_together_from_what_others_wrote(stored: StoredFormat, data: st.DataObject) -> None:
    """The bytes of `reads`, one behind the other, are the shard's array in the same order; reads cover it once."""
    block = numbers(stored)
    files = {spec.name: ordered(part(block, spec.shard), stored) for spec in stored.specs}
    wanted = data.draw(shards(stored.model))
    assembled = np.zeros(block.shape, block.dtype)
    for read in stored.reads(wanted):
        held = files[read.spec.name]
        assert held.nbytes == read.spec.size_bytes
        taken = b"".join(held[first : first + size].tobytes() for first, size in read.ranges)
        assert taken == ordered(part(block, read.shard), stored).tobytes()
        part(assembled, read.shard)[...] = part(block, read.shard)
    assert part(assembled, wanted).tobytes() == part(block, wanted).tobytes()
    assert sum(stored.shard_bytes(read.shard) for read in stored.reads(wanted)) == stored.shard_bytes(wanted)


@FIXED
@given(stored_formats(), st.data())
def test_ranges_ascend_apart_from_each_other(stored: StoredFormat, data: st.DataObject) -> None:
    """No two ranges touch, so a reader makes as few requests as there can be."""
    spec = data.draw(st.sampled_from(stored.specs))
    ranges = stored.byte_ranges(spec.shard, data.draw(shards(spec.shard)))
    ends = [first + size for first, size in ranges]
    assert all(end < later.offset_bytes for end, later in zip(ends, ranges[1:], strict=False))
    assert ranges[0].offset_bytes >= 0
    assert ends[-1] <= spec.size_bytes


def test_a_rank_writes_what_it_has_all_of() -> None:
    """A rank of a larger group than the specs are cut for has no whole spec and writes nothing."""
    assert [spec.name for spec in FORMAT.specs_within(Shard(IndexRange(0, 16), IndexRange(0, 8)))] == [
        "layers0-16.heads0-4",
        "layers0-16.heads4-8",
    ]
    assert FORMAT.specs_within(Shard(IndexRange(0, 32), IndexRange(0, 2))) == ()


def test_shards_outside_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"shard is layers0-33\.heads0-8, must lie in layers0-32\.heads0-8"):
        FORMAT.reads(Shard(IndexRange(0, 33), IndexRange(0, 8)))
    with pytest.raises(InvalidArgumentError, match=r"must lie in layers0-16\.heads0-4"):
        FORMAT.byte_ranges(FORMAT.specs[0].shard, FORMAT.specs[1].shard)
    for layers, heads in [
        (IndexRange(0, 0), IndexRange(0, 1)),
        (IndexRange(0, 1), IndexRange(-1, 1)),
        (IndexRange(2, 1), IndexRange(0, 1)),
    ]:
        with pytest.raises(InvalidArgumentError, match="must be 0 <= first < end"):
            Shard(layers, heads)


@pytest.mark.parametrize(
    ("heads", "rank", "ranks", "text"),
    [(8, 2, 2, "rank is 2, must be 0 to 1"), (8, 0, 3, "must divide the 8 KV heads"), (8, 0, 0, "must both be > 0")],
)
def test_ranks_that_cannot_be_are_refused(heads: int, rank: int, ranks: int, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        rank_heads(heads, rank, ranks)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("layer_ends", (), "layer_ends is"),
        ("layer_ends", (4, 4), "layer_ends is"),
        ("layer_ends", (1 << 21,), "layers is 2097152"),
        ("heads", 0, "heads is 0"),
        ("head_shards", 3, "head_shards is 3, must divide the 8 heads"),
        ("kv_parts", 3, "kv_parts is 3, must be 2 for K and V or 1"),
        ("block_tokens", -1, "block_tokens is -1"),
        ("dtype", "int3", "dtype is 'int3'"),
        ("order", "layer.kv.head.token", "order is"),
        ("order", "layer.kv.head.token.token", "order is"),
    ],
)
def test_formats_are_checked(field: str, value: object, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        replace(FORMAT, **{field: value})  # type: ignore[arg-type]


def test_formats_of_too_many_specs_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must be at most 4096 specs together"):
        replace(FORMAT, heads=4096, head_shards=4096)


@FIXED
@given(stored_formats())
def test_texts_are_read_back(stored: StoredFormat) -> None:
    """Equal formats have equal texts, and a text gives the format that it was made from."""
    assert parse_format(format_text(stored)) == stored


def test_text_of_a_format() -> None:
    """The text is part of the registration of instances: it may not change within a version."""
    assert format_text(FORMAT) == (
        "kvcm-block/2 layer_ends=16,32 heads=8 head_shards=2 kv_parts=2 head_dim=128 block_tokens=64"
        f" dtype=bfloat16 order={LAYER_FIRST}"
    )


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("heads=8", "heads=08", "must be as in"),
        ("heads=8", "heads=٨", "must be as in"),
        ("token.dim", "token.dim\n", "must be as in"),
        ("token.dim", "token.dim extra=1", "must be as in"),
        (" kv_parts=2", "", "must be as in"),
        ("kvcm-block/2", "kvcm-block/1", "has version 1, must be 2"),
        ("16,32", "16,,32", "layer_ends is '16,,32'"),
        ("16,32", "016,32", "layer_ends is '016,32'"),
        ("16,32", "32,16", "layer_ends is"),
        ("bfloat16", "bfloat17", "dtype is 'bfloat17'"),
        ("layer.kv", "kv.kv", "order is"),
    ],
)
def test_other_texts_are_refused(old: str, new: str, text: str) -> None:
    changed = format_text(FORMAT).replace(old, new)
    assert changed != format_text(FORMAT)
    with pytest.raises(InvalidArgumentError, match=text):
        parse_format(changed)


# ---- Paged KV in any layout: to stored blocks and back, bit for bit, and nothing else is touched ----


@FIXED
@given(engine_cases(), st.data())
def test_gathered_bytes_are_those_of_plain_indexing(case: EngineCase, data: st.DataObject) -> None:
    """`gather` gives the stored bytes, also into rows that lie apart, and leaves the engine as it is."""
    logical = case.logical(seed=1)
    memory = case.memory(logical)
    ids = data.draw(chosen_blocks(case))
    shard = data.draw(shards(case.shard))
    row_bytes = case.stored.shard_bytes(shard)
    gap = data.draw(st.sampled_from([0, 8]))  # rows begin at multiples of every type
    out = torch.full((len(ids) // case.places, row_bytes + gap), 0xAA, dtype=torch.uint8)
    gather(case.engine(memory), ids, shard, out[:, :row_bytes])
    assert np.array_equal(out[:, :row_bytes].numpy(), case.stored_bytes(logical, ids, shard))
    assert (out[:, row_bytes:] == 0xAA).all()
    assert np.array_equal(memory, case.memory(logical))


@FIXED
@given(engine_cases(), st.data())
def test_scattered_bytes_reach_the_named_blocks_and_no_others(case: EngineCase, data: st.DataObject) -> None:
    """After `scatter` the whole memory is what it was, but for the named blocks, layers and heads."""
    source, target = case.logical(seed=1), case.logical(seed=2)
    memory = case.memory(target)
    ids = data.draw(chosen_blocks(case))
    shard = data.draw(shards(case.shard))
    stored = torch.from_numpy(case.stored_bytes(source, ids, shard))
    scatter(case.engine(memory), ids, shard, stored)
    layers, heads = case.inside(shard)
    for block in ids:
        target[layers, block, :, heads] = source[layers, block, :, heads]
    assert np.array_equal(memory, case.memory(target))


@FIXED
@given(engine_cases(), st.data())
def test_memory_of_a_block_is_its_stored_bytes(case: EngineCase, data: st.DataObject) -> None:
    """The pieces of `block_memory` read as the stored bytes, and writing them is a scatter."""
    logical = case.logical(seed=1)
    memory = case.memory(logical)
    ids = list(data.draw(st.permutations(range(case.blocks))))[: case.places]
    shard = data.draw(shards(case.shard))
    pieces = block_memory(case.engine(memory), ids, shard)
    assert pieces is not None
    assert b"".join(pieces) == case.stored_bytes(logical, ids, shard).tobytes()
    for piece in pieces:
        piece[:] = bytes(len(piece))
    zeroed = case.memory(logical)
    scatter(case.engine(zeroed), ids, shard, torch.zeros(1, case.stored.shard_bytes(shard), dtype=torch.uint8))
    assert np.array_equal(memory, zeroed)


@pytest.mark.parametrize("order", [LAYER_FIRST, PAGE_HEAD, KV_PACKED])
@pytest.mark.parametrize(("heads", "kv_parts"), [(4, 2), (1, 1)], ids=["gqa", "mla"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (2, 1), (4, 2), (1, 4), (8, 2)])
def test_what_one_group_stored_another_loads(writers: int, readers: int, heads: int, kv_parts: int, order: str) -> None:
    """Ranks of one tensor-parallel size gather and write, ranks of another read their ranges and scatter."""
    stored = StoredFormat((3,), heads, heads, kv_parts, head_dim=4, block_tokens=6, dtype="bfloat16", order=order)
    values = torch.randn(3, 5, heads, 6, kv_parts * 4).bfloat16()  # [layer, block, head, token, kv_dim]

    def rank_of(memory: torch.Tensor, rank: int, ranks: int) -> EngineKv:
        mine = rank_heads(heads, rank, ranks).heads
        layers = [[layer[:, mine.first : mine.end]] for layer in memory]
        axes = ("block", "head", "token", "kv_dim" if kv_parts == 2 else "dim")
        return EngineKv(stored, Shard(IndexRange(0, 3), mine), layers, axes)

    written: dict[str, torch.Tensor] = {}
    for rank in range(writers):
        engine = rank_of(values, rank, writers)
        if rank_heads(heads, rank, writers).replica == 0:
            for spec in stored.specs_within(engine.shard):
                written[spec.name] = torch.empty(2, spec.size_bytes, dtype=torch.uint8)
                gather(engine, [4, 1], spec.shard, written[spec.name])
    for rank in range(readers):
        loaded = torch.zeros_like(values)
        engine = rank_of(loaded, rank, readers)
        for read in stored.reads(engine.shard):
            parts = [written[read.spec.name][:, first : first + size] for first, size in read.ranges]
            scatter(engine, [0, 2], read.shard, torch.cat(parts, dim=1))
        mine = engine.shard.heads
        assert torch.equal(loaded[:, [0, 2], mine.first : mine.end], values[:, [4, 1], mine.first : mine.end])
        assert not loaded[:, [1, 3, 4]].any()


def stored_format(order: str, **changes: int) -> StoredFormat:
    fields = {"heads": 4, "head_shards": 1, "kv_parts": 2, "head_dim": 32, "block_tokens": 32, **changes}
    return StoredFormat(layer_ends=(3,), dtype="float32", order=order, **fields)


@pytest.mark.parametrize(("order", "pieces"), [(KV_PACKED, 3), (LAYER_FIRST, 3 * 2 * 4 * 32), (PAGE_HEAD, 768)])
def test_blocks_stored_in_the_engines_order_are_a_piece_per_layer(order: str, pieces: int) -> None:
    """All layers are views of one storage, K and V packed, as vLLM 0.32 keeps them."""
    stored = stored_format(order)
    memory = torch.randn(3, 10, 4, 32, 64)
    engine = EngineKv(stored, stored.model, [[layer] for layer in memory], ("block", "head", "token", "kv_dim"))
    found = block_memory(engine, [7], stored.model)
    assert found is not None
    assert len(found) == pieces
    if order == KV_PACKED:
        assert b"".join(found) == memory[:, 7].numpy().tobytes()


def test_memory_in_too_many_pieces_is_gathered() -> None:
    """A system call takes 1,024 pieces; 4 heads of 256 tokens of K and V would be 2,048."""
    stored = StoredFormat((1,), heads=4, head_shards=1, kv_parts=2, head_dim=2, block_tokens=256, dtype="float32")
    axes = ("block", "token", "head", "kv_dim")
    engine = EngineKv(stored, stored.model, [[torch.zeros(2, 256, 4, 4)]], axes)
    assert block_memory(engine, [0], stored.model) is None
    by_token = replace(stored, order="token.layer.head.kv.dim")
    assert block_memory(EngineKv(by_token, stored.model, [[torch.zeros(2, 256, 4, 4)]], axes), [0], stored.model)


def test_ids_that_are_not_blocks_are_refused_before_anything_is_copied() -> None:
    """A wrong id never reads or writes memory outside the tensors."""
    stored = stored_format(LAYER_FIRST, block_tokens=64)
    memory = torch.zeros(3, 10, 4, 32, 64)
    engine = EngineKv(stored, stored.model, [[layer] for layer in memory], ("block", "head", "token", "kv_dim"))
    rows = torch.full((2, stored.shard_bytes(stored.model)), 7, dtype=torch.uint8)
    for ids, text in [([0, 1, 2, 10], "has 10"), ([0, 1, 2, -1], "has -1"), ([0, 1, 2], "must have 4: 2 per stored")]:
        with pytest.raises(InvalidArgumentError, match=text):
            scatter(engine, ids, stored.model, rows)
        with pytest.raises(InvalidArgumentError, match=text):
            gather(engine, ids, stored.model, rows)
    with pytest.raises(InvalidArgumentError, match="each block once"):
        scatter(engine, [0, 1, 2, 1], stored.model, rows)
    with pytest.raises(InvalidArgumentError, match="block_ids has 3 ids"):
        block_memory(engine, [0, 1, 2], stored.model)
    assert not memory.any()
    assert (rows == 7).all()


def test_memory_that_does_not_fit_is_refused() -> None:
    """Rows have the shard's bytes, uint8, contiguous, on the engine's device; the shard is one that the rank has."""
    stored = stored_format(LAYER_FIRST)
    half = Shard(IndexRange(0, 3), IndexRange(0, 2))
    layers = [[torch.zeros(10, 2, 32, 64)] for _ in range(3)]
    engine = EngineKv(stored, half, layers, ("block", "head", "token", "kv_dim"))
    size = stored.shard_bytes(half)
    for bad in (
        torch.zeros(1, size - 4, dtype=torch.uint8),
        torch.zeros(1, size, dtype=torch.int8),
        torch.zeros(1, 1, size, dtype=torch.uint8),
        torch.zeros(1, 2 * size, dtype=torch.uint8)[:, ::2],
        torch.zeros(1, size + 1, dtype=torch.uint8)[:, 1:],
        torch.zeros(1, size, dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"memory .* must be"):
            gather(engine, [0], half, bad)
    with pytest.raises(InvalidArgumentError, match=r"must lie in layers0-3\.heads0-2"):
        gather(engine, [0], stored.model, torch.zeros(1, 2 * size, dtype=torch.uint8))


def test_tensors_that_do_not_fit_are_refused() -> None:
    """Wrong heads, dims, types, blocks, counts of layers: the message names the layer and what it must be."""
    stored = stored_format(LAYER_FIRST)
    axes = ("block", "head", "token", "kv_dim")
    good = torch.zeros(10, 4, 32, 64)
    for tensors, text in [
        ([[good]] * 2, "layers has 2 entries, must be 3"),
        ([[good], [good], [good.double()]], "must all be float32"),
        ([[good], [good], [good[:, :2]]], "layer 2 is .* must be"),
        ([[good], [good], [good[..., :62]]], "layer 2 is .* must be"),
        ([[good], [good, good], [good]], "layer 1 has 2 tensors"),
        ([[], [], []], "without tensors"),
        ([[good, good]] * 3, "layer 0 is .* must be"),
        ([[good], [good.to("meta")], [good]], "layer 1 is on meta"),
        ([[torch.zeros(10, 4, 24, 64)]] * 3, "blocks of 24 tokens, must divide the 32"),
        ([[torch.zeros(10, 4, 64, 64)]] * 3, "blocks of 64 tokens, must divide the 32"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            EngineKv(stored, stored.model, tensors, axes)
    with pytest.raises(InvalidArgumentError, match=r"must lie in layers0-3\.heads0-4"):
        EngineKv(stored, Shard(IndexRange(0, 4), IndexRange(0, 4)), [[good]] * 4, axes)


# ---- The Triton kernel against the torch reference, in Triton's interpreter ----

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# The interpreter is chosen when Triton is imported, for the whole process: hence one of its own.
PROGRAM = """
import sys

import pytest
import torch

from kvcm.connectors.layout import rows_triton
from kvcm.connectors.layout.gather import gather_rows_on, scatter_rows_on

assert gather_rows_on(torch.device("cpu")) is rows_triton.gather_rows
assert scatter_rows_on(torch.device("cpu")) is rows_triton.scatter_rows

# More elements than a tile has, of which the last one is not full.
paged, packed = torch.randn(5, 2, 3, 7, 50), torch.zeros(2, 2, 3, 7, 50)
back = torch.zeros_like(paged)
ids = torch.tensor([4, 1])
rows_triton.gather_rows(paged, ids, packed)
assert torch.equal(packed, paged[ids])
rows_triton.scatter_rows(back, ids, packed)
assert torch.equal(back[ids], paged[ids]) and not back[[0, 2, 3]].any()

sys.exit(pytest.main(["-q", "-k", "gathered_bytes or scattered_bytes", sys.argv[1]]))
"""

# Triton's compiler needs no GPU, and accepts less than the interpreter does.
COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kvcm.connectors.layout.rows_triton import _kernel

for to_paged in (False, True):
    fixed = {"to_paged": to_paged, "tile": 1024, "paged_dim": 1, "packed_dim": 1}
    types = {"paged": "*i64", "packed": "*i64", "rows": "*i64"} | dict.fromkeys(fixed, "constexpr")
    signature = {name: types.get(name, "i32") for name in _kernel.arg_names}
    values = {(_kernel.arg_names.index(name),): value for name, value in fixed.items()}
    assert compile(ASTSource(_kernel, signature, values), target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


@needs_triton
@pytest.mark.ci
def test_kernel_moves_the_same_bits_as_torch() -> None:
    """In the tests of the reference, with their layouts, types and shards."""
    run(PROGRAM, interpret="1")


@needs_triton
@pytest.mark.ci
def test_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """In both directions, to machine code of compute capability 9.0."""
    run(COMPILED, interpret="0", TRITON_CACHE_DIR=str(tmp_path))


def run(program: str, interpret: str, **environment: str) -> None:
    """Run a program in a process of its own and fail with what it says."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, __file__],
        env={**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": path, **environment},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
