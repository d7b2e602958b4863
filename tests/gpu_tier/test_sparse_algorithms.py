"""Full, streaming, oracle, DSA, Quest and SnapKV select what plain Python selects."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_rig import INDEX_DIM as DIMS
from algorithm_rig import INDEX_HEADS as HEADS
from algorithm_rig import PAGE, IndexRig, PQRig, Rig, ids, mha, mla, top
from hypothesis import given, settings
from hypothesis import strategies as st
from sidecar_cases import exported
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.algorithms.base import Sidecar
from kvcm.gpu_tier.algorithms.dsa import DSA
from kvcm.gpu_tier.algorithms.quest import Quest
from kvcm.gpu_tier.algorithms.snapkv import ObservationWindows, SnapKV
from kvcm.gpu_tier.errors import AllocationError, ConfigError, StateError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry
from kvcm.gpu_tier.kernels.quest_score import round_down, round_up
from kvcm.gpu_tier.types import ForwardBatch, Mode, Unit


@pytest.mark.parametrize("name", ["full", "full_offload"])
def test_dense_attention_selects_nothing_and_needs_no_memory(name: str) -> None:
    rig = Rig(mha(), name)
    rig.add({0: 40, 1: 3}, spare=1)
    selection = rig.step([0, 1], padding=2)[0]
    assert selection.indices.shape == (4, 1, 0)
    assert not selection.lengths.any()
    assert not rig.algorithm.selects
    assert rig.algorithm.max_items == rig.algorithm.representation_bytes(40) == 0


def kept_by_streaming(n: int, sink: int, window: int, page: int) -> list[int]:
    tokens = [t for t in range(n) if t < -(-sink // page) * page or t >= n - window]
    return sorted({t // page for t in tokens})


@settings(max_examples=examples(300), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    sink=st.integers(0, 9),
    window=st.integers(1, 40),
    page=st.sampled_from([1, 4, 16]),
)
def test_streaming_keeps_the_pages_of_sinks_and_window(lengths: list[int], sink: int, window: int, page: int) -> None:
    rig = Rig(mha(1, 2, layers=1), "streaming_llm", algo={"sink": sink, "window": window, "page": page})
    rig.add(dict(enumerate(lengths)), spare=1)
    selection = rig.step(range(len(lengths)), padding=1)[0]
    assert selection.unit is Unit.PAGE
    assert selection.unit_tokens == page
    for row, n in enumerate(lengths):
        assert ids(selection, row) == kept_by_streaming(n + 1, sink, window, page)
    assert ids(selection, len(lengths)) == []


def weights(rig: Rig, layer: int, request: int, head: int) -> list[float]:
    keys, query = rig.all_keys(layer, request), rig.query(layer, request)
    scores = torch.einsum("gd,nd->gn", query[head].double(), keys[:, head].double()) * rig.context.sm_scale
    return scores.softmax(-1).sum(0).tolist()


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("geometry", [mha(), mha(1), mla(), mha(start=5)], ids=["mha", "one head", "mla", "stage"])
def test_the_oracle_is_the_exact_top_k(geometry: KVGeometry, group: int) -> None:
    k = 7
    rig = Rig(geometry, "oracle", group, {"k": k})
    rig.add({0: 1, 1: k - 2, 2: k - 1, 3: k, 4: 100}, spare=2)
    rig.step([0, 1, 2, 3, 4])
    for layer, selection in rig.step([3, 1, 0, 2, 4], padding=2).items():
        for row, request in enumerate([3, 1, 0, 2, 4]):
            for head in range(geometry.num_kv_heads):
                assert ids(selection, row, head) == top(weights(rig, layer, request, head), k)
        assert not selection.lengths[5:].any()


def test_query_heads_must_share_the_kv_heads_evenly() -> None:
    rig = Rig(mha(2), "oracle")
    with pytest.raises(ConfigError, match="num_q_heads=3"):
        registry.make(replace(rig.context, num_q_heads=3))


# Beside `mha()`: what differs in heads, dims, layers or bytes.
KINDS = {
    "mla fp8": mla(136, 128, dtype=KVDtype.FP8),
    "one head": mha(1, 16),
    "stage": mha(4, 8, start=3),
    "bf16": mha(dtype=KVDtype.BF16),
}


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
    """Return vectors ``[..., d]`` after the rotation and e4m3 with one f32 scale, ``f64``."""
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


@pytest.mark.parametrize("geometry", [mla(), mha(), *KINDS.values()])
def test_it_selects_what_the_indexer_ranks_highest(geometry: KVGeometry) -> None:
    """Lengths around k and around pages, in one batch with padding."""
    rig = make(geometry)
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
    lengths = {0: 30, 4: 7, 2: 61}
    rig.add(lengths, chunk=11, spare=1)
    before = rows_of(rig, 1, 0)
    rig.step([4], padding=3)  # the padding names request 0
    assert torch.equal(before, rows_of(rig, 1, 0))
    for layer, request in itertools.product(rig.geometry.layers, lengths):
        rows = rows_of(rig, layer, request)
        stored = rows[:, :DIMS].contiguous().view(torch.float8_e4m3fn).double()
        stored *= rows[:, DIMS:].contiguous().view(torch.float32)
        expected = plain_quantised(rig.index[layer, request]["index_key"][: rig.n[request]])
        # Scales in f32 and in f64 differ in their last bit: now and then a number falls to its neighbour in e4m3.
        assert torch.isclose(stored, expected, rtol=2**-3, atol=1e-4).all()
        assert torch.isclose(stored, expected, rtol=1e-5).float().mean() > 0.95


def test_powers_of_two_as_scales() -> None:
    rig = make(mla(), scale_format="ue8m0")
    rig.add({0: 64})
    scales = rows_of(rig, 0, 0)[:, DIMS:].contiguous().view(torch.float32).flatten()
    largest = (rig.index[0, 0]["index_key"][:64].double() @ hadamard_matrix(DIMS)).abs().amax(-1) / 448
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert (scales >= largest * (1 - 1e-6)).all()
    assert (scales < 2 * largest * (1 + 1e-6)).all()


def test_an_engine_that_passes_no_index_is_rejected() -> None:
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


P = 4  # tokens of a scoring page


SMALL: dict[str, Any] = {"page": P, "token_budget": 24, "recent_pages": 2, "sink_pages": 1, "skip_layers": 0}


def make_quest(geometry: KVGeometry | None = None, members: int = 2, **algo: Any) -> Rig:
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


def plain_pages(rig: Rig, layer: int, request: int, head: int | None, budget: int, rule: str) -> list[int]:
    scores = plain_scores(rig, layer, request, rule)
    ranked = (scores.sum(0) if head is None else scores[head]).tolist()
    pages = len(ranked) + 1
    always = {p for p in range(pages) if p < SMALL["sink_pages"] or p >= pages - SMALL["recent_pages"]}
    return top([math.inf if p in always else ranked[p] for p in range(pages)], budget)


@pytest.mark.parametrize("heads", ["shared", "per_head"])
@pytest.mark.parametrize("rule", ["mean", "max", "softmax"])
@pytest.mark.parametrize(("geometry", "group"), [(mha(), 1), (mha(), 4), *((kv, 4) for kv in KINDS.values())])
def test_it_selects_the_pages_of_the_largest_bounds(geometry: KVGeometry, group: int, rule: str, heads: str) -> None:
    rig = make_quest(geometry, group, group=rule, heads=heads)
    rig.add({0: 1, 1: 2, 2: 21, 3: 22, 4: 23, 5: 129}, chunk=19, spare=2)
    rig.step(range(6))
    order = [5, 0, 3, 2, 4, 1]
    for layer, selection in rig.step(order, padding=3).items():
        for row, request in enumerate(order):
            for head in range(selection.indices.shape[1]):
                own = head if heads == "per_head" else None
                assert ids(selection, row, head) == plain_pages(rig, layer, request, own, 6, rule)
        assert not selection.lengths[6:].any()


def stored_of(rig: Rig, layer: int, request: int) -> Tensor:
    return rows_of(rig, layer, request) if isinstance(rig.algorithm, DSA) else bounds_of(rig, layer, request)


@pytest.mark.parametrize("new", [lambda: make(mla()), make_quest], ids=["dsa", "quest"])
@settings(max_examples=examples(160), deadline=None)
@given(n=st.integers(1, 70), cuts=st.lists(st.integers(1, 30), max_size=8), repeats=st.integers(1, 2))
def test_how_the_prompt_was_cut_does_not_matter(new: Callable[[], Rig], n: int, cuts: list[int], repeats: int) -> None:
    """Any chunks, each of them given once or twice, and then decoded tokens: the bits of one prefill of everything."""
    whole, cut = new(), new()
    whole.add({3: n})
    cut.source.of, cut.queries_seen, cut.n[3] = whole.source.of, whole.queries_seen, 0
    for size in cuts:
        if size <= n - cut.n[3]:
            cut.algorithm.reserve(3, cut.n[3] + size)
            cut.prefill({3: size}, repeats=repeats)
    while cut.n[3] < n:
        cut.step([3], padding=1)
    for layer in cut.geometry.layers:
        assert torch.equal(stored_of(cut, layer, 3), stored_of(whole, layer, 3))


@pytest.mark.parametrize("chunk", [1, 5])
def test_zeros_of_either_sign_leave_the_same_bits(chunk: int) -> None:
    signs = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(0))
    stored = []
    for size in (8, chunk):
        rig = make_quest()
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


def test_a_batch_touches_each_requests_own_pages() -> None:
    rig = make_quest()
    rig.add({0: 30, 4: 7, 2: 61}, chunk=11, spare=1)
    rig.step([4], padding=3)  # the padding names request 0
    for layer, request in itertools.product(rig.geometry.layers, (0, 2, 4)):
        assert torch.equal(bounds_of(rig, layer, request), plain_bounds(rig.all_keys(layer, request)))


def test_the_ratio_gives_longer_requests_more_pages_within_the_budget() -> None:
    rig = make_quest(sparsity_ratio=0.2)
    rig.add({0: 20, 1: 79, 2: 400}, spare=1)
    selection = rig.step([0, 1, 2])[1]
    for request, budget in ((0, 3), (1, 4), (2, 6)):
        assert ids(selection, request) == plain_pages(rig, 1, request, None, budget, "softmax")


@pytest.mark.parametrize("n", [1, P, P + 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("name", ["quest", "dsa"])
def test_the_bytes_of_a_request_are_those_of_its_pages(name: str, n: int) -> None:
    rig, page_bytes = (make_quest(), 3 * 2 * 2 * 8 * 2) if name == "quest" else (make(mla()), PAGE * 2 * (DIMS + 4))
    rig.add({0: n})
    algorithm = rig.algorithm
    assert isinstance(algorithm, (Quest, DSA))
    pool = algorithm.pool
    allocated = pool.allocator.in_use * pool.layer(0)[0].numel() * rig.geometry.num_layers
    assert algorithm.representation_bytes(n) == allocated == -(-n // pool.page_tokens) * page_bytes
    algorithm.free(0)
    assert pool.allocator.in_use == 0


@pytest.mark.parametrize(
    "new", [lambda: make(mla()), make_quest, lambda: make_quest(mla()), lambda: make_quest(mha(start=4))],
    ids=["dsa", "quest", "quest mla", "quest stage"],
)  # fmt: skip
def test_sidecars_of_pages_give_the_same_selection(new: Callable[[], Rig]) -> None:
    rig = new()
    rig.add({0: 100}, spare=1)
    rig.copy_request(0, 1)
    if isinstance(rig, IndexRig):
        rig.index |= {(layer, 1): rig.index[layer, 0] for layer in rig.geometry.layers}
    rig.algorithm.reserve(1, 100)
    for edges, start, covered in (((0, 47), 0, 32), ((17, 100), 32, 64)):
        sidecar = exported(rig, 0, *edges)
        assert sidecar.start == start
        assert sidecar.data.shape == (covered // PAGE, rig.algorithm.sidecar_page_bytes())
        assert rig.algorithm.import_sidecar(1, sidecar) == covered
    rig.n[1] = 96
    rig.prefill({1: 4})
    for layer, selection in rig.step([0, 1]).items():
        assert torch.equal(selection.indices[0], selection.indices[1])
        assert torch.equal(stored_of(rig, layer, 0), stored_of(rig, layer, 1))


@pytest.mark.parametrize(("new", "held"), [(make_quest, 4), (PQRig, 1)], ids=["quest", "pqcache"])
def test_a_sidecar_that_does_not_fit_is_refused(new: Callable[[], Rig], held: int) -> None:
    rig = new()
    rig.add({0: 83})
    sidecar = exported(rig, 0, 0, 80)
    rig.algorithm.reserve(1, 16)
    with pytest.raises(AllocationError, match=f"holds {held} pages"):
        rig.algorithm.import_sidecar(1, sidecar)
    rig.algorithm.reserve(2, 100)
    with pytest.raises(ConfigError, match="start=8"):
        rig.algorithm.import_sidecar(2, Sidecar(8, sidecar.data))
    with pytest.raises(ConfigError, match="rows of"):
        rig.algorithm.import_sidecar(2, Sidecar(0, sidecar.data[:, :-1]))
    assert len(exported(rig, 0, 17, 31).data) == 0


@pytest.mark.parametrize(("start", "skipped"), [(0, 2), (1, 1), (2, 0), (7, 0)])
def test_the_models_first_layers_have_no_bounds(start: int, skipped: int) -> None:
    rig = make_quest(mha(start=start), skip_layers=2)
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
        make_quest(page=6)


W, CAP = 4, 14


SNAPKV_SMALL: dict[str, Any] = {"w_obs": W, "cap": CAP, "kernel": 3}


def make_snapkv(geometry: KVGeometry | None = None, members: int = 2, *, residency: str = "", **algo: Any) -> Rig:
    return Rig(geometry or mha(), "snapkv", members, {**SNAPKV_SMALL, **algo}, residency=residency)


def snapkv(rig: Rig) -> SnapKV:
    assert isinstance(rig.algorithm, SnapKV)
    return rig.algorithm


def plain_votes(rig: Rig, layer: int, request: int, head: int, n: int, first_seen: int) -> list[float]:
    """Votes for the tokens before the window, in plain Python over f64."""
    members, pool, kernel = rig.group, snapkv(rig).settings.pool, snapkv(rig).settings.kernel
    keys = rig.source.of[layer, request][:n, head].double()
    candidates = n - min(W, n)
    total = [0.0] * candidates
    for member in range(members):
        votes = [0.0] * candidates
        for position in range(max(first_seen, n - W), n):
            query = rig.queries_seen[layer, request][position, head * members + member].double()
            weights = ((keys[: position + 1] @ query) * rig.context.sm_scale).softmax(0).tolist()
            votes = [vote + weight for vote, weight in zip(votes, weights, strict=False)]
        for i in range(candidates):
            near = [votes[j] for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < candidates]
            total[i] += sum(near) / kernel if pool == "avg" else max(near)
    return total


def plain_set(rig: Rig, layer: int, request: int, head: int, n: int, first_seen: int = 0) -> list[int]:
    window = min(W, n)
    kept = snapkv(rig).settings.kept(n)
    return [*top(plain_votes(rig, layer, request, head, n, first_seen), kept - window), *range(n - window, n)]


LENGTHS = {0: 1, 1: W, 2: CAP - 1, 3: CAP, 4: CAP + 1, 5: 100}


@pytest.mark.parametrize(
    "algo", [{}, {"pool": "max"}, {"kernel": 1}, {"kernel": 7, "pool": "max"}, {"ratio": 0.3}], ids=str
)
@pytest.mark.parametrize(("geometry", "members"), [(mha(), 1), (mha(), 4), *((kv, 4) for kv in KINDS.values())])
def test_the_set_is_what_the_last_queries_vote_for(geometry: KVGeometry, members: int, algo: dict[str, Any]) -> None:
    rig = make_snapkv(geometry, members, **algo)
    if geometry.dtype is not KVDtype.F32:  # such a model's queries are bf16
        rig._random_queries = lambda n, draw=rig._random_queries: draw(n).bfloat16().float()  # type: ignore[method-assign, misc]
    rig.add(LENGTHS, chunk=19, spare=1)
    selections = rig.step(range(6), padding=2)
    for layer in rig.geometry.layers:
        for request, n in LENGTHS.items():
            chosen = rig.algorithm.static_items(request, layer).tolist()
            for head in range(geometry.num_kv_heads):
                assert chosen[head] == plain_set(rig, layer, request, head, n)
                assert ids(selections[layer], request, head) == [*chosen[head], n]
        assert not selections[layer].lengths[6:].any()


@settings(max_examples=examples(120), deadline=None)
@given(n=st.integers(1, 60), cuts=st.lists(st.integers(1, 20), max_size=10), repeats=st.integers(1, 2))
def test_the_set_does_not_depend_on_how_the_prompt_was_cut(n: int, cuts: list[int], repeats: int) -> None:
    """Chunks that are shorter than the window too, and chunks that come twice."""
    whole, cut = make_snapkv(), make_snapkv()
    whole.add({3: n})
    cut.source.of, cut.queries_seen, cut.n[3] = whole.source.of, whole.queries_seen, 0
    for size in [*cuts, *[1] * n]:
        if size <= n - cut.n[3]:
            cut.algorithm.reserve(3, cut.n[3] + size)
            cut.prefill({3: size}, repeats=repeats)
    cut.algorithm.finish_prompt(3, n)
    for layer in cut.geometry.layers:
        assert torch.equal(cut.algorithm.static_items(3, layer), whole.algorithm.static_items(3, layer))


def test_of_an_attached_prefix_only_the_suffix_votes() -> None:
    rig = make_snapkv()
    rig.add({0: 50})
    rig.copy_request(0, 1)
    rig.algorithm.reserve(1, 50)
    rig.n[1] = 48
    rig.prefill({1: 2})
    rig.algorithm.finish_prompt(1, 50)
    for layer in rig.geometry.layers:
        for head in range(2):
            chosen = rig.algorithm.static_items(1, layer)[head].tolist()
            assert chosen == plain_set(rig, layer, 1, head, 50, first_seen=48)


def test_new_tokens_follow_the_set_in_the_order_in_which_they_come() -> None:
    rig = make_snapkv()
    rig.add({0: 40, 1: 9, 2: 100}, chunk=13, spare=40)
    widths = set()
    for step in range(40):
        order = [[0, 1, 2], [2, 0], [1]][step % 3]
        for layer, selection in rig.step(order, padding=step % 2).items():
            widths.add(selection.indices.shape[-1])
            for row, request in enumerate(order):
                n_prompt = {0: 40, 1: 9, 2: 100}[request]
                for head in range(2):
                    fixed = rig.algorithm.static_items(request, layer)[head].tolist()
                    assert ids(selection, row, head) == [*fixed, *range(n_prompt, rig.n[request])]
    assert widths == {CAP + 16, CAP + 32}
    assert max(widths) <= rig.algorithm.max_items


@pytest.mark.parametrize("every", [1, 7])
def test_reselection_chooses_again_with_the_last_queries(every: int) -> None:
    rig = make_snapkv(mode="retrievable", reselect_every=every)
    assert rig.context.config.residency == "lru"
    lengths = {0: 40, 1: 9}
    rig.add(lengths, spare=20)
    since = dict(lengths)
    for step in range(20):
        selections = rig.step([1, 0])
        again = {layer: rig.decode(layer, rig.batch(Mode.DECODE, [1, 0], [1, 1])) for layer in rig.geometry.layers}
        for request in lengths:
            if rig.n[request] - since[request] >= every:
                since[request] = rig.n[request]
        for layer, selection in selections.items():
            assert torch.equal(selection.indices, again[layer].indices)
            assert selection.indices.shape[-1] <= rig.algorithm.max_items == CAP + every
            for row, request in enumerate([1, 0]):
                for head in range(2):
                    fixed = plain_set(rig, layer, request, head, since[request])
                    assert ids(selection, row, head) == [*fixed, *range(since[request], rig.n[request])], step


def test_a_set_that_changes_cannot_stay_in_place() -> None:
    with pytest.raises(ConfigError, match="residency='static'"):
        make_snapkv(mode="retrievable", reselect_every=4, residency="static")


def test_the_prompt_must_be_complete_before_there_is_a_set() -> None:
    rig = make_snapkv()
    rig.source.make(0, 30)
    rig.algorithm.reserve(0, 30)
    with pytest.raises(StateError, match="before finish_prompt"):
        rig.algorithm.static_items(0, 0)
    with pytest.raises(StateError, match="token 29"):
        rig.algorithm.finish_prompt(0, 30)


@pytest.mark.parametrize("algo", [{}, {"ratio": 0.25}, {"mode": "retrievable", "reselect_every": 5}], ids=str)
def test_the_bytes_of_a_request_are_its_sets_and_its_last_queries(algo: dict[str, Any]) -> None:
    rig = make_snapkv(**algo)
    algorithm = snapkv(rig)
    algorithm.reserve(0, 90)
    allocated = algorithm._windows.nbytes + algorithm._sets[:, 0].nbytes
    widest = CAP if "ratio" not in algo else math.ceil(0.25 * rig.context.max_tokens)
    assert algorithm.representation_bytes(90) == allocated == 3 * (W * 4 * 8 * 4 + 2 * widest * 4)
    rig.add({0: 90})
    assert bool(algorithm._windows.nbytes) == bool("reselect_every" in algo)
    algorithm.free(0)
    assert algorithm._windows.nbytes == 0
    assert algorithm.export_sidecar(0, 0, 64) is None


WIDTH = 4


def make_windows() -> ObservationWindows:
    return ObservationWindows(2, WIDTH, 1, 1, torch.float32, torch.device("cpu"))


def chunk(request: int, start: int, stop: int) -> tuple[ForwardBatch, torch.Tensor]:
    """A pass of a request's tokens; a query is 1000 · request + position."""
    empty, queries = torch.empty(0), 1000.0 * request + torch.arange(start, stop)
    batch = ForwardBatch(Mode.PREFILL, empty, empty, empty, empty, empty, (request,), (stop,), (stop - start,))
    return batch, queries[:, None, None]


def seen(windows: ObservationWindows, request: int, layer: int = 0) -> list[float]:
    positions, queries = windows.last(layer, request)
    assert queries.flatten().tolist() == [1000.0 * request + p for p in positions]
    return list(positions)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=8))
def test_the_last_consecutive_positions_are_kept(chunks: list[tuple[int, int]]) -> None:
    """Chunks that overlap earlier ones, come again or leave a gap; the model is a list of positions."""
    windows, model = make_windows(), list[int]()
    windows.open(3)
    stop = 0
    for back, size in chunks:
        start = max(0, stop + 4 - back)
        windows.record(1, *chunk(3, start, start + size))
        fresh = [p for p in range(start, start + size) if not model or p > model[-1]]
        if fresh:
            model = [*model, *fresh] if model and fresh[0] == model[-1] + 1 else fresh
            stop = model[-1] + 1
        assert seen(windows, 3, 1) == model[-WIDTH:]
    assert seen(windows, 3, 0) == []


def test_a_closed_window_is_forgotten() -> None:
    windows = make_windows()
    windows.open(0)
    windows.record(0, *chunk(0, 0, 3))
    windows.open(0)
    assert seen(windows, 0) == [0, 1, 2]
    assert windows.nbytes == windows.window_bytes == 2 * WIDTH * 4
    windows.close(0)
    windows.close(0)
    windows.open(0)
    assert seen(windows, 0) == []
