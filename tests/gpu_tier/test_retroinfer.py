"""RetroInfer: its index is a function of the KV alone, its zones are what plain Python says, segments travel whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from algorithm_rig import PAGE, SMALL, TOKENS, WaveRig, check_step, mha, mla, rebuild, same_state, selections_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sidecar_cases import exported
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import Sidecar
from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry
from kvcm.gpu_tier.index.wave_index import SegmentRows, clusters_of, most_clusters, prompt_segments
from kvcm.gpu_tier.types import Mode

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


def is_as_alone(rig: WaveRig, request: int, n: int, **changes: Any) -> None:
    """Check that a request has the state of the same prompt that an engine of its own computes at once."""
    alone = WaveRig(rig.geometry, **changes)
    alone.rows.of, alone.rows.values, alone.queries_seen = rig.rows.of, rig.rows.values, rig.queries_seen
    alone.n[request] = 0
    alone.algorithm.reserve(request, n)
    alone.prefill({request: n})
    alone.algorithm.finish_prompt(request, n)
    same_state(rig, request, alone, request)


def test_prompts_prefilled_together_are_as_alone() -> None:
    lengths = {0: 150, 1: UNINDEXED - 1, 2: 90, 3: 41}
    rig = WaveRig()
    rig.add(lengths, chunk=37)
    for request, n in lengths.items():
        is_as_alone(rig, request, n)


@pytest.mark.parametrize(
    ("geometry", "group", "rule"),
    [
        *((mha(), group, rule) for group in (1, 4) for rule in ("sum_softmax", "max_ip")),
        (mla(136, 128, dtype=KVDtype.FP8), 4, "sum_softmax"), (mha(1, 16), 4, "sum_softmax"),
        (mha(4, 8, start=3), 4, "sum_softmax"), (mha(2, 64, dtype=KVDtype.F16), 4, "sum_softmax"),
    ],
)  # fmt: skip
def test_it_selects_the_clusters_that_plain_python_selects(geometry: KVGeometry, group: int, rule: str) -> None:
    rig = WaveRig(geometry, group, rank=rule)
    rig.add({0: 1, 1: UNINDEXED - 1, 2: UNINDEXED, 3: 77, 4: 90, 5: 129}, chunk=19, spare=2)
    order = [5, 0, 3, 2, 4, 1]
    check_step(rig, order, selections_of(rig, order, padding=2))
    for position, layer in enumerate(rig.geometry.layers):
        views, pages = rig.retro.index.views(position), rig.retro.index.pool.held(4)
        for head, clusters in enumerate(rig.members.of[layer, 4]):
            for c, tokens in enumerate(clusters[:20]):
                if tokens:
                    place = (pages[c // 64], head, c % 64)
                    keys = rig.rows.of[layer, 4][tokens, head]
                    values = rig.rows.values[layer, 4][tokens, head]
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


@pytest.mark.parametrize("changes", [{"center": "prompt"}, {"final_assign": "global"}, {"center": "none"}])
@pytest.mark.parametrize("n", [UNINDEXED - 1, UNINDEXED, 150])
def test_options_of_clustering_index_the_same_tokens(changes: dict[str, Any], n: int) -> None:
    rig = WaveRig(**changes)
    rig.add({0: n}, chunk=40, spare=40)
    is_as_alone(rig, 0, n, **changes)
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


def test_a_prompt_of_which_no_chunk_was_seen_is_built_when_it_is_finished() -> None:
    rig = WaveRig()
    rig.add({0: 1}, spare=120)
    rig.end(0)
    rig.algorithm.reserve(0, 121)
    rig.algorithm.finish_prompt(0, 121)
    is_as_alone(rig, 0, 121)


def test_what_no_step_clustered_is_built_when_a_request_becomes_sparse() -> None:
    """The next step sees it."""
    rig, stepped = WaveRig(), WaveRig()
    for each in (rig, stepped):
        each.add({0: 5}, spare=60)
    for _ in range(55):
        stepped.step([0])
    rig.n[0] = 60
    rig.algorithm.reserve(0, 60)
    batch, everyone = rig.batch(Mode.DECODE, [0], [1]), torch.ones(1, dtype=torch.bool)
    q = rig.query(0, 0).flatten(0, 1)[None]
    before = rig.algorithm.retrieve_topk(q, 0, batch, everyone)
    assert not before.lengths.any()
    assert before.estimate is None
    rig.algorithm.become_sparse(0, 60)
    same_state(rig, 0, stepped, 0)
    after = rig.algorithm.retrieve_topk(q, 0, batch, everyone)
    assert bool((after.lengths > 0).all())
    assert after.steady is not None
    assert after.steady.firsts == (51,)


SEGMENT, SINK, LOCAL = 64, 3, 6


PAGES = SEGMENT // PAGE


# The segment's last token lies in page 4, behind its slices 0 to 2 in pages 1 to 3.
WHOLE = (PAGES + 1) * PAGE


def make(geometry: KVGeometry | None = None, **changes: int | str) -> WaveRig:
    return WaveRig(geometry or mha(), segment=SEGMENT, **changes)


def published(rig: WaveRig, request: int, n: int, prompt: int) -> Sidecar:
    """The sidecar of the first n tokens of a prompt."""
    rig.add({request: prompt}, spare=10)
    return exported(rig, request, 0, n)


def attach(rig: WaveRig, source: int, target: int, n_prompt: int, runs: list[Sidecar], cached: int) -> int:
    """Let a request begin with the tokens of another one and these sidecars, and compute the rest; tokens covered."""
    rig.copy_request(source, target)
    rig.algorithm.reserve(target, n_prompt)
    covered = sum(rig.algorithm.import_sidecar(target, run) for run in runs)
    assert covered <= cached
    # The algorithm rebuilds missing segments from KV, then the prompt goes on.
    if covered < cached:
        rig.n[target] = covered
        rig.prefill({target: cached - covered})
    rig.n[target] = cached
    rig.prefill({target: n_prompt - cached})
    rig.algorithm.finish_prompt(target, n_prompt)
    return covered


def part(sidecar: Sidecar, first: int, stop: int) -> Sidecar:
    return Sidecar(sidecar.start + first * PAGE, sidecar.data[first:stop])


@pytest.mark.parametrize(
    "geometry", [mha(), mha(1, 16, dtype=KVDtype.BF16), mha(dtype=KVDtype.FP8), mha(start=5), mla()],
    ids=["mha", "bf16", "fp8", "stage", "mla"],
)  # fmt: skip
def test_a_prefix_with_sidecars_is_as_if_it_had_been_clustered(geometry: KVGeometry) -> None:
    rig = make(geometry)
    sidecar = published(rig, 0, 224, 240)
    assert sidecar.data.shape == (14, rig.algorithm.sidecar_page_bytes())
    built = rig.retro.segments.built
    covered = attach(rig, 0, 1, 240, [sidecar], 224)
    assert covered == SINK + 3 * SEGMENT
    layers = len(rig.geometry.layers)
    assert rig.retro.sidecars.imported == 3 * layers
    assert rig.retro.segments.built - built == layers  # the last one, which is not whole
    same_state(rig, 1, rig, 0)
    for layer in rig.geometry.layers:
        for one, other in zip(rig.members.segments[layer, 0], rig.members.segments[layer, 1], strict=True):
            assert (one.start, one.first_cluster) == (other.start, other.first_cluster)
            assert torch.equal(one.members, other.members)
            assert torch.equal(one.sizes, other.sizes)
    for selection in selections_of(rig, [0, 1]).values():
        assert torch.equal(selection.indices[0], selection.indices[1])
    # Imported segments are published like clustered ones.
    assert torch.equal(exported(rig, 1, 0, 224).data, sidecar.data)


@settings(max_examples=examples(60), deadline=None)
@given(cuts=st.sets(st.integers(1, 13), max_size=5), start=st.integers(0, 13), stop=st.integers(0, 13))
def test_sidecars_come_in_runs_and_are_exported_in_pieces(cuts: set[int], start: int, stop: int) -> None:
    rig = RUNS
    sidecar = exported(rig, 0, 0, 224)
    piece = exported(rig, 0, start * PAGE - (start > 0), stop * PAGE + 5)
    if start < stop:
        assert piece.start == start * PAGE
        assert torch.equal(piece.data, sidecar.data[start:stop])
    else:
        assert len(piece.data) == 0 or start == stop
    edges = [0, *sorted(cuts), 14]
    runs = [part(sidecar, first, end) for first, end in pairwise(edges)]
    assert attach(rig, 0, 1, 240, runs, 224) == SINK + 3 * SEGMENT
    same_state(rig, 1, rig, 0)
    rig.end(1)


RUNS = make()


RUNS.add({0: 240}, spare=10)


def flipped(row: int, byte: int) -> Callable[[Tensor], None]:
    def change(data: Tensor) -> None:
        data[row, byte] ^= 1

    return change


def swapped(one: int, other: int) -> Callable[[Tensor], None]:
    def change(data: Tensor) -> None:
        data[[one, other]] = data[[other, one]]

    return change


REFUSALS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "nothing changed": (lambda data: None, 3),
    "not clustered when it was written": (lambda data: data[2].zero_(), 0),
    "a bit of a slice": (flipped(6, 40), 1),
    "a bit of the last byte": (flipped(8, -1), 1),
    "a bit of the number": (flipped(9, 8), 2),
    "a bit of the checksum": (flipped(12, 31), 2),
    "a bit of the flag": (flipped(1, 0), 0),
    "slices in another order": (swapped(1, 2), 0),
    "segments in another order": (lambda data: data[1:9].copy_(torch.cat([data[5:9], data[1:5]])), 0),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_segment_that_is_damaged_is_clustered_from_kv(what: str) -> None:
    rig = make()
    sidecar = published(rig, 0, 224, 240)
    change, whole = REFUSALS[what]
    data = sidecar.data.clone()
    change(data)
    covered = attach(rig, 0, 1, 240, [Sidecar(0, data)], 224)
    assert covered == (SINK + whole * SEGMENT if whole else 0)
    same_state(rig, 1, rig, 0)


@pytest.mark.parametrize(
    ("holes", "leading"),
    [
        ((6,), 1), ((1,), 0), ((2, 9), 0), ((12,), 2), ((1, 5, 12), 0),
        (range(4, 14), 0), (range(5, 14), 1), (range(8, 14), 1), (range(9, 14), 2),  # the last page of a segment
    ],
    ids=str,
)  # fmt: skip
def test_a_hole_is_clustered_from_kv_and_segments_behind_it_are_imported(holes: Sequence[int], leading: int) -> None:
    rig = make()
    sidecar = published(rig, 0, 224, 240)
    runs = [part(sidecar, first + 1, stop) for first, stop in pairwise([-1, *holes, 14]) if stop > first + 1]
    built, layers = rig.retro.segments.built, len(rig.geometry.layers)
    assert attach(rig, 0, 1, 240, runs, 224) == (SINK + leading * SEGMENT if leading else 0)
    same_state(rig, 1, rig, 0)
    missing = len({(hole - 1) // PAGES for hole in holes} & {0, 1, 2})
    assert rig.retro.sidecars.imported == (3 - missing) * layers
    assert rig.retro.segments.built - built == (missing + 1) * layers  # and the last one, which is not whole


def test_slices_of_two_prompts_that_differ_in_the_last_tokens_do_not_agree() -> None:
    """The first pages of a segment are shared, its last tokens are not."""
    rig = make()
    ours = published(rig, 0, WHOLE, 120)
    rig.copy_request(0, 1)
    for layer in rig.geometry.layers:  # the first tokens of page 4, which the segment of pages 0 to 3 ends with
        rig.rows.of[layer, 1] = rig.rows.of[layer, 1].clone()
        rig.rows.of[layer, 1][SEGMENT : SEGMENT + SINK] *= -3
    rig.algorithm.reserve(1, 120)
    rig.prefill({1: 120})
    rig.algorithm.finish_prompt(1, 120)
    theirs = exported(rig, 1, 0, WHOLE)
    mixed = Sidecar(0, torch.cat([ours.data[:PAGES], theirs.data[PAGES:]]))
    assert attach(rig, 1, 2, 120, [mixed], WHOLE) == 0
    same_state(rig, 2, rig, 1)
    # With all of its own it is taken over.
    assert attach(rig, 1, 3, 120, [theirs], WHOLE) == SINK + SEGMENT


@pytest.mark.parametrize("n_prompt", [WHOLE + 1, SINK + SEGMENT + LOCAL, SINK + SEGMENT + LOCAL - 1])
def test_a_segment_that_a_short_prompt_would_not_cluster_whole_is_not_taken_over(n_prompt: int) -> None:
    # A segment that is four pages and no sinks: its pages end before its local window does.
    rig = make(sink=0, local=20)
    sidecar = published(rig, 0, SEGMENT, 120)
    fits = n_prompt >= SEGMENT + 20
    covered = attach(rig, 0, 1, n_prompt, [sidecar], SEGMENT)
    assert covered == (SEGMENT if fits else 0)
    is_as_alone(rig, 1, n_prompt, segment=SEGMENT, sink=0, local=20)


def test_segments_that_are_not_clustered_are_exported_as_nothing() -> None:
    rig = make()
    sidecar = published(rig, 0, 112, 120)
    assert not sidecar.data[0].any()  # the sinks' page
    assert bool((sidecar.data[1 : PAGES + 1, 0] == 1).all())
    assert not sidecar.data[PAGES + 1 :].any()
    unused = exported(rig, 4, 0, 64)
    assert not unused.data.any()


def test_decoded_segments_are_none_of_a_prompt() -> None:
    rig = make()
    rig.add({0: 40}, spare=120)
    for _ in range(110):
        rig.step([0])
    sidecar = exported(rig, 0, 0, 144)
    assert not sidecar.data.any()


def test_there_is_no_sidecar_where_pages_do_not_divide_segments() -> None:
    rig = WaveRig(segment=40)
    rig.add({0: 200})
    assert rig.algorithm.sidecar_page_bytes() == 0
    assert rig.algorithm.export_sidecar(0, 0, 160) is None
    assert rig.algorithm.import_sidecar(0, Sidecar(0, torch.zeros(1, 1, dtype=torch.uint8))) == 0


def test_sidecars_of_another_shape_are_refused() -> None:
    rig = make()
    rig.algorithm.reserve(0, 240)
    row = rig.algorithm.sidecar_page_bytes()
    with pytest.raises(ConfigError, match="page size"):
        rig.algorithm.import_sidecar(0, Sidecar(3, torch.zeros(2, row, dtype=torch.uint8)))
    with pytest.raises(ConfigError, match="bytes"):
        rig.algorithm.import_sidecar(0, Sidecar(0, torch.zeros(2, row + 16, dtype=torch.uint8)))


def test_nothing_of_a_request_is_left_for_the_next_one_in_its_row() -> None:
    rig = make()
    sidecar = published(rig, 0, 224, 240)
    rig.algorithm.reserve(1, 240)
    assert rig.algorithm.import_sidecar(1, part(sidecar, 0, 3)) == 0
    rig.end(1)
    rig.algorithm.reserve(1, 240)
    assert rig.algorithm.import_sidecar(1, part(sidecar, 3, 5)) == 0
    rig.end(0)
    left = exported(rig, 0, 0, 224)
    assert not left.data.any()


@settings(max_examples=examples(100), deadline=None)
@given(sink=st.integers(0, 40), pages=st.integers(1, 6), number=st.integers(0, 9), size=st.sampled_from([8, 16]))
def test_the_last_slice_lies_beside_the_last_token(sink: int, pages: int, number: int, size: int) -> None:
    geometry = mha(layers=1)
    geometry = KVGeometry(geometry.kind, 1, 2, 8, 8, geometry.dtype, page_size=size)
    rows = SegmentRows(geometry, RetroInferConfig(sink=sink, segment=pages * size, tokens_per_centroid=4))
    beside = rows.pages_of(number)
    last = sink + (number + 1) * pages * size - 1
    assert len(beside) == pages
    assert beside[-1] == last // size
    assert rows.pages_of(number + 1).start == beside.stop
    for page in beside:
        assert number in rows.segments_in(range(page, page + 1))
    assert list(rows.segments_in(beside)) == [number]
    assert not rows.segments_in(range(rows.pages_of(0).start))
