"""RetroInfer: its index is a function of the KV alone, its zones and attention are what plain Python says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithm_rig import mha, mla
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor
from wave_rig import SMALL, WaveRig, check_step, rebuild, same_state, selections_of

from gpu_tier.config import RetroInferConfig
from gpu_tier.index.wave_index import clusters_of, prompt_segments
from gpu_tier.rows import KVDtype
from gpu_tier.types import Mode

CONFIG = RetroInferConfig(**SMALL)
UNINDEXED = CONFIG.unindexed
LENGTHS = sorted({
    1, CONFIG.sink, UNINDEXED - 1, UNINDEXED, UNINDEXED + 1,
    *(CONFIG.sink + CONFIG.local + CONFIG.segment + i for i in (-1, 0, 1)), 4 * CONFIG.segment, 3 * CONFIG.segment + 1,
})  # fmt: skip


@pytest.mark.parametrize("n", LENGTHS)
def test_a_prompt_is_indexed_to_its_local_window(n: int) -> None:
    rig = WaveRig()
    rig.add({0: n})
    for layer in rig.geometry.layers:
        segments = rig.members.segments[layer, 0]
        expected = prompt_segments(CONFIG.sink, n, CONFIG)
        assert [range(s.start, s.start + s.tokens) for s in segments] == expected
        assert [s.clusters for s in segments] == [clusters_of(len(s), CONFIG) for s in expected]
        indexed = rig.retro.segments.of(layer, 0)
        assert indexed.boundary == (n - CONFIG.local if n >= UNINDEXED else CONFIG.sink)
        assert indexed.clusters == sum(s.clusters for s in segments)
        for head in rig.members.of.get((layer, 0), []):
            assert sorted(token for cluster in head for token in cluster) == list(range(CONFIG.sink, indexed.boundary))


@settings(max_examples=examples(60), deadline=None)
@given(n=st.integers(1, 150), cuts=st.sets(st.integers(1, 149), max_size=6), repeats=st.integers(1, 2))
def test_chunks_in_any_cut_leave_the_same_bits(n: int, cuts: set[int], repeats: int) -> None:
    rig = WaveRig()
    rig.add({0: n})
    rig.copy_request(0, 1)
    rig.algorithm.reserve(1, n)
    at = 0
    for stop in [*sorted(cut for cut in cuts if cut < n), n]:
        rig.prefill({1: stop - at}, repeats=repeats)
        at = stop
    rig.algorithm.finish_prompt(1, n)
    same_state(rig, 1, rig, 0)
    for layer in rig.geometry.layers:
        for one, other in zip(rig.members.segments[layer, 0], rig.members.segments[layer, 1], strict=True):
            assert torch.equal(one.members, other.members)


def test_prompts_prefilled_together_are_as_alone() -> None:
    lengths = {0: 150, 1: UNINDEXED - 1, 2: 90, 3: 41}
    rig = WaveRig()
    rig.add(lengths, chunk=37)
    for request, n in lengths.items():
        alone = WaveRig()
        alone.rows.of.update({(layer, 0): rig.rows.of[layer, request] for layer in rig.geometry.layers})
        alone.rows.values.update({(layer, 0): rig.rows.values[layer, request] for layer in rig.geometry.layers})
        alone.n[0] = 0
        alone.queries_seen.update({(layer, 0): rig.queries_seen[layer, request] for layer in rig.geometry.layers})
        alone.algorithm.reserve(0, n)
        alone.prefill({0: n})
        alone.algorithm.finish_prompt(0, n)
        same_state(rig, request, alone, 0)


@pytest.mark.parametrize("rule", ["sum_softmax", "max_ip"])
@pytest.mark.parametrize("group", [1, 4])
def test_it_selects_the_clusters_that_plain_python_selects(group: int, rule: str) -> None:
    rig = WaveRig(group=group, rank=rule)
    rig.add({0: 1, 1: UNINDEXED - 1, 2: UNINDEXED, 3: 77, 4: 150, 5: 129}, spare=2)
    order = [5, 0, 3, 2, 4, 1]
    check_step(rig, order, selections_of(rig, order, padding=2))


GEOMETRIES = {
    "mla fp8": mla(136, 128, dtype=KVDtype.FP8),
    "one head": mha(1, 16),
    "stage": mha(4, 8, start=3),
    "f16 d64": mha(2, 64, dtype=KVDtype.F16),
}


@pytest.mark.parametrize("kind", GEOMETRIES)
def test_it_works_for_every_kind_of_kv(kind: str) -> None:
    rig = WaveRig(GEOMETRIES[kind], 4)
    rig.add({0: 90, 1: 37}, chunk=19, spare=1)
    check_step(rig, [1, 0], selections_of(rig, [1, 0]))
    for position, layer in enumerate(rig.geometry.layers):
        views, pages = rig.retro.index.views(position), rig.retro.index.pool.held(0)
        for head, clusters in enumerate(rig.members.of[layer, 0]):
            for c, tokens in enumerate(clusters[:20]):
                if tokens:
                    place = (pages[c // 64], head, c % 64)
                    keys = rig.rows.of[layer, 0][tokens, head]
                    values = rig.rows.values[layer, 0][tokens, head]
                    close(views.centroids[place], keys.mean(0))
                    close(views.value_sums[place], values.sum(0))


def close(stored: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(stored.float(), exact.float(), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("n", [1, UNINDEXED, 3 * CONFIG.segment + 1])
@pytest.mark.parametrize("estimation", [0.0, 1.0])
def test_attention_over_all_clusters_is_full_attention(n: int, estimation: float) -> None:
    rig = WaveRig(retrieval=1.0, estimation=estimation, exec_factor=8)
    rig.add({0: n}, spare=40)
    for _ in range(36):
        batch_selections = selections_of(rig, [0])
        batch = rig.batch(Mode.DECODE, [0], [1])
        for layer, selection in batch_selections.items():
            tokens = rig.exact_tokens(layer, 0, 0, 0, selection)
            assert sorted(tokens) == list(range(rig.n[0]))
            out = rig.attention(layer, batch, selection)
            torch.testing.assert_close(out[0], rig.full_attention(layer, 0), rtol=1e-5, atol=1e-6)
            rig.algorithm.update_representations(layer, batch, torch.empty(0))
    assert rig.retro.exec_overflow == 0


def test_clusters_of_equal_keys_are_estimated_exactly() -> None:
    lengths = {0: 3 + 6 + 18 * 8, 1: 3 + 6 + 12 * 8}
    rig = WaveRig(retrieval=0.05, estimation=1.0, tokens_per_centroid=8)
    rig.add(lengths, spare=1)
    for layer in rig.geometry.layers:
        for request, n in lengths.items():
            # Runs of eight equal keys: a cluster each. Of small whole numbers, so that bf16 holds them.
            draw = torch.Generator().manual_seed(7 * layer + request)
            run = (torch.arange(n + 1) - 3).div(8, rounding_mode="floor")
            rig.rows.of[layer, request] = torch.randint(-4, 5, (40, 2, 8), generator=draw).float()[run]
            rig.rows.values[layer, request] = torch.randint(-2, 3, (n + 1, 2, 8), generator=draw).float()
    rebuild(rig, lengths)
    found = selections_of(rig, [1, 0])
    batch = rig.batch(Mode.DECODE, [1, 0], [1, 1])
    for layer, selection in found.items():
        out = rig.attention(layer, batch, selection)
        assert selection.estimate is not None
        assert bool((selection.estimate.lengths > selection.lengths).all())
        for row, request in enumerate((1, 0)):
            torch.testing.assert_close(out[row], rig.full_attention(layer, request), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimation", [0.0, 0.3])
def test_clusters_that_do_not_fit_are_estimated_and_counted(estimation: float) -> None:
    rig = WaveRig(retrieval=0.1, estimation=estimation, exec_factor=1)
    rig.add({0: 300}, spare=1)
    for layer in rig.geometry.layers:  # nearly all keys alike: one cluster holds most of a segment
        k = rig.rows.of[layer, 0]
        k[:] = 2 + 0.01 * k
    rebuild(rig, {0: 300})
    found = selections_of(rig, [0])
    check_step(rig, [0], found)
    assert rig.retro.exec_overflow > 0
    batch = rig.batch(Mode.DECODE, [0], [1])
    for layer, selection in found.items():
        out = rig.attention(layer, batch, selection)
        assert torch.isfinite(out).all()
        if estimation:
            # All keys nearly alike: attention is nearly the mean of what it covers.
            assert float((out[0] - rig.full_attention(layer, 0)).norm(dim=-1).mean()) < 1.5


def test_attention_is_normalised_over_the_three_zones_alone() -> None:
    rig = WaveRig(group=1)
    rig.add({0: 150}, spare=1)
    found = selections_of(rig, [0])
    batch = rig.batch(Mode.DECODE, [0], [1])
    for layer, selection in found.items():
        assert selection.estimate is not None
        position = rig.geometry.layer_index(layer)
        views, pages = rig.retro.index.views(position), rig.retro.index.pool.held(0)
        out = rig.attention(layer, batch, selection)[0]
        for head in range(2):
            q = rig.query(layer, 0)[head, 0].double()
            exact = rig.exact_tokens(layer, 0, 0, head, selection)
            ids = rig.chosen(selection.estimate, 0, head)
            centroids = views.centroids[pages, head].flatten(0, 1)[ids].double()
            sums = views.value_sums[pages, head].flatten(0, 1)[ids].double()
            sizes = torch.tensor([len(rig.members.of[layer, 0][head][c]) for c in ids]).double()
            weights = (rig.rows.of[layer, 0][exact, head].double() @ q * rig.context.sm_scale).exp()
            guessed = (centroids @ q * rig.context.sm_scale).exp()
            above = weights @ rig.rows.values[layer, 0][exact, head].double() + guessed @ sums
            below = weights.sum() + (sizes * guessed).sum()
            torch.testing.assert_close(out[head], above / below, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{"center": "prompt"}, {"final_assign": "global"}, {"center": "none"}])
@pytest.mark.parametrize("n", [UNINDEXED - 1, UNINDEXED, 150])
def test_options_of_clustering_index_the_same_tokens(changes: dict[str, Any], n: int) -> None:
    rig = WaveRig(**changes)
    rig.add({0: n}, chunk=40, spare=40)
    whole = WaveRig(**changes)
    whole.rows.of.update(rig.rows.of), whole.rows.values.update(rig.rows.values)
    whole.queries_seen.update(rig.queries_seen)
    whole.n[0] = 0
    whole.algorithm.reserve(0, n)
    whole.prefill({0: n})
    whole.algorithm.finish_prompt(0, n)
    same_state(rig, 0, whole, 0)
    for _ in range(30):
        rig.step([0])
    for layer in rig.geometry.layers:
        for head in rig.members.of.get((layer, 0), []):
            indexed = rig.retro.segments.of(layer, 0).boundary
            assert sorted(t for cluster in head for t in cluster) == list(range(CONFIG.sink, indexed))
    check_step(rig, [0], selections_of(rig, [0]))
    assert rig.algorithm.sidecar_page_bytes() == (
        0 if "none" not in changes.values() else rig.retro.sidecars.rows.row_bytes
    )
