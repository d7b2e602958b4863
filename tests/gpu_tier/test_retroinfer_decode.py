"""RetroInfer over the life of requests: what decoding clusters, and what a request leaves behind."""

from __future__ import annotations

import pytest
import torch
from algorithm_rig import ROWS, TOKENS
from wave_rig import SMALL, WaveRig, check_step, same_state, selections_of

from gpu_tier.algorithms.base import BaseSparseAlgorithm
from gpu_tier.config import RetroInferConfig
from gpu_tier.errors import ConfigError
from gpu_tier.index.wave_index import most_clusters
from gpu_tier.types import Mode

CONFIG = RetroInferConfig(**SMALL)
UNINDEXED = CONFIG.unindexed


@pytest.mark.parametrize("n", [1, UNINDEXED - 1, UNINDEXED, 61])
def test_decoding_clusters_the_oldest_tokens_and_keeps_the_last(n: int) -> None:
    rig = WaveRig()
    rig.add({0: n, 1: 100}, spare=70)
    for _ in range(64):
        before = {layer: rig.retro.segments.of(layer, 0).boundary for layer in rig.geometry.layers}
        selections = rig.step([0, 1], padding=1)
        for layer, selection in selections.items():
            assert selection.steady is not None
            assert selection.steady.firsts[0] == before[layer]
            after = rig.retro.segments.of(layer, 0).boundary
            recent = rig.n[0] - before[layer]
            assert recent <= CONFIG.local + CONFIG.update_segment
            due = recent == CONFIG.local + CONFIG.update_segment
            assert after - before[layer] == (CONFIG.update_segment if due else 0)
    for layer in rig.geometry.layers:
        updates = [s for s in rig.members.segments[layer, 0] if s.start >= max(CONFIG.sink, n - CONFIG.local)]
        assert len(updates) >= 3
        assert all(s.tokens == CONFIG.update_segment for s in updates)
        assert all(s.clusters == CONFIG.update_segment // CONFIG.tokens_per_centroid for s in updates)
        for clusters in rig.members.of[layer, 0]:
            indexed = rig.retro.segments.of(layer, 0).boundary
            assert sorted(t for tokens in clusters for t in tokens) == list(range(CONFIG.sink, indexed))
    check_step(rig, [0, 1], selections_of(rig, [0, 1]))


def test_a_step_with_updates_of_several_requests_is_as_alone() -> None:
    n = UNINDEXED + 5
    rig, alone = WaveRig(), WaveRig()
    rig.add({0: n, 1: n, 2: n + 1}, spare=40)
    for request in (0, 1, 2):
        alone.rows.of.update({(layer, request): rig.rows.of[layer, request] for layer in rig.geometry.layers})
        alone.rows.values.update({(layer, request): rig.rows.values[layer, request] for layer in rig.geometry.layers})
        alone.queries_seen.update({(la, request): rig.queries_seen[la, request] for la in rig.geometry.layers})
        alone.n[request] = 0
        alone.algorithm.reserve(request, rig.n[request])
        alone.prefill({request: rig.n[request]})
        alone.algorithm.finish_prompt(request, alone.n[request])
    for _ in range(38):
        rig.step([2, 0, 1])
        for request in (0, 1, 2):
            alone.step([request])
    for request in (0, 1, 2):
        same_state(rig, request, alone, request)


def test_rows_that_do_not_select_select_nothing_and_are_still_indexed() -> None:
    rig = WaveRig()
    rig.add({0: UNINDEXED, 1: 100}, spare=30)
    rig.algorithm.reserve(0, UNINDEXED + 30), rig.algorithm.reserve(1, 130)
    for _ in range(24):
        rig.n[0] += 1
        rig.n[1] += 1
        batch = rig.batch(Mode.DECODE, [0, 1], [1, 1], padding=1)
        for layer in rig.geometry.layers:
            selection = rig.decode(layer, batch, torch.tensor([False, True, True]))
            assert selection.lengths.tolist()[0] == selection.lengths.tolist()[2] == [0, 0]
            assert bool((selection.lengths[1] > 0).all())
            assert selection.steady is not None
            assert selection.steady.first.tolist() == [0, selection.steady.firsts[1], 0]
            assert selection.estimate is not None
            assert not selection.estimate.lengths[[0, 2]].any()
            partial = rig.algorithm.estimate(torch.ones(3, 4, 8), layer, batch, selection)
            assert partial is not None
            assert bool((partial.lse[[0, 2]] == -torch.inf).all())
            assert not partial.o[[0, 2]].any()
    assert rig.retro.segments.of(rig.geometry.start_layer, 0).boundary == UNINDEXED - 6 + 16


def test_a_late_start_finds_everything_built() -> None:
    rig = WaveRig()
    rig.add({0: 5}, spare=60)
    for _ in range(55):
        rig.step([0])
    built = rig.retro.segments.built
    rig.algorithm.become_sparse(0, rig.n[0])
    assert rig.retro.segments.built == built > 0


def test_what_no_step_clustered_is_built_when_a_request_becomes_sparse() -> None:
    rig, stepped = WaveRig(), WaveRig()
    for each in (rig, stepped):
        each.add({0: 5}, spare=60)
    for _ in range(55):
        stepped.step([0])
    rig.n[0] = 60
    rig.algorithm.reserve(0, 60)
    rig.algorithm.become_sparse(0, 60)
    same_state(rig, 0, stepped, 0)


def test_memory_is_what_it_says() -> None:
    rig = WaveRig()
    index = rig.retro.index
    page_bytes = 2 * 64 * (2 * 8 + 2 * 8 + 4)
    for n in (1, UNINDEXED - 1, UNINDEXED, 3 + 6 + 256, 3 + 6 + 257, TOKENS):
        pages = -(-most_clusters(n, CONFIG) // 64)
        assert rig.algorithm.representation_bytes(n) == 3 * pages * page_bytes
        rig.algorithm.reserve(0, n)
        assert len(index.pool.held(0)) == pages
        rig.algorithm.free(0)
    assert index.pool.nbytes == 3 * (index.pool.num_pages + 1) * page_bytes + index.pool.table.numel() * 4


def test_every_row_can_have_the_longest_request() -> None:
    rig = WaveRig()
    for request in range(ROWS):
        rig.algorithm.reserve(request, TOKENS)
    assert rig.retro.index.pool.allocator.available == 0
    with pytest.raises(ConfigError, match="max_tokens"):
        rig.algorithm.reserve(0, TOKENS + 300)


def test_limits_that_a_residency_relies_on() -> None:
    rig = WaveRig()
    algorithm: BaseSparseAlgorithm = rig.algorithm
    assert algorithm.per_head
    assert algorithm.unit_tokens == 0
    assert (algorithm.steady_ring(99).sink, algorithm.steady_ring(99).ring) == (3, 6 + 16)
    m = most_clusters(TOKENS, CONFIG)
    assert algorithm.max_items == round(0.2 * m)
    assert algorithm.max_execution_tokens == min(TOKENS, UNINDEXED + 4 * round(0.2 * m) * 4)


def test_a_prompt_of_which_no_chunk_was_seen_is_built_when_it_is_finished() -> None:
    rig, chunked = WaveRig(), WaveRig()
    for each in (rig, chunked):
        each.add({0: 1}, spare=120)
        each.end(0)
        each.algorithm.reserve(0, 121)
    rig.n[0] = chunked.n[0] = 0
    chunked.prefill({0: 121})
    for each in (rig, chunked):
        each.algorithm.finish_prompt(0, 121)
    rig.n[0] = 121
    same_state(rig, 0, chunked, 0)


def test_a_step_sees_what_was_clustered_since_the_last_look_at_it() -> None:
    rig = WaveRig()
    rig.add({0: 5}, spare=60)
    rig.n[0] = 60
    rig.algorithm.reserve(0, 60)
    batch, everyone = rig.batch(Mode.DECODE, [0], [1]), torch.ones(1, dtype=torch.bool)
    q = rig.query(0, 0).flatten(0, 1)[None]
    before = rig.algorithm.retrieve_topk(q, 0, batch, everyone)
    assert not before.lengths.any()
    assert before.estimate is None
    rig.algorithm.become_sparse(0, 60)
    after = rig.algorithm.retrieve_topk(q, 0, batch, everyone)
    assert bool((after.lengths > 0).all())
    assert after.steady is not None
    assert after.steady.firsts == (51,)
