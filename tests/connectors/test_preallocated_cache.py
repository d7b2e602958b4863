"""The cache with memory of its own: the same states as `DynamicLayer`, at addresses that stay."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from connectors.transformers.cache import PreallocatedLayer, cache_layers, filled_cache


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
    assert torch.equal(layer.buffers()[0][:, :8], saved)
    layer.reset()
    assert layer.get_seq_length() == 0


def test_a_filled_cache_has_the_length_that_was_loaded() -> None:
    layers = cache_layers((2, 4), torch.float32, [torch.device("cpu")] * 3, 16)
    for layer in layers:
        for buffer in layer.buffers():
            buffer.fill_(1.0)
    cache = filled_cache(layers, 5)
    assert cache.get_seq_length() == 5
    keys, _ = cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 1)
    assert keys.shape == (1, 2, 6, 4)
    assert keys[0, 0, :, 0].tolist() == [1.0] * 5 + [0.0]
