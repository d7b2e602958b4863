"""A clustered segment of a request, and who wants to hear of it.

The clusters of a request in a layer are numbered through: those of its first segment first, then those of the next. All
KV heads have the same number of clusters in a segment, which follows from its tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["SegmentSink", "WaveSegment"]


@dataclass(frozen=True, slots=True)
class WaveSegment:
    """Which cluster each token of a segment belongs to, in one layer.

    Attributes:
        start: first token.
        first_cluster: number of the segment's first cluster.
        sizes: ``int32 [H, m]`` tokens of each cluster; some may be empty.
        members: ``int32 [H, t]`` tokens, counted from `start`: cluster after cluster, ascending in each.
    """

    start: int
    first_cluster: int
    sizes: Tensor
    members: Tensor

    @property
    def tokens(self) -> int:
        """Tokens t of the segment."""
        return self.members.shape[1]

    @property
    def clusters(self) -> int:
        """Clusters m of the segment."""
        return self.sizes.shape[1]


class SegmentSink(Protocol):
    """Whoever keeps the KV of clusters."""

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """Take over a segment that was clustered; its KV can be read. Segments come in order, each once.

        From the next step on its clusters may be selected, and its tokens are steady no more.
        """
