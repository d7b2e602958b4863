"""Replays: figures worked out by hand, identities, jobs, and kernels against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, HAND_HITS, flat_traces, prefix_traces, trace_of

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import POLICY_NAMES, PolicySpec, parse_policies, parse_policy
from kvcm.optimizer.replay import Job, Mode, reference_replay, replay, replay_all
from kvcm.optimizer.results import Hits
from kvcm.optimizer.trace import QueryMode, Trace


@pytest.mark.parametrize("run", [replay, reference_replay])
@pytest.mark.parametrize(("policy", "hits"), HAND_HITS.items())
def test_prefix_hits_of_the_hand_sized_trace(run, policy: str, hits: tuple[int, ...]) -> None:
    spec = parse_policy(policy)
    assert tuple(run(HAND, spec, each).hits.prefix_blocks for each in (4, 5, 6, 8)) == hits


WITHOUT_AGE = parse_policies(
    "lru,leaf_lru,belady,belady:forced,lfu,lfu_aging,fifo,sieve,s3fifo,s3fifo:warmup,random_lru"
)
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


@settings(max_examples=examples(200), deadline=None)
@given(trace=prefix_traces(), capacity=st.integers(1, 32))
def test_belady_is_a_bound_of_all_others(trace: Trace, capacity: int) -> None:
    bound = replay(trace, parse_policy("belady"), capacity).hits.prefix_blocks
    assert all(replay(trace, spec, capacity).hits.prefix_blocks <= bound for spec in WITHOUT_AGE)


@pytest.mark.parametrize("policy", ["lru", "leaf_lru", "belady"])
@settings(max_examples=examples(100), deadline=None)
@given(trace=prefix_traces())
def test_more_space_gives_no_fewer_hits(policy: str, trace: Trace) -> None:
    found = [replay(trace, parse_policy(policy), each).hits.prefix_blocks for each in range(1, 34)]
    assert found == sorted(found)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=examples(100), deadline=None)
@given(trace=prefix_traces(separate=True) | flat_traces(separate=True))
def test_space_for_all_blocks_gives_all_hits(mode: Mode, trace: Trace) -> None:
    expected = unlimited_hits(trace)
    for spec in WITHOUT_AGE:
        found = replay(trace, spec, max(1, trace.unique_blocks), mode=mode, keep_requests=True)
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


LRU = parse_policy("lru")


def test_answers_come_in_the_order_of_the_jobs_however_many_threads_there_are() -> None:
    jobs = [Job(spec, capacity) for capacity in (8, 4, 6) for spec in parse_policies("all")]
    steps: list[tuple[int, int]] = []
    found = replay_all(HAND, jobs, workers=3, progress=lambda done, total: steps.append((done, total)))
    assert [(each.policy, each.capacity_blocks) for each in found] == [(j.spec.label, j.capacity_blocks) for j in jobs]
    assert [each.hits for each in found] == [replay(HAND, job.spec, job.capacity_blocks).hits for job in jobs]
    assert steps == [(done, len(jobs)) for done in range(1, len(jobs) + 1)]
    assert replay_all(HAND, []) == []


@pytest.mark.parametrize("run", [replay, reference_replay])
def test_invalid_replays_are_refused(run) -> None:
    with pytest.raises(OptionError, match="capacity_blocks: 0 is out of range; allowed: 1 or more"):
        run(HAND, LRU, 0)
    with pytest.raises(OptionError, match="mode: 'both' is none; allowed: block, request"):
        run(HAND, LRU, 4, mode="both")
    for peculiar in (
        replace(HAND, modes={0: QueryMode.BATCH}),
        replace(HAND, masks={0: np.ones(4, np.bool_)}),
        replace(HAND, specs={0: ("full",)}),
    ):
        with pytest.raises(OptionError, match=r"'test' has requests with .*kvcm\.optimizer\.groups"):
            run(peculiar, LRU, 4)


def test_one_job_that_cannot_be_done_keeps_all_from_beginning() -> None:
    steps: list[int] = []
    with pytest.raises(OptionError, match="capacity_blocks"):
        replay_all(HAND, [Job(LRU, 4), Job(LRU, -1)], progress=lambda done, total: steps.append(done))
    assert not steps


def test_tokens_are_counted_in_the_blocks_of_each_instance_and_no_more_than_the_prompt_has() -> None:
    trace = replace(
        trace_of([[1, 2], [3, 4], [1, 2], [3, 4], [3, 4]], input_tokens=[20, 8, 19, 8, 7]),
        instances=np.array([0, 1, 0, 1, 1], np.int32),
        instance_names=("a", "b"),
        instance_block_tokens=(10, 4),
        block_tokens=0,
    )
    hits = replay(trace, LRU, 4).hits
    assert (hits.prefix_blocks, hits.prefix_tokens, hits.full_requests) == (6, 19 + 8 + 7, 3)


def test_prompts_too_short_for_a_block_count_in_the_token_total() -> None:
    trace = trace_of([[1], [], [1]], input_tokens=[10, 7, 10])
    found = replay(trace, LRU, 1)
    assert (found.totals.requests, found.totals.blocks, found.totals.tokens) == (2, 2, 27)
    assert found.token_hit_rate == 10 / 27
    wrote = trace_of([[1], [1]], input_tokens=[10, 10], read_blocks=[0, 1])
    assert wrote.totals.tokens == 10


SPECS = (
    *parse_policies("lru,leaf_lru,belady,belady:forced,lfu,lfu_aging,fifo,sieve,s3fifo,s3fifo:warmup,random_lru"),
    *parse_policies("random_lru:sample=1:seed=7,ttl:seconds=2,ttl:seconds=2:fixed,ttl:seconds=0.5"),
)
TRACES = prefix_traces() | prefix_traces(separate=True) | flat_traces() | flat_traces(separate=True)


def test_every_policy_is_compared_with_the_reference() -> None:
    assert {spec.name for spec in SPECS} == set(POLICY_NAMES)


@pytest.mark.parametrize("mode", ["block", "request"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
@settings(max_examples=examples(240), deadline=None)
@given(trace=TRACES, capacity=st.integers(1, 32))
def test_kernels_equal_the_reference(spec: PolicySpec, mode: Mode, trace: Trace, capacity: int) -> None:
    expected = reference_replay(trace, spec, capacity, mode=mode, keep_requests=True)
    found = replay(trace, spec, capacity, mode=mode, keep_requests=True)
    assert found.request_hits is not None
    assert found.request_resident is not None
    np.testing.assert_array_equal(found.request_hits, expected.request_hits)
    np.testing.assert_array_equal(found.request_resident, expected.request_resident)
    assert found.hits == expected.hits


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
def test_a_trace_without_requests_has_no_hits(spec: PolicySpec) -> None:
    found = replay(trace_of([]), spec, 3)
    assert found.hits == Hits(0, 0, 0, 0)
    assert found.block_hit_rate == found.token_hit_rate == 0.0
