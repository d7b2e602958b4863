"""k-means of many problems at once: spherical for the wave index (RetroInfer), Euclidean for PQ (PQCache).

1. A problem is a list of rows and a number of centroids; those of a call may differ in both. They are padded, and what
   is in the padding is never read for a result.
2. A problem's result depends on its own rows, counts and seed alone: not on the batch that it is part of, nor on the
   padding. On a CPU not a bit of it does.
3. Nothing here waits for a GPU. What only saves work by looking at results (an early end, skipping a re-seeding that no
   centroid needs) is done where looking is free, on a CPU, and changes no result: an iteration is a function of the
   labels, so that labels that did not change stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels.kmeans_assign import kmeans_assign
from kvcm.gpu_tier.kernels.kmeans_update import kmeans_update
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.runtime import upload

__all__ = ["lloyd", "spherical_kmeans"]

_COPIED = 1 << 26  # numbers: 256 MiB


def spherical_kmeans(
    x: Tensor, counts: Sequence[int], n_centroids: Sequence[int], iterations: int, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Cluster rows by direction: centroids have length 1, and a row belongs to the one of its largest inner product.

    Centroids begin as rows at uniform spacing. Each iteration labels the rows, ties to the lower centroid, and moves
    centroids to the normalised mean of their rows; one without rows stays.

    Args:
        x: ``f32 [S, T, d]`` rows of S problems, centred by the caller if at all.
        counts: rows of each problem.
        n_centroids: centroids of each problem, at most its rows.
        iterations: of labelling and moving; with 0 rows are labelled and no centroid moves.
        kernels: implementation of the kernels, see `registry.get`.

    Returns:
        labels ``int32 [S, T]`` of the last labelling, -1 behind `counts`; centroids ``f32 [S, C, d]`` after the last
        move, C the most of `n_centroids` but at least 1, and 0 behind those of a problem.

    Raises:
        ConfigError: counts do not fit.
    """
    problems = _Problems.of(x, counts, n_centroids, iterations)
    centroids = problems.start_from(_uniformly_spaced)
    centroids = torch.nn.functional.normalize(centroids, dim=-1)
    labels, sizes = problems.labels(), problems.sizes()
    for _ in range(max(1, iterations)):
        kmeans_assign(x, centroids, problems.counts, problems.n_centroids, labels, metric="ip", impl=kernels)
        if iterations:
            kmeans_update(x, labels, centroids, sizes, spherical=True, impl=kernels)
    return labels, centroids


def lloyd(
    x: Tensor,
    counts: Sequence[int],
    n_centroids: Sequence[int],
    iterations: int,
    seed: int,
    *,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Cluster rows by distance: the k-means of Lloyd.

    Centroids begin as random rows, one of each of as many equal stretches; problems of equal counts take the same ones.
    Rows that follow each other are alike in a text, and what fills a stretch is not missed: with rows drawn from all of
    them, the draw decided more than the iterations did. Each iteration moves centroids to the mean of their rows, those
    without rows to the rows farthest from their centroids (ties to the lower row), and labels the rows again, ties to
    the lower centroid. So there is one labelling more than iterations, and each row has the label of the returned
    centroid that is nearest.

    Args:
        x: ``f32 [S, T, d]`` rows of S problems.
        counts: rows of each problem.
        n_centroids: centroids of each problem, at most its rows.
        iterations: most of them; fewer when no label of any problem changes and that can be seen without waiting.
        seed: of the rows to begin with.
        kernels: implementation of the kernels, see `registry.get`.

    Returns:
        centroids ``f32 [S, C, d]``, C the most of `n_centroids` but at least 1, and 0 behind those of a problem; labels
        ``int32 [S, T]``, -1 behind `counts`; inertia ``f64 [S]``, the sum of squared distances.

    Raises:
        ConfigError: counts do not fit.
    """
    problems = _Problems.of(x, counts, n_centroids, iterations)
    centroids = problems.start_from(lambda count, n: _one_of_each_stretch(count, n, seed))
    labels, sizes = problems.labels(), problems.sizes()
    kmeans_assign(x, centroids, problems.counts, problems.n_centroids, labels, metric="l2", impl=kernels)
    for _ in range(iterations):
        kmeans_update(x, labels, centroids, sizes, spherical=False, impl=kernels)
        problems.reseed(labels, centroids, sizes, kernels)
        before = labels.clone()
        kmeans_assign(x, centroids, problems.counts, problems.n_centroids, labels, metric="l2", impl=kernels)
        if not x.is_cuda and torch.equal(labels, before):
            break
    return centroids, labels, problems.inertia(labels, centroids)


@dataclass(frozen=True, slots=True)
class _Problems:
    """The rows of a call and how many of them count, on the host and on the device.

    Attributes:
        x: ``f32 [S, T, d]``.
        sizes_of: rows and centroids of each problem.
        counts: ``int32 [S]`` rows.
        n_centroids: ``int32 [S]``.
        most: centroids C that the tables hold, at least one.
    """

    x: Tensor
    sizes_of: tuple[tuple[int, int], ...]
    counts: Tensor
    n_centroids: Tensor
    most: int

    @classmethod
    def of(cls, x: Tensor, counts: Sequence[int], n_centroids: Sequence[int], iterations: int) -> _Problems:
        """Return the problems of a call; raises ConfigError where its arguments do not fit."""
        if x.ndim != 3 or x.dtype is not torch.float32:
            raise ConfigError("x", (x.dtype, *x.shape), "must be f32 [S, T, d]")
        if not len(counts) == len(n_centroids) == len(x):
            raise ConfigError("counts, n_centroids", (len(counts), len(n_centroids)), f"must have {len(x)} entries")
        if any(not 0 <= n <= count <= x.shape[1] for count, n in zip(counts, n_centroids, strict=True)):
            allowed = f"must be 0 <= n_centroids <= counts <= {x.shape[1]}"
            raise ConfigError("counts, n_centroids", (list(counts), list(n_centroids)), allowed)
        if iterations < 0:
            raise ConfigError("iterations", iterations, "must be at least 0")
        pair = upload(torch.tensor([list(counts), list(n_centroids)], dtype=torch.int32), x.device)
        sizes_of = tuple((int(count), int(n)) for count, n in zip(counts, n_centroids, strict=True))
        return cls(x, sizes_of, pair[0], pair[1], max((n for _, n in sizes_of if n), default=1))

    def labels(self) -> Tensor:
        """Allocate labels."""
        return torch.empty(self.x.shape[:2], dtype=torch.int32, device=self.x.device)

    def sizes(self) -> Tensor:
        """Allocate the sizes of clusters."""
        return torch.empty(len(self.x), self.most, dtype=torch.int32, device=self.x.device)

    def start_from(self, choose: Callable[[int, int], Tensor]) -> Tensor:
        """Return centroids that are rows: `choose` says which, of so many rows for so many centroids."""
        if not self.x.shape[1]:
            return self.x.new_zeros(len(self.x), self.most, self.x.shape[2])
        chosen = torch.full((len(self.x), self.most), -1)
        picks = {sizes: choose(*sizes) for sizes in set(self.sizes_of)}
        for problem, sizes in enumerate(self.sizes_of):
            chosen[problem, : sizes[1]] = picks[sizes]
        chosen = upload(chosen, self.x.device)
        return _gather_rows(self.x, chosen.clamp_min(0)).masked_fill_((chosen < 0)[..., None], 0)

    def reseed(self, labels: Tensor, centroids: Tensor, sizes: Tensor, kernels: str) -> None:
        """Move centroids without rows to the rows farthest from their centroids."""
        unused = (sizes == 0) & (torch.arange(self.most, device=sizes.device) < self.n_centroids[:, None])
        for piece in self.pieces():
            if self.x.shape[1] and (self.x.is_cuda or unused[piece].any()):
                _reseed(self.x[piece], labels[piece], centroids[piece], unused[piece], kernels)

    def inertia(self, labels: Tensor, centroids: Tensor) -> Tensor:
        """Return the sum of squared distances, ``f64 [S]``."""
        total = torch.zeros(len(self.x), dtype=torch.float64, device=self.x.device)
        for piece in self.pieces():
            apart = _distances(self.x[piece], labels[piece], centroids[piece])
            torch.sum(apart.clamp_min_(0), 1, dtype=torch.float64, out=total[piece])
        return total

    def pieces(self) -> Iterator[slice]:
        """Yield problems that are as many as may have a copy of their rows made."""
        step = max(1, _COPIED // max(1, self.x[:1].numel()))
        return (slice(first, first + step) for first in range(0, len(self.x), step))


def _reseed(x: Tensor, labels: Tensor, centroids: Tensor, unused: Tensor, kernels: str) -> None:
    """Move the centroids of some problems that are unused: the first to the farthest row, and so on."""
    problems, tokens = labels.shape
    k = min(unused.shape[1], tokens)  # as many as may be asked for: how many are, a GPU has not said yet
    apart = _distances(x, labels, centroids)
    far = torch.empty(problems, 1, k, dtype=torch.int32, device=x.device)
    lengths = torch.full((problems,), tokens, dtype=torch.int32, device=x.device)
    topk_select(apart[:, None], lengths, k, far, torch.empty_like(far[..., 0]), impl=kernels)
    far = far[:, 0].long()
    farthest = far.gather(1, apart.gather(1, far).sort(dim=1, descending=True, stable=True).indices)
    rows = farthest.gather(1, (unused.cumsum(1) - 1).clamp_(0, k - 1))
    centroids.copy_(torch.where(unused[..., None], _gather_rows(x, rows), centroids))


def _distances(x: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """Return the squared distance ``[S, T]`` of each row to its centroid; -1 for rows without one."""
    apart = _gather_rows(centroids, labels.clamp_min(0).long()).sub_(x).square_().sum(-1)
    return apart.masked_fill_(labels < 0, -1)


def _gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return ``[S, C, d]`` rows of each problem."""
    return x.gather(1, rows[..., None].expand(*rows.shape, x.shape[2]))


def _uniformly_spaced(count: int, n: int) -> Tensor:
    """Return n of `count` rows at uniform spacing; none if there are none."""
    return torch.arange(n) * count // max(1, n)


def _one_of_each_stretch(count: int, n: int, seed: int) -> Tensor:
    """Return n of `count` rows, a random one of each of n stretches; at least n rows make none of them empty."""
    borders = torch.arange(n + 1) * count // max(1, n)
    shares = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return borders[:-1] + (shares * borders.diff()).long()
