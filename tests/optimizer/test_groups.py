"""Instances that share a capacity: against a model over dictionaries, and against the replay of a single cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from group_model import POLICIES, ModelOfGroup
from group_traces import Step, steps, trace_of_steps
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, flat_traces, prefix_traces

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups import replay_group
from kvcm.optimizer.options import PolicySpec, parse_policy
from kvcm.optimizer.replay import reference_replay
from kvcm.optimizer.trace import QueryMode, Trace

MODES = st.sampled_from(("block", "request"))
ALL_POLICIES = (
    "lru", "leaf_lru", "lfu", "fifo", "sieve", "s3fifo", "s3fifo:warmup", "ttl:seconds=2", "ttl:seconds=4:fixed",
    "random_lru:sample=3:seed=7",
)  # fmt: skip
TRACES = prefix_traces() | prefix_traces(separate=True) | flat_traces() | flat_traces(separate=True)


@settings(max_examples=examples(800))
@given(requests=steps(), policy=st.sampled_from(POLICIES), capacity=st.integers(1, 20), mode=MODES)
def test_counts_equal_a_model_over_dictionaries(
    requests: list[Step], policy: str, capacity: int, mode: Literal["block", "request"]
) -> None:
    model = ModelOfGroup(policy, capacity, mode)
    expected = [(model.serve(step, place), model.used) for place, step in enumerate(requests)]
    found = replay_group(trace_of_steps(requests), PolicySpec(policy), capacity, mode=mode, keep_requests=True)
    assert list(zip(found.request_hits.tolist(), found.request_resident.tolist(), strict=True)) == expected
    assert found.hits.prefix_blocks == sum(hits for hits, _ in expected)
    assert found.hits.object_blocks == model.objects


@settings(max_examples=examples(400))
@given(trace=TRACES, policy=st.sampled_from(ALL_POLICIES), capacity=st.integers(1, 25), mode=MODES)
def test_one_instance_counts_like_the_replay_of_one_cache(
    trace: Trace, policy: str, capacity: int, mode: Literal["block", "request"]
) -> None:
    spec = parse_policy(policy)
    assume(trace.has_one_parent or policy != "leaf_lru" or mode == "request")  # there the two are one
    alone = reference_replay(trace, spec, capacity, mode=mode, keep_requests=True)
    grouped = replay_group(trace, spec, capacity, mode=mode, keep_requests=True)
    assert (grouped.hits, grouped.totals) == (alone.hits, alone.totals)
    assert np.array_equal(grouped.request_hits, alone.request_hits)
    assert np.array_equal(grouped.request_resident, alone.request_resident)


def test_belady_is_refused() -> None:
    with pytest.raises(OptionError, match=r"policy: belady is not replayed in groups; allowed: any other policy"):
        replay_group(HAND, PolicySpec("belady"), 5)


def hits(requests: list[Step], policy: str, capacity: int) -> list[int]:
    found = replay_group(trace_of_steps(requests), parse_policy(policy), capacity, keep_requests=True).request_hits
    answers: list[int] = found.tolist()
    return answers


def test_of_instances_that_are_equally_cold_the_first_gives() -> None:
    requests = [Step((1,), 0, seconds=0), Step((1,), 1, seconds=0), Step((2,), 1, seconds=0)]
    reads = [Step((1,), 0, writes=False), Step((1,), 1, writes=False)]
    assert hits(requests + reads, "lru", 2)[-2:] == [0, 1]


@pytest.mark.parametrize(("policy", "found"), [("ttl:seconds=4:fixed", 0), ("ttl:seconds=4", 1), ("ttl:seconds=1", 0)])
def test_an_age_counts_from_the_write_or_from_the_read(policy: str, found: int) -> None:
    requests = [Step((1,), seconds=0), Step((1,), seconds=3, writes=False), Step((1,), seconds=7, writes=False)]
    assert hits(requests, policy, 10)[-1] == found
    assert hits([*requests[:2], Step((2,), 1, seconds=7), requests[2]], policy, 10)[-1] == found


_WINDOWS = {1: 40, 2: 20, 3: 0, 0: 0, 9: 0}


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({}, 20),
        ({"mask": (True,)}, 10),
        ({"mask": (True, True, True)}, 10),
        ({"mode": QueryMode.BATCH}, 30),
        ({"mode": QueryMode.BATCH, "mask": (True,)}, 20),
        *(({"mode": QueryMode.WINDOW, "window": size}, found) for size, found in _WINDOWS.items()),
    ],
)
def test_tokens_are_those_that_need_not_be_computed(asked: dict[str, Any], tokens: int) -> None:
    trace = trace_of_steps([Step((1, 2, 4)), Step((1, 2, 3, 4, 5), writes=False, **asked)])
    assert replay_group(trace, PolicySpec("lru"), 10).hits.prefix_tokens == tokens
    named = replace(trace, specs={0: ("tp0",), 1: ("tp1",)})  # blocks are stored and read whole
    assert replay_group(named, PolicySpec("lru"), 10).hits.prefix_tokens == tokens
