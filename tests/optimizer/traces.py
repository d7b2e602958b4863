"""Small traces for tests: built from lists of ids, the hand-sized example, and strategies for random ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from hypothesis import strategies as st

from kvcm.optimizer.trace import Trace


def trace_of(
    requests: Sequence[Sequence[Hashable]],
    *,
    times_seconds: Sequence[float] | None = None,
    input_tokens: Sequence[int] | None = None,
    read_blocks: Sequence[int] | None = None,
    writes: Sequence[bool] | None = None,
    sessions: Sequence[int] | None = None,
    block_tokens: int = 10,
) -> Trace:
    """Return a trace of lists of ids, which name whole prefixes and become dense numbers.

    Args:
        times_seconds: one second apart by default.
        input_tokens: what fills the blocks by default.
        read_blocks: all by default.
        writes: True by default.
        sessions: unknown by default.
    """
    numbers: dict[Hashable, int] = {}
    parents: list[int] = []
    is_tree = True
    rows = []
    for ids in requests:
        before, row = -1, []
        for each in ids:
            number = numbers.setdefault(each, len(numbers))
            if number == len(parents):
                parents.append(before)
            is_tree &= parents[number] == before
            row.append(number)
            before = number
        rows.append(row)
    lengths = [len(row) for row in rows]
    count = len(rows)
    return Trace(
        name="test",
        block_tokens=block_tokens,
        times_us=np.array([round(each * 1e6) for each in times_seconds or range(count)], np.int64),
        input_tokens=np.array(input_tokens or [length * block_tokens for length in lengths], np.int64),
        output_tokens=np.zeros(count, np.int64),
        sessions=np.array(sessions or [-1] * count, np.int32),
        instances=np.zeros(count, np.int32),
        read_blocks=np.array(lengths if read_blocks is None else read_blocks, np.int32),
        writes=np.array([True] * count if writes is None else writes, np.bool_),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        blocks=np.array([block for row in rows for block in row], np.int32),
        parents=np.array(parents, np.int32),
        instance_block_tokens=(block_tokens,),
        has_one_parent=is_tree,
    )


HAND_IDS = ([1, 2, 3, 4], [1, 2, 5], [6, 7], [1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 8], [6, 7], [1, 2, 3, 4])
HAND = trace_of(HAND_IDS, times_seconds=[0, 1, 2, 3, 5, 9, 10, 12], input_tokens=[35, 28, 20, 35, 28, 40, 20, 35])
"""The hand-sized example, whose hits were worked out by hand."""

HAND_HITS = {
    "lru": (6, 9, 12, 18),
    "ttl": (6, 9, 12, 18),
    "fifo": (4, 7, 7, 18),
    "ttl:fixed": (4, 7, 7, 18),
    "lfu": (10, 12, 12, 18),
    "sieve": (10, 12, 12, 18),
    "leaf_lru": (11, 12, 13, 18),
    "belady": (15, 16, 17, 18),
}
"""Prefix hits of it by policy, with caches of 4, 5, 6 and 8 blocks."""


@st.composite
def _kinds(draw: st.DrawFn, requests: Sequence[Sequence[int]], *, separate: bool) -> Trace:
    """Draw when requests come, how many tokens they have, with `separate` what they read and whether they write."""
    count = len(requests)
    reads, writes = None, None
    if separate:
        reads = [draw(st.integers(0, len(each)) | st.just(len(each))) for each in requests]
        writes = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=count, max_size=count))
    short = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return trace_of(
        requests,
        times_seconds=np.cumsum(gaps).tolist(),
        input_tokens=[max(0, 10 * len(each) - less) for each, less in zip(requests, short, strict=True)],
        read_blocks=reads,
        writes=writes,
    )


@st.composite
def prefix_traces(draw: st.DrawFn, *, most_requests: int = 40, separate: bool = False) -> Trace:
    """Draw requests along a random prefix tree, no block twice in one of them.

    Args:
        separate: whether some requests read less than they write, or do not write.
    """
    jumps = draw(st.lists(st.integers(1, 4), max_size=29))
    parents = [-1, *(max(-1, number - jump) for number, jump in enumerate(jumps, 1))]
    requests = []
    for leaf in draw(st.lists(st.integers(0, len(parents) - 1), min_size=1, max_size=most_requests)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        requests.append(path[::-1])
    return draw(_kinds(requests, separate=separate))


@st.composite
def flat_traces(draw: st.DrawFn, *, most_requests: int = 40, separate: bool = False) -> Trace:
    """Draw requests of any blocks in any order, also of none, and of the same one twice.

    Args:
        separate: whether some requests read less than they write, or do not write.
    """
    most = draw(st.integers(0, 25))
    request = st.lists(st.integers(0, most), max_size=8)
    return draw(_kinds(draw(st.lists(request, min_size=1, max_size=most_requests)), separate=separate))
