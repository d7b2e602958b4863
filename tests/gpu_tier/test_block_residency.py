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


def test_a_local_window_of_one_token() -> None:
    decode(Shape(layers=2), config_of(token_budget=2, local_ratio=0.5), (40,), 6)


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
