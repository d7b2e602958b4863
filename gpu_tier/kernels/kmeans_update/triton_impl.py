"""New centroids in Triton: the sums of `segment_sum`, divided and scaled before they are written."""

from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from kvcm.gpu_tier.kernels.segment_sum.triton_impl import TILINGS, add_rows, fits
from kvcm.gpu_tier.kernels.tuning import Tiling, is_capturing, next_power_of_2, tunable

__all__ = ["kernel", "run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")


def _update(
    x: "Any",
    labels: "Any",
    centroids: "Any",
    sizes: "Any",
    x_problem: "Any",
    x_row: "Any",
    tokens: "Any",
    clusters: "Any",
    SPHERICAL: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    blocks = tl.cdiv(clusters, BLOCK_C)
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    cluster = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mean, size = add_rows(
        x + problem * x_problem,
        labels + problem * tokens,
        x_row,
        tokens,
        cluster,
        DIMS,
        PADDED,
        SPLIT,
        BLOCK_T,
        BLOCK_C,
    )
    mean = mean / tl.maximum(size, 1).to(tl.float32)[:, None]
    moves = (size > 0) & (cluster < clusters)
    if SPHERICAL:
        norm = tl.sqrt(tl.sum(mean * mean, axis=1))
        moves = moves & (norm > 0.0)
        mean = mean / tl.where(norm > 0.0, norm, 1.0)[:, None]
    dim = tl.arange(0, PADDED)
    at = problem * clusters + cluster
    tl.store(centroids + at[:, None] * DIMS + dim[None, :], mean, mask=moves[:, None] & (dim < DIMS)[None, :])
    tl.store(sizes + at, size, mask=cluster < clusters)


kernel = tunable(TILINGS, varying=("tokens", "clusters"))(_update)


def run(x: Tensor, labels: Tensor, centroids: Tensor, out_sizes: Tensor, *, spherical: bool) -> None:
    """See `kmeans_update`."""
    dims = x.shape[2]
    if not centroids.numel():
        return
    # Rows and clusters count by powers of four.
    key = dims, spherical, labels.numel().bit_length() // 2, centroids.shape[1].bit_length() // 2
    call = partial(_launch, x, labels, centroids, out_sizes, spherical)
    padded = max(16, next_power_of_2(dims))
    call(kernel.choose(key, partial(fits, padded), call, measure=not is_capturing(x.device)))


def _launch(x: Tensor, labels: Tensor, centroids: Tensor, sizes: Tensor, spherical: bool, tiling: Tiling) -> None:
    """Update with a tiling; the same labels give the same centroids however often it is done."""
    problems, tokens, dims = x.shape
    clusters = centroids.shape[1]
    kernel.at(tiling, (problems * triton.cdiv(clusters, tiling["BLOCK_C"]),))(
        x,
        labels,
        centroids,
        sizes,
        *x.stride()[:2],
        tokens,
        clusters,
        SPHERICAL=spherical,
        DIMS=dims,
        PADDED=max(16, next_power_of_2(dims)),
        SPLIT=True,
    )
