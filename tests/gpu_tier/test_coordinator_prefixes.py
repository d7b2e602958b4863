"""Attached prefixes in every algorithm and residency: the same bits as if the prompt had been computed whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import retrieval_cases
import torch
from layer_traffic import Shape, Traffic
from prefix_traffic import diverging, host_rows_are_right, prefix_of, publishing
from retrieval_cases import BLOCKS

from gpu_tier.errors import ConfigError
from gpu_tier.rows import KVDtype
from gpu_tier.trackers import RequestState

INDEXER = {"index_heads": 4, "index_dim": 16}
QUEST = {"page": 4, "token_budget": 24}
SNAPKV = {"w_obs": 4, "cap": 16, "kernel": 3}
# By default a prompt that continues a prefix keeps the prefix's centroids, which are not those of the whole prompt.
RETRIEVAL = {
    name: {**case, "algo": {**case["algo"], "turns": "rebuild"}} if case["algorithm"] == "pqcache" else case
    for name, case in retrieval_cases.CASES.items()
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"algorithm": "full"},
    "full_offload": {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}},
    "oracle lru": {"algorithm": "oracle", "algo": {"k": 16}, "device_buffer_size": 20},
    "oracle device": {"algorithm": "oracle", "algo": {"k": 16}, "residency": "device"},
    "streaming_llm": {"algorithm": "streaming_llm", "algo": {"page": 4, "window": 16}},
    "quest lru": {"algorithm": "quest", "algo": {**QUEST, "skip_layers": 0}},
    "quest lru, layers skipped": {"algorithm": "quest", "algo": {**QUEST, "skip_layers": 4}},
    "quest device, layers skipped": {
        "algorithm": "quest", "algo": {**QUEST, "skip_layers": 4}, "residency": "device"
    },
    "quest lru, all layers skipped": {"algorithm": "quest", "algo": {**QUEST, "skip_layers": 9}},
    "quest, a window": {"algorithm": "quest", "algo": {**QUEST, "skip_layers": 4}, "prefill_window_tokens": 12},
    "dsa lru": {"algorithm": "dsa", "top_k": 16, "algo": INDEXER, "device_buffer_size": 20},
    "dsa device": {"algorithm": "dsa", "top_k": 16, "algo": INDEXER, "residency": "device"},
    "snapkv static": {"algorithm": "snapkv", "algo": SNAPKV},
    "snapkv lru": {"algorithm": "snapkv", "algo": {**SNAPKV, "mode": "retrievable", "reselect_every": 5}},
    "snapkv device": {"algorithm": "snapkv", "algo": SNAPKV, "residency": "device"},
    **RETRIEVAL,
    **{f"{name}, a window": {**RETRIEVAL[name], "prefill_window_tokens": 12} for name in BLOCKS},
}  # fmt: skip
CASES |= {f"{name}, dense": {**CASES[name], "min_sparse_prompt_len": 200} for name in ("quest lru", "dsa lru", "full")}
SHAPE = Shape(start_layer=3, max_requests=6)  # a later stage; `skip_layers` 4 leaves one of its layers dense
PROMPT, PREFIX, STEPS = 77, 64, 12


def decoded(traffic: Traffic, request: int, steps: int = STEPS) -> torch.Tensor:
    traffic.prompt([request], chunk=9)
    return torch.stack([traffic.decode([request]) for _ in range(steps)])


@pytest.mark.parametrize("name", CASES)
def test_a_request_with_a_prefix_decodes_the_same_bits_and_its_host_pages_hold_its_kv(name: str) -> None:
    traffic = publishing(SHAPE, CASES[name])
    whole = traffic.begin(PROMPT, seed=1)
    expected = decoded(traffic, whole)
    assert host_rows_are_right(traffic, whole) == PROMPT + STEPS
    attached = traffic.begin(PROMPT, 1, prefix_of(traffic, 1, PREFIX))
    assert traffic.coordinator.trackers[attached].cached_tokens == PREFIX
    assert torch.equal(decoded(traffic, attached), expected)
    assert host_rows_are_right(traffic, attached) == PROMPT + STEPS
    for request in (whole, attached):
        traffic.end(request)
    traffic.assert_empty()


@pytest.mark.parametrize("name", [*list(CASES)[::3], "quest, a window"])
def test_two_requests_share_a_prefix_and_diverge(name: str) -> None:
    traffic = publishing(SHAPE, CASES[name])
    prefix = prefix_of(traffic, 1, PREFIX)
    traffic.coordinator.manager.host.allocator.share(prefix.pages)
    shared = [traffic.begin(PROMPT, seed, prefix) for seed in (1, 2)]
    traffic.sequences[shared[1]] = diverging(traffic, 1, 2, PREFIX)
    traffic.prompt(shared, chunk=9)
    together = torch.stack([traffic.decode(shared) for _ in range(STEPS)])
    for request in shared:
        assert host_rows_are_right(traffic, request) == PROMPT + STEPS
        traffic.end(request)
    for row, seed in enumerate((1, 2)):
        alone = traffic.begin(PROMPT, seed)
        traffic.sequences[alone] = diverging(traffic, 1, seed, PREFIX)
        torch.testing.assert_close(together[:, :, row], decoded(traffic, alone)[:, :, 0], rtol=1e-5, atol=1e-5)
        traffic.end(alone)
    traffic.assert_empty()


@pytest.mark.parametrize("dtype", [KVDtype.F32, KVDtype.FP8])
@pytest.mark.parametrize("name", ["quest lru, layers skipped", "quest device, layers skipped", "quest, a window"])
def test_bounds_that_are_attached_and_bounds_that_are_rebuilt_select_the_same(name: str, dtype: KVDtype) -> None:
    """What is rebuilt is made of what is stored, so what was computed has to be made of that, too."""
    traffic = publishing(replace(SHAPE, dtype=dtype), CASES[name])
    outputs, sidecars = [], []
    for has_sidecar in (True, False):
        request = traffic.begin(PROMPT, 1, prefix_of(traffic, 1, PREFIX, has_sidecar=has_sidecar))
        outputs.append(decoded(traffic, request))
        sidecar = traffic.coordinator.algorithm.export_sidecar(request, 0, PREFIX)
        assert sidecar is not None
        sidecars.append(sidecar.data)
        traffic.end(request)
    assert torch.equal(*outputs)
    assert torch.equal(*sidecars)


def test_index_keys_that_are_missing_are_an_error_that_releases_the_prefix() -> None:
    traffic = publishing(SHAPE, CASES["dsa lru"])
    prefix = prefix_of(traffic, 1, PREFIX, has_sidecar=False)
    with pytest.raises(ConfigError, match="must cover 64"):
        traffic.coordinator.on_request_begin(PROMPT, prefix)
    traffic.assert_empty()


@pytest.mark.parametrize("name", ["oracle lru", "streaming_llm", "snapkv static"])
def test_what_an_algorithm_does_not_represent_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = publishing(SHAPE, CASES[name])
    prefix = prefix_of(traffic, 1, PREFIX)

    def read(*args: Any) -> Any:
        raise AssertionError("all keys of the prefix are read for nothing")

    monkeypatch.setattr(traffic.coordinator.manager.host, "read", read)
    traffic.begin(PROMPT, 1, prefix)


@pytest.mark.parametrize("name", [name for name in CASES if "dense" in name])
def test_a_dense_request_with_a_prefix_becomes_sparse_when_it_has_grown(name: str) -> None:
    traffic = publishing(SHAPE, {**CASES[name], "min_sparse_prompt_len": 90})
    request = traffic.begin(PROMPT, 1, prefix_of(traffic, 1, PREFIX))
    traffic.prompt([request])
    tracker = traffic.coordinator.trackers[request]
    assert tracker.state is RequestState.DENSE
    for _ in range(30):
        traffic.decode([request])
    assert tracker.state is (RequestState.DENSE if name.startswith("full") else RequestState.SPARSE)
    assert host_rows_are_right(traffic, request) == PROMPT + 30
    assert tracker.exact_tokens == (PROMPT + 30 if name.startswith("full") else 91)


def test_a_prefix_that_names_other_pages_than_its_tokens_is_refused_and_released() -> None:
    traffic = publishing(SHAPE, CASES["quest lru, layers skipped"])
    prefix = prefix_of(traffic, 1, PREFIX)
    with pytest.raises(ConfigError, match="whole pages of 8 tokens"):
        traffic.coordinator.on_request_begin(PROMPT, replace(prefix, n_tokens=PREFIX + 8))
    traffic.assert_empty()
