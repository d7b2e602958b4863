"""Which service the next GiB is worth most to, how a budget is split among several, and what hangs on each input."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND

from kvcm.optimizer import roi
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.replay import replay
from kvcm.optimizer.results import Replay
from kvcm.optimizer.roi.deployment import GIB, HOURS_PER_MONTH

PLAIN = roi.Deployment(
    prefill_tokens_per_second=100, kv_bytes_per_token=1, gpus_per_node=1, price_per_gpu_hour=1, price_per_gib_month=0
)


def service(name: str, saved: list[float], *, block: float = 1.0, price: float = 0.0) -> roi.Service:
    """Return a service that saves so much money at 0, 1, 2, ... blocks; `price` is that of a byte for an hour."""
    nodes = 1000.0 - np.array(saved, np.float64)
    zeros = np.zeros(len(saved))
    deployment = replace(PLAIN, price_per_gib_month=price * GIB * HOURS_PER_MONTH)
    capacities = np.arange(len(saved))
    return roi.Service(
        name, roi.Returns("lru", deployment, block, 1.0, 0.5, 1000.0, capacities, zeros, zeros, nodes, zeros, None)
    )  # fmt: skip


def brute_force(services: list[roi.Service], budget: float) -> float:
    best = -math.inf
    for places in itertools.product(*(range(len(each.returns.nodes)) for each in services)):
        stored = [float(each.stored_bytes[place]) for each, place in zip(services, places, strict=True)]
        if sum(stored) <= budget:
            nets = [float(each.returns.net_per_hour[at]) for each, at in zip(services, places, strict=True)]
            best = max(best, sum(nets))
    return best


savings = st.lists(st.integers(0, 20), max_size=7).map(lambda steps: [0.0, *np.cumsum(steps).tolist()])
concave = st.lists(st.integers(0, 20), max_size=7).map(
    lambda steps: [0.0, *np.cumsum(sorted(steps, reverse=True)).tolist()]
)


@settings(max_examples=examples(200))
@given(
    st.lists(savings, min_size=1, max_size=3),
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=3, max_size=3),
    st.sampled_from([0.0, 0.7, 3.0]),
    st.floats(0, 40),
)
def test_no_tried_split_is_better(curves: list[list[float]], blocks: list[float], price: float, budget: float) -> None:
    services = [
        service(str(number), saved, block=block, price=price)
        for number, (saved, block) in enumerate(zip(curves, blocks, strict=False))
    ]
    expected = brute_force(services, budget)
    found = roi.split_budget(services, budget)
    assert found.is_exact
    assert found.net_per_hour == pytest.approx(expected)
    assert found.at_most == pytest.approx(expected)
    assert sum(share.stored_bytes for share in found.shares) <= budget
    for share, each in zip(found.shares, services, strict=True):
        assert share.net_per_hour == pytest.approx(each.returns.net_per_hour[share.capacity_blocks])


@settings(max_examples=examples(100))
@given(st.lists(concave, min_size=1, max_size=3), st.integers(0, 25))
def test_concave_returns_need_no_grid(curves: list[list[float]], budget: int) -> None:
    services = [service(str(number), saved) for number, saved in enumerate(curves)]
    found = roi.split_budget(services, budget)
    assert (found.method, found.is_exact) == ("hull", True)
    assert found.net_per_hour == pytest.approx(brute_force(services, budget))


@settings(max_examples=examples(60))
@given(st.lists(savings, min_size=2, max_size=3), st.floats(0.5, 12))
def test_blocks_without_a_common_size_have_a_bound(curves: list[list[float]], budget: float) -> None:
    sizes = (1.37, math.pi, 0.71)
    services = [
        service(str(at), saved, block=size) for at, (saved, size) in enumerate(zip(curves, sizes, strict=False))
    ]
    found = roi.split_budget(services, budget)
    best = brute_force(services, budget)
    assert found.net_per_hour <= best + 1e-9
    assert best <= found.at_most + 1e-6
    assert found.net_per_hour >= 0.98 * best
    assert sum(share.stored_bytes for share in found.shares) <= budget * (1 + 1e-9)


@pytest.mark.parametrize("budget", [-1.0, math.nan])
def test_invalid_splits_are_refused(budget: float) -> None:
    with pytest.raises(OptionError, match=f"budget_bytes: {budget:.15g}; allowed: from 0"):
        roi.split_budget([service("one", [0, 1, 2, 3])], budget)


def test_services_have_names_of_their_own() -> None:
    twice = [service("one", [0, 1]), service("one", [0, 2])]
    for ask in (roi.rank_services, lambda each: roi.split_budget(each, 1)):
        with pytest.raises(OptionError, match="'one' comes twice"):
            ask(twice)


def test_no_services_share_nothing() -> None:
    assert roi.rank_services([]) == ()
    assert roi.split_budget([], 5).shares == ()
    nothing = service("nothing", [0])
    assert roi.rank_services([nothing])[0].per_gib_hour == 0
    assert roi.split_budget([nothing], 5).net_per_hour == 0


def test_services_are_ranked_by_their_steepest_step() -> None:
    flat, late = service("flat", [0, 2, 3, 3]), service("late", [0, 1, 1, 9], block=2.0)
    ranks = roi.rank_services([late, flat])
    assert [each.name for each in ranks] == ["flat", "late"]
    assert [each.per_gib_hour / GIB for each in ranks] == [2, 9 / 6]
    assert [each.next_bytes for each in ranks] == [1, 6]


LRU = PolicySpec("lru")
SMALL = replace(PLAIN, kv_bytes_per_token=10, bandwidth_bytes_per_second=4000, price_per_gib_month=1e4)


def all_replays() -> list[Replay]:
    return [replay(HAND, LRU, capacity, keep_requests=True) for capacity in range(1, 9)]


def test_each_input_swings_the_answer_as_it_does_alone() -> None:
    swings = roi.sensitivity(all_replays(), HAND, replace(SMALL, usable_share=0.9))
    assert {each.input for each in swings} == set(roi.RANGES)
    assert [each.width for each in swings] == sorted((each.width for each in swings), reverse=True)
    for each in swings:
        for value, net, blocks in (
            (each.low, each.low_net, each.low_blocks),
            (each.high, each.high_net, each.high_blocks),
        ):
            alone = roi.returns(all_replays(), HAND, replace(SMALL, **{"usable_share": 0.9, each.input: value}))
            assert net == alone.net_per_hour[alone.best]
            assert blocks == alone.capacity_blocks[alone.best]
    found = {each.input: each for each in swings}
    assert (found["usable_share"].low, found["usable_share"].high) == (pytest.approx(0.72), 1.0)
    assert (found["price_per_gib_month"].low, found["price_per_gib_month"].high) == (8e3, 1.2e4)
    assert found["price_per_gib_month"].low_net > found["price_per_gib_month"].high_net
    assert found["price_per_gpu_hour"].low_net < found["price_per_gpu_hour"].high_net


def test_the_grid_is_the_best_of_each_pair() -> None:
    bandwidths, prices = (500.0, 2000.0, 8000.0), (0.0, 1e4, 1e9)
    found = roi.grid(all_replays(), HAND, SMALL, bandwidths=bandwidths, prices=prices)
    for (row, bandwidth), (column, price) in itertools.product(enumerate(bandwidths), enumerate(prices)):
        alone = roi.returns(
            all_replays(), HAND, replace(SMALL, bandwidth_bytes_per_second=bandwidth, price_per_gib_month=price)
        )
        assert found.best_blocks[row, column] == alone.capacity_blocks[alone.best]
        assert found.net_per_hour[row, column] == alone.net_per_hour[alone.best]
    assert not found.best_blocks[0].any()
