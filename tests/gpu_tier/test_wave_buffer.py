"""RetroInfer's wave buffer under control of the CPU and of the GPU: blocks that attention reads, and cached blocks."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from block_rigs import GEOMETRY, ClusterRig, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.gpu_tier.config import CACHE_POLICIES
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError, StateError
from kvcm.gpu_tier.index.wave_index import WaveSegment
from kvcm.gpu_tier.kernels.operands import RowPool
from kvcm.gpu_tier.manager.wave_buffer import WaveBuffer, WaveCounters
from kvcm.gpu_tier.manager.wave_gpu import WaveGpuBuffer, WaveGpuCounters
from kvcm.gpu_tier.types import Selection, Source, Unit

CONTROLS = ("native", "reference")


def cpu_policy(rig: ClusterRig, control: str = "native") -> WaveBuffer:
    return WaveBuffer(
        rig.geometry, rig.settings, rig.store, rig.arena, rig.execution, rig, rig.runtime,
        max_requests=rig.max_requests, control=control,
    )  # fmt: skip


def rig_of(control: str, seed: int = 0, **changes: Any) -> tuple[ClusterRig, WaveBuffer]:
    small = {"cpu_threads": 3, "cache_ratio": 0.25}
    rig = ClusterRig(partial(cpu_policy, control=control), ClusterRig.settings_of(**{**small, **changes}), seed)
    assert isinstance(rig.policy, WaveBuffer)
    return rig, rig.policy


def cached(policy: WaveBuffer, layer: int, request: int, head: int) -> dict[int, list[int]]:
    """Return the cached clusters with the places of their blocks."""
    table = policy._tables[layer].table(request)
    size = policy._store.block_tokens
    found = {}
    for cluster in range(table.num_clusters):
        first, tokens = (int(number) for number in table.clusters[head, cluster])
        places = table.blocks[head, first : first - (-tokens // size)]["place"].tolist()
        assert all(place >= 0 for place in places) or all(place < 0 for place in places)
        if places and places[0] >= 0:
            found[cluster] = places
    residents = table.residents[head, : int(table.heads["residents"][head])].tolist()
    assert sorted(residents) == sorted(found)
    free = table.free[head, : int(table.heads["free"][head])].tolist()
    used = [place for places in found.values() for place in places]
    assert sorted(free + used) == list(range(table.capacity))
    return found


def check_rows(arena: RowPool, slots: torch.Tensor, head: int, numbers: list[list[int]]) -> None:
    expected = torch.tensor(numbers).float()
    assert torch.equal(rows_of(arena, 1, slots, head), expected)
    assert torch.equal(rows_of(arena, 0, slots, head), -expected)


def check_cache(rig: ClusterRig, policy: WaveBuffer, layer: int) -> None:
    """Check that each cached block holds the bytes of its tokens, and that the table has the place of each."""
    policy._wait_for(layer)
    arena, size = RowPool(rig.arena.data, rig.arena.addressing, layer), rig.store.block_tokens
    for request, state in rig.requests.items():
        slots = rig.buffers.buffer(request).items[rig.ring.capacity :].long()
        for head in range(GEOMETRY.num_kv_heads):
            for cluster, places in cached(policy, layer, request, head).items():
                tokens = state.clusters[layer, head][cluster]
                where = torch.cat([slots[place * size :][:size] for place in places])[: len(tokens)]
                check_rows(arena, where, head, [[state.seed, layer, head, token] for token in tokens])


SEEDS = st.integers(0, 1 << 30)


cases = st.fixed_dictionaries({
    "block_bytes": st.sampled_from([16, 32, 48, 128]), "cache_ratio": st.sampled_from([0, 0.05, 0.25, 1]),
    "policy": st.sampled_from(CACHE_POLICIES), "async_update": st.booleans(),
})  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS)
@settings(max_examples=examples(60), deadline=None)
@given(seed=SEEDS, changes=cases)
def test_attention_reads_and_caches_the_right_blocks(control: str, seed: int, changes: dict[str, Any]) -> None:
    """Unequal lengths, clusters of all sizes, updates, padding, rows that do not select, requests that come and go."""
    rig, policy = rig_of(control, seed, **changes)
    check_history(rig, seed, policy._updates, partial(check_cache, rig, policy))
    policy.close()


def check_history(rig: ClusterRig, seed: int, pending: Container[int], check: Callable[[int], None]) -> None:
    """Check what each step reads, and the cache of each layer whose admissions are not pending."""
    rng = Random(seed)
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
            if layer not in pending:
                check(layer)
    for request in list(rig.requests):
        rig.release(request)
    assert rig.store.allocator.in_use == 0


def played(control: str, seed: int, **changes: Any) -> tuple[WaveCounters, list[Any]]:
    """Return the counters after a fixed history, and the cached blocks; each step checks the blocks that it reads."""
    rig, policy = rig_of(control, seed, **changes)
    rng = Random(seed)
    for request, tokens in enumerate((90, 40, 17)):
        rig.admit(request, request, tokens)
    for _ in range(10):
        requests = rng.sample(range(3), rng.randint(1, 3))
        rig.decode(requests)
        for layer in range(GEOMETRY.num_layers):
            rig.step(rig.batch(requests, 1), layer, rig.pick(requests, layer))
    policy._wait_for_all()
    state = [cached(policy, layer, r, h) for layer in range(3) for r in range(3) for h in range(2)]
    counters = policy.counters
    policy.close()
    return counters, state


@settings(max_examples=examples(30), deadline=None)
@given(SEEDS, cases)
def test_both_controls_do_the_same_place_for_place(seed: int, changes: dict[str, Any]) -> None:
    assert played("native", seed, **changes) == played("reference", seed, **changes)


def test_a_larger_cache_has_more_hits_and_reads_less_of_the_host() -> None:
    none, small, whole = (played("native", 7, block_bytes=32, cache_ratio=ratio)[0] for ratio in (0, 0.05, 1))
    assert 0 == none.token_hits < small.token_hits < whole.token_hits
    assert none.host_bytes > small.host_bytes > whole.host_bytes


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("order", ["lru", "lfu", "fifo"])
def test_policies_give_up_what_they_say(control: str, order: str) -> None:
    """Against a plain model: one block for each cluster, places for four of them."""
    rig, policy = rig_of(control, 1, policy=order, cache_ratio=4 * 32 / 150, block_bytes=16 * 32)
    rig.most_retrieved = 1000
    rig.admit(0, 9, 150)
    clusters = rig.requests[0].clusters[0, 0]
    known = [c for c in range(len(clusters)) if 0 < len(clusters[c]) <= 4]
    capacity = policy._tables[0].table(0).capacity
    assert capacity == 4
    held: dict[int, tuple[int, int, int]] = {}  # cluster: (times, used, admitted)
    times: dict[int, int] = {}
    rng, now = Random(3), 0
    for _ in range(60):
        picked = rng.sample(known, rng.randint(1, 3))
        rig.step(rig.batch([0]), 0, [[picked, []]])
        for cluster in picked:
            now += 1
            times[cluster] = times.get(cluster, 0) + 1
            if cluster in held:
                held[cluster] = (times[cluster], now, held[cluster][2])
        for number, cluster in enumerate(picked):
            used = now - len(picked) + number + 1
            if cluster in held:
                continue
            if len(held) == capacity:
                key = {"lru": lambda c: held[c][1], "lfu": lambda c: held[c][:2], "fifo": lambda c: held[c][2]}[order]
                old = [c for c in held if c not in picked]
                del held[min(old, key=key)]
            held[cluster] = (times[cluster], used, used)
        policy._wait_for(0)
        assert set(cached(policy, 0, 0, 0)) == set(held)
    assert policy.counters.evictions > 10


@pytest.mark.parametrize("control", CONTROLS)
def test_a_request_that_ends_between_resolve_and_commit_gets_no_copies(control: str) -> None:
    rig, policy = rig_of(control, cache_ratio=1)
    for request in (0, 1):
        rig.admit(request, 9 - request, 80)
    batch, picked = rig.batch([0, 1]), [[[0, 5, 3], [7]], [[1], [2]]]
    plan = rig.step(batch, 0, picked, commit=False)
    rig.release(1)
    before = rig.arena.data.clone()
    policy.commit(GEOMETRY.start_layer, plan)
    check_cache(rig, policy, 0)
    assert not torch.equal(rig.arena.data, before)  # request 0 got its own
    rig.admit(1, 7, 50)
    rig.step(rig.batch([1, 0]), 0, [[[0], [0]], picked[0]])
    check_cache(rig, policy, 0)


def test_lines_with_many_runs_are_looked_up_again_with_wider_tables() -> None:
    rig, policy = rig_of("native", block_bytes=16, cache_ratio=0)
    rig.most_retrieved = 200
    rig.width = 40
    rig.execution.tokens_per_row = 1 << 20  # plans alone are looked at
    rig.admit(0, 9, 150)
    clusters = list(range(len(rig.requests[0].clusters[0, 0])))[::-1]
    batch, mask = rig.batch([0]), torch.tensor([True])
    plan = policy.resolve(2, batch, rig.selection(batch, [[clusters, clusters]], mask), mask)
    assert plan.execution is not None
    assert plan.execution.lens.tolist() == [[150, 150]]
    counted = plan.execution.runs
    inside = torch.arange(counted.tokens.shape[1]) < counted.count[:, None]
    assert (counted.tokens * inside).sum(1).tolist() == [150, 150]


def test_bad_steps_are_refused() -> None:
    rig, policy = rig_of("native")
    rig.admit(0, 9, 80)
    batch, mask = rig.batch([0]), torch.tensor([True])
    good = rig.selection(batch, [[[0], [0]]], mask)
    unknown = rig.selection(batch, [[[0], [999]]], mask)
    with pytest.raises(StateError, match="not known"):
        policy.resolve(2, batch, unknown, mask)
    rig.requests[5] = rig.requests[0]
    with pytest.raises(StateError, match="has no buffer"):
        policy.resolve(2, rig.batch([5]), good, mask)
    with pytest.raises(StateError, match="only grows"):
        policy.admit(0, rig.ring, rig.buffers.buffer(0).items[: rig.ring.capacity])


def test_closing_twice_does_nothing() -> None:
    rig, policy = rig_of("native")
    rig.admit(0, 9, 80)
    rig.step(rig.batch([0]), 0, [[[0], [1]]], commit=False)
    policy.close()
    policy.close()


def gpu_policy(rig: ClusterRig, kernels: str = "auto") -> WaveGpuBuffer:
    return WaveGpuBuffer(
        rig.geometry, rig.settings, rig.store, rig.arena, rig.execution, rig, rig.runtime,
        max_requests=rig.max_requests, max_tokens=rig.max_tokens, total_tokens=rig.max_requests * rig.max_tokens,
        max_clusters=rig.width, debug_checks=True, kernels=kernels,
    )  # fmt: skip


def gpu_rig(seed: int = 0, **changes: object) -> tuple[ClusterRig, WaveGpuBuffer]:
    rig = ClusterRig(gpu_policy, ClusterRig.settings_of(**{"control": "gpu", **changes}), seed)
    assert isinstance(rig.policy, WaveGpuBuffer)
    return rig, rig.policy


def blocks_of(rig: ClusterRig, request: int, layer: int, head: int) -> list[list[int]]:
    """Return the tokens of each block, by its number."""
    size = rig.store.block_tokens
    clusters = rig.requests[request].clusters.get((layer, head), [])
    return [cluster[i : i + size] for cluster in clusters for i in range(0, len(cluster), size)]


def check_gpu_cache(rig: ClusterRig, policy: WaveGpuBuffer, layer: int) -> None:
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
                check_rows(arena, where, head, [[state.seed, layer, head, token] for token in blocks[block]])


@settings(max_examples=examples(120), deadline=None)
@given(SEEDS, st.sampled_from([16, 32, 48, 64, 128]), st.sampled_from([0, 0.05, 0.5, 1]))
def test_attention_reads_and_caches_the_right_blocks_on_a_gpu(seed: int, block_bytes: int, cache_ratio: float) -> None:
    rig, policy = gpu_rig(seed, block_bytes=block_bytes, cache_ratio=cache_ratio)
    check_history(rig, seed, policy._admissions, partial(check_gpu_cache, rig, policy))
    assert policy._tables.pool.allocator.in_use == 0


def test_the_kernels_of_a_gpu_do_the_same() -> None:
    rigs = [
        ClusterRig(partial(gpu_policy, kernels=kernels), ClusterRig.settings_of(control="gpu", cache_ratio=0), 4)
        for kernels in ("auto", "triton")
    ]
    for rig in rigs:
        rig.admit(0, 9, 70)
        rig.admit(1, 8, 40)
        for _ in range(4):
            rig.decode([0, 1])
            rig.step(rig.batch([1, 0], 1), 1, rig.pick([1, 0], 1))
            assert isinstance(rig.policy, WaveGpuBuffer)
            check_gpu_cache(rig, rig.policy, 1)
    counters = [rig.policy.counters for rig in rigs if isinstance(rig.policy, WaveGpuBuffer)]
    assert counters[0] == counters[1]
    assert counters[0].block_hits > 0
    assert all(torch.equal(*lines) for lines in zip(rigs[0].gathered, rigs[1].gathered, strict=True))


def test_the_victim_is_the_least_recently_used_block() -> None:
    rig, policy = gpu_rig(cache_ratio=0)
    rig.admit(0, 9, 150)
    clusters, numbers = rig.requests[0].clusters[0, 0], numbered(rig, 0, 0)
    used: list[int] = []  # blocks, those used longest ago first
    for cluster in (c for c in range(len(clusters)) if len(clusters[0]) + len(clusters[c]) <= rig.most_retrieved):
        picked = list(dict.fromkeys([0, cluster]))
        rig.step(rig.batch([0]), 0, [[picked, []]])
        # Cached blocks are hotter than new ones: cluster 0 is always cached.
        touched = [block for c in reversed(picked) for block in numbers[c]]
        used = [block for block in used if block not in touched] + touched
        held = {block for block in policy.cached_blocks(2, 0)[0].tolist() if block >= 0}
        assert held == set(used[-policy._capacity :])
    assert policy.counters.evictions > 0


def numbered(rig: ClusterRig, layer: int, head: int) -> list[list[int]]:
    """Return the numbers of each cluster's blocks."""
    counts = [-(-len(cluster) // rig.store.block_tokens) for cluster in rig.requests[0].clusters[layer, head]]
    return [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]


def test_the_cache_holds_the_widest_selection() -> None:
    """The widest selection of clusters of a single token each, with a cache of nothing."""
    rig, policy = gpu_rig(cache_ratio=0)
    assert policy._capacity >= rig.width
    assert policy.cache_slots(10) == policy.cache_slots(160) >= policy._capacity * rig.store.block_tokens


Held = tuple[ClusterRig, WaveBuffer | WaveGpuBuffer]


@pytest.fixture(params=["native", "reference", "gpu"])
def held(request: pytest.FixtureRequest) -> Held:
    """A rig under each control, with one request."""
    made: Held = gpu_rig() if request.param == "gpu" else rig_of(request.param, cache_ratio=1)
    made[0].admit(0, 9, 80)
    return made


def test_selected_clusters_are_read_on_the_device_the_next_time(held: Held) -> None:
    rig, policy = held
    picked = [[[0, 5, 3], [7]]]
    kinds = []
    for _ in range(2):
        plan = rig.step(rig.batch([0]), 0, picked)
        assert plan.execution is not None
        runs = plan.execution.runs
        inside = torch.arange(runs.kind.shape[1]) < runs.count[:, None]
        kinds.append({int(kind) for kind in runs.kind[inside] if kind > 0})
    assert kinds == [{Source.HOST}, {Source.CACHE}]
    members = [rig.requests[0].clusters[0, h][c] for h, row in enumerate(picked[0]) for c in row]
    blocks, tokens, full = sum(-(-len(m) // 2) for m in members), sum(map(len, members)), sum(map(bool, members))
    row = sum(part.row_bytes for part in GEOMETRY.parts)
    if isinstance(policy, WaveBuffer):
        expected = WaveCounters(2 * full, full, 2 * blocks, blocks, 2 * tokens, tokens, tokens * row, full, 0)
        assert policy.counters == expected
    else:
        assert policy.counters == WaveGpuCounters(2 * blocks, blocks, 2 * tokens, tokens, blocks, 0)
    assert policy.counters.hit_rate == 0.5


def test_a_full_store_takes_nothing(held: Held) -> None:
    rig, policy = held
    rig.store.allocator.alloc(rig.store.allocator.available)
    with pytest.raises(PoolExhaustedError, match="host_bytes"):
        policy.hold(0, 150)
    rig.step(rig.batch([0]), 0, [[[0], [1]]])


def test_selections_and_segments_that_do_not_fit_are_refused(held: Held) -> None:
    rig, policy = held
    batch, mask = rig.batch([0]), torch.tensor([True])
    good = rig.selection(batch, [[[0], [0]]], mask)
    for bad in (
        Selection(Unit.CLUSTER, 0, good.indices, good.lengths),
        Selection(Unit.TOKEN, 1, good.indices, good.lengths, steady=good.steady),
    ):
        with pytest.raises(ConfigError, match="clusters beside a steady zone"):
            policy.resolve(2, batch, bad, mask)
    segment = WaveSegment(75, 99, torch.ones(2, 1, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(StateError, match="begins at cluster 99"):
        policy.store(2, 0, segment)
