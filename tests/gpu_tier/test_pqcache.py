"""PQCache selects by the reconstructed keys in every state, holds exact bytes, and hands codes on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_rig import (
    PAGE,
    PQ_SMALL,
    ROWS,
    NoReading,
    PQRig,
    Rig,
    codebook_of,
    codes_of,
    continued,
    ids,
    mha,
    mla,
    no_synchronisation,
    plain_selection,
)
from coordinator_rig import MODELS, config_of, coordinator_of, nothing_is_held, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from sidecar_cases import exported
from test_algorithms_devices import needs_gpu
from thoroughness import examples
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kvcm.gpu_tier.algorithms import pq_clustering
from kvcm.gpu_tier.algorithms.pqcache import PQCache
from kvcm.gpu_tier.engine.decode_engine import DecodeEngine
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry
from kvcm.gpu_tier.index import pq
from kvcm.gpu_tier.index.pq import CodebookImport, PQSidecars
from kvcm.gpu_tier.kernels.dma_copy import dma_copy
from kvcm.gpu_tier.request_lifecycle import RequestState
from kvcm.gpu_tier.types import Mode, Selection


@pytest.mark.parametrize(
    ("geometry", "group", "residency"),
    [
        *((mha(), group, residency) for group in (1, 4) for residency in ("blocks", "lru", "device")),
        *((kv, 4, "blocks") for kv in (mla(136, 128, dtype=KVDtype.FP8), mha(1, 16), mha(4, 8, start=3))),
        (mha(dtype=KVDtype.BF16), 4, "blocks"),
    ],
)
def test_it_selects_the_tokens_of_the_largest_products(geometry: KVGeometry, group: int, residency: str) -> None:
    rig = PQRig(geometry, group, residency=residency)
    lengths = {0: 40, 1: 33, 2: 200, 3: 129, 4: 48, 5: 90}
    rig.add(lengths, chunk=37, spare=24)
    order = [5, 0, 3, 2, 4, 1]
    for _ in range(8):
        for layer, selection in rig.step(order, padding=2).items():
            for row, request in enumerate(order):
                codebook = codebook_of(rig, layer, request)
                for head in range(geometry.num_kv_heads):
                    first, middle = plain_selection(rig, layer, request, head, codebook, n_prompt=lengths[request])
                    window = [*range(PQ_SMALL["init"]), *middle, *range(first, rig.n[request])]
                    assert ids(selection, row, head) == (middle if residency == "blocks" else window)
                    if residency == "blocks":
                        assert selection.steady is not None
                        assert selection.steady.firsts[row] == int(selection.steady.first[row]) == first
            assert not selection.lengths[6:].any()
    for layer in rig.geometry.layers:  # and the codes that decoded tokens got are those of their keys
        for request in order:
            n = rig.n[request]
            wanted = pq.encode(rig.all_keys(layer, request), codebook_of(rig, layer, request))
            assert torch.equal(codes_of(rig, layer, request, n), wanted)


@settings(max_examples=examples(60), deadline=None)
@given(
    n=st.integers(1, 120), cuts=st.lists(st.integers(1, 40), max_size=5), repeats=st.integers(1, 2),
    threads=st.sampled_from([1, 4]), device=st.sampled_from(["cpu", "device"]), known=st.booleans(),
    staged=st.integers(0, 3),
)  # fmt: skip
def test_neither_chunks_nor_threads_nor_staging_change_the_index(
    n: int, cuts: list[int], repeats: int, threads: int, device: str, known: bool, staged: int
) -> None:
    """The length of the prompt may not be known at first; `staged` tokens are decoded before it becomes sparse."""
    whole, cut = PQRig(kmeans_threads=1), PQRig(kmeans_threads=threads, kmeans_device=device)
    whole.add({3: n}, spare=8)
    for other in (0, 1):  # beside other requests
        whole.add({other: 50})
    cut.source.of, cut.queries_seen = whole.source.of, whole.queries_seen
    cut.n[3] = 0
    for size in [*cuts, n]:
        if (left := min(size, n - cut.n[3])) > 0:
            cut.algorithm.reserve(3, n if known else cut.n[3] + left)
            cut.prefill({3: left}, repeats=repeats)
    cut.algorithm.finish_prompt(3, n)
    for _ in range(staged):
        cut.step([3])
        whole.step([3])
    cut.algorithm.become_sparse(3, n + staged)
    for _ in range(4):
        ours, theirs = cut.step([3]), whole.step([3])
        for layer in whole.geometry.layers:
            if n >= 32:
                local = whole.pq.budgets.tokens(n)[0]
                trained = pq.train(whole.all_keys(layer, 3)[4 : n - local], whole.pq.shape, 3, 0)
                assert torch.equal(codebook_of(whole, layer, 3), trained)
                assert torch.equal(codebook_of(cut, layer, 3), trained)
                assert torch.equal(ours[layer].indices, theirs[layer].indices)


# Short requests and full budgets.
@pytest.mark.parametrize("residency", ["blocks", "lru", "device"])
def test_a_middle_too_short_for_an_index_is_attended_to_entirely(residency: str) -> None:
    """And when it is long enough it gets one, in the middle of decoding."""
    rig = PQRig(residency=residency, min_sparse_prompt_len=1)
    rig.add({0: 1, 1: 3, 2: 20}, spare=60)
    everyone = [0, 1, 2]
    for _ in range(36):
        step = rig.step(everyone)
        for layer, selection in step.items():
            for row, request in enumerate(everyone):
                n, local = rig.n[request], rig.pq.budgets.tokens({0: 1, 1: 3, 2: 20}[request])[0]
                first = max(n - local, min(4, n))
                middle = list(range(4, first))
                if first - 4 > 16:
                    codebook = codebook_of(rig, layer, request)
                    assert codebook.any()
                    _, middle = plain_selection(rig, layer, request, 1, codebook, n_prompt=local)
                    k = rig.pq.budgets.tokens(1)[1]
                    assert len(middle) == k
                if residency == "blocks":
                    assert ids(selection, row, 1) == middle
                else:
                    assert ids(selection, row, 1) == [*range(min(4, n)), *middle, *range(first, n)]
    local = rig.pq.budgets.tokens(20)[0]
    for layer in rig.geometry.layers:  # clustered as soon as the middle had 16 tokens
        keys = rig.all_keys(layer, 2)
        wanted = pq.train(keys[4 : 4 + 16], rig.pq.shape, 3, 0)
        assert torch.equal(codebook_of(rig, layer, 2), wanted)
        assert torch.equal(codes_of(rig, layer, 2, rig.n[2]), pq.encode(keys, wanted))
    assert local + 20 < rig.n[2]


def test_shares_give_longer_prompts_more() -> None:
    rig = PQRig(token_budget=0, token_ratio=0.2, local_ratio=0.25)
    rig.add({0: 50, 1: 100, 2: 400}, spare=1)
    selection = rig.step([0, 1, 2])[0]
    assert selection.lengths[:, 0].tolist() == [8, 15, 60]
    assert selection.steady is not None
    assert selection.steady.firsts == (51 - 2, 101 - 5, 401 - 20)
    assert selection.indices.shape[-1] == 60 <= rig.pq.max_items
    codebook = codebook_of(rig, 0, 0)
    assert ids(selection, 0) == plain_selection(rig, 0, 0, 0, codebook, n_prompt=50)[1]


def test_with_a_buffer_shares_end_at_top_k() -> None:
    rig = PQRig(token_budget=0, token_ratio=0.5, residency="lru", top_k=40)
    assert rig.pq.max_items <= rig.context.config.device_buffer_size
    rig.add({0: 70, 1: 500}, spare=1)
    lengths = rig.step([0, 1])[0].lengths
    assert lengths[:, 0].tolist() == [4 + 35, 4 + 40]


def test_dense_requests_beside_sparse_ones_are_left_alone() -> None:
    rig = PQRig()
    rig.add({0: 60}, spare=8)
    Rig.add(rig, {1: 20, 2: 70}, spare=8)  # 1 is too short, 2 is being staged
    rig.step([1, 0, 2])
    assert not any(rig.pq._requests[r].is_sparse for r in (1, 2))
    mask = torch.tensor([False, True, False])
    batch = rig.batch(Mode.DECODE, [1, 0, 2], [1, 1, 1])
    selection = rig.decode(1, batch, mask)
    assert selection.lengths[:, 0].tolist() == [0, 8, 0]
    assert ids(selection, 1) == plain_selection(rig, 1, 0, 0, codebook_of(rig, 1, 0), n_prompt=60)[1]


# Windows.
@settings(max_examples=examples(200), deadline=None)
@given(
    budget=st.integers(0, 300), ratio=st.floats(0.01, 1), local=st.floats(0.01, 1), n=st.integers(1, 500),
    later=st.integers(0, 100), least=st.integers(0, 300), residency=st.sampled_from(["blocks", "lru", "device"]),
)  # fmt: skip
def test_no_request_attends_to_more_than_the_buffers_hold(
    budget: int, ratio: float, local: float, n: int, later: int, least: int, residency: str
) -> None:
    algo: dict[str, Any] = {"token_budget": budget, "token_ratio": ratio, "local_ratio": local}
    rig = PQRig(mha(1, 2, layers=1), residency=residency, min_sparse_prompt_len=least, **algo)
    budgets = rig.pq.budgets
    window, k = budgets.tokens(n)
    middle = max(0, n + later - window - budgets.settings.init)
    # Only a request that may be sparse counts: by its prompt, or because it has outgrown the limit.
    if budgets.is_sparse(n) or n + later > budgets.late:
        indexed = middle >= budgets.fewest
        items = min(middle, k) if indexed else middle
        assert items <= budgets.most_items
        assert items + min(n + later, window + budgets.settings.init) <= budgets.most_tokens
        assert window <= budgets.ring(n if budgets.is_sparse(n) else n + later).ring


def test_windows_of_one_token_are_two() -> None:
    """The token before the current one may still be on its way to the host."""
    assert PQRig(token_budget=2).pq.budgets.tokens(100) == (2, 1)


# Clustering again.
def test_all_is_clustered_again_when_it_is_time() -> None:
    rig = PQRig(rebuild_every=10)
    rig.add({0: 60, 1: 47}, spare=30)
    local = rig.pq.budgets.tokens(60)[0]
    for step in range(1, 30):
        before = {layer: codebook_of(rig, layer, 0) for layer in rig.geometry.layers}
        for layer, selection in rig.step([0, 1]).items():
            assert ids(selection, 0) == plain_selection(rig, layer, 0, 0, before[layer], n_prompt=60)[1]
        for layer in rig.geometry.layers:
            keys = rig.all_keys(layer, 0)
            if step % 10 == 0:
                assert torch.equal(
                    codebook_of(rig, layer, 0), pq.train(keys[4 : 60 + step - local], rig.pq.shape, 3, 0)
                )
            else:
                assert torch.equal(codebook_of(rig, layer, 0), before[layer])
            assert torch.equal(codes_of(rig, layer, 0, 60 + step), pq.encode(keys, codebook_of(rig, layer, 0)))


@pytest.mark.parametrize("turns", ["extend", "per_turn"])
def test_a_step_that_is_broken_off_while_clustering_is_made_good(turns: str) -> None:
    """The first layer is clustered again, then the step is planned again: the others must not see half an index."""
    rig, first = PQRig(turns=turns, rebuild_every=5), PQRig(turns=turns)
    first.add({0: 83}, spare=90)
    continued(rig, first, 150, 80)
    for _ in range(4):
        rig.step([1])
    rig.n[1] += 1
    rig.algorithm.reserve(1, 155)
    rig.decode(0, rig.batch(Mode.DECODE, [1], [1]))
    rig.n[1] -= 1
    before = codebook_of(rig, 0, 1)
    if turns == "per_turn":  # layer 0 has one codebook already, in both places
        assert torch.equal(before, codebook_of(rig, 0, 1, 1))
    selection = rig.step([1])[0]
    assert ids(selection, 0) == plain_selection(rig, 0, 1, 0, before, n_prompt=150)[1]
    for layer in rig.geometry.layers:
        new = codebook_of(rig, layer, 1)
        assert torch.equal(new, pq.train(rig.all_keys(layer, 1)[4 : 155 - 8], rig.pq.shape, 3, 0))
        assert torch.equal(codes_of(rig, layer, 1, 155), pq.encode(rig.all_keys(layer, 1), new))
    check_selection(rig, 1, 150, 2)


@pytest.mark.parametrize("n", [4 * PAGE, 4 * PAGE + 3])
def test_a_request_may_be_asked_about_before_its_next_token(n: int) -> None:
    """As evaluation does: the codes of all tokens exist, those of a page that is just complete too."""
    rig = PQRig(token_budget=16, local_ratio=0.125)
    rig.add({0: n})
    batch = rig.batch(Mode.DECODE, [0], [1])
    for layer in rig.geometry.layers:
        query = rig.queries_seen[layer, 0][n - 1][None]
        selection = rig.pq.retrieve_topk(query, layer, batch, torch.tensor([True]))
        assert ids(selection, 0) == plain_selection(rig, layer, 0, 0, codebook_of(rig, layer, 0), n_prompt=n)[1]


# Memory.
@pytest.mark.parametrize("n", [1, PAGE, PAGE + 1, 100])
@pytest.mark.parametrize("turns", ["extend", "per_turn"])
def test_the_bytes_of_a_request_are_those_that_are_allocated(n: int, turns: str) -> None:
    rig = PQRig(turns=turns)
    rig.add({0: n})
    pages = rig.pq.codes
    held = pages.pool.allocator.in_use * (pages.pool.layer(0)[0].numel() + pages.pool.layer(1)[0].numel())
    fixed = rig.pq.codebooks.nbytes // ROWS + pages.tail[:, 0].numel()
    assert rig.pq.representation_bytes(n) == held + fixed
    books = 1 if turns == "extend" else 2
    assert rig.pq.representation_bytes(n) == books * 3 * 2 * 8 * 8 * 2 + (2 * -(-n // PAGE) + 3) * PAGE * 4


def test_a_request_that_ends_while_it_is_clustered_leaves_nothing() -> None:
    rig = PQRig(kmeans_threads=1)
    Rig.add(rig, {0: 300, 1: 300})
    rig.algorithm.free(0)
    rig.add({0: 40}, spare=1)
    rig.pq.become_sparse(1, 300)
    for layer in rig.geometry.layers:
        for request, n in ((0, 40), (1, 300)):
            wanted = pq.encode(rig.all_keys(layer, request)[:n], codebook_of(rig, layer, request))
            assert torch.equal(codes_of(rig, layer, request, n), wanted)


def test_requests_have_two_sub_vectors_of_six_bits_by_default() -> None:
    shape = PQRig(mha(1, 8), m=0, b=0).pq.shape
    assert (shape.m, shape.b) == (2, 6)
    with pytest.raises(ConfigError, match="m=2"):
        PQRig(mha(1, 9), m=0, b=0)


def test_a_failure_of_clustering_is_raised() -> None:
    rig = PQRig()
    Rig.add(rig, {0: 60})
    jobs = rig.pq._requests[0].jobs
    broken = rig.pq.clusterer.start(torch.zeros(3, 2, 8), 0, 3)
    jobs[1] = broken
    with pytest.raises(ConfigError, match="at least 16"):
        rig.pq.become_sparse(0, 60)


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


def test_imported_sidecars_can_be_exported() -> None:
    first, second, third = PQRig(), PQRig(), PQRig()
    first.add({0: 83}, spare=60)
    continued(second, first, 120, 80, request=0)
    for _ in range(10):
        second.step([0])
    assert continued(third, second, 140, 128) == 128  # the last page was decoded
    for layer in first.geometry.layers:
        assert torch.equal(codebook_of(third, layer, 1), codebook_of(first, layer, 0))
    check_selection(third, 1, 140, 3)


def test_pages_without_codes_have_no_id() -> None:
    rig = PQRig()
    Rig.add(rig, {0: 20, 1: 83})
    sidecar = exported(rig, 0, 0, 20)
    assert not sidecar.data.any()
    assert len(sidecar.data) == 1
    rig.algorithm.reserve(2, 60)
    assert rig.algorithm.import_sidecar(2, sidecar) == 0
    # Of a prompt that is still clustered, export waits.
    ready = exported(rig, 1, 0, 83)
    assert ready.data[:, :16].any(1).all()
    rig.pq.become_sparse(1, 83)
    again = exported(rig, 1, 0, 83)
    assert torch.equal(ready.data, again.data)


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
    sidecar = exported(second, 0, 0, 150)
    names = [bytes(row[:16].tolist()) for row in sidecar.data]
    assert len(set(names[:5])) == len(set(names[5:])) == 1
    assert names[0] != names[5]
    later = exported(second, 0, 80, 150)
    assert torch.equal(later.data, sidecar.data[5:])
    third = PQRig(turns="per_turn")
    assert continued(third, second, 160, 144) == 80  # the first codebook; what follows is clustered again
    for layer in first.geometry.layers:
        keys = third.all_keys(layer, 1)
        assert torch.equal(codebook_of(third, layer, 1, 1), pq.train(keys[80 : 160 - 8], third.pq.shape, 3, 0))


LENGTHS = {0: 1, 1: 47, 2: 130, 3: 64, 4: 33}


TINY: dict[str, Any] = {"m": 2, "b": 3, "init": 4, "iterations": 3, "block": 16, "cache_tokens": 64, "k_cache": 2}


def life(rig: PQRig, watch: Callable[[], AbstractContextManager[Any]] | None = None) -> list[Selection]:
    """Prefill in chunks and a few steps of changing batches; `watch` may wrap the decoding."""
    rig.add(LENGTHS, chunk=21, spare=40)
    if watch is not None:
        rig.watch = watch
    batches = [rig.step(requests, padding=2) for requests in ([2, 0, 1], [4, 3, 2, 1], [0], [1, 2], [2])]
    batches += [rig.step([3, 1]) for _ in range(20)]  # across a page
    return [selection for batch in batches for selection in batch.values()]


@pytest.mark.parametrize("turns", ["extend", "per_turn"])
@pytest.mark.parametrize("residency", ["blocks", "lru", "device"])
def test_no_step_reads_the_device(residency: str, turns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwatched(*args: Any) -> None:  # its indices are on the host
        with _disable_current_modes():
            dma_copy(*args)

    monkeypatch.setattr("kvcm.gpu_tier.pools.code_pages.dma_copy", unwatched)
    life(PQRig(residency=residency, turns=turns), partial(NoReading, allows_masks=True))


@needs_gpu
@pytest.mark.parametrize("kmeans_device", ["cpu", "device"])
def test_no_step_waits_for_a_gpu(kmeans_device: str) -> None:
    life(PQRig(device="cuda", kmeans_device=kmeans_device))  # whatever is compiled or allocated once
    life(PQRig(device="cuda", kmeans_device=kmeans_device), no_synchronisation)


def test_kernels_agree() -> None:
    """In Triton's interpreter: the same clusters up to rounding, the same codes of them, the same selections."""
    ours, theirs = (PQRig(mha(2, 16, layers=1), kernels=kernels) for kernels in ("triton", "reference"))
    for mine, other in zip(life(ours), life(theirs), strict=True):
        assert torch.equal(mine.lengths, other.lengths)
        assert torch.equal(mine.indices, other.indices)
    for request in LENGTHS:
        torch.testing.assert_close(codebook_of(ours, 0, request), codebook_of(theirs, 0, request), rtol=1e-3, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("kmeans_device", ["cpu", "device"])
def test_a_gpu_finds_the_codes_of_its_centroids(kmeans_device: str) -> None:
    rig = PQRig(mha(2, 64, layers=3), device="cuda", kmeans_device=kmeans_device, kernels="auto")
    life(rig)
    for layer in rig.geometry.layers:
        for request in (1, 2, 3, 4):
            n = rig.n[request]
            keys, book = rig.all_keys(layer, request), codebook_of(rig, layer, request).cpu()
            found = codes_of(rig, layer, request, n).cpu()
            off = (keys - pq.reconstruct(found, book)).square().sum(-1)
            best = (keys - pq.reconstruct(pq.encode(keys, book), book)).square().sum(-1)
            torch.testing.assert_close(off, best, rtol=1e-4, atol=1e-4)


# Through the engine.


@pytest.mark.parametrize("dtype", [KVDtype.BF16, KVDtype.FP8])
def test_codes_of_decoded_tokens_are_those_of_stored_keys(dtype: KVDtype) -> None:
    """An engine hands over keys that are not yet rounded to the stored type."""
    config = config_of("pqcache", {"algo": {**TINY, "token_budget": 40}})
    coordinator = coordinator_of(MODELS["llama"], config, dtype=dtype)
    engine = DecodeEngine(MODELS["llama"], coordinator)
    request = engine.add(prompt(60))
    for _ in range(50):
        engine.step()
    algorithm, n = coordinator.algorithm, coordinator.trackers[request].seq_len
    assert isinstance(algorithm, PQCache)
    window = algorithm.codes.window([(request, n, n)])
    pages = algorithm.pool.table[request, torch.arange(n) // 16].long() * 16 + torch.arange(n) % 16
    for layer in range(2):
        keys = coordinator.key_reader.keys(layer, request, 0, n)
        wanted = pq.encode(keys, algorithm.codebooks[layer, request])
        found = algorithm.codes.codes(layer, window).flatten(0, 1)[pages]
        assert (found == wanted).float().mean() > 0.99


@pytest.mark.parametrize("residency", ["blocks", "lru", "device"])
def test_requests_are_dense_until_they_are_clustered(residency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for that: not the request, nor the others, nor one that ends meanwhile."""
    settings = {"algo": {**TINY, "token_budget": 40}, "residency": residency, "min_sparse_prompt_len": 50}
    coordinator = coordinator_of(MODELS["llama"], config_of("pqcache", {**settings, "device_buffer_size": 80}))
    engine, algorithm = DecodeEngine(MODELS["llama"], coordinator), coordinator.algorithm
    assert isinstance(algorithm, PQCache)
    algorithm.clusters_beside = True
    may_go_on, cluster = threading.Event(), algorithm.clusterer._cluster

    def held_up(*args: Any) -> Any:
        assert may_go_on.wait(30)
        return cluster(*args)

    monkeypatch.setattr(algorithm.clusterer, "_cluster", held_up)
    short, long, ending = (engine.add(prompt(n, n)) for n in (45, 90, 60))
    for _ in range(45):
        engine.step()
    engine.abort(ending)
    states = {request: coordinator.trackers[request].state for request in (short, long)}
    assert states == {short: RequestState.STAGING, long: RequestState.STAGING}  # the short one has outgrown its buffer
    assert coordinator.sparse_tokens == 0
    may_go_on.set()
    while coordinator.trackers[long].state is not RequestState.SPARSE:
        engine.step()
    while coordinator.trackers[short].state is not RequestState.SPARSE:
        engine.step()
    for request, n in ((short, 45), (long, 90)):
        local, _ = algorithm.budgets.tokens(n)
        assert local == 20
        for layer in range(2):
            stop = coordinator.trackers[request].seq_len
            keys = coordinator.key_reader.keys(layer, request, 0, stop)
            until = algorithm._requests[request].clustered[layer] - local
            wanted = pq.train(keys[4:until], algorithm.shape, 3, 0)
            assert torch.equal(algorithm.codebooks[layer, request], wanted)
    engine.step()
    for request in (short, long):
        engine.finish(request)
    assert nothing_is_held(coordinator)


# Adaptive iterations.
def clustering_seconds(tokens: int, count: int) -> float:
    """What clustering takes, as if measured on a machine that does nothing else."""
    return 1e-3 + 1e-6 * tokens * count


def test_iterations_are_measured_kept_and_taken(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    rig = PQRig(iterations=0, max_iterations=7, profile=str(path))
    asked: list[int] = []

    def layer_seconds(tokens: int) -> float:
        asked.append(tokens)
        return 1e3 + tokens  # a layer in which any number of iterations fits

    rig.pq.layer_seconds = layer_seconds
    rig.pq.clusterer._seconds = clustering_seconds
    rig.add({0: 80})
    profile = rig.pq.clusterer.profile()
    assert len(asked) >= 5
    assert profile.model.beta1 == pytest.approx(1e-6)
    assert (profile.fingerprint["threads"], profile.fingerprint["dims"]) == (rig.pq.clusterer.threads, 8)
    for layer in rig.geometry.layers:
        wanted = pq.train(rig.all_keys(layer, 0)[4 : 80 - 8], rig.pq.shape, 7, 0)
        assert torch.equal(codebook_of(rig, layer, 0), wanted)
    again = PQRig(iterations=0, max_iterations=7, profile=str(path))
    again.pq.layer_seconds = None  # not asked for: there is a profile
    again.add({0: 80})
    assert again.pq.clusterer.profile() == profile


def test_a_profile_without_a_folder_is_refused_when_the_engine_is_built(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "profile.json")
    with pytest.raises(ConfigError, match="must be a folder"):
        PQRig(iterations=0, profile=path)
    PQRig(iterations=3, profile=path)  # which is not needed


def test_iterations_that_do_not_fit_are_the_fewest_of_the_settings() -> None:
    rig = PQRig(mha(1, 4, layers=1), iterations=0, min_iterations=5)
    rig.pq.layer_seconds = lambda tokens: 1e-12 * tokens
    rig.pq.clusterer._seconds = clustering_seconds
    assert rig.pq.clusterer.iterations(60) == 5


def test_without_a_profile_a_stand_in_layer_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pq_clustering, "_measured", {})
    rig = PQRig(mha(1, 4, layers=1), iterations=0)
    rig.add({0: 80})
    assert isinstance(rig.algorithm, PQCache)
    assert 3 <= rig.pq.clusterer.iterations(60) <= 300
