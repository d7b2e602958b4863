"""New centroids from the labels of the rows, in many clustering problems at once: the second half of an iteration."""

from __future__ import annotations

from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous, check_last_contiguous

__all__ = ["kmeans_update"]


def kmeans_update(
    x: Tensor, labels: Tensor, centroids: Tensor, out_sizes: Tensor, *, spherical: bool, impl: str = "auto"
) -> None:
    """Move centroids to the mean of their rows.

    A centroid without rows stays where it is; so does a spherical one whose rows cancel out. Rows are added in f32, in
    an order that depends on nothing but the problem's own rows.

    Args:
        x: ``f32 [S, T, d]`` rows of S problems.
        labels: ``int32 [S, T]`` of each row: below C, -1 for none; rows without one are not read for a mean.
        centroids: ``f32 [S, C, d]``, changed in place.
        out_sizes: ``int32 [S, C]`` becomes the rows of each centroid.
        spherical: whether centroids are scaled to length 1.
        impl: implementation, see `registry.get`.

    Raises:
        ConfigError: the shapes do not fit.
    """
    problems, tokens, dims = x.shape
    if labels.shape != (problems, tokens):
        raise ConfigError("labels", tuple(labels.shape), f"must be {(problems, tokens)}")
    if centroids.ndim != 3 or centroids.shape[::2] != (problems, dims):
        raise ConfigError("centroids", tuple(centroids.shape), f"must be [{problems}, C, {dims}]")
    if out_sizes.shape != centroids.shape[:2]:
        raise ConfigError("out_sizes", tuple(out_sizes.shape), f"must be {tuple(centroids.shape[:2])}")
    check_contiguous(labels=labels, centroids=centroids, out_sizes=out_sizes)
    check_last_contiguous(x=x)
    registry.get("kmeans_update", x.device, impl)(x, labels, centroids, out_sizes, spherical=spherical)
