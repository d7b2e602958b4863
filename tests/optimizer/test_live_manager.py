"""Rows of mode manager against a manager's own core: the same trace, every policy, the same hits."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from manager_core import Core
from traces import HAND, HAND_HITS, trace_of
from typer.testing import CliRunner

from kvcm.cli import app
from kvcm.model.groups import EvictionPolicy
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.live.traces import group_holding
from kvcm.optimizer.options import POLICY_NAMES, parse_policies, parse_policy
from kvcm.optimizer.replay.policies import policy_of
from kvcm.optimizer.results import Replay
from kvcm.optimizer.study import StudyMode, StudyOptions, replays_of
from kvcm.optimizer.trace import Trace
from kvcm.reclaim.policies import POLICIES

BLOCK_BYTES = 100
INSTANCE = "trace-a"
LABELS = (*(name for name in POLICIES if name != "ttl"), "ttl:seconds=40", "ttl:seconds=40:fixed")


def conversations(seed: int, requests: int) -> Trace:
    """Return turns of conversations that grow under a few long prompts, and documents that are read once.

    At the first half of the trace another prompt is popular than at the second: a policy that ages notices that.
    """
    draw = random.Random(seed)
    prompts = [[f"prompt {number}", *(f"prompt {number} {step}" for step in range(12))] for number in range(4)]
    talks: list[list[str]] = []
    ids, times, at = [], [], 1000.0
    for number in range(requests):
        at += draw.choice([0.0, 0.05, 0.4, 1.7])
        times.append(round(at, 3))
        if draw.random() < 0.3:
            ids.append([f"document {number} {step}" for step in range(draw.randint(3, 30))])
            continue
        popular = 2 * number // requests
        if len(talks) < 5 or draw.random() < 0.2:
            talks.append(list(prompts[draw.choice([popular, popular, 2, 3])]))
        talk = draw.choice(talks[-12:])
        talk += [f"{talk[-1]}/{number}.{step}" for step in range(draw.randint(1, 6))]
        ids.append(list(talk))
    return trace_of(ids, times_seconds=times)


def rows_by_policy(trace: Trace, capacity: int, mode: StudyMode, policies: str = ",".join(LABELS)) -> dict[str, Replay]:
    options = StudyOptions(policies=parse_policies(policies), capacities=str(capacity), mode=mode)
    return {row.policy: row for row in replays_of(trace, options, lambda *_: None)}


async def hits_of_manager(trace: Trace, label: str, capacity: int) -> int:
    """Replay a trace through a manager, whose clock is that of the trace."""
    spec = parse_policy(label)
    age = int(spec.ttl_seconds) if spec.name == "ttl" else 0
    policy = EvictionPolicy(spec.name, age, ttl_sliding=bool(age) and spec.ttl_sliding)
    group = replace(group_holding(capacity, BLOCK_BYTES, policy), storage_candidates=("dummy",), max_instance_count=1)
    core = Core(group, {INSTANCE: BLOCK_BYTES})
    hits = 0
    for request in range(len(trace)):
        keys = [block + 1 for block in trace.request_blocks(request).tolist()]
        await core.advance(int(trace.times_us[request]) / 1e6)
        hits += await core.read(INSTANCE, keys)
        await core.write(INSTANCE, keys, failing=0)
    assert len(await core.rig.records(INSTANCE)) <= capacity
    return hits


def hits_of(rows: Mapping[str, Replay]) -> dict[str, int]:
    return {label: row.hits.prefix_blocks for label, row in rows.items()}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return conversations(seed=1, requests=400)


@pytest.mark.parametrize("label", LABELS)
def test_a_live_manager_finds_what_the_row_of_its_policy_says(trace: Trace, label: str) -> None:
    capacity = trace.unique_blocks // 10
    row = rows_by_policy(trace, capacity, "manager", label)[label]
    assert asyncio.run(hits_of_manager(trace, label, capacity)) == row.hits.prefix_blocks > 0


def test_every_policy_of_a_manager_has_a_row_of_its_own(trace: Trace) -> None:
    assert set(POLICIES) <= set(POLICY_NAMES)
    found = hits_of(rows_by_policy(trace, trace.unique_blocks // 10, "manager"))
    assert found["lfu"] < 0.9 * found["lfu_aging"]  # so that a manager that ran the other one would be noticed
    assert len(set(found.values())) >= 6


@pytest.mark.parametrize("name", POLICIES)
def test_a_name_is_the_same_policy_in_every_mode_as_in_a_manager(name: str) -> None:
    """Modes block and request replay `policy_of`, or kernels that are proven equal to it."""
    draw = random.Random(3)
    simulated = policy_of(parse_policy(name), None, lambda _slot: True)
    live = POLICIES[name](lambda _slot: True, EvictionPolicy(name, ttl_sliding=True))
    for _ in range(5000):
        slot = int(draw.paretovariate(0.8)) % 300
        if slot in live:
            live.touch(slot)
            simulated.touch(slot)
            continue
        if len(live) == 60:
            victims = [next(policy.victims()) for policy in (live, simulated)]
            assert victims[0] == victims[1]
            live.remove(victims[0])
            simulated.remove(victims[1])
        live.insert(slot, slot)
        simulated.insert(slot, slot)


@pytest.mark.parametrize("name", ["agentic_composed", "mooncake_synthetic", "mooncake_conversation"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_on_real_traces(real_trace: Callable[[str], Trace], name: str, policy: str) -> None:
    whole = real_trace(name)
    requests = 12 if name == "agentic_composed" else 150
    ids = [whole.request_blocks(request).tolist() for request in range(requests)]
    times = [1000 + int(whole.times_us[request]) / 1e6 for request in range(requests)]
    trace = trace_of(ids, times_seconds=times)
    capacity = trace.unique_blocks // 10
    row = rows_by_policy(trace, capacity, "manager", policy)[policy]
    assert asyncio.run(hits_of_manager(trace, policy, capacity)) == row.hits.prefix_blocks > 0


def test_modes_block_and_request_count_as_they_did() -> None:
    """Their rows are those of caches in the literature; mode manager evicts the tail of a chain before its head, so
    that a block that is resident is one that is found."""
    for capacity, place in ((4, 0), (5, 1), (6, 2), (8, 3)):
        rows = hits_of(rows_by_policy(HAND, capacity, "block", "lru,fifo,lfu,sieve,leaf_lru"))
        assert rows == {label: HAND_HITS[label][place] for label in rows}
    for row in rows_by_policy(HAND, 5, "manager").values():
        assert row.hits.object_blocks == row.hits.prefix_blocks


def test_in_a_manager_lru_is_leaf_lru_where_nothing_is_read_within_a_second(trace: Trace) -> None:
    """What follows a block goes before it, and was not read after it."""
    times = [1000.0 + 2 * request for request in range(len(trace))]
    slow = trace_of([trace.request_blocks(request).tolist() for request in range(len(trace))], times_seconds=times)
    capacity = slow.unique_blocks // 10
    rows = hits_of(rows_by_policy(slow, capacity, "manager", "lru,leaf_lru"))
    assert rows["lru"] == rows["leaf_lru"]


def test_policies_that_no_manager_has_are_replayed_as_in_mode_request(trace: Trace) -> None:
    policies = "belady,random_lru"
    rows = rows_by_policy(trace, 100, "manager", policies)
    assert hits_of(rows) == hits_of(rows_by_policy(trace, 100, "request", policies))


@pytest.mark.parametrize("policy", ["s3fifo:warmup", "ttl:seconds=0.5"])
def test_options_that_no_manager_has_are_refused(trace: Trace, policy: str) -> None:
    with pytest.raises(OptionError, match="allowed with --mode manager"):
        rows_by_policy(trace, 100, "manager", policy)


def test_the_command_writes_these_rows(tmp_path: Path, trace: Trace) -> None:
    path, rows_path = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    lines = [
        json.dumps({"timestamp": int(trace.times_us[number]) // 1000, "input_length": 512 * len(ids),
                    "output_length": 1, "hash_ids": ids})
        for number in range(len(trace))
        for ids in [trace.request_blocks(number).tolist()]
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    arguments = ["--mode", "manager", "--capacities", "10%", "--policies", "lfu,lfu_aging"]
    done = CliRunner().invoke(app, ["optimize", str(path), *arguments, "--json", str(rows_path)])
    assert done.exit_code == 0, done.output
    rows = {row["policy"]: row["prefix_hit_blocks"] for row in json.loads(rows_path.read_text())}
    assert rows == hits_of(rows_by_policy(trace, trace.unique_blocks // 10, "manager", "lfu,lfu_aging"))
