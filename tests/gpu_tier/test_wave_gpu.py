"""RetroInfer's block cache decided on the device: what attention reads, and what is cached where."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
from cluster_rig import GEOMETRY, ClusterRig
from execution_reader import rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from gpu_tier.index.wave_segment import WaveSegment
from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.manager.wave_buffer import WaveBuffer
from gpu_tier.manager.wave_gpu import WaveGpuBuffer, WaveGpuCounters
from gpu_tier.types import Selection, Source, Unit


def gpu_policy(rig: ClusterRig) -> WaveGpuBuffer:
    return WaveGpuBuffer(
        rig.geometry, rig.settings, rig.store, rig.arena, rig.execution, rig, rig.runtime,
        max_requests=rig.max_requests, max_tokens=rig.max_tokens, total_tokens=rig.max_requests * rig.max_tokens,
        max_clusters=rig.width, debug_checks=True,
    )  # fmt: skip


def with_triton(rig: ClusterRig) -> WaveGpuBuffer:
    return WaveGpuBuffer(
        rig.geometry, rig.settings, rig.store, rig.arena, rig.execution, rig, rig.runtime,
        max_requests=2, max_tokens=90, total_tokens=180, max_clusters=rig.width, kernels="triton",
    )  # fmt: skip


def rig_of(seed: int = 0, **changes: object) -> tuple[ClusterRig, WaveGpuBuffer]:
    rig = ClusterRig(gpu_policy, ClusterRig.settings_of(**{"control": "gpu", **changes}), seed)
    assert isinstance(rig.policy, WaveGpuBuffer)
    return rig, rig.policy


def blocks_of(rig: ClusterRig, request: int, layer: int, head: int) -> list[list[int]]:
    """Return the tokens of each block, by its number."""
    size = rig.store.block_tokens
    clusters = rig.requests[request].clusters.get((layer, head), [])
    return [cluster[i : i + size] for cluster in clusters for i in range(0, len(cluster), size)]


def check_cache(rig: ClusterRig, policy: WaveGpuBuffer, layer: int) -> None:
    """Check that each place holds the bytes of its block, and that places lie in the request's buffer."""
    arena = RowPool(rig.arena.data, rig.arena.addressing, layer)
    size = rig.store.block_tokens
    for request, state in rig.requests.items():
        held = policy.cached_blocks(GEOMETRY.start_layer + layer, request)
        slots = rig.buffers.buffer(request).items[rig.ring.capacity :].long()
        first = int((slots % policy._piece == 0).nonzero()[0])
        for head in range(GEOMETRY.num_kv_heads):
            blocks = blocks_of(rig, request, layer, head)
            for place, block in enumerate(held[head].tolist()):
                if block < 0:
                    continue
                where = slots[first + place * size :][: len(blocks[block])]
                expected = torch.tensor([[state.seed, layer, head, token] for token in blocks[block]]).float()
                assert torch.equal(rows_of(arena, 1, where, head), expected)
                assert torch.equal(rows_of(arena, 0, where, head), -expected)


@dataclass
class Case:
    seed: int
    block_bytes: int
    cache_ratio: float


cases = st.builds(
    Case, st.integers(0, 1 << 30), st.sampled_from([16, 32, 48, 64, 128]), st.sampled_from([0, 0.05, 0.5, 1])
)


@settings(max_examples=examples(120), deadline=None)
@given(cases)
def test_what_attention_reads_and_what_is_cached(case: Case) -> None:
    """Unequal lengths, clusters of all sizes, updates, padding, rows that do not select, requests that come and go."""
    rng = Random(case.seed)
    rig, policy = rig_of(case.seed, block_bytes=case.block_bytes, cache_ratio=case.cache_ratio)
    for step in range(8):
        rig.come_and_go(rng, step)
        requests = rng.sample(sorted(rig.requests), rng.randint(0, len(rig.requests)))
        if not requests:
            continue
        rig.decode(requests)
        batch = rig.batch(requests, rng.randint(0, 2))
        sparse = torch.tensor([rng.random() < 0.9 for _ in range(batch.rows)])
        for layer in range(GEOMETRY.num_layers):
            picked = rig.pick(requests, layer)
            for row in range(len(requests)):
                if not sparse[row]:
                    picked[row] = [[] for _ in picked[row]]
            rig.step(batch, layer, picked, sparse, commit=rng.random() < 0.95)
            if layer not in policy._admissions:
                check_cache(rig, policy, layer)
    for request in list(rig.requests):
        rig.release(request)
    assert rig.store.allocator.in_use == policy._tables.pool.allocator.in_use == 0


def test_what_was_selected_is_read_on_the_device_the_next_time() -> None:
    rig, policy = rig_of()
    rig.admit(0, 9, 80)
    picked = [[[0, 5, 3], [7]]]
    kinds = []
    for _ in range(2):
        plan = rig.step(rig.batch([0]), 0, picked)
        assert plan.execution is not None
        kinds.append({int(kind) for kind in plan.execution.runs.kind.unique() if kind > 0})
    assert kinds == [{Source.HOST}, {Source.CACHE}]
    counters = policy.counters
    blocks = sum(-(-len(rig.requests[0].clusters[0, h][c]) // 2) for h, row in enumerate(picked[0]) for c in row)
    tokens = sum(len(rig.requests[0].clusters[0, h][c]) for h, row in enumerate(picked[0]) for c in row)
    assert counters == WaveGpuCounters(2 * blocks, blocks, 2 * tokens, tokens, blocks, 0)
    assert counters.hit_rate == 0.5


def test_the_kernels_of_a_gpu_do_the_same() -> None:
    rigs = [
        ClusterRig(make, ClusterRig.settings_of(control="gpu", cache_ratio=0), 4) for make in (gpu_policy, with_triton)
    ]
    for rig in rigs:
        rig.admit(0, 9, 70)
        rig.admit(1, 8, 40)
        for _ in range(4):
            rig.decode([0, 1])
            rig.step(rig.batch([1, 0], 1), 1, rig.pick([1, 0], 1))
            assert isinstance(rig.policy, WaveGpuBuffer)
            check_cache(rig, rig.policy, 1)
    counters = [rig.policy.counters for rig in rigs if isinstance(rig.policy, WaveGpuBuffer)]
    assert counters[0] == counters[1]
    assert counters[0].block_hits > 0
    assert all(torch.equal(*lines) for lines in zip(rigs[0].gathered, rigs[1].gathered, strict=True))


def test_what_is_given_up_was_used_longest_ago() -> None:
    rig, policy = rig_of(cache_ratio=0)
    rig.admit(0, 9, 150)
    clusters, numbers = rig.requests[0].clusters[0, 0], numbered(rig, 0, 0)
    used: list[int] = []  # blocks, those used longest ago first
    for cluster in (c for c in range(len(clusters)) if len(clusters[0]) + len(clusters[c]) <= rig.most_retrieved):
        picked = list(dict.fromkeys([0, cluster]))
        rig.step(rig.batch([0]), 0, [[picked, []]])
        # What was there already is hotter than what comes: cluster 0 is always there.
        touched = [block for c in reversed(picked) for block in numbers[c]]
        used = [block for block in used if block not in touched] + touched
        held = {block for block in policy.cached_blocks(2, 0)[0].tolist() if block >= 0}
        assert held == set(used[-policy._capacity :])
    assert policy.counters.evictions > 0


def numbered(rig: ClusterRig, layer: int, head: int) -> list[list[int]]:
    """Return the numbers of each cluster's blocks."""
    counts = [-(-len(cluster) // rig.store.block_tokens) for cluster in rig.requests[0].clusters[layer, head]]
    return [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]


def test_a_step_that_ended_before_its_commit_leaves_no_wrong_blocks() -> None:
    rig, policy = rig_of()
    rig.admit(0, 9, 80)
    rig.admit(1, 8, 80)
    picked = [[[0, 5, 3], [7]], [[1], [2]]]
    rig.step(rig.batch([0, 1]), 0, picked, commit=False)
    rig.release(1)
    rig.step(rig.batch([0]), 0, picked[:1])  # reads everything anew
    check_cache(rig, policy, 0)


def test_the_cache_has_room_for_whatever_is_selected() -> None:
    """The widest selection of clusters of a single token each, with a cache of nothing."""
    rig, policy = rig_of(cache_ratio=0)
    assert policy._capacity >= rig.width
    assert policy.cache_slots(10) == policy.cache_slots(160) >= policy._capacity * rig.store.block_tokens


def test_segments_come_in_order() -> None:
    rig, policy = rig_of()
    rig.admit(0, 9, 40)
    segment = WaveSegment(35, 99, torch.ones(2, 1, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(StateError, match="begins at cluster 99"):
        policy.store(2, 0, segment)


def test_a_full_store_takes_nothing() -> None:
    rig, policy = rig_of()
    rig.admit(0, 9, 40)
    rig.store.allocator.alloc(rig.store.allocator.available)
    with pytest.raises(PoolExhaustedError, match="host_bytes"):
        policy.hold(0, 150)
    rig.step(rig.batch([0]), 0, [[[0], [1]]])


def test_selections_of_other_kinds_are_refused() -> None:
    rig, policy = rig_of()
    rig.admit(0, 9, 40)
    batch, mask = rig.batch([0]), torch.tensor([True])
    good = rig.selection(batch, [[[0], [0]]], mask)
    for bad in (
        Selection(Unit.CLUSTER, 0, good.indices, good.lengths),
        Selection(Unit.TOKEN, 1, good.indices, good.lengths, steady=good.steady),
    ):
        with pytest.raises(ConfigError, match="clusters beside a steady zone"):
            policy.resolve(2, batch, bad, mask)


def test_a_row_that_was_released_leaves_nothing() -> None:
    rig, policy = rig_of()
    rig.admit(0, 9, 80)
    rig.step(rig.batch([0]), 1, [[[0, 1, 2], [3]]])
    rig.release(0)
    policy.release(0)
    assert (policy.cached_blocks(3, 0) == -1).all()
    rig.admit(0, 10, 50)
    rig.step(rig.batch([0]), 1, [[[0, 1, 2], [3]]])
    assert policy.counters.block_hits == 0


def cpu_policy(rig: ClusterRig) -> WaveBuffer:
    return WaveBuffer(
        rig.geometry, rig.settings, rig.store, rig.arena, rig.execution, rig, rig.runtime,
        max_requests=rig.max_requests,
    )  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(cases)
def test_attention_reads_the_same_bytes_with_the_cache_on_the_cpu(case: Case) -> None:
    histories = []
    for control, make in (("gpu", gpu_policy), ("cpu", cpu_policy)):
        changes = {"block_bytes": case.block_bytes, "cache_ratio": case.cache_ratio}
        rig = ClusterRig(make, ClusterRig.settings_of(control=control, **changes), case.seed)
        rng, lines = Random(case.seed), []
        for step in range(4):
            rig.come_and_go(rng, step)
            requests = sorted(rig.requests)
            rig.decode(requests)
            batch = rig.batch(requests, 1)
            for layer in range(GEOMETRY.num_layers):
                rig.step(batch, layer, rig.pick(requests, layer))
                lines += rig.gathered
        histories.append(lines)
        if isinstance(rig.policy, WaveBuffer):
            rig.policy.close()
    assert len(histories[0]) == len(histories[1])
    assert all(torch.equal(*lines) for lines in zip(*histories, strict=True))
