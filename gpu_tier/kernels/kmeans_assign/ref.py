"""Nearest centroids in torch: what runs on a CPU, one matrix product and one argmax for rows that fit into its cache.

A problem is cut into pieces of its own rows alone, so that no number of it depends on the padding or on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["run"]

_SCORES = 1 << 19  # of a piece: 2 MiB
_FEWEST, _MOST = 128, 2048  # rows of a piece


def run(x: Tensor, centroids: Tensor, counts: Tensor, n_centroids: Tensor, out_labels: Tensor, *, metric: str) -> None:
    """See `kmeans_assign`."""
    out_labels.fill_(-1)
    for problem, (count, n) in enumerate(zip(counts.tolist(), n_centroids.tolist(), strict=True)):
        if count and n:
            _label(x[problem, :count], centroids[problem, :n], out_labels[problem, :count], metric)


def _label(x: Tensor, centroids: Tensor, labels: Tensor, metric: str) -> None:
    half_norms = centroids.square().sum(1) / 2 if metric == "l2" else None
    piece = min(max(_SCORES // len(centroids), _FEWEST), _MOST)
    scores = x.new_empty(min(piece, len(x)), len(centroids))
    for start in range(0, len(x), piece):
        rows = x[start : start + piece]
        found = torch.mm(rows, centroids.T, out=scores[: len(rows)])
        if half_norms is not None:
            found -= half_norms
        # `max` says where, like `argmax` the first of equals, and took a third of its time.
        labels[start : start + piece] = found.max(1).indices
