"""What policies count on the real traces, against counts of a program that shares nothing with ours.

`exact_counts.json` has, by trace, policy and capacity: prefix hits in blocks and in tokens, object hits, and requests
that were hit in full. They were counted in plain Python, with ordered dictionaries, linked lists and heaps of the
standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcm.optimizer.curves import CURVES
from kvcm.optimizer.policy_spec import PolicySpec
from kvcm.optimizer.replay import Job, replay_all
from kvcm.optimizer.results import Replay
from kvcm.optimizer.trace import Trace

Counts = list[int]
EXACT: dict[str, dict[str, dict[str, Counts]]] = json.loads(
    (Path(__file__).parent / "exact_counts.json").read_text(encoding="utf-8")
)


def counts_of(replay: Replay) -> Counts:
    hits = replay.hits
    return [hits.prefix_blocks, hits.prefix_tokens, hits.object_blocks, hits.full_requests]


@pytest.mark.parametrize("name", EXACT)
def test_replays_count_what_another_program_counts(name: str, real_trace: Callable[[str], Trace]) -> None:
    exact = EXACT[name]
    jobs = [Job(PolicySpec(policy), int(capacity)) for policy in exact for capacity in exact[policy]]
    found: dict[str, dict[str, Counts]] = {policy: {} for policy in exact}
    for replay in replay_all(real_trace(name), jobs, workers=2):
        found[replay.policy][str(replay.capacity_blocks)] = counts_of(replay)
    assert found == exact


@pytest.mark.parametrize("policy", CURVES)
@pytest.mark.parametrize("name", EXACT)
def test_curves_count_what_another_program_counts(name: str, policy: str, real_trace: Callable[[str], Trace]) -> None:
    curve, exact = CURVES[policy](real_trace(name)), EXACT[name][policy]
    assert {capacity: counts_of(curve.at(int(capacity))) for capacity in exact} == exact
