"""Quest: the bounds hold, do not depend on how the prompt was cut, and select what plain Python selects."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithm_rig import PAGE, Rig, ids, mha, mla, top
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.algorithms.base import Sidecar
from gpu_tier.algorithms.quest import Quest
from gpu_tier.errors import AllocationError, ConfigError
from gpu_tier.geometry import KVGeometry
from gpu_tier.kernels.quest_score.bounds import round_down, round_up
from gpu_tier.rows import KVDtype
from gpu_tier.types import Mode

P = 4  # tokens of a scoring page
SMALL: dict[str, Any] = {"page": P, "token_budget": 24, "recent_pages": 2, "sink_pages": 1, "skip_layers": 0}


def make(geometry: KVGeometry | None = None, members: int = 2, **algo: Any) -> Rig:
    return Rig(geometry or mha(), "quest", members, {**SMALL, **algo})


def quest(rig: Rig) -> Quest:
    assert isinstance(rig.algorithm, Quest)
    return rig.algorithm


def bounds_of(rig: Rig, layer: int, request: int) -> Tensor:
    """Bounds that are stored for a request, ``f32 [pages, H, 2, d]``."""
    algorithm = quest(rig)
    return algorithm.bounds(layer)[algorithm.pool.held(request)].float()


def plain_bounds(keys: Tensor) -> Tensor:
    pages = keys.split(P)
    low = torch.stack([round_down(page.amin(0)) for page in pages])
    high = torch.stack([round_up(page.amax(0)) for page in pages])
    return torch.stack([low, high], 2).float()


def plain_scores(rig: Rig, layer: int, request: int, rule: str) -> Tensor:
    """Score per KV head of each complete-or-not page but the last, ``f64 [H, pages - 1]``."""
    low, high = plain_bounds(rig.all_keys(layer, request))[:-1].double().unbind(2)
    query = rig.query(layer, request).double()
    if rule == "mean":
        query = query.mean(1, keepdim=True)
    products = torch.maximum(
        query[:, :, None] * low.transpose(0, 1)[:, None], query[:, :, None] * high.transpose(0, 1)[:, None]
    )
    bound = products.sum(-1)
    if rule == "max":
        return bound.amax(1)
    return bound[:, 0] if rule == "mean" else (bound * rig.context.sm_scale).softmax(-1).sum(1)


def plain_selection(rig: Rig, layer: int, request: int, head: int | None, budget: int, rule: str) -> list[int]:
    scores = plain_scores(rig, layer, request, rule)
    ranked = (scores.sum(0) if head is None else scores[head]).tolist()
    pages = len(ranked) + 1
    always = {p for p in range(pages) if p < SMALL["sink_pages"] or p >= pages - SMALL["recent_pages"]}
    return top([math.inf if p in always else ranked[p] for p in range(pages)], budget)


@pytest.mark.parametrize("heads", ["shared", "per_head"])
@pytest.mark.parametrize("rule", ["mean", "max", "softmax"])
@pytest.mark.parametrize("group", [1, 4])
def test_it_selects_the_pages_of_the_largest_bounds(group: int, rule: str, heads: str) -> None:
    rig = make(members=group, group=rule, heads=heads)
    rig.add({0: 1, 1: 2, 2: 21, 3: 22, 4: 23, 5: 129}, spare=2)
    rig.step(range(6))
    order = [5, 0, 3, 2, 4, 1]
    for layer, selection in rig.step(order, padding=3).items():
        for row, request in enumerate(order):
            for head in range(selection.indices.shape[1]):
                own = head if heads == "per_head" else None
                assert ids(selection, row, head) == plain_selection(rig, layer, request, own, 6, rule)
        assert not selection.lengths[6:].any()


@pytest.mark.parametrize(
    "geometry",
    [
        mla(136, 128, dtype=KVDtype.FP8),
        mha(1, 16),
        mha(4, 8, start=3),
        mha(dtype=KVDtype.BF16),
    ],
    ids=["mla fp8", "one head", "stage", "bf16"],
)
def test_it_works_for_every_kind_of_kv(geometry: KVGeometry) -> None:
    rig = make(geometry, 4)
    rig.add({0: 90, 1: 37}, chunk=19, spare=6)
    for _ in range(6):
        for layer, selection in rig.step([1, 0]).items():
            assert ids(selection, 1) == plain_selection(rig, layer, 0, None, 6, "softmax")
            assert ids(selection, 0) == plain_selection(rig, layer, 1, None, 6, "softmax")


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-30, 1e-3, 1.0, 300.0]), n=st.integers(1, 40))
def test_no_key_of_a_page_exceeds_its_bound(seed: int, scale: float, n: int) -> None:
    """Exact: bounds in bf16, products in f64 of any query and of every key."""
    rig = make(mha(2, 8, layers=1))
    rig.source.random.manual_seed(seed)
    rig.source.make(0, n)
    rig.source.of[0, 0] *= scale
    rig.algorithm.reserve(0, n)
    rig.n[0], rig.queries_seen[0, 0] = 0, torch.zeros(n, 4, 8)
    rig.prefill({0: n})
    query = torch.randn(2, 8, generator=rig.source.random).double()
    low, high = bounds_of(rig, 0, 0).double().unbind(2)
    bound = torch.maximum(query * low, query * high).sum(-1)
    for token, keys in enumerate(rig.all_keys(0, 0).double()):
        assert (bound[token // P] >= (query * keys).sum(-1) - 1e-12 * bound[token // P].abs()).all()
        assert (low[token // P] <= keys).all()
        assert (high[token // P] >= keys).all()


@settings(max_examples=examples(200), deadline=None)
@given(n=st.integers(1, 70), cuts=st.lists(st.integers(1, 30), max_size=8), repeats=st.integers(1, 2))
def test_how_the_prompt_was_cut_does_not_matter(n: int, cuts: list[int], repeats: int) -> None:
    """Any chunks, each of them given once or twice, and then decoded tokens: the bits of one prefill of everything."""
    whole, cut = make(), make()
    whole.add({3: n})
    cut.source.of = whole.source.of
    cut.n[3] = 0
    for layer in cut.geometry.layers:
        cut.queries_seen[layer, 3] = whole.queries_seen[layer, 3]
    for size in cuts:
        if size <= n - cut.n[3]:
            cut.algorithm.reserve(3, cut.n[3] + size)
            cut.prefill({3: size}, repeats=repeats)
    while cut.n[3] < n:
        cut.step([3], padding=1)
    for layer in cut.geometry.layers:
        assert torch.equal(bounds_of(cut, layer, 3), bounds_of(whole, layer, 3))
        assert torch.equal(bounds_of(cut, layer, 3), plain_bounds(whole.all_keys(layer, 3)))


@pytest.mark.parametrize("chunk", [1, 5])
def test_zeros_of_either_sign_leave_the_same_bits(chunk: int) -> None:
    signs = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(0))
    stored = []
    for size in (8, chunk):
        rig = make()
        for layer in rig.geometry.layers:
            rig.source.of[layer, 0] = torch.copysign(torch.zeros(8, 2, 8), signs)
            rig.queries_seen[layer, 0] = torch.zeros(8, 4, 8)
        rig.algorithm.reserve(0, 8)
        rig.n[0] = 0
        while rig.n[0] < 8:
            rig.prefill({0: min(size, 8 - rig.n[0])})
        stored.append(quest(rig).pool.export_pages(0, 0, 2))
    assert torch.equal(*stored)
    assert not stored[0].any()  # the bytes of +0, whatever a device's minimum makes of zeros of both signs


def test_a_batch_of_chunks_touches_each_requests_own_pages() -> None:
    rig = make()
    rig.add({0: 30, 4: 7, 2: 61}, chunk=11)
    for layer in rig.geometry.layers:
        for request in (0, 2, 4):
            assert torch.equal(bounds_of(rig, layer, request), plain_bounds(rig.all_keys(layer, request)))


def test_padding_rows_and_other_requests_are_left_alone() -> None:
    rig = make()
    rig.add({0: 30, 1: 30}, spare=1)
    before = [bounds_of(rig, layer, 0) for layer in rig.geometry.layers]
    rig.step([1], padding=3)  # the padding names request 0
    assert all(torch.equal(before[layer], bounds_of(rig, layer, 0)) for layer in rig.geometry.layers)


def test_the_ratio_gives_longer_requests_more_pages_within_the_budget() -> None:
    rig = make(sparsity_ratio=0.2)
    rig.add({0: 20, 1: 79, 2: 400}, spare=1)
    selection = rig.step([0, 1, 2])[1]
    for request, budget in ((0, 3), (1, 4), (2, 6)):
        assert ids(selection, request) == plain_selection(rig, 1, request, None, budget, "softmax")


@pytest.mark.parametrize("n", [1, P, P + 1])
def test_the_bytes_of_a_request_are_those_of_its_pages(n: int) -> None:
    rig = make()
    rig.add({0: n})
    algorithm = quest(rig)
    allocated = algorithm.pool.allocator.in_use * algorithm.pool.layer(0)[0].numel() * rig.geometry.num_layers
    assert algorithm.representation_bytes(n) == allocated == -(-n // P) * 3 * 2 * 2 * 8 * 2
    algorithm.free(0)
    assert algorithm.pool.allocator.in_use == 0


@pytest.mark.parametrize("geometry", [mha(), mla(), mha(start=4)], ids=["mha", "mla", "stage"])
def test_sidecars_of_pages_give_the_same_selection(geometry: KVGeometry) -> None:
    rig = make(geometry)
    rig.add({0: 100}, spare=1)
    rig.copy_request(0, 1)
    rig.algorithm.reserve(1, 100)
    parts = [rig.algorithm.export_sidecar(0, *edges) for edges in ((0, 47), (17, 100))]
    assert [(part.start, len(part.data)) for part in parts if part] == [(0, 2), (32, 4)]
    for part in parts:
        assert part is not None
        assert part.data.shape[1] == rig.algorithm.sidecar_page_bytes()
        assert rig.algorithm.import_sidecar(1, part) == len(part.data) * PAGE
    rig.n[1] = 96
    rig.prefill({1: 4})
    for layer, selection in rig.step([0, 1]).items():
        assert torch.equal(selection.indices[0], selection.indices[1])
        assert torch.equal(bounds_of(rig, layer, 0), bounds_of(rig, layer, 1))


def test_a_sidecar_that_does_not_fit_is_refused() -> None:
    rig = make()
    rig.add({0: 64, 1: 16})
    sidecar = rig.algorithm.export_sidecar(0, 0, 64)
    assert sidecar is not None
    with pytest.raises(AllocationError, match="holds 4 pages"):
        rig.algorithm.import_sidecar(1, sidecar)
    with pytest.raises(ConfigError, match="start=8"):
        rig.algorithm.import_sidecar(0, Sidecar(8, sidecar.data))
    with pytest.raises(ConfigError, match="rows of"):
        rig.algorithm.import_sidecar(0, Sidecar(0, sidecar.data[:, :-1]))
    empty = rig.algorithm.export_sidecar(0, 17, 31)
    assert empty is not None
    assert len(empty.data) == 0


@pytest.mark.parametrize(("start", "skipped"), [(0, 2), (1, 1), (2, 0), (7, 0)])
def test_the_models_first_layers_have_no_bounds(start: int, skipped: int) -> None:
    rig = make(mha(start=start), skip_layers=2)
    rig.add({0: 40})
    algorithm = quest(rig)
    assert algorithm.skip_layers == skipped
    assert algorithm.representation_bytes(40) == 10 * (3 - skipped) * 2 * 2 * 8 * 2
    for layer in rig.geometry.layers[:skipped]:
        with pytest.raises(ConfigError, match=f"layer_id={layer}"):
            rig.decode(layer, rig.batch(Mode.DECODE, [0], [1]))
    for layer in rig.geometry.layers[skipped:]:
        assert torch.equal(bounds_of(rig, layer, 0), plain_bounds(rig.all_keys(layer, 0)))


def test_pages_of_the_pools_hold_whole_scoring_pages() -> None:
    with pytest.raises(ConfigError, match="page=6"):
        make(page=6)
