"""Every algorithm at the lengths where pages, budgets and buffers begin and end, alone and in mixed batches.

`Traffic` checks in each step that attention reads the selected rows (I11), that its output is the attention over them,
and that padding rows read nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import retrieval_cases
import torch
from layer_traffic import Shape, Traffic

from gpu_tier.geometry import KVKind
from gpu_tier.manager import cluster_resident
from gpu_tier.rows import KVDtype

PAGE, K, C = 8, 16, 32
ALGORITHMS: dict[str, dict[str, Any]] = {
    "full": {"algorithm": "full"},
    "full_offload": {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}},
    "oracle": {"algorithm": "oracle", "algo": {"k": K}},
    "streaming_llm": {"algorithm": "streaming_llm", "algo": {"sink": 4, "window": 8, "page": 4}},
    "quest": {"algorithm": "quest", "algo": {"page": 4, "token_budget": 24, "skip_layers": 1}},
    "quest per head": {
        "algorithm": "quest",
        "algo": {"page": 8, "token_budget": 24, "recent_pages": 2, "skip_layers": 0, "heads": "per_head"},
    },
    "dsa": {"algorithm": "dsa", "top_k": K, "algo": {"index_heads": 4, "index_dim": 16}},
    "dsa proxy": {"algorithm": "dsa", "top_k": K, "algo": {"index_heads": 1, "index_dim": 16, "index_source": "proxy"}},
    "snapkv": {"algorithm": "snapkv", "algo": {"w_obs": 4, "cap": K, "kernel": 3}},
    "snapkv reselecting": {
        "algorithm": "snapkv",
        "algo": {"w_obs": 4, "cap": K, "kernel": 3, "mode": "retrievable", "reselect_every": 3},
    },
    **retrieval_cases.CASES,
}
LENGTHS = sorted({1, PAGE - 1, PAGE, PAGE + 1, K - 1, K, K + 1, C - 1, C, C + 1, 4 * C})
STEPS = 3


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**ALGORITHMS[name], "device_buffer_size": C, **changes}


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that requests have several pages of clusters on the device, with parts of segments.
    monkeypatch.setattr(cluster_resident, "_PAGE_TOKENS", 24)


def decode(shape: Shape, config: dict[str, Any], lengths: tuple[int, ...], steps: int, chunk: int = 11) -> None:
    traffic = Traffic(shape, config)
    requests = [traffic.begin(n, seed=i + 1) for i, n in enumerate(lengths)]
    traffic.prompt(requests, chunk)
    for _ in range(steps):
        out = traffic.decode(requests, pad_to=len(requests) + 2)
        assert torch.isfinite(out).all()
    for request in requests:
        traffic.end(request)
    traffic.assert_empty()


@pytest.mark.parametrize("least", [1, K])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_of_unequal_lengths(name: str, least: int) -> None:
    shape = Shape(layers=2, device_pages=400, max_requests=len(LENGTHS))
    decode(shape, config_of(name, min_sparse_prompt_len=least), tuple(LENGTHS), STEPS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_growth_in_steps_past_page_budget_and_buffer(name: str) -> None:
    # From a short prompt to beyond the buffer, so that dense requests become sparse on the way.
    decode(Shape(layers=2), config_of(name), (3,), 2 * C)


SHAPES = {
    "d128 bf16 G8": Shape(layers=2, dims=128, v_dims=128, heads=1, group=8, dtype=KVDtype.BF16),
    "mla 576 fp8, later stage": Shape(
        layers=2, dims=576, v_dims=512, kind=KVKind.MLA, heads=1, group=4, dtype=KVDtype.FP8, start_layer=5
    ),
}
# The proxy rotates keys by a Hadamard matrix, whose size is a power of two: not 576.
CASES = [(name, shape) for name in ALGORITHMS for shape in SHAPES if name != "dsa proxy" or "mla" not in shape]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_shapes_of_real_models(name: str, shape: str) -> None:
    config = config_of(name)
    if name == "dsa proxy":
        config = {**config, "algo": {**config["algo"], "index_dim": SHAPES[shape].dims}}
    decode(SHAPES[shape], config, (17, 3 * C), STEPS, chunk=40)
