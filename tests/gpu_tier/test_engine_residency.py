"""Where KV lies never changes what is computed: buffers of any size and policy give what KV on the device gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coordinator_rig import MODELS, config_of, coordinator_of, prompt

from gpu_tier.engine.decode_engine import DecodeEngine
from gpu_tier.rows import KVDtype

# Settings that select much less than the prompts have.
SMALL: dict[str, dict[str, Any]] = {
    "oracle": {"top_k": 16, "algo": {"k": 16}},
    "streaming_llm": {"top_k": 48, "algo": {"sink": 4, "window": 20, "page": 8}},
    "quest": {"top_k": 48, "algo": {"token_budget": 48, "page": 8, "recent_pages": 2, "skip_layers": 1}},
    "dsa": {"top_k": 16, "algo": {"index_heads": 4, "index_dim": 32}},
}
PER_HEAD = {"top_k": 48, "algo": {**SMALL["quest"]["algo"], "heads": "per_head", "skip_layers": 0}}
BUFFERS: list[dict[str, Any]] = [
    {"device_buffer_size": 48},
    {"device_buffer_size": 96, "loads_hottest": True},
    {"device_buffer_size": 64, "promote_newest": False, "host_layout": "page_head"},
    {"device_buffer_size": 256, "host_layout": "layer_first"},
]


def run(model: Any, algorithm: str, settings: dict[str, Any], dtype: KVDtype) -> tuple[list[list[int]], list[Any]]:
    """Return the tokens of some requests and their logits in every step."""
    coordinator = coordinator_of(model, config_of(algorithm, settings), pages=220, dtype=dtype)
    engine = DecodeEngine(model, coordinator, chunk_tokens=50, pad_to=4)
    requests = [engine.add(prompt(length, length)) for length in (47, 100, 150)]
    logits = []
    for _ in range(18):
        engine.step()
        logits.append([engine.logits[request] for request in requests if request in engine.logits])
    return [engine.tokens(request) for request in requests], logits


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("algorithm", [*sorted(SMALL), "quest per head"])
def test_buffers_give_what_kv_on_the_device_gives(algorithm: str, name: str) -> None:
    dtype = KVDtype.FP8 if name == "latent" else KVDtype.F32
    model = MODELS[name]
    settings = SMALL.get(algorithm, PER_HEAD)
    algorithm = algorithm.split()[0]
    if algorithm == "dsa" and name == "llama":
        settings = settings | {"algo": {"index_source": "proxy"}}
    tokens, logits = run(model, algorithm, settings | {"residency": "device"}, dtype)
    exact, _ = run(model, "full", {}, dtype)
    assert tokens != exact  # otherwise nothing was left out
    for buffer in BUFFERS:
        again, again_logits = run(model, algorithm, settings | buffer, dtype)
        assert again == tokens, buffer
        torch.testing.assert_close(again_logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_snapkv_keeps_is_the_same_whether_the_rest_is_dropped_or_not(name: str) -> None:
    model = MODELS[name]
    runs = [
        run(model, "snapkv", {"algo": {"cap": 24, "w_obs": 4, "mode": mode}} | extra, KVDtype.F32)
        for mode, extra in (("drop", {}), ("retrievable", {}), ("retrievable", {"residency": "device"}))
    ]
    assert runs[0][0] == runs[1][0] == runs[2][0]
    assert runs[0][0] != run(model, "full", {}, KVDtype.F32)[0]
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(runs[2][1], runs[0][1], rtol=1e-4, atol=1e-4)
