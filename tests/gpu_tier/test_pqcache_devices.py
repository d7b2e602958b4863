"""PQCache on every implementation of the kernels, without waiting for the device, and through the whole engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_rig import mha
from coordinator_rig import MODELS, config_of, coordinator_of, nothing_is_held, prompt
from pqcache_rig import PQRig, codebook_of, codes_of
from test_algorithms_devices import _no_synchronisation, _NoWaiting, needs_gpu
from torch.utils._python_dispatch import _disable_current_modes

from gpu_tier.algorithms.pqcache import PQCache
from gpu_tier.engine.decode_engine import DecodeEngine
from gpu_tier.errors import ConfigError
from gpu_tier.index import iterations, pq
from gpu_tier.kernels.dma_copy import dma_copy
from gpu_tier.rows import KVDtype
from gpu_tier.trackers import RequestState
from gpu_tier.types import Selection

LENGTHS = {0: 1, 1: 47, 2: 130, 3: 64, 4: 33}
TINY: dict[str, Any] = {"m": 2, "b": 3, "init": 4, "iterations": 3, "block": 16, "cache_tokens": 64, "k_cache": 2}


def life(rig: PQRig, watch: Callable[[], AbstractContextManager[Any]] | None = None) -> list[Selection]:
    """Prefill in chunks and a few steps of changing batches; what is decoded may be watched."""
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

    monkeypatch.setattr("gpu_tier.pools.code_pages.dma_copy", unwatched)
    life(PQRig(residency=residency, turns=turns), _NoWaiting)


@needs_gpu
@pytest.mark.parametrize("kmeans_device", ["cpu", "device"])
def test_no_step_waits_for_a_gpu(kmeans_device: str) -> None:
    life(PQRig(device="cuda", kmeans_device=kmeans_device))  # whatever is compiled or allocated once
    life(PQRig(device="cuda", kmeans_device=kmeans_device), _no_synchronisation)


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


def generated(model: str, algorithm: str, settings: dict[str, Any], steps: int = 30) -> list[list[int]]:
    coordinator = coordinator_of(MODELS[model], config_of(algorithm, settings))
    engine = DecodeEngine(MODELS[model], coordinator)
    requests = [engine.add(prompt(n, n)) for n in (100, 40, 7, 150)]
    for _ in range(steps):
        engine.step()
    assert (coordinator.sparse_tokens > 0) == (algorithm != "full")
    tokens = [engine.tokens(request) for request in requests]
    for request in requests:
        engine.finish(request)
    assert nothing_is_held(coordinator)
    return tokens


@pytest.mark.parametrize("residency", ["blocks", "lru", "device"])
@pytest.mark.parametrize("model", MODELS)
def test_a_budget_of_everything_is_full_attention(model: str, residency: str) -> None:
    settings = {"algo": {**TINY, "token_budget": 200}, "residency": residency, "device_buffer_size": 240, "top_k": 200}
    assert generated(model, "pqcache", settings) == generated(model, "full", {})


@pytest.mark.parametrize("model", MODELS)
def test_residencies_generate_the_same(model: str) -> None:
    algo = {**TINY, "token_budget": 40, "rebuild_every": 12}
    buffer = {"device_buffer_size": 120}
    tokens = [
        generated(model, "pqcache", {"algo": algo, "residency": residency, **buffer}, 40)
        for residency in ("blocks", "lru", "device")
    ]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("dtype", [KVDtype.BF16, KVDtype.FP8])
def test_codes_of_decoded_tokens_are_those_of_stored_keys(dtype: KVDtype) -> None:
    """An engine hands over keys that are not yet rounded to what is stored."""
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
    """And nobody waits for that: not the request, nor the others, nor one that ends meanwhile."""
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


def test_iterations_are_measured_kept_and_taken(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    rig = PQRig(iterations=0, max_iterations=7, profile=str(path))
    asked: list[int] = []

    def layer_seconds(tokens: int) -> float:
        asked.append(tokens)
        return 1e3 + tokens  # a layer in which any number of iterations fits

    rig.pq.layer_seconds = layer_seconds
    rig.add({0: 80})
    profile = rig.pq.clusterer.profile()
    assert len(asked) >= 5
    assert profile.model.beta1 > 0
    assert profile.fingerprint["threads"] == rig.pq.clusterer.threads
    for layer in rig.geometry.layers:
        wanted = pq.train(rig.all_keys(layer, 0)[4 : 80 - 8], rig.pq.shape, 7, 0)
        assert torch.equal(codebook_of(rig, layer, 0), wanted)
    again = PQRig(iterations=0, max_iterations=7, profile=str(path))
    again.pq.layer_seconds = None  # not asked for: there is a profile
    again.add({0: 80})
    assert again.pq.clusterer.profile() == profile
    other = PQRig(mha(2, 16), iterations=0, profile=str(path))
    other.pq.layer_seconds = layer_seconds
    with pytest.raises(ConfigError, match="'dims': 16"):
        other.add({0: 80})
    path.write_text("{")
    broken = PQRig(iterations=0, profile=str(path))
    with pytest.raises(ConfigError, match="delete it"):
        broken.add({0: 80})


def test_a_profile_without_a_folder_is_refused_when_the_engine_is_built(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "profile.json")
    with pytest.raises(ConfigError, match="must be a folder"):
        PQRig(iterations=0, profile=path)
    PQRig(iterations=3, profile=path)  # which is not needed


def test_iterations_that_do_not_fit_are_the_fewest_of_the_settings() -> None:
    rig = PQRig(mha(1, 4, layers=1), iterations=0, min_iterations=5)
    rig.pq.layer_seconds = lambda tokens: 1e-12 * tokens
    assert rig.pq.clusterer.iterations(60) == 5


def test_without_a_profile_a_stand_in_layer_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "_measured", {})
    rig = PQRig(mha(1, 4, layers=1), iterations=0)
    rig.add({0: 80})
    assert isinstance(rig.algorithm, PQCache)
    assert 3 <= rig.pq.clusterer.iterations(60) <= 300
