"""The two halves of a k-means iteration, and sums by label: each implementation against the definition."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from attention_cases import device_under_test
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels.kmeans_assign import kmeans_assign
from gpu_tier.kernels.kmeans_update import kmeans_update
from gpu_tier.kernels.segment_sum import segment_sum

IMPLEMENTATIONS = ["reference", "triton"]
METRICS = ["ip", "l2"]


def where(impl: str) -> torch.device:
    return device_under_test() if impl != "reference" else torch.device("cpu")


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


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
def test_every_tiling_labels_alike(tiling: int, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = import_module("gpu_tier.kernels.kmeans_assign.triton_impl").kernel
    monkeypatch.setattr(kernel, "forced", kernel.tilings[tiling])
    x, centroids = small_integers(2, 140, 24, seed=8), small_integers(2, 100, 24, seed=9)
    arguments = metric, x, centroids, [140, 77], [100, 65]
    assert torch.equal(assign("triton", *arguments), assign("reference", *arguments))


def test_arguments_of_assign_are_checked() -> None:
    x, centroids, one, labels = torch.zeros(2, 3, 8), torch.zeros(2, 4, 8), ints([1, 1]), ints([0] * 6).view(2, 3)
    with pytest.raises(ConfigError, match="metric"):
        kmeans_assign(x, centroids, one, one, labels, metric="cosine")
    with pytest.raises(ConfigError, match="centroids"):
        kmeans_assign(x, centroids[..., :7], one, one, labels, metric="ip")
    with pytest.raises(ConfigError, match="counts"):
        kmeans_assign(x, centroids, one[:1], one, labels, metric="ip")
    with pytest.raises(ConfigError, match="out_labels"):
        kmeans_assign(x, centroids, one, one, labels[:, :2], metric="ip")


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
def test_a_spherical_centroid_whose_rows_cancel_out_stays(impl: str) -> None:
    x = torch.tensor([[[1.0, 2.0], [-1.0, -2.0], [3.0, 4.0]]])
    centroids = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    moved, sizes = update(impl, x, ints([0, 0, 1])[None], centroids, spherical=True)
    torch.testing.assert_close(moved, torch.tensor([[[0.0, 1.0], [0.6, 0.8]]]))
    assert sizes.tolist() == [[2, 1]]
    moved, _ = update(impl, x, ints([0, 0, 1])[None], centroids, spherical=False)
    torch.testing.assert_close(moved, torch.tensor([[[0.0, 0.0], [3.0, 4.0]]]))


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
def test_every_tiling_adds_up_alike(tiling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = small_integers(2, 140, 40, seed=3), some_labels(75, 2, 140, seed=4)
    start = small_integers(2, 75, 40, seed=5)
    for name in ("segment_sum", "kmeans_update"):
        kernel = import_module(f"gpu_tier.kernels.{name}.triton_impl").kernel
        monkeypatch.setattr(kernel, "forced", kernel.tilings[tiling])
    assert torch.equal(sums("triton", x, labels, 75), sums("reference", x, labels, 75))
    for spherical in (False, True):
        mine, reference = (update(impl, x, labels, start, spherical) for impl in ("triton", "reference"))
        torch.testing.assert_close(mine, reference)


def test_arguments_of_sums_and_updates_are_checked() -> None:
    x, labels, out = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 4, 8)
    sizes = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ConfigError, match="x="):
        segment_sum(x.double(), labels, out)
    with pytest.raises(ConfigError, match="labels"):
        segment_sum(x, labels[:, :2], out)
    with pytest.raises(ConfigError, match="out"):
        segment_sum(x, labels, out[..., :7])
    with pytest.raises(ConfigError, match="labels"):
        kmeans_update(x, labels[:1], out, sizes, spherical=True)
    with pytest.raises(ConfigError, match="centroids"):
        kmeans_update(x, labels, out[:1], sizes, spherical=True)
    with pytest.raises(ConfigError, match="out_sizes"):
        kmeans_update(x, labels, out, sizes[:, :3], spherical=True)
