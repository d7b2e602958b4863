"""Nearest centroids in Triton.

A program keeps a tile of rows and walks over the centroids, a tile at a time, with the best score so far and where it
was: no score is ever written. f32 products use the tensor cores in three passes of tf32, which loses nothing that
matters: 1e-6 of a score.
"""

from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from kvcm.gpu_tier.kernels.tuning import Tiling, interpreting, is_capturing, next_power_of_2, tunable

__all__ = ["kernel", "run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")


def _assign(
    x: "Any",
    centroids: "Any",
    counts: "Any",
    n_centroids: "Any",
    labels: "Any",
    x_problem: "Any",
    x_row: "Any",
    c_problem: "Any",
    c_row: "Any",
    tokens: "Any",
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    EUCLIDEAN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    blocks = tl.cdiv(tokens, BLOCK_T)
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK_T
    token = first + tl.arange(0, BLOCK_T)
    count = tl.minimum(tl.load(counts + problem), tokens)
    n = tl.load(n_centroids + problem)
    dim = tl.arange(0, PADDED)
    row_at = x + problem * x_problem + token.to(tl.int64)[:, None] * x_row + dim[None, :]
    rows = tl.load(row_at, mask=(token < count)[:, None] & (dim < DIMS)[None, :], other=0.0)
    best = tl.full([BLOCK_T], -float("inf"), tl.float32)
    label = tl.zeros([BLOCK_T], tl.int32)
    for start in tl.range(0, tl.where(first < count, n, 0), BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        c_at = centroids + problem * c_problem + column.to(tl.int64)[:, None] * c_row + dim[None, :]
        c = tl.load(c_at, mask=(column < n)[:, None] & (dim < DIMS)[None, :], other=0.0)
        score = tl.dot(rows, tl.trans(c), input_precision=PRECISION)
        if EUCLIDEAN:
            score -= (tl.sum(c * c, axis=1) * 0.5)[None, :]
        score = tl.where((column < n)[None, :], score, -float("inf"))
        highest, place = tl.max(score, axis=1, return_indices=True)  # the first of equals
        label = tl.where(highest > best, start + place, label)
        best = tl.maximum(highest, best)
    label = tl.where((token < count) & (n > 0), label, -1)
    tl.store(labels + problem * tokens + token, label, mask=token < tokens)


_TILINGS = (
    Tiling.of(BLOCK_T=64, BLOCK_C=32, num_warps=4, num_stages=1),
    Tiling.of(BLOCK_T=64, BLOCK_C=64, num_warps=4),
    Tiling.of(BLOCK_T=128, BLOCK_C=64, num_warps=8),
    Tiling.of(BLOCK_T=128, BLOCK_C=32, num_warps=8, num_stages=1),
    Tiling.of(BLOCK_T=16, BLOCK_C=16, num_warps=4),
)
_TILE = 64 * 256  # numbers of the largest tile
kernel = tunable(_TILINGS, varying=("tokens",))(_assign)


def run(x: Tensor, centroids: Tensor, counts: Tensor, n_centroids: Tensor, out_labels: Tensor, *, metric: str) -> None:
    """See `kmeans_assign`."""
    problems, tokens, dims = x.shape
    if not problems * tokens:
        return
    padded = max(16, next_power_of_2(dims))
    # Tokens and centroids count by powers of four.
    key = dims, metric, (problems * tokens).bit_length() // 2, centroids.shape[1].bit_length() // 2
    call = partial(_launch, x, centroids, counts, n_centroids, out_labels, metric)
    call(kernel.choose(key, partial(_fits, padded), call, measure=not is_capturing(x.device)))


def _fits(padded: int, tiling: Tiling) -> bool:
    """Return whether tiles of a tiling are small enough; the smallest always are."""
    return tiling["BLOCK_T"] * padded <= _TILE or tiling == _TILINGS[-1]


def _launch(
    x: Tensor,
    centroids: Tensor,
    counts: Tensor,
    n_centroids: Tensor,
    labels: Tensor,
    metric: str,
    tiling: Tiling,
) -> None:
    """Label with a tiling."""
    problems, tokens, dims = x.shape
    kernel.at(tiling, (problems * triton.cdiv(tokens, tiling["BLOCK_T"]),))(
        x,
        centroids,
        counts,
        n_centroids,
        labels,
        *x.stride()[:2],
        *centroids.stride()[:2],
        tokens,
        DIMS=dims,
        PADDED=max(16, next_power_of_2(dims)),
        EUCLIDEAN=metric == "l2",
        PRECISION="ieee" if interpreting() else "tf32x3",
    )
