"""Paged KV in any layout: to stored blocks and back, bit for bit, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import EngineCase, chosen_blocks, engine_cases, shards

from connectors.layout.engine_kv import EngineKv
from connectors.layout.gather import block_memory, gather, scatter
from connectors.layout.shard import Shard, Span, rank_heads
from connectors.layout.stored import KV_PACKED, LAYER_FIRST, PAGE_HEAD, StoredFormat
from kvcm.model.errors import InvalidArgumentError

FIXED = settings(max_examples=150, deadline=None, derandomize=True)


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
    layers = slice(shard.layers.first - case.shard.layers.first, shard.layers.end - case.shard.layers.first)
    heads = slice(shard.heads.first - case.shard.heads.first, shard.heads.end - case.shard.heads.first)
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
        return EngineKv(stored, Shard(Span(0, 3), mine), layers, axes)

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
    by_token = StoredFormat(
        (1,),
        heads=4,
        head_shards=1,
        kv_parts=2,
        head_dim=2,
        block_tokens=256,
        dtype="float32",
        order="token.layer.head.kv.dim",
    )
    assert block_memory(EngineKv(by_token, stored.model, [[torch.zeros(2, 256, 4, 4)]], axes), [0], stored.model)


def test_ids_that_are_not_blocks_are_refused_before_anything_is_copied() -> None:
    """A wrong id never reads or writes memory of somebody else."""
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
    half = Shard(Span(0, 3), Span(0, 2))
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
        ([[good], [good], [good[:9]]], "layer 2 is .* must be"),
        ([[good], [good], [good[..., :62]]], "layer 2 is .* must be"),
        ([[good], [good, good], [good]], "layer 1 has 2 tensors"),
        ([[good], [], [good]], "layer 1 has 0 tensors"),
        ([[], [], []], "without tensors"),
        ([[good, good]] * 3, "layer 0 is .* must be"),
        ([[good], [good.to("meta")], [good]], "layer 1 is on meta"),
        ([[torch.zeros(10, 4, 24, 64)]] * 3, "blocks of 24 tokens, must divide the 32"),
        ([[torch.zeros(10, 4, 64, 64)]] * 3, "blocks of 64 tokens, must divide the 32"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            EngineKv(stored, stored.model, tensors, axes)
    with pytest.raises(InvalidArgumentError, match=r"must lie in layers0-3\.heads0-4"):
        EngineKv(stored, Shard(Span(0, 4), Span(0, 4)), [[good]] * 4, axes)
