"""A step never waits for the device, and every implementation of the kernels leads to the same selections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from algorithm_rig import IndexRig, Rig, mha, mla
from torch.utils._python_dispatch import TorchDispatchMode
from wave_rig import WaveRig

from gpu_tier.types import Selection

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "unique")
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
        return WaveRig(mha(2, 16, layers=2), 4, hears=False, **algo, **settings)
    return Rig(mha(2, 16, layers=2), name, 4, algo, **settings)


def life(rig: Rig) -> list[Selection]:
    """Prefill in chunks and a few steps of changing batches."""
    rig.add(LENGTHS, chunk=21, spare=8)
    batches = [rig.step(requests, padding=2) for requests in ([2, 0, 1], [4, 3, 2, 1], [0], [1, 2], [2])]
    return [selection for batch in batches for selection in batch.values()]


class _NoWaiting(TorchDispatchMode):
    """Fails on operations whose result the host has to read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in WAITING, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_what_waits_is_found_out() -> None:
    for waits in (lambda x: x.item(), lambda x: bool(x > 0), lambda x: x[x > 0], lambda x: int(x)):
        with pytest.raises(AssertionError, match="waits for the device"), _NoWaiting():
            waits(torch.ones(()))


@pytest.mark.parametrize("case", CASES)
def test_no_hook_reads_the_device(case: str) -> None:
    rig = make(case)
    rig.watch = _NoWaiting
    life(rig)


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_no_hook_waits_for_a_gpu(case: str) -> None:
    life(make(case, device="cuda", kernels="auto"))  # whatever is compiled or allocated once
    rig = make(case, device="cuda", kernels="auto")
    rig.watch = _no_synchronisation
    life(rig)


DEVICES = [
    pytest.param("cpu", "triton"),
    pytest.param("cuda", "reference", marks=needs_gpu),
    pytest.param("cuda", "auto", marks=needs_gpu),
]


@pytest.mark.parametrize(("device", "kernels"), DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_devices_and_kernels_agree(case: str, device: str, kernels: str) -> None:
    expected = life(make(case, kernels="reference"))
    for ours, theirs in zip(life(make(case, device=device, kernels=kernels)), expected, strict=True):
        assert torch.equal(ours.lengths.cpu(), theirs.lengths)
        assert torch.equal(ours.indices.cpu(), theirs.indices)
        if theirs.estimate is not None:
            assert ours.estimate is not None
            assert torch.equal(ours.estimate.indices.cpu(), theirs.estimate.indices)
