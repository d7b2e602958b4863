"""The kernels find what the reference finds, whatever the trace, the policy, the mode and the capacity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import flat_traces, prefix_traces, trace_of

from kvcm.optimizer.policy_spec import PolicySpec, parse_policies
from kvcm.optimizer.replay import Mode, reference_replay, replay
from kvcm.optimizer.results import Hits
from kvcm.optimizer.trace import Trace

SPECS = (
    *parse_policies("lru,leaf_lru,belady,belady:forced,lfu,fifo,sieve,s3fifo,s3fifo:warmup,random_lru"),
    *parse_policies("random_lru:sample=1:seed=7,ttl:seconds=2,ttl:seconds=2:fixed,ttl:seconds=0.5"),
)
TRACES = prefix_traces() | prefix_traces(separate=True) | flat_traces() | flat_traces(separate=True)


@pytest.mark.parametrize("mode", ["block", "request"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
@settings(max_examples=examples(240), deadline=None)
@given(trace=TRACES, capacity=st.integers(1, 32))
def test_kernels_find_what_the_reference_finds(spec: PolicySpec, mode: Mode, trace: Trace, capacity: int) -> None:
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
