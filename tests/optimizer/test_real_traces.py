"""Real traces: counts that others worked out.

The counts of `exact_counts.json` are, by trace, policy and capacity: prefix hits in blocks and in tokens, object hits,
and requests that were hit in full. They were counted in plain Python, with ordered dictionaries, linked lists and heaps
of the standard library. libcachesim knows objects, not prefixes, so hits of objects are compared; its Belady inserts
what it misses, and its S3-FIFO fills main while it warms up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from libcachesim import S3FIFO, Belady, Request

from kvcm.optimizer.curves import CURVES
from kvcm.optimizer.options import PolicySpec, parse_policy
from kvcm.optimizer.pooling import Engines, Topology, compare_pooling
from kvcm.optimizer.replay import Job, replay, replay_all
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
def test_replays_count_like_another_program(name: str, real_trace: Callable[[str], Trace]) -> None:
    exact = EXACT[name]
    jobs = [Job(PolicySpec(policy), int(capacity)) for policy in exact for capacity in exact[policy]]
    found: dict[str, dict[str, Counts]] = {policy: {} for policy in exact}
    for done in replay_all(real_trace(name), jobs, workers=2):
        found[done.policy][str(done.capacity_blocks)] = counts_of(done)
    assert found == exact


@pytest.mark.parametrize("policy", CURVES)
@pytest.mark.parametrize("name", EXACT)
def test_curves_count_like_another_program(name: str, policy: str, real_trace: Callable[[str], Trace]) -> None:
    curve, exact = CURVES[policy](real_trace(name)), EXACT[name][policy]
    assert {capacity: counts_of(curve.at(int(capacity))) for capacity in exact} == exact


CACHES = {"s3fifo:warmup": S3FIFO, "belady:forced": Belady}  # others are in `exact_counts.json`
NEVER = (1 << 63) - 1
POWER_OF_TABLE = 18


def next_accesses(blocks: list[int]) -> list[int]:
    ahead: dict[int, int] = {}
    found = []
    for position in range(len(blocks) - 1, -1, -1):
        found.append(ahead.get(blocks[position], NEVER))
        ahead[blocks[position]] = position
    return found[::-1]


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
@pytest.mark.parametrize("policy", CACHES)
def test_hits_of_objects_are_those_of_libcachesim(name: str, policy: str, real_trace: Callable[[str], Trace]) -> None:
    trace = real_trace(name)
    blocks = trace.blocks.tolist()
    coming = next_accesses(blocks) if policy == "belady:forced" else [NEVER] * len(blocks)
    request = Request()
    for capacity in (100, trace.unique_blocks // 10, trace.unique_blocks // 3):
        cache = CACHES[policy](capacity, hashpower=POWER_OF_TABLE)
        hits = 0
        for block, following in zip(blocks, coming, strict=True):
            request.obj_id, request.next_access_vtime = block + 1, following
            hits += cache.get(request)
        assert replay(trace, parse_policy(policy), capacity).hits.object_blocks == hits


@pytest.mark.parametrize(
    ("name", "network"), [("agentic_composed", [65, 65, 30, 15]), ("mooncake_conversation", [25, 25, 24, 9])]
)
def test_routing_by_scores_moves_hits_from_the_network_into_engines(
    name: str, network: list[int], real_trace: Callable[[str], Trace]
) -> None:
    trace = real_trace(name)
    engines = Engines(8, trace.unique_blocks // 40, 32_200.0, pool_blocks=trace.unique_blocks // 5)
    rows = compare_pooling(trace, engines, topologies=[Topology.BOTH], workers=2).rows
    assert [row.routing.name for row in rows] == ["round_robin", "least_loaded", "consistent_hash", "kvcm"]
    assert [round(100 * row.pool_share) for row in rows] == network, "as docs/optimizer.md says"
    assert rows[-1].token_hit_rate >= max(row.token_hit_rate for row in rows[:-1])
    assert rows[-1].mean_wait_seconds == min(row.mean_wait_seconds for row in rows)
