"""Clusters are ranked and estimated as their definitions say, in all implementations."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from attention_cases import device_under_test
from cluster_cases import Clusters, Shape, random_clusters
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.index.meta_pages import MetaViews, empty_meta_page
from gpu_tier.kernels.centroid_score import centroid_score
from gpu_tier.kernels.dense import group_scores, softmax_partial
from gpu_tier.kernels.weighted_attn import weighted_attn

IMPLEMENTATIONS = ["reference", "triton"]
SHAPES = [
    Shape(2, 4, 64, 64), Shape(1, 20, 144, 128), Shape(3, 3, 80, 8), Shape(2, 1, 8, 20),
]  # fmt: skip
COUNTS = [150, 0, 1, 64, 192]


def where(impl: str) -> torch.device:
    return device_under_test() if impl != "reference" else torch.device("cpu")


def query(shape: Shape, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, shape.q_heads, shape.dims, generator=torch.Generator().manual_seed(1)).to(dtype)


def near(dtype: torch.dtype) -> dict[str, float]:
    # On a GPU the weights of bf16 queries are rounded to bf16.
    exact = dtype is torch.float32 or not torch.cuda.is_available()
    return {"rtol": 1e-5, "atol": 1e-4} if exact else {"rtol": 2**-7, "atol": 2**-7}


# centroid_score ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_dot_products_with_the_centroids_that_exist(impl: str, shape: Shape, dtype: torch.dtype) -> None:
    clusters, q = random_clusters(shape, COUNTS, 3), query(shape, len(COUNTS), dtype)
    here, device = clusters.to(where(impl)), where(impl)
    for width in (192, 130):
        out = torch.full((len(COUNTS), shape.q_heads, width + 3), torch.nan, device=device)[..., :width]
        centroid_score(
            q.to(device), here.views.centroids, here.views.log_size, here.page_table, here.n_clusters, 0.3, out,
            impl=impl,
        )  # fmt: skip
        torch.testing.assert_close(out.double().cpu(), direct_scores(q, clusters, 0.3)[..., :width], **near(dtype))


def direct_scores(q: Tensor, clusters: Clusters, scale: float) -> Tensor:
    rows = []
    for row, count in enumerate(clusters.n_clusters.tolist()):
        heads = []
        for head in range(q.shape[1]):
            kv_head = head * clusters.views.centroids.shape[1] // q.shape[1]
            centroids, _, _, exists = clusters.of(row, kv_head)
            exists = exists & (torch.arange(len(exists)) < count)
            heads.append((centroids @ q[row, head].double() * scale).masked_fill(~exists, -torch.inf))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def test_every_tiling_scores_the_same() -> None:
    kernel = import_module("gpu_tier.kernels.centroid_score.triton_impl").kernel
    shape = Shape(2, 4, 64, 64)
    clusters, q = random_clusters(shape, COUNTS, 4), query(shape, len(COUNTS))
    want, here, device = direct_scores(q, clusters, 1.0), clusters.to(where("triton")), where("triton")
    for tiling in kernel.tilings:
        kernel.forced = tiling
        out = torch.full(want.shape, torch.nan, device=device)
        pages = here.views.centroids, here.views.log_size, here.page_table
        centroid_score(q.to(device), *pages, here.n_clusters, 1.0, out, impl="triton")
        kernel.forced = None
        torch.testing.assert_close(out.double().cpu(), want, rtol=1e-5, atol=1e-4)


# weighted_attn -------------------------------------------------------------------------------------------------------


def estimate(
    q: Tensor, clusters: Clusters, ids: Tensor, lengths: Tensor, scale: float, impl: str
) -> tuple[Tensor, Tensor]:
    device, views = where(impl), clusters.to(where(impl)).views
    o = torch.full((*q.shape[:2], views.value_sums.shape[3]), torch.nan, device=device)
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    pages, ids, lengths = clusters.page_table.to(device), ids.to(device), lengths.to(device)
    weighted_attn(
        q.to(device), views.centroids, views.value_sums, views.log_size, pages, ids, lengths, scale, o, lse, impl=impl
    )
    return o.double().cpu(), lse.double().cpu()


def direct_estimate(q: Tensor, clusters: Clusters, ids: Tensor, lengths: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return Σ exp(q·C·scale - ℓ)·VS and ℓ, head by head."""
    group = q.shape[1] // ids.shape[1]
    o = torch.zeros(*q.shape[:2], clusters.views.value_sums.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for row in range(q.shape[0]):
        for j in range(q.shape[1]):
            centroids, sums, size, exists = clusters.of(row, j // group)
            listed = ids[row, j // group, : int(lengths[row, j // group])].long()
            listed = listed[listed >= 0]
            listed = listed[exists[listed]]
            dots = centroids[listed] @ q[row, j].double() * scale
            lse[row, j] = (dots + size[listed].log()).logsumexp(0)
            if len(listed):
                o[row, j] = (dots - lse[row, j]).exp() @ sums[listed]
    return o, lse


def random_lists(shape: Shape, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return lists of clusters with gaps, and how much of each counts: nothing, some or all."""
    g = torch.Generator().manual_seed(seed)
    rows = len(COUNTS)
    ids = torch.stack([torch.randperm(192, generator=g)[:width] for _ in range(rows * shape.heads)]).int()
    ids[torch.rand(ids.shape, generator=g) < 0.05] = -1
    lengths = torch.randint(0, width + 1, (rows, shape.heads), generator=g, dtype=torch.int32)
    lengths[0], lengths[1], lengths[2] = width, 0, 1
    return ids.view(rows, shape.heads, width), lengths


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", [1, 150])
def test_estimates_are_sums_over_the_listed_clusters(impl: str, shape: Shape, width: int) -> None:
    clusters, q = random_clusters(shape, COUNTS, 5), query(shape, len(COUNTS))
    ids, lengths = random_lists(shape, width, width)
    scale = shape.dims**-0.5
    o, lse = estimate(q, clusters, ids, lengths, scale, impl)
    want_o, want_lse = direct_estimate(q, clusters, ids, lengths, scale)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(o, want_o, rtol=1e-5, atol=1e-5)
    assert bool((lse[1] == -torch.inf).all())
    assert not o[1].any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_queries_in_bf16(impl: str) -> None:
    shape = Shape(2, 4, 64, 64)
    clusters, q = random_clusters(shape, COUNTS, 6), query(shape, len(COUNTS), torch.bfloat16)
    ids, lengths = random_lists(shape, 40, 6)
    o, lse = estimate(q, clusters, ids, lengths, 0.125, impl)
    want_o, want_lse = direct_estimate(q, clusters, ids, lengths, 0.125)
    torch.testing.assert_close(lse, want_lse, **near(torch.bfloat16))
    torch.testing.assert_close(o, want_o, **near(torch.bfloat16))


def test_every_tiling_estimates_the_same() -> None:
    kernel = import_module("gpu_tier.kernels.weighted_attn.triton_impl").kernel
    shape = Shape(1, 20, 64, 16)
    clusters, q = random_clusters(shape, COUNTS, 7), query(shape, len(COUNTS))
    ids, lengths = random_lists(shape, 100, 7)
    want_o, want_lse = direct_estimate(q, clusters, ids, lengths, 0.2)
    for tiling in kernel.tilings:
        kernel.forced = tiling
        o, lse = estimate(q, clusters, ids, lengths, 0.2, "triton")
        kernel.forced = None
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(o, want_o, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=examples(25), deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), seed=st.integers(0, 2**16))
def test_the_estimate_is_exact_when_all_keys_of_a_cluster_are_its_centroid(
    impl: str, sizes: list[int], seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    number = len(sizes)
    views = MetaViews.of(empty_meta_page(1, 32, 16)[None], 1, 32, 16)
    centroids = torch.randn(number, 32, generator=g).bfloat16()
    # Sums of values that bf16 holds exactly: small whole numbers.
    values = torch.randint(-3, 4, (sum(sizes), 16), generator=g).double()
    owner = torch.arange(number).repeat_interleave(torch.tensor(sizes))
    sums = torch.zeros(number, 16, dtype=torch.float64).index_add_(0, owner, values)
    views.centroids[0, 0, :number], views.value_sums[0, 0, :number] = centroids, sums.bfloat16()
    views.log_size[0, 0, :number] = torch.tensor(sizes).float().log()
    q = torch.randn(1, 4, 32, generator=g)
    exact = softmax_partial(group_scores(q.double(), centroids.double()[owner][None, None], 0.3), values[None, None])
    clusters = Clusters(views, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([number], dtype=torch.int32))
    ids = torch.arange(number, dtype=torch.int32).view(1, 1, -1)
    o, lse = estimate(q, clusters, ids, torch.tensor([[number]], dtype=torch.int32), 0.3, impl)
    torch.testing.assert_close(lse, exact.lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(o, exact.o, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_sums_beyond_f16_and_scores_far_apart_stay_finite(impl: str) -> None:
    shape = Shape(1, 4, 16, 16)
    clusters, q = random_clusters(shape, COUNTS, 8), query(shape, len(COUNTS)) * 40
    clusters.views.value_sums.mul_(1e6)
    ids, lengths = random_lists(shape, 90, 8)
    o, lse = estimate(q, clusters, ids, lengths, 1.0, impl)
    want_o, want_lse = direct_estimate(q, clusters, ids, lengths, 1.0)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(o, want_o, rtol=1e-3, atol=1e-3 * float(want_o.abs().max()))


def test_arguments_are_checked() -> None:
    shape = Shape(2, 2, 8, 4)
    clusters, q = random_clusters(shape, [10, 20], 9), query(shape, 2)
    v, table, counts = clusters.views, clusters.page_table, clusters.n_clusters
    out = torch.zeros(2, 4, 192)

    def score(
        views: MetaViews = v, q: Tensor = q, table: Tensor = table, counts: Tensor = counts, out: Tensor = out
    ) -> None:
        centroid_score(q, views.centroids, views.log_size, table, counts, 1.0, out)

    score()
    for field, wrong in {
        "centroids": {"views": replace(v, centroids=v.centroids.float())}, "q": {"q": q[:, :3].contiguous()},
        "log_size": {"views": replace(v, log_size=v.log_size[:, :1])}, "page_table": {"table": table[:1]},
        "n_clusters": {"counts": counts[:1]}, "out": {"out": torch.zeros(2, 4, 193)},
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=field):
            score(**wrong)  # type: ignore[arg-type]

    ids, lengths = torch.zeros(2, 2, 5, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    o, lse = torch.zeros(2, 4, 4), torch.zeros(2, 4)
    for field, sums, listed, to in (
        ("value_sums", v.value_sums.float(), ids, o), ("ids", v.value_sums, ids[:, :1], o),
        ("out_o", v.value_sums, ids, o[..., :2]),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=field):
            weighted_attn(q, v.centroids, sums, v.log_size, table, listed, lengths, 1.0, to, lse)
