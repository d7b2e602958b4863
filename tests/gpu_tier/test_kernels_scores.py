"""Scores for a selection, the selection, and the two halves of a k-means iteration: each implementation."""

from __future__ import annotations

import math
import random
from importlib import import_module
from typing import Any

import pytest
import torch
from attention_cases import device_under_test
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import each_is_refused
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.geometry import KVDtype, RowFormat
from kvcm.gpu_tier.kernels.indexer_score import indexer_score
from kvcm.gpu_tier.kernels.kmeans_assign import kmeans_assign
from kvcm.gpu_tier.kernels.kmeans_update import kmeans_update
from kvcm.gpu_tier.kernels.pq_score import pq_score
from kvcm.gpu_tier.kernels.quest_score import page_bounds, quest_score, round_down, round_up
from kvcm.gpu_tier.kernels.segment_sum import segment_sum
from kvcm.gpu_tier.kernels.topk_select import topk_select

IMPLEMENTATIONS = ["reference", "triton"]


ANY_F32 = st.floats(width=32, allow_nan=False)


def where(impl: str) -> torch.device:
    return device_under_test() if impl != "reference" else torch.device("cpu")


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# topk_select ---------------------------------------------------------------------------------------------------------
def sorted_top(scores: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


def run_top(impl: str, rows: list[list[list[float]]], lengths: list[int], k: int, width: int) -> list[list[list[int]]]:
    device = where(impl)
    scores = torch.tensor(rows, dtype=torch.float32, device=device)
    ids = torch.full((*scores.shape[:2], width), 77, dtype=torch.int32, device=device)
    counts = torch.full(scores.shape[:2], 77, dtype=torch.int32, device=device)
    topk_select(scores, torch.tensor(lengths, dtype=torch.int32, device=device), k, ids, counts, impl=impl)
    assert counts.tolist() == [[min(k, n)] * len(row) for n, row in zip(lengths, rows, strict=True)]
    return ids.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("impl", "in_chunks"), [("reference", False), ("triton", False), ("triton", True)])
@pytest.mark.parametrize("k", [1, 7, 64, 300])
def test_top_k_of_rows_and_heads(impl: str, in_chunks: bool, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_chunks:
        triton_impl = import_module("kvcm.gpu_tier.kernels.topk_select.triton_impl")
        monkeypatch.setattr(triton_impl, "_ALONE", 32)
        monkeypatch.setattr(triton_impl, "_CHUNK", 64)
    chooser = random.Random(k)
    lengths = [0, 1, 150, 200]

    def score() -> float:
        return chooser.choice([chooser.gauss(0, 1), float(chooser.randint(-2, 2)), -math.inf, -0.0, 1e-42, math.inf])

    rows = [[[float(torch.tensor(score())) for _ in range(200)] for _ in range(2)] for _ in lengths]
    got = run_top(impl, rows, lengths, k, 304)
    for row, length, ids in zip(rows, lengths, got, strict=True):
        for scores, chosen in zip(row, ids, strict=True):
            top = sorted_top(scores[:length], k)
            assert chosen == top + [-1] * (304 - len(top))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_nan_is_last(impl: str) -> None:
    assert run_top(impl, [[[math.nan, -math.inf, 3.0]]], [3], 2, 2) == [[[0, 2]]]


def test_top_k_arguments_are_checked() -> None:
    ids, counts = torch.zeros(2, 1, 4, dtype=torch.int32), ints([0, 0])[:, None]
    good = {"scores": torch.zeros(2, 1, 8), "lengths": ints([0, 0]), "k": 4, "out_indices": ids, "out_lengths": counts}
    each_is_refused(topk_select, good, k=5, lengths=ints([0]), out_lengths=counts[:1])


# quest_score ---------------------------------------------------------------------------------------------------------
@settings(max_examples=examples(400), deadline=None)
@given(st.lists(ANY_F32, min_size=1, max_size=20))
def test_rounded_bounds_are_the_nearest_on_their_side(numbers: list[float]) -> None:
    exact = torch.tensor(numbers, dtype=torch.float32)
    low, high = round_down(exact), round_up(exact)
    assert low.dtype is high.dtype is torch.bfloat16
    assert torch.all(low.float() <= exact)
    assert torch.all(high.float() >= exact)
    representable = exact.bfloat16().float() == exact
    assert torch.equal(low.float() == high.float(), representable)
    between = high.view(torch.int16).int() - low.view(torch.int16).int()
    crosses_zero = (low == 0) | (high == 0)
    assert torch.all(representable | crosses_zero | (between.abs() == 1))


def direct_bound(q: Tensor, bounds: Tensor) -> Tensor:
    """Return ``f64 [B, Hx, pages]`` by the definition."""
    group = q.shape[1] // bounds.shape[1]
    pages = bounds.repeat_interleave(group, dim=1).double()
    products = q.double()[:, None, :, None] * pages[None]
    return products.amax(3).sum(-1).transpose(1, 2)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "group", "dims"), [(2, 1, 64), (2, 4, 128), (1, 20, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quest_scores(impl: str, heads: int, group: int, dims: int, dtype: torch.dtype) -> None:
    device = where(impl)
    g = torch.Generator().manual_seed(7)
    bounds = page_bounds(torch.randn(40, 4, heads, dims, generator=g))
    q = torch.randn(3, heads * group, dims, generator=g).to(dtype)
    table = torch.stack([torch.randperm(40, generator=g)[:35] for _ in range(3)]).int()
    table[2, 4] = -1
    n_pages = torch.tensor([35, 0, 20], dtype=torch.int32)
    out = torch.full((3, heads * group, 35), torch.nan, device=device)
    quest_score(*(x.to(device) for x in (q, bounds, table, n_pages)), out, impl=impl)
    direct = direct_bound(q, bounds).gather(2, table.clamp_min(0).long()[:, None].expand(out.shape))
    counts = (torch.arange(35) < n_pages[:, None]) & (table >= 0)
    torch.testing.assert_close(
        out.double().cpu(), direct.masked_fill(~counts[:, None], -torch.inf), rtol=1e-5, atol=1e-4
    )


def test_quest_arguments_are_checked() -> None:
    bounds, table = torch.zeros(3, 2, 2, 8, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.int32)
    good = {"q": torch.zeros(2, 4, 8), "bounds": bounds, "page_table": table, "n_pages": ints([0, 0])}
    good["out"] = torch.zeros(2, 4, 5)
    each_is_refused(quest_score, good, bounds=bounds.float(), n_pages=ints([0]), out=torch.zeros(2, 4, 6))


# indexer_score -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "dims", "page_tokens"), [(4, 64, 16), (64, 128, 64), (3, 32, 5)])
def test_indexer_scores_scale_before_or_after_the_relu(impl: str, heads: int, dims: int, page_tokens: int) -> None:
    device = where(impl)
    g = torch.Generator().manual_seed(dims)
    row = RowFormat(dims, KVDtype.FP8)
    pages = -(-90 // page_tokens)
    keys = row.encode(torch.randn(pages * page_tokens, dims, generator=g))
    lengths = torch.tensor([90, 0, 33], dtype=torch.int32)
    query = row.encode(torch.randn(3, heads, dims, generator=g))
    q8 = query[..., :dims].contiguous().view(torch.float8_e4m3fn)
    q_scale = query[..., dims:].contiguous().view(torch.float32)[..., 0]
    weight = torch.randn(3, heads, generator=g)
    table = torch.stack([torch.randperm(pages, generator=g) for _ in range(3)]).int()
    out = torch.full((3, 90), torch.nan, device=device)
    inputs = [x.to(device) for x in (q8, weight * q_scale, keys, table)]
    indexer_score(*inputs, page_tokens, lengths.to(device), out, impl=impl)
    position = torch.arange(90)
    slots = table.long()[:, position // page_tokens] * page_tokens + position % page_tokens
    dots = torch.einsum("bhd,bnd->bhn", row.decode(query).double(), row.decode(keys)[slots].double())
    want = (weight.double()[..., None] * dots.relu()).sum(1)
    want = want.masked_fill(position >= lengths[:, None], -torch.inf)
    # Tensor cores of Hopper add fp8 products with 14 bits.
    near = {"rtol": 1e-4, "atol": 1e-3} if device.type == "cpu" else {"rtol": 2**-8, "atol": 0.05}
    torch.testing.assert_close(out.double().cpu(), want, **near)


def test_indexer_skips_negative_pages_and_checks_its_arguments() -> None:
    q8, keys = torch.ones(1, 2, 8).to(torch.float8_e4m3fn), RowFormat(8, KVDtype.FP8).encode(torch.ones(8, 8))
    good: dict[str, Any] = {"q8": q8, "weight": torch.ones(1, 2), "keys": keys, "page_table": ints([-1, 1])[None]}
    good |= {"page_tokens": 4, "lengths": ints([8]), "out": torch.zeros(1, 8)}
    wrong = {"q8": q8.float(), "keys": keys[:, :8], "lengths": ints([]), "out": torch.zeros(1, 9)}
    each_is_refused(indexer_score, good, **wrong)
    assert good["out"].tolist() == [[-math.inf] * 4 + [16] * 4]


FIRST, LENGTHS = [0, 32, 5, 0, 7], [200, 150, 5, 0, 3]


PAGES = 9


def problem(heads: int, group: int, parts: int, bits: int, page_tokens: int, seed: int) -> tuple[Tensor, ...]:
    """Return a table, codes of which the pages hold more, pages of which one is missing, first tokens and lengths."""
    g = torch.Generator().manual_seed(seed)
    rows = len(LENGTHS)
    table = torch.randn(rows, heads * group, parts, 2**bits, generator=g)
    space = torch.randint(0, 2**bits, (rows * PAGES, page_tokens * heads * parts + 24), dtype=torch.uint8, generator=g)
    codes = space[:, 8:-16].unflatten(1, (page_tokens, heads, parts))
    pages = torch.randperm(rows * PAGES, generator=g).view(rows, PAGES).int()
    pages[1, 3] = -1
    limits = [torch.tensor(numbers, dtype=torch.int32) for numbers in (FIRST, LENGTHS)]
    return table, codes, pages, *limits


def direct(table: Tensor, codes: Tensor, pages: Tensor, width: int) -> Tensor:
    page_tokens, heads = codes.shape[1:3]
    out = torch.full((*table.shape[:2], width), -torch.inf, dtype=torch.float64)
    for row, (first, length) in enumerate(zip(FIRST, LENGTHS, strict=True)):
        for token in range(first, min(length, width)):
            page = int(pages[row, token // page_tokens])
            if page < 0:
                continue
            for head in range(table.shape[1]):
                code = codes[page, token % page_tokens, head * heads // table.shape[1]]
                out[row, head, token] = sum(float(table[row, head, j, c]) for j, c in enumerate(code.tolist()))
    return out


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "group", "parts", "bits"), [(2, 4, 4, 8), (1, 5, 3, 4), (3, 1, 1, 2)])
@pytest.mark.parametrize("page_tokens", [64, 25])
def test_scores_are_sums_of_a_table(impl: str, heads: int, group: int, parts: int, bits: int, page_tokens: int) -> None:
    table, codes, *rest = problem(heads, group, parts, bits, page_tokens, 11)
    for width in (200, 170):
        out = torch.full((*table.shape[:2], width + 5), torch.nan, device=where(impl))[..., :width]
        pq_score(*(tensor.to(where(impl)) for tensor in (table, codes, *rest)), out, impl=impl)
        torch.testing.assert_close(out.double().cpu(), direct(table, codes, rest[0], width), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tables_may_have_any_strides(impl: str) -> None:
    table, codes, *rest = (tensor.to(where(impl)) for tensor in problem(2, 4, 4, 4, 32, 12))
    turned = table.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    outs = [torch.full((*table.shape[:2], 200), torch.nan, device=table.device) for _ in range(2)]
    for tensor, out in zip((table, turned), outs, strict=True):
        pq_score(tensor, codes, *rest, out, impl=impl)
    assert torch.equal(*outs)


def test_every_tiling_scores_the_same() -> None:
    kernel = import_module("kvcm.gpu_tier.kernels.pq_score.triton_impl").kernel
    table, codes, *rest = problem(1, 4, 2, 6, 64, 13)
    want = direct(table, codes, rest[0], 200)
    for tiling in kernel.tilings:
        kernel.forced = tiling
        out = torch.full(want.shape, torch.nan, device=where("triton"))
        pq_score(*(tensor.to(where("triton")) for tensor in (table, codes, *rest)), out, impl="triton")
        kernel.forced = None
        torch.testing.assert_close(out.double().cpu(), want, rtol=1e-6, atol=1e-5)


def test_arguments_are_checked() -> None:
    table, codes, pages, first, lengths = problem(2, 2, 2, 4, 16, 14)
    good = {"table": table, "codes": codes, "page_table": pages, "first": first, "lengths": lengths}
    good["out"] = torch.zeros(5, 4, PAGES * 16)
    each_is_refused(
        pq_score, good, table=table.double(), codes=codes.int(), page_table=pages[:2], first=first[:2],
        lengths=lengths[:2], out=torch.zeros(5, 4, PAGES * 16 + 1),
    )  # fmt: skip


METRICS = ["ip", "l2"]


def assign(impl: str, metric: str, x: Tensor, centroids: Tensor, counts: list[int], n: list[int]) -> Tensor:
    device = where(impl)
    labels = torch.full(x.shape[:2], 77, dtype=torch.int32, device=device)
    inputs = [tensor.to(device) for tensor in (x, centroids, ints(counts), ints(n))]
    kmeans_assign(*inputs, labels, metric=metric, impl=impl)
    return labels.cpu()


def nearness(metric: str, x: Tensor, centroids: Tensor) -> Tensor:
    """Return ``f64 [T, C]`` by the definition: the nearest has the most."""
    x, centroids = x.double(), centroids.double()
    if metric == "ip":
        return x @ centroids.T
    return -(x[:, None] - centroids[None]).square().sum(-1)


def small_integers(*shape: int, seed: int) -> Tensor:
    """Numbers whose products and sums are exact in every precision, so that there are real ties."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


# kmeans_assign -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dims", [2, 40, 128])
def test_a_row_belongs_to_its_nearest_centroid_and_ties_to_the_lowest(impl: str, metric: str, dims: int) -> None:
    counts, n = [70, 0, 150, 33], [1, 9, 130, 64]
    x, centroids = small_integers(4, 150, dims, seed=dims), small_integers(4, 130, dims, seed=dims + 1)
    for problem, (rows, some) in enumerate(zip(counts, n, strict=True)):  # the padding must not be read
        x[problem, rows:] = torch.nan
        centroids[problem, some:] = torch.nan
    labels = assign(impl, metric, x, centroids, counts, n)
    ties = 0
    for problem, (rows, some) in enumerate(zip(counts, n, strict=True)):
        near = nearness(metric, x[problem, :rows], centroids[problem, :some])
        highest = near.amax(1, keepdim=True)
        ties += int(((near == highest).sum(1) > 1).sum())
        first = [row.index(True) for row in (near == highest).tolist()]
        assert labels[problem].tolist() == first + [-1] * (150 - rows)
    assert ties > 10 or dims > 40  # or nothing was said about them


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_problems_without_centroids_have_no_labels(impl: str, metric: str) -> None:
    labels = assign(impl, metric, torch.zeros(2, 3, 8), torch.zeros(2, 2, 8), [3, 3], [0, 2])
    assert labels.tolist() == [[-1] * 3, [0] * 3]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_real_numbers_are_as_near_as_can_be(impl: str, metric: str) -> None:
    g = torch.Generator().manual_seed(3)
    x, centroids = torch.randn(2, 90, 80, generator=g), torch.randn(2, 75, 80, generator=g)
    labels = assign(impl, metric, x, centroids, [90, 81], [75, 70])
    for problem, (rows, some) in enumerate([(90, 75), (81, 70)]):
        near = nearness(metric, x[problem, :rows], centroids[problem, :some])
        chosen = near.gather(1, labels[problem, :rows, None].long())[:, 0]
        torch.testing.assert_close(chosen, near.amax(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows_and_centroids_may_have_strides(impl: str) -> None:
    x = small_integers(60, 3, 20, seed=5).transpose(0, 1)
    centroids = small_integers(3, 2, 31, 20, seed=6)[:, 1]
    plain = assign(impl, "l2", x.contiguous(), centroids.contiguous(), [60, 59, 1], [31, 30, 31])
    assert torch.equal(assign(impl, "l2", x, centroids, [60, 59, 1], [31, 30, 31]), plain)


@pytest.mark.parametrize("tiling", [0, 2, 4])
@pytest.mark.parametrize("metric", METRICS)
def test_every_tiling_labels_same(tiling: int, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = import_module("kvcm.gpu_tier.kernels.kmeans_assign.triton_impl").kernel
    monkeypatch.setattr(kernel, "forced", kernel.tilings[tiling])
    x, centroids = small_integers(2, 140, 24, seed=8), small_integers(2, 100, 24, seed=9)
    arguments = metric, x, centroids, [140, 77], [100, 65]
    assert torch.equal(assign("triton", *arguments), assign("reference", *arguments))


def test_arguments_of_assign_are_checked() -> None:
    x, centroids, ones, labels = torch.zeros(2, 3, 8), torch.zeros(2, 4, 8), ints([1, 1]), ints([0] * 6).view(2, 3)
    good: dict[str, Any] = {"x": x, "centroids": centroids, "counts": ones, "n_centroids": ones, "out_labels": labels}
    wrong = {"centroids": centroids[..., :7], "counts": ones[:1], "out_labels": labels[:, :2]}
    each_is_refused(kmeans_assign, good | {"metric": "ip"}, metric="cosine", **wrong)


# kmeans_update and segment_sum ---------------------------------------------------------------------------------------
def update(impl: str, x: Tensor, labels: Tensor, centroids: Tensor, spherical: bool) -> tuple[Tensor, Tensor]:
    device = where(impl)
    moved = centroids.to(device, copy=True)
    sizes = torch.full(centroids.shape[:2], 77, dtype=torch.int32, device=device)
    kmeans_update(x.to(device), labels.to(device), moved, sizes, spherical=spherical, impl=impl)
    return moved.cpu(), sizes.cpu()


def some_labels(clusters: int, *shape: int, seed: int) -> Tensor:
    """Labels of which about every ninth is -1, and that never are 2."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, clusters, shape, generator=generator, dtype=torch.int32)
    labels[torch.rand(shape, generator=generator) < 0.1] = -1
    return torch.where(labels == 2, 0, labels)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("spherical", [False, True])
@pytest.mark.parametrize(("dims", "clusters"), [(3, 70), (16, 5), (80, 33), (128, 64)])
def test_centroids_move_to_the_mean_of_their_rows(impl: str, spherical: bool, dims: int, clusters: int) -> None:
    g = torch.Generator().manual_seed(dims)
    x, centroids = torch.randn(3, 130, dims, generator=g), torch.randn(3, clusters, dims, generator=g)
    labels = some_labels(clusters, 3, 130, seed=dims)
    labels[1] = -1  # a problem without rows
    x[labels < 0] = torch.nan
    moved, sizes = update(impl, x, labels, centroids, spherical)
    for problem in range(3):
        for cluster in range(clusters):
            rows = x[problem, labels[problem] == cluster].double()
            assert sizes[problem, cluster] == len(rows)
            if not len(rows):
                assert torch.equal(moved[problem, cluster], centroids[problem, cluster])
                continue
            mean = rows.mean(0) / (rows.mean(0).norm() if spherical else 1)
            torch.testing.assert_close(moved[problem, cluster].double(), mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("spherical", "wanted"), [(True, [[0.0, 1.0], [0.6, 0.8]]), (False, [[0.0, 0.0], [3.0, 4.0]])])
def test_a_spherical_centroid_whose_rows_cancel_stays(impl: str, spherical: bool, wanted: list[list[float]]) -> None:
    x = torch.tensor([[[1.0, 2.0], [-1.0, -2.0], [3.0, 4.0]]])
    moved, _ = update(impl, x, ints([0, 0, 1])[None], torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]), spherical)
    torch.testing.assert_close(moved, torch.tensor([wanted]))


def sums(impl: str, x: Tensor, labels: Tensor, clusters: int) -> Tensor:
    device = where(impl)
    out = torch.full((len(x), clusters, x.shape[2]), torch.nan, device=device)
    segment_sum(x.to(device), labels.to(device), out, impl=impl)
    return out.cpu()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dims", "clusters"), [(5, 66), (64, 17)])
def test_sums_by_label(impl: str, dtype: torch.dtype, dims: int, clusters: int) -> None:
    x = torch.randn(100, 2, dims, generator=torch.Generator().manual_seed(1)).to(dtype).transpose(0, 1)
    labels = some_labels(clusters, 2, 100, seed=2)
    x[labels < 0] = torch.inf
    out = sums(impl, x, labels, clusters)
    for problem in range(2):
        for cluster in range(clusters):
            want = x[problem, labels[problem] == cluster].double().sum(0)
            torch.testing.assert_close(out[problem, cluster].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_sums_of_nothing_are_0(impl: str) -> None:
    assert torch.equal(sums(impl, torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.int32), 3), torch.zeros(2, 3, 4))


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_sums_of_a_problem_do_not_depend_on_the_others(data: st.DataObject) -> None:
    impl = data.draw(st.sampled_from(IMPLEMENTATIONS))
    tokens, clusters, dims = (data.draw(st.integers(1, most)) for most in (90, 40, 20))
    x = torch.randn(3, tokens, dims, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    labels = some_labels(clusters, 3, tokens, seed=data.draw(st.integers(0, 99))).clamp_max(clusters - 1)
    order = data.draw(st.permutations(range(3)))
    padding = data.draw(st.integers(0, 70))
    longer = torch.nn.functional.pad(x[order], (0, 0, 0, padding), value=torch.nan)
    more = torch.nn.functional.pad(labels[order], (0, padding), value=-1)
    assert torch.equal(sums(impl, longer, more, clusters), sums(impl, x, labels, clusters)[order])


@pytest.mark.parametrize("tiling", [0, 2, 4])
def test_every_tiling_adds_up_same(tiling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = small_integers(2, 140, 40, seed=3), some_labels(75, 2, 140, seed=4)
    start = small_integers(2, 75, 40, seed=5)
    for name in ("segment_sum", "kmeans_update"):
        kernel = import_module(f"kvcm.gpu_tier.kernels.{name}.triton_impl").kernel
        monkeypatch.setattr(kernel, "forced", kernel.tilings[tiling])
    assert torch.equal(sums("triton", x, labels, 75), sums("reference", x, labels, 75))
    for spherical in (False, True):
        mine, reference = (update(impl, x, labels, start, spherical) for impl in ("triton", "reference"))
        torch.testing.assert_close(mine, reference)


def test_arguments_of_sums_and_updates_are_checked() -> None:
    x, labels, out = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 4, 8)
    sizes, good = torch.zeros(2, 4, dtype=torch.int32), dict[str, Any](x=x, labels=labels)
    each_is_refused(segment_sum, good | {"out": out}, x=x.double(), labels=labels[:, :2], out=out[..., :7])
    good |= {"centroids": out, "out_sizes": sizes, "spherical": True}
    each_is_refused(kmeans_update, good, labels=labels[:1], centroids=out[:1], out_sizes=sizes[:, :3])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=examples(130), deadline=None)
@given(
    scores=st.lists(ANY_F32 | st.sampled_from([0.0, -0.0, 1.0, -math.inf]), min_size=1, max_size=50),
    short=st.integers(0, 50),
    k=st.integers(1, 60),
)
def test_top_k_is_that_of_a_sort(impl: str, scores: list[float], short: int, k: int) -> None:
    length = max(0, len(scores) - short)
    top = sorted_top(scores[:length], k)
    assert run_top(impl, [[scores]], [length], k, 62) == [[top + [-1] * (62 - len(top))]]
