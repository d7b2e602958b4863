"""Clusters in the framework, on the device and in blocks: what attention reads, and what is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_clusters import DrawnClusters
from layer_traffic import Shape, Traffic

from kvcm.gpu_tier.algorithms import registry
from kvcm.gpu_tier.geometry import KVDtype, KVKind
from kvcm.gpu_tier.manager import resident_clusters

RESIDENCIES: dict[str, dict[str, Any]] = {
    "device": {"mode": "gpu_only"}, "blocks": {"control": "cpu"}, "blocks, gpu control": {"control": "gpu"}
}  # fmt: skip
pytestmark = pytest.mark.ci

SINK, LOCAL, UPDATE, SEGMENT = 4, 6, 8, 32
ALGO = {
    "sink": SINK, "local": LOCAL, "segment": SEGMENT, "update_segment": UPDATE, "tokens_per_centroid": 4,
    "block_bytes": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ALGORITHMS, "retroinfer", DrawnClusters)
    monkeypatch.setattr(resident_clusters, "_PAGE_TOKENS", 24)  # so that requests have several, with parts of segments


def config_of(residency: str, *, min_len: int = SINK + LOCAL + UPDATE, **algo: Any) -> dict[str, Any]:
    base = {"algorithm": "retroinfer", "min_sparse_prompt_len": min_len}
    return {**base, "algo": {**ALGO, **RESIDENCIES[residency], **algo}}


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


LENGTHS = [1, SINK, SINK + LOCAL, SINK + LOCAL + UPDATE - 1, SINK + LOCAL + UPDATE, SINK + SEGMENT + LOCAL, 43, 128]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_one_request_sparse_from_its_first_token(residency: str, n: int) -> None:
    decode(Shape(), config_of(residency, min_len=1), (n,), 2 * UPDATE + 3)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_dense_and_sparse_rows_in_one_batch_and_late_starts(residency: str) -> None:
    decode(Shape(device_pages=200), config_of(residency), (1, 10, 30, 128, 97), 12)


SHAPES = {
    "d64 f32": Shape(layers=2, dims=64, v_dims=64, group=1),
    "d128 bf16 G8": Shape(layers=2, dims=128, v_dims=128, heads=1, group=8, dtype=KVDtype.BF16),
    "d256 f16 G4": Shape(layers=2, dims=256, v_dims=256, group=4, dtype=KVDtype.F16),
    "d64 fp8": Shape(layers=2, dims=64, v_dims=64, dtype=KVDtype.FP8),
    "mla 576 fp8": Shape(layers=2, dims=576, v_dims=512, kind=KVKind.MLA, heads=1, group=4, dtype=KVDtype.FP8),
    "later stage": Shape(start_layer=5),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_shapes_of_real_models(residency: str, shape: str) -> None:
    decode(SHAPES[shape], config_of(residency), (17, 33, 96), 4, chunk=40)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_growth_over_many_segments(residency: str) -> None:
    decode(Shape(layers=2), config_of(residency), (20,), 9 * UPDATE)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_row_is_used_again(residency: str) -> None:
    traffic = Traffic(Shape(max_requests=1), config_of(residency))
    for seed, n in enumerate((60, 100, 17, 40)):
        request = traffic.begin(n, seed=seed + 1)
        traffic.prompt([request])
        for _ in range(4):
            traffic.decode([request])
        traffic.end(request)
        traffic.assert_empty()
