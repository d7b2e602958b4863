"""Attention reads the rows of the selected tokens, whatever the residency, layout, KV type, lengths and batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import retrieval_cases
import torch
from drawn_tokens import DrawnTokens
from layer_traffic import Shape, Traffic
from retrieval_cases import ALGORITHMS as SETTINGS
from retrieval_cases import BLOCKS, PQ, WAVE
from retrieval_cases import CASES as RETRIEVAL

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.geometry import KVDtype, KVKind, Layout
from kvcm.gpu_tier.manager import resident_clusters

UNEQUAL = (1, 17, 60, 100, 33)
ALGORITHMS = {name: case for name, case in SETTINGS.items() if not name.startswith("full")}
SHAPES = {
    "mha": Shape(),
    "mha fp8": Shape(dtype=KVDtype.FP8),
    "mha bf16 of a later stage": Shape(dtype=KVDtype.BF16, start_layer=3),
    "mha f16, one group": Shape(dtype=KVDtype.F16, group=1),
    "one head of 8 queries": Shape(heads=1, group=8),
    "mla": Shape(kind=KVKind.MLA, heads=1, group=4, dims=24, v_dims=16),
    "mla fp8": Shape(kind=KVKind.MLA, heads=1, group=4, dims=24, v_dims=16, dtype=KVDtype.FP8),
}


def decoded(
    shape: Shape, config: dict[str, Any], lengths: Sequence[int], steps: int, chunk: int = 11
) -> tuple[torch.Tensor, Traffic]:
    """Decode a batch with two padding rows; every step checks what it reads."""
    traffic = Traffic(shape, config)
    requests = [traffic.begin(n, seed=i + 1) for i, n in enumerate(lengths)]
    traffic.prompt(requests, chunk)
    out = torch.stack([traffic.decode(requests, pad_to=len(requests) + 2) for _ in range(steps)])
    assert torch.isfinite(out).all()
    return out, traffic


def decode(shape: Shape, config: dict[str, Any], lengths: Sequence[int], steps: int, chunk: int = 11) -> int:
    """Decode a batch to its end and return how many rows were compared."""
    _, traffic = decoded(shape, config, lengths, steps, chunk)
    for request in list(traffic.sequences):
        traffic.end(request)
    traffic.assert_empty()
    return traffic.checked


def check_exact(out: torch.Tensor, traffic: Traffic, lengths: Sequence[int]) -> None:
    """Check that each step's output is full attention, in the layers that it has."""
    for row, (request, n) in enumerate(zip(traffic.sequences, lengths, strict=True)):
        for step, layers in enumerate(out):
            exact = traffic.exact(request, n + step)[: len(layers)]
            torch.testing.assert_close(layers[:, row], exact, rtol=1e-4, atol=1e-4)


READS: list[tuple[str, str, dict[str, Any]]] = [
    *[("quest", shape, {}) for shape in SHAPES],
    ("dsa", "mla fp8", {}),
    ("oracle", "mla", {}),
    ("snapkv retrievable", "mha bf16 of a later stage", {}),
    *[(name, "mha", {"prefill_window_tokens": 16}) for name in ALGORITHMS],
    *[(name, "mha", {"host_layout": v}) for name in ("oracle", "quest", "snapkv retrievable") for v in Layout],
    *[("oracle", "mha", option) for option in ({"promote_newest": False}, {"loads_hottest": True})],
]


@pytest.mark.parametrize(("name", "shape", "options"), READS)
def test_i11_attention_reads_the_selected_rows(name: str, shape: str, options: dict[str, Any]) -> None:
    assert decode(SHAPES[shape], {**ALGORITHMS[name], **options}, UNEQUAL, 14, chunk=8) > 500


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("dsa", "mla", {}),
        ("dsa", "mla fp8", {"promote_newest": False}),
        ("quest", "mha fp8", {"loads_hottest": True}),
        ("oracle", "mha", {"promote_newest": False}),
        ("quest per head", "mha", {"host_layout": "page_head"}),
    ],
)
def test_hierarchical_decode_equals_sparse_decode_bit_for_bit(name: str, shape: str, options: dict[str, Any]) -> None:
    # The smallest buffer that a step allows, so that nearly every step evicts and loads.
    small = 24 if name.startswith("quest") else 16
    outputs, loads = [], 0
    for residency in ("lru", "device"):
        changes = {"residency": residency, "device_buffer_size": small, "min_sparse_prompt_len": small, **options}
        out, traffic = decoded(SHAPES[shape], {**ALGORITHMS[name], **changes}, (40, 120, 63), 25, chunk=19)
        outputs.append(out)
        loads += getattr(getattr(traffic.coordinator.manager.policy, "counters", None), "loads", 0)
    assert loads > 100
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("shape", ["mha", "mha bf16 of a later stage", "mla fp8"])
@pytest.mark.parametrize("name", ["full", "full_offload"])
def test_full_attention_is_exact_on_the_device_and_streamed(name: str, shape: str) -> None:
    algo = {"chunk_tokens": 32} if name == "full_offload" else {}
    check_exact(*decoded(SHAPES[shape], {"algorithm": name, "algo": algo}, UNEQUAL, 10, chunk=19), UNEQUAL)


INTERPRETED: dict[str, tuple[Shape, dict[str, Any]]] = {
    **{name: (Shape(layers=2), case) for name, case in RETRIEVAL.items()},
    "dsa, mla bf16": (
        Shape(layers=2, kind=KVKind.MLA, heads=1, group=4, dims=80, v_dims=64, dtype=KVDtype.BF16),
        ALGORITHMS["dsa"],
    ),
    "quest, fp8": (Shape(layers=2, dtype=KVDtype.FP8), ALGORITHMS["quest"]),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", INTERPRETED)
def test_triton_decodes_what_the_reference_does(case: str) -> None:
    shape, config = INTERPRETED[case]
    ours, theirs = (
        decoded(shape, {**config, "kernels": kernels}, (60, 9), 2, 40)[0] for kernels in ("triton", "reference")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


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
    lengths = (100, 5, 60)
    out, traffic = decoded(Shape(start_layer=start_layer), {"algorithm": "quest", "algo": quest}, lengths, 6)
    check_exact(out[:, : 2 - start_layer], traffic, lengths)


def test_representations_describe_the_stored_keys(monkeypatch: pytest.MonkeyPatch) -> None:
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


PAGE, K, C = 8, 16, 32
MATRIX: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "dsa proxy": {**SETTINGS["dsa"], "algo": {"index_heads": 1, "index_dim": 16, "index_source": "proxy"}},
    **retrieval_cases.CASES,
}
EDGES = sorted({1, PAGE - 1, PAGE, PAGE + 1, K - 1, K, K + 1, C - 1, C, C + 1, 4 * C})
STEPS = 3


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**MATRIX[name], "device_buffer_size": C, **changes}


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that requests have several pages of clusters on the device, with parts of segments.
    monkeypatch.setattr(resident_clusters, "_PAGE_TOKENS", 24)


@pytest.mark.parametrize("least", [1, K])
@pytest.mark.parametrize("name", MATRIX)
def test_a_batch_of_unequal_lengths(name: str, least: int) -> None:
    shape = Shape(layers=2, device_pages=400, max_requests=len(EDGES))
    decode(shape, config_of(name, min_sparse_prompt_len=least), tuple(EDGES), STEPS)


@pytest.mark.parametrize("name", MATRIX)
def test_growth_in_steps_past_page_budget_and_buffer(name: str) -> None:
    # From a short prompt to beyond the buffer, so that dense requests become sparse on the way.
    decode(Shape(layers=2), config_of(name), (3,), 2 * C)


REAL_SHAPES = {
    "d128 bf16 G8": Shape(layers=2, dims=128, v_dims=128, heads=1, group=8, dtype=KVDtype.BF16),
    "mla 576 fp8, later stage": Shape(
        layers=2, dims=576, v_dims=512, kind=KVKind.MLA, heads=1, group=4, dtype=KVDtype.FP8, start_layer=5
    ),
}


# The proxy rotates keys by a Hadamard matrix, whose size is a power of two: not 576.
CASES = [(name, shape) for name in MATRIX for shape in REAL_SHAPES if name != "dsa proxy" or "mla" not in shape]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_shapes_of_real_models(name: str, shape: str) -> None:
    config = config_of(name)
    if name == "dsa proxy":
        config = {**config, "algo": {**config["algo"], "index_dim": REAL_SHAPES[shape].dims}}
    decode(REAL_SHAPES[shape], config, (17, 3 * C), STEPS, 40)


SHAPE = Shape(device_pages=200)
INDEXED, INDEXED_STEPS = (60, 17, 110), 10


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


@pytest.mark.parametrize("name", BLOCKS)
def test_outputs_are_the_same_bits_whatever_is_cached(name: str) -> None:
    shape = Shape(device_pages=200, dtype=KVDtype.BF16)
    without, *others = (decoded(shape, changed(name, **algo), INDEXED, INDEXED_STEPS)[0] for algo in CACHES[name])
    for number, out in enumerate(others):
        assert torch.equal(out, without), CACHES[name][number + 1]


EVERYTHING: dict[str, dict[str, Any]] = {
    "pqcache": {"token_budget": 256},
    "retroinfer": {"retrieval": 1.0, "estimation": 0.0},
    "retroinfer gpu control": {"retrieval": 1.0, "estimation": 0.0},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_retrieves_everything_is_full_attention(name: str) -> None:
    shape = Shape(device_pages=200, start_layer=7)
    check_exact(*decoded(shape, changed(name, **EVERYTHING[name]), INDEXED, INDEXED_STEPS), INDEXED)


def test_a_budget_larger_than_requests_takes_no_more_memory_than_they_do() -> None:
    out, traffic = decoded(SHAPE, changed("pqcache", token_budget=1 << 20), (60, 17), 3)
    blocks = traffic.coordinator.manager.blocks
    assert blocks is not None
    assert blocks.execution.tokens_per_row == SHAPE.max_tokens
    check_exact(out, traffic, (60, 17))


@pytest.mark.parametrize("name", BLOCKS)
def test_requests_without_a_sink_of_steady_tokens_alone_attend_to_all_of_them(name: str) -> None:
    # The first token of the recent ones is then token 0.
    algo = {"init": 0, "token_budget": 80} if name == "pqcache" else {"sink": 0}
    config = {**changed(name, **algo), "min_sparse_prompt_len": 1}
    check_exact(*decoded(SHAPE, config, (1, 5, 8), 6), (1, 5, 8))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_row_alone_and_in_a_batch_attends_to_the_same(name: str) -> None:
    together, _ = decoded(SHAPE, BLOCKS[name], INDEXED, INDEXED_STEPS)
    for row, n in enumerate(INDEXED):
        traffic = Traffic(SHAPE, BLOCKS[name])
        request = traffic.begin(n, seed=row + 1)
        traffic.prompt([request])
        alone = torch.stack([traffic.decode([request])[:, 0] for _ in range(INDEXED_STEPS)])
        torch.testing.assert_close(together[:, :, row], alone, rtol=1e-5, atol=1e-5)


WAVE_DEVICE = {"algorithm": "retroinfer", "algo": {**WAVE, "mode": "gpu_only"}}
PQ_OTHERS = [{"residency": "device"}, {"residency": "lru", "device_buffer_size": 64}]


@pytest.mark.parametrize("estimation", [0.0, 0.3])
@pytest.mark.parametrize("name", [name for name in BLOCKS if "retroinfer" in name])
def test_clusters_on_the_device_and_in_blocks_give_the_same_bits(name: str, estimation: float) -> None:
    # Rows that are dense are attended to in one call with the others on the device: their bits may differ.
    on_device = {**WAVE_DEVICE, "algo": {**WAVE_DEVICE["algo"], "estimation": estimation}}
    in_blocks, _ = decoded(SHAPE, changed(name, estimation=estimation), (60, 110), INDEXED_STEPS)
    assert torch.equal(decoded(SHAPE, on_device, (60, 110), INDEXED_STEPS)[0], in_blocks)


@pytest.mark.parametrize("other", PQ_OTHERS)
def test_tokens_in_other_residencies_are_the_same_set(other: dict[str, Any]) -> None:
    in_blocks, _ = decoded(SHAPE, BLOCKS["pqcache"], INDEXED, INDEXED_STEPS)
    out, _ = decoded(SHAPE, {"algorithm": "pqcache", "algo": PQ, **other}, INDEXED, INDEXED_STEPS)
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
    for _ in range(INDEXED_STEPS):
        traffic.decode([request])
    assert manager.blocks is not None
    assert manager.blocks.store is not None
    assert manager.host.allocator.in_use == 0 < manager.blocks.store.allocator.in_use
    traffic.end(request)
    traffic.assert_empty()


SINK, LOCAL, DRAWN = 4, 8, 8


def drawn_traffic(monkeypatch: pytest.MonkeyPatch, **algo: Any) -> tuple[Traffic, int]:
    """Return a request whose tokens are drawn."""
    monkeypatch.setitem(registry.ALGORITHMS, "pqcache", DrawnTokens)
    small = {"init": SINK, "token_budget": LOCAL + DRAWN, "cache_tokens": 16, "block": 4, "k_cache": 3}
    config = {"algorithm": "pqcache", "min_sparse_prompt_len": 24, "algo": {**small, **algo}}
    traffic = Traffic(Shape(), config)
    request = traffic.begin(60, seed=1)
    traffic.prompt([request])
    return traffic, request


def test_bytes_are_counted_by_where_they_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic, request = drawn_traffic(monkeypatch, cache_tokens=0)
    before = traffic.coordinator.manager.transfer.counters
    traffic.decode([request])
    after = traffic.coordinator.manager.transfer.counters
    row = traffic.shape.geometry.token_layer_bytes * traffic.shape.layers
    assert after.h2d_bytes - before.h2d_bytes == DRAWN * row
    assert after.d2d_bytes - before.d2d_bytes == (SINK + LOCAL) * row
    assert traffic.coordinator.manager.transfer.gathered == ((SINK + LOCAL) * row, 0, DRAWN * row)


def test_the_table_names_the_places_of_the_steady_tokens_and_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic, request = drawn_traffic(monkeypatch)
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
