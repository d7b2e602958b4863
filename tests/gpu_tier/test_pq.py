"""Product quantisation: codes are those of the nearest centroids, and tables score the keys that codes stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.index import pq
from gpu_tier.kernels.pq_score import pq_score


def keys_of(n: int, heads: int, dims: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(n, heads, dims, generator=torch.Generator().manual_seed(seed)) * scale


def plain_codes(keys: Tensor, codebook: Tensor) -> Tensor:
    """One key, head and sub-vector at a time, in f64; ties to the lower id."""
    heads, m, _, sub = codebook.shape
    codes = torch.zeros(len(keys), heads, m, dtype=torch.uint8)
    for token in range(len(keys)):
        for head in range(heads):
            for part in range(m):
                x = keys[token, head, part * sub : (part + 1) * sub].double()
                distances = ((codebook[head, part].double() - x) ** 2).sum(-1).tolist()
                codes[token, head, part] = distances.index(min(distances))
    return codes


@settings(max_examples=examples(60), deadline=None)
@given(
    m=st.sampled_from([1, 2, 4]), b=st.integers(1, 4), heads=st.integers(1, 3), sub=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 10**6), scale=st.sampled_from([1e-2, 1.0, 300.0]),
)  # fmt: skip
def test_codes_are_those_of_the_nearest_centroids(
    m: int, b: int, heads: int, sub: int, seed: int, scale: float
) -> None:
    shape = pq.PQShape(heads, m * sub, m, b)
    keys = keys_of(3 * shape.centroids, heads, m * sub, seed, scale)
    codebook = pq.train(keys, shape, 4, seed)
    assert codebook.shape == shape.codebook_shape
    wanted = plain_codes(keys, codebook)
    by_row = pq.encode_rows(keys, codebook.float().expand(len(keys), *codebook.shape))
    for found in (pq.encode(keys, codebook), by_row):
        assert found.dtype is torch.uint8
        # Two centroids may be equally near up to the last bit of f32: then either is right.
        off = keys.double() - pq.reconstruct(found, codebook).double()
        best = keys.double() - pq.reconstruct(wanted, codebook).double()
        assert (off.square().sum(-1) <= best.square().sum(-1) + 1e-4 * scale**2).all()
        assert (found == wanted).float().mean() > 0.98


@settings(max_examples=examples(60), deadline=None)
@given(
    m=st.sampled_from([1, 2, 4]), b=st.integers(1, 4), heads=st.integers(1, 3), group=st.sampled_from([1, 4]),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_tables_and_codes_give_the_products_with_reconstructed_keys(
    m: int, b: int, heads: int, group: int, seed: int
) -> None:
    dims, page, scale = 8 * m, 4, 0.3
    shape = pq.PQShape(heads, dims, m, b)
    keys = keys_of(2 * shape.centroids + 3, heads, dims, seed)
    codebook = pq.train(keys, shape, 3, seed)
    codes = pq.encode(keys, codebook)
    query = keys_of(1, heads * group, dims, seed + 1)
    n, pages = len(keys), -(-len(keys) // page)
    stored = torch.zeros(pages * page, heads, m, dtype=torch.uint8)
    stored[:n] = codes
    table, out = pq.tables(query, codebook[None].float(), scale), torch.empty(1, heads * group, pages * page)
    pages_of = torch.arange(pages, dtype=torch.int32)[None]
    first, stop = torch.tensor([2], dtype=torch.int32), torch.tensor([n], dtype=torch.int32)
    pq_score(table, stored.view(pages, page, heads, m), pages_of, first, stop, out)
    grouped = query[0].view(heads, group, dims).double()
    exact = torch.einsum("hgd,nhd->hgn", grouped, pq.reconstruct(codes, codebook).double()) * scale
    torch.testing.assert_close(out[0, :, 2:n].double(), exact.flatten(0, 1)[:, 2:], rtol=1e-5, atol=1e-5)
    assert (out[0, :, :2] == -torch.inf).all()
    assert (out[0, :, n:] == -torch.inf).all()


def test_equal_keys_have_equal_codes_and_no_nan() -> None:
    keys = keys_of(1, 2, 8).expand(300, -1, -1)
    codebook = pq.train(keys, pq.PQShape(2, 8, 4, 5), 10, 0)
    codes = pq.encode(keys, codebook)
    assert codebook.isfinite().all()
    assert (codes == codes[0]).all()
    torch.testing.assert_close(pq.reconstruct(codes, codebook), keys.float(), rtol=1e-3, atol=1e-3)


def test_keys_beyond_f16_make_no_infinity() -> None:
    keys = keys_of(64, 1, 4, scale=1e6)
    codebook = pq.train(keys, pq.PQShape(1, 4, 2, 3), 5, 0)
    assert codebook.isfinite().all()
    assert pq.tables(keys[:1], codebook[None].float(), 1.0).isfinite().all()


def test_training_depends_on_keys_iterations_and_seed_alone() -> None:
    keys, shape = keys_of(300, 2, 16), pq.PQShape(2, 16, 2, 4)
    once = pq.train(keys, shape, 6, 3)
    assert torch.equal(once, pq.train(keys.clone(), shape, 6, 3))
    alone = [pq.train(keys[:, h : h + 1], pq.PQShape(1, 16, 2, 4), 6, 3) for h in range(2)]
    assert torch.equal(once, torch.cat(alone))  # a head's problems do not see the other head's
    assert not torch.equal(once, pq.train(keys, shape, 6, 4))
    assert not torch.equal(once, pq.train(keys, shape, 1, 3))


@pytest.mark.parametrize(("dims", "m", "b", "named"), [(8, 3, 4, "m=3"), (8, 0, 4, "m=0"), (8, 2, 9, "b=9")])
def test_shapes_that_do_not_fit_are_refused(dims: int, m: int, b: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        pq.PQShape(1, dims, m, b)


def test_too_few_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 32"):
        pq.train(keys_of(31, 1, 4), pq.PQShape(1, 4, 2, 4), 1, 0)
