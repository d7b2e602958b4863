"""DSA: the index keys are the stored bytes, and the selection is what plain Python makes of them."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from algorithm_rig import INDEX_DIM as DIMS
from algorithm_rig import INDEX_HEADS as HEADS
from algorithm_rig import PAGE, IndexRig, Rig, ids, mha, mla, top
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.algorithms.dsa import DSA
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry
from gpu_tier.rows import KVDtype

K = 12


def make(geometry: KVGeometry, **algo: Any) -> IndexRig:
    return IndexRig(geometry, algo, top_k=K)


def rows_of(rig: Rig, layer: int, request: int) -> Tensor:
    """The stored rows of a request's tokens, ``uint8 [n, dI + 4]``."""
    algorithm = rig.algorithm
    assert isinstance(algorithm, DSA)
    pages = torch.tensor(algorithm.pool.held(request))
    rows = algorithm.index_keys(layer).unflatten(0, (-1, PAGE))[pages].flatten(0, 1)
    return rows[: rig.n[request]]


def hadamard_matrix(dims: int) -> Tensor:
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(dims)] for i in range(dims)]
    return torch.tensor(signs, dtype=torch.float64) * dims**-0.5


def plain_quantised(x: Tensor) -> Tensor:
    """What is left of vectors ``[..., d]`` after the rotation and e4m3 with one f32 scale, ``f64``."""
    rotated = (x.double() @ hadamard_matrix(x.shape[-1])).float()
    scale = rotated.abs().amax(-1, keepdim=True) / 448
    return (rotated / scale).to(torch.float8_e4m3fn).double() * scale.double()


def plain_selection(rig: IndexRig, layer: int, request: int) -> list[int]:
    n = rig.n[request]
    index = rig.extra(layer, request, 0, n)
    query, weight = plain_quantised(index["index_query"][n - 1]), index["index_weight"][n - 1].double()
    stored = rows_of(rig, layer, request)
    scales = torch.tensor([struct.unpack("<f", bytes(row[DIMS:].tolist()))[0] for row in stored], dtype=torch.float64)
    keys = stored[:, :DIMS].contiguous().view(torch.float8_e4m3fn).double() * scales[:, None]
    return top(((query @ keys.T).relu() * weight[:, None]).sum(0).tolist(), K)


GEOMETRIES = {
    "mla": mla(),
    "mla fp8": mla(136, 128, dtype=KVDtype.FP8),
    "mha": mha(),
    "one head": mha(1),
    "stage": mha(start=7),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_it_selects_what_the_indexer_ranks_highest(name: str) -> None:
    """Lengths around k and around pages, in one batch with padding."""
    rig = make(GEOMETRIES[name])
    rig.add({0: 1, 1: K - 3, 2: K - 2, 3: K - 1, 4: 3 * PAGE - 2, 5: 201}, chunk=50, spare=3)
    rig.step(range(6))
    order = [4, 2, 0, 3, 5, 1]
    for _ in range(2):
        for layer, selection in rig.step(order, padding=2).items():
            for row, request in enumerate(order):
                assert ids(selection, row) == plain_selection(rig, layer, request)
            assert not selection.lengths[6:].any()


def test_index_keys_are_what_plain_code_makes_of_them() -> None:
    rig = make(mla())
    rig.add({0: 40})
    for layer in rig.geometry.layers:
        rows = rows_of(rig, layer, 0)
        stored = rows[:, :DIMS].contiguous().view(torch.float8_e4m3fn).double() * rows[:, DIMS:].contiguous().view(
            torch.float32
        )
        expected = plain_quantised(rig.index[layer, 0]["index_key"][:40])
        # Scales in f32 and in f64 differ in their last bit: now and then a number falls to its neighbour in e4m3.
        assert torch.isclose(stored, expected, rtol=2**-3, atol=1e-4).all()
        assert torch.isclose(stored, expected, rtol=1e-5).float().mean() > 0.95


def test_short_requests_select_everything_without_being_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(mla())
    rig.add({0: K - 1, 1: 3}, spare=1)
    monkeypatch.setattr("gpu_tier.algorithms.dsa.indexer_score", None)
    selection = rig.step([0, 1])[0]
    assert [ids(selection, row) for row in range(2)] == [list(range(K)), list(range(4))]


@settings(max_examples=examples(120), deadline=None)
@given(n=st.integers(1, 70), cuts=st.lists(st.integers(1, 30), max_size=8), repeats=st.integers(1, 2))
def test_how_the_prompt_was_cut_does_not_matter(n: int, cuts: list[int], repeats: int) -> None:
    whole, cut = make(mla()), make(mla())
    whole.add({3: n})
    cut.source.of, cut.queries_seen, cut.n[3] = whole.source.of, whole.queries_seen, 0
    for size in cuts:
        if size <= n - cut.n[3]:
            cut.algorithm.reserve(3, cut.n[3] + size)
            cut.prefill({3: size}, repeats=repeats)
    while cut.n[3] < n:
        cut.step([3], padding=1)
    for layer in cut.geometry.layers:
        assert torch.equal(rows_of(cut, layer, 3), rows_of(whole, layer, 3))


def test_a_batch_of_chunks_touches_each_requests_own_rows() -> None:
    together, alone = make(mla()), make(mla())
    together.add({0: 30, 4: 7, 2: 61}, chunk=11, spare=1)
    alone.source.of, alone.queries_seen = together.source.of, together.queries_seen
    for request, length in ((4, 7), (2, 61), (0, 30)):
        alone.algorithm.reserve(request, length)
        alone.n[request] = 0
        alone.prefill({request: length})
    for request in (0, 2, 4):
        assert torch.equal(rows_of(together, 1, request), rows_of(alone, 1, request))
    before = rows_of(together, 1, 0)
    together.step([4], padding=3)  # the padding names request 0
    assert torch.equal(before, rows_of(together, 1, 0))


def test_powers_of_two_as_scales() -> None:
    rig = make(mla(), scale_format="ue8m0")
    rig.add({0: 64})
    scales = rows_of(rig, 0, 0)[:, DIMS:].contiguous().view(torch.float32).flatten()
    largest = (rig.index[0, 0]["index_key"][:64].double() @ hadamard_matrix(DIMS)).abs().amax(-1) / 448
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert (scales >= largest * (1 - 1e-6)).all()
    assert (scales < 2 * largest * (1 + 1e-6)).all()


@pytest.mark.parametrize("n", [1, PAGE, PAGE + 1])
def test_the_bytes_of_a_request_are_those_of_its_pages(n: int) -> None:
    rig = make(mla())
    rig.add({0: n})
    assert isinstance(rig.algorithm, DSA)
    allocated = rig.algorithm.pool.allocator.in_use * rig.algorithm.pool.layer(0)[0].numel() * rig.geometry.num_layers
    assert rig.algorithm.representation_bytes(n) == allocated == -(-n // PAGE) * PAGE * 2 * (DIMS + 4)


def test_sidecars_of_pages_give_the_same_selection() -> None:
    rig = make(mla())
    rig.add({0: 100}, spare=1)
    rig.copy_request(0, 1)
    for layer in rig.geometry.layers:
        rig.index[layer, 1] = rig.index[layer, 0]
    rig.algorithm.reserve(1, 100)
    assert rig.algorithm.required_sidecar
    for edges, covered in (((0, 47), 32), ((17, 100), 64)):
        sidecar = rig.algorithm.export_sidecar(0, *edges)
        assert sidecar is not None
        assert sidecar.data.shape == (covered // PAGE, rig.algorithm.sidecar_page_bytes())
        assert rig.algorithm.import_sidecar(1, sidecar) == covered
    rig.n[1] = 96
    rig.prefill({1: 4})
    for layer, selection in rig.step([0, 1]).items():
        assert torch.equal(selection.indices[0], selection.indices[1])
        assert torch.equal(rows_of(rig, layer, 0), rows_of(rig, layer, 1))


def test_an_engine_that_passes_no_index_is_told_so() -> None:
    rig = Rig(mla(), "dsa", algo={"index_heads": HEADS, "index_dim": DIMS})
    with pytest.raises(ConfigError, match="index_key=None"):
        rig.add({0: 5})
    wrong = make(mla())
    wrong.add({0: 40}, spare=1)
    for index in wrong.index.values():
        index["index_query"] = index["index_query"][:, :2]
    with pytest.raises(ConfigError, match="index_query"):
        wrong.step([0])


@pytest.mark.parametrize("geometry", [mha(1, 16), mha(2, 16), mla(16, 12)], ids=["one head", "two heads", "mla"])
def test_the_proxy_ranks_mean_queries_against_mean_keys(geometry: KVGeometry) -> None:
    rig = Rig(geometry, "dsa", algo={"index_source": "proxy"}, top_k=K)
    rig.add({0: 90, 1: 40}, spare=1)
    for layer, selection in rig.step([1, 0]).items():
        for row, request in enumerate([1, 0]):
            queries = plain_quantised(rig.query(layer, request).mean(1))
            keys = plain_quantised(rig.all_keys(layer, request).mean(1))
            assert len(set(ids(selection, row)) & set(top((queries @ keys.T).relu().sum(0).tolist(), K))) >= K - 1


def test_index_keys_must_have_a_power_of_two_of_numbers() -> None:
    with pytest.raises(ConfigError, match="power of two"):
        make(mla(), index_dim=24)
    with pytest.raises(ConfigError, match="power of two"):
        Rig(mla(), "dsa", algo={"index_source": "proxy"})
