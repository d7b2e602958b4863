"""PQCache: what it selects is what plain torch selects by the reconstructed keys, in every state of a request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithm_rig import Rig, ids, mha, mla
from hypothesis import given, settings
from hypothesis import strategies as st
from pqcache_rig import SMALL, PQRig, codebook_of, codes_of, plain_selection
from thoroughness import examples

from gpu_tier.geometry import KVGeometry
from gpu_tier.index import pq
from gpu_tier.rows import KVDtype
from gpu_tier.types import Mode, SteadyRing


@pytest.mark.parametrize("residency", ["blocks", "lru", "device"])
@pytest.mark.parametrize("group", [1, 4])
def test_it_selects_the_tokens_of_the_largest_products(group: int, residency: str) -> None:
    rig = PQRig(members=group, residency=residency)
    lengths = {0: 40, 1: 33, 2: 200, 3: 129, 4: 48, 5: 90}
    rig.add(lengths, chunk=37, spare=24)
    order = [5, 0, 3, 2, 4, 1]
    for _ in range(8):
        for layer, selection in rig.step(order, padding=2).items():
            for row, request in enumerate(order):
                for head in range(2):
                    codebook = codebook_of(rig, layer, request)
                    first, middle = plain_selection(rig, layer, request, head, codebook, n_prompt=lengths[request])
                    window = [*range(SMALL["init"]), *middle, *range(first, rig.n[request])]
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


@pytest.mark.parametrize(
    "geometry",
    [
        mla(136, 128, dtype=KVDtype.FP8),
        mha(1, 16),
        mha(4, 8, start=3),
        mha(dtype=KVDtype.BF16),
    ],
    ids=["mla fp8", "one head", "stage", "bf16"],
)
def test_it_works_for_every_kind_of_kv(geometry: KVGeometry) -> None:
    rig = PQRig(geometry, 4)
    rig.add({0: 90, 1: 37}, chunk=19, spare=5)
    for _ in range(5):
        for layer, selection in rig.step([1, 0]).items():
            for row, request in enumerate([1, 0]):
                for head in range(geometry.num_kv_heads):
                    codebook = codebook_of(rig, layer, request)
                    _, wanted = plain_selection(
                        rig, layer, request, head, codebook, n_prompt=90 if request == 0 else 37
                    )
                    assert ids(selection, row, head) == wanted


def test_the_codebook_is_that_of_the_middle() -> None:
    rig = PQRig()
    rig.add({2: 100}, chunk=33)
    local, _ = rig.pq.budgets.tokens(100)
    for layer in rig.geometry.layers:
        keys = rig.all_keys(layer, 2)
        wanted = pq.train(keys[4 : 100 - local], rig.pq.shape, 3, 0)
        assert torch.equal(codebook_of(rig, layer, 2), wanted)
        assert torch.equal(codes_of(rig, layer, 2, 100), pq.encode(keys, wanted))


@settings(max_examples=examples(60), deadline=None)
@given(
    n=st.integers(1, 120), cuts=st.lists(st.integers(1, 40), max_size=5), repeats=st.integers(1, 2),
    threads=st.sampled_from([1, 4]), staged=st.integers(0, 3),
)  # fmt: skip
def test_neither_chunks_nor_threads_nor_staging_change_the_index(
    n: int, cuts: list[int], repeats: int, threads: int, staged: int
) -> None:
    """`staged` tokens are decoded densely after the prompt, before the request becomes sparse."""
    whole, cut = PQRig(kmeans_threads=1), PQRig(kmeans_threads=threads)
    whole.add({3: n}, spare=8)
    for other in (0, 1):  # beside other requests
        whole.add({other: 50})
    cut.source.of, cut.queries_seen = whole.source.of, whole.queries_seen
    cut.n[3] = 0
    cut.algorithm.reserve(3, n)
    for size in [*cuts, n]:
        if (left := min(size, n - cut.n[3])) > 0:
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
                assert torch.equal(codebook_of(cut, layer, 3), codebook_of(whole, layer, 3))
                assert torch.equal(ours[layer].indices, theirs[layer].indices)


@pytest.mark.parametrize("device", ["cpu", "device"])
def test_where_it_is_clustered_does_not_matter(device: str) -> None:
    one, other = PQRig(), PQRig(kmeans_device=device)
    for rig in (one, other):
        rig.add({0: 77})
    for layer in one.geometry.layers:
        assert torch.equal(codebook_of(one, layer, 0), codebook_of(other, layer, 0))


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


def test_a_request_that_starts_late_gets_the_budget_of_a_prompt_of_that_length() -> None:
    rig = PQRig(token_budget=0, token_ratio=0.5, min_sparse_prompt_len=60)
    Rig.add(rig, {0: 10}, spare=100)
    for _ in range(51):
        rig.step([0])
    rig.pq.become_sparse(0, 61)
    assert rig.pq.budgets.tokens(10) == rig.pq.settings.budget(61)
    assert rig.pq.steady_ring(61) == SteadyRing(4, rig.pq.budgets.tokens(10)[0])
    for _ in range(20):
        for layer, selection in rig.step([0]).items():
            codebook = codebook_of(rig, layer, 0)
            assert ids(selection, 0, 1) == plain_selection(rig, layer, 0, 1, codebook, n_prompt=10)[1]


# Windows.


@settings(max_examples=examples(200), deadline=None)
@given(
    budget=st.integers(0, 300), ratio=st.floats(0.01, 1), local=st.floats(0.01, 1), n=st.integers(1, 500),
    later=st.integers(0, 100), least=st.integers(0, 300), residency=st.sampled_from(["blocks", "lru", "device"]),
)  # fmt: skip
def test_no_request_attends_to_more_than_there_is_room_for(
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


def test_the_ring_holds_the_window() -> None:
    rig = PQRig()
    assert rig.pq.steady_ring(100) == SteadyRing(4, 8)
    assert rig.pq.max_execution_tokens == 4 + 8 + 8
    assert rig.pq.max_items == 8
    shorter = PQRig(min_sparse_prompt_len=27)  # whose middle has 15 tokens
    assert shorter.pq.max_items == 16
    assert shorter.pq.max_execution_tokens == 4 + 8 + 16


def test_windows_of_one_token_are_two() -> None:
    """The token before the current one may still be on its way to the host."""
    assert PQRig(token_budget=2).pq.budgets.tokens(100) == (2, 1)
