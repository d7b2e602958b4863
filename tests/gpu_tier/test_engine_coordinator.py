"""The engine over the real coordinator: exact where settings make it so, alone and in any order of requests."""

from __future__ import annotations

import contextlib
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from coordinator_rig import MODELS, WHOLE, config_of, coordinator_of, nothing_is_held, prompt, whole
from engine_rig import PlainHooks, plain_attention, plain_forward
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_rig import SHORT, Rig
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.algorithms.pqcache import PQCache
from kvcm.gpu_tier.algorithms.retroinfer import RetroInfer
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.coordinator import SparseCoordinator
from kvcm.gpu_tier.engine.batch_engine import generate
from kvcm.gpu_tier.engine.decode_engine import DecodeEngine
from kvcm.gpu_tier.engine.decoder_models import LatentDecoder, LatentShape
from kvcm.gpu_tier.engine.layer_attention import BlockSparse, PrefillAttention, chosen_blocks
from kvcm.gpu_tier.engine.sharing_engine import SharingEngine
from kvcm.gpu_tier.errors import ConfigError, PoolExhaustedError
from kvcm.gpu_tier.geometry import KVDtype, Layout
from kvcm.gpu_tier.index import pq
from kvcm.gpu_tier.index.wave_index import build_segment, prompt_segments
from kvcm.gpu_tier.request_lifecycle import RequestState

LLAMA, LATENT = MODELS["llama"], MODELS["latent"]


def check_against_plain(engine: DecodeEngine, model: Any, requests: list[int], steps: int) -> None:
    """Every token and its logits must be those of a whole forward pass over the request's tokens."""
    for _ in range(steps):
        for request, token in engine.step().items():
            tokens = engine.tokens(request)
            expected = plain_forward(model, tokens[:-1])[-1]
            torch.testing.assert_close(engine.logits[request], expected, rtol=1e-5, atol=1e-5)
            assert token == tokens[-1] == int(expected.argmax())
    assert set(requests) == set(engine.requests)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("algorithm", sorted(WHOLE))
def test_an_algorithm_that_selects_everything_equals_a_whole_forward_pass(algorithm: str, name: str) -> None:
    model = MODELS[name]
    config = config_of(algorithm, whole(algorithm, has_indexer=name == "latent"))
    coordinator = coordinator_of(model, config)
    engine = DecodeEngine(model, coordinator, chunk_tokens=40, piece_tokens=24, pad_to=5)
    requests = [engine.add(prompt(length, length)) for length in (1, 17, 64, 100)]
    check_against_plain(engine, model, requests, 8)
    if algorithm != "full":
        assert RequestState.SPARSE in {coordinator.trackers[r].state for r in requests}


@pytest.mark.parametrize("dtype", [KVDtype.FP8, KVDtype.BF16])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_rounded_kv_does_not_depend_on_the_chunks_of_a_prompt(name: str, dtype: KVDtype) -> None:
    model = MODELS[name]
    logits = []
    for chunk in (100, 7):
        engine = DecodeEngine(model, coordinator_of(model, config_of("full", {}), dtype=dtype), chunk_tokens=chunk)
        request = engine.add(prompt(90))
        while request not in engine.logits:
            engine.step()
        logits.append(engine.logits[request])
    exact = plain_forward(model, prompt(90))[-1]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert (logits[0] - exact).norm() / exact.norm() < (0.2 if dtype is KVDtype.FP8 else 0.02)


@pytest.mark.parametrize("algorithm", sorted(WHOLE))
def test_a_small_arena_gives_the_same_tokens_and_gets_all_its_pages_back(algorithm: str) -> None:
    config = config_of(algorithm, whole(algorithm), host_bytes=1 << 22)
    prompts = [prompt(length, length) for length in (30, 70, 50, 90, 10)]
    roomy = coordinator_of(LLAMA, config)
    expected = generate(DecodeEngine(LLAMA, roomy), prompts, 8)
    tight = coordinator_of(LLAMA, config, pages=30)
    assert generate(DecodeEngine(LLAMA, tight, chunk_tokens=32), prompts, 8) == expected
    assert nothing_is_held(roomy)
    assert nothing_is_held(tight)


class FailingModel:
    """A model whose layer fails in some pass."""

    def __init__(self, model: Any, layer: int, passes: int) -> None:
        self.model, self.layer, self.passes = model, layer, passes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def attention_output(self, layer_id: int, hidden: Tensor, attention: Tensor) -> Tensor:
        self.passes -= layer_id == self.layer
        if self.passes < 0 and layer_id == self.layer:
            raise RuntimeError("the layer fails")
        return LLAMA.attention_output(layer_id, hidden, attention)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("passes", [0, 3])
def test_a_pass_that_fails_leaves_requests_that_can_be_aborted(passes: int, layer: int) -> None:
    coordinator = coordinator_of(LLAMA, config_of("quest", whole("quest"), min_sparse_prompt_len=40))
    failing = DecodeEngine(FailingModel(LLAMA, layer, passes), coordinator, chunk_tokens=80)
    for length in (20, 70, 90):
        failing.add(prompt(length))
    with pytest.raises(RuntimeError, match="the layer fails"):  # noqa: PT012 - some pass fails
        for _ in range(6):
            failing.step()
    for request in failing.requests:
        failing.abort(request)
    assert nothing_is_held(coordinator)
    engine = DecodeEngine(LLAMA, coordinator)
    check_against_plain(engine, LLAMA, [engine.add(prompt(64, 64)), engine.add(prompt(20, 20))], 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("algorithm", sorted(WHOLE))
def test_a_gpu_decodes_what_a_cpu_does(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_TIER_KERNELS", "auto")
    model = LatentDecoder.random(LatentShape(), device="cuda")
    config = config_of(algorithm, whole(algorithm, has_indexer=True))
    coordinator = coordinator_of(model, config, device="cuda")
    prompts = [prompt(length, length) for length in (17, 64, 100)]
    tokens = generate(DecodeEngine(model, coordinator, device="cuda"), prompts, 8)
    cpu = coordinator_of(LATENT, config)
    assert tokens == generate(DecodeEngine(LATENT, cpu), prompts, 8)


LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 120)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(LENGTHS)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["abort", "finish", "retract"]), st.integers(0, 7)),
)


# Settings of algorithms whose representations outlive a step; each selects much less than a request has.
REPRESENTED: dict[str, dict[str, Any]] = {
    "full": {},
    "full_offload": {"algo": {"chunk_tokens": 32}},
    "oracle": {"top_k": 12, "device_buffer_size": 20, "algo": {"k": 12}},
    "streaming_llm": {"top_k": 48, "device_buffer_size": 64, "algo": {"sink": 4, "window": 20, "page": 8}},
    "quest": {"top_k": 48, "algo": {"token_budget": 48, "page": 8, "recent_pages": 2, "skip_layers": 1}},
    "quest per head": {"top_k": 48, "algo": {"token_budget": 48, "page": 8, "skip_layers": 0, "heads": "per_head"}},
    "dsa": {"top_k": 16, "algo": {"index_heads": 4, "index_dim": 32}},
    "snapkv": {"algo": {"cap": 24, "w_obs": 4}},
    "snapkv reselected": {
        "residency": "lru",
        "device_buffer_size": 256,
        "algo": {"cap": 24, "w_obs": 4, "mode": "retrievable", "reselect_every": 5},
    },
}


STEPS = 30


@cache
def alone(algorithm: str, name: str, length: int, seed: int) -> list[int]:
    """What a request gets in an engine of its own."""
    engine = DecodeEngine(MODELS[name], coordinator_of(MODELS[name], represented(algorithm, name)))
    request = engine.add(prompt(length, seed))
    for _ in range(STEPS):
        engine.step()
    return engine.tokens(request)


def represented(algorithm: str, name: str, **changes: Any) -> SparseConfig:
    settings = REPRESENTED[algorithm]
    if algorithm == "dsa" and name == "llama":
        settings = settings | {"algo": {"index_source": "proxy"}}
    return config_of(algorithm.split()[0], settings, min_sparse_prompt_len=17, **changes)


@pytest.mark.parametrize("algorithm", sorted(REPRESENTED))
@settings(max_examples=examples(25), deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    actions=st.lists(ACTIONS, min_size=5, max_size=12),
    chunk=st.sampled_from([7, 16, 64, 200]),
    layout=st.sampled_from(Layout),
    promote=st.booleans(),
)
def test_requests_get_what_they_get_alone(
    algorithm: str, name: str, actions: list[tuple[str, int]], chunk: int, layout: Layout, promote: bool
) -> None:
    config = represented(algorithm, name, host_layout=layout, promote_newest=promote)
    coordinator = coordinator_of(MODELS[name], config, pages=140)
    engine = DecodeEngine(MODELS[name], coordinator, chunk_tokens=chunk)
    lengths: dict[int, int] = {}

    def end(request: int) -> None:
        length = lengths.pop(request)
        tokens, expected = engine.tokens(request), alone(algorithm, name, length, length)
        assert tokens[: len(expected)] == expected[: len(tokens)]
        engine.abort(request)

    for action, value in actions:
        if action == "add":
            with contextlib.suppress(PoolExhaustedError):
                lengths[engine.add(prompt(value, value))] = value
        elif action == "step":
            for _ in range(value):
                engine.step()
        elif lengths:
            end(sorted(lengths)[value % len(lengths)])
    for request in list(lengths):
        end(request)
    assert nothing_is_held(coordinator)


# Shape of the KV that attention reads.
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
def test_the_fewest_blocks_with_the_weight_win(n: int, tokens: int, stride: int, threshold: float, seed: int) -> None:
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
