"""Codes and codebooks that travel with pages: taken over whole or not at all, and continued by the next turn."""

from __future__ import annotations

import itertools

import pytest
import torch
from algorithm_rig import Rig, ids
from hypothesis import given, settings
from hypothesis import strategies as st
from pqcache_rig import PQRig, codebook_of, codes_of, continued, plain_selection
from thoroughness import examples
from torch import Tensor

from gpu_tier.algorithms.base import Sidecar
from gpu_tier.algorithms.pq_sidecars import CodebookImport, PQSidecars
from gpu_tier.errors import AllocationError, ConfigError
from gpu_tier.index import pq

FORM = PQSidecars(codebook_bytes=10, pages=3, code_bytes=5, parameters="m2b3")


def codebook(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (10,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def codes(pages: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 256, (pages, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=examples(200), deadline=None)
@given(pages=st.integers(0, 8), valid=st.integers(0, 8), cuts=st.lists(st.integers(0, 8), max_size=4))
def test_the_leading_run_is_taken_over_however_it_arrives(pages: int, valid: int, cuts: list[int]) -> None:
    valid = min(valid, pages)
    rows = torch.cat([FORM.rows(codebook(), 0, codes(valid)), FORM.blank(pages - valid)])
    assert rows.shape[1] == FORM.row_bytes == 16 + 4 + 5
    taken, found = CodebookImport(FORM), []
    borders = sorted({0, pages, *(cut for cut in cuts if cut < pages)})
    for start, stop in itertools.pairwise(borders):
        before = taken.accepted
        arrived = taken.add(start, rows[start:stop])
        assert taken.accepted == before + len(arrived)
        found.append(arrived)
    if valid < FORM.pages:
        assert taken.codebook is None
        assert not any(len(part) for part in found)
    else:
        assert taken.codebook is not None
        assert torch.equal(taken.codebook, codebook())
        assert torch.equal(torch.cat(found), codes(valid))


@pytest.mark.parametrize("page", range(5))
@pytest.mark.parametrize("byte", [0, 15, 16, 19])
def test_a_damaged_codebook_is_not_taken_over(page: int, byte: int) -> None:
    rows = FORM.rows(codebook(), 0, codes(5))
    rows[page, byte] ^= 1
    taken = CodebookImport(FORM)
    accepted = len(taken.add(0, rows))
    padding = page == 2 and byte >= 18  # the last slice is filled up with two zeros
    if page < 3 and not padding:
        assert accepted == 0
        assert taken.codebook is None
    else:  # behind the codebook's pages a wrong id ends the run, a slice is not looked at
        assert accepted == (page if byte < 16 else 5)


def test_another_codebooks_pages_end_the_run() -> None:
    rows = torch.cat([FORM.rows(codebook(), 0, codes(4)), FORM.rows(codebook(1), 0, codes(4))])
    assert len(CodebookImport(FORM).add(0, rows)) == 4


def test_pages_that_do_not_follow_are_not_taken_over() -> None:
    rows = FORM.rows(codebook(), 0, codes(6))
    taken = CodebookImport(FORM)
    assert len(taken.add(0, rows[:4])) == 4
    assert len(taken.add(5, rows[5:])) == 0
    assert len(taken.add(4, rows[4:])) == 0  # nor anything after the gap
    assert len(CodebookImport(FORM).add(1, rows[1:])) == 0


def test_the_parameters_are_part_of_the_id() -> None:
    other = PQSidecars(10, 3, 5, "m4b3")
    assert other.identity(codebook()) != FORM.identity(codebook())
    assert CodebookImport(other).add(0, FORM.rows(codebook(), 0, codes(4))).shape == (0, 5)


# Through the algorithm.


def check_selection(rig: PQRig, request: int, n_prompt: int, steps: int) -> None:
    """With one codebook, steps select what it says."""
    for _ in range(steps):
        for layer, selection in rig.step([request]).items():
            book = codebook_of(rig, layer, request)
            assert ids(selection, 0, 1) == plain_selection(rig, layer, request, 1, book, n_prompt=n_prompt)[1]


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_a_prompt_that_continues_takes_codes_and_codebook_over(runs: int) -> None:
    first, second = PQRig(), PQRig()
    first.add({0: 83}, spare=60)
    assert continued(second, first, 120, 80, runs=runs) == 80
    for layer in first.geometry.layers:
        assert torch.equal(codebook_of(second, layer, 1), codebook_of(first, layer, 0))
        wanted = pq.encode(second.source.of[layer, 1][:120], codebook_of(first, layer, 0))
        assert torch.equal(codes_of(second, layer, 1, 120), wanted)
    check_selection(second, 1, 120, 20)


def test_what_was_taken_over_can_be_handed_on() -> None:
    first, second, third = PQRig(), PQRig(), PQRig()
    first.add({0: 83}, spare=60)
    continued(second, first, 120, 80, request=0)
    assert continued(third, second, 140, 112) == 112
    for layer in first.geometry.layers:
        assert torch.equal(codebook_of(third, layer, 1), codebook_of(first, layer, 0))
    check_selection(third, 1, 140, 3)


def test_decoded_pages_are_exported_too() -> None:
    first, second = PQRig(), PQRig()
    first.add({0: 70}, spare=60)
    for _ in range(30):
        first.step([0])
    assert continued(second, first, 110, 96) == 96
    check_selection(second, 1, 110, 3)


def test_pages_without_codes_have_no_id() -> None:
    rig = PQRig()
    Rig.add(rig, {0: 20, 1: 83})
    sidecar = rig.algorithm.export_sidecar(0, 0, 20)
    assert sidecar is not None
    assert not sidecar.data.any()
    assert len(sidecar.data) == 1
    rig.algorithm.reserve(2, 60)
    assert rig.algorithm.import_sidecar(2, sidecar) == 0
    # Of a prompt that is still clustered, export waits.
    ready = rig.algorithm.export_sidecar(1, 0, 83)
    assert ready is not None
    assert ready.data[:, :16].any(1).all()
    rig.pq.become_sparse(1, 83)
    again = rig.algorithm.export_sidecar(1, 0, 83)
    assert again is not None
    assert torch.equal(ready.data, again.data)


def test_too_few_pages_are_no_codebook_and_all_is_clustered() -> None:
    first, second = PQRig(), PQRig()
    first.add({0: 83}, spare=60)
    first.pq.form, second.pq.form = (
        PQSidecars(rig.pq.form.codebook_bytes, 4, rig.pq.form.code_bytes, "") for rig in (first, second)
    )
    assert continued(second, first, 100, 48) == 0
    for layer in first.geometry.layers:
        keys = second.all_keys(layer, 1)
        assert torch.equal(codebook_of(second, layer, 1), pq.train(keys[4 : 100 - 8], second.pq.shape, 3, 0))
    check_selection(second, 1, 100, 3)


def test_a_sidecar_that_does_not_fit_is_refused() -> None:
    rig = PQRig()
    rig.add({0: 83})
    sidecar = rig.algorithm.export_sidecar(0, 0, 80)
    assert sidecar is not None
    rig.algorithm.reserve(1, 32)
    with pytest.raises(AllocationError, match="holds 2 pages"):
        rig.algorithm.import_sidecar(1, sidecar)
    rig.algorithm.reserve(2, 100)
    with pytest.raises(ConfigError, match="start=8"):
        rig.algorithm.import_sidecar(2, Sidecar(8, sidecar.data))
    with pytest.raises(ConfigError, match="rows of"):
        rig.algorithm.import_sidecar(2, Sidecar(0, sidecar.data[:, :-1]))
    empty = rig.algorithm.export_sidecar(0, 17, 31)
    assert empty is not None
    assert len(empty.data) == 0


# Turns.


def test_a_turn_can_have_a_codebook_of_its_own() -> None:
    first, second = PQRig(turns="per_turn"), PQRig(turns="per_turn", residency="device")
    first.add({0: 83}, spare=90)
    assert continued(second, first, 150, 80) == 80
    for layer in first.geometry.layers:
        keys = second.all_keys(layer, 1)
        old, new = codebook_of(second, layer, 1, 0), codebook_of(second, layer, 1, 1)
        assert torch.equal(old, codebook_of(first, layer, 0))
        assert torch.equal(new, pq.train(keys[80 : 150 - 8], second.pq.shape, 3, 0))
        assert torch.equal(
            codes_of(second, layer, 1, 150), torch.cat([pq.encode(keys[:80], old), pq.encode(keys[80:], new)])
        )
    second.add({0: 60}, spare=20)  # in one batch with a request of one codebook
    for _ in range(20):
        for layer, selection in second.step([0, 1]).items():
            n = second.n[1]
            old, new = codebook_of(second, layer, 1, 0), codebook_of(second, layer, 1, 1)
            keys = second.all_keys(layer, 1)
            stood_for = torch.cat([
                pq.reconstruct(pq.encode(keys[4:80], old), old), pq.reconstruct(pq.encode(keys[80 : n - 8], new), new)
            ])  # fmt: skip
            scores = torch.einsum("hgd,nhd->hgn", second.query(layer, 1).double(), stood_for.double())
            weights = (scores * second.context.sm_scale).softmax(-1).sum(1)
            for head in range(2):
                middle = [i - 4 for i in ids(selection, 1, head) if 4 <= i < n - 8]
                assert len(middle) == 8
                best = weights[head].sort(descending=True).values
                torch.testing.assert_close(weights[head][middle].sort(descending=True).values, best[:8])
            assert torch.equal(codes_of(second, layer, 1, n)[80:], pq.encode(keys[80:], new))
            alone = plain_selection(second, layer, 0, 0, codebook_of(second, layer, 0), n_prompt=60)
            assert ids(selection, 0, 0) == [*range(4), *alone[1], *range(alone[0], second.n[0])]


def test_a_turn_too_short_for_a_codebook_extends_the_old_one() -> None:
    first, second = PQRig(turns="per_turn"), PQRig(turns="per_turn")
    first.add({0: 83}, spare=90)
    assert continued(second, first, 100, 80) == 80
    for layer in first.geometry.layers:
        assert not codebook_of(second, layer, 1, 1).any()
        wanted = pq.encode(second.all_keys(layer, 1), codebook_of(first, layer, 0))
        assert torch.equal(codes_of(second, layer, 1, 100), wanted)
    check_selection(second, 1, 100, 3)


def test_the_pages_of_a_turn_are_its_own_codebooks() -> None:
    first, second = PQRig(turns="per_turn"), PQRig(turns="per_turn")
    first.add({0: 83}, spare=90)
    continued(second, first, 150, 80, request=0)
    sidecar = second.algorithm.export_sidecar(0, 0, 150)
    assert sidecar is not None
    names = [bytes(row[:16].tolist()) for row in sidecar.data]
    assert len(set(names[:5])) == len(set(names[5:])) == 1
    assert names[0] != names[5]
    later = second.algorithm.export_sidecar(0, 80, 150)
    assert later is not None
    assert torch.equal(later.data, sidecar.data[5:])
    third = PQRig(turns="per_turn")
    assert continued(third, second, 160, 144) == 80  # the first codebook; what follows is clustered again
    for layer in first.geometry.layers:
        keys = third.all_keys(layer, 1)
        assert torch.equal(codebook_of(third, layer, 1, 1), pq.train(keys[80 : 160 - 8], third.pq.shape, 3, 0))


def test_a_request_of_two_codebooks_that_is_clustered_anew_has_one() -> None:
    first, second = PQRig(turns="per_turn"), PQRig(turns="per_turn", rebuild_every=5)
    first.add({0: 83}, spare=90)
    continued(second, first, 150, 80)
    for _ in range(6):
        second.step([1])
    for layer in second.geometry.layers:
        keys = second.all_keys(layer, 1)
        new = pq.train(keys[4 : 155 - 8], second.pq.shape, 3, 0)
        assert torch.equal(codebook_of(second, layer, 1), new)
        assert torch.equal(codes_of(second, layer, 1, 156), pq.encode(keys, new))
    check_selection(second, 1, 150, 2)


def test_with_rebuild_nothing_is_stored_and_all_is_clustered() -> None:
    first, second = PQRig(), PQRig(turns="rebuild")
    first.add({0: 83}, spare=60)
    sidecar = first.algorithm.export_sidecar(0, 0, 80)
    assert sidecar is not None
    assert second.algorithm.sidecar_page_bytes() == 0
    second.add({0: 50})
    assert second.algorithm.export_sidecar(0, 0, 50) is None
    second.algorithm.reserve(1, 100)
    assert second.algorithm.import_sidecar(1, sidecar) == 0
