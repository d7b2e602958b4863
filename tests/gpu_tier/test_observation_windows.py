"""Windows of the last queries: a ring that takes each position once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.algorithms.observation import ObservationWindows
from gpu_tier.types import ForwardBatch, Mode

WIDTH = 4


def make() -> ObservationWindows:
    return ObservationWindows(2, WIDTH, 1, 1, torch.float32, torch.device("cpu"))


def chunk(*pieces: tuple[int, int, int]) -> tuple[ForwardBatch, torch.Tensor]:
    """A pass of (request, first position, stop) pieces; a query is 1000 · request + position."""
    requests, starts, stops = zip(*pieces, strict=True)
    extend = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    queries = [1000.0 * request + p for request, start, stop in pieces for p in range(start, stop)]
    empty = torch.empty(0)
    batch = ForwardBatch(Mode.PREFILL, empty, empty, empty, empty, empty, requests, stops, extend)
    return batch, torch.tensor(queries)[:, None, None]


def seen(windows: ObservationWindows, request: int, layer: int = 0) -> list[float]:
    positions, queries = windows.last(layer, request)
    assert queries.flatten().tolist() == [1000.0 * request + p for p in positions]
    return list(positions)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=8))
def test_the_last_consecutive_positions_are_kept(chunks: list[tuple[int, int]]) -> None:
    """Chunks that overlap what was seen, come again or leave a gap; the model is a list of positions."""
    windows, model = make(), list[int]()
    windows.open(3)
    stop = 0
    for back, size in chunks:
        start = max(0, stop + 4 - back)
        windows.record(1, *chunk((3, start, start + size)))
        fresh = [p for p in range(start, start + size) if not model or p > model[-1]]
        if fresh:
            model = [*model, *fresh] if model and fresh[0] == model[-1] + 1 else fresh
            stop = model[-1] + 1
        assert seen(windows, 3, 1) == model[-WIDTH:]
    assert seen(windows, 3, 0) == []


def test_the_rows_of_a_pass_go_to_their_own_windows() -> None:
    windows = make()
    windows.open(0)
    windows.open(2)
    windows.record(0, *chunk((2, 0, 3), (1, 0, 9), (0, 5, 11)))
    assert (seen(windows, 2), seen(windows, 1), seen(windows, 0)) == ([0, 1, 2], [], [7, 8, 9, 10])


def test_a_closed_window_is_forgotten() -> None:
    windows = make()
    windows.open(0)
    windows.record(0, *chunk((0, 0, 3)))
    windows.open(0)
    assert seen(windows, 0) == [0, 1, 2]
    assert windows.nbytes == windows.window_bytes == 2 * WIDTH * 4
    windows.close(0)
    windows.close(0)
    windows.open(0)
    assert seen(windows, 0) == []
