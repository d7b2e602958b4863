"""What a group needs, estimated while a manager serves, against exact reuse distances."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fake_clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.optimizer.live.bytes_needed import ATTAINABLE, HALF_LIFE_SECONDS, ByteOrder, BytesNeeded, ReuseSample

Requests = Sequence[tuple[Sequence[int], int]]


def exact_hits(requests: Requests, capacity_bytes: float) -> int:
    """Return the prefix hits of a cache that reads a request, then makes its blocks the newest, the head last."""
    order: list[int] = []  # the newest first
    sizes: dict[int, int] = {}
    hits = 0
    for keys, size in requests:
        for key in keys:
            if key not in sizes or sum(sizes[each] for each in order[: order.index(key) + 1]) > capacity_bytes:
                break
            hits += 1
        for key in reversed(keys):
            if key in sizes:
                order.remove(key)
            order.insert(0, key)
            sizes[key] = size
    return hits


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[list[int], int]]:
    """Requests for paths of a tree, each with something of an earlier one."""
    size = draw(st.sampled_from([1, 1000, 16384]))
    paths: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 30))):
        path = draw(st.sampled_from(paths))[: draw(st.integers(0, 12))]
        for each in range(draw(st.integers(0, 4))):
            path = [*path, hash((tuple(path), each))]
        paths.append(path)
    return [(path, size) for path in paths]


def sample_of(requests: Requests) -> ReuseSample:
    sample = ReuseSample(1000, share=1.0)
    for keys, size in requests:
        sample.read(keys, size)
    return sample


@settings(max_examples=examples(60), deadline=None)
@given(chains())
def test_the_curve_of_a_sample_says_the_same_with_few_points(requests: Requests) -> None:
    sample = sample_of(requests)
    capacities, ratios = sample.hit_curve()
    curve = sample.curve()
    assert curve.attainable_ratio == ratios[-1] == curve.ratio_at(1 << 62)
    assert len(curve.points) <= 256
    assert curve.ratio_at(0) == 0
    for capacity, ratio in zip(capacities.tolist(), ratios.tolist(), strict=True):
        assert curve.ratio_at(int(capacity)) == pytest.approx(ratio, abs=1 / 256)


@settings(max_examples=examples(60), deadline=None)
@given(chains())
def test_a_sample_of_all_keys_is_exact_but_for_the_width_of_bins(requests: Requests) -> None:
    sample = sample_of(requests)
    capacities, ratios = sample.hit_curve()
    accesses = max(1, sum(len(keys) for keys, _ in requests))
    for place in [*range(0, len(capacities), 37), -1]:
        assert ratios[place] * accesses == pytest.approx(exact_hits(requests, capacities[place]))


@settings(max_examples=examples(40), deadline=None)
@given(chains(), st.integers(1, 20))
def test_a_sample_stays_as_small_as_it_was_asked_to(requests: Requests, most: int) -> None:
    sample = ReuseSample(most, share=1.0)
    for keys, size in requests:
        sample.read(keys, size)
        assert len(sample) <= most
        assert len(sample._hashes) == len(sample)
        assert sample._order.bytes_since(0) == sum(map(sample._order.size_at, sample._places.values()))
    _, ratios = sample.hit_curve()
    assert np.all(np.diff(ratios) >= 0)
    assert 0 <= ratios[-1] <= 1 + 1e-9


def skewed(requests: int, chains_of: int, seed: int) -> list[tuple[list[int], int]]:
    """Requests for chains of 32 blocks, of which few are popular."""
    draw = np.random.default_rng(seed)
    popular = np.minimum(draw.zipf(1.2, requests), chains_of)
    return [([int(chain) * 1000 + block for block in range(32)], 4096) for chain in popular]


def test_a_bounded_sample_comes_close() -> None:
    """With 2,048 of some 25,000 keys at most 4 points away from the exact curve, at 2 % of all bytes and above: of less
    there are too few keys in a sample."""
    requests = skewed(6000, 2000, seed=7)
    exact, bounded = ReuseSample(1 << 17, share=1.0), ReuseSample(2048, share=1.0)
    for keys, size in requests:
        exact.read(keys, size)
        bounded.read(keys, size)
    assert len(exact) > 20_000
    assert len(bounded) <= 2048
    assert bounded.share < 0.12
    capacities, ratios = exact.hit_curve()
    error = np.abs(ratios - bounded.hit_curve()[1])[capacities >= 0.02 * len(exact) * 4096]
    assert error.max() < 0.04


def test_nothing_is_needed_where_nothing_is_found() -> None:
    sample = ReuseSample(16, share=1.0)
    sample.read([1, 2, 3], 100)
    assert sample.bytes_for() == [0] * len(ATTAINABLE)


def test_the_past_is_forgotten_by_and_by() -> None:
    clock = FakeClock(0.0)
    needed = BytesNeeded(1 << 17, clock.now)
    keys = list(range(20_000))
    for _ in range(4):
        needed.on_read("g", keys, 100)
    assert needed.attainable_ratio("g") == pytest.approx(0.75, abs=0.01)
    for hour in range(1, 9):
        clock.time = hour * (HALF_LIFE_SECONDS + 1)
        needed.on_read("g", [hour * 1_000_000 + key for key in keys], 100)  # read once each
    assert needed.attainable_ratio("g") < 0.05
    assert len(needed._samples["g"]) < 5 * 20_000 / 64 * 1.3, "what was not read for hours left the sample"


def test_groups_beyond_the_bound_are_not_estimated() -> None:
    needed = BytesNeeded(64)
    for number in range(100):
        for _ in range(3):
            needed.on_read(f"g{number}", range(1000), 100)
    assert sum(any(needed.bytes_needed(f"g{number}")) for number in range(100)) == 64


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 1 << 40)), max_size=60))
def test_sums_of_an_order_are_those_of_a_list(steps: list[tuple[bool, int, int]]) -> None:
    order = ByteOrder(32)
    plain: list[int] = []
    for is_removal, place, size in steps:
        if is_removal and place < len(plain):
            order.remove(place)
            plain[place] = 0
        elif order.is_full:
            plain = [each for each in plain if each][:31]
            order.restart(plain)
        else:
            assert order.append(size) == len(plain)
            plain.append(size)
        places = range(len(plain))
        assert [order.bytes_since(each) for each in places] == [sum(plain[each:]) for each in places]
