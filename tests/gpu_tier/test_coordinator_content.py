"""Attention reads the rows of the selected tokens, whatever the residency, layout, KV type and mix of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_traffic import Shape, Traffic

from gpu_tier.geometry import KVKind, Layout
from gpu_tier.rows import KVDtype

LENGTHS = (1, 17, 60, 100, 33)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "oracle": {"algorithm": "oracle", "algo": {"k": 16}},
    "quest": {"algorithm": "quest", "algo": {"page": 4, "token_budget": 24, "skip_layers": 1}},
    "quest per head": {
        "algorithm": "quest",
        "algo": {"page": 4, "token_budget": 24, "skip_layers": 0, "heads": "per_head"},
    },
    "streaming_llm": {"algorithm": "streaming_llm", "algo": {"page": 4, "window": 16}},
    "dsa": {
        "algorithm": "dsa",
        "top_k": 16,
        "min_sparse_prompt_len": 16,
        "algo": {"index_heads": 4, "index_dim": 16},
    },
    "snapkv": {"algorithm": "snapkv", "algo": {"w_obs": 4, "cap": 16, "kernel": 3}},
    "snapkv retrievable": {
        "algorithm": "snapkv",
        "algo": {"w_obs": 4, "cap": 16, "kernel": 3, "mode": "retrievable", "reselect_every": 5},
    },
}
SHAPES = {
    "mha": Shape(),
    "mha fp8": Shape(dtype=KVDtype.FP8),
    "mha bf16 of a later stage": Shape(dtype=KVDtype.BF16, start_layer=3),
    "mha f16, one group": Shape(dtype=KVDtype.F16, group=1),
    "one head of 8 queries": Shape(heads=1, group=8),
    "mla": Shape(kind=KVKind.MLA, heads=1, group=4, dims=24, v_dims=16),
    "mla fp8": Shape(kind=KVKind.MLA, heads=1, group=4, dims=24, v_dims=16, dtype=KVDtype.FP8),
}


def traffic_of(shape: Shape, config: dict[str, Any], steps: int = 14, chunk: int = 13) -> Traffic:
    """Decode a batch of unequal lengths with a padding row; every step checks what it reads."""
    traffic = Traffic(shape, config)
    requests = [traffic.begin(n, seed=i + 1) for i, n in enumerate(LENGTHS)]
    traffic.prompt(requests[:2])
    for request in requests[2:]:
        traffic.prompt([request], chunk)
    for _ in range(steps):
        traffic.decode(requests, pad_to=len(requests) + 1)
    return traffic


def check(traffic: Traffic) -> None:
    assert traffic.checked > 500
    for request in list(traffic.sequences):
        traffic.end(request)
    traffic.assert_empty()


READS = [
    *[(name, "mha") for name in ALGORITHMS],
    *[("quest", shape) for shape in SHAPES if shape != "mha"],
    ("dsa", "mla fp8"),
    ("oracle", "mla"),
    ("snapkv retrievable", "mha bf16 of a later stage"),
]


@pytest.mark.parametrize(("name", "shape"), READS)
def test_i11_attention_reads_the_selected_rows(name: str, shape: str) -> None:
    check(traffic_of(SHAPES[shape], ALGORITHMS[name]))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("name", ["oracle", "quest", "snapkv retrievable"])
def test_i11_whatever_the_order_of_the_host_pool(name: str, layout: Layout) -> None:
    check(traffic_of(Shape(), {**ALGORITHMS[name], "host_layout": layout}))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_i11_with_a_prompt_that_does_not_fit_the_device(name: str) -> None:
    check(traffic_of(Shape(), {**ALGORITHMS[name], "prefill_window_tokens": 16}, chunk=8))


@pytest.mark.parametrize("option", [{"promote_newest": False}, {"loads_hottest": True}, {"residency": "device"}])
def test_i11_with_the_options_of_residency(option: dict[str, Any]) -> None:
    check(traffic_of(Shape(), {**ALGORITHMS["oracle"], **option}))


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("dsa", "mla", {}),
        ("dsa", "mla fp8", {"promote_newest": False}),
        ("quest", "mha fp8", {"loads_hottest": True}),
        ("oracle", "mha", {"promote_newest": False}),
    ],
)
def test_hierarchical_decode_equals_sparse_decode_on_the_device_bit_for_bit(
    name: str, shape: str, options: dict[str, Any]
) -> None:
    # The smallest buffer that a step allows, so that nearly every step evicts and loads.
    small = {"dsa": 16, "quest": 24, "oracle": 16}[name]
    outputs, loads = [], 0
    for residency in ("lru", "device"):
        config = {**ALGORITHMS[name], "residency": residency, "device_buffer_size": small, **options}
        traffic = Traffic(SHAPES[shape], {**config, "min_sparse_prompt_len": small})
        requests = [traffic.begin(n, seed=i + 1) for i, n in enumerate((40, 120, 63))]
        traffic.prompt(requests, chunk=19)
        outputs.append(torch.stack([traffic.decode(requests, pad_to=4) for _ in range(25)]))
        loads += getattr(getattr(traffic.coordinator.manager.policy, "counters", None), "loads", 0)
    assert loads > 100
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("shape", ["mha", "mha bf16 of a later stage", "mla fp8"])
@pytest.mark.parametrize("name", ["full", "full_offload"])
def test_full_attention_is_exact_on_the_device_and_streamed(name: str, shape: str) -> None:
    algo = {"chunk_tokens": 32} if name == "full_offload" else {}
    traffic = Traffic(SHAPES[shape], {"algorithm": name, "algo": algo})
    requests = [traffic.begin(n, seed=i + 1) for i, n in enumerate(LENGTHS)]
    traffic.prompt(requests, chunk=19)
    for step in range(10):
        out = traffic.decode(requests, pad_to=6)
        for row, request in enumerate(requests):
            exact = traffic.exact(request, LENGTHS[row] + step)
            torch.testing.assert_close(out[:, row], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dsa", Shape(layers=2, kind=KVKind.MLA, heads=1, group=4, dims=80, v_dims=64, dtype=KVDtype.BF16)),
        ("quest", Shape(layers=2, dtype=KVDtype.FP8)),
    ],
    ids=["dsa, mla bf16", "quest, fp8"],
)
def test_i11_with_the_kernels_of_a_gpu_interpreted(name: str, shape: Shape) -> None:
    traffic = Traffic(shape, {**ALGORITHMS[name], "kernels": "triton"})
    requests = [traffic.begin(n, seed=n) for n in (3, 60)]
    traffic.prompt(requests, chunk=40)
    for _ in range(3):
        traffic.decode(requests, pad_to=3)
    assert traffic.checked > 60


@pytest.mark.parametrize("chunk", [5, 23])
@pytest.mark.parametrize("name", ["oracle", "quest", "dsa", "snapkv retrievable"])
def test_the_reader_finds_every_token_wherever_it_lies(name: str, chunk: int) -> None:
    """While a prompt goes through its window, and while its request is staged and decodes."""
    traffic = Traffic(Shape(), {**ALGORITHMS[name], "prefill_window_tokens": 16})
    request, tracker = traffic.begin(77, seed=1), traffic.coordinator.trackers

    def check_rows() -> None:
        sequence, n = traffic.sequences[request], tracker[request].seq_len
        for layer in range(traffic.shape.layers):
            k, v = traffic.coordinator.key_reader.rows(layer, request, 0, n)
            assert torch.equal(k, sequence.k[layer, :n])
            assert torch.equal(v, sequence.v[layer, :n])

    while (left := 77 - tracker[request].seq_len) > 0:
        traffic.prefill([request], [min(chunk, left)])
        check_rows()
    traffic.coordinator.prompt_finished(request)
    traffic.prompt([traffic.begin(60, seed=2)])  # in the pages that were released
    for _ in range(20):
        traffic.decode([request])
        check_rows()


@pytest.mark.parametrize("start_layer", [0, 1])
def test_layers_that_attend_densely_are_exact_for_sparse_and_dense_rows(start_layer: int) -> None:
    quest = {"page": 4, "token_budget": 24, "skip_layers": 2}
    traffic = Traffic(Shape(start_layer=start_layer), {"algorithm": "quest", "algo": quest})
    lengths = (100, 5, 60)
    requests = [traffic.begin(n, seed=n) for n in lengths]
    traffic.prompt(requests, chunk=21)
    for step in range(6):
        out = traffic.decode(requests, pad_to=5)
        for row, request in enumerate(requests):
            exact = traffic.exact(request, lengths[row] + step)[: 2 - start_layer]
            torch.testing.assert_close(out[: 2 - start_layer, row], exact, rtol=1e-4, atol=1e-4)


def test_representations_describe_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(SHAPES["mha fp8"], ALGORITHMS["quest"])
    algorithm, seen = traffic.coordinator.algorithm, []
    construct = algorithm.construct_representations

    def noted(layer_id: int, batch: Any, k: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        seen.append((layer_id, k))
        construct(layer_id, batch, k, *args, **kwargs)

    monkeypatch.setattr(algorithm, "construct_representations", noted)
    request = traffic.begin(40, seed=1)
    traffic.prompt([request])
    assert seen
    for layer_id, k in seen:
        raw = traffic.sequences[request].k[layer_id, :40]
        assert not torch.equal(k, raw)
        assert torch.equal(k, traffic._stored(raw, traffic.shape.geometry.parts[0]))
