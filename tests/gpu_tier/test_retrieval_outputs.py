"""RetroInfer and PQCache through the whole coordinator: outputs depend on what is selected, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_traffic import Shape, Traffic
from retrieval_cases import BLOCKS, PQ, WAVE

from gpu_tier.rows import KVDtype

SHAPE = Shape(device_pages=200)
LENGTHS, STEPS = (60, 17, 110), 10


def decode(
    shape: Shape, config: dict[str, Any], lengths: tuple[int, ...] = LENGTHS, steps: int = STEPS
) -> tuple[torch.Tensor, Traffic]:
    traffic = Traffic(shape, config)
    requests = [traffic.begin(n, seed=i + 1) for i, n in enumerate(lengths)]
    traffic.prompt(requests, 13)
    out = torch.stack([traffic.decode(requests, pad_to=len(requests) + 1) for _ in range(steps)])
    assert traffic.checked > 0
    return out, traffic


def changed(name: str, **algo: Any) -> dict[str, Any]:
    return {**BLOCKS[name], "algo": {**BLOCKS[name]["algo"], **algo}}


RATIOS: list[dict[str, Any]] = [{"cache_ratio": 0.0}, {"cache_ratio": 0.05}, {}, {"cache_ratio": 1.0}]
CACHES: dict[str, list[dict[str, Any]]] = {
    "pqcache": [
        {"cache_tokens": 0}, {}, {"cache_tokens": 256, "k_cache": 64}, {"policy": "random"}, {"policy": "lfu"},
        {"cache_unit": "token"},
    ],
    "retroinfer": [*RATIOS, {"policy": "random"}, {"async_update": False}],
    "retroinfer gpu control": RATIOS,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [KVDtype.BF16])
@pytest.mark.parametrize("name", BLOCKS)
def test_outputs_are_the_same_bits_whatever_is_cached(name: str, dtype: KVDtype) -> None:
    shape = Shape(device_pages=200, dtype=dtype)
    without, *others = (decode(shape, changed(name, **algo))[0] for algo in CACHES[name])
    for number, out in enumerate(others):
        assert torch.equal(out, without), CACHES[name][number + 1]


EVERYTHING: dict[str, dict[str, Any]] = {
    "pqcache": {"token_budget": 256},
    "retroinfer": {"retrieval": 1.0, "estimation": 0.0},
    "retroinfer gpu control": {"retrieval": 1.0, "estimation": 0.0},
}


@pytest.mark.parametrize("start_layer", [7])
@pytest.mark.parametrize("name", BLOCKS)
def test_what_retrieves_everything_is_full_attention(name: str, start_layer: int) -> None:
    out, traffic = decode(Shape(device_pages=200, start_layer=start_layer), changed(name, **EVERYTHING[name]))
    for row, (request, n) in enumerate(zip(traffic.sequences, LENGTHS, strict=True)):
        for step in range(STEPS):
            exact = traffic.exact(request, n + step)
            torch.testing.assert_close(out[step, :, row], exact, rtol=1e-4, atol=1e-4)


def test_a_budget_larger_than_requests_takes_no_more_memory_than_they_do() -> None:
    config, lengths = changed("pqcache", token_budget=1 << 20), (60, 17)
    out, traffic = decode(SHAPE, config, lengths, 3)
    blocks = traffic.coordinator.manager.blocks
    assert blocks is not None
    assert blocks.execution.tokens_per_row == SHAPE.max_tokens
    for row, (request, n) in enumerate(zip(traffic.sequences, lengths, strict=True)):
        for step in range(3):
            torch.testing.assert_close(out[step, :, row], traffic.exact(request, n + step), rtol=1e-4, atol=1e-4)


ALL_STEADY: dict[str, dict[str, Any]] = {
    "pqcache": {"init": 0, "token_budget": 80},
    "retroinfer": {"sink": 0},
    "retroinfer gpu control": {"sink": 0},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_requests_without_a_sink_of_steady_tokens_alone_attend_to_all_of_them(name: str) -> None:
    # The first token of the recent ones is then token 0.
    lengths, steps = (1, 5, 8), 6
    config = {**changed(name, **ALL_STEADY[name]), "min_sparse_prompt_len": 1}
    out, traffic = decode(SHAPE, config, lengths, steps)
    for row, (request, n) in enumerate(zip(traffic.sequences, lengths, strict=True)):
        for step in range(steps):
            torch.testing.assert_close(out[step, :, row], traffic.exact(request, n + step), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_row_alone_and_in_a_batch_attends_to_the_same(name: str) -> None:
    together, _ = decode(SHAPE, BLOCKS[name])
    for row, n in enumerate(LENGTHS):
        traffic = Traffic(SHAPE, BLOCKS[name])
        request = traffic.begin(n, seed=row + 1)
        traffic.prompt([request])
        alone = torch.stack([traffic.decode([request])[:, 0] for _ in range(STEPS)])
        torch.testing.assert_close(together[:, :, row], alone, rtol=1e-5, atol=1e-5)


WAVE_DEVICE = {"algorithm": "retroinfer", "algo": {**WAVE, "mode": "gpu_only"}}
PQ_OTHERS = [{"residency": "device"}, {"residency": "lru", "device_buffer_size": 64}]


@pytest.mark.parametrize("estimation", [0.0, 0.3])
@pytest.mark.parametrize("name", [name for name in BLOCKS if "retroinfer" in name])
def test_clusters_on_the_device_and_in_blocks_give_the_same_bits(name: str, estimation: float) -> None:
    # Rows that are dense are attended to in one call with the others on the device: their bits may differ.
    lengths = tuple(n for n in LENGTHS if n > 18)
    on_device = {**WAVE_DEVICE, "algo": {**WAVE_DEVICE["algo"], "estimation": estimation}}
    in_blocks, _ = decode(SHAPE, changed(name, estimation=estimation), lengths)
    assert torch.equal(decode(SHAPE, on_device, lengths)[0], in_blocks)


@pytest.mark.parametrize("other", PQ_OTHERS)
def test_tokens_in_other_residencies_are_the_same_set(other: dict[str, Any]) -> None:
    in_blocks, _ = decode(SHAPE, BLOCKS["pqcache"])
    out, _ = decode(SHAPE, {"algorithm": "pqcache", "algo": PQ, **other})
    torch.testing.assert_close(out, in_blocks, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in BLOCKS if "retroinfer" in name])
@pytest.mark.parametrize("settings", [{}, {"prefill_window_tokens": 20}])
def test_clusters_have_no_second_copy_on_the_host(name: str, settings: dict[str, Any]) -> None:
    traffic = Traffic(SHAPE, {**BLOCKS[name], **settings})
    manager = traffic.coordinator.manager
    assert (manager.host.allocator.num_pages == 1) is (not settings)
    request = traffic.begin(70, seed=1)
    traffic.prefill([request], [40])
    assert (manager.host.allocator.in_use > 0) is bool(settings)
    traffic.prompt([request])
    for _ in range(STEPS):
        traffic.decode([request])
    assert manager.blocks is not None
    assert manager.blocks.store is not None
    assert manager.host.allocator.in_use == 0 < manager.blocks.store.allocator.in_use
    traffic.end(request)
    traffic.assert_empty()
