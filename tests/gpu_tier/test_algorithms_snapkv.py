"""SnapKV: the set is what the prompt's last queries vote for, and new tokens are appended to it in order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithm_rig import Rig, ids, mha, mla, top
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.algorithms.snapkv import SnapKV
from gpu_tier.errors import ConfigError, StateError
from gpu_tier.geometry import KVGeometry
from gpu_tier.rows import KVDtype
from gpu_tier.types import Mode

W, CAP = 4, 14
SMALL: dict[str, Any] = {"w_obs": W, "cap": CAP, "kernel": 3}


def make(geometry: KVGeometry | None = None, members: int = 2, *, residency: str = "", **algo: Any) -> Rig:
    return Rig(geometry or mha(), "snapkv", members, {**SMALL, **algo}, residency=residency)


def snapkv(rig: Rig) -> SnapKV:
    assert isinstance(rig.algorithm, SnapKV)
    return rig.algorithm


def plain_votes(rig: Rig, layer: int, request: int, head: int, n: int, first_seen: int) -> list[float]:
    """Votes for the tokens before the window, in plain Python over f64."""
    members, pool, kernel = rig.group, snapkv(rig).settings.pool, snapkv(rig).settings.kernel
    keys = rig.source.of[layer, request][:n, head].double()
    candidates = n - min(W, n)
    total = [0.0] * candidates
    for member in range(members):
        votes = [0.0] * candidates
        for position in range(max(first_seen, n - W), n):
            query = rig.queries_seen[layer, request][position, head * members + member].double()
            weights = ((keys[: position + 1] @ query) * rig.context.sm_scale).softmax(0).tolist()
            votes = [vote + weight for vote, weight in zip(votes, weights, strict=False)]
        for i in range(candidates):
            near = [votes[j] for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < candidates]
            total[i] += sum(near) / kernel if pool == "avg" else max(near)
    return total


def plain_set(rig: Rig, layer: int, request: int, head: int, n: int, first_seen: int = 0) -> list[int]:
    window = min(W, n)
    kept = snapkv(rig).settings.kept(n)
    return [*top(plain_votes(rig, layer, request, head, n, first_seen), kept - window), *range(n - window, n)]


LENGTHS = {0: 1, 1: W, 2: CAP - 1, 3: CAP, 4: CAP + 1, 5: 100}


@pytest.mark.parametrize(
    "algo", [{}, {"pool": "max"}, {"kernel": 1}, {"kernel": 7, "pool": "max"}, {"ratio": 0.3}], ids=str
)
@pytest.mark.parametrize("members", [1, 4])
def test_the_set_is_what_the_last_queries_vote_for(members: int, algo: dict[str, Any]) -> None:
    rig = make(members=members, **algo)
    rig.add(LENGTHS, spare=1)
    selections = rig.step(range(6), padding=2)
    for layer in rig.geometry.layers:
        for request, n in LENGTHS.items():
            chosen = rig.algorithm.static_items(request, layer).tolist()
            for head in range(2):
                assert chosen[head] == plain_set(rig, layer, request, head, n)
                assert ids(selections[layer], request, head) == [*chosen[head], n]
        assert not selections[layer].lengths[6:].any()


@pytest.mark.parametrize(
    "geometry",
    [mla(136, 128, dtype=KVDtype.FP8), mha(1), mha(start=3), mha(dtype=KVDtype.BF16)],
    ids=["mla fp8", "one head", "stage", "bf16"],
)
def test_it_works_for_every_kind_of_kv(geometry: KVGeometry) -> None:
    rig = make(geometry, 4)
    if geometry.dtype is not KVDtype.F32:  # such a model's queries are bf16
        rig._random_queries = lambda n, draw=rig._random_queries: draw(n).bfloat16().float()  # type: ignore[method-assign, misc]
    rig.add({0: 90, 1: 37}, chunk=19)
    for layer in geometry.layers:
        for request in (0, 1):
            for head in range(geometry.num_kv_heads):
                chosen = rig.algorithm.static_items(request, layer)[head].tolist()
                assert chosen == plain_set(rig, layer, request, head, rig.n[request])


@settings(max_examples=examples(120), deadline=None)
@given(n=st.integers(1, 60), cuts=st.lists(st.integers(1, 20), max_size=10), repeats=st.integers(1, 2))
def test_how_the_prompt_was_cut_does_not_matter(n: int, cuts: list[int], repeats: int) -> None:
    """Chunks that are shorter than the window too, and chunks that come twice."""
    whole, cut = make(), make()
    whole.add({3: n})
    cut.source.of, cut.queries_seen, cut.n[3] = whole.source.of, whole.queries_seen, 0
    for size in [*cuts, *[1] * n]:
        if size <= n - cut.n[3]:
            cut.algorithm.reserve(3, cut.n[3] + size)
            cut.prefill({3: size}, repeats=repeats)
    cut.algorithm.finish_prompt(3, n)
    for layer in cut.geometry.layers:
        assert torch.equal(cut.algorithm.static_items(3, layer), whole.algorithm.static_items(3, layer))


def test_of_an_attached_prefix_only_the_suffix_votes() -> None:
    rig = make()
    rig.add({0: 50})
    rig.copy_request(0, 1)
    rig.algorithm.reserve(1, 50)
    rig.n[1] = 48
    rig.prefill({1: 2})
    rig.algorithm.finish_prompt(1, 50)
    for layer in rig.geometry.layers:
        for head in range(2):
            chosen = rig.algorithm.static_items(1, layer)[head].tolist()
            assert chosen == plain_set(rig, layer, 1, head, 50, first_seen=48)


def test_new_tokens_follow_the_set_in_the_order_in_which_they_come() -> None:
    rig = make()
    rig.add({0: 40, 1: 9, 2: 100}, chunk=13, spare=40)
    widths = set()
    for step in range(40):
        order = [[0, 1, 2], [2, 0], [1]][step % 3]
        for layer, selection in rig.step(order, padding=step % 2).items():
            widths.add(selection.indices.shape[-1])
            for row, request in enumerate(order):
                n_prompt = {0: 40, 1: 9, 2: 100}[request]
                for head in range(2):
                    fixed = rig.algorithm.static_items(request, layer)[head].tolist()
                    assert ids(selection, row, head) == [*fixed, *range(n_prompt, rig.n[request])]
    assert widths == {CAP + 16, CAP + 32}
    assert max(widths) <= rig.algorithm.max_items


@pytest.mark.parametrize("every", [1, 7])
def test_reselection_chooses_anew_with_the_last_queries(every: int) -> None:
    rig = make(mode="retrievable", reselect_every=every)
    assert rig.context.config.residency == "lru"
    lengths = {0: 40, 1: 9}
    rig.add(lengths, spare=20)
    since = dict(lengths)
    for step in range(20):
        selections = rig.step([1, 0])
        again = {layer: rig.decode(layer, rig.batch(Mode.DECODE, [1, 0], [1, 1])) for layer in rig.geometry.layers}
        for request in lengths:
            if rig.n[request] - since[request] >= every:
                since[request] = rig.n[request]
        for layer, selection in selections.items():
            assert torch.equal(selection.indices, again[layer].indices)
            assert selection.indices.shape[-1] <= rig.algorithm.max_items == CAP + every
            for row, request in enumerate([1, 0]):
                for head in range(2):
                    fixed = plain_set(rig, layer, request, head, since[request])
                    assert ids(selection, row, head) == [*fixed, *range(since[request], rig.n[request])], step


def test_queries_that_nobody_saw_do_not_vote_later() -> None:
    """A step that the algorithm was not asked in leaves a gap; what is behind the gap votes alone."""
    rig = make(mode="retrievable", reselect_every=4)
    rig.add({0: 40}, spare=8)
    rig.step([0])
    rig.n[0] += 2  # two steps without a selection
    selections = rig.step([0])
    for layer in rig.geometry.layers:
        assert ids(selections[layer], 0, 1) == plain_set(rig, layer, 0, 1, 44, first_seen=43)


def test_a_set_that_changes_cannot_stay_in_place() -> None:
    with pytest.raises(ConfigError, match="residency='static'"):
        make(mode="retrievable", reselect_every=4, residency="static")


def test_the_prompt_must_be_complete_before_there_is_a_set() -> None:
    rig = make()
    rig.source.make(0, 30)
    rig.algorithm.reserve(0, 30)
    with pytest.raises(StateError, match="before finish_prompt"):
        rig.algorithm.static_items(0, 0)
    with pytest.raises(StateError, match="token 29"):
        rig.algorithm.finish_prompt(0, 30)


@pytest.mark.parametrize("algo", [{}, {"ratio": 0.25}, {"mode": "retrievable", "reselect_every": 5}], ids=str)
def test_the_bytes_of_a_request_are_its_sets_and_its_last_queries(algo: dict[str, Any]) -> None:
    rig = make(**algo)
    algorithm = snapkv(rig)
    algorithm.reserve(0, 90)
    allocated = algorithm._windows.nbytes + algorithm._sets[:, 0].nbytes
    widest = CAP if "ratio" not in algo else math.ceil(0.25 * rig.context.max_tokens)
    assert algorithm.representation_bytes(90) == allocated == 3 * (W * 4 * 8 * 4 + 2 * widest * 4)
    rig.add({0: 90})
    assert bool(algorithm._windows.nbytes) == bool("reselect_every" in algo)
    algorithm.free(0)
    assert algorithm._windows.nbytes == 0
    assert algorithm.export_sidecar(0, 0, 64) is None
