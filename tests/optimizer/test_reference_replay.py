"""What the reference replay counts: figures that were worked out by hand, and what follows from the definitions."""

from __future__ import annotations

import pytest
from traces import HAND, HAND_HITS

from kvcm.optimizer.policy_spec import parse_policies, parse_policy
from kvcm.optimizer.replay import reference_replay
from kvcm.optimizer.results import Hits


@pytest.mark.parametrize(("policy", "hits"), HAND_HITS.items())
def test_prefix_hits_of_the_hand_sized_trace(policy: str, hits: tuple[int, ...]) -> None:
    spec = parse_policy(policy)
    assert tuple(reference_replay(HAND, spec, each).hits.prefix_blocks for each in (4, 5, 6, 8)) == hits


@pytest.mark.parametrize("spec", parse_policies("all"), ids=lambda spec: spec.label)
def test_a_cache_for_all_blocks_evicts_none(spec) -> None:
    found = reference_replay(HAND, spec, 8, keep_requests=True)
    assert found.hits == Hits(18, 20 + 35 + 28 + 30 + 20 + 35, 18, 4)
    assert found.request_hits.tolist() == [0, 2, 0, 4, 3, 3, 2, 4]
    assert found.request_resident.tolist() == [4, 5, 7, 7, 7, 8, 8, 8]
