"""Sidecars of RetroInfer: whole segments come back as they were, and anything that is not whole is clustered anew."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from algorithm_rig import PAGE, mha, mla
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor
from wave_rig import WaveRig, same_state, selections_of

from gpu_tier.algorithms.base import Sidecar
from gpu_tier.config import RetroInferConfig
from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry
from gpu_tier.index.wave_sidecar import SegmentRows
from gpu_tier.rows import KVDtype

SEGMENT, SINK, LOCAL = 64, 3, 6
PAGES = SEGMENT // PAGE
# The segment's last token lies in page 4, behind its slices 0 to 2 in pages 1 to 3.
WHOLE = (PAGES + 1) * PAGE


def make(geometry: KVGeometry | None = None, **changes: int | str) -> WaveRig:
    return WaveRig(geometry or mha(), segment=SEGMENT, **changes)


def published(rig: WaveRig, request: int, n: int, prompt: int) -> Sidecar:
    """The sidecar of the first n tokens of a prompt."""
    rig.add({request: prompt}, spare=10)
    sidecar = rig.algorithm.export_sidecar(request, 0, n)
    assert sidecar is not None
    return sidecar


def attach(rig: WaveRig, source: int, target: int, n_prompt: int, runs: list[Sidecar], cached: int) -> int:
    """Let a request begin with the tokens of another one and these sidecars, and compute the rest; tokens covered."""
    rig.copy_request(source, target)
    rig.algorithm.reserve(target, n_prompt)
    covered = sum(rig.algorithm.import_sidecar(target, run) for run in runs)
    assert covered <= cached
    # What is missing is rebuilt from KV, then the prompt goes on.
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
            assert other.members.dtype == other.sizes.dtype == torch.int32
            assert torch.equal(one.members, other.members)
            assert torch.equal(one.sizes, other.sizes)
    found = selections_of(rig, [0, 1])
    for selection in found.values():
        assert torch.equal(selection.indices[0], selection.indices[1])
    # What was taken over is published like what was clustered.
    again = rig.algorithm.export_sidecar(1, 0, 224)
    assert again is not None
    assert torch.equal(again.data, sidecar.data)


@settings(max_examples=examples(60), deadline=None)
@given(cuts=st.sets(st.integers(1, 13), max_size=5), start=st.integers(0, 13), stop=st.integers(0, 13))
def test_sidecars_come_in_runs_and_are_exported_in_pieces(cuts: set[int], start: int, stop: int) -> None:
    rig = RUNS
    sidecar = rig.algorithm.export_sidecar(0, 0, 224)
    assert sidecar is not None
    piece = rig.algorithm.export_sidecar(0, start * PAGE - (start > 0), stop * PAGE + 5)
    assert piece is not None
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
def test_what_is_not_whole_is_clustered_from_kv(what: str) -> None:
    rig = make()
    sidecar = published(rig, 0, 224, 240)
    change, whole = REFUSALS[what]
    data = sidecar.data.clone()
    change(data)
    covered = attach(rig, 0, 1, 240, [Sidecar(0, data)], 224)
    assert covered == (SINK + whole * SEGMENT if whole else 0)
    same_state(rig, 1, rig, 0)


def test_a_segment_whose_last_page_is_missing_is_clustered_from_kv() -> None:
    rig = make()
    sidecar = published(rig, 0, 224, 240)
    for pages, whole in ((PAGES, 0), (PAGES + 1, 1), (2 * PAGES, 1), (2 * PAGES + 1, 2)):
        covered = attach(rig, 0, 1, 240, [part(sidecar, 0, pages)], pages * PAGE)
        assert covered == (SINK + whole * SEGMENT if whole else 0)
        same_state(rig, 1, rig, 0)
        rig.end(1)


@pytest.mark.parametrize(("holes", "leading"), [((6,), 1), ((1,), 0), ((2, 9), 0), ((12,), 2), ((1, 5, 12), 0)])
def test_a_hole_is_clustered_from_kv_and_what_is_behind_it_is_taken_over(holes: tuple[int, ...], leading: int) -> None:
    rig = make()
    sidecar = published(rig, 0, 224, 240)
    runs = [part(sidecar, first + 1, stop) for first, stop in pairwise([-1, *holes, 14])]
    built, layers = rig.retro.segments.built, len(rig.geometry.layers)
    assert attach(rig, 0, 1, 240, runs, 224) == (SINK + leading * SEGMENT if leading else 0)
    same_state(rig, 1, rig, 0)
    missing = len({(hole - 1) // PAGES for hole in holes})
    assert rig.retro.sidecars.imported == (3 - missing) * layers
    assert rig.retro.segments.built - built == (missing + 1) * layers  # and the last one, which is not whole


def test_slices_of_two_prompts_that_differ_in_the_last_tokens_do_not_agree() -> None:
    """The first pages of a segment are shared, its last tokens are others'."""
    rig = make()
    ours = published(rig, 0, WHOLE, 120)
    rig.copy_request(0, 1)
    for layer in rig.geometry.layers:  # the first tokens of page 4, which the segment of pages 0 to 3 ends with
        rig.rows.of[layer, 1] = rig.rows.of[layer, 1].clone()
        rig.rows.of[layer, 1][SEGMENT : SEGMENT + SINK] *= -3
    rig.algorithm.reserve(1, 120)
    rig.prefill({1: 120})
    rig.algorithm.finish_prompt(1, 120)
    theirs = rig.algorithm.export_sidecar(1, 0, WHOLE)
    assert theirs is not None
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
    plain = make(sink=0, local=20)
    plain.rows.of.update({(layer, 0): rig.rows.of[layer, 0] for layer in rig.geometry.layers})
    plain.rows.values.update({(layer, 0): rig.rows.values[layer, 0] for layer in rig.geometry.layers})
    plain.queries_seen.update({(layer, 0): rig.queries_seen[layer, 0] for layer in rig.geometry.layers})
    plain.n[0] = 0
    plain.algorithm.reserve(0, n_prompt)
    plain.prefill({0: n_prompt})
    plain.algorithm.finish_prompt(0, n_prompt)
    same_state(rig, 1, plain, 0)


def test_segments_that_are_not_clustered_are_exported_as_nothing() -> None:
    rig = make()
    sidecar = published(rig, 0, 112, 120)
    assert not sidecar.data[0].any()  # the sinks' page
    assert bool((sidecar.data[1 : PAGES + 1, 0] == 1).all())
    assert not sidecar.data[PAGES + 1 :].any()
    nobody = rig.algorithm.export_sidecar(4, 0, 64)
    assert nobody is not None
    assert not nobody.data.any()


def test_decoded_segments_are_none_of_a_prompt() -> None:
    rig = make()
    rig.add({0: 40}, spare=120)
    for _ in range(110):
        rig.step([0])
    sidecar = rig.algorithm.export_sidecar(0, 0, 144)
    assert sidecar is not None
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
    left = rig.algorithm.export_sidecar(0, 0, 224)
    assert left is not None
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


def test_engines_share_segments_whatever_they_do_with_them() -> None:
    plain = RetroInferConfig()
    same = RetroInferConfig(retrieval=0.05, cache_ratio=0.1, policy="lfu", cpu_threads=3, mode="gpu_only", local=128)
    assert plain.sidecar_settings() == same.sidecar_settings()
    for changes in ({"sink": 8}, {"segment": 4096}, {"tokens_per_centroid": 8}, {"iterations": 3}, {"center": "none"}):
        assert RetroInferConfig(**changes).sidecar_settings() != plain.sidecar_settings()  # type: ignore[arg-type]
