"""The engine over the real coordinator: exact where the settings make algorithms exact, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coordinator_rig import (
    MODELS,
    PAGE,
    WHOLE,
    config_of,
    coordinator_of,
    nothing_is_held,
    prompt,
    whole,
)  # fmt: skip
from engine_rig import plain_forward
from torch import Tensor

from gpu_tier.coordinator import SparseCoordinator
from gpu_tier.engine.decode_engine import DecodeEngine
from gpu_tier.engine.generation import generate
from gpu_tier.engine.latent_model import LatentDecoder, LatentShape
from gpu_tier.manager.prefix_attach import AttachedPrefix, SidecarRun
from gpu_tier.rows import KVDtype
from gpu_tier.trackers import RequestState

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


def run_steps(engine: DecodeEngine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


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
    with pytest.raises(RuntimeError, match="the layer fails"):
        run_steps(failing, 6)
    for request in failing.requests:
        failing.abort(request)
    assert nothing_is_held(coordinator)
    engine = DecodeEngine(LLAMA, coordinator)
    check_against_plain(engine, LLAMA, [engine.add(prompt(64, 64)), engine.add(prompt(20, 20))], 4)


@pytest.mark.parametrize(
    ("algorithm", "name"), [*((name, "llama") for name in sorted(WHOLE)), ("dsa", "latent"), ("quest", "latent")]
)
def test_prompts_that_share_a_prefix_compute_only_what_differs(algorithm: str, name: str) -> None:
    model = MODELS[name]
    config = config_of(algorithm, whole(algorithm, has_indexer=name == "latent"))
    coordinator = coordinator_of(model, config, publishes=True)
    engine = DecodeEngine(model, coordinator, chunk_tokens=40, piece_tokens=24)
    first = engine.add(prompt(100))
    engine.step(), engine.step(), engine.step(), engine.step()
    prefixes = [prefix_of(coordinator, first, 64) for _ in range(2)]
    engine.finish(first)
    requests = [engine.add(prompt(64 + n, 0)[:64] + prompt(n, n), p) for n, p in zip((1, 30), prefixes, strict=True)]
    assert [coordinator.trackers[request].cached_tokens for request in requests] == [64, 64]
    check_against_plain(engine, model, requests, 8)
    for request in requests:
        engine.finish(request)
    assert nothing_is_held(coordinator)


def prefix_of(coordinator: SparseCoordinator, request: int, tokens: int) -> AttachedPrefix:
    """The first tokens of a request in host memory, held once more."""
    manager = coordinator.manager
    manager.settle(request)
    pages = manager.host_tokens.pages(request)[: tokens // PAGE]
    manager.host.allocator.share(list(pages))
    sidecar = coordinator.algorithm.export_sidecar(request, 0, tokens)
    return AttachedPrefix(pages, tokens, () if sidecar is None else (SidecarRun(0, sidecar.data.clone()),))


@pytest.mark.parametrize("algorithm", ["quest", "full_offload", "snapkv", "dsa"])
@pytest.mark.parametrize("window", [16, 48])
def test_a_prompt_longer_than_its_window_on_the_device(algorithm: str, window: int) -> None:
    config = config_of(algorithm, whole(algorithm), prefill_window_tokens=window)
    coordinator = coordinator_of(LLAMA, config)
    engine = DecodeEngine(LLAMA, coordinator, chunk_tokens=16, piece_tokens=24)
    requests = [engine.add(prompt(length, length)) for length in (120, 90)]
    check_against_plain(engine, LLAMA, requests, 18)


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
