"""Where the steady tokens of requests lie, as runs of consecutive slots of the arena.

A request's steady tokens are in the first places of its buffer (see `SteadyRing`). The buffer is whole pages of the
arena, so neighbouring places have neighbouring slots but for where a page ends. What is steady follows from the lengths
of requests and is the same in all heads: it is worked out on the host, without looking at single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_tier.errors import ConfigError, StateError
from gpu_tier.types import SteadyRing

__all__ = ["SteadyPlaces", "SteadyRuns"]


@dataclass(frozen=True, slots=True)
class SteadyRuns:
    """The steady tokens of one request, ascending; they are the first of its execution row.

    Attributes:
        src: ``int64 [U]`` slot in the arena of each run's first token.
        first: ``int64 [U]`` place of that token in the execution row.
        tokens: ``int64 [U]`` tokens of the run.
        total: tokens of all runs.
    """

    src: NDArray[np.int64]
    first: NDArray[np.int64]
    tokens: NDArray[np.int64]
    total: int


@dataclass(frozen=True, slots=True)
class _Places:
    """A request's places; `breaks` are those whose slot does not follow that of the place before."""

    ring: SteadyRing
    slots: NDArray[np.int64]
    breaks: NDArray[np.int64]


class SteadyPlaces:
    """The places of the steady tokens of all requests that have a buffer."""

    def __init__(self) -> None:
        self._of: dict[int, _Places] = {}

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """Take note of a request's places, or of those of its grown buffer.

        Args:
            request: row of the per-request tables.
            ring: which place each steady token has.
            buffer_slots: ``int [at least ring.capacity]`` device slot of each place, on the host.

        Raises:
            ConfigError: there are too few places.
        """
        if len(buffer_slots) < ring.capacity:
            raise ConfigError("buffer_slots", len(buffer_slots), f"must be the {ring.capacity} steady places and more")
        slots = buffer_slots[: ring.capacity].numpy().astype(np.int64)
        self._of[request] = _Places(ring, slots, np.flatnonzero(np.diff(slots) != 1) + 1)

    def release(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._of.pop(request, None)

    def __contains__(self, request: int) -> bool:
        return request in self._of

    def ring(self, request: int) -> SteadyRing:
        """Return which place each steady token of a request has."""
        return self._of[request].ring

    def runs(self, request: int, first: int, n_tokens: int) -> SteadyRuns:
        """Return the runs of the sink and of tokens `first` to `n_tokens - 1`.

        Raises:
            StateError: more tokens are steady than have places.
        """
        places = self._of[request]
        starts, stops = _split(_intervals(places.ring, first, n_tokens), places.breaks)
        tokens = stops - starts
        ends = np.cumsum(tokens)
        return SteadyRuns(places.slots[starts], ends - tokens, tokens, int(ends[-1]) if len(ends) else 0)


def _intervals(ring: SteadyRing, first: int, n_tokens: int) -> list[tuple[int, int]]:
    """Return the intervals of places that hold the steady tokens, in the order of the tokens."""
    first = max(first, ring.sink)
    recent = max(0, n_tokens - first)
    if recent > ring.ring:
        raise StateError(f"{recent} recent tokens are steady, and there are {ring.ring} places for them")
    start = ring.position(first)
    before_the_end = min(recent, ring.capacity - start)
    intervals = [
        (0, min(ring.sink, n_tokens)), (start, start + before_the_end), (ring.sink, ring.sink + recent - before_the_end)
    ]  # fmt: skip
    return [(lower, upper) for lower, upper in intervals if lower < upper]


def _split(intervals: list[tuple[int, int]], breaks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return first places and places behind the last of the runs that breaks split intervals into."""
    starts, stops = [], []
    for lower, upper in intervals:
        inside = breaks[np.searchsorted(breaks, lower, "right") : np.searchsorted(breaks, upper, "left")]
        starts.append(np.concatenate([[lower], inside]))
        stops.append(np.concatenate([inside, [upper]]))
    if not starts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(starts).astype(np.int64), np.concatenate(stops).astype(np.int64)
