"""Builds the wave index of a whole prompt, for benchmarks: an engine builds it segment by segment as chunks come."""

from __future__ import annotations

from torch import Tensor

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.index.wave_index import Clusters, build_segments, prompt_segments

__all__ = ["Built", "build_prompt"]

Built = list[tuple[list[range], Clusters]]
"""Segments of the same length, first token to last, and their clusters."""


def build_prompt(k: Tensor, v: Tensor, settings: RetroInferConfig) -> Built:
    """Return the clusters of a prompt's keys ``[n, H, d]`` and values ``[n, H, dv]``.

    Whole segments are clustered together; the last one, if it is shorter, on its own.
    """
    segments = prompt_segments(settings.sink, len(k), settings)
    whole = [segment for segment in segments if len(segment) == len(segments[0])]
    groups = [whole, segments[len(whole) :]]
    return [(group, build_segments(_cut(k, group), _cut(v, group), settings)) for group in groups if group]


def _cut(x: Tensor, segments: list[range]) -> Tensor:
    """Return neighbouring segments of the same length, ``[S, t, H, d]``."""
    return x[segments[0].start : segments[-1].stop].unflatten(0, (len(segments), -1))
