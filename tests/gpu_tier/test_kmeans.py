"""k-means of many problems at once: what it computes, and that no problem hears of the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.index.kmeans import lloyd, spherical_kmeans
from gpu_tier.runtime import NullRuntime, runtime_for

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def few_values(*shape: int, seed: int) -> Tensor:
    """Rows of which many are equal."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


@st.composite
def problem_sets(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int]]:
    """Rows, counts and centroids of up to four ragged problems; what is behind a problem's rows is NaN."""
    problems, dims = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    counts = [draw(st.integers(0, 40)) for _ in range(problems)]
    n = [draw(st.integers(min(1, count), min(count, 9))) for count in counts]
    make = draw(st.sampled_from([numbers, few_values]))
    x = make(problems, max(counts) + draw(st.integers(0, 3)), dims, seed=draw(st.integers(0, 999)))
    for rows, count in zip(x, counts, strict=True):
        rows[count:] = torch.nan
    return x, counts, n


# Models of one problem, without batches or padding -------------------------------------------------------------------


def spherical_model(x: Array, n: int, iterations: int) -> tuple[list[int], Array]:
    centroids = np.array([x[i * len(x) // n] for i in range(n)])
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    labels: list[int] = []
    for _ in range(iterations):
        labels = [int(np.argmax([row @ c for c in centroids])) for row in x]
        for cluster in range(n):
            members = [row for row, label in zip(x, labels, strict=True) if label == cluster]
            if members:
                mean = np.mean(members, axis=0)
                centroids[cluster] = mean / np.linalg.norm(mean)
    return labels, centroids


def nearest(x: Array, centroids: Array) -> list[int]:
    return [int(np.argmin([((row - c) ** 2).sum() for c in centroids])) for row in x]


def lloyd_model(x: Array, start: Array, iterations: int) -> tuple[list[int], Array]:
    centroids, labels = start.copy(), nearest(x, start)
    for _ in range(iterations):
        sizes = np.bincount(labels, minlength=len(centroids))
        for cluster in np.nonzero(sizes)[0]:
            centroids[cluster] = x[np.array(labels) == cluster].mean(0)
        distances = ((x - centroids[labels]) ** 2).sum(1)
        farthest = np.argsort(-distances, kind="stable")
        for rank, cluster in enumerate(np.nonzero(sizes == 0)[0]):
            centroids[cluster] = x[farthest[rank]]
        labels = nearest(x, centroids)
    return labels, centroids


# spherical_kmeans ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(120), deadline=None)
@given(seed=st.integers(0, 9999), tokens=st.integers(1, 40), n=st.integers(1, 9), iterations=st.integers(1, 5))
def test_spherical_is_the_model(seed: int, tokens: int, n: int, iterations: int) -> None:
    n = min(n, tokens)
    x = numbers(1, tokens, 5, seed=seed)
    labels, centroids = spherical_kmeans(x, [tokens], [n], iterations)
    want_labels, want_centroids = spherical_model(x[0].double().numpy(), n, iterations)
    assert labels[0].tolist() == want_labels
    torch.testing.assert_close(centroids[0].double(), torch.from_numpy(want_centroids), rtol=1e-4, atol=1e-4)


@settings(max_examples=examples(120), deadline=None)
@given(problems=problem_sets(), data=st.data(), iterations=st.integers(0, 4))
def test_spherical_problems_do_not_hear_of_each_other(
    problems: tuple[Tensor, list[int], list[int]], data: st.DataObject, iterations: int
) -> None:
    x, counts, n = problems
    labels, centroids = spherical_kmeans(x, counts, n, iterations)
    order = data.draw(st.permutations(range(len(x))))
    padded = torch.nn.functional.pad(x[order], (0, 0, 0, data.draw(st.integers(0, 9))), value=torch.nan)
    shuffled = spherical_kmeans(padded, [counts[i] for i in order], [n[i] for i in order], iterations)
    for place, i in enumerate(order):
        alone = spherical_kmeans(x[i : i + 1, : counts[i]], [counts[i]], [n[i]], iterations)
        for mine, own in zip((labels[i], centroids[i]), (alone[0][0], alone[1][0]), strict=True):
            assert torch.equal(mine[: len(own)], own)
        assert torch.equal(shuffled[0][place, : counts[i]], labels[i, : counts[i]])
        assert torch.equal(shuffled[1][place], centroids[i])


@settings(max_examples=examples(120), deadline=None)
@given(problems=problem_sets(), iterations=st.integers(0, 4))
def test_spherical_counts_are_honoured(problems: tuple[Tensor, list[int], list[int]], iterations: int) -> None:
    x, counts, n = problems
    labels, centroids = spherical_kmeans(x, counts, n, iterations)
    assert labels.shape == x.shape[:2]
    assert centroids.shape == (len(x), max(1, *n), x.shape[2])
    for problem, (count, some) in enumerate(zip(counts, n, strict=True)):
        assert torch.all((labels[problem, :count] >= 0) & (labels[problem, :count] < some))
        assert torch.all(labels[problem, count:] == -1)
        length = centroids[problem].norm(dim=-1)
        # Rows of length 0 have no direction: a centroid that began as one stays 0 while it has no others.
        assert torch.all(((length[:some] - 1).abs() < 1e-5) | (length[:some] == 0))
        assert torch.all(centroids[problem, some:] == 0)


def test_equal_rows_share_the_lowest_cluster_and_the_others_stay() -> None:
    labels, centroids = spherical_kmeans(torch.ones(1, 12, 4), [12], [3], 10)
    assert torch.all(labels == 0)
    torch.testing.assert_close(centroids, torch.full((1, 3, 4), 0.5))


# lloyd ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(240), deadline=None)
@given(data=st.data(), tokens=st.integers(1, 40), n=st.integers(1, 9), iterations=st.integers(0, 5))
def test_lloyd_is_the_model(data: st.DataObject, tokens: int, n: int, iterations: int) -> None:
    n, seed, distinct = min(n, tokens), data.draw(st.integers(0, 9999)), data.draw(st.integers(1, 40))
    # Few distinct rows make equal centroids to begin with, so that all but one have no rows; with so few bits the mean
    # of equal rows is that row, in the model too.
    pool = (64 * numbers(distinct, 3, seed=seed)).round() / 64
    x = pool[torch.randint(distinct, (1, tokens), generator=torch.Generator().manual_seed(seed))]
    start = lloyd(x, [tokens], [n], 0, seed)[0][0]
    centroids, labels, inertia = lloyd(x, [tokens], [n], iterations, seed)
    rows = x[0].double().numpy()
    want_labels, want_centroids = lloyd_model(rows, start.double().numpy(), iterations)
    assert labels[0].tolist() == want_labels
    torch.testing.assert_close(centroids[0].double(), torch.from_numpy(want_centroids), rtol=1e-4, atol=1e-4)
    assert float(inertia[0]) == pytest.approx(((rows - want_centroids[want_labels]) ** 2).sum(), rel=1e-3, abs=1e-4)


@settings(max_examples=examples(120), deadline=None)
@given(problems=problem_sets(), data=st.data(), iterations=st.integers(0, 4))
def test_lloyd_problems_do_not_hear_of_each_other(
    problems: tuple[Tensor, list[int], list[int]], data: st.DataObject, iterations: int
) -> None:
    x, counts, n = problems
    centroids, labels, inertia = lloyd(x, counts, n, iterations, seed=5)
    order = data.draw(st.permutations(range(len(x))))
    padded = torch.nn.functional.pad(x[order], (0, 0, 0, data.draw(st.integers(0, 9))), value=torch.nan)
    shuffled = lloyd(padded, [counts[i] for i in order], [n[i] for i in order], iterations, seed=5)
    for place, i in enumerate(order):
        alone = lloyd(x[i : i + 1, : counts[i]], [counts[i]], [n[i]], iterations, seed=5)
        for mine, own in zip((centroids[i], labels[i]), (alone[0][0], alone[1][0]), strict=True):
            assert torch.equal(mine[: len(own)], own)
        assert inertia[i] == pytest.approx(float(alone[2][0]), rel=1e-6)
        assert torch.equal(shuffled[0][place], centroids[i])
        assert torch.equal(shuffled[1][place, : counts[i]], labels[i, : counts[i]])


@settings(max_examples=examples(120), deadline=None)
@given(problems=problem_sets(), seed=st.integers(0, 99))
def test_lloyd_comes_nearer_until_it_stays(problems: tuple[Tensor, list[int], list[int]], seed: int) -> None:
    x, counts, n = problems
    before = torch.full((len(x),), torch.inf, dtype=torch.float64)
    for iterations in range(7):
        centroids, labels, inertia = lloyd(x, counts, n, iterations, seed)
        assert torch.all(inertia <= before * (1 + 1e-5) + 1e-5)
        before = inertia
        for problem, (count, some) in enumerate(zip(counts, n, strict=True)):
            assert torch.all((labels[problem, :count] >= 0) & (labels[problem, :count] < some))
            assert torch.all(labels[problem, count:] == -1)
            assert torch.all(centroids[problem, some:] == 0)
    # 40 rows and 9 centroids have settled long before.
    settled, more = lloyd(x, counts, n, 200, seed), lloyd(x, counts, n, 201, seed)
    assert all(torch.equal(one, other) for one, other in zip(settled, more, strict=True))


def test_empty_clusters_take_the_farthest_rows() -> None:
    # Whoever has all the equal rows is in the middle of three strays; the other two clusters begin as equal rows as
    # well, and would have nothing for ever if the middle were theirs too.
    x = torch.zeros(1, 1003, 2)
    x[0, -3:] = torch.tensor([[8.0, 0.0], [-4.0, 5.0], [-4.0, -5.0]])
    for seed in range(10):
        centroids, _, inertia = lloyd(x, [1003], [4], 1, seed)
        assert sorted(centroids[0].tolist()) == [[-4, -5], [-4, 5], [0, 0], [8, 0]], seed
        assert inertia.tolist() == [0]


# Both ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["triton"])
def test_implementations_agree(kernels: str) -> None:
    device = runtime_for("cuda").device if torch.cuda.is_available() else NullRuntime().device
    # Well separated, so that a last bit decides nothing.
    x = 20 * few_values(3, 60, 16, seed=4) + numbers(3, 60, 16, seed=5)
    counts, n = [60, 33, 0], [8, 4, 0]
    for clustering in (
        lambda x, kernels: spherical_kmeans(x, counts, n, 3, kernels=kernels),
        lambda x, kernels: lloyd(x, counts, n, 3, 0, kernels=kernels),
    ):
        mine, reference = clustering(x.to(device), kernels), clustering(x, "reference")
        for one, other in zip(mine, reference, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-3)


def test_without_problems_there_is_nothing_to_do() -> None:
    assert spherical_kmeans(torch.zeros(0, 5, 4), [], [], 3)[0].shape == (0, 5)
    assert lloyd(torch.zeros(0, 5, 4), [], [], 3, 0)[2].shape == (0,)


@pytest.mark.parametrize(
    ("counts", "n", "field"),
    [([5], [2, 2], "counts"), ([5, 6], [2, 2], "counts"), ([5, 1], [2, 2], "counts"), ([5, -1], [2, -1], "counts")],
)
def test_counts_are_checked(counts: list[int], n: list[int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        spherical_kmeans(torch.zeros(2, 5, 3), counts, n, 1)
    with pytest.raises(ConfigError, match=field):
        lloyd(torch.zeros(2, 5, 3), counts, n, 1, 0)


def test_rows_and_iterations_are_checked() -> None:
    with pytest.raises(ConfigError, match="x="):
        spherical_kmeans(torch.zeros(2, 5, 3, dtype=torch.bfloat16), [5, 5], [1, 1], 1)
    with pytest.raises(ConfigError, match="iterations"):
        lloyd(torch.zeros(2, 5, 3), [5, 5], [1, 1], -1, 0)


@pytest.mark.parametrize(("count", "n"), [(5, 5), (7, 5), (64, 16), (100, 7), (1, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_lloyd_begins_with_a_row_of_each_stretch(count: int, n: int, seed: int) -> None:
    """Without iterations centroids are the rows that it begins with; rows here are their own numbers."""
    x = torch.arange(count, dtype=torch.float32)[None, :, None]
    begin = lloyd(x, [count], [n], 0, seed)[0].flatten().tolist()
    for stretch, row in enumerate(begin):
        assert stretch * count // n <= row < (stretch + 1) * count // n
    assert count == n or n == 1 or any(begin != lloyd(x, [count], [n], 0, s)[0].flatten().tolist() for s in range(5))
