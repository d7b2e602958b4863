"""Checks of the k-means kernels, as `kernel_checks` lists them: segments of keys, and sub-vectors of PQ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from check_case import Check, Outputs, Sizes, ragged
from torch import Tensor

from kvcm.gpu_tier.kernels.kmeans_assign import METRICS, kmeans_assign
from kvcm.gpu_tier.kernels.kmeans_update import kmeans_update
from kvcm.gpu_tier.kernels.segment_sum import segment_sum
from kvcm.gpu_tier.runtime import DeviceRuntime

__all__ = ["clustering"]

_TOKENS_PER_CENTROID = 16


def clustering(runtime: DeviceRuntime, sizes: Sizes) -> list[Check]:
    """Return the checks."""
    rows = sizes.tokens // 2
    clusters = rows // _TOKENS_PER_CENTROID
    found = []
    for metric, dims in zip(METRICS, (sizes.dims, sizes.dims // 4), strict=True):
        name = f"{metric}, {clusters} centroids of {dims} dims"
        shape = sizes.batch, rows, clusters, dims
        found.append(Check("kmeans_assign", f"{name}, with ties", _labels(runtime, sizes, shape, metric)))
        found.append(Check("kmeans_assign", name, _nearness(runtime, sizes, shape, metric), 1e-5))
        found.append(Check("kmeans_update", name, _update(runtime, shape, metric == "ip"), 1e-5))
    shape = sizes.batch, rows, clusters, sizes.dims
    dtypes = (torch.float32, torch.bfloat16)
    return found + [Check("segment_sum", str(dtype), _sums(runtime, shape, dtype), 1e-5) for dtype in dtypes]


Shape = tuple[int, int, int, int]
"""Problems, rows, centroids, dims."""


def _assign(runtime: DeviceRuntime, sizes: Sizes, x: Tensor, centroids: Tensor, metric: str, impl: str) -> Tensor:
    """Return the labels of ragged problems."""
    labels = torch.full(x.shape[:2], -7, dtype=torch.int32, device=runtime.device)
    counts, n = ragged(sizes, x.shape[1]), ragged(sizes, centroids.shape[1]).clamp_min(1)
    inputs = [tensor.to(runtime.device) for tensor in (x, centroids, counts, n)]
    kmeans_assign(*inputs, labels, metric=metric, impl=impl)
    return labels.cpu()


def _labels(runtime: DeviceRuntime, sizes: Sizes, shape: Shape, metric: str) -> Callable[[str], Outputs]:
    """Small integers: products are exact, so that equally near centroids are, and labels must be equal."""
    problems, rows, clusters, dims = shape
    x, centroids = (torch.randint(-2, 3, (problems, some, dims)).float() for some in (rows, clusters))
    return lambda impl: (_assign(runtime, sizes, x, centroids, metric, impl),)


def _nearness(runtime: DeviceRuntime, sizes: Sizes, shape: Shape, metric: str) -> Callable[[str], Outputs]:
    """Real numbers: nearly equally near centroids may be exchanged, so it is compared how near they are."""
    problems, rows, clusters, dims = shape
    x, centroids = (torch.randn(problems, some, dims) for some in (rows, clusters))

    def run(impl: str) -> Outputs:
        labels = _assign(runtime, sizes, x, centroids, metric, impl)
        place = labels.clamp_min(0).long()[..., None].expand(-1, -1, dims)
        near = (x * centroids.gather(1, place)).sum(-1)
        if metric == "l2":
            near -= centroids.gather(1, place).square().sum(-1) / 2
        return near.masked_fill(labels < 0, 0), (labels < 0).int()

    return run


def _random_labels(shape: Shape) -> Tensor:
    """Labels with some rows that have none, and some clusters without rows."""
    labels = torch.randint(-1, shape[2], shape[:2], dtype=torch.int32)
    return torch.where(labels % 7 == 3, -1, labels)


def _update(runtime: DeviceRuntime, shape: Shape, spherical: bool) -> Callable[[str], Outputs]:
    problems, rows, clusters, dims = shape
    x, labels = torch.randn(problems, rows, dims).to(runtime.device), _random_labels(shape).to(runtime.device)
    start = torch.randn(problems, clusters, dims).to(runtime.device)

    def run(impl: str) -> Outputs:
        centroids, found = start.clone(), torch.full(start.shape[:2], -7, dtype=torch.int32, device=runtime.device)
        kmeans_update(x, labels, centroids, found, spherical=spherical, impl=impl)
        return centroids.cpu(), found.cpu()

    return run


def _sums(runtime: DeviceRuntime, shape: Shape, dtype: torch.dtype) -> Callable[[str], Outputs]:
    problems, rows, clusters, dims = shape
    # Values lie token by token, the heads of a token together.
    x = torch.randn(rows, problems, dims).to(dtype).to(runtime.device).transpose(0, 1)
    labels = _random_labels(shape).to(runtime.device)

    def run(impl: str) -> Outputs:
        out = torch.full((problems, clusters, dims), torch.nan, device=runtime.device)
        segment_sum(x, labels, out, impl=impl)
        return (out.cpu(),)

    return run
