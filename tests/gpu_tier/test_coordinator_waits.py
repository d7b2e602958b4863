"""A decode step never waits for the device: it reads nothing of it, and its uploads go beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import retrieval_cases
import torch
from algorithm_rig import NoReading, no_synchronisation
from layer_traffic import Shape, Traffic
from retrieval_cases import ALGORITHMS
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.dma_copy import dma_copy
from kvcm.gpu_tier.runtime import upload

CASES: dict[str, dict[str, Any]] = {
    # The other two read keys back from the host.
    **{name: case for name, case in ALGORITHMS.items() if name not in ("oracle", "snapkv retrievable")},
    "quest device": {**ALGORITHMS["quest"], "residency": "device"},
    **retrieval_cases.CASES,
}
# Where the CPU controls, it reads which clusters were selected; and segments are read once, when they are clustered.
CASES.pop("retroinfer")
for name, case in CASES.items():
    if case["algorithm"] == "retroinfer":
        CASES[name] = {**case, "algo": {**case["algo"], "update_segment": 32}}


class _Uploads:
    """Knows whether a copy between devices goes through `upload`; kernels are looked at elsewhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_watching = False
        self.depth = 0
        for name in ("to", "cpu", "tolist"):
            monkeypatch.setattr(Tensor, name, self._watched(name, getattr(Tensor, name)))
        get = registry.get
        monkeypatch.setattr(registry, "get", lambda *args: self._unwatched(get(*args)))
        for module in [module for name, module in sys.modules.items() if name.startswith("kvcm.gpu_tier.")]:
            for name, run in (("upload", upload), ("dma_copy", dma_copy)):  # the latter's indices are on the host
                if getattr(module, name, None) is run:
                    monkeypatch.setattr(module, name, self._unwatched(run))

    def _watched(self, name: str, run: Any) -> Any:
        def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            moves = name != "to" or any(isinstance(arg, (torch.device, Tensor)) for arg in args)
            assert not (self.is_watching and not self.depth and moves), f"Tensor.{name} waits for the device"
            return run(tensor, *args, **kwargs)

        return watched

    def _unwatched(self, run: Any) -> Any:
        def unwatched(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            with _disable_current_modes():
                out = run(*args, **kwargs)
            self.depth -= 1
            return out

        return unwatched

    @contextmanager
    def watch(self) -> Iterator[None]:
        self.is_watching = True
        try:
            with NoReading():
                yield
        finally:
            self.is_watching = False


def step(traffic: Traffic, requests: list[int], watch: Any) -> None:
    """Run one decode step under a watch; what the engine itself does is outside of it."""
    c = traffic.coordinator
    with watch():
        batch = c.plan_decode(requests, len(requests) + 1)
        c.forward_begin(batch)
    for layer in range(traffic.shape.layers):
        q, k, v, extra = traffic._inputs(batch, layer)
        with watch():
            c.write_kv(layer, batch, k, v)
            meta, partials = c.attention_begin(q, k, v, layer, batch, **extra)
            out = c.attend(q, meta, partials, traffic.shape.sm_scale)
            c.attention_end(out, layer, batch)
    with watch():
        c.forward_end(batch)


def traffic_of(name: str, device: str = "cpu") -> tuple[Traffic, list[int]]:
    """Return requests that begin to decode."""
    traffic = Traffic(Shape(), {**CASES[name], "debug_checks": False}, device=device)
    requests = [traffic.begin(n, seed=n) for n in (70, 9, 55)]
    traffic.prompt(requests)
    return traffic, requests


@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_nothing_of_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic, requests = traffic_of(name)
    uploads = _Uploads(monkeypatch)
    traffic.decode(requests)  # and what happens once, when requests become sparse
    for _ in range(12):  # over borders of pages
        step(traffic, requests, uploads.watch)


def test_what_waits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = _Uploads(monkeypatch)
    for waits in (lambda x: x.to(torch.device("cpu")), lambda x: x.cpu(), lambda x: x[x > 0], lambda x: x.tolist()):
        x = torch.ones(2)
        with pytest.raises(AssertionError, match="waits for the device"), uploads.watch():
            waits(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_a_step_does_not_wait_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_TIER_KERNELS", "auto")
    traffic, requests = traffic_of(name, "cuda")
    for _ in range(9):  # whatever is compiled or allocated once
        step(traffic, requests, nullcontext)
    for _ in range(9):
        step(traffic, requests, no_synchronisation)
