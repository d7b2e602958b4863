"""Traces with everything that requests can have, and whether two traces say the same."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from kvcm.optimizer.readers.trace_builder import Request, TraceBuilder
from kvcm.optimizer.trace import QueryMode, Trace

BLOCK_TOKENS = 4
_NAMES = st.sampled_from(["a", "b", "ü\"'</script>", "c" * 50])
_KEYS = st.integers(0, 12) | st.integers(-(1 << 63), (1 << 63) - 1)


def _built(requests: list[Request]) -> Trace:
    builder = TraceBuilder("test", BLOCK_TOKENS)
    for request in requests:
        builder.append(request)
    return builder.trace()


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    keys = draw(st.lists(_KEYS, max_size=6))
    request = Request(draw(st.integers(0, 50_000_000)), keys, instance=draw(_NAMES))
    if draw(st.booleans()):
        request.read_blocks = 0
        return request
    request.writes = False
    modes = list(QueryMode) if keys else [QueryMode.PREFIX, QueryMode.BATCH]
    request.mode = draw(st.sampled_from(modes))
    request.specs = tuple(draw(st.lists(_NAMES, max_size=2)))
    if request.mode is QueryMode.WINDOW:
        request.window = draw(st.integers(1, len(keys)))
    if request.mode is QueryMode.PREFIX:
        request.mask = np.array(draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys))), np.bool_)
    return request


@st.composite
def request_traces(draw: st.DrawFn) -> Trace:
    """Draw lookups and writes of several instances, in any order."""
    return _built(draw(st.lists(_requests(), min_size=1, max_size=12)))


@st.composite
def turn_traces(draw: st.DrawFn, *, step_us: int = 1000, are_trees: bool = False, is_partial: bool = False) -> Trace:
    """Draw turns of dialogues of one instance.

    Args:
        step_us: which times are multiples of.
        are_trees: whether every block has one parent.
        is_partial: whether some turns read only a part of what they write.
    """
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        keys = draw(st.lists(st.integers(0, 3) if are_trees else _KEYS, max_size=6))
        if are_trees:
            keys = [
                sum(4**place * (key + 1) for place, key in enumerate(keys[:end])) for end in range(1, len(keys) + 1)
            ]
        tokens = {name: draw(st.integers(0, 100)) for name in ("input_tokens", "output_tokens")}
        request = Request(draw(st.integers(0, 50_000)) * step_us, keys, **tokens)
        if is_partial:
            request.read_blocks = draw(st.integers(min(1, len(keys)), len(keys)))
        else:
            request.session = draw(st.none() | st.integers(0, 3))
        requests.append(request)
    return _built(requests)


def assert_same(one: Trace, other: Trace, *, but: frozenset[str] = frozenset({"name"})) -> None:
    """Assert that two traces are equal in every field but those named."""
    for field in fields(Trace):
        if field.name in but:
            continue
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            np.testing.assert_array_equal(left, right, field.name)
        elif field.name == "masks":
            assert {number: mask.tolist() for number, mask in left.items()} == {
                number: mask.tolist() for number, mask in right.items()
            }
        else:
            assert left == right, field.name
