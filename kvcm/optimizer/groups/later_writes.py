"""A trace whose blocks can be read only some time after they were asked for, as it is where writes take time.

Published traces have one moment per request: its blocks are read and written at once. An engine writes them when it has
computed them; who asks for them meanwhile computes them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = ["with_later_writes"]

_MOST_SECONDS = 1e9
_Value = TypeVar("_Value")


def with_later_writes(trace: Trace, seconds: float, *, seconds_per_output_token: float = 0.0) -> Trace:
    """Return a trace in which each turn is a lookup, followed by a write session that ends later.

    Args:
        trace: what neither reads nor writes both stays as it is.
        seconds: from each turn to the end of its write.
        seconds_per_output_token: in addition.

    Raises:
        OptionError: the writes would end before they begin.
    """
    for name, value in (("seconds", seconds), ("seconds_per_output_token", seconds_per_output_token)):
        if not 0 <= value <= _MOST_SECONDS:
            raise OptionError(f"{name}: {value!r}; allowed: 0 to {_MOST_SECONDS:.0f}")
    is_turn = trace.writes & (trace.read_blocks > 0)
    turns = np.flatnonzero(is_turn)
    delays = np.rint((seconds + seconds_per_output_token * trace.output_tokens[turns]) * 1e6).astype(np.int64)
    sources = np.concatenate([np.arange(len(trace)), turns])
    times = np.concatenate([trace.times_us, trace.times_us[turns] + delays])
    order = np.argsort(times, kind="stable")
    is_end = order >= len(trace)
    return _taken(trace, sources[order], times[order], is_end, is_turn)


def _taken(trace: Trace, sources: Int64Column, times_us: Int64Column, is_end: np.ndarray, is_turn: np.ndarray) -> Trace:
    """Return requests of a trace in a new order, those of turns as lookups or as the ends of their writes."""
    lengths = np.diff(trace.offsets)[sources]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    places = np.repeat(trace.offsets[:-1][sources] - offsets[:-1], lengths) + np.arange(offsets[-1])
    lookups = [(place, source) for place, source in enumerate(sources.tolist()) if not is_end[place]]
    all_of_them = list(enumerate(sources.tolist()))
    return replace(
        trace,
        times_us=times_us,
        input_tokens=trace.input_tokens[sources],
        output_tokens=trace.output_tokens[sources],
        sessions=trace.sessions[sources],
        instances=trace.instances[sources],
        read_blocks=np.where(is_end, 0, trace.read_blocks[sources]).astype(np.int32),
        writes=is_end | (trace.writes & ~is_turn)[sources],
        offsets=offsets,
        blocks=trace.blocks[places],
        modes=_moved(trace.modes, lookups),
        windows=_moved(trace.windows, lookups),
        masks=_moved(trace.masks, lookups),
        specs=_moved(trace.specs, all_of_them),
    )


def _moved(values: Mapping[int, _Value], moves: list[tuple[int, int]]) -> dict[int, _Value]:
    return {place: values[source] for place, source in moves if source in values} if values else {}
