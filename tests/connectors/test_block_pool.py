"""The pool of KV blocks, and the cache layer over it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from reuse_models import HYBRIDS, WINDOWS
from transformers.cache_utils import DynamicLayer

from connectors.layout import BlockLayout
from connectors.transformers.block_pool import BlockPool
from connectors.transformers.paged import PagedLayer, Table
from connectors.transformers.parts import KVPart, ModelParts
from connectors.transformers.probing import inspect_model
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import BlockKey

BLOCKS = 8
CPU = torch.device("cpu")


def parts(layers: int = 2) -> ModelParts:
    layout = BlockLayout(layers, 2, 4, 4, "float32")
    return ModelParts(4, (KVPart("tp0", tuple(range(layers)), layout, torch.float32, (CPU,) * layers),))


def keys(first: int, count: int) -> list[BlockKey]:
    return [BlockKey(number) for number in range(first, first + count)]


def test_the_memory_is_there_once_and_never_more() -> None:
    pool = BlockPool(parts(3), BLOCKS)
    tensors = [tensor for pair in pool.memory.values() for tensor in pair]
    assert sum(tensor.nbytes for tensor in tensors) == BLOCKS * parts(3).block_bytes
    assert pool.take(BLOCKS + 1) is None
    assert sorted(pool.take(BLOCKS) or []) == list(range(BLOCKS))
    assert pool.take(1) is None


def test_kept_blocks_are_found_until_their_room_is_needed() -> None:
    pool = BlockPool(parts(), 4)
    first = pool.take(3)
    assert first is not None
    pool.keep(keys(1, 3), first)
    pool.give_back(first)
    assert pool.available == 4
    assert pool.find([*keys(1, 2), BlockKey(9), BlockKey(3)]) == first[:2]
    assert pool.available == 2
    assert pool.take(3) is None
    others = pool.take(2)  # the free one, and the idle one
    assert others is not None
    assert pool.find(keys(3, 1)) == []
    pool.give_back(first[:2])
    pool.give_back(others)
    more = pool.take(3)
    assert more is not None
    assert pool.find(keys(1, 2)) == first[:1]  # the end of a prefix goes first


def test_what_two_calls_computed_is_kept_once() -> None:
    pool = BlockPool(parts(), 4)
    one, other = pool.take(1), pool.take(1)
    assert one is not None
    assert other is not None
    pool.keep(keys(1, 1), one)
    pool.keep(keys(1, 1), other)
    pool.give_back(other)
    pool.give_back(one)
    assert pool.find(keys(1, 1)) == one


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls: content is never lost while held, and no block has two owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(parts(1), BLOCKS)
        self.taken: list[list[int]] = []
        self.shared: list[list[int]] = []
        self.content: dict[int, BlockKey] = {}

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        taken = self.pool.take(count)
        if taken is not None:
            held = {block for blocks in self.taken + self.shared for block in blocks}
            assert not held & set(taken)
            assert len(set(taken)) == count
            for block in taken:
                self.content.pop(block, None)
            self.taken.append(taken)

    @rule(first=st.integers(0, 5), number=st.integers(0, 9))
    def keep(self, first: int, number: int) -> None:
        if self.taken:
            blocks = self.taken[number % len(self.taken)]
            fresh = [block for block in blocks if block not in self.content]
            names = keys(first, len(fresh))
            self.pool.keep(names, fresh)
            for name, block in zip(names, fresh, strict=True):
                if name not in self.content.values():
                    self.content[block] = name

    @rule(first=st.integers(0, 8), count=st.integers(0, 4))
    def find(self, first: int, count: int) -> None:
        found = self.pool.find(keys(first, count))
        assert [self.content[block] for block in found] == keys(first, count)[: len(found)]
        if len(found) < count:
            assert keys(first, count)[len(found)] not in self.content.values()
        self.shared.append(found)

    @rule(number=st.integers(0, 9), is_shared=st.booleans())
    def give_back(self, number: int, is_shared: bool) -> None:
        owners = self.shared if is_shared else self.taken
        if owners:
            self.pool.give_back(owners.pop(number % len(owners)))

    @invariant()
    def everything_that_nobody_holds_can_be_taken(self) -> None:
        held = {block for blocks in self.taken + self.shared for block in blocks}
        assert self.pool.available == BLOCKS - len(held)


TestPool = PoolMachine.TestCase


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_a_paged_layer_behaves_like_the_layer_it_replaces(
    paddings: list[int], steps: list[int], random: object
) -> None:
    columns, rows = sum(steps), len(paddings)
    pool = BlockPool(parts(1), 48)
    order = list(range(48))
    random.shuffle(order)
    tables = [Table(order[row * 16 : row * 16 + -(-columns // 4)], padding) for row, padding in enumerate(paddings)]
    layer, reference = PagedLayer(pool.memory[0], tables), DynamicLayer()
    for step in steps:
        states = torch.randn(2, rows, 2, step, 4)
        mine, theirs = layer.update(*states), reference.update(*states)
        assert layer.get_seq_length() == reference.get_seq_length()
        assert layer.get_mask_sizes(3) == reference.get_mask_sizes(3)
        for row, padding in enumerate(paddings):
            for one, other in zip(mine, theirs, strict=True):
                assert torch.equal(one[row, :, padding:], other[row, :, padding:])
                assert not one[row, :, :padding].any()


@pytest.mark.parametrize("kind", ["gemma3", "bamba"])
def test_models_with_windows_or_states_have_no_pool(kind: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be 0 for a model with windows or states"):
        BlockPool(inspect_model((WINDOWS | HYBRIDS)[kind](), 16).parts, 4)
    with pytest.raises(InvalidArgumentError, match="pool_blocks is -1"):
        BlockPool(parts(), -1)
