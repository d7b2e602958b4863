"""Checksums of tensors: equal exactly when the elements are, whatever the layout."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from connectors.transformers.checksum import _CHUNK_WORDS, _weights, tensor_checksum

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [1, 3, 1000, _CHUNK_WORDS * 2 + 3])
def test_every_element_counts(dtype: torch.dtype, size: int) -> None:
    tensor = random((size,), dtype)
    before = tensor_checksum(tensor)
    for index in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed.view(torch.uint8)[index * tensor.element_size()] ^= 1
        assert tensor_checksum(changed) != before


def test_every_swap_of_two_elements_counts() -> None:
    """Also of x and -x: only their highest bits differ, which most distances between positions would wrap away."""
    tensor = torch.ones(64)
    tensor[::2] = -1
    seen = {tensor_checksum(tensor)}
    swaps = [(i, j) for i, j in itertools.combinations(range(64), 2) if tensor[i] != tensor[j]]
    for i, j in swaps:
        swapped = tensor.clone()
        swapped[[i, j]] = swapped[[j, i]]
        seen.add(tensor_checksum(swapped))
    assert len(seen) == len(swaps) + 1
    far = torch.zeros(3 * _CHUNK_WORDS)
    far[5] = 1
    swapped = far.clone()
    swapped[[5, 5 + 2 * _CHUNK_WORDS]] = swapped[[5 + 2 * _CHUNK_WORDS, 5]]
    assert tensor_checksum(far) != tensor_checksum(swapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_swap_of_two_rows_counts(dtype: torch.dtype) -> None:
    """Rows of equal sums, here of a unit matrix, tell weights that only grow from weights that look random."""
    for matrix in (torch.eye(64, dtype=dtype), random((64, 64), dtype)):
        seen = {tensor_checksum(matrix)}
        for i, j in itertools.combinations(range(64), 2):
            swapped = matrix.clone()
            swapped[[i, j]] = swapped[[j, i]]
            seen.add(tensor_checksum(swapped))
        assert len(seen) == 64 * 63 // 2 + 1


def test_lower_halves_of_the_weights_are_all_different() -> None:
    weights = _weights(torch.device("cpu"))
    assert (weights & 0xFFFF_FFFF).unique().numel() == _CHUNK_WORDS
    assert (weights >> 32).unique().numel() == _CHUNK_WORDS


def test_the_value_is_fixed() -> None:
    """Engines of different releases and machines must agree; another value needs another version of the keys."""
    assert tensor_checksum(torch.arange(5, dtype=torch.int16)).hex() == "0600040000000000865d94e0ef5ac42d"
    assert tensor_checksum(torch.empty(0, 3)) == b""
    assert tensor_checksum(torch.tensor(1.0)) == tensor_checksum(torch.ones(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_agree() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = random((1000, 1003), dtype)
        assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)


def test_a_gigabyte_takes_seconds_at_most() -> None:
    tensor = torch.zeros(1 << 28, dtype=torch.uint8)  # a quarter of it
    started = time.monotonic()
    tensor_checksum(tensor)
    assert time.monotonic() - started < 5.0  # 20 times what it takes, since other work may hold the processor
