"""A decode step never waits for the device: it reads nothing of it, and its uploads go beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import retrieval_cases
import torch
from layer_traffic import Shape, Traffic
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvcm.gpu_tier.assembly import build
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.dma_copy import dma_copy
from kvcm.gpu_tier.runtime import upload

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "unique")
INDEXER = {"index_heads": 4, "index_dim": 16}
CASES: dict[str, dict[str, Any]] = {
    "full": {"algorithm": "full"},
    "full_offload": {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}},
    "streaming_llm": {"algorithm": "streaming_llm", "algo": {"page": 4, "window": 16}},
    "quest": {"algorithm": "quest", "algo": {"page": 4, "token_budget": 24, "skip_layers": 1}},
    "quest device": {"algorithm": "quest", "algo": {"page": 4, "token_budget": 24}, "residency": "device"},
    "dsa": {"algorithm": "dsa", "top_k": 16, "device_buffer_size": 20, "algo": INDEXER},
    "snapkv": {"algorithm": "snapkv", "algo": {"w_obs": 4, "cap": 16, "kernel": 3}},
    **retrieval_cases.CASES,
}
# Where the CPU controls, it reads which clusters were selected; and segments are read once, when they are clustered.
CASES.pop("retroinfer", None)
for name, case in CASES.items():
    if case["algorithm"] == "retroinfer":
        CASES[name] = {**case, "algo": {**case["algo"], "update_segment": 32}}
SHAPE = Shape(layers=3)


class _NoReading(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        waits = by_mask or name in WAITING
        assert not waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


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
            with _NoReading():
                yield
        finally:
            self.is_watching = False


def step(traffic: Traffic, requests: list[int], watch: Any) -> None:
    """Run one decode step under a watch; what the engine itself does is outside of it."""
    c = traffic.coordinator
    device = c.runtime.device
    with watch():
        batch = c.plan_decode(requests, len(requests) + 1)
        c.forward_begin(batch)
    for layer in range(traffic.shape.layers):
        q, k, v, extra = traffic._inputs(batch, layer)
        assert v is not None
        q, k, v, extra = q.to(device), k.to(device), v.to(device), {name: x.to(device) for name, x in extra.items()}
        with watch():
            c.write_kv(layer, batch, k, v)
            meta, partials = c.attention_begin(q, k, v, layer, batch, **extra)
            out = c.attend(q, meta, partials, traffic.shape.sm_scale)
            c.attention_end(out, layer, batch)
    with watch():
        c.forward_end(batch)


def traffic_of(name: str, device: str = "cpu") -> tuple[Traffic, list[int]]:
    settings = SparseConfig.parse({"page_size": SHAPE.page, **CASES[name]})
    coordinator = build(
        settings, SHAPE.geometry, num_q_heads=SHAPE.q_heads, sm_scale=SHAPE.sm_scale, device_pages=SHAPE.device_pages,
        max_requests=SHAPE.max_requests, max_tokens=SHAPE.max_tokens, device=device,
    )  # fmt: skip
    return Traffic(SHAPE, CASES[name], coordinator), []


@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_nothing_of_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic, requests = traffic_of(name)
    uploads = _Uploads(monkeypatch)
    requests += [traffic.begin(n, seed=n) for n in (70, 9, 55)]
    traffic.prompt(requests)
    traffic.decode(requests)  # and what happens once, when requests become sparse
    for _ in range(12):  # over borders of pages
        step(traffic, requests, uploads.watch)


def test_what_waits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = _Uploads(monkeypatch)
    for waits in (lambda x: x.to(torch.device("cpu")), lambda x: x.cpu(), lambda x: x[x > 0], lambda x: x.tolist()):
        x = torch.ones(2)
        with pytest.raises(AssertionError, match="waits for the device"), uploads.watch():
            waits(x)


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_a_step_does_not_wait_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_TIER_KERNELS", "auto")
    traffic, requests = traffic_of(name, "cuda")
    c = traffic.coordinator
    for n in (70, 9, 55):
        request = traffic.begin(n, seed=n)
        batch = c.plan_prefill([request], [n])
        c.forward_begin(batch)
        for layer in range(SHAPE.layers):
            q, k, v, extra = traffic._inputs(batch, layer)
            assert v is not None
            moved = {name: x.cuda() for name, x in extra.items()}
            c.write_kv(layer, batch, k.cuda(), v.cuda())
            c.attention_begin(q.cuda(), k.cuda(), v.cuda(), layer, batch, **moved)
            c.attention_end(q.cuda(), layer, batch)
        c.forward_end(batch)
        c.manager.wait_for_copies(request)
        c.prompt_finished(request)
        requests.append(request)
    for _ in range(9):  # whatever is compiled or allocated once
        step(traffic, requests, _nothing)
    for _ in range(9):
        step(traffic, requests, _no_synchronisation)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
