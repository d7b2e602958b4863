"""Descriptions of paged tensors: the layouts that engines have, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from connectors.layout.paged import Axis, PagedKv
from kvcm.model.errors import InvalidArgumentError


def described(axes: Sequence[str], shape: Sequence[int], block_tokens: int | None = None) -> PagedKv:
    """Describe a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return PagedKv.named(axes, shape, strides, "float16", block_tokens)


def test_kv_packed_behind_heads_as_in_vllm_0_32() -> None:
    paged = described(("block", "head", "token", "kv_dim"), (100, 4, 32, 64))
    assert paged.shape == (100, 2, 4, 32, 32)
    assert paged.strides == (8192, 32, 2048, 64, 1)


def test_kv_outermost_as_in_older_vllm() -> None:
    paged = described(("kv", "block", "token", "head", "dim"), (2, 100, 16, 8, 128))
    assert paged.shape == (100, 2, 8, 16, 128)
    assert paged.strides == (16384, 1638400, 128, 1024, 1)


def test_slots_of_tokens_as_in_sglang() -> None:
    paged = described(("slot", "head", "dim"), (160, 8, 128), block_tokens=16)
    assert paged.shape == (10, 1, 8, 16, 128)
    assert paged.strides == (16384, 0, 128, 1024, 1)


def test_latent_kv_has_one_head() -> None:
    paged = described(("block", "token", "dim"), (10, 64, 576))
    assert paged.shape == (10, 1, 1, 64, 576)
    assert paged.strides == (36864, 0, 0, 576, 1)


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
def test_names_that_do_not_describe_paged_kv_are_refused(
    axes: Sequence[str], shape: Sequence[int], block_tokens: int | None, text: str
) -> None:
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


def test_unknown_types_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="dtype is 'int3', must be one of float64"):
        PagedKv.named(("block", "token", "dim"), (2, 2, 2), (4, 2, 1), "int3")
