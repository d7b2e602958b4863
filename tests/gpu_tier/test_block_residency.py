"""Residency `blocks` in the framework, with selections that change wildly: what attention reads, and what is held.

`Traffic` checks in each step that the execution buffer holds the steady tokens and then the selected ones, that the
output is the attention over them (of dense rows: over all), and that padding rows read nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_tokens import DrawnTokens
from layer_traffic import Shape, Traffic

from gpu_tier.algorithms import registry
from gpu_tier.geometry import KVKind
from gpu_tier.rows import KVDtype

PAGE, SINK, LOCAL, K = 8, 4, 8, 8
ALGO = {"init": SINK, "token_budget": LOCAL + K, "cache_tokens": 16, "block": 4, "k_cache": 3}


@pytest.fixture(autouse=True)
def _drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ALGORITHMS, "pqcache", DrawnTokens)


def config_of(*, min_len: int = 24, **algo: Any) -> dict[str, Any]:
    return {"algorithm": "pqcache", "min_sparse_prompt_len": min_len, "algo": {**ALGO, **algo}}


def decode(shape: Shape, config: dict[str, Any], lengths: tuple[int, ...], steps: int, chunk: int = 11) -> torch.Tensor:
    traffic = Traffic(shape, config)
    requests = [traffic.begin(n, seed=i + 1) for i, n in enumerate(lengths)]
    traffic.prompt(requests, chunk)
    out = [traffic.decode(requests, pad_to=len(requests) + 2) for _ in range(steps)]
    assert torch.isfinite(torch.stack(out)).all()
    for request in requests:
        traffic.end(request)
    traffic.assert_empty()
    return torch.stack(out)


@pytest.mark.parametrize("n", [1, SINK, SINK + LOCAL, SINK + LOCAL + 1, PAGE - 1, PAGE, PAGE + 1, 31, 32, 33, 128])
def test_one_request_sparse_from_its_first_token(n: int) -> None:
    decode(Shape(), config_of(min_len=1), (n,), 20)


def test_dense_and_sparse_rows_in_one_batch_and_late_starts() -> None:
    decode(Shape(device_pages=200), config_of(), (1, 17, 30, 128, 97), 12)


SHAPES = {
    "d64 f32": Shape(layers=2, dims=64, v_dims=64, group=1),
    "d128 bf16 G8": Shape(layers=2, dims=128, v_dims=128, heads=1, group=8, dtype=KVDtype.BF16),
    "d256 f16 G4": Shape(layers=2, dims=256, v_dims=256, group=4, dtype=KVDtype.F16),
    "d64 fp8": Shape(layers=2, dims=64, v_dims=64, dtype=KVDtype.FP8),
    "mla 576 fp8": Shape(layers=2, dims=576, v_dims=512, kind=KVKind.MLA, heads=1, group=4, dtype=KVDtype.FP8),
    "later stage": Shape(start_layer=5),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_real_models(shape: str) -> None:
    decode(SHAPES[shape], config_of(), (17, 33, 96), 3, chunk=40)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
def test_orders_of_the_host_pool(layout: str) -> None:
    decode(Shape(layers=2), {**config_of(), "host_layout": layout}, (40, 70), 3)


def test_a_local_window_of_one_token() -> None:
    decode(Shape(layers=2), config_of(token_budget=2, local_ratio=0.5), (40,), 6)


CACHES: dict[str, dict[str, Any]] = {
    "none": {"cache_tokens": 0},
    "small": {},
    "everything": {"cache_tokens": 256, "k_cache": 64},
    "random": {"policy": "random"},
    "tokens": {"cache_unit": "token"},
}


def test_outputs_do_not_depend_on_the_cache() -> None:
    runs = {name: decode(Shape(), config_of(**algo), (60, 17, 33), 10) for name, algo in CACHES.items()}
    for name, out in runs.items():
        assert torch.equal(out, runs["none"]), name


def test_a_row_is_used_again() -> None:
    traffic = Traffic(Shape(max_requests=1), config_of())
    for seed, n in enumerate((60, 100, 17, 40)):
        request = traffic.begin(n, seed=seed + 1)
        traffic.prompt([request])
        for _ in range(4):
            traffic.decode([request])
        traffic.end(request)
        traffic.assert_empty()


def test_bytes_are_counted_by_where_they_came_from() -> None:
    traffic = Traffic(Shape(), config_of(cache_tokens=0))
    request = traffic.begin(60, seed=1)
    traffic.prompt([request])
    before = traffic.coordinator.manager.transfer.counters
    traffic.decode([request])
    after = traffic.coordinator.manager.transfer.counters
    row = traffic.shape.geometry.token_layer_bytes * traffic.shape.layers
    assert after.h2d_bytes - before.h2d_bytes == K * row
    assert after.d2d_bytes - before.d2d_bytes == (SINK + LOCAL) * row
    assert traffic.coordinator.manager.transfer.gathered == ((SINK + LOCAL) * row, 0, K * row)


def test_the_table_names_the_places_of_the_steady_tokens_and_of_no_others() -> None:
    traffic = Traffic(Shape(), config_of())
    request = traffic.begin(60, seed=1)
    traffic.prompt([request])
    manager = traffic.coordinator.manager
    for n in range(61, 90):
        traffic.decode([request])
        slots = manager.tables.table[request]
        steady = [*range(SINK), *range(n - LOCAL, n)]
        assert (slots >= 0).nonzero().flatten().tolist() == steady
        held = manager.buffers.buffer(request).items[: SINK + LOCAL]
        assert set(slots[steady].tolist()) == set(held.tolist())
        k, v = manager.reader.rows(1, request, 0, n)
        torch.testing.assert_close(v, traffic.sequences[request].v[1, :n], rtol=0, atol=0)
        torch.testing.assert_close(k, traffic.sequences[request].k[1, :n], rtol=0, atol=0)
