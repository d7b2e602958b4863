"""PQCache's block cache: the middle tokens that are selected often are on the device, whole blocks of them.

Block b of a request holds the tokens ``sink + b·block`` to ``sink + (b + 1)·block - 1`` of all KV heads. A selected
token whose block is cached is read there, any other one on the host, row by row. After the attention of a layer the
`k_cache` blocks with the most selected tokens of all heads (of equals the first) are wanted in the cache: those that
are there count as used, and the others are loaded whole from the host, in the places of the blocks that the policy
gives up. Only blocks that are complete, all in the middle and all on the host are ever wanted.

With ``cache_unit="token"`` the same is done with single tokens of single heads: each head has its own places, and the
first ``k_cache·block`` selected tokens of each head are wanted. It is there to be compared with.

Everything is decided on the device and nothing waits for it; how blocks are admitted is told in
`gpu_tier.manager.block_admissions`. The plan's steady runs are the same in all layers and heads and are made once a
step, on the host (`gpu_tier.manager.execution_runs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError, StateError
from gpu_tier.kernels.row_pool import RowPool
from gpu_tier.kernels.token_runs import TokenPlaces, TokenPlan, token_runs
from gpu_tier.manager.block_admissions import BatchRows, BlockAdmissions, BlockStep
from gpu_tier.manager.cache_places import CachePlaces
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.manager.execution_runs import SteadyPlanner
from gpu_tier.manager.host_tokens import HostTokens
from gpu_tier.pools.transfer import KVTransfer
from gpu_tier.retrieval_config import PQCacheConfig
from gpu_tier.runtime import DeviceRuntime, upload
from gpu_tier.types import ExecutionPlan, ForwardBatch, ResidencyPlan, Selection, SteadyRing, SteadyZone

__all__ = ["BlockCacheCounters", "TokenBlockPolicy"]


@dataclass(frozen=True, slots=True)
class BlockCacheCounters:
    """What happened so far.

    Attributes:
        selected: selected tokens of all rows and heads, steady ones not counted.
        hits: those that were read in the cache.
        admissions: blocks (or tokens) that came into the cache.
        evictions: those that left it.
    """

    selected: int
    hits: int
    admissions: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Hits per selected token; 1 when nothing was selected."""
        return self.hits / self.selected if self.selected else 1.0


class TokenBlockPolicy:
    """See `gpu_tier.manager.policy.BlockPolicy`.

    Args:
        settings: of the algorithm; the cache's are used.
        execution: the buffer that plans are for.
        host_tokens: who holds which host pages; of single tokens.
        transfer: between the host pool and the arena in which requests have their places.
        runtime: of the device.
        max_requests: rows of the per-request tables.
        max_tokens: most tokens of a request.
        layers_at_once: layers whose admissions are decided together.
        kernels: which implementation of the kernels.
        debug_checks: check in every step that what is read is on the host; waits for the device.

    Raises:
        ConfigError: `host_tokens` counts items of several tokens.
    """

    def __init__(
        self, settings: PQCacheConfig, execution: ExecutionBuffer, host_tokens: HostTokens, transfer: KVTransfer,
        runtime: DeviceRuntime, *, max_requests: int, max_tokens: int, layers_at_once: int = 8,
        kernels: str = "auto", debug_checks: bool = False,
    ) -> None:  # fmt: skip
        if host_tokens.unit != 1:
            raise ConfigError("host_tokens", host_tokens.unit, "must count single tokens")
        self.geometry = transfer.geometry
        self._settings, self._execution, self._host, self._transfer = settings, execution, host_tokens, transfer
        self._runtime, self._kernels, self._debug_checks = runtime, kernels, debug_checks
        by_token = settings.cache_unit == "token"
        self._unit = 1 if by_token else settings.block
        self._max_requests = max_requests
        self._steady = SteadyPlanner(execution.tokens_per_row, runtime)
        self._cache = CachePlaces(
            layers=self.geometry.num_layers, max_requests=max_requests,
            heads=self.geometry.num_kv_heads if by_token else 1, places=settings.cache_tokens // self._unit,
            items=-(-max_tokens // self._unit), policy=settings.policy, seed=settings.seed, device=runtime.device,
        )  # fmt: skip
        self._slots = torch.full(
            (max_requests + 1, max(1, settings.cache_tokens)), -1, dtype=torch.int32, device=runtime.device
        )
        self._usable = torch.zeros(max_requests + 1, dtype=torch.int64, device=runtime.device)
        self._admissions = BlockAdmissions(
            settings, self._cache, self._slots, self._usable, host_tokens, transfer, runtime, layers_at_once
        )
        self._counts = torch.zeros(3, dtype=torch.int64, device=runtime.device)
        self._rows: BatchRows | None = None
        self._steps: dict[int, BlockStep] = {}

    plans_on_host = False

    # Requests.

    def hold(self, request: int, n_tokens: int) -> None:
        """See `BlockPolicy`: nothing is kept on the host beside the host pool."""

    def cache_slots(self, n_tokens: int) -> int:
        """See `BlockPolicy`: whole blocks, no more than the request has, `cache_tokens` at most."""
        block = self._settings.block
        return min(self._settings.cache_tokens, n_tokens // block * block)

    def admit(self, request: int, ring: SteadyRing, buffer_slots: Tensor) -> None:
        """See `BlockPolicy`."""
        self._steady.admit(request, ring, buffer_slots)
        cache = buffer_slots[ring.capacity :][: self._settings.cache_tokens]
        self._slots[request, : len(cache)] = upload(cache.int(), self._runtime.device)
        self._usable[request] = len(cache) // self._unit

    def release(self, request: int) -> None:
        """See `BlockPolicy`. Waits for admissions on their way: they read host pages and write the request's places."""
        if request not in self._steady:
            return
        self._admissions.abandon()
        self._steady.release(request)
        self._cache.reset(request)
        self._slots[request] = -1
        self._usable[request] = 0

    # A step of a layer.

    def announce(self, layer_id: int, batch: ForwardBatch, selection: Selection) -> None:
        """See `BlockPolicy`: nothing to prepare."""

    def resolve(self, layer_id: int, batch: ForwardBatch, selection: Selection, sparse_mask: Tensor) -> ResidencyPlan:
        """See `BlockPolicy`.

        Raises:
            ConfigError: the selection is not of single tokens of every KV head beside a steady zone.
            StateError: more tokens are steady than have places, or, with `debug_checks`, a token is not on the host.
        """
        zone = self._zone(selection)
        layer = self.geometry.layer_index(layer_id)
        self._admissions.wait_on_device(layer)
        steady = self._steady.plan(batch, zone)
        rows = self._rows_of(batch, sparse_mask)
        heads, width = selection.indices.shape[1:]
        plan = TokenPlan.empty(batch.rows, heads, steady.kind.shape[1] + width, self._counts)
        places = TokenPlaces(self._cache.place_of(layer), self._slots, self._host.host_loc, zone.sink, self._unit)
        token_runs(
            selection.indices, selection.lengths, rows.requests, rows.active, steady, places, plan, impl=self._kernels
        )
        if self._debug_checks:
            self._check_found()
        self._steps[layer] = BlockStep(batch, rows, zone, selection.indices)
        return ResidencyPlan(self._execution.table_of(batch.rows), execution=ExecutionPlan(plan.runs, plan.lens))

    def _rows_of(self, batch: ForwardBatch, sparse_mask: Tensor) -> BatchRows:
        """Return which rows of a batch select, the same in all layers of a step."""
        if self._rows is None or self._rows.batch is not batch or self._rows.sparse_mask is not sparse_mask:
            self._rows = BatchRows.of(batch, sparse_mask, self._max_requests)
        return self._rows

    def _check_found(self) -> None:
        lost = int(self._counts[2])
        self._counts[2] = 0
        if lost:
            raise StateError(f"{lost} selected tokens are neither cached nor on the host")

    def _zone(self, selection: Selection) -> SteadyZone:
        heads = selection.indices.shape[1]
        if selection.steady is None or selection.unit_tokens != 1 or heads != self.geometry.num_kv_heads:
            allowed = f"single tokens of {self.geometry.num_kv_heads} heads beside a steady zone"
            raise ConfigError("selection", (selection.steady, selection.unit_tokens, heads), allowed)
        return selection.steady

    def commit(self, layer_id: int, plan: ResidencyPlan) -> None:
        """See `BlockPolicy`: the wanted blocks of this layer, or of some at once, begin their way from the host."""
        layer = self.geometry.layer_index(layer_id)
        step = self._steps.pop(layer, None)
        if step is not None and self._settings.cache_tokens:
            self._admissions.add(layer, step)

    # What is seen from outside.

    def host_source(self, layer_id: int) -> RowPool:
        """See `BlockPolicy`: the host pool, in the order of tokens."""
        return RowPool(self._host.pool.data, self._host.pool.addressing, self.geometry.layer_index(layer_id))

    @property
    def host_bytes(self) -> int:
        """See `BlockPolicy`: none."""
        return 0

    def close(self) -> None:
        """See `BlockPolicy`; there is nothing."""

    @property
    def counters(self) -> BlockCacheCounters:
        """What happened so far; reading it waits for the device."""
        self._runtime.fence(self._runtime.record("upd"), "compute")
        return BlockCacheCounters(*self._counts[:2].tolist(), *self._admissions.counts.tolist())

    def cached_items(self, layer_id: int, request: int) -> Tensor:
        """Return the block (or token) in each place of a request, -1 for an empty one: ``int32 [1 or H, P]``.

        Blocks and tokens are counted from the end of the sink. For tests and metrics.
        """
        return self._cache.held(self.geometry.layer_index(layer_id), request)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache's tables on the device; its KV lies in the requests' buffers."""
        return self._cache.nbytes + self._slots.nbytes + self._usable.nbytes
