"""Small traces of several instances, with every option of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from traces import trace_of

from kvcm.optimizer.trace import QueryMode, Trace

NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Step:
    """One request.

    Attributes:
        ids: of its blocks; those of two instances are never the same.
        instance: its place in `NAMES`.
        reads: how many of its first blocks it reads; None for all.
    """

    ids: tuple[int, ...]
    instance: int = 0
    reads: int | None = None
    writes: bool = True
    mode: QueryMode = QueryMode.PREFIX
    window: int = 0
    mask: tuple[bool, ...] = ()
    seconds: float | None = None

    @property
    def read_blocks(self) -> int:
        return len(self.ids) if self.reads is None else min(self.reads, len(self.ids))


def trace_of_steps(requests: Sequence[Step]) -> Trace:
    """Return the trace of requests, a second apart."""
    names = tuple(dict.fromkeys(NAMES[step.instance] for step in requests))
    trace = trace_of(
        [[1000 * step.instance + each for each in step.ids] for step in requests],
        times_seconds=[place if step.seconds is None else step.seconds for place, step in enumerate(requests)],
        read_blocks=[step.read_blocks for step in requests],
        writes=[step.writes for step in requests],
    )
    return replace(
        trace,
        instances=np.array([names.index(NAMES[step.instance]) for step in requests], np.int32),
        instance_names=names,
        instance_block_tokens=(10,) * len(names),
        modes={place: step.mode for place, step in enumerate(requests) if step.mode},
        windows={place: step.window for place, step in enumerate(requests) if step.mode is QueryMode.WINDOW},
        masks={place: np.array(step.mask, np.bool_) for place, step in enumerate(requests) if step.mask},
    )


_PARENTS = (-1, 0, 1, 2, 1, 4, 0, -1, 7, 8)


def _path(leaf: int) -> tuple[int, ...]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = _PARENTS[leaf]
    return tuple(path[::-1])


@st.composite
def steps(
    draw: st.DrawFn, *, instances: int = 3, modes: Sequence[QueryMode] = tuple(QueryMode), masks: bool = True
) -> list[Step]:
    """Draw requests along one small tree per instance.

    Args:
        instances: how many there are.
        modes: of queries.
        masks: whether lookups leave some blocks out.
    """
    step = st.builds(
        Step,
        ids=st.integers(0, len(_PARENTS) - 1).map(_path),
        instance=st.integers(0, instances - 1),
        reads=st.none() | st.integers(0, 4),
        writes=st.booleans(),
        mode=st.sampled_from(modes),
        window=st.integers(1, 3),
        mask=st.lists(st.booleans(), max_size=4).map(tuple) if masks else st.just(()),
    )
    return draw(st.lists(step, min_size=1, max_size=40))
