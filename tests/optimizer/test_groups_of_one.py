"""One instance in one group counts what the replay of a single cache counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, flat_traces, prefix_traces

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups import GroupLayout, InstanceLayout, QuotaGroup, SpecLayout, one_group, replay_groups
from kvcm.optimizer.policy_spec import PolicySpec, parse_policy
from kvcm.optimizer.replay import reference_replay, replay
from kvcm.optimizer.trace import Trace

POLICIES = (
    "lru", "leaf_lru", "lfu", "fifo", "sieve", "s3fifo", "s3fifo:warmup", "ttl:seconds=2", "ttl:seconds=4:fixed",
    "random_lru:sample=3:seed=7",
)  # fmt: skip
TRACES = prefix_traces() | prefix_traces(separate=True) | flat_traces() | flat_traces(separate=True)


@settings(max_examples=examples(600))
@given(
    trace=TRACES,
    policy=st.sampled_from(POLICIES),
    capacity=st.integers(1, 25),
    mode=st.sampled_from(("block", "request")),
)
def test_counts_what_the_replay_of_one_cache_counts(
    trace: Trace, policy: str, capacity: int, mode: Literal["block", "request"]
) -> None:
    spec = parse_policy(policy)
    assume(trace.has_one_parent or policy != "leaf_lru" or mode == "request")  # there the two are one
    alone = reference_replay(trace, spec, capacity, mode=mode, keep_requests=True)
    grouped = replay_groups(trace, one_group(trace, spec, capacity, mode=mode), keep_requests=True)
    assert grouped.hits == alone.hits
    assert grouped.instances[0].totals == alone.totals
    assert grouped.request_hits is not None
    assert alone.request_hits is not None
    assert alone.request_resident is not None
    assert np.array_equal(np.maximum(grouped.request_hits, 0), alone.request_hits)
    assert np.array_equal(grouped.used[:, 0], alone.request_resident)


@settings(max_examples=examples(200))
@given(
    trace=prefix_traces(),
    policy=st.sampled_from(("fifo", "lfu", "sieve", "ttl:seconds=4:fixed")),
    capacity=st.integers(1, 25),
)
def test_bytes_are_blocks_of_one_size(trace: Trace, policy: str, capacity: int) -> None:
    spec = parse_policy(policy)
    instance = InstanceLayout("instance", spec, (SpecLayout("kv", 70),))
    layout = GroupLayout((QuotaGroup("g", capacity * 70 + 69, (instance,), unit="bytes"),))
    in_bytes = replay_groups(trace, layout)
    in_blocks = replay_groups(trace, one_group(trace, spec, capacity))
    assert in_bytes.hits == in_blocks.hits
    assert np.array_equal(in_bytes.used, 70 * in_blocks.used)
    assert np.array_equal(in_bytes.evicted, in_blocks.evicted)


def test_the_hand_sized_trace() -> None:
    grouped = replay_groups(HAND, one_group(HAND, PolicySpec("leaf_lru"), 5))
    assert grouped.hits == reference_replay(HAND, PolicySpec("leaf_lru"), 5).hits
    assert grouped.of("instance").blocks == 5
    assert grouped.instances[0].written_blocks == 5 + grouped.instances[0].evicted_blocks
    assert grouped.times_us.tolist() == HAND.times_us.tolist()
    assert replay_groups(HAND, one_group(HAND, PolicySpec("lru"), 5), looks=3).times_us.tolist() == [2e6, 9e6, 12e6]


def test_belady_is_refused() -> None:
    with pytest.raises(OptionError, match=r"policy: belady is not replayed in groups; allowed: any other policy"):
        replay_groups(HAND, one_group(HAND, PolicySpec("belady"), 5))


@pytest.mark.parametrize("policy", ["lru", "leaf_lru", "sieve", "s3fifo"])
def test_a_real_trace(policy: str, real_trace: Callable[[str], Trace]) -> None:
    trace = real_trace("mooncake_synthetic")
    spec = PolicySpec(policy)
    assert replay_groups(trace, one_group(trace, spec, 4000)).hits == replay(trace, spec, 4000).hits
