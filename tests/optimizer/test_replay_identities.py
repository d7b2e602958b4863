"""What must hold of replays whatever the trace, and what is published of the real ones (optimizer.md, Identities)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, HAND_HITS, flat_traces, prefix_traces

from kvcm.optimizer.capacities import DEFAULT_CAPACITIES, parse_capacities, percent_of
from kvcm.optimizer.policy_spec import PolicySpec, parse_policies, parse_policy
from kvcm.optimizer.replay import Job, Mode, reference_replay, replay, replay_all
from kvcm.optimizer.trace import Trace

WITHOUT_AGE = parse_policies("lru,leaf_lru,belady,belady:forced,lfu,fifo,sieve,s3fifo,s3fifo:warmup,random_lru")
MODES: tuple[Mode, ...] = ("block", "request")


def unlimited_hits(trace: Trace) -> list[int]:
    seen: set[int] = set()
    hits = []
    for request in range(len(trace)):
        blocks = trace.request_blocks(request).tolist()
        reads = blocks[: trace.read_blocks[request]]
        hits.append(([block in seen for block in reads] + [False]).index(False))
        if trace.writes[request]:
            seen.update(blocks)
    return hits


@pytest.mark.parametrize(("policy", "hits"), HAND_HITS.items())
def test_prefix_hits_of_the_hand_sized_trace(policy: str, hits: tuple[int, ...]) -> None:
    assert tuple(replay(HAND, parse_policy(policy), each).hits.prefix_blocks for each in (4, 5, 6, 8)) == hits


@settings(max_examples=examples(200), deadline=None)
@given(trace=prefix_traces(), capacity=st.integers(1, 32), mode=st.sampled_from(MODES))
def test_belady_finds_no_block_without_its_prefix(trace: Trace, capacity: int, mode: Mode) -> None:
    hits = replay(trace, parse_policy("belady"), capacity, mode=mode).hits
    assert hits.prefix_blocks == hits.object_blocks


@settings(max_examples=examples(200), deadline=None)
@given(trace=prefix_traces(), capacity=st.integers(1, 32))
def test_belady_is_a_bound_of_all_others(trace: Trace, capacity: int) -> None:
    bound = replay(trace, parse_policy("belady"), capacity).hits.prefix_blocks
    assert all(replay(trace, spec, capacity).hits.prefix_blocks <= bound for spec in WITHOUT_AGE)


@pytest.mark.parametrize("policy", ["lru", "leaf_lru", "belady"])
@settings(max_examples=examples(100), deadline=None)
@given(trace=prefix_traces())
def test_more_room_gives_no_fewer_hits(policy: str, trace: Trace) -> None:
    found = [replay(trace, parse_policy(policy), each).hits.prefix_blocks for each in range(1, 34)]
    assert found == sorted(found)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=examples(100), deadline=None)
@given(trace=prefix_traces(separate=True) | flat_traces(separate=True))
def test_room_for_all_blocks_gives_all_hits(mode: Mode, trace: Trace) -> None:
    expected = unlimited_hits(trace)
    for spec in WITHOUT_AGE:
        found = replay(trace, spec, max(1, trace.unique_blocks), mode=mode, keep_requests=True)
        assert found.request_hits is not None
        assert found.request_hits.tolist() == expected


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=examples(200), deadline=None)
@given(trace=prefix_traces(separate=True), capacity=st.integers(1, 32))
def test_leaf_lru_is_an_lru_that_touches_requests_from_the_tail(mode: Mode, trace: Trace, capacity: int) -> None:
    spec = parse_policy("leaf_lru")
    by_leaves = reference_replay(trace, spec, capacity, mode=mode, keep_requests=True)
    by_order = reference_replay(replace(trace, has_one_parent=False), spec, capacity, mode=mode, keep_requests=True)
    assert by_leaves.hits == by_order.hits
    np.testing.assert_array_equal(by_leaves.request_hits, by_order.request_hits)


@pytest.mark.parametrize("spec", [*WITHOUT_AGE, parse_policy("ttl:seconds=1e9")], ids=lambda spec: spec.label)
@settings(max_examples=examples(60), deadline=None)
@given(trace=prefix_traces(separate=True), capacity=st.integers(1, 32))
def test_tails_that_go_first_leave_no_block_without_its_prefix(spec: PolicySpec, trace: Trace, capacity: int) -> None:
    hits = reference_replay(trace, spec, capacity, mode="request", tail_first=True).hits
    assert hits.prefix_blocks == hits.object_blocks


@pytest.mark.parametrize(
    ("policy", "rate"),
    [("lru", 0.2784), ("lfu", 0.1948), ("fifo", 0.2481), ("leaf_lru", 0.2789), ("belady", 0.3664)],
)
def test_hit_rates_of_the_conversation_trace(policy: str, rate: float, real_trace: Callable[[str], Trace]) -> None:
    trace = real_trace("mooncake_conversation")
    found = replay(trace, parse_policy(policy), percent_of(trace.unique_blocks, Decimal(10)))
    assert round(found.block_hit_rate, 4) == rate


@pytest.mark.parametrize(
    ("name", "blocks", "tokens"),
    [
        ("mooncake_conversation", 0.3664, 0.3736),
        ("mooncake_synthetic", 0.6396, 0.6512),
        ("agentic_composed", 0.9573, 0.9570),
    ],
)
def test_every_policy_replays_the_real_traces(
    name: str, blocks: float, tokens: float, real_trace: Callable[[str], Trace]
) -> None:
    trace = real_trace(name)
    capacities = parse_capacities(DEFAULT_CAPACITIES, trace.unique_blocks)
    found = replay_all(trace, [Job(spec, capacity) for spec in WITHOUT_AGE for capacity in capacities])
    for replayed in found:
        assert replayed.hits.prefix_blocks <= replayed.hits.object_blocks
        if replayed.capacity_blocks == trace.unique_blocks:
            assert (round(replayed.block_hit_rate, 4), round(replayed.token_hit_rate, 4)) == (blocks, tokens)
