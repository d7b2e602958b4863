"""Block-sparse prefill: which blocks are attended to, and that an index is what the KV says, however it came about."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from coordinator_rig import MODELS, config_of, coordinator_of, nothing_is_held, prompt
from engine_rig import PlainHooks, plain_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_rig import SHORT, Rig
from thoroughness import examples
from torch import Tensor

from gpu_tier.algorithms.pqcache import PQCache
from gpu_tier.algorithms.retroinfer import RetroInfer
from gpu_tier.coordinator import SparseCoordinator
from gpu_tier.engine.decode_engine import DecodeEngine
from gpu_tier.engine.prefill import PrefillAttention
from gpu_tier.engine.sharing_engine import SharingEngine
from gpu_tier.engine.sparse_prefill import BlockSparse, chosen_blocks
from gpu_tier.errors import ConfigError
from gpu_tier.index import pq
from gpu_tier.index.wave_index import build_segment, prompt_segments

# What is attended to.

HEADS, GROUP, DIMS, BLOCK = 2, 2, 8, 8
SCALE = DIMS**-0.5


def hooks_with(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, PlainHooks]:
    """Return q, k, v of n tokens, and hooks of which request 1 has them."""
    draw = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(n, HEADS * GROUP, DIMS, generator=draw)
    k, v = (torch.randn(n, HEADS, DIMS, generator=draw) for _ in range(2))
    hooks = PlainHooks(DIMS)
    request = hooks.on_request_begin(n)
    hooks.trackers[request].kv[0] = [k, v]
    return q, k, v, hooks


def plain_blocks(q: Tensor, k: Tensor, sparse: BlockSparse) -> list[set[int]]:
    """The blocks that each KV head's queries ``[t, Hq, D]`` choose, with loops."""
    first, s, found = len(k) - len(q), sparse.stride, []
    for head in range(HEADS):
        worth = torch.zeros(-(-len(k) // sparse.block), dtype=torch.float64)
        for one in range(head * GROUP, (head + 1) * GROUP):
            for i in range(0, len(q), s):
                strides = range(0, min(len(k), first + i + s), s)
                scores = torch.tensor([_antidiagonal(q[i : i + s, one], k[j : j + s, head], s) for j in strides])
                for j, weight in zip(strides, (scores * SCALE / s).softmax(0).tolist(), strict=True):
                    worth[j // sparse.block] += weight
        order = sorted(range(len(worth)), key=lambda i: -float(worth[i]))
        chosen, total = {0, len(worth) - 1}, 0.0
        for i in order:
            if total < sparse.threshold * float(worth.sum()):
                chosen.add(i)
            total += float(worth[i])
        found.append(chosen)
    return found


def _antidiagonal(q: Tensor, k: Tensor, stride: int) -> float:
    pairs = [(r, stride - 1 - r) for r in range(stride)]
    return float(sum(q[r].double() @ k[c].double() for r, c in pairs if r < len(q) and c < len(k)))


@settings(max_examples=examples(60), deadline=None)
@given(
    n=st.integers(1, 60), tokens=st.integers(1, BLOCK), stride=st.sampled_from([1, 2, 4, 8]),
    threshold=st.sampled_from([0.3, 0.6, 0.9]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_fewest_blocks_with_the_weight_are_chosen(
    n: int, tokens: int, stride: int, threshold: float, seed: int
) -> None:
    q, k, _, _ = hooks_with(n, seed)
    sparse, q = BlockSparse(BLOCK, stride, threshold), q[n - min(n, tokens) :]
    chosen = chosen_blocks(q, k, SCALE, sparse)
    assert [set(head.nonzero()[:, 0].tolist()) for head in chosen] == plain_blocks(q, k, sparse)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 50])
@pytest.mark.parametrize("chunk", [1, 5, 8, 50])
def test_with_all_blocks_it_is_exact(n: int, chunk: int) -> None:
    q, k, v, hooks = hooks_with(n)
    attention = PrefillAttention(hooks, SCALE, 1 << 20, BlockSparse(BLOCK, 4, threshold=1))
    borders = [*range(0, n, chunk), n]
    parts = [attention.chunk(q[start:stop], 0, 1, stop) for start, stop in pairwise(borders)]
    torch.testing.assert_close(torch.cat(parts), plain_attention(q, k, v, SCALE), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [9, 40, 53])
def test_it_is_attention_over_the_chosen_blocks(n: int) -> None:
    q, k, v, hooks = hooks_with(n)
    sparse = BlockSparse(BLOCK, 4, threshold=0.5)
    found = PrefillAttention(hooks, SCALE, 1 << 20, sparse).chunk(q, 0, 1, n)
    left_out = 0
    for token in range(n):
        block = range(token // BLOCK * BLOCK, min(n, token // BLOCK * BLOCK + BLOCK))
        chosen = plain_blocks(q[block.start : block.stop], k[: block.stop], sparse)
        for head in range(HEADS):
            keys = [i for i in range(token + 1) if i // BLOCK in chosen[head]]
            left_out += token + 1 - len(keys)
            heads = slice(head * GROUP, (head + 1) * GROUP)
            expected = (q[token, heads] @ k[keys, head].T * SCALE).softmax(-1) @ v[keys, head]
            torch.testing.assert_close(found[token, heads], expected, rtol=1e-5, atol=1e-5)
    assert left_out > 0 or n < 2 * BLOCK


@pytest.mark.parametrize("bad", [{"block": 12, "stride": 8}, {"stride": 0}, {"threshold": 0.0}, {"threshold": 1.5}])
def test_settings_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BlockSparse(**bad)


# Indexes.

SPARSE = BlockSparse(block=16, stride=4, threshold=0.6)
TOKENS, NEW = prompt(150), 10


def engine_of(algorithm: str, prefill: str | BlockSparse, chunk: int) -> tuple[DecodeEngine, SparseCoordinator]:
    model = MODELS["llama"]
    coordinator = coordinator_of(model, config_of(algorithm, SHORT[algorithm], residency="device"))
    return DecodeEngine(model, coordinator, chunk_tokens=chunk, prefill=prefill), coordinator


def computed(engine: DecodeEngine) -> int:
    """Compute a prompt; returns its request."""
    request = engine.add(TOKENS)
    while len(engine.tokens(request)) == len(TOKENS):
        engine.step()
    return request


def kv_of(coordinator: SparseCoordinator, request: int) -> list[tuple[Tensor, Tensor]]:
    return [coordinator.key_reader.rows(layer, request, 0, len(TOKENS)) for layer in range(3)]


def check_index(coordinator: SparseCoordinator, request: int) -> None:
    """Check that the index is made of the KV and of nothing else."""
    algorithm = coordinator.algorithm
    for layer, (k, v) in enumerate(kv_of(coordinator, request)):
        if isinstance(algorithm, PQCache):
            local, _ = algorithm.budgets.tokens(len(TOKENS))
            settings = algorithm.settings
            middle = k[settings.init : len(TOKENS) - local]
            codebook = pq.train(middle, algorithm.shape, settings.iterations, settings.seed)
            assert torch.equal(algorithm.codebooks[layer, request * algorithm.books_each], codebook)
            continue
        assert isinstance(algorithm, RetroInfer)
        first = 0
        for segment in prompt_segments(algorithm.settings.sink, len(TOKENS), algorithm.settings):
            centroids, sums, sizes, _ = build_segment(
                k[segment.start : segment.stop], v[segment.start : segment.stop], algorithm.settings
            )
            found = algorithm.index.read(layer, request, first, sizes.shape[1])
            assert torch.equal(found[0], centroids.bfloat16())
            assert torch.equal(found[1], sums.bfloat16())
            first += sizes.shape[1]
        assert algorithm.segments.of(layer, request).clusters == first > 0


@pytest.mark.parametrize("chunk", [150, 64, 48, 7])
@pytest.mark.parametrize("algorithm", ["retroinfer", "pqcache"])
def test_the_index_is_what_the_kv_says(algorithm: str, chunk: int) -> None:
    engine, coordinator = engine_of(algorithm, SPARSE, chunk)
    request = computed(engine)
    check_index(coordinator, request)
    exact, other = engine_of(algorithm, "exact", chunk)
    pairs = list(zip(kv_of(coordinator, request), kv_of(other, computed(exact)), strict=True))
    assert torch.equal(pairs[0][0][0], pairs[0][1][0])  # the first layer's KV comes before any attention
    assert all(not torch.allclose(one[0], two[0], atol=1e-2) for one, two in pairs[1:])
    while len(engine.tokens(request)) < len(TOKENS) + NEW:
        engine.step()
    engine.finish(request)
    assert nothing_is_held(coordinator)


@pytest.mark.parametrize("algorithm", ["retroinfer", "pqcache"])
def test_chunks_that_end_at_blocks_change_nothing(algorithm: str) -> None:
    answers = []
    for chunk in (150, 64, 16):
        engine, _ = engine_of(algorithm, SPARSE, chunk)
        request = computed(engine)
        while len(engine.tokens(request)) < len(TOKENS) + NEW:
            engine.step()
        answers.append(engine.tokens(request))
    assert answers[0] == answers[1] == answers[2]


def test_kv_that_is_not_exact_is_not_shared() -> None:
    rig = Rig("llama", "retroinfer", None, lambda _: ())
    engine = DecodeEngine(MODELS["llama"], rig.coordinator, prefill=SPARSE)
    with pytest.raises(ConfigError, match="exact"):
        SharingEngine(engine, rig.coordinator, rig.store)
