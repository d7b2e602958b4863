"""A step never waits for the device, and every implementation of the kernels leads to the same selections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from algorithm_rig import IndexRig, NoReading, Rig, WaveRig, mha, mla, no_synchronisation

from kvcm.gpu_tier.types import Mode, Selection

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTHS = {0: 1, 1: 47, 2: 130, 3: 64, 4: 33}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "streaming_llm": {"sink": 3, "window": 20, "page": 8},
    "oracle": {"k": 16, "ratio": 0.2},
    "quest": {"page": 4, "token_budget": 24, "recent_pages": 2, "skip_layers": 0},
    "quest per head": {"page": 4, "token_budget": 48, "recent_pages": 2, "skip_layers": 0, "heads": "per_head",
                       "sparsity_ratio": 0.3},
    "quest mean": {"page": 4, "token_budget": 24, "recent_pages": 2, "skip_layers": 0, "group": "mean"},
    "snapkv": {"w_obs": 4, "cap": 14},
    "snapkv retrievable": {"w_obs": 4, "cap": 14, "mode": "retrievable", "reselect_every": 3},
    "dsa": {},
    "retroinfer": {},
    "retroinfer max": {"rank": "max_ip", "exec_factor": 1, "retrieval": 0.1, "estimation": 1.0},
}  # fmt: skip


def make(case: str, **settings: Any) -> Rig:
    name, algo = case.split()[0], CASES[case]
    if name == "dsa":
        return IndexRig(mla(), algo, top_k=16, **settings)
    if name == "retroinfer":
        return WaveRig(mha(2, 16, layers=2), 4, has_sink=False, **algo, **settings)
    return Rig(mha(2, 16, layers=2), name, 4, algo, **settings)


STEPS = ([2, 0, 1], [4, 3, 2, 1], [0], [1, 2], [2])
# The interpreter takes milliseconds for each program.
FEW: dict[str, Any] = {"lengths": {0: 1, 1: 37}, "steps": ([1, 0],)}


def life(rig: Rig, lengths: Mapping[int, int] = LENGTHS, steps: Sequence[Sequence[int]] = STEPS) -> list[Selection]:
    """Prefill in chunks and a few steps of changing batches."""
    rig.add(lengths, chunk=21, spare=8)
    batches = [rig.step(requests, padding=2) for requests in steps]
    return [selection for batch in batches for selection in batch.values()]


@pytest.mark.parametrize("case", CASES)
def test_no_hook_reads_the_device(case: str) -> None:
    rig = make(case)
    rig.watch = NoReading
    life(rig)


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_no_hook_waits_for_a_gpu(case: str) -> None:
    life(make(case, device="cuda", kernels="auto"))  # whatever is compiled or allocated once
    rig = make(case, device="cuda", kernels="auto")
    rig.watch = no_synchronisation
    life(rig)


INTERPRETED = ("oracle", "quest per head", "dsa", "snapkv retrievable", "retroinfer")
DEVICES = [
    *[pytest.param(case, "cpu", "triton") for case in INTERPRETED],
    *[pytest.param(case, "cuda", kernels, marks=needs_gpu) for case in CASES for kernels in ("reference", "auto")],
]


@pytest.mark.parametrize("case", ["streaming_llm", "oracle", "quest", "snapkv", "dsa", "retroinfer"])
def test_rows_that_are_not_sparse_select_nothing(case: str) -> None:
    rig = make(case)
    rig.add({0: 140, 1: 141}, spare=1)
    rig.step([0, 1])
    selection = rig.decode(0, rig.batch(Mode.DECODE, [0, 1], [1, 1]), torch.tensor([False, True]))
    assert not selection.lengths[0].any()
    assert selection.lengths[1].all()


@pytest.mark.parametrize(("case", "device", "kernels"), DEVICES)
def test_devices_and_kernels_agree(case: str, device: str, kernels: str) -> None:
    traffic = FEW if device == "cpu" else {}
    expected = life(make(case, kernels="reference"), **traffic)
    for ours, theirs in zip(life(make(case, device=device, kernels=kernels), **traffic), expected, strict=True):
        assert torch.equal(ours.lengths.cpu(), theirs.lengths)
        assert torch.equal(ours.indices.cpu(), theirs.indices)
        if theirs.estimate is not None:
            assert ours.estimate is not None
            assert torch.equal(ours.estimate.indices.cpu(), theirs.estimate.indices)
