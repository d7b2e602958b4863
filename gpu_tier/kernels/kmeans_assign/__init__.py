"""The nearest centroid of each row, in many clustering problems at once: the first half of a k-means iteration."""

from __future__ import annotations

from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous, check_last_contiguous

__all__ = ["METRICS", "kmeans_assign"]

METRICS = ("ip", "l2")
"""What nearest means: the largest inner product, or the smallest Euclidean distance."""


def kmeans_assign(
    x: Tensor,
    centroids: Tensor,
    counts: Tensor,
    n_centroids: Tensor,
    out_labels: Tensor,
    *,
    metric: str,
    impl: str = "auto",
) -> None:
    """Label rows with the nearest centroid; of equally near ones with the lowest.

    A problem's labels depend on its own rows and centroids alone, not on rows behind `counts` and `n_centroids` nor
    on the other problems.

    Args:
        x: ``f32 [S, T, d]`` rows of S problems.
        centroids: ``f32 [S, C, d]``.
        counts: ``int32 [S]`` rows of each problem that count.
        n_centroids: ``int32 [S]`` centroids of each problem.
        out_labels: ``int32 [S, T]`` becomes the label of each row; -1 behind `counts` and in a problem without
            centroids.
        metric: ip, argmax of ``x·c``; or l2, argmin of ``‖x - c‖²``, computed as the argmax of ``x·c - ‖c‖²/2``.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: unknown metric, or the shapes do not fit.
    """
    problems, tokens, dims = x.shape
    if metric not in METRICS:
        raise ConfigError.choice("metric", metric, METRICS)
    if centroids.ndim != 3 or centroids.shape[::2] != (problems, dims):
        raise ConfigError("centroids", tuple(centroids.shape), f"must be [{problems}, C, {dims}]")
    if counts.shape != (problems,) or n_centroids.shape != (problems,):
        shapes = tuple(counts.shape), tuple(n_centroids.shape)
        raise ConfigError("counts, n_centroids", shapes, f"must be [{problems}] each")
    if out_labels.shape != (problems, tokens):
        raise ConfigError("out_labels", tuple(out_labels.shape), f"must be {(problems, tokens)}")
    check_contiguous(counts=counts, n_centroids=n_centroids, out_labels=out_labels)
    check_last_contiguous(x=x, centroids=centroids)
    registry.get("kmeans_assign", x.device, impl)(x, centroids, counts, n_centroids, out_labels, metric=metric)
