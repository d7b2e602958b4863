"""The lightning indexer: shapes, positions, and a rotation that leaves products as they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.errors import ConfigError
from gpu_tier.index.lightning_indexer import LightningIndexer
from gpu_tier.index.quantise import hadamard, index_rows, quantise
from gpu_tier.rows import KVDtype, RowFormat


def make(rope_dim: int = 8) -> LightningIndexer:
    torch.manual_seed(0)
    return LightningIndexer(24, 12, heads=4, dims=16, rope_dim=rope_dim)


@settings(max_examples=examples(100), deadline=None)
@given(power=st.integers(0, 8), seed=st.integers(0, 1000))
def test_the_rotation_is_orthonormal_and_its_own_inverse(power: int, seed: int) -> None:
    x, y = torch.randn(2, 2**power, generator=torch.Generator().manual_seed(seed))
    assert torch.isclose(hadamard(x) @ hadamard(y), x @ y, rtol=1e-4, atol=1e-4)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)


def test_what_a_vector_becomes_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(1000, 128, generator=torch.Generator().manual_seed(1))
    whole = index_rows(x, "f32")
    assert torch.equal(whole, torch.cat([index_rows(part, "f32") for part in x.split(7)]))


def test_rows_are_fp8_rows_of_the_rotated_vectors() -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(2))
    assert torch.equal(index_rows(x, "f32"), RowFormat(128, KVDtype.FP8).encode(hadamard(x)))


@pytest.mark.parametrize("largest", [448.0, 449.0, 895.9, 896.0, 1e-3, 1.0])
def test_a_ue8m0_scale_is_the_next_power_of_two(largest: float) -> None:
    quantised, scale = quantise(torch.tensor([[largest, -largest / 2]]), "ue8m0")
    assert scale.item() == 2.0 ** math.ceil(math.log2(torch.tensor(largest).item() / 448))
    assert (quantised.float() * scale).flatten().tolist() == pytest.approx([largest, -largest / 2], rel=2**-3)


def test_a_vector_of_zeros_stays_one() -> None:
    for scale_format in ("f32", "ue8m0"):
        quantised, scale = quantise(torch.zeros(2, 8), scale_format)
        assert not (quantised.float() * scale[:, None]).any()
        assert scale.isfinite().all()


def test_a_rotation_needs_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match="dims=12"):
        hadamard(torch.zeros(12))
    with pytest.raises(ConfigError, match="dims=12"):
        LightningIndexer(4, 4, dims=12, rope_dim=4)
    with pytest.raises(ConfigError, match="rope_dim=18"):
        LightningIndexer(4, 4, dims=16, rope_dim=18)


@torch.no_grad()
def test_it_gives_a_query_per_head_one_key_and_a_weight_per_head() -> None:
    indexer, random = make(), torch.Generator().manual_seed(3)
    hidden, latent = torch.randn(5, 24, generator=random), torch.randn(5, 12, generator=random)
    out = indexer(hidden, latent, torch.arange(5))
    assert {name: tuple(x.shape) for name, x in out.items()} == {
        "index_query": (5, 4, 16),
        "index_key": (5, 16),
        "index_weight": (5, 4),
    }
    assert torch.allclose(out["index_weight"], hidden @ indexer.weight.weight.T / 8)


@torch.no_grad()
def test_products_depend_on_the_distance_only() -> None:
    indexer, random = make(), torch.Generator().manual_seed(4)
    hidden, latent = torch.randn(1, 24, generator=random), torch.randn(1, 12, generator=random)

    def product(query_position: int, key_position: int) -> torch.Tensor:
        query = indexer(hidden, latent, torch.tensor([query_position]))["index_query"]
        return query[0] @ indexer(hidden, latent, torch.tensor([key_position]))["index_key"][0]

    assert torch.allclose(product(9, 4), product(105, 100), atol=1e-4)
    assert not torch.allclose(product(9, 4), product(9, 5), atol=1e-2)


@torch.no_grad()
def test_without_rotary_dims_the_position_does_not_matter() -> None:
    indexer = make(rope_dim=0)
    hidden, latent = torch.ones(2, 24), torch.ones(2, 12)
    key = indexer(hidden, latent, torch.tensor([3, 70]))["index_key"]
    assert torch.equal(key[0], key[1])
