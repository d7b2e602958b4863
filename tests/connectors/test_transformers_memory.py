"""The cache with memory of its own: the same states as `DynamicLayer`, at addresses that stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from reuse_models import HYBRIDS, WINDOWS
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcm.connectors.layout import BlockLayout
from kvcm.connectors.reuse import model_weights
from kvcm.connectors.reuse.model_weights import tensor_checksum
from kvcm.connectors.transformers.cache import PreallocatedLayer, WindowLayer
from kvcm.connectors.transformers.model_kv import KVPart, ModelParts, probe_model
from kvcm.connectors.transformers.paged_cache import BlockPool, BlockTable, PagedLayer
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import BlockKey


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 5))
def test_it_behaves_like_the_layer_it_replaces(capacity: int, steps: list[int], cropped: int) -> None:
    layer, reference = PreallocatedLayer(capacity), DynamicLayer()
    for step in steps:
        states = torch.randn(2, 1, 3, step, 4)
        for mine, theirs in zip(layer.update(*states), reference.update(*states), strict=True):
            assert torch.equal(mine, theirs)
        assert layer.get_seq_length() == reference.get_seq_length()
        assert layer.get_mask_sizes(7) == reference.get_mask_sizes(7)
    cropped = min(cropped, sum(steps) - 1)
    layer.crop(-cropped)
    reference.crop(-cropped)
    states = torch.randn(2, 1, 3, 2, 4)
    assert torch.equal(layer.update(*states)[0], reference.update(*states)[0])


def test_memory_stays_until_it_must_grow_and_old_memory_keeps_its_contents() -> None:
    layer = PreallocatedLayer(8)
    layer.update(*torch.randn(2, 1, 2, 5, 4))
    before = layer.buffers()
    layer.update(*torch.randn(2, 1, 2, 3, 4))
    assert layer.buffers()[0].data_ptr() == before[0].data_ptr()
    saved = before[0].clone()
    layer.update(*torch.randn(2, 1, 2, 1, 4))
    assert layer.buffers()[0].data_ptr() != before[0].data_ptr()
    assert torch.equal(before[0], saved)
    assert torch.equal(layer.buffers()[0][:, :, :8], saved)
    layer.reset()
    assert layer.get_seq_length() == 0


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(2, 12), st.integers(0, 20), st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_a_window_behaves_like_the_layer_it_replaces(capacity: int, window: int, kept: int, steps: list[int]) -> None:
    layer, reference = WindowLayer(capacity, window, kept), DynamicSlidingWindowLayer(window)
    everything = torch.empty(2, 1, 3, 0, 4)
    for step in steps:
        states = torch.randn(2, 1, 3, step, 4)
        everything = torch.cat([everything, states], dim=-2)
        assert layer.get_mask_sizes(step) == reference.get_mask_sizes(step)
        for mine, theirs in zip(layer.update(*states), reference.update(*states), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(layer.keys, reference.keys)
        assert torch.equal(layer.values, reference.values)
        assert layer.get_seq_length() == reference.get_seq_length()
        tokens = everything.shape[-2]
        start = max(layer.first_token, tokens - max(kept, window - 1))
        for buffer, expected in zip(layer.buffers(), everything, strict=True):
            held = buffer[:, :, start - layer.first_token : tokens - layer.first_token]
            assert torch.equal(held, expected[:, :, start:])


def test_a_window_needs_memory_for_the_window_and_not_for_the_answer() -> None:
    layer = WindowLayer(100, window=8, kept_tokens=15)
    layer.update(*torch.randn(2, 1, 2, 100, 4))
    for _ in range(500):
        layer.update(*torch.randn(2, 1, 2, 1, 4))
    assert layer.buffers()[0].shape[2] < 32


def test_a_layer_over_memory_fills_that_memory() -> None:
    memory = (torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4))
    for kind in (PreallocatedLayer(1), WindowLayer(1, 4)):
        layer = kind.over(memory)
        layer.set_length(2)
        keys, _ = layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
        assert keys[0, 0, :, 0].tolist() == [0.0] * 2 + [1.0] * 3
        assert memory[0][0, 0, :, 0].tolist() == [0.0] * 2 + [1.0] * 3 + [0.0]
        assert kind.get_seq_length() == 0
        memory[0].zero_()


# ---- The pool of KV blocks, and the cache layer over it ----

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
    assert pool.acquire(BLOCKS + 1) is None


def test_kept_blocks_are_found_until_their_space_is_needed() -> None:
    pool = BlockPool(parts(), 4)
    first = pool.acquire(3)
    assert first is not None
    pool.keep(keys(1, 3), first)
    pool.release(first)
    assert pool.available == 4
    assert pool.find([*keys(1, 2), BlockKey(9), BlockKey(3)]) == first[:2]
    assert pool.available == 2
    assert pool.acquire(3) is None
    others = pool.acquire(2)  # the free one, and the idle one
    assert others is not None
    assert pool.find(keys(3, 1)) == []
    pool.release(first[:2])
    pool.release(others)
    more = pool.acquire(3)
    assert more is not None
    assert pool.find(keys(1, 2)) == first[:1]  # the end of a prefix goes first


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
        taken = self.pool.acquire(count)
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
            self.pool.release(owners.pop(number % len(owners)))

    @invariant()
    def every_block_that_is_not_held_is_available(self) -> None:
        held = {block for blocks in self.taken + self.shared for block in blocks}
        assert self.pool.available == BLOCKS - len(held)


TestPool = PoolMachine.TestCase


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_a_paged_layer_behaves_like_a_dynamic_one(paddings: list[int], steps: list[int], random: object) -> None:
    columns, rows = sum(steps), len(paddings)
    pool = BlockPool(parts(1), 48)
    order = list(range(48))
    random.shuffle(order)
    tables = [
        BlockTable(order[row * 16 : row * 16 + -(-columns // 4)], padding) for row, padding in enumerate(paddings)
    ]
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
        BlockPool(probe_model((WINDOWS | HYBRIDS)[kind](), 16).parts, 4)
    with pytest.raises(InvalidArgumentError, match="pool_blocks is -1"):
        BlockPool(parts(), -1)


# ---- Checksums of tensors: equal exactly when the elements are, whatever the layout ----

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_in_memory_does_not_matter(dtype: torch.dtype) -> None:
    tensor = random((37, 41), torch.float32).gt(0).to(dtype) if dtype is torch.bool else random((37, 41), dtype)
    shifted = torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:].view(37, 41)
    padded = torch.cat([tensor, tensor], dim=1)[:, :41]
    for other in (tensor.clone(), tensor.t().contiguous().t(), shifted, padded):
        assert tensor_checksum(other) == tensor_checksum(tensor)
    assert tensor_checksum(tensor.t()) != tensor_checksum(tensor)


def test_every_element_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_weights, "_CHUNK_BYTES", 64)
    tensor = random((50,))
    seen = {tensor_checksum(tensor)}
    for index in range(tensor.nbytes):
        changed = tensor.clone()
        changed.view(torch.uint8)[index] ^= 1
        seen.add(tensor_checksum(changed))
    assert len(seen) == tensor.nbytes + 1


def test_the_value_is_fixed() -> None:
    """Engines of different releases and machines must agree; another value needs another version of the keys."""
    assert tensor_checksum(torch.arange(5, dtype=torch.int16)).hex() == "ccc30bdf6b1ea94f2623140024607d9a"
    assert tensor_checksum(torch.tensor(1.0)) == tensor_checksum(torch.ones(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_agree() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = random((1000, 1003), dtype)
        assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)
