"""The cache with memory of its own: the same states as `DynamicLayer`, at addresses that stay."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from connectors.transformers.cache import PreallocatedLayer, WindowLayer


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
