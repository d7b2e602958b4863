"""Decode steps of full attention over some layers, all KV on the device: what retrieval is compared with.

Ours reads pages, torch's (flash and cuDNN) the same rows request by request. Each layer writes the new token before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from device_clock import DeviceClock, Samples
from device_run import DeviceRun
from report import Row
from sparse_system import random_rows
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.eval.model_shapes import Device, ModelShape
from kvcm.gpu_tier.eval.roofline import step_time, traffic
from kvcm.gpu_tier.kernels.decode_attn_paged import decode_attn_paged
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.runtime import DeviceRuntime

__all__ = ["DenseDecode", "dense_share", "fastest_dense"]


class DenseDecode:
    """Full attention of requests of one length.

    Args:
        shape: of the model, with the layers that are measured.
        batch: requests.
        n_tokens: tokens of each; rounded up to whole pages.
        clock: fills the pool.
        runtime: of the device.
    """

    def __init__(
        self, shape: ModelShape, batch: int, n_tokens: int, clock: DeviceClock, runtime: DeviceRuntime
    ) -> None:  # fmt: skip
        self._geometry = geometry = shape.geometry
        page, device = geometry.page_size, runtime.device
        self._pages = -(-n_tokens // page)
        self.pool = DeviceKVPool(geometry, batch * self._pages, runtime)
        clock.fill(self.pool.data, random_rows(geometry, device))
        self._table = torch.arange(batch * self._pages, dtype=torch.int32, device=device).view(batch, -1)
        self._lengths = torch.full((batch,), self._pages * page, dtype=torch.int32, device=device)
        self._written = torch.arange(1, batch + 1, device=device) * (self._pages * page) - 1
        self.q = torch.randn(batch, shape.num_q_heads, geometry.head_dim, device=device, dtype=torch.bfloat16)
        rows = (batch, geometry.num_kv_heads)
        self.k, self.v = (
            torch.randn(*rows, dims, device=device, dtype=torch.bfloat16)
            for dims in (geometry.head_dim, geometry.v_head_dim)
        )
        self._out = torch.empty(batch, shape.num_q_heads, geometry.v_head_dim, device=device)
        self._lse = torch.empty(batch, shape.num_q_heads, device=device)
        self._scale = geometry.head_dim**-0.5

    def ours(self) -> None:
        """One step by pages."""
        for layer in self._geometry.layers:
            self.pool.write(layer, self._written, self.k, self.v)
            kv, page = self.pool.layer(layer), self._geometry.page_size
            decode_attn_paged(self.q, kv, self._table, self._lengths, page, self._scale, self._out, self._lse)

    def torchs(self, backend: SDPBackend) -> None:
        """One step of torch's attention.

        Raises:
            RuntimeError: torch has no such attention for the shape.
        """
        q = self.q[:, :, None]
        with sdpa_kernel(backend):
            for layer in self._geometry.layers:
                self.pool.write(layer, self._written, self.k, self.v)
                kv = self.pool.layer(layer)
                assert kv.v is not None
                k, v = (
                    rows.typed.unflatten(0, (len(q), -1)).transpose(1, 2).to(torch.bfloat16) for rows in (kv.k, kv.v)
                )
                scaled_dot_product_attention(q, k, v, scale=self._scale, enable_gqa=True)


def fastest_dense(this: DeviceRun, case: str, dense: DenseDecode, is_graph: bool) -> tuple[str, Samples]:
    """Time full attention, ours and torch's, and return the faster with its name.

    Args:
        this: the run.
        case: for people.
        dense: the timed decoder.
        is_graph: whether steps are captured: as what they are compared with.
    """
    backends: Sequence[SDPBackend] = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    ways: dict[str, Callable[[], None]] = {"full, ours": dense.ours}
    for backend in backends if this.clock.is_gpu else (SDPBackend.MATH,):
        ways[f"full, torch {backend.name.lower()}"] = lambda backend=backend: dense.torchs(backend)  # type: ignore[misc]
    found = {}
    for name, step in ways.items():
        try:
            step()
        except RuntimeError as error:
            print(f"{case}: {name}: torch has none here: {error}".splitlines()[0])
            continue
        found[name] = this.time(f"{case}: {name}", step, is_graph=is_graph)
    best = min(found, key=lambda name: found[name].median)
    return best, found[best]


def dense_share(this: DeviceRun, shape: ModelShape, batch: int, n_tokens: int, seconds: float) -> float:
    """Return the share of the roofline that full attention reached in `seconds` over the layers of `shape`."""
    device = Device(this.peaks.hbm, this.peaks.h2d, this.peaks.flops)
    least = step_time(shape, device, traffic(shape, SparseConfig("full"), n_tokens, 0.0), batch).attention
    share = least / seconds
    case = f"n={n_tokens}, B={batch}: full"
    this.add(Row(case, "share of the roofline", share, "", target=">= 0.75"))
    return share
