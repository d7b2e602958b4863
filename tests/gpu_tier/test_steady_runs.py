"""Steady runs against a list of every token's slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.errors import ConfigError, StateError
from gpu_tier.manager.steady_runs import SteadyPlaces
from gpu_tier.types import SteadyRing


@st.composite
def cases(draw: st.DrawFn) -> tuple[SteadyRing, list[int], int, int]:
    """Return a ring, the slot of each place, the first recent token and the request's length."""
    ring = SteadyRing(draw(st.integers(0, 9)), draw(st.integers(1, 40)))
    page = draw(st.sampled_from([1, 4, 8]))
    pages = draw(st.permutations(range(2 + (ring.capacity + 2) // page)))
    slots = [page_ * page + offset for page_ in pages for offset in range(page)][2:]
    n = draw(st.integers(1, 200))
    recent = draw(st.integers(0, min(ring.ring, max(0, n - ring.sink))))
    return ring, slots[: ring.capacity], max(ring.sink, n - recent), n


@settings(max_examples=examples(400), deadline=None)
@given(cases())
def test_runs_are_the_slots_of_the_steady_tokens(case: tuple[SteadyRing, list[int], int, int]) -> None:
    ring, slots, first, n = case
    places = SteadyPlaces()
    places.admit(3, ring, torch.tensor(slots, dtype=torch.int32))
    runs = places.runs(3, first, n)
    tokens = [t for t in range(n) if t < ring.sink or t >= first]
    found = [src + i for src, count in zip(runs.src, runs.tokens, strict=True) for i in range(count)]
    assert found == [slots[ring.position(token)] for token in tokens]
    assert runs.total == len(tokens)
    assert runs.first.tolist() == [sum(runs.tokens[:i]) for i in range(len(runs.tokens))]
    # Not a run per token: the buffer's pages, twice where the ring's end is among them, and one for the sink.
    assert len(runs.src) <= len([i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]) + 3


def test_more_recent_tokens_than_places_are_refused() -> None:
    places = SteadyPlaces()
    places.admit(0, SteadyRing(2, 4), torch.arange(6))
    assert places.runs(0, 6, 10).total == 6
    with pytest.raises(StateError, match="5 recent tokens"):
        places.runs(0, 5, 10)


def test_a_buffer_without_the_steady_places_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 steady places"):
        SteadyPlaces().admit(0, SteadyRing(2, 4), torch.arange(5))


def test_released_requests_are_forgotten_and_a_grown_buffer_replaces_the_old_one() -> None:
    places = SteadyPlaces()
    places.admit(0, SteadyRing(0, 4), torch.arange(4))
    places.admit(0, SteadyRing(0, 4), torch.arange(10, 18))
    assert places.runs(0, 0, 3).src.tolist() == [10]
    places.release(0)
    places.release(7)
    assert 0 not in places
