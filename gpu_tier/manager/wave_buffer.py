"""RetroInfer's wave buffer: clusters in host memory, some of them cached on the device, put together in every step.

Three places and who writes them: the steady ring of a request (the engine, token by token), the block cache behind it
in the request's buffer of the arena (`commit`), and the blocks of the `WaveStore` in pinned host memory (`store`).

A step and layer:
1. `announce` begins to copy the ids of the selected clusters to the host, beside the estimation.
2. `resolve` waits for these ids only, looks every cluster up (read only) and uploads the runs of the execution buffer.
   Then it asks for the update: which clusters the cache takes in and gives up. That is decided on threads of its own,
   beside attention; with `async_update=False` before `resolve` returns.
3. `commit`, after attention was issued, waits for the decision and copies the admitted clusters out of the execution
   buffer into their places. The layer's next step finds them there by the order of the stream.

Invariants:
1. Order and bytes of the execution buffer depend on the selection alone.
2. A cluster is cached whole or not at all; one larger than the cache never. Every block that the table calls cached
   equals its bytes on the host when the layer's next plan is fetched.
3. What a step uses is not given up in that step.
4. Nobody reads or changes the table of a layer while its update is being decided: all who do wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gpu_tier.geometry import KVGeometry
from gpu_tier.index.wave_segment import WaveSegment
from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.manager.wave_store import WaveStore
from gpu_tier.pools.device_pool import DeviceKVPool
from gpu_tier.retrieval_config import RetroInferConfig
from gpu_tier.runtime import DeviceRuntime
from gpu_tier.types import ForwardBatch, ResidencyPlan, Selection, SteadyRing

__all__ = ["RawRows", "WaveBuffer", "WaveCounters"]


class RawRows(Protocol):
    """Reads a request's KV as bytes wherever it is; `KVReader` does."""

    def raw(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        """Return the rows of a part (0 for keys and latents, 1 for values), ``uint8 [n, H, row_bytes]``."""


@dataclass(frozen=True, slots=True)
class WaveCounters:
    """What happened so far, over all layers, rows and heads.

    Attributes:
        clusters: selected clusters that are not empty.
        cluster_hits: those that were cached.
        blocks: their blocks.
        block_hits: those that were cached.
        tokens: their tokens.
        token_hits: those that were cached.
        host_bytes: bytes read from host memory, exactly.
        admissions: clusters taken into the cache.
        evictions: clusters given up.
    """

    clusters: int
    cluster_hits: int
    blocks: int
    block_hits: int
    tokens: int
    token_hits: int
    host_bytes: int
    admissions: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Cached tokens per selected token; 1 when nothing was selected."""
        return self.token_hits / self.tokens if self.tokens else 1.0


class WaveBuffer:
    """See `gpu_tier.manager.policy.BlockPolicy` and `gpu_tier.index.wave_segment.SegmentSink`.

    The tensors of a plan are used again by the layer after the next.

    Args:
        geometry: of the model's KV.
        settings: of RetroInfer.
        store: where the clusters' KV is; owned by the buffer from now on.
        arena: the pool of the requests' buffers.
        execution: what plans are put together in.
        rows: reader of the KV that `store` takes over.
        runtime: of the device.
        max_requests: rows of the per-request tables.
        kernels: which implementation of the kernels.
        control: who looks up and decides: native (C++), reference (numpy) or auto (native if it can be built).

    Raises:
        KernelUnavailableError: control is native, and there is no compiler.
    """

    def __init__(
        self, geometry: KVGeometry, settings: RetroInferConfig, store: WaveStore, arena: DeviceKVPool,
        execution: ExecutionBuffer, rows: RawRows, runtime: DeviceRuntime, *, max_requests: int,
        kernels: str = "auto", control: str = "auto",
    ) -> None:  # fmt: skip
        raise NotImplementedError

    def hold(self, request: int, n_tokens: int) -> None:
        """See `BlockPolicy`."""
        raise NotImplementedError

    def cache_slots(self, n_tokens: int) -> int:
        """See `BlockPolicy`: whole blocks in `cache_ratio` of the tokens."""
        raise NotImplementedError

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """See `BlockPolicy`."""
        raise NotImplementedError

    def release(self, request: int) -> None:
        """See `BlockPolicy`."""
        raise NotImplementedError

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """See `SegmentSink`. Waits for the sizes of the clusters: once per segment.

        Raises:
            PoolExhaustedError: the store is full; nothing changed.
        """
        raise NotImplementedError

    def announce(self, layer_id: int, batch: ForwardBatch, selection: Selection) -> None:
        """See `BlockPolicy`."""
        raise NotImplementedError

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `BlockPolicy`."""
        raise NotImplementedError

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `BlockPolicy`."""
        raise NotImplementedError

    def host_source(self, layer_id: int) -> RowPool:
        """See `BlockPolicy`."""
        raise NotImplementedError

    @property
    def host_bytes(self) -> int:
        """See `BlockPolicy`."""
        raise NotImplementedError

    @property
    def counters(self) -> WaveCounters:
        """What happened so far."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads and give the host memory back. A second call does nothing."""
        raise NotImplementedError
