"""Codes, tables and k-means against their models, and how many iterations fit beside a layer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.algorithms import pq_clustering
from kvcm.gpu_tier.algorithms.pq_clustering import CostModel, Profile, dense_layer_seconds
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind
from kvcm.gpu_tier.index import pq
from kvcm.gpu_tier.index.kmeans import lloyd, spherical_kmeans
from kvcm.gpu_tier.kernels.pq_score import pq_score
from kvcm.gpu_tier.runtime import NullRuntime, runtime_for


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
def test_codes_are_of_the_nearest_centroids(m: int, b: int, heads: int, sub: int, seed: int, scale: float) -> None:
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
def test_tables_and_codes_give_products_with_rebuilt_keys(m: int, b: int, heads: int, group: int, seed: int) -> None:
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


PLANTED = CostModel(alpha1=2e-3, beta1=3e-7, delta=5e-7, alpha2=1e-3, beta2=2e-6, gamma2=4e-10)


SIZES, COUNTS = (1024, 2048, 4096, 8192, 16384), (1, 3, 10, 30)


OF = pq_clustering.fingerprint("some device", 4, {"heads": 8, "dims": 128, "m": 4, "b": 8})


def measured(model: CostModel, noise: float, seed: int = 0) -> Profile:
    random = torch.Generator().manual_seed(seed)

    def noisy(seconds: float) -> float:
        return seconds * math.exp(noise * float(torch.randn((), generator=random)))

    clustering = [(s, t, noisy(model.clustering_seconds(s, t))) for s in SIZES for t in COUNTS]
    layers = [(s, noisy(model.layer_seconds(s))) for s in SIZES for _ in range(4)]
    return pq_clustering.fit(clustering, layers, OF)


def test_planted_coefficients_are_found() -> None:
    found = measured(PLANTED, 0.0)
    for name in PLANTED.__slots__:
        assert getattr(found.model, name) == pytest.approx(getattr(PLANTED, name), rel=1e-6)
    assert found.clustering_r2 == pytest.approx(1)
    assert found.layer_r2 == pytest.approx(1)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_they_are_found_under_noise(seed: int) -> None:
    """With 3 % of noise what matters is right: the cost of an iteration, of a long layer, and hence T."""
    found = measured(PLANTED, 0.03, seed)
    assert found.model.beta1 == pytest.approx(PLANTED.beta1, rel=0.1)
    assert found.model.gamma2 == pytest.approx(PLANTED.gamma2, rel=0.4)
    assert found.model.layer_seconds(16384) == pytest.approx(PLANTED.layer_seconds(16384), rel=0.1)
    wanted = PLANTED.iterations(65536, 1, 10**6)
    assert found.model.iterations(65536, 1, 10**6) == pytest.approx(wanted, rel=0.4)
    assert found.clustering_r2 > 0.98


@settings(max_examples=examples(100), deadline=None)
@given(tokens=st.integers(100, 200_000))
def test_the_most_iterations_that_fit_into_a_layer_are_taken(tokens: int) -> None:
    count = PLANTED.iterations(tokens, 3, 300)
    assert 3 <= count <= 300
    if count > 3:
        assert PLANTED.clustering_seconds(tokens, count) <= PLANTED.layer_seconds(tokens)
    if count < 300:
        assert PLANTED.clustering_seconds(tokens, count + 1) > PLANTED.layer_seconds(tokens)


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ConfigError, match="three different sizes"):
        pq_clustering.fit_layer([(128, 1.0), (128, 1.1), (256, 2.0)])
    with pytest.raises(ConfigError, match="took some time"):
        pq_clustering.fit_layer([(128, 1.0), (256, 0.0), (512, 2.0)])


def test_measuring_asks_for_enough_tokens_and_ends_in_time() -> None:
    clustered, layers = [], []

    def cluster(tokens: int, count: int) -> float:
        clustered.append((tokens, count))
        return PLANTED.clustering_seconds(tokens, count)

    def layer(tokens: int) -> float:
        layers.append(tokens)
        return 1e-3 * tokens

    found = pq_clustering.measure(cluster, layer, OF, fewest=2048)
    assert min(tokens for tokens, _ in clustered) >= 2048
    assert found.model.beta1 == pytest.approx(PLANTED.beta1, rel=1e-4)
    assert max(layers) <= 4096  # a slow layer is not asked for longer and longer prompts
    assert len(set(layers)) >= 4


def test_a_profile_survives_the_disk_and_another_machines_is_refused(tmp_path: Path) -> None:
    path, profile = tmp_path / "profile.json", measured(PLANTED, 0.05)
    pq_clustering.save(path, profile)
    for changed in ({"device": "another"}, {"threads": 8}, {"m": 2}, {"new": 1}):
        with pytest.raises(ConfigError, match=next(iter(changed))):
            pq_clustering.load(path, {**OF, **changed})
    assert pq_clustering.load(path, OF) == profile  # and left as it was
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    assert "processor" in json.loads(path.read_text())["fingerprint"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"beta1"', '"beta"'),
        lambda text: text.replace('"clustering_r2"', '"r2"'),
        lambda text: json.dumps({**json.loads(text), "model": {**json.loads(text)["model"], "beta1": "much"}}),
        lambda text: json.dumps({**json.loads(text), "model": {**json.loads(text)["model"], "beta1": math.nan}}),
        lambda text: json.dumps({**json.loads(text), "fingerprint": 5}),
        lambda text: json.dumps({**json.loads(text), "model": None}),
    ],
    ids=["empty", "cut off", "a list", "no beta1", "no r2", "a word", "nan", "no fingerprint", "no model"],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = tmp_path / "profile.json"
    pq_clustering.save(path, measured(PLANTED, 0.0))
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match="delete it"):
        pq_clustering.obtain(str(path), OF, lambda: measured(PLANTED, 0.0))


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_profile_is_measured_once_and_kept(tmp_path: Path, in_a_file: bool) -> None:
    taken = []

    def take() -> Profile:
        taken.append(1)
        return measured(PLANTED, 0.0)

    path = str(tmp_path / "profile.json") if in_a_file else ""
    of = OF if in_a_file else {**OF, "device": "that of this test"}
    first = pq_clustering.obtain(path, of, take)
    assert pq_clustering.obtain(path, of, take) == first
    assert len(taken) == 1


def test_a_profile_that_cannot_be_written_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a folder in which it can be written"):
        pq_clustering.obtain(str(tmp_path / "missing" / "profile.json"), OF, lambda: pytest.fail("measured in vain"))


@pytest.mark.parametrize("kind", list(KVKind))
def test_a_layer_of_any_geometry_can_be_measured(kind: KVKind) -> None:
    geometry = KVGeometry(kind, 2, 1, 24, 16, KVDtype.F32, page_size=16)
    ticks = iter(range(100))
    seconds = dense_layer_seconds(geometry, 4, NullRuntime(), clock=lambda: float(next(ticks)))
    assert [seconds(32), seconds(64)] == [1.0, 1.0]


Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def few_values(*shape: int, seed: int) -> Tensor:
    """Rows of which many are equal."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


@st.composite
def problem_sets(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int]]:
    """Rows, counts and centroids of up to four ragged problems; entries behind a problem's rows are NaN."""
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
@given(problems=problem_sets(), seed=st.integers(0, 99))
def test_lloyd_comes_nearer_until_it_stays(problems: tuple[Tensor, list[int], list[int]], seed: int) -> None:
    x, counts, n = problems
    before = torch.full((len(x),), torch.inf, dtype=torch.float64)
    for number in range(7):
        inertia = lloyd(x, counts, n, number, seed)[2]
        assert torch.all(inertia <= before * (1 + 1e-5) + 1e-5)
        before = inertia
    # 40 rows and 9 centroids have settled long before.
    settled, more = lloyd(x, counts, n, 200, seed), lloyd(x, counts, n, 201, seed)
    assert all(torch.equal(one, other) for one, other in zip(settled, more, strict=True))


def test_empty_clusters_take_the_farthest_rows() -> None:
    # The cluster of all the equal rows is in the middle of three strays; the other two begin as equal rows as well, and
    # would stay empty for ever if the middle were theirs too.
    x = torch.zeros(1, 1003, 2)
    x[0, -3:] = torch.tensor([[8.0, 0.0], [-4.0, 5.0], [-4.0, -5.0]])
    for seed in range(10):
        centroids, _, inertia = lloyd(x, [1003], [4], 1, seed)
        assert sorted(centroids[0].tolist()) == [[-4, -5], [-4, 5], [0, 0], [8, 0]], seed
        assert inertia.tolist() == [0]


def clustered(kind: str, x: Tensor, counts: list[int], n: list[int], iterations: int, **kw: Any) -> tuple[Tensor, ...]:
    """Return labels, centroids and, of lloyd, inertia."""
    if kind == "spherical":
        return spherical_kmeans(x, counts, n, iterations, **kw)
    centroids, labels, inertia = lloyd(x, counts, n, iterations, seed=5, **kw)
    return labels, centroids, inertia


# Both ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["spherical", "lloyd"])
def test_implementations_agree(kind: str) -> None:
    device = runtime_for("cuda").device if torch.cuda.is_available() else NullRuntime().device
    # Well separated, so that a last bit decides nothing.
    x = 20 * few_values(3, 60, 16, seed=4) + numbers(3, 60, 16, seed=5)
    arguments = [60, 33, 0], [8, 4, 0], 3
    mine = clustered(kind, x.to(device), *arguments, kernels="triton")
    for one, other in zip(mine, clustered(kind, x, *arguments, kernels="reference"), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-3)


def test_without_problems_there_is_nothing_to_do() -> None:
    assert spherical_kmeans(torch.zeros(0, 5, 4), [], [], 3)[0].shape == (0, 5)
    assert lloyd(torch.zeros(0, 5, 4), [], [], 3, 0)[2].shape == (0,)


@pytest.mark.parametrize("kind", ["spherical", "lloyd"])
@pytest.mark.parametrize(("counts", "n"), [([5], [2, 2]), ([5, 6], [2, 2]), ([5, 1], [2, 2]), ([5, -1], [2, -1])])
def test_counts_are_checked(counts: list[int], n: list[int], kind: str) -> None:
    with pytest.raises(ConfigError, match="counts"):
        clustered(kind, torch.zeros(2, 5, 3), counts, n, 1)


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


@pytest.mark.parametrize("kind", ["spherical", "lloyd"])
@settings(max_examples=examples(120), deadline=None)
@given(problems=problem_sets(), data=st.data(), iterations=st.integers(0, 4))
def test_problems_do_not_depend_on_each_other(
    kind: str, problems: tuple[Tensor, list[int], list[int]], data: st.DataObject, iterations: int
) -> None:
    x, counts, n = problems
    found = clustered(kind, x, counts, n, iterations)
    order = data.draw(st.permutations(range(len(x))))
    padded = torch.nn.functional.pad(x[order], (0, 0, 0, data.draw(st.integers(0, 9))), value=torch.nan)
    shuffled = clustered(kind, padded, [counts[i] for i in order], [n[i] for i in order], iterations)
    for place, i in enumerate(order):
        assert torch.all(found[0][i, counts[i] :] == -1)
        assert torch.all(found[1][i, n[i] :] == 0)
        alone = clustered(kind, x[i : i + 1, : counts[i]], [counts[i]], [n[i]], iterations)
        for mine, own in zip(found[:2], alone[:2], strict=True):
            assert torch.equal(mine[i][: len(own[0])], own[0])
        assert torch.equal(shuffled[0][place, : counts[i]], found[0][i, : counts[i]])
        assert torch.equal(shuffled[1][place], found[1][i])
        for mine, own in zip(found[2:], alone[2:], strict=True):
            assert mine[i] == pytest.approx(float(own[0]), rel=1e-6)
