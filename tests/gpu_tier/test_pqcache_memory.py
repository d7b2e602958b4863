"""What PQCache holds: clustering anew, exact bytes, and that a request leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from algorithm_rig import PAGE, ROWS, Rig, ids, mha
from pqcache_rig import PQRig, codebook_of, codes_of, continued, plain_selection

from gpu_tier.errors import ConfigError
from gpu_tier.index import pq
from gpu_tier.types import Mode

# Clustering anew.


def test_all_is_clustered_anew_when_it_is_time() -> None:
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


def test_a_step_that_is_broken_off_while_clustering_is_made_good() -> None:
    """The first layer is clustered anew, then the step is planned again: the others must not see half an index."""
    rig = PQRig(rebuild_every=5)
    rig.add({0: 59}, spare=10)
    for _ in range(4):
        rig.step([0])
    rig.n[0] += 1
    rig.algorithm.reserve(0, 64)
    rig.decode(0, rig.batch(Mode.DECODE, [0], [1]))
    rig.n[0] -= 1
    for _ in range(2):
        for layer, selection in rig.step([0]).items():
            codebook = codebook_of(rig, layer, 0)
            if rig.n[0] == 65:
                assert ids(selection, 0) == plain_selection(rig, layer, 0, 0, codebook, n_prompt=59)[1]
    for layer in rig.geometry.layers:
        keys = rig.all_keys(layer, 0)
        assert torch.equal(codebook_of(rig, layer, 0), pq.train(keys[4 : 64 - 8], rig.pq.shape, 3, 0))
        assert torch.equal(codes_of(rig, layer, 0, 65), pq.encode(keys, codebook_of(rig, layer, 0)))


def test_a_step_that_is_broken_off_leaves_two_codebooks_usable() -> None:
    rig = PQRig(turns="per_turn", rebuild_every=5)
    first = PQRig(turns="per_turn")
    first.add({0: 83}, spare=90)
    continued(rig, first, 150, 80)
    for _ in range(4):
        rig.step([1])
    rig.n[1] += 1
    rig.algorithm.reserve(1, 155)
    rig.decode(0, rig.batch(Mode.DECODE, [1], [1]))
    rig.n[1] -= 1
    before = [codebook_of(rig, 0, 1, number) for number in range(2)]
    assert torch.equal(*before)  # layer 0 has one codebook already, wherever it is looked for
    selection = rig.step([1])[0]
    assert ids(selection, 0) == plain_selection(rig, 0, 1, 0, before[0], n_prompt=150)[1]
    for layer in rig.geometry.layers:
        new = codebook_of(rig, layer, 1)
        assert torch.equal(new, pq.train(rig.all_keys(layer, 1)[4 : 155 - 8], rig.pq.shape, 3, 0))
        assert torch.equal(codes_of(rig, layer, 1, 155), pq.encode(rig.all_keys(layer, 1), new))


def test_a_prompt_that_turns_out_longer_is_clustered_whole() -> None:
    rig = PQRig()
    rig.source.make(0, 90)
    for layer in rig.geometry.layers:
        rig.queries_seen[layer, 0] = torch.zeros(90, 4, 8)
    rig.n[0] = 0
    for more in (60, 30):
        rig.algorithm.reserve(0, rig.n[0] + more)
        rig.prefill({0: more})
    rig.algorithm.finish_prompt(0, 90)
    rig.algorithm.become_sparse(0, 90)
    for layer in rig.geometry.layers:
        assert torch.equal(codebook_of(rig, layer, 0), pq.train(rig.all_keys(layer, 0)[4 : 90 - 8], rig.pq.shape, 3, 0))


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


def test_sub_vectors_must_fit() -> None:
    with pytest.raises(ConfigError, match="m=3"):
        PQRig(m=3)


@pytest.mark.parametrize(("dims", "wanted"), [(8, (2, 6)), (9, None)])
def test_short_requests_have_two_sub_vectors_of_six_bits_by_default(dims: int, wanted: tuple[int, int] | None) -> None:
    if wanted is None:
        with pytest.raises(ConfigError, match="m=2"):
            PQRig(mha(1, dims), m=0, b=0)
    else:
        shape = PQRig(mha(1, dims), m=0, b=0).pq.shape
        assert (shape.m, shape.b) == wanted


def test_a_failure_of_clustering_is_heard_of() -> None:
    rig = PQRig()
    Rig.add(rig, {0: 60})
    jobs = rig.pq._requests[0].jobs
    broken = rig.pq.clusterer.start(torch.zeros(3, 2, 8), 0, 3)
    jobs[1] = broken
    with pytest.raises(ConfigError, match="at least 16"):
        rig.pq.become_sparse(0, 60)
