"""The stored format: which bytes a reader takes, for any sizes of the groups that wrote and read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import ordered, shards, spans

from connectors.layout.shard import Shard, Span, rank_heads
from connectors.layout.stored import AXES, LAYER_FIRST, PAGE_HEAD, ByteRange, StoredFormat
from connectors.layout.stored_text import format_text, parse_format
from kvcm.model.errors import InvalidArgumentError

DTYPES = {"float32": np.float32, "float16": np.float16, "uint8": np.uint8}
FIXED = settings(max_examples=150, deadline=None, derandomize=True)
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
        dtype=draw(st.sampled_from(list(DTYPES))),
        order=".".join(draw(st.permutations(AXES))),
    )


def numbers(stored: StoredFormat) -> np.ndarray:
    """Return a block of the whole model, [layer, kv, head, token, dim], of random bits."""
    item = np.dtype(DTYPES[stored.dtype]).itemsize
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


@FIXED
@given(stored_formats())
def test_specs_cover_a_block_once(stored: StoredFormat) -> None:
    """Every layer and head is in exactly one spec; their bytes are those of a block; names differ."""
    held = np.zeros((stored.layers, stored.heads), int)
    for spec in stored.specs:
        held[spec.shard.layers.first : spec.shard.layers.end, spec.shard.heads.first : spec.shard.heads.end] += 1
    assert (held == 1).all()
    assert sum(spec.size_bytes for spec in stored.specs) == stored.shard_bytes(stored.model)
    assert len({spec.name for spec in stored.specs}) == len(stored.specs)


@FIXED
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]))
def test_ranks_of_any_group_write_and_read_specs_of_one_head(heads: int, writers: int, readers: int) -> None:
    """Stored per head, a block written by one group is complete, and each rank of another reads whole specs."""
    stored = replace(FORMAT, layer_ends=(4,), heads=heads, head_shards=heads, order=PAGE_HEAD)
    written = []
    for rank in range(writers):
        mine, replica = rank_heads(heads, rank, writers)
        if replica == 0:
            written += stored.specs_within(Shard(Span(0, 4), mine))
    assert sorted(written) == sorted(stored.specs)
    for rank in range(readers):
        mine = rank_heads(heads, rank, readers).heads
        reads = stored.reads(Shard(Span(0, 4), mine))
        assert len(reads) == mine.size
        assert all(read.ranges == (ByteRange(0, read.spec.size_bytes),) for read in reads)


def test_half_of_a_larger_ranks_spec_is_one_range_when_heads_are_outermost() -> None:
    """TP=2 wrote, TP=4 reads: one range of half a spec; layer first, it is one per layer and K and V."""
    quarter = Shard(Span(0, 16), rank_heads(8, 1, 4).heads)
    by_head, by_layer = replace(FORMAT, order=PAGE_HEAD), FORMAT
    (read,) = by_head.reads(quarter)
    assert read.spec.name == "layers0-16.heads0-4"
    assert read.ranges == (ByteRange(read.spec.size_bytes // 2, read.spec.size_bytes // 2),)
    (read,) = by_layer.reads(quarter)
    assert len(read.ranges) == 16 * 2


@FIXED
@given(spans(Span(0, 16)))
def test_layers_are_one_range_when_layers_are_outermost(layers: Span) -> None:
    """A rank that reads layer by layer reads one range each time, and one per head when heads are outermost."""
    spec = FORMAT.specs[0]
    layer_bytes = spec.size_bytes // 16
    wanted = Shard(layers, spec.shard.heads)
    assert FORMAT.byte_ranges(spec.shard, wanted) == (ByteRange(layers.first * layer_bytes, layers.size * layer_bytes),)
    by_head = replace(FORMAT, order=PAGE_HEAD)
    assert len(by_head.byte_ranges(spec.shard, wanted)) == (4 if layers.size < 16 else 1)


def test_a_rank_writes_what_it_has_all_of() -> None:
    """A rank of a larger group than the specs are cut for has no whole spec and writes nothing."""
    assert [spec.name for spec in FORMAT.specs_within(Shard(Span(0, 16), Span(0, 8)))] == [
        "layers0-16.heads0-4",
        "layers0-16.heads4-8",
    ]
    assert FORMAT.specs_within(Shard(Span(0, 32), Span(0, 2))) == ()


def test_shards_outside_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"shard is layers0-33\.heads0-8, must lie in layers0-32\.heads0-8"):
        FORMAT.reads(Shard(Span(0, 33), Span(0, 8)))
    with pytest.raises(InvalidArgumentError, match=r"must lie in layers0-16\.heads0-4"):
        FORMAT.byte_ranges(FORMAT.specs[0].shard, FORMAT.specs[1].shard)
    for layers, heads in [(Span(0, 0), Span(0, 1)), (Span(0, 1), Span(-1, 1)), (Span(2, 1), Span(0, 1))]:
        with pytest.raises(InvalidArgumentError, match="must be 0 <= first < end"):
            Shard(layers, heads)


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (8, 2, [(0, 4, 0), (4, 8, 0)]),
        (2, 4, [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1)]),
        (1, 2, [(0, 1, 0), (0, 1, 1)]),
        (3, 3, [(0, 1, 0), (1, 2, 0), (2, 3, 0)]),
    ],
)
def test_heads_of_ranks(heads: int, ranks: int, expected: list[tuple[int, int, int]]) -> None:
    """GQA with more ranks than heads, and MLA: neighbours have the same heads, one of them stores."""
    found = [rank_heads(heads, rank, ranks) for rank in range(ranks)]
    assert [(*mine.heads, mine.replica) for mine in found] == expected


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
        ("layer_ends", (0, 4), "layer_ends is"),
        ("layer_ends", (1 << 21,), "layers is 2097152"),
        ("heads", 0, "heads is 0"),
        ("head_shards", 3, "head_shards is 3, must divide the 8 heads"),
        ("head_shards", 0, "head_shards is 0"),
        ("kv_parts", 3, "kv_parts is 3, must be 2 for K and V or 1"),
        ("head_dim", 0, "head_dim is 0"),
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
        ("heads=8", "heads=+8", "must be as in"),
        ("heads=8", "heads=٨", "must be as in"),
        ("heads=8", "heads=88888888", "must be as in"),
        (" heads", "  heads", "must be as in"),
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
